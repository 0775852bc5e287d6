"""Counts the bytes that the ranks of a run exchange, and the time that this takes, from the sizes of the model and the mesh.

`tests/unit/planning/test_traffic.py` compares the counts with those of real calls.
"""

import math
from dataclasses import dataclass

from tandem.model.distributed.layer_sizes import Layers
from tandem.model.distributed.mesh import MeshShape
from tandem.planning.gpus import GpuCount, Links

OVERLAPPED = 0.8  # the share of the exchange that is assumed to overlap with computation


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends (or receives, which is the same) for one micro-batch: forward and backward."""

    gathered: float = 0  # weights, by all-gather: for the forward and again for the backward pass, unless they are kept
    scattered: float = 0  # gradients, by reduce-scatter
    replicated: float = 0  # gradients, by all-reduce between replicas
    exchanged: float = 0  # queries, keys, values and results of attention, by all-to-all; 0 without context parallelism

    @property
    def reduced(self) -> float:
        return self.scattered + self.replicated

    @property
    def total(self) -> float:
        return self.gathered + self.reduced + self.exchanged

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(
            gathered=times * self.gathered,
            scattered=times * self.scattered,
            replicated=times * self.replicated,
            exchanged=times * self.exchanged,
        )


def traffic(
    layers: Layers,
    mesh: MeshShape,
    *,
    row_tokens: int,
    weight_bytes: int = 2,
    gradient_bytes: int = 4,
    number_bytes: int = 2,
    kept_for: float | None = None,
    summed_over: float = 1,
    recomputes: bool = False,
    num_trained: float | None = None,
) -> Traffic:
    """Return the bytes that one rank exchanges for one micro-batch of `row_tokens` tokens.

    `weight_bytes`, `gradient_bytes` and `number_bytes`: of a gathered weight, a reduced gradient, and a number in attention.
    `kept_for`: for how many micro-batches gathered weights are kept, with policy.parallel.reshard_after_forward=false.
    `summed_over`: for how many micro-batches gradients are summed together, with policy.parallel.reduce_once_per_step.
    `recomputes`: whether attention is recomputed in the backward pass. `num_trained`: weights with gradients; None: all.
    """
    shards = mesh.weight_shards
    others = (shards - 1) / shards  # the share of a tensor that a rank does not hold itself
    all_weights = layers.num_weights
    trained = all_weights if num_trained is None else num_trained
    gathers = all_weights * (2 if kept_for is None else 1 / kept_for)
    between_replicas = 2 * (mesh.replicate - 1) / mesh.replicate * trained / shards
    key_heads = math.lcm(layers.num_key_heads, mesh.context)
    per_token = (2 * layers.num_heads + 2 * key_heads) * layers.head_dim  # query, key, value, and the result
    own_tokens = row_tokens / mesh.context
    passes = 3 if recomputes else 2
    away = (mesh.context - 1) / mesh.context
    return Traffic(
        gathered=gathers * weight_bytes * others,
        scattered=trained * others * gradient_bytes / summed_over,
        replicated=between_replicas * gradient_bytes / summed_over,
        exchanged=layers.num_layers * passes * own_tokens * per_token * away * number_bytes,
    )


def of_forward_pass(both: Traffic, *, kept: bool, recomputes: bool = False) -> Traffic:
    """Return the part of the forward pass alone, as in a validation, of the traffic of a forward and backward pass.

    `kept`, `recomputes`: whether `both` was computed with `kept_for`, and with `recomputes`.
    """
    return Traffic(
        gathered=both.gathered if kept else both.gathered / 2, exchanged=both.exchanged / (3 if recomputes else 2)
    )


def exchange_seconds(sent: Traffic, mesh: MeshShape, gpus: GpuCount, links: Links) -> float:
    """Return the time that the traffic of a rank takes. Collectives follow each other.

    A collective inside a machine takes as long as its bytes over the link of a GPU. Where it crosses machines, all ranks of a
    machine share its network. A ring over several machines enters and leaves each machine once, so that weights that all ranks
    of a machine gather arrive there once.
    Example: two machines of 8 GPUs, and 16 shards that each gather 15 GB: 15 GB pass the network of a machine. If instead each
    machine has a replica of 8 shards, and a rank reduces 1 GB between them, there are 8 rings, and 8 GB pass.
    """
    here, shards, context = gpus.per_machine, mesh.weight_shards, mesh.context
    is_alone = gpus.machines == 1
    rings = 0.0 if is_alone or here % shards == 0 else max(1.0, here / shards)
    replica_rings = 0 if is_alone or mesh.replicate == 1 else min(here, shards)
    away = 0.0 if is_alone or here % context == 0 else max(1.0, context - here) / (context - 1)
    bytes_and_crossings = (
        (sent.gathered + sent.scattered, rings),
        (sent.replicated, replica_rings),
        (sent.exchanged, here * away),
    )
    return sum(
        max(size / links.inside, size * crossings / links.between) for size, crossings in bytes_and_crossings if size
    )


def efficiency(compute_seconds: float, traffic_seconds: float, overlapped: float) -> float:
    """Return compute time over total time, if this share of the exchange overlaps with computation."""
    hidden = min(traffic_seconds * overlapped, compute_seconds)
    return compute_seconds / (compute_seconds + traffic_seconds - hidden)

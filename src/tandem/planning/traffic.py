"""Counts the bytes that the ranks of a run exchange in a pack, from the sizes of the model and the mesh.

`tests/unit/planning/test_traffic.py` compares the counts with those of real calls.
"""

import math
from dataclasses import dataclass

from tandem.model.distributed.mesh import MeshShape


@dataclass(frozen=True, slots=True)
class Layers:
    """The sizes of a model that determine how much its ranks exchange."""

    num_layers: int
    weights_per_layer: int
    other_weights: int  # embeddings, head and the last norm
    num_heads: int
    num_key_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank sends (or receives, which is the same) for one pack: forward and backward."""

    gathered: (
        float  # weights, by all-gather: for the forward pass and again for the backward pass, unless they are kept
    )
    reduced: float  # gradients, by reduce-scatter, and by all-reduce between replicas
    exchanged: float  # queries, keys, values and results of attention, by all-to-all; 0 without context parallelism

    @property
    def total(self) -> float:
        return self.gathered + self.reduced + self.exchanged


def traffic(
    layers: Layers,
    mesh: MeshShape,
    *,
    row_tokens: int,
    weight_bytes: int = 2,
    gradient_bytes: int = 4,
    number_bytes: int = 2,
    kept_for: int | None = None,
    recomputes: bool = False,
) -> Traffic:
    """Return the bytes that one rank exchanges for one pack of `row_tokens` tokens.

    `weight_bytes`, `gradient_bytes` and `number_bytes`: of a gathered weight, a reduced gradient, and a number in attention.
    `kept_for`: for how many packs gathered weights are kept, with policy.parallel.reshard_after_forward=false.
    `recomputes`: whether attention is recomputed in the backward pass.
    """
    in_layers = layers.num_layers * layers.weights_per_layer
    shards = mesh.weight_shards
    others = (shards - 1) / shards  # the share of a tensor that a rank does not hold itself
    all_weights = in_layers + layers.other_weights
    gathers = all_weights * (2 if kept_for is None else 1 / kept_for)
    between_replicas = 2 * (mesh.replicate - 1) / mesh.replicate * all_weights / shards
    key_heads = math.lcm(layers.num_key_heads, mesh.context)
    per_token = (2 * layers.num_heads + 2 * key_heads) * layers.head_dim  # query, key, value, and the result
    own_tokens = row_tokens / mesh.context
    passes = 3 if recomputes else 2
    away = (mesh.context - 1) / mesh.context
    return Traffic(
        gathered=gathers * weight_bytes * others,
        reduced=(all_weights * others + between_replicas) * gradient_bytes,
        exchanged=layers.num_layers * passes * own_tokens * per_token * away * number_bytes,
    )


def efficiency(compute_seconds: float, traffic_seconds: float, overlapped: float) -> float:
    """Return compute time over total time, if this share of the exchange overlaps with computation."""
    hidden = min(traffic_seconds * overlapped, compute_seconds)
    return compute_seconds / (compute_seconds + traffic_seconds - hidden)

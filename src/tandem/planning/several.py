"""Estimates what the ranks of a run exchange, how long they wait for each other, and how fast they are together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.config.schema import Config
from tandem.model.distributed.layer_sizes import Layers
from tandem.packing.batches import GlobalBatch
from tandem.packing.packer import Packer
from tandem.packing.savings import num_tokens
from tandem.planning.gpus import GpuCount, Links
from tandem.planning.records import SeveralGpus
from tandem.planning.speed import FORWARD_SPEED
from tandem.planning.traffic import OVERLAPPED, Traffic, efficiency, exchange_seconds, of_forward_pass, traffic
from tandem.training.start.machine import Machine


@dataclass(frozen=True, slots=True)
class Distribution:
    """How the batches of a run are distributed over ranks."""

    fill: float  # share of the positions of all ranks that are not filler
    waiting: float  # share of the time that ranks wait for the one whose pack has the most attention
    micro_batches: float  # of a rank in a step, on average
    tokens: float  # of a micro-batch, on average


@dataclass(frozen=True, slots=True)
class Pace:
    """Factors from the seconds that one GPU needs to those of all GPUs of the run."""

    training: float = 1.0
    forward: float = 1.0


ALONE = Pace()


def distribute(packer: Packer, batches: Sequence[GlobalBatch]) -> Distribution:
    """Distribute batches over the ranks as training does."""
    tokens = num_tokens(packer)
    attention = 0 * tokens if packer.costs is None else packer.costs - tokens
    positions = costs = longest = 0.0
    sizes: list[int] = []
    for batch in batches:
        rounds = packer.rounds(batch.preferences, batch.bounds)
        sizes += [sum(round.length for round in together) for together in packer.together(rounds)]
        for round in rounds:
            of_ranks = np.array([round.length * _num_rows(packer, pack) for pack in round.packs])
            positions += of_ranks.sum()
            cost = of_ranks + np.array([attention[pack].sum() for pack in round.packs])
            costs += cost.sum()
            longest += len(cost) * cost.max()
    return Distribution(
        fill=sum(int(tokens[batch.preferences].sum()) for batch in batches) / positions,
        waiting=1 - costs / longest,
        micro_batches=len(sizes) / len(batches),
        tokens=sum(sizes) / len(sizes),
    )


def _num_rows(packer: Packer, pack: np.ndarray) -> int:
    return packer.num_rows(pack) if len(pack) else 1  # a pack without preferences is a row of filler


def sent_per_step(config: Config, machine: Machine, layers: Layers, given: Distribution) -> tuple[Traffic, Traffic]:
    """Return what a rank sends in a step, and in forward passes over as many packs. `layers`: of the model."""
    policy, lora = config.policy, machine.lora
    keeps, recomputes = not policy.parallel.reshard_after_forward, policy.activation_checkpointing != "none"
    itemsize = 2 if machine.precision == "bfloat16" else 4
    each = traffic(
        layers if lora is None or lora.quantization is None else layers.quantised(),
        machine.mesh,
        row_tokens=round(given.tokens),
        weight_bytes=itemsize,
        number_bytes=itemsize,
        kept_for=given.micro_batches if keeps else None,
        summed_over=given.micro_batches if policy.parallel.reduces_once(machine.mesh.weight_shards) else 1,
        recomputes=recomputes,
        num_trained=None if lora is None else lora.num_trained,
    )
    step = each * given.micro_batches
    return step, of_forward_pass(step, kept=keeps, recomputes=recomputes)


def combined(
    sent: tuple[Traffic, Traffic],
    given: Distribution,
    machine: Machine,
    *,
    gpus: GpuCount,
    links: Links,
    one_gpu_seconds: float | None,
) -> tuple[SeveralGpus, Pace]:
    """Return what several GPUs exchange and how fast they are.

    `sent`: of `sent_per_step`. `one_gpu_seconds`: of a training step on one GPU; None: not known.
    """
    step, forward = sent
    exchange, forward_exchange = (exchange_seconds(one, machine.mesh, gpus, links) for one in (step, forward))
    pace, computed, share = ALONE, None, None
    if one_gpu_seconds is not None:
        computed = one_gpu_seconds / gpus.total / (1 - given.waiting)
        share = efficiency(computed, exchange, OVERLAPPED)
        of_forward = efficiency(computed / FORWARD_SPEED, forward_exchange, OVERLAPPED)
        alone = gpus.total * (1 - given.waiting)
        pace = Pace(training=1 / (alone * share), forward=1 / (alone * of_forward))
    found = SeveralGpus(
        gpus=gpus,
        mesh=machine.mesh,
        links=links,
        sent=step,
        exchange_seconds=exchange,
        compute_seconds=computed,
        efficiency=share,
        waiting=given.waiting,
    )
    return found, pace

"""Estimates the memory and time of a configuration on a device, before any weights load."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tandem.config.losses import needs_reference
from tandem.config.schema import Config
from tandem.config.sections.parallel import DEFAULT_PARALLEL
from tandem.model.distributed.layer_sizes import Layers
from tandem.model.load import empty_model
from tandem.packing.batches import GlobalBatch
from tandem.packing.distribution import row_cost
from tandem.packing.packer import BLOCK, Packer, RankShare
from tandem.packing.savings import num_positions, num_tokens
from tandem.planning.cards import Card, card_of_device, data_sheet_pcie, find_card
from tandem.planning.gpus import GB, NO_OPTIONS, ONE_GPU, REACHED_SHARE, GpuCount, GpuOptions, planned_mesh
from tandem.planning.records import MemoryNeed, Rows, SeveralGpus, TimeNeed
from tandem.planning.several import ALONE, Pace, combined, distribute, sent_per_step
from tandem.planning.speed import (
    FORWARD_SPEED,
    ModelSize,
    Range,
    Work,
    size_of,
    start_range,
    time_range,
    training_seconds,
)
from tandem.training.host_memory import HostNeed, host_need
from tandem.training.memory import USABLE_SHARE, MemoryEstimate, device_memory, longest_micro_batch
from tandem.training.start.machine import Machine, check_machine, this_device
from tandem.training.start.plan import Plan, plan_steps
from tandem.training.start.setup import Inputs, check_models, plan_rows
from tandem.training.validation import portions

SAMPLED_BATCHES = 64  # batches of the first epoch that are packed to estimate the fill


@dataclass(frozen=True, slots=True)
class Target:
    """The device that a run is planned for."""

    device: torch.device
    memory: int  # in bytes
    card: Card | None  # None: a CPU
    is_here: bool  # whether it is in this machine
    gpus: GpuCount = ONE_GPU  # how many of them
    options: GpuOptions = NO_OPTIONS


@dataclass(frozen=True, slots=True)
class Outline:
    """The estimate of one configuration on one device."""

    plan: Plan
    machine: Machine
    need: MemoryEstimate
    rows: Rows
    work: Work  # of all training steps
    memory: MemoryNeed
    time: TimeNeed | None
    no_time: str
    host: HostNeed
    several: SeveralGpus | None


def find_target(gpu: str | None) -> Target:
    """Return the named card, or the device that a run on this machine uses."""
    if gpu is not None:
        card = find_card(gpu)
        return Target(torch.device("cuda"), card.memory_bytes, card, is_here=False)
    device = this_device()
    memory = device_memory(device)
    if device.type != "cuda":
        return Target(device, memory, None, is_here=True)
    return Target(device, memory, card_of_device(torch.cuda.get_device_name(device), memory), is_here=True)


def outline(inputs: Inputs, target: Target, size: ModelSize, layers: Layers) -> Outline:
    """Estimate one configuration on one device, or on several of them. `size`, `layers`: of the model."""
    machine = _machine(inputs, target)
    mesh, is_several = machine.mesh, machine.mesh.num_ranks > 1
    planned, need = plan_rows(inputs, machine, RankShare(0, mesh.data_parallel), memory=target.memory)
    batches = planned.batches.epoch(0)[: planned.num_steps]
    sampled = batches[:: -(-len(batches) // SAMPLED_BATCHES)]
    length, together = max(longest_micro_batch(planned.train, batch) for batch in sampled)
    shared = distribute(planned.train, sampled) if is_several else None
    fill = shared.fill if shared else _fill(planned.train, sampled)
    pairs = sum(batch.num_pairs for batch in batches)
    members = np.concatenate([batch.preferences for batch in batches])
    work = _work(planned.train, members, size, fill) * (planned.num_pairs / pairs)
    memory = _memory_need(inputs, target, machine, need, tokens=length * together)
    fixed = memory.total - memory.activations
    longest = int((memory.usable - fixed) / (need.per_token * planned.train.packs_per_micro_batch))
    rows = Rows(
        length=length,
        limit=planned.train.length,
        together=together,
        description=planned.rows,
        longest_that_fits=longest // BLOCK * BLOCK if longest >= BLOCK else None,
        fill=fill,
    )
    no_time = _why_no_time(machine, target)
    several, pace = None, ALONE

    def seconds(some: Work, num_updates: int = 0) -> float:  # on one GPU
        assert target.card is not None
        tokens = length * together // mesh.context
        if not some.tokens:
            return 0.0
        return training_seconds(size, some, tokens, inputs.config, target.card, num_updates=num_updates)

    if shared:
        links = target.options.links(target.card, target.gpus)
        sent = sent_per_step(inputs.config, machine, layers, shared)
        step = None if no_time else seconds(work, planned.num_steps) / planned.num_steps
        several, pace = combined(sent, shared, machine, gpus=target.gpus, links=links, one_gpu_seconds=step)
    copied = need.parts.all_states if inputs.config.policy.optimizer.offload else 0.0
    # States arrive and leave at the same time.
    copying = copied / (GB * REACHED_SHARE * data_sheet_pcie(target.card))
    given: dict[str, Any] = {"seconds": seconds, "pace": pace, "copying": copying}
    time = None if no_time else _time_need(inputs, planned, work, size, target, **given)
    host = host_need(need, inputs.config, lora=machine.lora, mesh=mesh, ranks_here=machine.ranks_here)
    return Outline(planned, machine, need, rows, work, memory, time, no_time, host, several)


def speed_of_one_gpu(inputs: Inputs, target: Target, size: ModelSize, layers: Layers) -> float | None:
    """Return the pairs per second of one GPU with the same batches. Return None if it is not known, or if they do not fit."""
    policy = inputs.config.policy.model_copy(update={"parallel": DEFAULT_PARALLEL})
    alone = replace(inputs, config=inputs.config.model_copy(update={"policy": policy}))
    found = outline(alone, replace(target, gpus=ONE_GPU, options=NO_OPTIONS), size, layers)
    fits = found.memory.verdict == "fits"
    return found.time.pairs_per_second if fits and found.time is not None else None


def _machine(inputs: Inputs, target: Target) -> Machine:
    """Choose precision and adapters for the device. Raise an error for settings that the run would refuse."""
    config, mesh, num_here = inputs.config, planned_mesh(inputs.config, target.gpus), target.gpus.per_machine
    machine = check_machine(config, inputs.source, target.device, mesh, ranks_here=num_here, is_here=target.is_here)
    check_models(inputs, machine)
    return machine


def _memory_need(inputs: Inputs, target: Target, machine: Machine, need: MemoryEstimate, tokens: int) -> MemoryNeed:
    """`tokens`: of the longest micro-batch."""
    reference = inputs.reference_source or inputs.source
    live = inputs.config.reference.mode == "live" and needs_reference(inputs.config.dpo.preference_loss)
    itemsize = (
        2 if machine.precision == "bfloat16" else 4
    )  # a frozen model keeps only the weights that it computes with
    num_frozen = size_of(empty_model(reference)).num_weights if live else 0
    return MemoryNeed(
        weights=need.parts.weights,
        gradients=need.parts.gradients,
        optimizer_states=need.parts.states,
        bfloat16_copy=need.parts.copy,
        reference=num_frozen * itemsize / machine.mesh.weight_shards,
        activations=need.temporary(tokens) - need.head - need.gathered,
        head=need.head,
        gathered=need.gathered,
        available=target.memory,
        usable=USABLE_SHARE * target.memory,
    )


def _fill(packer: Packer, batches: list[GlobalBatch]) -> float:
    tokens = num_tokens(packer)
    positions = sum(num_positions(packer, packer.bins(batch.preferences, batch.bounds)) for batch in batches)
    return sum(int(tokens[batch.preferences].sum()) for batch in batches) / positions


def _work(packer: Packer, members: np.ndarray, size: ModelSize, fill: float) -> Work:
    """Return the work of a pass over some preferences of a packer's set."""
    store, tokens = packer.store, num_tokens(packer)
    cost = row_cost(
        store.num_prompt_tokens,
        store.completion_lengths.astype(np.int64),
        store.num_completions,
        hidden_size=size.hidden,
        arrangement=packer.arrangement,
    )
    num = float(tokens[members].sum())
    return Work(
        tokens=num,
        scored=float(store.num_scored_tokens[members].sum()),
        attention=float(cost[members].sum()) / num,
        fill=fill,
    )


def _why_no_time(machine: Machine, target: Target) -> str:
    if target.card is None:
        return "not estimated without a GPU: speeds of CPUs differ too much. Name a card with --gpu"
    if target.card.tflops is None:
        return f"not estimated: the speed of {target.card.name} is not known. Name a similar card with --gpu"
    if machine.precision != "bfloat16":
        return f"not estimated: speeds were measured in bfloat16, and this run computes in {machine.precision}"
    return ""


def _time_need(
    inputs: Inputs,
    planned: Plan,
    work: Work,
    size: ModelSize,
    target: Target,
    *,
    seconds: Callable[..., float],
    pace: Pace,
    copying: float,
) -> TimeNeed:
    """`seconds`: of training on some work with so many updates, on one GPU. `copying`: of optimizer states, seconds per step."""
    config, card = inputs.config, target.card
    assert card is not None

    def forward(some: Work) -> float:
        return seconds(some) / FORWARD_SPEED * pace.forward

    def about(number: float) -> Range:
        return time_range(number, size, card, is_several=target.gpus.total > 1)

    trained = seconds(work, planned.num_steps) * pace.training + planned.num_steps * copying
    nothing = Work(tokens=0, scored=0)
    sets = [(packer, _validation_pairs(packer, config)) for packer in planned.validation.values()]
    complete = [_work(packer, np.arange(len(packer.store)), size, work.fill) for packer, _ in sets]
    measured = [_work(packer, members, size, work.fill) for packer, members in sets]
    compared, mode = needs_reference(config.dpo.preference_loss), config.reference.mode
    reference = sum(complete, _work(planned.train, np.arange(len(planned.train.store)), size, work.fill))
    if compared and mode == "live":  # every pass also computes the reference
        trained += forward(work)
    passes = num_validations(config, planned.num_steps, planned.val_period) * (2 if compared and mode == "live" else 1)
    return TimeNeed(
        start=start_range(size),
        reference=about(forward(reference) if compared and mode == "cached" else 0.0),
        training=about(trained),
        validation=about(forward(sum(measured, nothing)) * passes),
        pairs_per_second=planned.num_pairs / trained,
        copying=copying,
    )


def _validation_pairs(packer: Packer, config: Config) -> np.ndarray:
    """Return the preferences of a validation set that one validation measures."""
    size = config.dpo.val_global_batch_size or config.policy.train_global_batch_size
    most = config.dpo.val_batches
    return np.concatenate(portions(packer, size)[: most if most and most > 0 else None])


def num_validations(config: Config, num_steps: int, val_period: int) -> int:
    """Return how often a run validates: before the first step, every `val_period` steps, and after the last step."""
    dpo = config.dpo
    during = (num_steps - 1) // val_period if val_period > 0 else 0
    return int(dpo.val_at_start) + during + int(dpo.val_at_end)


def with_config(inputs: Inputs, config: Config) -> Inputs:
    """Return the inputs of a changed configuration with the same model and data."""
    return replace(inputs, config=config, schedule=plan_steps(inputs.sets, config))

"""Estimates the memory and time of a configuration on a device, before any weights load."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from tandem.config.losses import needs_reference
from tandem.config.schema import Config
from tandem.model.load import empty_model
from tandem.packing.batches import GlobalBatch
from tandem.packing.distribution import row_cost
from tandem.packing.packer import BLOCK, Packer
from tandem.packing.savings import num_positions, num_tokens
from tandem.planning.cards import Card, card_of_device, find_card
from tandem.planning.records import MemoryNeed, Rows, TimeNeed
from tandem.planning.speed import (
    FORWARD_SPEED,
    ModelSize,
    Work,
    size_of,
    start_range,
    time_range,
    training_seconds,
)
from tandem.training.memory import USABLE_SHARE, MemoryEstimate, device_memory, longest_micro_batch
from tandem.training.start.machine import Machine, check_machine, this_device
from tandem.training.start.plan import Plan, plan_steps
from tandem.training.start.setup import Inputs, plan_rows
from tandem.training.validation import portions

SAMPLED_BATCHES = 64  # batches of the first epoch that are packed to estimate the fill


@dataclass(frozen=True, slots=True)
class Target:
    """The device that a run is planned for."""

    device: torch.device
    memory: int  # in bytes
    card: Card | None  # None: a CPU
    is_here: bool  # whether it is in this machine


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


def outline(inputs: Inputs, target: Target, size: ModelSize) -> Outline:
    """Estimate one configuration on one device."""
    machine = _machine(inputs, target)
    planned, need = plan_rows(inputs, machine, memory=target.memory)
    batches = planned.batches.epoch(0)[: planned.num_steps]
    sampled = batches[:: -(-len(batches) // SAMPLED_BATCHES)]
    length, together = max(longest_micro_batch(planned.train, batch) for batch in sampled)
    fill = _fill(planned.train, sampled)
    pairs = sum(batch.num_pairs for batch in batches)
    members = np.concatenate([batch.preferences for batch in batches])
    work = _work(planned.train, members, size, fill) * (planned.num_pairs / pairs)
    memory = _memory_need(inputs, target, machine, need, tokens=length * together)
    fixed = memory.total - memory.activations
    longest = int((memory.usable - fixed) / (need.per_token * planned.train.packs_per_micro_batch))
    rows = Rows(
        length=length,
        together=together,
        description=planned.rows,
        longest_that_fits=longest // BLOCK * BLOCK if longest >= BLOCK else None,
        fill=fill,
    )
    no_time = _why_no_time(machine, target)
    time = None if no_time else _time_need(inputs, planned, work, size, target, row_tokens=length * together)
    return Outline(planned, machine, need, rows, work, memory, time, no_time)


def _machine(inputs: Inputs, target: Target) -> Machine:
    """Choose precision and adapters for the device. On another machine, packages may be installed that are missing here."""
    config, lora = inputs.config, inputs.config.policy.lora
    if target.is_here or lora.quantization is None:
        return check_machine(config, inputs.source, target.device)
    policy = config.policy.model_copy(update={"lora": lora.model_copy(update={"quantization": None})})
    machine = check_machine(config.model_copy(update={"policy": policy}), inputs.source, target.device)
    assert machine.lora is not None
    return replace(machine, lora=replace(machine.lora, quantization=lora.quantization))


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
        reference=num_frozen * itemsize,
        activations=need.temporary(tokens) - need.head,
        head=need.head,
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


def _time_need(inputs: Inputs, planned: Plan, work: Work, size: ModelSize, target: Target, row_tokens: int) -> TimeNeed:
    config, card = inputs.config, target.card
    assert card is not None

    def seconds(some: Work) -> float:
        return training_seconds(size, some, row_tokens, config, card) if some.tokens else 0.0

    trained = seconds(work)
    nothing = Work(tokens=0, scored=0)
    sets = [(packer, _validation_pairs(packer, config)) for packer in planned.validation.values()]
    complete = [_work(packer, np.arange(len(packer.store)), size, work.fill) for packer, _ in sets]
    measured = [_work(packer, members, size, work.fill) for packer, members in sets]
    compared, mode = needs_reference(config.dpo.preference_loss), config.reference.mode
    reference = sum(complete, _work(planned.train, np.arange(len(planned.train.store)), size, work.fill))
    if compared and mode == "live":  # every pass also computes the reference
        trained += seconds(work) / FORWARD_SPEED
    passes = num_validations(config, planned.num_steps, planned.val_period) * (2 if compared and mode == "live" else 1)
    return TimeNeed(
        start=start_range(size),
        reference=time_range(seconds(reference) / FORWARD_SPEED if compared and mode == "cached" else 0.0, size, card),
        training=time_range(trained, size, card),
        validation=time_range(seconds(sum(measured, nothing)) / FORWARD_SPEED * passes, size, card),
        pairs_per_second=planned.num_pairs / trained,
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

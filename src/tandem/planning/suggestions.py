"""Suggests settings and cards with which a run fits in memory. Each suggestion is planned again, so its numbers are right."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tandem.config.load import LoadedConfig
from tandem.config.sections.parallel import REST
from tandem.config.sections.policy import Policy
from tandem.data.store.sets import ProgressBar
from tandem.errors import TandemError
from tandem.launch.choose import GPUS_KEY
from tandem.model.distributed.layer_sizes import Layers
from tandem.planning.cards import larger_cards
from tandem.planning.estimate import Outline, Target, find_target, outline, with_config
from tandem.planning.gpus import NO_OPTIONS, GpuCount
from tandem.planning.records import Suggestion
from tandem.planning.speed import ModelSize
from tandem.storage.cache import GIB
from tandem.terminal.commands import install_command, tandem_command, with_override
from tandem.training.host_memory import OFFLOAD, host_memory
from tandem.training.memory import USABLE_SHARE
from tandem.training.start.setup import Inputs

CHECKPOINTING = "policy.activation_checkpointing"
STATES = {"policy.optimizer.state_dtype": "int8"}
WEIGHTS = {"policy.weights": "bfloat16_stochastic"}
LORA = {"policy.lora.enabled": True}
LORA_RATE_FACTOR = 10  # adapters take 10 to 100 times the learning rate of full training (docs/lora.md)
RATE_KEY = "policy.optimizer.kwargs.lr"
QUANTIZATION = "policy.lora.quantization"
OFFLOADED = {OFFLOAD: True}
NEED_GPU = {QUANTIZATION, OFFLOAD}  # refused on a CPU
CONTEXT = "policy.parallel.context"


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that need less memory. `keys`: their new values."""

    words: str
    keys: dict[str, Any]


UNCHANGED = Change("", {})
# From the change that affects the result least to the one that affects it most.
CHANGES = (
    Change("half of the activations computed again", {CHECKPOINTING: "selective"}),
    Change("activations computed again", {CHECKPOINTING: "full"}),
    Change("optimizer states in host memory", OFFLOADED),
    Change("optimizer states in host memory, activations computed again", {**OFFLOADED, CHECKPOINTING: "full"}),
    Change("8-bit optimizer states", STATES),
    Change("8-bit optimizer states, activations computed again", {**STATES, CHECKPOINTING: "full"}),
    Change("bfloat16 weights", WEIGHTS),
    Change("bfloat16 weights, optimizer states in host memory", {**WEIGHTS, **OFFLOADED}),
    Change(
        "bfloat16 weights, optimizer states in host memory, activations computed again",
        {**WEIGHTS, **OFFLOADED, CHECKPOINTING: "full"},
    ),
    Change("bfloat16 weights, 8-bit optimizer states", {**WEIGHTS, **STATES}),
    Change("bfloat16 weights, 8-bit states, activations computed again", {**WEIGHTS, **STATES, CHECKPOINTING: "full"}),
    Change(
        "bfloat16 weights, 8-bit states in host memory, activations computed again",
        {**WEIGHTS, **STATES, **OFFLOADED, CHECKPOINTING: "full"},
    ),
    Change("adapters only (LoRA)", LORA),
    Change("adapters only (LoRA), activations computed again", {**LORA, CHECKPOINTING: "full"}),
    Change(
        "adapters on 4-bit weights (QLoRA), activations computed again",
        {**LORA, QUANTIZATION: "nf4", CHECKPOINTING: "full"},
    ),
)
# Only on several GPUs. They do not change the result.
DIVIDED = {"policy.parallel.replicate": 1, "policy.parallel.shard": REST}
CHANGES_OF_SEVERAL = (
    Change("weights divided among all GPUs", DIVIDED),
    Change("weights divided among all GPUs, activations computed again", {**DIVIDED, CHECKPOINTING: "full"}),
    *(Change(f"rows divided among {size} GPUs", {CONTEXT: size}) for size in (2, 4, 8)),
    *(
        Change(f"rows divided among {size} GPUs, activations computed again", {CONTEXT: size, CHECKPOINTING: "full"})
        for size in (2, 4, 8)
    ),
)
GPUS_OF_A_MACHINE, MOST_TIMES = 8, 16  # more GPUs are tried up to a machine with 8, and up to 16 times as many machines


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans changed versions of a run whose model and data are already open."""

    loaded: LoadedConfig
    inputs: Inputs
    size: ModelSize
    layers: Layers
    price_per_hour: float | None = None  # of the card that is planned for
    known: dict[tuple[str, int, GpuCount], Outline | None] = field(default_factory=dict)

    def plan(self, keys: dict[str, Any], target: Target) -> Outline | None:
        """Plan the run with other settings. Return None if these settings do not work, or change nothing."""
        if target.device.type == "cpu" and NEED_GPU & keys.keys():
            return None
        place = (str(keys), target.memory, target.gpus)
        if place not in self.known:
            self.known[place] = self._plan(keys, target)
        return self.known[place]

    def _plan(self, keys: dict[str, Any], target: Target) -> Outline | None:
        try:
            config = self.loaded.with_overrides(self.overrides(keys)).config
            if keys and config == self.inputs.config:
                return None
            return outline(with_config(self.inputs, config), replace(target, is_here=False), self.size, self.layers)
        except TandemError:
            return None

    def overrides(self, keys: dict[str, Any]) -> list[str]:
        """Return the overrides of the command line with these keys changed."""
        found = list(self.loaded.overrides)
        for key, value in keys.items():
            found = with_override(found, key, value)
        return found

    def command(self, name: str, keys: dict[str, Any], options: Sequence[str] = ()) -> str:
        return tandem_command(name, *self.loaded.file_arguments, *self.overrides(keys), *options)

    def suggestion(self, words: str, keys: dict[str, Any], changed: Outline, target: Target) -> Suggestion:
        """Return the suggestion to train with these keys, on the card and the machine that are planned for.

        How the ranks of several machines are started depends on the cluster, so for them the command plans.
        """
        gpus = target.gpus
        if gpus.machines > 1:
            command = self.plan_command(keys, target)
        else:
            cluster, count = self.loaded.config.cluster, {}
            if cluster.gpus_per_node != ("all" if gpus.total == 1 else gpus.per_machine):
                count[GPUS_KEY] = gpus.per_machine
            if cluster.num_nodes > 1:
                count["cluster.num_nodes"] = 1
            command = self.command("train", keys | count)
        cost = None if changed.time is None else changed.time.cost(self.price_per_hour, gpus.total)
        return Suggestion(words, command, changed.memory, changed.time, cost)

    def plan_command(self, keys: dict[str, Any], target: Target) -> str:
        """Return the command that plans for the same cards, but maybe another number of them."""
        card = [] if target.is_here or target.card is None else ["--gpu", target.card.name]
        price = [] if self.price_per_hour is None else ["--price-per-hour", f"{self.price_per_hour:g}"]
        return self.command("plan", keys, [*card, *target.options.arguments(target.gpus), *price])


def suggest(planner: Planner, target: Target, bar: ProgressBar) -> tuple[Suggestion, ...]:
    """Return changes with which the run fits: shorter rows, settings, and the smallest larger card."""
    is_several = target.gpus.total > 1
    changes = [_with_rate_of_adapters(change, planner.inputs.config.policy) for change in CHANGES]
    changes = [*(CHANGES_OF_SEVERAL if is_several else ()), *changes]
    with bar("Trying settings", len(changes) + 2) as advance:
        found = list(_shorter_rows(planner, target))
        advance(1)
        fitting: list[Change] = []
        for change in changes:
            # A change that contains one that fits would give up more than it has to.
            is_needed = not any(one.keys.keys() <= change.keys.keys() for one in fitting)
            if is_needed and (better := _fitting(planner, change, target)):
                fitting.append(change)
                found.append(better)
            advance(1)
        if is_several and target.device.type == "cuda":
            found += _more_gpus(planner, target)
        found += _larger_cards(planner, target, [UNCHANGED] if found else [UNCHANGED, *changes])
        advance(1)
    return tuple(found)


def _with_rate_of_adapters(change: Change, policy: Policy) -> Change:
    """Return the change with a learning rate for adapters, if it enables them: one for all weights is too low for them."""
    if policy.lora.enabled or not change.keys.keys() >= LORA.keys():
        return change
    rate = float(f"{LORA_RATE_FACTOR * policy.optimizer.kwargs.lr:.6g}")
    return Change(f"{change.words}, {LORA_RATE_FACTOR} times the learning rate", {**change.keys, RATE_KEY: rate})


def _fitting(planner: Planner, change: Change, target: Target) -> Suggestion | None:
    changed = planner.plan(change.keys, target)
    if changed is None or changed.memory.verdict != "fits":
        return None
    if OFFLOAD in change.keys and target.is_here and changed.host.total > host_memory():
        return None
    return planner.suggestion(_words(change, changed, target), change.keys, changed, target)


def _more_gpus(planner: Planner, target: Target) -> list[Suggestion]:
    """Return the smallest number of GPUs with which the run fits, twice, four times, ... as many as planned."""
    per_machine, machines = target.gpus.per_machine, target.gpus.machines
    while machines < MOST_TIMES * target.gpus.machines:
        if per_machine < GPUS_OF_A_MACHINE:
            per_machine *= 2
        else:
            machines *= 2
        more = replace(target, gpus=GpuCount(per_machine, machines))
        changed = planner.plan({}, more)
        if changed is not None and changed.memory.verdict == "fits":
            where = f"{machines} machines with {per_machine} GPUs each" if machines > 1 else f"{per_machine} GPUs"
            cost = None if changed.time is None else changed.time.cost(planner.price_per_hour, more.gpus.total)
            command = planner.plan_command({}, more)
            return [Suggestion(where, command, changed.memory, changed.time, cost)]
    return []


def _larger_cards(planner: Planner, target: Target, changes: Sequence[Change]) -> list[Suggestion]:
    """Return the least change that fits on a larger card, and the smallest card on which one of the changes fits."""
    found: list[Suggestion] = []
    for change in changes:
        here = planner.plan(change.keys, target)
        if here is None:
            continue
        for card in larger_cards(target.memory):
            # Rows are as short as they can be where a run does not fit, so no other card needs less memory for it.
            is_too_small = here.memory.total > USABLE_SHARE * card.memory_bytes
            if is_too_small or (found and card.memory_bytes >= found[-1].memory.available):
                continue
            other = replace(find_target(card.name), gpus=target.gpus)
            changed = planner.plan(change.keys, other)
            if changed is not None and changed.memory.verdict == "fits":
                words = f"{card.name}, {_words(change, changed, other)}" if change.words else card.name
                given = replace(target.options, link=None, network=None)  # another card has other links
                count = given.arguments(other.gpus) if given != NO_OPTIONS or other.gpus.total > 1 else []
                command = planner.command("plan", change.keys, ["--gpu", card.name, *count])
                found.append(Suggestion(words, command, changed.memory, changed.time))
                break
    return [found[0], found[-1]] if len(found) > 1 else found


def _words(change: Change, changed: Outline, target: Target) -> str:
    needs_package = QUANTIZATION in change.keys and importlib.util.find_spec("bitsandbytes") is None
    words = f"{change.words}; first {install_command('qlora')}" if needs_package else change.words
    where = " in each machine" if target.gpus.machines > 1 else ""
    needs_host = OFFLOAD in change.keys
    return f"{words}; needs {changed.host.total / GIB:,.1f} GiB of host memory{where}" if needs_host else words


def _shorter_rows(planner: Planner, target: Target) -> Iterator[Suggestion]:
    """Yield the longest row length that fits, if it holds every preference, and if rows are packed."""
    packing = planner.inputs.config.policy.packing
    now = planner.plan({}, target)
    if now is None or packing.mode == "none" or now.rows.longest_that_fits is None:
        return
    # The length that is set is the longest of several, and a batch may take a longer one than now.
    length = min(now.rows.longest_that_fits, now.rows.length)
    keys: dict[str, Any] = {"policy.packing.pack_length": length}
    if length < int(now.plan.train.store.longest.max()) or length >= now.rows.length:
        return
    changed = planner.plan(keys, target)
    if changed is not None and changed.memory.verdict == "fits":
        yield planner.suggestion(f"rows of {length:,} tokens", keys, changed, target)

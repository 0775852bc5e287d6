"""Checks a configuration against the model, the data and the machine, and returns the Setup of a run. No weights are loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.config.losses import needs_reference
from tandem.config.schema import Config
from tandem.config.tracked import (
    TrackedMetric,
    check_direction,
    check_early_stopping,
    check_exported_best,
    tracked_metric,
)
from tandem.data.store.machines import ALONE, Machines
from tandem.data.store.selection import Preferences
from tandem.data.store.sets import ProgressBar, Sets, no_bar, open_sets
from tandem.data.text.template import Template, make_template
from tandem.data.text.tokenizer import check_export, load_tokenizer
from tandem.errors import ConfigError
from tandem.loss.objective import check_user_losses
from tandem.model.architecture import check_packable
from tandem.model.checks.positions import check_positions
from tandem.model.distributed.layers import check_layers
from tandem.model.distributed.mesh import SINGLE_RANK_MESH, MeshShape
from tandem.model.files.source import ModelSource, find_model, find_source, find_tokenizer
from tandem.model.load import attention_kind
from tandem.model.lora.layers import LoraPlan
from tandem.packing.packer import SINGLE_RANK, Packer, RankShare, make_packer
from tandem.report.trackers.tracking import check_packages
from tandem.storage.cache import check_cache_dir, check_writable
from tandem.training.host_memory import host_need, offload_advice, refuse_full_host
from tandem.training.memory import (
    MemoryEstimate,
    RowLength,
    auto_row_length,
    describe_rows,
    estimate_memory,
    refuse_certain_overflow,
    refuse_large_masks,
)
from tandem.training.optimizer import check_scheduler, highest_rate
from tandem.training.run.directory import checkpoint_dir
from tandem.training.start.machine import Machine, check_machine
from tandem.training.start.plan import Plan, Schedule, plan_steps


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that is known before weights load: the model, how the model is computed, and the plan for the data."""

    config: Config
    device: torch.device
    precision: str
    compiles: bool
    source: ModelSource
    lora: LoraPlan | None
    reference_source: ModelSource | None  # None if the reference is the start model
    template: Template
    plan: Plan
    offload: str = ""  # how to move optimizer states to the host, for advice; empty if that would not help

    @property
    def tracked(self) -> TrackedMetric | None:
        """The metric that ranks checkpoints; None if the newest checkpoints are kept instead of the best ones."""
        named = self.config.checkpointing.metric_name
        return tracked_metric(named, list(self.plan.validation)) if named or self.config.dpo.validates else None

    def checkpoint_dir(self, run: Path) -> Path:
        """Return the checkpoint directory.

        If run.dir and checkpointing.checkpoint_dir are both set and differ, this is checkpoint_dir. Otherwise it is `checkpoints`
        in the run directory.
        """
        return checkpoint_dir(self.config, run)

    @property
    def validation_batch_size(self) -> int:
        """The number of validation pairs that are packed together."""
        return self.config.dpo.val_global_batch_size or self.config.policy.train_global_batch_size

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype of the trained weights."""
        return torch.float32 if self.config.policy.weights == "float32" else torch.bfloat16

    @property
    def uses_reference(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return needs_reference(self.config.dpo.preference_loss)

    @property
    def ends_with_epochs(self) -> bool:
        """Whether dpo.max_num_epochs ends the run before dpo.max_num_steps."""
        return self.plan.num_steps < (self.config.dpo.max_num_steps or 0)


def set_up(
    config: Config,
    device: torch.device,
    bar: ProgressBar = no_bar,
    share: RankShare = SINGLE_RANK,
    memory: int | None = None,
    mesh: MeshShape = SINGLE_RANK_MESH,
    machines: Machines = ALONE,
    ranks_here: int = 1,
    *,
    needs_weights: bool = True,
) -> Setup:
    """Tokenise the data and run every check that does not need the weights.

    `share`: the part of each batch that this rank computes. `memory`: the smallest device memory of all ranks, in bytes, so that
    every rank chooses the same row length; None: the memory of this device.
    `machines`: those whose first ranks call this function together, and tokenise together. The other ranks call it later, so
    nothing else in it may wait for another rank. `ranks_here`: ranks on this machine. `needs_weights`: as in `find_source`.
    """
    check_packages(config.logger)
    check_user_losses(config.dpo)
    given = config.reference.cache_dir
    if given is not None and config.reference.mode == "cached" and needs_reference(config.dpo.preference_loss):
        check_writable(Path(given), f"reference.cache_dir = {given}:", "Choose another reference.cache_dir.")
    attention_kind(config.policy, device, None)
    source = check_model(config, needs_weights=needs_weights)
    attention_kind(config.policy, device, source.config)
    machine = check_machine(config, source, device, mesh, ranks_here=ranks_here)
    inputs = open_inputs(config, source, bar, needs_weights=needs_weights, machines=machines)
    return fit_to_machine(inputs, machine, share, memory)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The model, the data and the schedule of a run. They are the same on every machine."""

    config: Config
    source: ModelSource
    reference_source: ModelSource | None
    template: Template
    sets: Sets
    schedule: Schedule


def check_model(config: Config, *, needs_weights: bool = True) -> ModelSource:
    """Find and check the model, and check the settings that need neither data nor a device.

    `needs_weights`: as in `find_source`.
    """
    check_cache_dir()
    check_scheduler(config.policy)
    source = find_model(config.policy, needs_weights=needs_weights)
    check_packable(source, config.policy)
    return source


def open_inputs(
    config: Config,
    source: ModelSource,
    bar: ProgressBar = no_bar,
    *,
    needs_weights: bool = True,
    machines: Machines = ALONE,
) -> Inputs:
    """Tokenise and check the sets, and plan the steps of the run.

    `needs_weights`: of reference.model, as in `find_source`. `machines`: as in `set_up`.
    """
    folder = find_tokenizer(config.policy, source)
    tokenizer = load_tokenizer(folder)
    check_export(tokenizer, folder, source.config)
    template = make_template(tokenizer, config.policy.tokenizer)
    reference_source = _find_reference(config, source, tokenizer, needs_weights=needs_weights)
    sets = open_sets(config, template, bar, machines)
    _check_sets(sets, config, source)
    check_positions(sets, source, reference_source)
    return Inputs(
        config=config,
        source=source,
        reference_source=reference_source,
        template=template,
        sets=sets,
        schedule=plan_steps(sets, config),
    )


def fit_to_machine(
    inputs: Inputs, machine: Machine, share: RankShare = SINGLE_RANK, memory: int | None = None
) -> Setup:
    """Choose row lengths for the device and return the Setup. Raise an error if the run does not fit in memory.

    `memory`: as in `set_up`.
    """
    config, source = inputs.config, inputs.source
    plan, offload = fit_plan(inputs, machine, share, memory)
    has_layers = check_models(inputs, machine)
    return Setup(
        config=config,
        device=machine.device,
        precision=machine.precision,
        compiles=machine.compiles and has_layers,
        source=source,
        lora=machine.lora,
        reference_source=inputs.reference_source,
        template=inputs.template,
        plan=plan,
        offload=offload,
    )


def check_models(inputs: Inputs, machine: Machine) -> bool:
    """Return whether the layers of the models are known (`check_layers`). Raise ConfigError if the run needs them to be.

    Return True, unchecked, if the run does not depend on it.
    """
    policy, num_ranks = inputs.config.policy, machine.mesh.num_ranks
    if not machine.compiles and num_ranks == 1 and policy.activation_checkpointing == "none":
        return True
    models = [one for one in (inputs.source, inputs.reference_source) if one is not None]
    return all(check_layers(one, policy, num_ranks) for one in models)


def fit_plan(
    inputs: Inputs, machine: Machine, share: RankShare = SINGLE_RANK, memory: int | None = None
) -> tuple[Plan, str]:
    """Choose row lengths for the device and plan the packing. Raise an error if the run does not fit in memory.

    Return the plan, and how to move optimizer states to the host (`offload_advice`). `memory`: as in `set_up`.
    """
    config, device = inputs.config, machine.device
    plan, need = plan_rows(inputs, machine, share, memory)
    for packer in (plan.train, *plan.validation.values()):
        longest = min(packer.length, int(packer.sizes.max()))
        refuse_large_masks(packer.length, longest, config.policy, device, inputs.source.config, memory=memory)
    host = host_need(need, config, lora=machine.lora, mesh=machine.mesh, ranks_here=machine.ranks_here)
    if config.policy.optimizer.offload:
        refuse_full_host(host, machine.ranks_here)
    given: dict[str, Any] = {"device": device, "memory": memory, "offload": offload_advice(need, host, config, device)}
    refuse_certain_overflow(need, plan.train, plan.batches.epoch(0)[0], config.policy, **given)
    return plan, given["offload"]


def plan_rows(
    inputs: Inputs, machine: Machine, share: RankShare = SINGLE_RANK, memory: int | None = None
) -> tuple[Plan, MemoryEstimate]:
    """Choose row lengths for the device, and plan the packing. Return the plan and the memory that it is expected to need.

    The plan may not fit in memory. `memory`: as in `set_up`.
    """
    config, source, device, schedule = inputs.config, inputs.source, machine.device, inputs.schedule
    sizes = {"lora": machine.lora, "precision": machine.precision, "mesh": machine.mesh}
    need = estimate_memory(source, config.policy, device, **sizes)
    usual = auto_row_length(need, config.policy, device, memory)
    train, validation = _packers(inputs.sets, config, source, usual=usual, share=share)
    plan = Plan(
        sets=inputs.sets,
        train=train,
        validation=validation,
        rows=describe_rows(train, config.policy, usual),
        batches=schedule.batches,
        num_steps=schedule.num_steps,
        num_pairs=schedule.num_pairs,
        val_period=schedule.val_period,
        save_period=schedule.save_period,
        highest_rate=highest_rate(config.policy, schedule.num_steps),
    )
    return plan, need


def _packers(
    sets: Sets, config: Config, source: ModelSource, usual: RowLength, share: RankShare
) -> tuple[Packer, dict[str, Packer]]:
    """Return the packer of the training set, and a dict from name to packer for the validation sets.

    All packers use the same row lengths where possible, so that layers are compiled only once.
    """
    packing, pairs = config.policy.packing, config.policy.train_global_batch_size
    shared = {"seed": config.run.seed, "share": share, "hidden_size": source.config.get_text_config().hidden_size}
    rows = {"usual_auto": usual.tokens, "shortest_auto": usual.shortest}
    train = make_packer(sets.train, packing, **rows, pairs_per_batch=pairs, **shared)
    validation = {
        name: make_packer(store, packing, usual_auto=train.length, pairs_per_batch=None, **shared)
        for name, store in sets.validation.items()
    }
    return train, validation


def _check_sets(sets: Sets, config: Config, source: ModelSource) -> None:
    """Check the settings that refer to sets (the tracked metric and the validation samples), and the token ids in the sets."""
    tracked = tracked_metric(config.checkpointing.metric_name, list(sets.validation))
    check_direction(tracked, higher_is_better=config.checkpointing.higher_is_better)
    if config.checkpointing.metric_name and tracked and tracked.split != "train" and not config.dpo.validates:
        raise ConfigError(
            f"checkpointing.metric_name = {config.checkpointing.metric_name}: no validation is configured, so this "
            "metric would never be measured. Set dpo.val_period, dpo.val_at_start or dpo.val_at_end, or track train:loss."
        )
    check_early_stopping(config.dpo, tracked, saves=config.checkpointing.enabled)
    check_exported_best(config.export.checkpoint, config.dpo, tracked, saves=config.checkpointing.enabled)
    if config.logger.num_val_samples_to_print and not sets.validation:
        raise ConfigError(
            f"logger.num_val_samples_to_print = {config.logger.num_val_samples_to_print}, but there is no validation set to "
            "take prompts from. Set data.validation, or set the number to 0."
        )
    for store in (sets.train, *sets.validation.values()):
        check_vocabulary(store, source)


def _find_reference(config: Config, source: ModelSource, tokenizer: Any, *, needs_weights: bool) -> ModelSource | None:
    """Return the source of reference.model. Raise ConfigError if its vocabulary differs from the policy's."""
    name = config.reference.model
    if name is None:
        return None
    other = find_source("reference.model", name, None, needs_weights=needs_weights)
    check_packable(other, config.policy)
    check_same_vocabulary(other, source, tokenizer)
    return other


def check_same_vocabulary(other: ModelSource, source: ModelSource, tokenizer: Any) -> None:
    """Refuse a reference that does not have the vocabulary of the policy and its tokenizer."""
    place = other.place
    if other.vocabulary != source.vocabulary:
        raise ConfigError(
            f"{place}: its vocabulary has {other.vocabulary} tokens and that of {source.name} has "
            f"{source.vocabulary}, but policy and reference must read the same tokens. Choose a reference with the same "
            "vocabulary."
        )
    if (other.folder / "tokenizer.json").is_file() and hasattr(tokenizer, "get_vocab"):
        theirs = {number: token for token, number in load_tokenizer(other.folder).get_vocab().items()}
        for token, number in tokenizer.get_vocab().items():
            if theirs.get(number, token) != token:
                raise ConfigError(
                    f"{place}: token {number} is {theirs[number]!r} in its tokenizer and {token!r} in the "
                    "policy's, but policy and reference must read the same tokens. Choose a reference with the same vocabulary."
                )


def check_vocabulary(store: Preferences, source: ModelSource) -> None:
    highest = store.highest_token_id
    if highest >= source.vocabulary:
        raise ConfigError(
            f"{source.place}: the tokenizer gives token id {highest}, but the model has only {source.vocabulary} tokens. "
            "Use the tokenizer that belongs to the model (policy.tokenizer.name)."
        )

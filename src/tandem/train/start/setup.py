"""From a configuration to everything a run needs before weights load: stores, packers, schedule, and the checks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.config.losses import BETA, LOSS_ARGUMENTS, SFT_TERM, needs_reference, reads, spelled
from tandem.config.schema import Config
from tandem.config.tracked import TrackedMetric, check_direction, check_early_stopping, tracked_metric
from tandem.data.preflight import Preflight, preflights
from tandem.data.store.selection import Preferences
from tandem.data.store.sets import ProgressBar, Sets, columns_in_words, no_bar, open_sets
from tandem.data.text.template import Template, make_template
from tandem.data.text.tokenizer import check_export, load_tokenizer
from tandem.errors import ConfigError
from tandem.model.checks.positions import check_positions
from tandem.model.distributed.layers import check_layers
from tandem.model.files.source import ModelSource, find_model, find_source, find_tokenizer
from tandem.model.load import attention_kind, check_packable, describe_attention, dropouts
from tandem.model.lora.layers import LoraPlan
from tandem.packing.batches import Batches
from tandem.packing.packer import ALONE, Packer, Share, make_packer
from tandem.report.trackers.tracking import check_packages
from tandem.storage.cache import check_cache_dir, check_writable, real_path
from tandem.terminal.printable import listed
from tandem.train.adamw import state_bytes
from tandem.train.memory import (
    RowLength,
    expected_need,
    refuse_large_masks,
    refuse_what_is_too_large,
    usual_row,
    why,
)
from tandem.train.optimizer import check_scheduler, highest_rate, schedule_in_words
from tandem.train.start.machine import Machine, check_machine
from tandem.train.start.plan import Plan, plan_steps, sets_in_words

COUNTED_EPOCHS = 1000  # whose pairs are counted one by one: people set a million where the steps end a run
# What policy.activation_checkpointing does to layers, in words.
AGAIN = {
    "none": "",
    "selective": "; half of their products computed again in the backward",
    "full": "; all of them computed again in the backward",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is known before any weights load."""

    config: Config
    device: torch.device
    precision: str
    compiles: bool
    source: ModelSource
    lora: LoraPlan | None
    reference_source: ModelSource | None  # another model as the reference
    template: Template
    sets: Sets
    train: Packer
    rows: str  # how long they are, and why
    validation: dict[str, Packer]
    batches: Batches
    num_steps: int
    num_pairs_trained: int
    highest_rate: float  # that the schedule reaches in those steps

    @property
    def tracked(self) -> TrackedMetric | None:
        """The metric that ranks checkpoints; None where their age does."""
        named = self.config.checkpointing.metric_name
        return tracked_metric(named, list(self.validation)) if named or self.config.dpo.validates else None

    def checkpoint_dir(self, run: Path) -> Path:
        """Of a run: inside it, unless a place of their own is given beside run.dir."""
        given = self.config.checkpointing.checkpoint_dir
        if given is None or self.config.run.dir is None or real_path(given) == real_path(run):
            return run / "checkpoints"
        return Path(given)

    @property
    def validation_batch_size(self) -> int:
        """Pairs that are packed together."""
        return self.config.dpo.val_global_batch_size or self.config.policy.train_global_batch_size

    def packers(self) -> dict[str, Packer]:
        """The training set and every validation set, by split."""
        return {"train": self.train, **{f"validation-{name}": packer for name, packer in self.validation.items()}}

    def preflights(self) -> list[Preflight]:
        return preflights(self.sets)

    def computation(self) -> str:
        """Where and how, in words."""
        where = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "the CPU"
        layers = "compiled, which takes a while the first time" if self.compiles else "not compiled"
        attention = describe_attention(self.config.policy, self.device)
        again = AGAIN[self.config.policy.activation_checkpointing]
        return f"on {where}; attention: {attention}; layers: {layers}{again}"

    def choices(self) -> list[tuple[str, str]]:
        """What decides what is learned, in words, with the values in force."""
        c, dpo = self.config, self.config.dpo
        averaging = {True: "per token", False: "summed"}
        sets = c.data.training_sets
        weights = ", ".join(f"{s.data_path} {s.weight:g}" for s in sets) if any(s.weight != 1 for s in sets) else ""
        template = "none (raw text)" if self.template.source is None else "chat template"
        return [
            ("model", _named(c.policy.model_name, self.source.folder)),
            ("text", template),
            *sets_in_words(self.sets, c),
            *columns_in_words(self.sets),
            (
                "loss",
                f"({spelled(dpo.preference_loss)}) x {dpo.preference_loss_weight:g} + sft x {dpo.sft_loss_weight:g}"
                f"{self._loss_settings()}",
            ),
            *([("beta", f"{dpo.reference_policy_kl_penalty:g}")] if reads(dpo.preference_loss, BETA) else []),
            (
                "log-probabilities",
                f"{averaging[dpo.per_token]} in the preference loss, "
                f"{averaging[dpo.sft_average_log_probs]} in the SFT loss",
            ),
            *([("SFT term", SFT_TERM[dpo.sft_average_log_probs])] if dpo.sft_loss_weight else []),
            ("pairing", c.data.pairing),
            *([("weights of sets", weights)] if weights else []),
            *([("duplicates", c.data.duplicates)] if c.data.duplicates != "keep" else []),
            ("over-long", f"{c.data.overlong} beyond {c.policy.max_total_sequence_length} tokens"),
            ("batch", f"{c.policy.train_global_batch_size} pairs{self._in_packs()}"),
            (
                "length",
                f"steps: {self.num_steps}; pairs used: {self.num_pairs_trained:,} of {self._pairs_of_epochs()}; "
                f"epochs: {dpo.max_num_epochs}{self._before_steps()}; seed: {c.run.seed}{self._stops_early()}",
            ),
            (
                "optimizer",
                f"AdamW, learning rate {c.policy.optimizer.kwargs.lr:g}{self._reached()}, "
                f"weight decay {c.policy.optimizer.kwargs.weight_decay:g}, clipping at {c.policy.max_grad_norm}",
            ),
            ("schedule", schedule_in_words(c.policy, self.num_steps)),
            *([("adapters", self._adapters())] if self.lora else []),
            ("precision", f"{self.precision} computation over {self._weights()}"),
            ("export rounding", c.export.rounding),
            ("reference", f"{c.reference.mode}, {self._compared_with()}" if self.compares else "none"),
            ("dropout", self._dropout()),
        ]

    @property
    def weights_dtype(self) -> torch.dtype:
        """Of the weights that are trained."""
        return torch.float32 if self.config.policy.weights == "float32" else torch.bfloat16

    @property
    def compares(self) -> bool:
        """Whether the loss compares the policy with a reference."""
        return needs_reference(self.config.dpo.preference_loss)

    def _compared_with(self) -> str:
        if self.reference_source is not None:
            return _named(self.reference_source.name, self.reference_source.folder)
        if self.lora is None:
            return "the model as it starts"
        return "the base model" if self.lora.start is None else "the base model with the adapter it starts from"

    def _adapters(self) -> str:
        assert self.lora is not None
        lora = self.lora
        return (
            f"LoRA, dim {lora.dim}, alpha {lora.alpha:g}{' / sqrt(dim)' if lora.rslora else ''}, on {len(lora.targets)} layers "
            f"({listed(lora.names)}); {lora.num_trained:,} parameters trained, {lora.num_frozen:,} frozen"
            + (f"; starting from {lora.start.folder}" if lora.start else "")
        )

    def _dropout(self) -> str:
        own, lost = self.config.policy.lora.dropout, dropouts(self.source.config)
        drawn = f"{own:g} of the adapters' inputs, in training steps" if own else "0"
        return f"{drawn} (the model's own {lost} is switched off)" if lost else drawn

    def _weights(self) -> str:
        policy = self.config.policy
        # Gradients are float32.
        size = self.weights_dtype.itemsize + 4 + 2 * state_bytes(policy.optimizer.state_dtype)
        states = f"{policy.optimizer.state_dtype} optimizer states, {size:.0f} bytes"
        if self.lora is None:
            rounded = "" if policy.weights == "float32" else f", rounded {policy.weights.removeprefix('bfloat16_')}"
            return f"{str(self.weights_dtype).removeprefix('torch.')} weights{rounded}, {states} a parameter"
        frozen = self.lora.quantization or str(self.lora.dtype).removeprefix("torch.")
        return f"frozen {frozen} weights; adapters in float32, {states} a trained parameter"

    def _loss_settings(self) -> str:
        """What the chosen losses read, and what else is not as it would be by itself."""
        dpo, fields = self.config.dpo, type(self.config.dpo).model_fields
        usual = {name: field.default for name, field in fields.items()}
        own = [name for name in LOSS_ARGUMENTS if reads(dpo.preference_loss, name)]
        # A setting that is 0 by itself is switched off: only another value is worth a word.
        shown = [name for name in own if usual[name] or getattr(dpo, name) != usual[name]]
        shown += [name for name in ("ld_alpha", "wpo", "f_divergence", "f_alpha") if getattr(dpo, name) != usual[name]]
        return "".join(f", {name} {_as_written(getattr(dpo, name))}" for name in shown)

    @property
    def ends_with_epochs(self) -> bool:
        """Whether the epochs hold fewer steps than dpo.max_num_steps."""
        return self.num_steps < (self.config.dpo.max_num_steps or 0)

    def _pairs_of_epochs(self) -> str:
        """How many pairs the epochs hold, those of last short batches included; of very many, those of one."""
        epochs = self.config.dpo.max_num_epochs
        if epochs > COUNTED_EPOCHS:
            return f"{self.batches.num_pairs_of(0):,} an epoch"
        return f"{sum(self.batches.num_pairs_of(epoch) for epoch in range(epochs)):,}"

    def _before_steps(self) -> str:
        return f", which end before dpo.max_num_steps={self.config.dpo.max_num_steps}" if self.ends_with_epochs else ""

    def _stops_early(self) -> str:
        patience = self.config.dpo.early_stopping_patience
        return "" if patience is None else f"; at most {patience} validations without a better {self.tracked}"

    def _reached(self) -> str:
        """The highest rate, if the schedule does not come to the one that is named."""
        named, highest = f"{self.config.policy.optimizer.kwargs.lr:g}", f"{self.highest_rate:g}"
        return "" if highest == named else f" (at most {highest} is reached)"

    def _in_packs(self) -> str:
        """How many of the packs that the set was packed into make a batch, if it was."""
        if self.batches.packs is None:
            return ""
        pairs = self.batches.pairs_per_pack()
        packs = max(1, round(self.config.policy.train_global_batch_size / pairs.mean()))
        return (
            f", about {packs} of {len(pairs):,} packs of {pairs.mean():.1f} pairs on average, filled by whole packs of "
            f"{self.train.length:,} tokens ({self.train.algorithm})"
        )


def set_up(
    config: Config, device: torch.device, bar: ProgressBar = no_bar, share: Share = ALONE, memory: int | None = None
) -> Setup:
    """Read, tokenise and check everything that can be told wrong without the weights. `share`: this worker's.

    `memory`: of the smallest device of all ranks, so that all choose the same rows; None: of this one. Ranks run this at
    different times, so nothing in it may wait for another.
    """
    check_packages(config.logger)
    given = config.reference.cache_dir
    if given is not None and config.reference.mode == "cached" and needs_reference(config.dpo.preference_loss):
        check_writable(Path(given), f"reference.cache_dir = {given}:", "Choose another reference.cache_dir.")
    attention_kind(config.policy, device)
    source = check_model(config)
    machine = check_machine(config, source, device)
    return fit_rows(open_inputs(config, source, bar), machine, share, memory)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run works on, whatever machine it runs on."""

    config: Config
    source: ModelSource
    reference_source: ModelSource | None
    template: Template
    sets: Sets
    plan: Plan


def check_model(config: Config) -> ModelSource:
    """What is wrong whatever the data and the machine: of the schedule, and of the model."""
    check_cache_dir()
    check_scheduler(config.policy)
    source = find_model(config.policy)
    check_packable(source, config.policy)
    return source


def open_inputs(config: Config, source: ModelSource, bar: ProgressBar = no_bar) -> Inputs:
    """Tokenise and check the sets, and plan the steps over them."""
    named = find_tokenizer(config.policy, source)
    tokenizer = load_tokenizer(named)
    check_export(tokenizer, named, source.config)
    template = make_template(tokenizer, config.policy.tokenizer)
    reference_source = _other_reference(config, source, tokenizer)
    sets = open_sets(config, template, bar)
    _check_sets(sets, config, source)
    check_positions(sets, source, reference_source)
    return Inputs(config, source, reference_source, template, sets, plan_steps(sets, config))


def fit_rows(inputs: Inputs, machine: Machine, share: Share = ALONE, memory: int | None = None) -> Setup:
    """Rows as long as the device's memory allows, or `memory`, if given; refused where a run cannot fit."""
    config, source, device, plan = inputs.config, inputs.source, machine.device, inputs.plan
    need = expected_need(source, config.policy, machine.lora, machine.precision, share.num_ranks, device)
    usual = usual_row(need, config.policy, device, memory)
    train, validation = _packers(inputs.sets, config, source, usual, share)
    for packer in (train, *validation.values()):
        refuse_large_masks(packer.length, min(packer.length, int(packer.sizes.max())), config.policy, device, memory)
    refuse_what_is_too_large(need, train, plan.batches.epoch(0)[0], config.policy, device, memory)
    compiles = machine.compiles
    if compiles or share.num_ranks > 1 or config.policy.activation_checkpointing != "none":
        models = [one for one in (source, inputs.reference_source) if one is not None]
        compiles = all(check_layers(one, config.policy, share.num_ranks) for one in models) and compiles
    return Setup(
        config,
        device,
        machine.precision,
        compiles,
        source,
        machine.lora,
        inputs.reference_source,
        inputs.template,
        inputs.sets,
        train,
        why(train, config.policy, usual),
        validation,
        plan.batches,
        plan.num_steps,
        plan.num_pairs,
        highest_rate(config.policy, plan.num_steps),
    )


def _packers(
    sets: Sets, config: Config, source: ModelSource, usual: RowLength, share: Share
) -> tuple[Packer, dict[str, Packer]]:
    """Of the training set and of every validation set, whose rows have the same lengths: nothing more is compiled."""
    packing, pairs = config.policy.packing, config.policy.train_global_batch_size
    of_all = {"seed": config.run.seed, "share": share, "hidden_size": source.config.get_text_config().hidden_size}
    rows = {"usual_auto": usual.tokens, "shortest_auto": usual.shortest}
    train = make_packer(sets.train, packing, **rows, pairs_per_batch=pairs, **of_all)
    validation = {
        name: make_packer(store, packing, usual_auto=train.length, pairs_per_batch=None, **of_all)
        for name, store in sets.validation.items()
    }
    return train, validation


def _check_sets(sets: Sets, config: Config, source: ModelSource) -> None:
    """What the configuration asks of the sets that only they can tell."""
    tracked = tracked_metric(config.checkpointing.metric_name, list(sets.validation))
    check_direction(tracked, higher_is_better=config.checkpointing.higher_is_better)
    if config.checkpointing.metric_name and tracked and tracked.split != "train" and not config.dpo.validates:
        raise ConfigError(
            f"checkpointing.metric_name = {config.checkpointing.metric_name}: nothing is ever validated (dpo.val_period, "
            "val_at_start, val_at_end). Validate, or track train:loss."
        )
    check_early_stopping(config.dpo, tracked, saves=config.checkpointing.enabled)
    if config.logger.num_val_samples_to_print and not sets.validation:
        raise ConfigError(
            f"logger.num_val_samples_to_print = {config.logger.num_val_samples_to_print}, but there is no validation set to "
            "take prompts from. Give data.validation, or set it to 0."
        )
    for store in (sets.train, *sets.validation.values()):
        _check_vocabulary(store, source)


def _other_reference(config: Config, source: ModelSource, tokenizer: Any) -> ModelSource | None:
    """The model named as the reference; refused where it would read the policy's token ids as other tokens."""
    name = config.reference.model
    if name is None:
        return None
    other = find_source("reference.model", name, None)
    check_packable(other, config.policy)
    if other.vocabulary != source.vocabulary:
        raise ConfigError(
            f"reference.model = {name}: it knows {other.vocabulary} tokens, {source.name} {source.vocabulary}; a reference reads "
            "the policy's tokens. Choose one with the same vocabulary."
        )
    if (other.folder / "tokenizer.json").is_file() and hasattr(tokenizer, "get_vocab"):
        theirs = {number: token for token, number in load_tokenizer(other.folder).get_vocab().items()}
        for token, number in tokenizer.get_vocab().items():
            if theirs.get(number, token) != token:
                raise ConfigError(
                    f"reference.model = {name}: its tokenizer calls token {number} {theirs[number]!r}, the policy's {token!r}; a "
                    "reference reads the policy's tokens. Choose one with the same vocabulary."
                )
    return other


def _as_written(value: Any) -> str:
    """As in a configuration: true, not True."""
    return value if isinstance(value, str) else json.dumps(value)


def _named(name: str, folder: Path) -> str:
    return name if Path(name).resolve() == folder else f"{name} ({folder})"


def _check_vocabulary(store: Preferences, source: ModelSource) -> None:
    highest = store.highest_token_id
    if highest >= source.vocabulary:
        raise ConfigError(
            f"policy.model_name = {source.name}: the tokenizer gives token id {highest}, but the model knows only "
            f"{source.vocabulary} tokens. Use the tokenizer that belongs to the model (policy.tokenizer.name)."
        )

"""From a configuration to everything a run needs before weights load: stores, packers, schedule, and the checks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.cache import check_cache_dir
from tandem.config.losses import BETA, LOSS_ARGUMENTS, averages, needs_reference, reads, spelled
from tandem.config.schema import Config
from tandem.config.tracked import TrackedMetric, check_direction, tracked_metric
from tandem.data.preflight import Preflight, preflights
from tandem.data.selection import Preferences
from tandem.data.sets import ProgressBar, Sets, no_bar, open_sets
from tandem.data.template import Template, make_template
from tandem.data.tokenizer import check_export, load_tokenizer
from tandem.errors import ConfigError, DataError
from tandem.model.load import attention_in_words, attention_kind, check_packable, check_varlen, dropouts, has_experts
from tandem.model.lora import LoraPlan, plan_lora
from tandem.model.parallel import check_layers
from tandem.model.source import ModelSource, find_model, find_source, find_tokenizer
from tandem.packing.packer import ALONE, Packer, Share, make_packer, prepared_lengths
from tandem.packing.packs import open_packs
from tandem.packing.schedule import Batches
from tandem.train.adamw import state_bytes
from tandem.train.optimizer import check_scheduler, highest_rate
from tandem.train.row_length import (
    RowLength,
    expected_need,
    refuse_large_masks,
    refuse_what_is_too_large,
    usual_row,
    why,
)
from tandem.train.trackers.feed import check_packages

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
        if given is None or self.config.run.dir is None or Path(given).resolve() == run.resolve():
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
        attention = attention_in_words(self.config.policy, self.device)
        again = AGAIN[self.config.policy.activation_checkpointing]
        return f"on {where}; attention: {attention}; layers: {layers}{again}"

    def choices(self) -> list[tuple[str, str]]:
        """What decides what is learned, in words, with the values in force."""
        c, dpo = self.config, self.config.dpo
        total = sum(self.batches.num_pairs_of(epoch) for epoch in range(dpo.max_num_epochs))
        averaging = {True: "per token", False: "summed"}
        sets = c.data.training_sets
        weights = ", ".join(f"{s.data_path} {s.weight:g}" for s in sets) if any(s.weight != 1 for s in sets) else ""
        template = "none (raw text)" if self.template.source is None else "chat template"
        return [
            ("model", _named(c.policy.model_name, self.source.folder)),
            ("text", template),
            (
                "loss",
                f"({spelled(dpo.preference_loss)}) x {dpo.preference_loss_weight:g} + sft x {dpo.sft_loss_weight:g}"
                f"{self._loss_settings()}",
            ),
            *([("beta", f"{dpo.reference_policy_kl_penalty:g}")] if reads(dpo.preference_loss, BETA) else []),
            (
                "log-probabilities",
                f"{averaging[dpo.preference_average_log_probs or averages(dpo.preference_loss)]} in the preference loss, "
                f"{averaging[dpo.sft_average_log_probs]} in the SFT loss",
            ),
            ("pairing", c.data.pairing),
            *([("weights of sets", weights)] if weights else []),
            ("over-long", f"{c.data.overlong} beyond {c.policy.max_total_sequence_length} tokens"),
            ("batch", f"{c.policy.train_global_batch_size} pairs{self._in_packs()}"),
            (
                "length",
                f"steps: {self.num_steps}; pairs used: {self.num_pairs_trained:,} of {total:,}; "
                f"epochs: {dpo.max_num_epochs}; seed: {c.run.seed}",
            ),
            (
                "optimizer",
                f"AdamW, learning rate {c.policy.optimizer.kwargs.lr:g}{self._reached()}, "
                f"weight decay {c.policy.optimizer.kwargs.weight_decay:g}, clipping at {c.policy.max_grad_norm}",
            ),
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
            f"({', '.join(lora.names)}); {lora.num_trained:,} parameters trained, {lora.num_frozen:,} frozen"
            + (f"; starting from {lora.start.folder}" if lora.start else "")
        )

    def _dropout(self) -> str:
        own, lost = self.config.policy.lora.dropout, dropouts(self.source.config)
        drawn = f"{own:g} of the adapters' inputs, in training steps" if own else "0"
        return f"{drawn} (the model's own {lost} is switched off)" if lost else drawn

    def _weights(self) -> str:
        policy = self.config.policy
        # Weights and gradients are of one dtype.
        size = 2 * self.weights_dtype.itemsize + 2 * state_bytes(policy.optimizer.state_dtype)
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


def set_up(config: Config, device: torch.device, bar: ProgressBar = no_bar, share: Share = ALONE) -> Setup:
    """Read, tokenise and check everything that can be told wrong without the weights. `share`: this worker's."""
    check_cache_dir()
    check_packages(config.logger)
    check_scheduler(config.policy)
    attention_kind(config.policy, device)
    source = find_model(config.policy)
    check_packable(source, config.policy)
    precision = config.policy.precision
    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" else "float32"
    check_varlen(source, config.policy, precision, device)
    _check_weights(config, precision)
    lora = plan_lora(source, config.policy.lora, device, precision)
    named = find_tokenizer(config.policy, source)
    tokenizer = load_tokenizer(named)
    check_export(tokenizer, named, source.config)
    template = make_template(tokenizer, config.policy.tokenizer)
    reference_source = _other_reference(config, source, tokenizer)
    sets = open_sets(config, template, bar)
    _check_sets(sets, config, source)
    need = expected_need(source, config.policy, lora, precision, share.num_workers, device)
    usual = usual_row(need, config.policy, device)
    train, validation = _packers(sets, config, source, usual, share)
    for packer in (train, *validation.values()):
        refuse_large_masks(packer.length, min(packer.length, int(packer.sizes.max())), config.policy, device)
    batches = Batches(
        train.store.num_pairs,
        config.policy.train_global_batch_size,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        drop_last=config.data.drop_last,
        spans=sets.spans if any(span.weight != 1 for span in sets.spans) else (),
        packs=open_packs(train) if config.policy.packing.mode == "dataset" else None,
    )
    _check_packs(batches, train)
    num_steps, num_pairs = _length(batches, config)
    refuse_what_is_too_large(need, train, batches.epoch(0)[0], config.policy, device)
    highest = highest_rate(config.policy, num_steps)
    compiles = _compiles(config, device, precision, source)
    if compiles or share.num_workers > 1 or config.policy.activation_checkpointing != "none":
        compiles = check_layers(source, config.policy, share.num_workers) and compiles
    return Setup(
        config,
        device,
        precision,
        compiles,
        source,
        lora,
        reference_source,
        template,
        sets,
        train,
        why(train, config.policy, usual),
        validation,
        batches,
        num_steps,
        num_pairs,
        highest,
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


def _check_weights(config: Config, precision: str) -> None:
    weights = config.policy.weights
    if weights == "float32":
        return
    if config.policy.lora.enabled:
        raise ConfigError(
            f"policy.weights = {weights}: with adapters the model's own weights are frozen, and the few that are trained are "
            "float32. Leave it out."
        )
    if precision != "bfloat16":
        raise ConfigError(
            f"policy.weights = {weights}: bfloat16 weights are computed with in bfloat16, not in {precision}. Set "
            "policy.precision=bfloat16, or leave policy.weights out."
        )


def _named(name: str, folder: Path) -> str:
    return name if Path(name).resolve() == folder else f"{name} ({folder})"


def _compiles(config: Config, device: torch.device, precision: str, source: ModelSource) -> bool:
    wanted = config.policy.compile
    # transformers' float32 experts split rows by numbers that only the device knows; bfloat16 ones do not.
    cannot = precision == "float32" and has_experts(source.config)
    if wanted is True and cannot:
        raise ConfigError(
            f"policy.compile = true: the experts of {source.name} cannot be compiled in float32. "
            "Use policy.compile=auto, or policy.precision=bfloat16."
        )
    return wanted is True or (wanted == "auto" and device.type == "cuda" and not cannot)


def _length(batches: Batches, config: Config) -> tuple[int, int]:
    """Steps of the whole run, and the pairs in them."""
    counts = [batch.num_pairs for epoch in range(config.dpo.max_num_epochs) for batch in batches.epoch(epoch)]
    counts = counts[: config.dpo.max_num_steps]
    if not counts:
        have = batches.num_pairs_of(0)
        raise DataError(
            f"the training set has {have} pairs, fewer than one batch of {batches.batch_size}. "
            f"Set policy.train_global_batch_size={have} or less, or data.drop_last=false."
        )
    return len(counts), sum(counts)


def _check_packs(batches: Batches, train: Packer) -> None:
    if batches.packs is not None and (most := int(batches.pairs_per_pack().max())) > batches.batch_size:
        others = ", ".join(str(length) for length in sorted(prepared_lengths(train.store)))
        raise ConfigError(
            f"policy.packing.mode = dataset: a pack of {train.length} tokens holds {most} pairs, more than a batch of "
            f"{batches.batch_size}. Raise policy.train_global_batch_size, or lower policy.packing.pack_length"
            f"{f' (prepared are {others})' if others else ''}."
        )


def _check_vocabulary(store: Preferences, source: ModelSource) -> None:
    highest = store.highest_token_id
    if highest >= source.vocabulary:
        raise ConfigError(
            f"policy.model_name = {source.name}: the tokenizer gives token id {highest}, but the model knows only "
            f"{source.vocabulary} tokens. Use the tokenizer that belongs to the model (policy.tokenizer.name)."
        )

"""Describes a Setup in words: the settings that determine the trained model, and how the run is computed."""

import json
from pathlib import Path
from typing import Any

import torch

from tandem.config.losses import BETA, LOSS_ARGUMENTS, SFT_TERM, reads, spelled
from tandem.config.schema import Config
from tandem.data.store.selection import Preferences
from tandem.data.store.sets import Sets, columns_in_words
from tandem.data.text.template import Template
from tandem.model.architecture import architecture_of, is_multimodal
from tandem.model.files.source import ModelSource
from tandem.model.load import describe_attention, empty_model
from tandem.model.lora.layers import LoraPlan
from tandem.model.lora.targets import short_names
from tandem.model.recurrent.outlook import describe_recurrent_layers
from tandem.terminal.printable import counted, listed
from tandem.training.adamw import state_bytes
from tandem.training.optimizer import schedule_in_words
from tandem.training.start.plan import shown_path
from tandem.training.start.setup import Setup

# Counting pairs takes time per epoch, and some users set a million epochs and limit the steps.
MAX_COUNTED_EPOCHS = 1000
RECOMPUTED = {
    "none": "",
    "selective": "; half of their matrix products recomputed in the backward pass",
    "full": "; recomputed in the backward pass",
}
# Other settings of the loss, which are shown if they differ from their defaults.
LOSS_SETTINGS = ("ld_alpha", "wpo", "f_divergence", "f_alpha", "router_aux_loss_coef")
AVERAGING = {True: "per token", False: "summed"}


def describe_computation(setup: Setup) -> str:
    """Describe the device, the attention implementation, and whether layers are compiled or recomputed."""
    where = torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "the CPU"
    layers = "compiled, which takes a while the first time" if setup.compiles else "not compiled"
    attention = describe_attention(setup.config.policy, setup.device, setup.source.config)
    recomputed = RECOMPUTED[setup.config.policy.activation_checkpointing]
    recurrent = _recurrent_layers(setup)
    return f"on {where}; attention: {attention}; {recurrent}layers: {layers}{recomputed}"


def _recurrent_layers(setup: Setup) -> str:
    """Describe how recurrent layers are computed in packs. Empty if there are none, or without packs."""
    config, packing = setup.source.config, setup.config.policy.packing
    if architecture_of(config).scan is None or packing.mode == "none":
        return ""
    text, shares = config.get_text_config(), packing.share_prompts
    how = describe_recurrent_layers(text, setup.device, setup.precision, shares_prompts=shares)
    return f"recurrent layers: {how}; "


def _text_in_words(template: Template) -> str:
    if template.source is None:
        return "none (raw text)"
    return "chat template; rows of plain text as they are" if template.plain_text_as_is else "chat template"


def describe_choices(setup: Setup) -> list[tuple[str, str]]:
    """Return the settings that determine the trained model, as pairs (name of the setting, its value in words)."""
    config, dpo = setup.config, setup.config.dpo
    sets = config.data.training_sets
    weights = ", ".join(f"{s.data_path} {s.weight:g}" for s in sets) if any(s.weight != 1 for s in sets) else ""
    return [
        ("model", _name_and_folder(config.policy.model_name, setup.source.folder) + _trained_part(setup)),
        ("text", _text_in_words(setup.template)),
        *describe_sets(setup.plan.sets, config),
        *columns_in_words(setup.plan.sets, setup.config.dpo.preference_loss),
        (
            "loss",
            f"({spelled(dpo.preference_loss)}) x {dpo.preference_loss_weight:g} + sft x {dpo.sft_loss_weight:g}"
            f"{_loss_settings(config)}",
        ),
        *([("beta", f"{dpo.reference_policy_kl_penalty:g}")] if reads(dpo.preference_loss, BETA) else []),
        (
            "log-probabilities",
            f"{AVERAGING[dpo.per_token]} in the preference loss, "
            f"{AVERAGING[dpo.sft_average_log_probs]} in the SFT loss",
        ),
        *([("SFT term", SFT_TERM[dpo.sft_average_log_probs])] if dpo.sft_loss_weight else []),
        ("pairing", config.data.pairing),
        *([("weights of sets", weights)] if weights else []),
        *([("duplicates", config.data.duplicates)] if config.data.duplicates != "keep" else []),
        ("over-long", f"{config.data.overlong} beyond {config.policy.max_total_sequence_length} tokens"),
        ("batch", f"{counted(config.policy.train_global_batch_size, 'pair')}{_packs_per_batch(setup)}"),
        ("length", _run_length(setup)),
        ("optimizer", _optimizer(setup)),
        ("schedule", schedule_in_words(config.policy, setup.plan.num_steps)),
        *([("adapters", _adapters(setup.lora, setup.source))] if setup.lora else []),
        ("precision", f"{setup.precision} computation over {_weights(setup)}"),
        ("export rounding", config.export.rounding),
        ("reference", f"{config.reference.mode}, {_reference(setup)}" if setup.uses_reference else "none"),
        ("dropout", _dropout(setup)),
    ]


def _trained_part(setup: Setup) -> str:
    kind = setup.source.config.model_type
    return f"; multimodal ({kind}): only its text model is trained" if is_multimodal(setup.source.config) else ""


def describe_sets(sets: Sets, config: Config) -> list[tuple[str, str]]:
    """Return the path and the number of pairs of each set, as pairs (name, description).

    Example: ("training sets", "a.jsonl (10 pairs) and b.jsonl (20 pairs)").
    """
    data = config.data
    given = data.training_sets
    names = ["train"] if len(given) == 1 else [f"train-{number}" for number in range(len(given))]
    read = [f"{shown_path(one)} ({_num_pairs(sets.read[name])})" for name, one in zip(names, given, strict=True)]
    held_out = f"; {_num_pairs(sets.train)} without those held out" if data.validation_share else ""
    rows = [("training set" if len(read) == 1 else "training sets", " and ".join(read) + held_out)]
    for name, chosen in sets.validation.items():
        one = data.validation_sets.get(name)
        where = f"{data.validation_share:g} of the training preferences" if one is None else shown_path(one)
        label = "validation set" if len(sets.validation) == 1 else f"validation set {name}"
        rows.append((label, f"{where} ({_num_pairs(chosen)})"))
    return rows if sets.validation else [*rows, ("validation set", "none")]


def _num_pairs(preferences: Preferences) -> str:
    return counted(int(preferences.num_pairs.sum()), "pair")


def _loss_settings(config: Config) -> str:
    """Return the arguments of the chosen losses, and other loss settings that differ from their defaults, as text."""
    dpo, fields = config.dpo, type(config.dpo).model_fields
    defaults = {name: field.default for name, field in fields.items()}
    arguments = [name for name in LOSS_ARGUMENTS if reads(dpo.preference_loss, name)]
    # An argument whose default is 0 is off by default: it is shown only if it is set.
    shown = [name for name in arguments if defaults[name] or getattr(dpo, name) != defaults[name]]
    shown += [name for name in LOSS_SETTINGS if getattr(dpo, name) != defaults[name]]
    return "".join(f", {name} {_as_yaml(getattr(dpo, name))}" for name in shown)


def _packs_per_batch(setup: Setup) -> str:
    """Return the approximate number of packs in a batch, in words. Return empty text unless policy.packing.mode=dataset."""
    plan = setup.plan
    if plan.batches.packs is None:
        return ""
    pairs = plan.batches.pairs_per_pack()
    packs = max(1, round(setup.config.policy.train_global_batch_size / pairs.mean()))
    return (
        f", in about {packs:,} of {counted(len(pairs), 'pack')} of {plan.train.length:,} tokens ({plan.train.algorithm}), "
        f"{pairs.mean():.1f} pairs per pack on average"
    )


def _run_length(setup: Setup) -> str:
    plan, dpo = setup.plan, setup.config.dpo
    before = f", which end before dpo.max_num_steps={dpo.max_num_steps}" if setup.ends_with_epochs else ""
    patience = dpo.early_stopping_patience
    early = "" if patience is None else f"; at most {counted(patience, 'validation')} without a better {setup.tracked}"
    return (
        f"steps: {plan.num_steps}; pairs used: {plan.num_pairs:,} of {_pairs_of_epochs(setup)}; "
        f"epochs: {dpo.max_num_epochs}{before}; seed: {setup.config.run.seed}{early}"
    )


def _pairs_of_epochs(setup: Setup) -> str:
    """Return the number of pairs in all epochs, as text. For more than MAX_COUNTED_EPOCHS epochs, return the number per epoch.

    The pairs of an incomplete last batch are counted, even if drop_last leaves that batch out.
    """
    batches, epochs = setup.plan.batches, setup.config.dpo.max_num_epochs
    if epochs > MAX_COUNTED_EPOCHS:
        return f"{batches.num_pairs_of(0):,} per epoch"
    return f"{sum(batches.num_pairs_of(epoch) for epoch in range(epochs)):,}"


def _optimizer(setup: Setup) -> str:
    policy, kwargs = setup.config.policy, setup.config.policy.optimizer.kwargs
    highest = f"{setup.plan.highest_rate:g}"
    ratio = policy.lora.loraplus_lr_ratio
    details = [] if highest == f"{kwargs.lr:g}" else [f"at most {highest} is reached"]
    details += [] if ratio == 1 else [f"{ratio:g} times the rate for lora_B"]
    rate = f"{kwargs.lr:g} ({'; '.join(details)})" if details else f"{kwargs.lr:g}"
    return f"AdamW, learning rate {rate}, weight decay {kwargs.weight_decay:g}, clipping at {policy.max_grad_norm}"


def _adapters(lora: LoraPlan, source: ModelSource) -> str:
    adapted = [counted(len(lora.targets), "layer")] if lora.targets else []
    adapted += [f"{counted(len(lora.experts), 'tensor')} of experts"] if lora.experts else []
    return (
        ("DoRA" if lora.dora else "LoRA")
        + f", dim {lora.dim}, alpha {lora.alpha:g}{' / sqrt(dim)' if lora.rslora else ''}, "
        + (f"on {' and '.join(adapted)} ({_names_of_layers(lora, source)}); " if adapted else "")
        + "".join(f"not on {one}; " for one in lora.left_out)
        + (f"trained in full: {listed(lora.saved.modules)}; " if lora.saved.modules else "")
        + (f"embeddings of {counted(len(lora.tokens.ids), 'token')}; " if lora.tokens.ids else "")
        + f"{lora.num_trained:,} parameters trained, {lora.num_frozen:,} frozen"
        + (f"; starting from {lora.start.folder}" if lora.start else "")
    )


def _names_of_layers(lora: LoraPlan, source: ModelSource) -> str:
    """Return the short names of the adapted layers, even if other parts of a multimodal checkpoint have layers of these names."""
    names, where = lora.names, ""
    if is_multimodal(source.config) and names == lora.targets:
        short = short_names(lora.targets, [name for name, _ in empty_model(source).named_modules()])
        names, where = (names, "") if short == names else (short, ", in the text model")
    return listed([*names, *lora.expert_names]) + where


def _weights(setup: Setup) -> str:
    policy = setup.config.policy
    # Gradients are float32: 4 bytes.
    size = setup.weights_dtype.itemsize + 4 + state_bytes(policy.optimizer.state_dtype)
    states = f"{policy.optimizer.state_dtype} optimizer states, {size:.0f} bytes"
    if setup.lora is None:
        rounded = "" if policy.weights == "float32" else f", rounded {policy.weights.removeprefix('bfloat16_')}"
        return f"{str(setup.weights_dtype).removeprefix('torch.')} weights{rounded}, {states} per parameter"
    frozen = setup.lora.quantization or str(setup.lora.dtype).removeprefix("torch.")
    return f"frozen {frozen} weights; adapters in float32, {states} per trained parameter"


def _reference(setup: Setup) -> str:
    if setup.reference_source is not None:
        return _name_and_folder(setup.reference_source.name, setup.reference_source.folder)
    if setup.lora is None:
        return "the start model"
    return "the base model" if setup.lora.start is None else "the base model with the adapter it starts from"


def _dropout(setup: Setup) -> str:
    of_adapters, of_model = setup.config.policy.lora.dropout, architecture_of(setup.source.config).random_settings
    used = f"{of_adapters:g} of the adapters' inputs, in training steps" if of_adapters else "0"
    return f"{used} (the model's dropout of {of_model} is switched off)" if of_model else used


def _as_yaml(value: Any) -> str:
    """Format a value as in a YAML file: True is written as true."""
    return value if isinstance(value, str) else json.dumps(value)


def _name_and_folder(name: str, folder: Path) -> str:
    return name if Path(name).resolve() == folder else f"{name} ({folder})"

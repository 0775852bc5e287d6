"""LoRA: decides which layers get adapters, before the weights are loaded, and replaces them by peft's adapted layers."""

import importlib.util
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.config.sections.policy import ALL_LINEAR, Lora
from tandem.data.store.pool import WorkerDied, WorkerStalled, run_in_process
from tandem.errors import ConfigError, MachineError, one_line
from tandem.model.architecture import ROUTERS, is_multimodal
from tandem.model.files.source import ModelSource, weights_fingerprint, weights_of
from tandem.model.load import empty_model
from tandem.model.lora.files import TrainedAdapter, read_adapter
from tandem.storage.cache import fingerprint
from tandem.terminal.commands import install_command
from tandem.terminal.printable import listed

ADAPTER = "default"  # peft's name for a single adapter
MORE_PRECISE_THAN_BFLOAT16 = ("F64", "F32", "F16")  # names in safetensors
# How peft refuses layers: Module 'out_proj' is incompatible with ... Incompatible modules: {'conv1d', 'out_proj'}.
MAMBA = re.compile(
    r"\[PEFT:\S+\] .* incompatible with Mamba-based models .* Incompatible modules: \{(?P<incompatible>[^}]*)\}"
)
PATTERN_SECONDS, PATTERN_BYTES = 10.0, 2**30  # limits of matching a regular expression


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Which layers get adapters, and with which settings. `plan_lora` makes the plan before any weights load."""

    dim: int
    alpha: float
    dropout: float
    rslora: bool
    targets: tuple[str, ...]  # full names of modules
    names: tuple[str, ...]  # the shortest names that match exactly those modules
    start: TrainedAdapter | None  # policy.lora.adapter
    dtype: torch.dtype  # of the frozen weights
    precision: str  # dtype of computation
    quantization: str | None
    num_trained: int = 0
    num_frozen: int = 0

    def peft_config(self, base: str | None = None, revision: str | None = None) -> Any:
        """Build peft's configuration. `base`: the name of the model that the adapters belong to."""
        from peft import LoraConfig

        return LoraConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
            revision=revision,
            inference_mode=base is not None,
            r=self.dim,
            lora_alpha=int(self.alpha) if self.alpha == int(self.alpha) else self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            use_rslora=self.rslora,
            target_modules=list(self.names),
        )

    def quantization_config(self) -> Any:
        """Return quantisation settings for transformers, or None. transformers quantises all linear layers except the head."""
        if self.quantization is None:
            return None
        from transformers import BitsAndBytesConfig

        if self.quantization == "int8":
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, self.precision),
        )


class TrainingDropout(nn.Module):
    """Dropout that is active only while gradients are computed: not in the reference, the audit or validation."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, values: Tensor) -> Tensor:
        return F.dropout(values, self.p, training=torch.is_grad_enabled())


def plan_lora(source: ModelSource, lora: Lora, device: torch.device, precision: str) -> LoraPlan | None:
    """Return the LoraPlan of a configuration, or None if LoRA is disabled. Raise an error for settings that do not work.

    Called before any weights load.
    """
    if not lora.enabled:
        return None
    _check_quantization(lora, device)
    if getattr(source.config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{source.key} = {source.name}: its weights are already quantised. Give the model that it was quantised from; "
            "policy.lora.quantization quantises that model."
        )
    model = empty_model(source)
    start = None if lora.adapter is None else read_adapter(lora.adapter)
    # peft loads an exported adapter on the complete model, whose other parts may have layers of the same names.
    modules = empty_model(source, complete=True) if is_multimodal(source.config) else model
    targets = _targets(model, source, lora) if start is None else _adapter_targets(start, model, source, lora)
    # A frozen weight is never updated, so with bfloat16 computation the published dtype loses nothing. But float16 cannot be
    # multiplied with bfloat16.
    frozen = torch.bfloat16 if source.dtype == torch.float16 else source.dtype
    dtype = frozen if precision == "bfloat16" else torch.float32
    plan = LoraPlan(
        dim=lora.dim if start is None else start.dim,
        alpha=lora.alpha if start is None else start.alpha,
        dropout=lora.dropout,
        rslora=start is not None and start.rslora,
        targets=tuple(targets),
        names=_short_names(targets, [name for name, _ in modules.named_modules()]),
        start=start,
        dtype=dtype,
        precision=precision,
        quantization=lora.quantization,
    )
    num_frozen = sum(parameter.numel() for parameter in model.parameters())
    with torch.device("meta"):
        inject(model, plan, source)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return replace(plan, num_trained=num_trained, num_frozen=num_frozen)


def start_fingerprint(source: ModelSource, plan: LoraPlan | None) -> str:
    """Return a hash of everything that determines what the policy computes before training.

    New adapters are not part of the hash, because they do not change the output.
    """
    weights = weights_fingerprint(source)
    if plan is not None and (source.dtype, plan.dtype) == (torch.float16, torch.bfloat16):
        weights = fingerprint(weights, "frozen in bfloat16")  # rounded to nearest, unlike trained weights
    if plan is None or (plan.start is None and plan.quantization is None):
        return weights
    return fingerprint(weights, None if plan.start is None else plan.start.content(), plan.quantization)


def rounds_frozen_weights(source: ModelSource, plan: LoraPlan | None) -> bool:
    """Whether the frozen weights are rounded to bfloat16 when they load, although the files store them more precisely.

    This can happen with adapters, if config.json names bfloat16. Without adapters, the weights are trained and load in float32.
    So the model computes different numbers with adapters than without.
    """
    from safetensors import safe_open

    if plan is None or not plan.dtype == source.dtype == torch.bfloat16:
        return False
    for path in weights_of(source):
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            if any(file.get_slice(name).get_dtype() in MORE_PRECISE_THAN_BFLOAT16 for name in names):
                return True
    return False


def lora_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the adapted layers, each as (name in the plain model, layer)."""
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def inject(model: Any, plan: LoraPlan, source: ModelSource) -> None:
    """Replace the target layers of the model by peft's adapted layers, in place, and freeze all other weights."""
    from peft import inject_adapter_in_model

    try:
        # Warnings about target names that peft interprets differently: they are checked below.
        with warnings.catch_warnings(action="ignore"):
            inject_adapter_in_model(plan.peft_config(), model)
    except ValueError as error:
        raise _not_adapted(error, plan, source) from None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {f"{name}.lora_{side}.{ADAPTER}.weight" for name in plan.targets for side in "AB"}
    if trained != expected:
        # In models whose experts used to be linear layers, peft maps the old names to the experts wherever they occur.
        different = expected - trained or trained - expected
        names = ",".join(sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in different}))
        raise ConfigError(
            f"policy.lora: peft interprets {names} as parts of the experts of {source.name}, which are not linear layers. Leave "
            f"them out: policy.lora.exclude_modules=[{names}]."
        )
    for _, layer in lora_layers(model):
        if plan.dropout > 0:
            layer.lora_dropout[ADAPTER] = TrainingDropout(plan.dropout)


def _not_adapted(error: ValueError, plan: LoraPlan, source: ModelSource) -> ConfigError:
    """Return an error that explains why peft refuses to adapt the layers of a plan."""
    start = None if plan.start is None else plan.start.name
    if found := MAMBA.match(str(error)):
        refused = set(re.findall(r"\w+", found["incompatible"]))
        names = ",".join(sorted(refused & {target.rsplit(".", 1)[-1] for target in plan.targets}))
        what = f"peft does not adapt {names} in models with Mamba layers, whose kernels read the weight without the adapter"
        instead = f"Leave it out: policy.lora.exclude_modules=[{names}]."
    else:
        what = f"peft cannot adapt these layers of {source.name} ({one_line(error)})"
        instead = "Choose others with policy.lora.target_modules and policy.lora.exclude_modules."
    if start is not None:
        return ConfigError(f"policy.lora.adapter = {start}: {what}. Start from another adapter, or without one.")
    return ConfigError(f"policy.lora: {what}. {instead}")


def _check_quantization(lora: Lora, device: torch.device) -> None:
    if lora.quantization is None:
        return
    key = f"policy.lora.quantization = {lora.quantization}"
    if device.type != "cuda":
        raise MachineError(f"{key}: quantised weights need a CUDA device, and this machine has none. Leave it out.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{key}: the package bitsandbytes is not installed. In the tandem checkout, run {install_command('qlora')}, "
            "or leave it out."
        )


def _linear_layers(model: Any) -> tuple[dict[str, nn.Linear], str | None]:
    """Return two values: a dict from name to linear layer, which leaves out the head, and the name of the head."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linear = {name: module for name, module in linear.items() if type(module).__name__ not in ROUTERS}
    head_name = next((name for name, module in model.named_modules() if module is head), None)
    return {name: module for name, module in linear.items() if module is not head}, head_name


def _targets(model: Any, source: ModelSource, lora: Lora) -> list[str]:
    """Return the full names of the layers that target_modules selects and exclude_modules does not exclude."""
    layers, head = _linear_layers(model)
    known = f"Its linear layers are {listed(sorted({name.rsplit('.', 1)[-1] for name in layers}))}."
    selected = _select(lora.target_modules, list(layers), head, source, known=known)
    for name in lora.exclude_modules:
        if not any(_ends_with(layer, name) for layer in (*layers, head or "")):
            raise ConfigError(f"policy.lora.exclude_modules: {name} matches no linear layer of {source.name}. {known}")
    remaining = [layer for layer in selected if not any(_ends_with(layer, name) for name in lora.exclude_modules)]
    if not remaining:
        raise ConfigError(
            "policy.lora.exclude_modules excludes every layer that policy.lora.target_modules selects, so nothing would be "
            "trained. Exclude fewer."
        )
    return remaining


def _select(
    wanted: list[str] | str, layers: list[str], head: str | None, source: ModelSource, *, known: str
) -> list[str]:
    """Return the names in `layers` that `wanted` selects: all-linear, a list of name suffixes, or a regular expression.

    `head`: the name of the head. `known`: a sentence that lists the linear layers, for messages.
    """
    if wanted == ALL_LINEAR:
        return layers
    names = layers if head is None else [*layers, head]
    if isinstance(wanted, str):
        found = {wanted: _match(wanted, names)}
    else:
        found = {pattern: {name for name in names if _ends_with(name, pattern)} for pattern in wanted}
    for pattern, selected in found.items():
        if head in selected:
            raise ConfigError(
                f"policy.lora.target_modules: {pattern} selects {head}, the head, which cannot have an adapter: its weight is "
                "used directly, so that logits need not be stored. Leave it out."
            )
        if not selected:
            hint = (
                " A regular expression must match full names; give short names as a list." if pattern is wanted else ""
            )
            raise ConfigError(
                f"policy.lora.target_modules: {pattern} matches no linear layer of {source.name}. {known}{hint}"
            )
    return [layer for layer in layers if any(layer in selected for selected in found.values())]


def _adapter_targets(start: TrainedAdapter, model: Any, source: ModelSource, lora: Lora) -> list[str]:
    """Return the names of the layers that a trained adapter adapts.

    Raise ConfigError if the adapter does not fit the model or the configuration.
    """
    key = f"policy.lora.adapter = {start.name}"
    changed = lora.changed()
    for name, own in (("dim", start.dim), ("alpha", start.alpha)):
        if name in changed and changed[name] != own:
            raise ConfigError(
                f"{key}: its {name} is {own:g}, but policy.lora.{name} = {changed[name]:g}. Leave out policy.lora.{name}."
            )
    layers, _ = _linear_layers(model)
    for module, sides in start.shapes.items():
        if module not in layers:
            raise ConfigError(
                f"{key}: made for a different model: it adapts {module}, which is not a linear layer of {source.name}. Set "
                "policy.model_name to the adapter's base model."
            )
        layer = layers[module]
        expected = {"A": (start.dim, layer.in_features), "B": (layer.out_features, start.dim)}
        for side in "AB":
            if sides[side] != expected[side]:
                raise ConfigError(
                    f"{key}: made for a different model: the shape of {module}.lora_{side} is {list(sides[side])}, but "
                    f"{source.name} needs {list(expected[side])}. Set policy.model_name to the adapter's base model."
                )
    if {"target_modules", "exclude_modules"} & changed.keys():
        asked = _targets(model, source, lora)
        if set(asked) != start.shapes.keys():
            different = min(set(asked) ^ start.shapes.keys())
            raise ConfigError(
                f"{key}: its layers differ from those selected by policy.lora.target_modules, for example in {different}. Leave "
                "out target_modules and exclude_modules."
            )
    return [name for name in layers if name in start.shapes]


def _ends_with(module: str, name: str) -> bool:
    """Whether a module's name ends with the complete part `name`. model.layers.0.mlp.up_proj ends with up_proj, not with proj."""
    return module == name or module.endswith(f".{name}")


def _match(pattern: str, modules: list[str]) -> set[str]:
    """Return the module names that a regular expression matches completely.

    Runs in a separate process that can be killed, because some expressions never finish.
    """
    try:
        return run_in_process(
            lambda: {module for module in modules if re.fullmatch(pattern, module)}, PATTERN_SECONDS, PATTERN_BYTES
        )
    except (WorkerStalled, WorkerDied, MemoryError):
        raise ConfigError(
            f"policy.lora.target_modules: matching the regular expression {pattern} with the names of {len(modules)} layers "
            f"takes more than {PATTERN_SECONDS:g} seconds. Give a simpler one, or a list of names."
        ) from None


def _short_names(targets: Iterable[str], modules: list[str]) -> tuple[str, ...]:
    """Return the last parts of the target names, each once, if they select the targets and no other module.

    The targets layers.0.mlp.up_proj and layers.1.mlp.up_proj are returned as up_proj. If layers.2.mlp.up_proj is a module but
    not a target, the full target names are returned.
    """
    targets = list(targets)
    short = sorted({target.rsplit(".", 1)[-1] for target in targets})
    matched = [module for module in modules if any(_ends_with(module, name) for name in short)]
    return tuple(short) if set(matched) == set(targets) else tuple(targets)

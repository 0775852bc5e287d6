"""LoRA: decides which layers get adapters (before the weights are loaded), and adds peft's adapters to the loaded model."""

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
from tandem.errors import ConfigError, MachineError, one_line
from tandem.model.architecture import is_multimodal
from tandem.model.distributed.sharded_load import plain_name
from tandem.model.files.source import ModelSource
from tandem.model.load import empty_model
from tandem.model.lora.files import TrainedAdapter, name_of_rows, read_adapter
from tandem.model.lora.quantised import quantised_layers
from tandem.model.lora.rows import ROWS, add_rows, is_of_rows
from tandem.model.lora.saved import SavedModules, select_saved
from tandem.model.lora.targets import adapter_targets, selected_experts, selected_targets, short_names
from tandem.model.lora.tokens import TrainedTokens, select_tokens
from tandem.terminal.commands import install_command
from tandem.terminal.printable import listed

ADAPTER = "default"  # peft's name for a single adapter
MAGNITUDES = ".lora_magnitude_vector."
# How peft refuses layers: Module 'out_proj' is incompatible with ... Incompatible modules: {'conv1d', 'out_proj'}.
MAMBA = re.compile(
    r"\[PEFT:\S+\] .* incompatible with Mamba-based models .* Incompatible modules: \{(?P<incompatible>[^}]*)\}"
)


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Which layers get adapters, and with which settings. `plan_lora` makes the plan before any weights load."""

    dim: int
    alpha: float
    dropout: float
    rslora: bool
    dora: bool
    targets: tuple[str, ...]  # full names of modules
    names: tuple[str, ...]  # the shortest names that match exactly those modules
    experts: tuple[str, ...]  # full names of adapted tensors of experts
    expert_names: tuple[str, ...]  # policy.lora.target_parameters
    saved: SavedModules  # trained in full
    tokens: TrainedTokens  # whose embeddings are trained
    start: TrainedAdapter | None  # policy.lora.adapter
    dtype: torch.dtype  # of the frozen weights
    precision: str  # dtype of computation
    quantization: str | None
    left_out: tuple[
        str, ...
    ] = ()  # layers that all-linear left out because peft does not adapt them, in words, each with the reason
    num_trained: int = 0
    num_frozen: int = 0
    num_quantisable: int = 0  # weights that a quantization would quantise; a part of num_frozen
    num_magnitudes: int = 0  # of DoRA; a part of num_trained
    num_in_experts: int = 0  # weights of experts that have adapters; a part of num_frozen

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
            target_parameters=list(self.expert_names) or None,
            # Only in files. In memory, DoraLinear adds magnitudes, and modules and rows of embeddings are trained without peft's
            # wrappers, which copy them.
            use_dora=self.dora and base is not None,
            modules_to_save=list(self.saved.peft_names) or None if base is not None else None,
            trainable_token_indices=list(self.tokens.ids) or None if base is not None else None,
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


class LayersRefused(ConfigError):
    """peft does not adapt some of the selected layers. `names`: the last parts of their names. `why`: the end of a sentence."""

    def __init__(self, message: str, names: Iterable[str], why: str):
        super().__init__(message)
        self.names, self.why = sorted(names), why


def plan_lora(
    source: ModelSource,
    lora: Lora,
    device: torch.device,
    precision: str,
    token_ids: tuple[int, ...] = (),
    *,
    is_here: bool = True,
) -> LoraPlan | None:
    """Return the LoraPlan of a configuration, or None if LoRA is disabled. Raise an error for settings that do not work.

    all-linear leaves out layers that peft does not adapt; a layer that the configuration names is refused instead.
    Called before any weights load. `token_ids`: the ids of policy.lora.trainable_token_indices (`ids_of_tokens`).
    `is_here`: whether the run is on this machine, which then needs what quantization needs.
    """
    if not lora.enabled:
        return None
    left_out: list[str] = []
    while True:
        try:
            plan = _plan(source, lora, device, precision, token_ids, is_here=is_here)
            return replace(plan, left_out=tuple(left_out))
        except LayersRefused as refused:
            if (
                lora.target_modules != ALL_LINEAR
                or lora.adapter is not None
                or set(refused.names) & set(lora.exclude_modules)
            ):
                raise
            left_out.append(f"{listed(refused.names)}, {refused.why}")
            lora = lora.model_copy(update={"exclude_modules": [*lora.exclude_modules, *refused.names]})


def _plan(
    source: ModelSource, lora: Lora, device: torch.device, precision: str, token_ids: tuple[int, ...], *, is_here: bool
) -> LoraPlan:
    if lora.quantization is not None and is_multimodal(source.config):
        raise ConfigError(
            f"policy.lora.quantization = {lora.quantization}: {source.name} is a multimodal checkpoint "
            f"({source.config.model_type}), of which only the text model is loaded, and quantising it is not supported. "
            "Leave out policy.lora.quantization."
        )
    if is_here:
        _check_quantization(lora, device)
    if getattr(source.config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{source.place}: its weights are already quantised. Give the model that it was quantised from; "
            "policy.lora.quantization quantises that model."
        )
    model = empty_model(source)
    start = None if lora.adapter is None else read_adapter(lora.adapter)
    if start is not None and start.dora and lora.quantization is not None:
        raise ConfigError(
            f"policy.lora.adapter = {start.name}: a DoRA adapter does not work with policy.lora.quantization = "
            f"{lora.quantization}: row norms are computed from weights that are not quantised. Leave out "
            "policy.lora.quantization."
        )
    # peft loads an exported adapter on the complete model, whose other parts may have layers of the same names.
    modules = empty_model(source, complete=True) if is_multimodal(source.config) else model
    saved = select_saved(model, source, lora, start)
    targets = (
        selected_targets(model, source, lora, saved.holds)
        if start is None
        else adapter_targets(start, model, source, lora)
    )
    experts = selected_experts(model, source, lora, start, saved.holds)
    # A frozen weight is never updated, so with bfloat16 computation the published dtype loses nothing. But float16 cannot be
    # multiplied with bfloat16.
    frozen = torch.bfloat16 if source.dtype == torch.float16 else source.dtype
    dtype = frozen if precision == "bfloat16" else torch.float32
    plan = LoraPlan(
        dim=lora.dim if start is None else start.dim,
        alpha=lora.alpha if start is None else start.alpha,
        dropout=lora.dropout,
        rslora=lora.use_rslora if start is None else start.rslora,
        dora=lora.use_dora if start is None else start.dora,
        targets=tuple(targets),
        names=short_names(targets, [name for name, _ in modules.named_modules()]),
        experts=tuple(experts),
        expert_names=tuple(lora.target_parameters) if start is None else start.target_parameters,
        saved=saved,
        tokens=select_tokens(model, source, token_ids, start, saved),
        start=start,
        dtype=dtype,
        precision=precision,
        quantization=lora.quantization,
    )
    return _counted(plan, model, source)


def _counted(plan: LoraPlan, model: Any, source: ModelSource) -> LoraPlan:
    """Return a plan with numbers of weights. `model`: without weights; gets the plan's adapters."""
    quantisable = sum(layer.weight.numel() for layer in quantised_layers(model).values())  # type: ignore[operator, union-attr]
    with torch.device("meta"):
        inject(model, plan, source)
    if plan.start is not None:
        _check_shapes_of_experts(model, plan.start, source)
    numbers = {name: (parameter.numel(), parameter.requires_grad) for name, parameter in model.named_parameters()}
    return replace(
        plan,
        num_trained=sum(number for number, is_trained in numbers.values() if is_trained),
        num_frozen=sum(number for number, is_trained in numbers.values() if not is_trained),
        num_quantisable=quantisable,
        num_magnitudes=sum(number for name, (number, _) in numbers.items() if MAGNITUDES in name),
        num_in_experts=sum(number for name, (number, _) in numbers.items() if plain_name(name) in plan.experts),
    )


def lora_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the adapted layers, each as (name in the plain model, layer)."""
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def adapted_weights(model: Any) -> dict[str, tuple[str, Any]]:
    """Return the weights that have adapters: their names in the plain model, with the name of the layer and the layer.

    A layer of experts has a name like model.layers.0.mlp.experts.base_layer if more than one of its tensors is adapted.
    """
    return {
        f"{plain_name(f'{name}.')}{getattr(layer, 'parameter_name', 'weight')}": (name, layer)
        for name, layer in lora_layers(model)
    }


def name_in_files(name: str) -> str:
    """Return the name in peft's files of an adapter's parameter. `name`: its name in the model."""
    if is_of_rows(name):
        return name_of_rows(name.removesuffix(f".{ROWS}"))
    return name.removesuffix(f".{ADAPTER}.weight") + ("" if MAGNITUDES in name else ".weight")


def is_of_adapter(name: str) -> bool:
    """Whether a parameter, given by its name in the model, belongs to adapters: the plain model does not have it."""
    return ".lora_" in name or is_of_rows(name)


def is_lora_b(name: str) -> bool:
    """Whether a parameter is the second matrix of an adapter, which starts at zero."""
    return ".lora_B." in name


def inject(model: Any, plan: LoraPlan, source: ModelSource) -> None:
    """Replace the target layers of the model by peft's adapted layers, in place, and freeze all other weights."""
    from peft import inject_adapter_in_model

    try:
        # Warnings about target names that peft interprets differently: they are checked below.
        with warnings.catch_warnings(action="ignore"):
            inject_adapter_in_model(plan.peft_config(), model)
    except ValueError as error:
        raise _not_adapted(error, plan, source) from None
    for name, parameter in model.named_parameters():
        if name in plan.saved.parameters:
            parameter.requires_grad_(True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad} - plan.saved.parameters
    found = {weight: layer for weight, (layer, _) in adapted_weights(model).items()}
    layers = [*plan.targets, *(found.get(name, name) for name in plan.experts)]
    expected = {f"{name}.lora_{side}.{ADAPTER}.weight" for name in layers for side in "AB"}
    if trained != expected:
        # In models whose experts used to be linear layers, peft maps the old names to the experts wherever they occur.
        different = expected - trained or trained - expected
        last = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in different}
        names = ",".join(sorted(last))
        raise LayersRefused(
            f"policy.lora: peft interprets {names} as parts of the experts of {source.name}, which are not linear layers. Leave "
            f"them out: policy.lora.exclude_modules=[{names}].",
            last,
            "which peft takes for experts",
        )
    if plan.tokens.ids:
        add_rows(model, plan.tokens.ids)
    for _, layer in lora_layers(model):
        if plan.dropout > 0:
            layer.lora_dropout[ADAPTER] = TrainingDropout(plan.dropout)
    if plan.experts:
        from tandem.model.lora.experts import adapt_experts

        adapt_experts(model)
    if plan.dora:
        from tandem.model.lora.dora import add_magnitudes

        add_magnitudes(model, ADAPTER)


def _not_adapted(error: ValueError, plan: LoraPlan, source: ModelSource) -> ConfigError:
    """Return an error that explains why peft refuses to adapt the layers of a plan."""
    start = None if plan.start is None else plan.start.name
    if found := MAMBA.match(str(error)):
        refused = set(re.findall(r"\w+", found["incompatible"]))
        last = refused & {target.rsplit(".", 1)[-1] for target in plan.targets}
        names = ",".join(sorted(last))
        what = f"peft does not adapt {names} in models with Mamba layers, whose kernels read the weight without the adapter"
        if start is None:
            instead = f"Leave it out: policy.lora.exclude_modules=[{names}]."
            return LayersRefused(
                f"policy.lora: {what}. {instead}", last, "which peft does not adapt in models with Mamba layers"
            )
    else:
        what = f"peft cannot adapt these layers of {source.name} ({one_line(error)})"
    if start is not None:
        return ConfigError(f"policy.lora.adapter = {start}: {what}. Start from another adapter, or without one.")
    return ConfigError(
        f"policy.lora: {what}. Choose others with policy.lora.target_modules and policy.lora.exclude_modules."
    )


def _check_shapes_of_experts(model: Any, start: TrainedAdapter, source: ModelSource) -> None:
    """Raise ConfigError unless an adapter's file has exactly the weights of adapted experts. `model`: with adapters."""
    expected = {
        name: {side: tuple(getattr(layer, f"lora_{side}")[ADAPTER].weight.shape) for side in "AB"}
        for weight, (name, layer) in adapted_weights(model).items()
        if not weight.endswith(".weight")
    }
    layers = {name for name, _ in lora_layers(model)}
    for name in sorted(expected.keys() | (start.shapes.keys() - layers)):
        if start.shapes.get(name) != expected.get(name):
            raise ConfigError(
                f"policy.lora.adapter = {start.name}: made for a different model: its adapter of {name} does not fit the experts "
                f"of {source.name} that its target_parameters name. Set policy.model_name to the adapter's base model."
            )


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

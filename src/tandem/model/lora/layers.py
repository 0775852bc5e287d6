"""LoRA: the configuration and the model's layers in; a plan before weights load, and adapters on those layers after. peft's."""

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
from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.data.store.pool import Died, Stalled, in_a_process
from tandem.errors import ConfigError, MachineError
from tandem.model.files.source import ModelSource, weights_fingerprint
from tandem.model.load import empty_model, load_policy
from tandem.model.lora.files import TrainedAdapter, read_adapter
from tandem.model.policy import Policy
from tandem.storage.cache import fingerprint
from tandem.terminal.commands import install_command
from tandem.terminal.printable import listed

ADAPTER = "default"  # peft's name for an only adapter
WIDER = ("F64", "F32", "F16")  # than bfloat16, as safetensors calls them
PATTERN_SECONDS, PATTERN_BYTES = 10.0, 2**30  # that matching a regular expression may take


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """Which layers get adapters, and of what kind: all that is known before weights load."""

    dim: int
    alpha: float
    dropout: float
    rslora: bool
    targets: tuple[str, ...]  # modules of the model, by their whole names
    names: tuple[str, ...]  # the shortest names that mean just those
    start: TrainedAdapter | None
    dtype: torch.dtype  # of the frozen weights
    precision: str  # of computation
    quantization: str | None
    num_trained: int = 0
    num_frozen: int = 0

    def peft_config(self, base: str | None = None, revision: str | None = None) -> Any:
        """`base`: the name of the model that the adapters belong to."""
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
        """What transformers is told; the head and whatever is no linear layer stay as they are."""
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
    """Dropout where gradients are computed and nowhere else: not in the reference, the audit or a validation."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, values: Tensor) -> Tensor:
        return F.dropout(values, self.p, training=torch.is_grad_enabled())


def plan_lora(source: ModelSource, lora: Lora, device: torch.device, precision: str) -> LoraPlan | None:
    """Decide which layers get adapters, and refuse what cannot be, before any weights load."""
    if not lora.enabled:
        return None
    _check_quantization(lora, device)
    if getattr(source.config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{source.key} = {source.name}: its weights are quantised already. Give the model it was made of; "
            "policy.lora.quantization quantises that one."
        )
    model = empty_model(source)
    start = None if lora.adapter is None else read_adapter(lora.adapter)
    targets = _targets(model, source, lora) if start is None else _targets_of(start, model, source, lora)
    # A frozen weight is never updated: where bfloat16 is computed with, the dtype it was published in holds all of it. But
    # float16 and bfloat16 do not multiply.
    frozen = torch.bfloat16 if source.dtype == torch.float16 else source.dtype
    dtype = frozen if precision == "bfloat16" else torch.float32
    plan = LoraPlan(
        lora.dim if start is None else start.dim,
        lora.alpha if start is None else start.alpha,
        lora.dropout,
        start is not None and start.rslora,
        tuple(targets),
        _short_names(targets, [name for name, _ in model.named_modules()]),
        start,
        dtype,
        precision,
        lora.quantization,
    )
    num_frozen = sum(parameter.numel() for parameter in model.parameters())
    with torch.device("meta"):
        _inject(model, plan, source)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return replace(plan, num_trained=num_trained, num_frozen=num_frozen)


def load_adapted(source: ModelSource, policy: PolicyConfig, device: torch.device, plan: LoraPlan) -> Policy:
    """The frozen model with its adapters, as training starts: new ones change nothing, trained ones are put in."""
    loaded = load_policy(source, policy, device, dtype=plan.dtype, quantization=plan.quantization_config())
    _inject(loaded.model, plan, source)
    if plan.dropout == 0 and plan.quantization is None:
        from tandem.model.lora.joined import join_adapters

        join_adapters(loaded.model)
    weights = {} if plan.start is None else plan.start.weights()
    with torch.no_grad():
        for name, layer in lora_layers(loaded.model):
            for side in ("lora_A", "lora_B"):
                weight = getattr(layer, side)[ADAPTER].weight
                weight.data = weight.data.float()
                if weights:
                    weight.copy_(weights[f"{name}.{side}"])
    return loaded


def start_fingerprint(source: ModelSource, plan: LoraPlan | None) -> str:
    """A name for what the policy computes as it starts; with new adapters it is what the base model computes."""
    weights = weights_fingerprint(source)
    if plan is not None and (source.dtype, plan.dtype) == (torch.float16, torch.bfloat16):
        weights = fingerprint(weights, "frozen in bfloat16")  # rounded otherwise than weights that are trained
    if plan is None or (plan.start is None and plan.quantization is None):
        return weights
    return fingerprint(weights, None if plan.start is None else plan.start.content(), plan.quantization)


def is_rounded(source: ModelSource, plan: LoraPlan | None) -> bool:
    """Whether frozen weights are rounded as they load: config.json names bfloat16, but files hold more digits.

    Weights that are trained load in float32, so that such a model computes other numbers with adapters than without.
    """
    from safetensors import safe_open

    if plan is None or not plan.dtype == source.dtype == torch.bfloat16:
        return False
    for path in source.folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            if any(file.get_slice(name).get_dtype() in WIDER for name in file.keys()):  # noqa: SIM118 - no mapping
                return True
    return False


def lora_layers(model: Any) -> list[tuple[str, Any]]:
    """The adapted layers, by their names in the plain model."""
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def merged(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the adapted model's tensors those of the plain model, adapters added to their weights in float32."""
    plain = {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items() if ".lora_" not in name}
    for name, layer in lora_layers(model):
        up, down = (tensors[f"{name}.{side}.{ADAPTER}.weight"].float() for side in ("lora_B", "lora_A"))
        plain[f"{name}.weight"] = plain[f"{name}.weight"].float() + layer.scaling[ADAPTER] * (up @ down)
    return plain


def dequantised(model: Any) -> dict[str, Tensor]:
    """The weights of quantised layers as their forward sees them, by name, on the host."""
    from peft.utils.integrations import dequantize_module_weight

    return {
        f"{name}.weight": dequantize_module_weight(module).detach().cpu()
        for name, module in model.named_modules()
        if (weight := module._parameters.get("weight")) is not None and not weight.is_floating_point()
    }


def _inject(model: Any, plan: LoraPlan, source: ModelSource) -> None:
    """Put peft's layers in the place of the targets, in the model itself, and freeze everything else."""
    from peft import inject_adapter_in_model

    try:
        with warnings.catch_warnings(action="ignore"):  # of target names that it reads in its own way: checked below
            inject_adapter_in_model(plan.peft_config(), model)
    except ValueError as error:
        raise ConfigError(f"policy.lora: peft cannot adapt {source.name}: {' '.join(str(error).split())}") from None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    wanted = {f"{name}.lora_{side}.{ADAPTER}.weight" for name in plan.targets for side in "AB"}
    if trained != wanted:
        # Where experts were linear layers once, peft takes their old names for the experts wherever they stand.
        odd = wanted - trained or trained - wanted
        names = ",".join(sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in odd}))
        raise ConfigError(
            f"policy.lora: peft takes {names} for parts of the experts of {source.name}, which are no linear layers. Leave them "
            f"out: policy.lora.exclude_modules=[{names}]."
        )
    for _, layer in lora_layers(model):
        if plan.dropout > 0:
            layer.lora_dropout[ADAPTER] = TrainingDropout(plan.dropout)


def _check_quantization(lora: Lora, device: torch.device) -> None:
    if lora.quantization is None:
        return
    key = f"policy.lora.quantization = {lora.quantization}"
    if device.type != "cuda":
        raise MachineError(f"{key}: quantised weights need a CUDA device, and there is none here. Leave it out.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"{key}: the package bitsandbytes is not installed. In the tandem checkout, run {install_command('qlora')}, "
            "or leave it out."
        )


def _linear(model: Any) -> tuple[dict[str, nn.Linear], str | None]:
    """The linear layers by name, the head left out; and the head's name."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    named = next((name for name, module in model.named_modules() if module is head), None)
    return {name: module for name, module in linear.items() if module is not head}, named


def _targets(model: Any, source: ModelSource, lora: Lora) -> list[str]:
    """The whole names of the layers that target_modules takes and exclude_modules leaves."""
    layers, head = _linear(model)
    known = f"Its linear layers are {listed(sorted({name.rsplit('.', 1)[-1] for name in layers}))}."
    taken = _taken(lora.target_modules, list(layers), head, source, known)
    for name in lora.exclude_modules:
        if not any(_ends(layer, name) for layer in (*layers, head or "")):
            raise ConfigError(f"policy.lora.exclude_modules: {name} matches no linear layer of {source.name}. {known}")
    left = [layer for layer in taken if not any(_ends(layer, name) for name in lora.exclude_modules)]
    if not left:
        raise ConfigError(
            "policy.lora.exclude_modules leaves out every layer that policy.lora.target_modules takes, so nothing would be "
            "trained."
        )
    return left


def _taken(wanted: list[str] | str, layers: list[str], head: str | None, source: ModelSource, known: str) -> list[str]:
    if wanted == ALL_LINEAR:
        return layers
    names = layers if head is None else [*layers, head]
    if isinstance(wanted, str):
        found = {wanted: _matched(wanted, names)}
    else:
        found = {pattern: {name for name in names if _ends(name, pattern)} for pattern in wanted}
    for pattern, taken in found.items():
        if head in taken:
            raise ConfigError(
                f"policy.lora.target_modules: {pattern} takes {head}, the head, which stays as it is: its weight is used "
                "directly, without logits being kept. Leave it out."
            )
        if not taken:
            hint = " A regular expression matches whole names; give names as a list." if pattern is wanted else ""
            raise ConfigError(
                f"policy.lora.target_modules: {pattern} matches no linear layer of {source.name}. {known}{hint}"
            )
    return [layer for layer in layers if any(layer in taken for taken in found.values())]


def _targets_of(start: TrainedAdapter, model: Any, source: ModelSource, lora: Lora) -> list[str]:
    """The layers that a trained adapter adapts; refused where the model or the configuration has others."""
    key = f"policy.lora.adapter = {start.name}"
    changed = lora.changed()
    for name, own in (("dim", start.dim), ("alpha", start.alpha)):
        if name in changed and changed[name] != own:
            raise ConfigError(
                f"{key}: its {name} is {own:g}, but policy.lora.{name} = {changed[name]:g}. Leave that out."
            )
    layers, _ = _linear(model)
    for module, sides in start.shapes.items():
        if module not in layers:
            raise ConfigError(f"{key}: made for another model: it adapts {module}, no linear layer of {source.name}.")
        layer = layers[module]
        want = {"A": (start.dim, layer.in_features), "B": (layer.out_features, start.dim)}
        for side in "AB":
            if sides[side] != want[side]:
                raise ConfigError(
                    f"{key}: made for another model: {module}.lora_{side} is {list(sides[side])}, but {source.name} needs "
                    f"{list(want[side])}."
                )
    if {"target_modules", "exclude_modules"} & changed.keys():
        asked = _targets(model, source, lora)
        if set(asked) != start.shapes.keys():
            odd = min(set(asked) ^ start.shapes.keys())
            raise ConfigError(
                f"{key}: it adapts other layers than policy.lora.target_modules asks for, such as {odd}. Leave "
                "target_modules and exclude_modules out."
            )
    return [name for name in layers if name in start.shapes]


def _ends(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _matched(pattern: str, modules: list[str]) -> set[str]:
    """The names that a regular expression matches whole, in a process that can be killed: some expressions never end."""
    try:
        return in_a_process(
            lambda: {module for module in modules if re.fullmatch(pattern, module)}, PATTERN_SECONDS, PATTERN_BYTES
        )
    except (Stalled, Died, MemoryError):
        raise ConfigError(
            f"policy.lora.target_modules: the regular expression {pattern} is not matched with the names of {len(modules)} "
            f"layers within {PATTERN_SECONDS:g} seconds. Give a simpler one, or names as a list."
        ) from None


def _short_names(targets: Iterable[str], modules: list[str]) -> tuple[str, ...]:
    """model.layers.0.mlp.up_proj, model.layers.1.mlp.up_proj -> up_proj, if no other module ends so; else whole names."""
    targets = list(targets)
    short = sorted({target.rsplit(".", 1)[-1] for target in targets})
    meant = [module for module in modules if any(_ends(module, name) for name in short)]
    return tuple(short) if set(meant) == set(targets) else tuple(targets)

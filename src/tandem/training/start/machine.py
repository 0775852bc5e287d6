"""Chooses precision, adapters and compilation for a device. Refuses settings that the device does not support."""

from dataclasses import dataclass
from itertools import product

import torch
from transformers import __version__ as transformers_version

from tandem.config.schema import Config
from tandem.errors import ConfigError, MachineError
from tandem.model.architecture import TYPES_WITH_BALANCE, architecture_of, router_class
from tandem.model.distributed.context import check_heads
from tandem.model.distributed.mesh import SINGLE_RANK_MESH, MeshShape
from tandem.model.files.layer_values import values_of
from tandem.model.files.source import ModelSource
from tandem.model.load import check_varlen
from tandem.model.lora.layers import LoraPlan, plan_lora
from tandem.model.lora.tokens import ids_of_tokens


@dataclass(frozen=True, slots=True)
class Machine:
    """The device of a run, and the precision, adapters and compilation chosen for the device."""

    device: torch.device
    precision: str
    lora: LoraPlan | None
    compiles: bool
    mesh: MeshShape = SINGLE_RANK_MESH  # of all ranks
    ranks_here: int = 1  # ranks on this machine


def this_device() -> torch.device:
    """Return the device that a run with one process uses on this machine."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def check_machine(
    config: Config,
    source: ModelSource,
    device: torch.device,
    mesh: MeshShape = SINGLE_RANK_MESH,
    *,
    ranks_here: int = 1,
    is_here: bool = True,
) -> Machine:
    """Choose precision, adapters and compilation for this device.

    Raise an error for settings that the device does not support. `is_here`: whether the device is in this machine.
    """
    precision = config.policy.precision
    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" else "float32"
    check_varlen(source, config.policy, precision, device)
    _check_context(source, mesh.context)
    _check_weights(config, precision)
    _check_offload(config, device)
    _check_routers(config, source, mesh.context)
    token_ids = ids_of_tokens(config.policy, source)
    lora = plan_lora(source, config.policy.lora, device, precision, token_ids, is_here=is_here)
    compiles = _compiles(config, device, precision, source)
    return Machine(device, precision=precision, lora=lora, compiles=compiles, mesh=mesh, ranks_here=ranks_here)


def _check_context(source: ModelSource, size: int) -> None:
    if size == 1:
        return
    if recurrent := architecture_of(source.config).recurrent:
        raise ConfigError(
            f"policy.parallel.context = {size}: {source.name} has recurrent layers ({', '.join(recurrent)}), whose state runs "
            "along a row and cannot be divided among ranks. Use policy.parallel.context=1."
        )
    text = source.config.get_text_config()
    heads = values_of(text, "num_attention_heads")
    for some, key_heads in product(sorted(set(heads)), sorted(set(values_of(text, "num_key_value_heads") or heads))):
        check_heads(some, key_heads, size, source.name)


def _check_routers(config: Config, source: ModelSource, context: int) -> None:
    """Raise ConfigError if a load-balancing loss is set for a model that cannot have one."""
    coefficient, architecture = config.dpo.router_aux_loss_coef, architecture_of(source.config)
    if coefficient == 0:
        return
    key = f"dpo.router_aux_loss_coef = {coefficient:g}"
    if not architecture.has_experts:
        raise ConfigError(f"{key}: {source.name} has no experts. Leave it out.")
    if router_class(architecture) is None and architecture.model_type in TYPES_WITH_BALANCE:
        raise ConfigError(
            f"{key}: routers of {architecture.model_type} models do not report their logits in transformers "
            f"{transformers_version}. Upgrade it, or leave the key out."
        )
    if router_class(architecture) is None:
        raise ConfigError(
            f"{key}: routers of {architecture.model_type} models have no load-balancing loss in tandem, because they balance in "
            f"another way or do not report their logits. Leave it out. It works with {', '.join(TYPES_WITH_BALANCE)}."
        )
    if context > 1:
        raise ConfigError(
            f"{key}: does not work with policy.parallel.context = {context}, which divides the tokens of a row among ranks. Use "
            "policy.parallel.context=1."
        )


def _check_weights(config: Config, precision: str) -> None:
    weights = config.policy.weights
    if weights == "float32":
        return
    if config.policy.lora.enabled:
        raise ConfigError(
            f"policy.weights = {weights}: with adapters the model's weights are frozen, and the adapters are trained in "
            "float32. Leave policy.weights out."
        )
    if precision != "bfloat16":
        # With precision=auto, a GPU would compute in bfloat16, so the cause is the machine and not the configuration.
        raise (MachineError if config.policy.precision == "auto" else ConfigError)(
            f"policy.weights = {weights}: bfloat16 weights need bfloat16 computation, not {precision}. Set "
            "policy.precision=bfloat16, or leave policy.weights out."
        )


def _check_offload(config: Config, device: torch.device) -> None:
    if config.policy.optimizer.offload and device.type != "cuda":
        raise MachineError(
            "policy.optimizer.offload = true: optimizer states leave the memory of a CUDA device, and this machine has none, so "
            "they are in host memory already. Leave it out."
        )


def _compiles(config: Config, device: torch.device, precision: str, source: ModelSource) -> bool:
    wanted = config.policy.compile
    # In float32, transformers splits the rows of experts by sizes that only the device knows, which cannot be compiled.
    uncompilable = precision == "float32" and architecture_of(source.config).has_experts
    if wanted is True and uncompilable:
        raise (MachineError if config.policy.precision == "auto" else ConfigError)(
            f"policy.compile = true: the experts of {source.name} cannot be compiled in float32. "
            "Use policy.compile=auto, or policy.precision=bfloat16."
        )
    # Torch does not compile a recomputed layer of which a part cannot be compiled.
    recomputed = config.policy.activation_checkpointing != "none" and bool(architecture_of(source.config).recurrent)
    if wanted is True and recomputed:
        raise ConfigError(
            f"policy.compile = true: the recurrent layers of {source.name} cannot be compiled if activations are recomputed. "
            "Use policy.compile=auto, or policy.activation_checkpointing=none."
        )
    return wanted is True or (wanted == "auto" and device.type == "cuda" and not uncompilable and not recomputed)

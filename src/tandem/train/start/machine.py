"""A device in; how it computes a run out: precision, adapters, compiled or not. Refused where it cannot."""

from dataclasses import dataclass

import torch

from tandem.config.schema import Config
from tandem.errors import ConfigError, MachineError
from tandem.model.files.source import ModelSource
from tandem.model.load import check_varlen, has_experts
from tandem.model.lora.layers import LoraPlan, plan_lora


@dataclass(frozen=True, slots=True)
class Machine:
    """How a device computes a run."""

    device: torch.device
    precision: str
    lora: LoraPlan | None
    compiles: bool


def this_device() -> torch.device:
    """What a run of one process computes on here."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def check_machine(config: Config, source: ModelSource, device: torch.device) -> Machine:
    """What this machine cannot do. Another may."""
    precision = config.policy.precision
    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" else "float32"
    check_varlen(source, config.policy, precision, device)
    _check_weights(config, precision)
    lora = plan_lora(source, config.policy.lora, device, precision)
    return Machine(device, precision, lora, _compiles(config, device, precision, source))


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
        # auto is bfloat16 on a GPU.
        raise (MachineError if config.policy.precision == "auto" else ConfigError)(
            f"policy.weights = {weights}: bfloat16 weights are computed with in bfloat16, not in {precision}. Set "
            "policy.precision=bfloat16, or leave policy.weights out."
        )


def _compiles(config: Config, device: torch.device, precision: str, source: ModelSource) -> bool:
    wanted = config.policy.compile
    # transformers' float32 experts split rows by numbers that only the device knows; bfloat16 ones do not.
    cannot = precision == "float32" and has_experts(source.config)
    if wanted is True and cannot:
        raise (MachineError if config.policy.precision == "auto" else ConfigError)(
            f"policy.compile = true: the experts of {source.name} cannot be compiled in float32. "
            "Use policy.compile=auto, or policy.precision=bfloat16."
        )
    return wanted is True or (wanted == "auto" and device.type == "cuda" and not cannot)

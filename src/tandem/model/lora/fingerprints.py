"""What a model with frozen weights computes before training: its fingerprint, and whether its weights are rounded."""

import torch

from tandem.config.sections.policy import Lora
from tandem.model.files.source import ModelSource, weights_fingerprint, weights_of
from tandem.model.lora.files import TrainedAdapter, read_adapter
from tandem.model.lora.layers import LoraPlan
from tandem.storage.cache import fingerprint

MORE_PRECISE_THAN_BFLOAT16 = ("F64", "F32", "F16")  # names in safetensors


def start_fingerprint(source: ModelSource, plan: LoraPlan | None) -> str:
    """Return a hash of everything that determines what the policy computes before training.

    New adapters are not part of the hash, because they do not change the output.
    """
    weights = weights_fingerprint(source)
    if plan is None:
        return weights
    if (source.dtype, plan.dtype) == (torch.float16, torch.bfloat16):
        weights = _frozen_in_bfloat16(weights)
    return _with_adapter(weights, plan.start, plan.quantization)


def start_fingerprints(source: ModelSource, lora: Lora) -> set[str]:
    """Return every `start_fingerprint` that a run with these settings can have: some depend on the device that trains."""
    weights = weights_fingerprint(source)
    if not lora.enabled:
        return {weights}
    start = None if lora.adapter is None else read_adapter(lora.adapter)
    frozen = {weights, _frozen_in_bfloat16(weights)} if source.dtype == torch.float16 else {weights}
    return {_with_adapter(one, start, lora.quantization) for one in frozen}


def _frozen_in_bfloat16(weights: str) -> str:
    """The fingerprint of float16 weights that a GPU freezes: they are rounded to nearest, unlike trained weights."""
    return fingerprint(weights, "frozen in bfloat16")


def _with_adapter(weights: str, start: TrainedAdapter | None, quantization: str | None) -> str:
    if start is None and quantization is None:
        return weights
    return fingerprint(weights, None if start is None else start.content(), quantization)


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

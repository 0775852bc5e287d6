"""Exports a trained policy: a model to a folder in the Hugging Face layout, adapters to a folder in peft's layout.

By default, a model is stored in the dtype of the start model, with stochastic rounding.
"""

import copy
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from tandem.data.text.template import Template
from tandem.exporting.gathering import gather_to_disk
from tandem.exporting.other_parts import copy_other_parts, copy_processor, keep_dtypes, named_as_stored
from tandem.failpoints import fail_point
from tandem.model.architecture import is_multimodal
from tandem.model.distributed.process_group import Ranks
from tandem.model.files.source import ModelSource
from tandem.model.lora.adapters import dequantise, merge_adapters
from tandem.model.lora.files import write_adapter
from tandem.model.lora.layers import LoraPlan, name_in_files
from tandem.model.policy import Policy
from tandem.model.precision.rounding import hash_start, random_bits, round_to_bfloat16, salt_of
from tandem.storage.cache import published

# Tensors are rounded in chunks of this many numbers, which limits memory.
NUMBERS_PER_CHUNK = 1 << 26
SCRATCH = "gathered"  # a folder inside that of the export, removed when the export is written


def round_stochastically(values: Tensor, dtype: torch.dtype, salt: int) -> Tensor:
    """Round each number to one of its two neighbours, the nearer one with the higher probability, so that the mean is kept.

    If training cast its weights to bfloat16 stochastically, rounding to bfloat16 here gives the same weights.
    """
    if dtype == torch.float32 or values.dtype != torch.float32:
        return values.to(dtype)
    flat = values.reshape(-1)
    rounded = torch.empty(flat.shape, dtype=dtype)
    for first in range(0, len(flat), NUMBERS_PER_CHUNK):
        chunk = flat[first : first + NUMBERS_PER_CHUNK]
        start = hash_start(first, salt)
        rounded[first : first + NUMBERS_PER_CHUNK] = (
            round_to_bfloat16(chunk, start)
            if dtype == torch.bfloat16
            else _round_with_bits(chunk, dtype, random_bits(len(chunk), start))
        )
    return rounded.reshape(values.shape)


def _round_with_bits(values: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round to any dtype, using the lower 24 of the random bits for each number."""
    nearest = values.to(dtype)
    limit = torch.where(nearest.float() > values, float("-inf"), float("inf")).to(dtype)
    other = torch.nextafter(nearest, limit)
    gap = (other.float() - nearest.float()).abs()
    probability = torch.where(gap > 0, (values - nearest.float()).abs() / gap, 0.0)
    use_other = (bits & 0xFFFFFF).float() / 0x1000000 < probability
    return torch.where(use_other & torch.isfinite(other), other, nearest)


def export_model(
    policy: Policy,
    source: ModelSource,
    template: Template,
    folder: Path,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    rounding: str,
    max_shard_size: str,
    measure: Callable[[Path], None],
    adapted: bool = False,
) -> None:
    """Write the model and the tokenizer to `folder`, so that transformers can load them with the start model's class.

    Every rank contributes its shard of the weights. The first rank writes all weights, in files of at most `max_shard_size`.
    All ranks then call `measure` with the temporary path of the export, before the export gets its final name.
    `source`: the start model. Its configuration keeps settings that training disables, such as dropout. If it is multimodal, the
    parts that are not trained are copied from its files.
    `adapted`: whether the policy has adapters, which are added to the weights in float32 before rounding.
    """
    round_one = _rounding_function(dtype, rounding)

    saved = _empty_model(policy, source.config, dtype)
    is_gathered = ranks.count > 1 and all(parameter.is_floating_point() for parameter in policy.parameters())

    def gather(aside: Path) -> dict[str, Tensor]:
        if is_gathered:
            return gather_to_disk(policy, saved, aside / SCRATCH, round_one, ranks)
        full = _full_tensors(policy)
        if not ranks.is_first:
            return {}
        tensors = merge_adapters(policy.model, full) if adapted else full
        return {name: round_one(name, tensors[name]) for name in sorted(tensors)}

    def write(aside: Path, state: dict[str, Tensor]) -> None:
        _save(saved, source, state, aside, max_shard_size=max_shard_size, is_gathered=is_gathered)
        shutil.rmtree(aside / SCRATCH, ignore_errors=True)
        _save_tokenizer(template, aside)

    _publish(folder, gather, write, measure, ranks)


def export_adapter(
    policy: Policy,
    lora: LoraPlan,
    base: str,
    revision: str | None,
    template: Template,
    folder: Path,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    rounding: str,
    measure: Callable[[Path], None],
) -> None:
    """Write the adapters and the tokenizer to `folder`, so that peft can load the adapters on top of the model `base`."""
    round_one = _rounding_function(dtype, rounding)
    named = {name.removeprefix("model."): _on_host(parameter) for name, parameter in sorted(policy.trained())}
    rounded = {
        name if name in lora.saved.parameters else name_in_files(name): round_one(name, tensor)
        for name, tensor in named.items()
    }
    # A tied weight has several names in the file.
    tensors = {name: tensor for name, tensor in rounded.items() if name not in lora.saved.parameters}
    tensors |= {name: rounded[parameter].clone() for name, parameter in lora.saved.weights}

    def write(aside: Path, state: dict[str, Tensor]) -> None:
        write_adapter(aside, lora.peft_config(base, revision), state)
        _save_tokenizer(template, aside)

    _publish(folder, lambda aside: tensors, write, measure, ranks)


def _publish(
    folder: Path,
    gather: Callable[[Path], dict[str, Tensor]],
    write: Callable[[Path, dict[str, Tensor]], None],
    measure: Callable[[Path], None],
    ranks: Ranks,
) -> None:
    """Write an export to a temporary folder on the first rank, measure it on all ranks, and rename the folder to `folder`.

    `gather`: a function that all ranks call with the temporary folder. It returns the tensors to write on the first rank.
    """
    with ExitStack() as stack:
        aside = ranks.from_first(lambda: stack.enter_context(published(folder, "model")))
        fail_point("model.gather")
        state = gather(aside)
        ranks.run_or_stop_all(lambda: write(aside, state), on=ranks.is_first)
        measure(aside)
        ranks.run_or_stop_all(stack.close, on=ranks.is_first)


def _rounding_function(dtype: torch.dtype, rounding: str) -> Callable[[str, Tensor], Tensor]:
    def round_one(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        is_stochastic = rounding == "stochastic"
        return round_stochastically(tensor, dtype, salt_of(name)) if is_stochastic else tensor.to(dtype)

    return round_one


def _full_tensors(policy: Policy) -> dict[str, Tensor]:
    """Return every tensor of the model, unsharded and on the host. A tied weight is returned once, so it is rounded once."""
    tensors = dict([*policy.named_parameters(), *policy.named_buffers()])
    if all(parameter.is_floating_point() for parameter in policy.parameters()):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full: dict[str, Any] = get_model_state_dict(policy, options=options)
        return {name.removeprefix("model."): full[name] for name in tensors if name in full}
    # The state of a quantised model also holds its quantisation state; only the dequantised weights are exported.
    saved = policy.state_dict().keys()
    dequantised = dequantise(policy.model)
    names = (name.removeprefix("model.") for name in tensors if name in saved)
    return {name: dequantised[name] if name in dequantised else _on_host(tensors[f"model.{name}"]) for name in names}


def _on_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def _empty_model(policy: Policy, config: Any, dtype: torch.dtype) -> Any:
    """Return the model to save, without weights."""
    config = copy.deepcopy(config)
    config.dtype = dtype
    if hasattr(config, "quantization_config"):  # some quantised weights (MXFP4) are loaded and trained as plain ones
        del config.quantization_config
    with torch.device("meta"):
        empty = policy.architecture.auto_class.from_config(config, dtype=dtype, attn_implementation="eager")
    empty.generation_config = policy.model.generation_config
    return empty


def _save(
    saved: Any, source: ModelSource, state: dict[str, Tensor], folder: Path, *, max_shard_size: str, is_gathered: bool
) -> None:
    """Write the weights of `saved`, with the other parts of a multimodal checkpoint.

    `is_gathered`: whether the weights were gathered on disk, and so have their published names already.
    """
    if not is_multimodal(source.config):
        saved.save_pretrained(
            str(folder), state_dict=state, max_shard_size=max_shard_size, save_original_format=not is_gathered
        )
        return
    keep_dtypes(saved.config, source)
    named = named_as_stored(state, saved, source, is_published=is_gathered)
    saved.save_pretrained(str(folder), state_dict=named, max_shard_size=max_shard_size, save_original_format=False)
    copy_other_parts(folder, saved, source, max_shard_size)
    copy_processor(folder, source)


def _save_tokenizer(template: Template, folder: Path) -> None:
    tokenizer = template.tokenizer
    own = tokenizer.chat_template
    try:
        if template.source is not None:
            tokenizer.chat_template = template.source
        tokenizer.save_pretrained(str(folder))
    finally:
        tokenizer.chat_template = own

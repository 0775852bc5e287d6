"""A trained policy in; a model folder in the Hugging Face layout (or an adapter's, as peft lays it out) out.

In the model's dtype, by stochastic rounding.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from tandem.data.text.template import Template
from tandem.model.distributed.process_group import Ranks
from tandem.model.lora.files import write_adapter
from tandem.model.lora.layers import ADAPTER, LoraPlan, dequantised, merged
from tandem.model.policy import Policy
from tandem.model.precision.rounding import chances, rounded, salt_of, start_of
from tandem.storage.cache import published

# Numbers that are rounded together: memory is bounded by it, however large a tensor is.
AT_ONCE = 1 << 26


def rounded_stochastically(values: Tensor, dtype: torch.dtype, salt: int) -> Tensor:
    """Each number rounded to one of its two neighbours, the nearer one with the greater probability: right on average.

    Weights that training cast by chance to bfloat16 become what it computed with.
    """
    if dtype == torch.float32 or values.dtype != torch.float32:
        return values.to(dtype)
    flat = values.reshape(-1)
    made = torch.empty(flat.shape, dtype=dtype)
    for first in range(0, len(flat), AT_ONCE):
        part = flat[first : first + AT_ONCE]
        start = start_of(first, salt)
        made[first : first + AT_ONCE] = (
            rounded(part, start) if dtype == torch.bfloat16 else _to(dtype, part, chances(len(part), start))
        )
    return made.reshape(values.shape)


def _to(dtype: torch.dtype, values: Tensor, chance: Tensor) -> Tensor:
    nearest = values.to(dtype)
    limit = torch.where(nearest.float() > values, float("-inf"), float("inf")).to(dtype)
    other = torch.nextafter(nearest, limit)
    gap = (other.float() - nearest.float()).abs()
    odds = torch.where(gap > 0, (values - nearest.float()).abs() / gap, 0.0)
    take = (chance & 0xFFFFFF).float() / 0x1000000 < odds
    return torch.where(take & torch.isfinite(other), other, nearest)


def export_model(
    policy: Policy,
    config: Any,
    template: Template,
    folder: Path,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    rounding: str,
    measure: Callable[[Path], None],
    adapted: bool = False,
) -> None:
    """Write `folder`, which `AutoModelForCausalLM` and `AutoTokenizer` load, template included.

    `config` is the start model's own: what training switched off (dropout) is on again in the export. Every worker gives
    its part of the weights, the first writes them. All `measure` what was written before it gets its name, which is a
    run's last act. `adapted`: the policy has adapters, which are added to the weights, in float32, before these are rounded.
    """
    whole = _whole(policy)
    round_one = _rounding(dtype, rounding)

    def write(aside: Path) -> None:
        tensors = merged(policy.model, whole) if adapted else whole
        state = {name: round_one(name, tensors[name]) for name in sorted(tensors)}
        _save(policy.model, config, state, aside, dtype)
        _save_tokenizer(template, aside)

    _publish(folder, write, measure, ranks)


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
    """Write `folder`, which peft loads on top of the model `base`: the adapters alone, and the tokenizer."""
    round_one = _rounding(dtype, rounding)
    named = {name.removeprefix("model."): _on_host(parameter) for name, parameter in sorted(policy.trained())}
    tensors = {name.removesuffix(f".{ADAPTER}.weight"): round_one(name, tensor) for name, tensor in named.items()}

    def write(aside: Path) -> None:
        write_adapter(aside, lora.peft_config(base, revision), tensors)
        _save_tokenizer(template, aside)

    _publish(folder, write, measure, ranks)


def _publish(folder: Path, write: Callable[[Path], None], measure: Callable[[Path], None], ranks: Ranks) -> None:
    """The first worker writes, all measure what it wrote, and then it gets its name."""
    with ExitStack() as stack:
        aside = ranks.from_first(lambda: stack.enter_context(published(folder, "model")))

        ranks.agreed(lambda: write(aside), by=ranks.is_first)
        measure(aside)
        ranks.agreed(stack.close, by=ranks.is_first)


def _rounding(dtype: torch.dtype, rounding: str) -> Callable[[str, Tensor], Tensor]:
    def round_one(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        by_chance = rounding == "stochastic"
        return rounded_stochastically(tensor, dtype, salt_of(name)) if by_chance else tensor.to(dtype)

    return round_one


def _whole(policy: Policy) -> dict[str, Tensor]:
    """Every tensor of the model on the host, by its name there; a tied weight once, so both its uses are rounded alike."""
    held = dict([*policy.named_parameters(), *policy.named_buffers()])
    if all(parameter.is_floating_point() for parameter in policy.parameters()):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: dict[str, Any] = get_model_state_dict(policy, options=options)
        return {name.removeprefix("model."): whole[name] for name in held if name in whole}
    # A quantised model's state holds its quantisation too; wanted are the weights that it computes with.
    saved = policy.state_dict().keys()
    quantised = dequantised(policy.model)
    names = (name.removeprefix("model.") for name in held if name in saved)
    return {name: quantised[name] if name in quantised else _on_host(held[f"model.{name}"]) for name in names}


def _on_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def _save(model: Any, config: Any, state: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.dtype = dtype
    if hasattr(config, "quantization_config"):  # some quantised weights load, and are trained, as plain ones (MXFP4)
        del config.quantization_config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    empty.generation_config = model.generation_config
    empty.save_pretrained(str(folder), state_dict=state)


def _save_tokenizer(template: Template, folder: Path) -> None:
    tokenizer = template.tokenizer
    own = tokenizer.chat_template
    try:
        if template.source is not None:
            tokenizer.chat_template = template.source
        tokenizer.save_pretrained(str(folder))
    finally:
        tokenizer.chat_template = own

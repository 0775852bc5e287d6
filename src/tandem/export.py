"""A trained policy in; a model folder in the Hugging Face layout out, in the model's dtype by stochastic rounding."""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tandem.cache import published
from tandem.data.template import Template
from tandem.model.policy import Policy
from tandem.model.workers import Workers

# 16-bit patterns dropped from a float32 when it becomes a bfloat16.
DROPPED = 1 << 16


def round_stochastically(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Round to one of the two neighbours, the nearer one with the greater probability: right in expectation.

    DPO's updates are smaller than half a unit in the last place of bfloat16; rounding to nearest would undo them.
    """
    if dtype == torch.float32 or values.dtype != torch.float32:
        return values.to(dtype)
    if dtype == torch.bfloat16:
        # The low 16 bits are the distance to the neighbour below: adding uniform noise carries in proportion.
        noise = torch.randint(0, DROPPED, values.shape, generator=generator, dtype=torch.int32)
        rounded = (values.view(torch.int32) + noise) & -DROPPED
        finite = torch.isfinite(values)
        return torch.where(finite, rounded.view(torch.float32), values).to(dtype)
    nearest = values.to(dtype)
    other = torch.where(nearest.float() > values, _next(nearest, down=True), _next(nearest, down=False))
    gap = (other.float() - nearest.float()).abs()
    chance = torch.where(gap > 0, (values - nearest.float()).abs() / gap, torch.zeros_like(values))
    take = torch.rand(values.shape, generator=generator) < chance
    return torch.where(take & torch.isfinite(other), other, nearest)


def _next(values: Tensor, *, down: bool) -> Tensor:
    limit = torch.full_like(values, float("-inf") if down else float("inf"))
    return torch.nextafter(values, limit)


def export_model(
    policy: Policy,
    config: Any,
    template: Template,
    folder: Path,
    workers: Workers,
    *,
    dtype: torch.dtype,
    rounding: str,
    seed: int,
    measure: Callable[[Path], None],
) -> None:
    """Write `folder`, which `AutoModelForCausalLM` and `AutoTokenizer` load, template included.

    `config` is the start model's own: what training switched off (dropout) is on again in the export. Every worker gives
    its part of the weights, the first writes them. All `measure` what was written before it gets its name, which is a
    run's last act.
    """
    whole = get_model_state_dict(policy, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    generator = torch.Generator().manual_seed(seed)

    def as_exported(tensor: Any) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return round_stochastically(tensor, dtype, generator) if rounding == "stochastic" else tensor.to(dtype)

    def write(aside: Path) -> None:
        # A tied weight stands here once, so both its uses are rounded alike.
        held = [*policy.named_parameters(), *policy.named_buffers()]
        names = sorted(name for name, _ in held if name in whole)
        state = {name.removeprefix("model."): as_exported(whole[name]) for name in names}
        _save(policy.model, config, state, aside, dtype)
        _save_tokenizer(template, aside)

    with ExitStack() as stack:
        aside = workers.from_first(lambda: stack.enter_context(published(folder, "model")))
        workers.agreed(lambda: write(aside), by=workers.is_first)
        measure(aside)
        workers.agreed(stack.close, by=workers.is_first)


def _save(model: Any, config: Any, state: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.dtype = dtype
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

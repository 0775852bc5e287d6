"""LoRA adapters created with peft, and models with them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import as_policy, plain_token_logps
from peft import LoraConfig, PeftModel, get_peft_model
from running import SHORT, few_pairs, metrics_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.data.text.tokens import TokenizedPreference
from tandem.model.distributed.layers import shard
from tandem.model.distributed.process_group import join_process_group
from tandem.model.lora.adapters import load_adapted
from tandem.packing.layout import lay_out
from tandem.training.start.setup import Setup, set_up

CPU = torch.device("cpu")

TRAINED = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def trained_adapter(base: Path, folder: Path, *, seed: int = 1, **settings: Any) -> Path:
    """Save an adapter with peft, with both of its weights far from 0, and return its folder."""
    torch.manual_seed(seed)
    model = get_peft_model(plain_model(base), LoraConfig(**{"task_type": "CAUSAL_LM", **TRAINED, **settings}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def with_adapter(base: Path, folder: Path) -> Any:
    """Load the model with the adapter, using peft."""
    return PeftModel.from_pretrained(plain_model(base), folder)


@dataclass(frozen=True, slots=True)
class Computed:
    """The log-probabilities of all scored tokens, and the gradients of a weighted sum of them, by name in the model."""

    model: Any
    logps: Tensor
    gradients: dict[str, Tensor]


def in_a_pack(base: Path, adapter: Path, preferences: list[TokenizedPreference]) -> Computed:
    """Compute preferences in one pack with tandem's model with an adapter."""
    named = [f"policy.model_name={base}", "policy.lora.enabled=true", f"policy.lora.adapter={adapter}"]
    setup = set_up_with(*named)
    model = load_adapted(setup.source, setup.config.policy, CPU, setup.lora).model
    policy = shard(as_policy(model), join_process_group(), bfloat16=False)
    inputs = policy.inputs(lay_out(range(len(preferences)), preferences, length=256), CPU)
    with policy.computing():
        logps = policy(inputs)[: inputs.num_scored]
        return Computed(model, logps, _gradients(model, logps))


def by_peft(base: Path, adapter: Path, preferences: list[TokenizedPreference]) -> Computed:
    """Compute each sequence alone with peft's model with an adapter."""
    model = PeftModel.from_pretrained(plain_model(base), adapter, is_trainable=True)
    logps = torch.cat([logps for preference in preferences for logps in plain_token_logps(model, preference)])
    return Computed(model, logps, _gradients(model, logps))


def set_up_with(*overrides: str) -> Setup:
    """Set up a short run."""
    return set_up(load_config(None, [*SHORT, *overrides]).config, CPU)


def few_pairs_with_cache(folder: Path) -> list[str]:
    """Overrides for training and validation on few pairs, with a cache that the runs of a module share."""
    return [few_pairs(folder, 20), f"data.validation={folder}/few.jsonl", f"reference.cache_dir={folder}/cache"]


def plain_losses(model: Any, start: Any, setup: Setup, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train peft's model for four steps with DPO in a plain loop: one sequence at a time, full logits. Return the losses.

    `start`: the reference.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    losses = []
    for batch in setup.plan.batches.epoch(0)[:4]:
        margins = []
        for index in batch.preferences:
            preference = setup.plan.train.store[int(index)]
            chosen, rejected = (logps.sum() for logps in plain_token_logps(model, preference))
            with torch.no_grad():
                ref_chosen, ref_rejected = (logps.sum() for logps in plain_token_logps(start, preference))
            margins.append((chosen - ref_chosen) - (rejected - ref_rejected))
        loss = -F.logsigmoid(0.1 * torch.stack(margins)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _gradients(model: Any, logps: Tensor) -> dict[str, Tensor]:
    outer = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    (logps * outer[: len(logps)]).sum().backward()
    named = {name.removeprefix("base_model.model."): p.grad for name, p in model.named_parameters()}
    return {name: gradient for name, gradient in named.items() if gradient is not None}


def assert_same(found: Computed, wanted: Computed, *, atol: float = 2e-5, rtol: float = 5e-5) -> None:
    torch.testing.assert_close(found.logps, wanted.logps, atol=atol, rtol=0)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        assert (found.gradients[name] - gradient).abs().max() <= rtol * gradient.abs().max() + 1e-9, name


def assert_same_logps(ours: Any, theirs: Any, setup: Setup) -> None:
    with torch.no_grad():
        for index in (0, 7, 15):
            preference = setup.plan.train.store[index]
            first, second = (torch.cat(plain_token_logps(model, preference)) for model in (ours, theirs))
            torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


def assert_export_is_as_in_memory(run: Path) -> None:
    """Check that a run measured the same loss with its export as with the model in memory."""
    memory, exported = (metrics_of(run, f"{split}-default")[-1] for split in ("validation", "exported"))
    assert exported["loss"] == pytest.approx(memory["loss"], abs=1e-5)

"""LoRA adapters created with peft, and models with them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import as_policy, plain_token_logps
from peft import LoraConfig, PeftModel, get_peft_model
from running import SHORT
from torch import Tensor
from transformers import AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.data.text.tokens import TokenizedPreference
from tandem.model.distributed.layers import shard
from tandem.model.distributed.process_group import join_process_group
from tandem.model.lora.adapters import load_adapted
from tandem.packing.layout import lay_out
from tandem.training.start.setup import set_up

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
    setup = set_up(load_config(None, [*SHORT, *named]).config, CPU)
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

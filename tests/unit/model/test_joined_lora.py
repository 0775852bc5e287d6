"""A linear layer and its adapter in one matrix product."""

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from torch import nn

from tandem.model.lora.joined import JoinedLinear, join_adapters, joined_linear

SCALE = 1.75


def made(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.float64)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(6, 20), (20, 6), (8, 8)])
def test_the_joined_product_equals_the_merged_layer_with_its_gradients(inputs, outputs, has_bias, compiled):
    torch.manual_seed(0)
    x, down, up = (one.requires_grad_() for one in (made(2, 5, inputs), made(3, inputs), made(outputs, 3)))
    weight, bias = made(outputs, inputs), made(outputs) if has_bias else None
    outer = made(2, 5, outputs)
    joined = torch.compile(joined_linear, fullgraph=True, backend="aot_eager") if compiled else joined_linear
    out = joined(x, weight, bias, down, up, SCALE)
    want = F.linear(x, weight + SCALE * up @ down, bias)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(out, (x, down, up), outer)
    torch.testing.assert_close(got, torch.autograd.grad(want, (x, down, up), outer), rtol=1e-12, atol=1e-12)


def test_an_untrained_adapter_changes_nothing():
    torch.manual_seed(0)
    x, weight, down = made(4, 6), made(10, 6), made(3, 6)
    torch.testing.assert_close(joined_linear(x, weight, None, down, torch.zeros(10, 3).double(), SCALE), x @ weight.T)


def adapted(**settings) -> nn.ModuleDict:
    model = nn.ModuleDict({"a": nn.Linear(6, 10), "b": nn.Linear(6, 10), "c": nn.Embedding(3, 6)})
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=8, target_modules=["a", "c"], **settings), model)
    return model


def test_joined_layers_compute_the_same_as_peft_and_other_layers_are_unchanged():
    torch.manual_seed(0)
    model, x = adapted(init_lora_weights=False), torch.randn(4, 6)
    want = model["a"](x)
    join_adapters(model)
    assert [type(module) for module in (model["a"], model["b"])] == [JoinedLinear, nn.Linear]
    assert not isinstance(model["c"], Linear)
    torch.testing.assert_close(model["a"](x), want)

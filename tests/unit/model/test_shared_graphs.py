"""Compiled layers are compiled once, for training: passes without gradients use the same graphs."""

import weakref

import numpy as np
import pytest
import torch
from models import as_policy, random_preference, tiny_model
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch._dynamo.utils import counters

from tandem.model import policy
from tandem.model.distributed.layers import compile_layers, freeze
from tandem.model.lora.layers import TrainingDropout
from tandem.packing.layout import lay_out

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch):
    """Layers are compiled by a backend that needs no C++ compiler."""
    torch._dynamo.reset()
    compile = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **given: compile(self, backend="aot_eager", **given))


@pytest.fixture
def compiled():
    policy = as_policy(tiny_model("llama"))
    compile_layers(policy)
    return policy


@pytest.fixture
def inputs(compiled):
    rng = np.random.default_rng(0)
    return compiled.inputs(lay_out(range(3), [random_preference(rng) for _ in range(3)], length=128), CPU)


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_a_pass_without_gradients_compiles_nothing_and_gives_the_same_numbers(compiled, inputs):
    trained = compiled(inputs)
    trained.sum().backward()
    before = num_graphs()
    with torch.no_grad():
        measured = compiled(inputs)
    assert num_graphs() == before
    assert torch.equal(measured, trained)
    assert not measured.requires_grad


def test_a_pass_without_gradients_keeps_no_activations(compiled, inputs, monkeypatch):
    forget, given, alive = policy._forget, [], []
    gate = (
        inputs.token_ids.numel() * compiled.model.config.intermediate_size
    )  # only activations of the MLP are so large

    def note(saved):
        if saved.numel() == gate:
            given.append(weakref.ref(saved))
        alive.append(sum(one() is not None for one in given))
        return forget(saved)

    monkeypatch.setattr(policy, "_forget", note)
    with torch.no_grad():
        hidden = compiled._hidden(inputs)
    assert not hidden.requires_grad
    per_layer = len(given) // compiled.model.config.num_hidden_layers
    assert per_layer > 0
    assert max(alive) <= per_layer


def test_a_frozen_policy_has_graphs_of_its_own(compiled, inputs):
    compiled(inputs).sum().backward()
    before = num_graphs()
    freeze(compiled)
    with torch.no_grad():
        compiled(inputs)
    assert not compiled.shares_graphs
    assert num_graphs() > before


def test_dropout_is_not_applied_without_gradients(inputs):
    model = tiny_model("llama")
    inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False), model)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_dropout["default"] = TrainingDropout(0.5)
    dropping = as_policy(model)
    compile_layers(dropping)
    with torch.no_grad():
        first, second = dropping(inputs), dropping(inputs)
    assert torch.equal(first, second)
    assert not torch.equal(dropping(inputs), first)

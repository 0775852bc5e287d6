"""Activation checkpointing gives the same results, and keeps fewer activations."""

import numpy as np
import pytest
import torch
from models import as_policy, random_preference, tiny_model
from peft import LoraConfig, inject_adapter_in_model
from running import largest_difference, metrics_of, short_run, weights_of
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.model.architecture import decoder_layers
from tandem.model.distributed.layers import ATTENTION, PRODUCTS, recompute
from tandem.model.lora.joined import join_adapters
from tandem.packing.layout import lay_out

HOWS = ("none", "selective", "full")


def test_the_run_is_the_same_bit_for_bit(tmp_path):
    runs = {how: short_run(tmp_path / how, f"policy.activation_checkpointing={how}") for how in HOWS}
    for how in HOWS[1:]:
        assert metrics_of(runs[how]) == metrics_of(runs["none"])
        assert largest_difference(weights_of(runs[how]), weights_of(runs["none"])) == 0.0


class Products(TorchDispatchMode):
    """Counts matrix products and calls of attention."""

    def __init__(self):
        super().__init__()
        self.counts = {"products": 0, "attention": 0}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts["products"] += operation in PRODUCTS
        self.counts["attention"] += operation in ATTENTION
        return operation(*args, **(kwargs or {}))


def backward(architecture, how):
    """The number of products and attention calls in the backward pass, and the gradients."""
    policy = as_policy(tiny_model(architecture).train())
    if how != "none":
        recompute(policy, how)
    rng = np.random.default_rng(0)
    chosen = [random_preference(rng) for _ in range(3)]
    logps = policy(policy.inputs(lay_out(range(3), chosen, length=128), torch.device("cpu"))).sum()
    with Products() as mode:
        logps.backward()
    grads = {name: parameter.grad for name, parameter in policy.named_parameters() if parameter.grad is not None}
    return mode.counts, grads


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_moe"])
def test_gradients_are_equal_and_half_or_all_products_are_computed_again(architecture):
    counts, gradients = {}, {}
    for how in HOWS:
        counts[how], gradients[how] = backward(architecture, how)
    for how in HOWS[1:]:
        assert gradients[how].keys() == gradients["none"].keys()
        for name, gradient in gradients["none"].items():
            assert torch.equal(gradients[how][name], gradient), name
    again = {how: counts[how]["products"] - counts["none"]["products"] for how in HOWS[1:]}
    assert again["full"] >= 12  # of seven in each of two layers, all but the last, of which nothing is needed
    assert 0.4 * again["full"] <= again["selective"] <= 0.6 * again["full"]
    assert counts["selective"]["attention"] == counts["none"]["attention"]


def kept_by_a_compiled_layer(how, *, rank):
    """Values per token that a compiled layer keeps for the backward pass, without its input, weights and masks."""
    torch._dynamo.reset()
    shape = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 1}
    model = tiny_model("llama", **shape).train()
    if rank:
        inject_adapter_in_model(LoraConfig(r=rank, target_modules="all-linear"), model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        join_adapters(model)
    policy = as_policy(model, attention="sdpa")  # as where layers are compiled
    if how != "none":
        recompute(policy, how)
    (layer,) = decoder_layers(policy.model)
    layer.compile(fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    tokens, positions = torch.randn(1, 512, 256, requires_grad=True), torch.arange(512)[None]
    turns = model.model.rotary_emb(tokens, positions)
    pack = lay_out([0], [random_preference(np.random.default_rng(0))], length=512)
    mask = policy.inputs(pack, torch.device("cpu")).mask
    out = layer(tokens, position_embeddings=turns, attention_mask=None, pack=mask)
    known = {one.data_ptr() for one in (tokens, *turns, *model.parameters())}
    kept = {one.data_ptr(): one.numel() for one in out.grad_fn.saved_tensors if one.is_floating_point()}
    return sum(numel for place, numel in kept.items() if place not in known) / 512


@pytest.mark.slow
@pytest.mark.parametrize("rank", [8, 64])
def test_a_compiled_layer_keeps_few_more_activations_with_adapters(rank):
    """For `full` up to torch 2.12, tests/gpu checks that nothing is kept."""
    plain, adapted = ({how: kept_by_a_compiled_layer(how, rank=which) for how in HOWS} for which in (0, rank))
    assert plain["full"] == adapted["full"] == 0
    few = 7 * rank  # of each product's adapter
    assert plain["none"] <= adapted["none"] <= plain["none"] + few
    assert 0.2 * plain["none"] < plain["selective"] < 0.6 * plain["none"]
    assert plain["selective"] <= adapted["selective"] <= plain["selective"] + few

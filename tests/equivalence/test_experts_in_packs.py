"""Mixtures of experts in packs: log-probabilities, and the gradients of routers and experts, equal those of a plain loop."""

import numpy as np
import pytest
import torch
from experts import FAMILIES
from models import as_policy, plain_token_logps, random_preference, tiny_model

from tandem.packing.layout import lay_out

CPU = torch.device("cpu")
ROUTERS = ("gate.weight", "router.weight", "router.bias")


def family(name):
    return tiny_model(name, **FAMILIES[name]).eval()  # as in a run; PhiMoE samples experts in training mode


def gradients(model, logps, outer):
    model.zero_grad()
    (logps * outer[: len(logps)]).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_logps_and_gradients_equal_a_plain_loop(name):
    rng = np.random.default_rng(7)
    preferences = [random_preference(rng, num_completions=n, max_prompt=20) for n in (2, 3, 4)]
    model = family(name)
    outer = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    plain = torch.cat([logps for preference in preferences for logps in plain_token_logps(model, preference)])
    want = gradients(model, plain, outer)
    routers = [gradient for weight, gradient in want.items() if weight.endswith(ROUTERS)]
    experts = [gradient for weight, gradient in want.items() if ".experts." in weight]
    assert routers and experts and all(gradient.any() for gradient in (*routers, *experts))
    policy = as_policy(model)
    inputs = policy.inputs(lay_out(range(3), preferences, length=256), CPU)
    packed = policy(inputs)[: inputs.num_scored]
    got = gradients(model, packed, outer)
    torch.testing.assert_close(packed, plain, atol=2e-5, rtol=0)
    assert got.keys() == want.keys()
    for weight, gradient in want.items():
        assert (got[weight] - gradient).abs().max() <= 2e-5 * gradient.abs().max() + 1e-9, weight


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_the_bias_that_balances_routers_selects_experts_and_does_not_change(name):
    """In these models a buffer is added to the scores when experts are chosen. Preference training leaves it as it is."""
    model = family(name)
    biases = {key: buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")}
    preference = random_preference(np.random.default_rng(3), num_completions=3)
    policy = as_policy(model)
    inputs = policy.inputs(lay_out([0], [preference], length=128), CPU)
    before = policy(inputs).detach()
    for bias in biases.values():
        bias.copy_(torch.tensor([5.0, 5.0, 0.0, 0.0]))
    kept = {key: bias.clone() for key, bias in biases.items()}
    after = policy(inputs)
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(
        after[: inputs.num_scored], torch.cat(plain_token_logps(model, preference)), atol=2e-5, rtol=0
    )
    after[: inputs.num_scored].sum().backward()
    assert biases and not any(bias.requires_grad for bias in biases.values())
    assert all(torch.equal(bias, kept[key]) for key, bias in biases.items())
    assert not any("correction_bias" in key for key, _ in policy.trained())


def test_the_margin_of_phimoes_routers_has_an_effect_in_evaluation_mode():
    def phimoe(margin):
        return tiny_model("phimoe", **{**FAMILIES["phimoe"], "router_jitter_noise": margin}).eval()

    preference = random_preference(np.random.default_rng(3))
    with torch.no_grad():
        narrow, wide = (plain_token_logps(phimoe(margin), preference) for margin in (0.01, 0.3))
    assert (narrow[0] - wide[0]).abs().max() > 1e-4

"""Packing, prompt sharing and padding do not change log-probabilities or gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ARCHITECTURES, as_policy, plain_token_logps, random_preference, tiny_model

from tandem.errors import TandemError
from tandem.packing.layout import join, lay_out

CPU = torch.device("cpu")
ARRANGEMENTS = ["shared", "repeated", "separate"]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(model, preferences, weights):
    model.zero_grad()
    logps = torch.cat([logp for preference in preferences for logp in plain_token_logps(model, preference)])
    (logps * weights[: len(logps)]).sum().backward()
    return logps.detach(), gradients(model)


def packed(model, pack, weights, **settings):
    policy = as_policy(model, **settings)
    model.zero_grad()
    inputs = policy.inputs(pack, CPU)
    logps = policy(inputs)[: inputs.num_scored]
    (logps * weights[: len(logps)]).sum().backward()
    return logps.detach(), gradients(model)


def assert_same(got, want, *, logps=2e-5, relative=2e-5):
    torch.testing.assert_close(got[0], want[0], atol=logps, rtol=0)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        largest = gradient.abs().max()
        assert (got[1][name] - gradient).abs().max() <= relative * largest + 1e-9, name


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_logps_and_gradients_equal_each_sequence_alone(architecture, arrangement):
    rng = np.random.default_rng(7)
    preferences = [random_preference(rng, num_completions=n) for n in (2, 3, 4)]
    # Longer than any window: 50 tokens of prompt, completions one after another, far from it in the row.
    preferences.append(random_preference(rng, num_completions=3, max_prompt=50, max_completion=30))
    model = tiny_model(architecture)
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    pack = lay_out(range(4), preferences, length=384, arrangement=arrangement)
    assert_same(packed(model, pack, weights), plain(model, preferences, weights))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_that_share_a_mask_equal_each_sequence_alone(architecture):
    """Several rows at a time; one of them has only filler."""
    rng = np.random.default_rng(8)
    preferences = [random_preference(rng, num_completions=n, max_prompt=50) for n in (2, 3)]
    model = tiny_model(architecture)
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    rows = [lay_out([number], [one], length=256) for number, one in enumerate(preferences)]
    pack = join([rows[0], lay_out([], [], length=256), rows[1]])
    want = plain(model, preferences, weights)
    assert_same(packed(model, pack, weights, attention="sdpa"), want)
    assert_same(packed(model, pack, weights, attention="trees"), want)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in ("gemma2", "gpt_oss")])
def test_sequences_given_as_runs_of_tokens_equal_each_alone(architecture):
    rng = np.random.default_rng(7)
    preferences = [random_preference(rng, num_completions=n, max_prompt=50, max_completion=30) for n in (2, 3, 4)]
    model = tiny_model(architecture)
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    packs = [lay_out([i], [preference], length=384, arrangement="repeated") for i, preference in enumerate(preferences)]
    got = packed(model, join(packs), weights, attention="varlen")
    assert_same(got, plain(model, preferences, weights))


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_runs_of_tokens_refuse_unsupported_attention(architecture):
    preference = random_preference(np.random.default_rng(7))
    policy = as_policy(tiny_model(architecture), attention="varlen")
    with pytest.raises(
        TandemError, match=r"caps its scores or has sinks, which policy\.attention=varlen does not support"
    ):
        policy(policy.inputs(lay_out([0], [preference], length=64, arrangement="repeated"), CPU))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    completions=st.lists(st.integers(2, 4), min_size=1, max_size=5),
    arrangement=st.sampled_from(ARRANGEMENTS),
    chunk=st.integers(1, 40),
)
def test_any_preferences_in_any_arrangement_equal_each_sequence_alone(seed, completions, arrangement, chunk):
    rng = np.random.default_rng(seed)
    preferences = [random_preference(rng, num_completions=n) for n in completions]
    model = tiny_model("mistral", seed=seed)
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
    pack = lay_out(range(len(preferences)), preferences, length=512, arrangement=arrangement)
    assert_same(packed(model, pack, weights, head_chunk=chunk), plain(model, preferences, weights))


def test_packs_joined_to_a_micro_batch_equal_the_packs_alone():
    rng = np.random.default_rng(3)
    preferences = [random_preference(rng, num_completions=n) for n in (2, 4, 3)]
    packs = [lay_out([i], [preference], length=128) for i, preference in enumerate(preferences)]
    model = tiny_model("llama")
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert_same(packed(model, join(packs), weights), plain(model, preferences, weights))


def test_the_unpacked_path_equals_each_sequence_alone():
    rng = np.random.default_rng(5)
    preferences = [random_preference(rng, num_completions=n) for n in (2, 3)]
    model = tiny_model("llama")
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    pack = lay_out(range(2), preferences, length=128, arrangement="separate")
    assert_same(packed(model, pack, weights, packed=False), plain(model, preferences, weights))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_row_of_filler_has_zero_loss_and_gradients(architecture, packed):
    """A rank without preferences computes such a row: every parameter is used, and all gradients are zero."""
    policy = as_policy(tiny_model(architecture), packed=packed)
    arrangement = "shared" if packed else "separate"
    inputs = policy.inputs(lay_out([], [], length=128, arrangement=arrangement), torch.device("cpu"))
    policy(inputs)[: inputs.num_scored].sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name

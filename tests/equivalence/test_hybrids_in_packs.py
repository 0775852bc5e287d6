"""Models with recurrent layers compute the same log-probabilities and gradients in packs as for each sequence alone."""

import numpy as np
import pytest
import torch
from hybrids import HYBRIDS, tiny_hybrid
from models import VOCABULARY, as_policy, plain_token_logps
from transformers.activations import ACT2FN

from tandem.data.text.tokens import TokenizedPreference
from tandem.model.distributed.layers import recompute
from tandem.model.recurrent import scans
from tandem.model.recurrent.kernels import Kernels, scan_by_token
from tandem.model.recurrent.segments import PackSegments, Starts
from tandem.packing.layout import join, lay_out

CPU = torch.device("cpu")
WEIGHTS = torch.randn(1000, generator=torch.Generator().manual_seed(1))
ONE_OF_EACH = ["qwen3_next", "nemotron_h", "falcon_h1", "lfm2"]


def preference(rng, prompt, *completions):
    def ids(length):
        return rng.integers(3, VOCABULARY, length).astype(np.int32)

    return TokenizedPreference(ids(prompt), tuple(ids(length) for length in completions), ((0, 1),), "test:1")


def two_rows():
    """Prompts shorter than a convolution and longer than a chunk of 64 tokens, answers of one token, 2 to 4 completions."""
    rng = np.random.default_rng(0)
    first = [preference(rng, 1, 1, 5), preference(rng, 70, 66, 1, 3), preference(rng, 3, 2, 2, 9, 4)]
    return first, [preference(rng, 10, 30, 1), preference(rng, 2, 1, 2)]


def packed_rows(rows, arrangement="shared", length=256):
    return join([lay_out(range(len(row)), row, length=length, arrangement=arrangement) for row in rows])


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def computed(model, policy, pack):
    model.zero_grad()
    inputs = policy.inputs(pack, CPU)
    logps = policy(inputs)[: inputs.num_scored]
    (logps * WEIGHTS[: len(logps)]).sum().backward()
    return logps.detach(), gradients(model)


def alone(model, rows):
    """Each sequence alone, by the model's own eager forward."""
    model.zero_grad()
    logps = torch.cat([one for row in rows for preference in row for one in plain_token_logps(model, preference)])
    (logps * WEIGHTS[: len(logps)]).sum().backward()
    return logps.detach(), gradients(model)


def logp_difference(found, wanted):
    return float((found[0] - wanted[0]).abs().max())


def gradient_difference(found, wanted):
    assert found[1].keys() == wanted[1].keys()
    return max(float((found[1][name] - one).norm() / (one.norm() + 1e-6)) for name, one in wanted[1].items())


def assert_same(found, wanted):
    assert logp_difference(found, wanted) < 1e-5
    assert gradient_difference(found, wanted) < 1e-4


def convolution_by_torch(x, weight, bias=None, *, activation=None):
    """The signature of flash-linear-attention's convolution: [batch, length, channels]."""
    padded = torch.nn.functional.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    out = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=weight.shape[0]).transpose(1, 2)
    return (out if activation is None else ACT2FN[activation](out)), None


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_packed_and_unpacked_equal_each_sequence_alone(architecture):
    rows = two_rows()
    model = tiny_hybrid(architecture)
    wanted = alone(model, rows)
    assert_same(computed(model, as_policy(model), packed_rows(rows)), wanted)
    separate = lay_out(range(5), [one for row in rows for one in row], length=256, arrangement="separate")
    assert_same(computed(model, as_policy(model, packed=False), separate), wanted)


@pytest.mark.parametrize("architecture", ONE_OF_EACH)
def test_repeated_prompts_equal_each_sequence_alone(architecture):
    rows = two_rows()
    model = tiny_hybrid(architecture)
    pack = packed_rows(rows, arrangement="repeated", length=512)
    assert_same(computed(model, as_policy(model), pack), alone(model, rows))


@pytest.mark.parametrize("architecture", ONE_OF_EACH)
def test_functions_with_the_signature_of_the_kernels_equal_each_sequence_alone(architecture):
    rows = two_rows()
    model = tiny_hybrid(architecture)
    policy = as_policy(model)
    assert policy.recurrent is not None
    policy.recurrent.kernels = Kernels(scan_by_token, convolution_by_torch)
    assert_same(computed(model, policy, packed_rows(rows)), alone(model, rows))


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_activations_change_nothing(how):
    rows = two_rows()
    model = tiny_hybrid("bamba")
    wanted = alone(model, rows)
    policy = as_policy(model)
    recompute(policy, how)
    assert_same(computed(model, policy, packed_rows(rows)), wanted)


@pytest.mark.parametrize("architecture", ONE_OF_EACH)
def test_a_row_of_filler_has_zero_gradients_for_every_weight(architecture):
    """A rank without preferences computes such a row."""
    policy = as_policy(tiny_hybrid(architecture))
    inputs = policy.inputs(lay_out([], [], length=128), CPU)
    policy(inputs)[: inputs.num_scored].sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("architecture", [name for name in ONE_OF_EACH if name != "lfm2"])
def test_without_the_state_of_the_prompt_log_probabilities_differ(architecture, monkeypatch):
    rows = two_rows()
    model = tiny_hybrid(architecture)
    wanted = alone(model, rows)
    monkeypatch.setattr(scans, "copies", lambda states, segments: 0 * states.index_select(0, segments.prompt_of))
    assert logp_difference(computed(model, as_policy(model), packed_rows(rows)), wanted) > 0.01


@pytest.mark.parametrize("architecture", [name for name in ONE_OF_EACH if name != "lfm2"])
def test_a_state_without_gradients_changes_only_gradients(architecture, monkeypatch):
    rows = two_rows()
    model = tiny_hybrid(architecture)
    wanted = alone(model, rows)
    monkeypatch.setattr(scans, "copies", lambda states, segments: states.detach().index_select(0, segments.prompt_of))
    found = computed(model, as_policy(model), packed_rows(rows))
    assert logp_difference(found, wanted) < 1e-5
    assert gradient_difference(found, wanted) > 0.05


@pytest.mark.parametrize("architecture", ONE_OF_EACH)
def test_without_the_last_tokens_of_the_prompt_convolutions_differ(architecture, monkeypatch):
    rows = two_rows()
    model = tiny_hybrid(architecture)
    wanted = alone(model, rows)
    starts = PackSegments.starts

    def own_tokens_only(segments, width):
        found = starts(segments, width)
        near = found.positions[:, None] - found.inputs == torch.arange(width - 1, -1, -1)
        segment = torch.from_numpy(np.searchsorted(segments._start, found.positions.numpy(), side="right") - 1)
        own = found.inputs >= torch.from_numpy(segments._start)[segment][:, None]
        return Starts(found.positions, found.inputs, found.is_real & near & own)

    monkeypatch.setattr(PackSegments, "starts", own_tokens_only)
    assert logp_difference(computed(model, as_policy(model), packed_rows(rows)), wanted) > 0.01

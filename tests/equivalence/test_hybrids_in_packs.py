"""Models with recurrent layers compute the same log-probabilities and gradients in packs as for each sequence alone."""

import numpy as np
import pytest
import torch
from hybrids import (
    HYBRIDS,
    alone,
    computed,
    convolution_by_torch,
    gradient_difference,
    logp_difference,
    packed_rows,
    tiny_hybrid,
    two_rows,
)
from models import as_policy

from tandem.model.distributed.layers import recompute
from tandem.model.recurrent import scans
from tandem.model.recurrent.kernels import Kernels, scan_by_token
from tandem.model.recurrent.segments import PackSegments, Starts
from tandem.packing.layout import lay_out

CPU = torch.device("cpu")
ONE_OF_EACH = [name for name in ("qwen3_next", "nemotron_h", "falcon_h1", "lfm2") if name in HYBRIDS]
KERNELS = [*ONE_OF_EACH, *(name for name in HYBRIDS if name == "kimi_linear")]  # one of each signature


def assert_same(found, wanted):
    assert logp_difference(found, wanted) < 3e-5
    assert gradient_difference(found, wanted) < 1e-4


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=pytest.mark.slow) if name == "bailing_hybrid" else name for name in HYBRIDS],
)
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


@pytest.mark.parametrize("architecture", KERNELS)
def test_functions_with_the_signature_of_the_kernels_equal_each_sequence_alone(architecture):
    rows = two_rows()
    model = tiny_hybrid(architecture)
    policy = as_policy(model)
    assert policy.recurrent is not None
    policy.recurrent.kernels = Kernels(scan_by_token, convolution_by_torch)
    assert_same(computed(model, policy, packed_rows(rows)), alone(model, rows))


@pytest.mark.parametrize("recomputes_scans", [False, True])
@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_activations_change_nothing(how, recomputes_scans, monkeypatch):
    if recomputes_scans:
        monkeypatch.setattr(scans, "RECOMPUTING_DEVICES", ("cpu",))
    rows = two_rows()
    model = tiny_hybrid("bamba")
    wanted = alone(model, rows)
    policy = as_policy(model)
    recompute(policy, how)
    assert_same(computed(model, policy, packed_rows(rows)), wanted)


@pytest.mark.parametrize("architecture", ["qwen3_next", "nemotron_h"])
def test_recomputed_scans_equal_each_sequence_alone(architecture, monkeypatch):
    monkeypatch.setattr(scans, "RECOMPUTING_DEVICES", ("cpu",))
    rows = two_rows()
    model = tiny_hybrid(architecture)
    assert_same(computed(model, as_policy(model), packed_rows(rows)), alone(model, rows))


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
    assert logp_difference(found, wanted) < 3e-5
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

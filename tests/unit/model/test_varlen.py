"""The runs of tokens in packs without shared prompts, and the attention within them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from models import random_preference, tiny_config

from tandem.config.load import load_config
from tandem.config.sections.policy import Packing, Policy
from tandem.errors import ConfigError
from tandem.model.attention.varlen import BOUNDS_MULTIPLE, FILLER_RUN, attend_runs, runs_of
from tandem.model.files.source import ModelSource, find_model
from tandem.model.load import check_varlen
from tandem.packing.layout import join, lay_out
from tandem.training.start.setup import set_up

pytestmark = pytest.mark.usefixtures("of_a_command")

CPU = torch.device("cpu")


def bounds(*packs) -> list[int]:
    runs = runs_of(join(packs), None, CPU)
    assert len(runs.bounds) % BOUNDS_MULTIPLE == 0
    return torch.unique_consecutive(runs.bounds).tolist()


def pack(length: int, *, prompt: int = 3, completions: tuple[int, int] = (2, 4)):
    preference = random_preference(np.random.default_rng(0))
    sized = type(preference)(
        np.ones(prompt, np.int32),
        tuple(np.ones(size, np.int32) for size in completions),
        preference.pairs,
        "",
    )
    return lay_out([0], [sized], length=length, arrangement="repeated")


def test_every_sequence_is_a_run_and_filler_is_cut_into_short_runs():
    assert bounds(pack(12)) == [0, 5, 12]
    assert bounds(pack(16)) == [0, 5, 12, 16]
    assert bounds(pack(12 + 2 * FILLER_RUN + 7)) == [
        0,
        5,
        12,
        12 + FILLER_RUN,
        12 + 2 * FILLER_RUN,
        19 + 2 * FILLER_RUN,
    ]


def test_a_run_ends_with_its_row():
    # A preference longer than a row gets one row per sequence: 5 tokens + 3 of filler, 7 + 1.
    assert bounds(pack(8)) == [0, 5, 8, 15, 16]
    assert bounds(pack(12), pack(12)) == [0, 5, 12, 17, 24]
    full = replace(pack(12), tree=np.zeros((1, 12), np.int64))  # one tree with the same number in both rows
    assert bounds(full, full) == [0, 12, 24]


@pytest.mark.parametrize(("size", "longest"), [(1, 128), (125, 128), (126, 256), (500, 512), (509, 512), (510, 1024)])
def test_the_length_of_the_longest_run_is_rounded_up_to_a_power_of_two(size, longest):
    assert runs_of(pack(2048, completions=(size, size)), None, CPU).longest == longest


def test_attention_is_finite_at_every_position():
    runs = runs_of(pack(300), 2, CPU)
    query, key = torch.randn(1, 4, 300, 8), torch.randn(1, 2, 300, 8)
    assert attend_runs(query, key, key, runs, scaling=None).isfinite().all()


@pytest.mark.parametrize("packing", ["{share_prompts: true}", "{mode: none}"])
def test_varlen_is_refused_with_shared_prompts_or_without_packing(packing):
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["policy.attention=varlen", f"policy.packing={packing}"])
    assert str(caught.value) == (
        "command line: policy.attention = varlen needs packs in which every sequence is contiguous. Set "
        "policy.packing.share_prompts=false and a policy.packing.mode other than none."
    )


@pytest.mark.parametrize("kind", ["flex", "sdpa"])
def test_attention_for_packs_is_refused_without_packing(kind):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"policy.attention={kind}", "policy.packing.mode=none"])
    assert str(caught.value) == (
        f"command line: policy.attention = {kind} has no effect with policy.packing.mode=none, where every sequence has its own "
        "row. Leave it out, or set policy.packing.mode=batch."
    )


@pytest.mark.parametrize(
    ("changes", "device", "message"),
    [
        ({"compile": True}, "cpu", "it cannot be compiled without a GPU. Leave out policy.compile."),
        ({}, "cuda", "its kernels do not compute in float32, only in bfloat16. Use policy.attention=flex."),
    ],
)
def test_settings_that_the_varlen_kernels_do_not_support_are_refused(changes, device, message):
    policy = Policy(attention="varlen", packing=Packing(share_prompts=False), **changes)
    with pytest.raises(ConfigError) as caught:
        check_varlen(find_model(policy), policy, "float32", torch.device(device))
    assert str(caught.value) == f"policy.attention = varlen: {message}"


def test_varlen_is_refused_for_a_model_that_caps_its_scores():
    policy = Policy(attention="varlen", packing=Packing(share_prompts=False))
    with pytest.raises(ConfigError) as caught:
        check_varlen(ModelSource("gemma", Path(), tiny_config("gemma2")), policy, "bfloat16", CPU)
    assert str(caught.value) == (
        "policy.attention = varlen: the attention of gemma caps its scores or has sinks, which these kernels do not support. Use "
        "policy.attention=auto."
    )


def test_varlen_repeats_prompts():
    given = ["policy.attention=varlen", "policy.packing.share_prompts=false"]
    assert set_up(load_config(None, given).config, CPU).plan.train.arrangement == "repeated"

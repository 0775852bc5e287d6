"""The shapes of micro-batches that are compiled before the first step."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.async_compile

from tandem.config.load import load_config
from tandem.config.sections.policy import Packing
from tandem.data.text.tokens import TokenizedPreference
from tandem.packing.packer import RankShare, make_packer
from tandem.report.reporter import Reporter
from tandem.training.start import build
from tandem.training.start.rehearsal import example, shapes_of, start_compile_workers


class Store(list[TokenizedPreference]):
    """What a packer needs of a set."""

    num_prompt_tokens = property(lambda self: np.array([len(row.prompt) for row in self]))
    num_completion_tokens = property(lambda self: np.array([sum(map(len, row.completions)) for row in self]))
    num_completions = property(lambda self: np.array([len(row.completions) for row in self]))
    num_pairs = property(lambda self: np.array([len(row.pairs) for row in self]))
    longest = property(lambda self: np.array([row.longest for row in self]))


def store(num: int, longest: int) -> Store:
    rng = np.random.default_rng(0)

    def one() -> TokenizedPreference:
        completions = tuple(np.full(rng.integers(1, longest), 2, np.int32) for _ in range(rng.integers(2, 5)))
        pairs = tuple((0, other) for other in range(1, len(completions)))
        return TokenizedPreference(np.full(rng.integers(1, 100), 1, np.int32), completions, pairs, "x")

    return Store(one() for _ in range(num))


@pytest.mark.parametrize("longest", [60, 400], ids=["short", "longer than a row"])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("packing", [{}, {"packs_per_micro_batch": 3}, {"mode": "none"}, {"share_prompts": False}])
def test_every_micro_batch_of_a_run_has_a_shape_that_was_compiled(packing, num_ranks, longest):
    given = {"usual_auto": 1024, "pairs_per_batch": None, "share": RankShare(num_ranks - 1, num_ranks)}
    if packing.get("mode") != "none":
        packing = {"pack_length": 640, **packing}
    packer = make_packer(store(120, longest), Packing(**packing), **given)  # type: ignore[arg-type]
    batches = [(np.arange(start, start + 12), None) for start in range(0, 120, 12)]
    looked_at = batches if packing.get("packs_per_micro_batch") or packing.get("mode") else batches[:1]
    compiled = shapes_of(packer, looked_at)
    met = {
        pack.token_ids.shape for preferences, bounds in batches for pack in packer.micro_batches(preferences, bounds)
    }
    assert met <= set(compiled)
    of_another_rank = replace(packer, share=RankShare(0, num_ranks))
    assert compiled == shapes_of(of_another_rank, looked_at)
    for shape in compiled:
        assert example(packer, shape).token_ids.shape == shape


# Torch's processes that compile kernels


def setup_of(device: str, *, compiles: bool, **keys: str) -> Any:
    config = load_config(None, [f"policy.{key}={value}" for key, value in keys.items()]).config
    return SimpleNamespace(
        config=config, device=torch.device(device), compiles=compiles, source=SimpleNamespace(config=None), lora=None
    )


@pytest.mark.parametrize(
    ("setup", "are_started"),
    [
        (setup_of("cuda", compiles=True), True),
        (setup_of("cuda", compiles=False), True),  # FlexAttention is always compiled
        (setup_of("cuda", compiles=False, attention="sdpa"), False),
        (setup_of("cuda", compiles=False, packing="{mode: none}"), False),
        (setup_of("cuda", compiles=True, packing="{mode: none}"), True),
        (setup_of("cpu", compiles=True), False),  # C++ is compiled in threads
    ],
)
def test_torchs_compile_processes_start_where_kernels_are_compiled(setup, are_started, monkeypatch):
    started = []
    monkeypatch.setattr(torch._inductor.async_compile, "maybe_warm_pool", lambda: started.append(True))
    start_compile_workers(setup)
    assert started == [True] * are_started


@pytest.mark.parametrize("error", [OSError(11, "Resource temporarily unavailable"), None])
def test_a_run_trains_without_processes_that_start_early(error, monkeypatch):
    """The machine starts no more processes, or another version of torch does not have the function."""

    def fail() -> None:
        raise error

    if error is None:
        monkeypatch.delattr(torch._inductor.async_compile, "maybe_warm_pool")
    else:
        monkeypatch.setattr(torch._inductor.async_compile, "maybe_warm_pool", fail)
    start_compile_workers(setup_of("cuda", compiles=True))


def test_the_processes_start_before_weights_load(monkeypatch):
    class Loading(Exception):
        pass

    def load(*_: object) -> None:
        raise Loading

    done = []
    monkeypatch.setattr(build, "start_compile_workers", lambda setup: done.append("processes"))
    monkeypatch.setattr(build, "load_sharded", load)
    with pytest.raises(Loading):
        build._load(setup_of("cuda", compiles=True), None, None, Reporter("silent"), check=lambda: None)  # type: ignore[arg-type]
    assert done == ["processes"]

"""The shapes of micro-batches that are compiled before the first step."""

from dataclasses import replace

import numpy as np
import pytest

from tandem.config.sections.policy import Packing
from tandem.data.text.tokens import TokenizedPreference
from tandem.packing.packer import RankShare, make_packer
from tandem.training.start.rehearsal import example, shapes_of


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

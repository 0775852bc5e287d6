"""The comparison that GPU tests make between a packed and an unpacked run fails for each way in which they may differ."""

import pytest
from hybrids import assert_same_training

WANTED = [{"loss": 0.693, "grad_norm": 2.0}, {"loss": 0.65, "grad_norm": 1.9}, {"loss": 0.60, "grad_norm": 1.8}]


def changed(step: int, name: str, value: float) -> list[dict[str, float]]:
    return [{**line, name: value} if number == step else line for number, line in enumerate(WANTED)]


def test_equal_runs_and_runs_that_differ_by_rounding_pass():
    assert_same_training(WANTED, WANTED)
    assert_same_training(changed(2, "loss", 0.61), WANTED)


@pytest.mark.parametrize(
    "found",
    [changed(2, "loss", 0.63), changed(0, "grad_norm", 2.2), changed(2, "grad_norm", 2.4), WANTED[:2]],
    ids=["another loss", "another first gradient", "another later gradient", "fewer steps"],
)
def test_runs_that_differ_fail(found):
    with pytest.raises(AssertionError):
        assert_same_training(found, WANTED)


def test_losses_that_do_not_move_fail():
    still = [{**line, "loss": 0.693} for line in WANTED]
    with pytest.raises(AssertionError, match="hardly move"):
        assert_same_training(still, still)

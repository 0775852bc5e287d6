"""LD-DPO's sums and WPO's weights from the tokens of a pack, against loops over completions."""

import math

import pytest
import torch

from tandem.completions import ChosenRejected, Completions, Pairing, sum_completions
from tandem.loss.pairs import pair_sums, prefix_sums, wpo_log_weights, wpo_weights

# Three completions of 2, 3 and 1 tokens, then padding; the first is in two pairs with partners of other lengths.
LENGTHS = torch.tensor([2, 3, 1])
COMPLETION = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3])
TOKENS = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, 77.0, 88.0])
PAIRING = Pairing(torch.tensor([0, 0, 2]), torch.tensor([1, 2, 1]), torch.tensor([0]))


def ld_sums(
    tokens: torch.Tensor, alpha: float | None, lengths=LENGTHS, completion=COMPLETION, pairing=PAIRING
) -> ChosenRejected:
    own = sum_completions(tokens, lengths, completion)
    prefix = prefix_sums(tokens, own.num_tokens, pairing)
    record = Completions(
        policy=own.total,
        reference=own.total,
        num_tokens=own.num_tokens,
        drift=own.total,
        preference=torch.zeros_like(lengths),
        pairing=pairing,
        policy_prefix=prefix,
        reference_prefix=prefix,
    )
    return pair_sums(record, alpha).policy


def ld(tokens: torch.Tensor, alpha: float | None) -> list[list[float]]:
    both = ld_sums(tokens, alpha)
    return [both.chosen.tolist(), both.rejected.tolist()]


def weights_of(tokens: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    return wpo_weights(wpo_log_weights(tokens, squares, LENGTHS, COMPLETION), PAIRING)


def test_tokens_beyond_the_shorter_completion_of_the_pair_count_alpha():
    assert ld(TOKENS, 0.5) == [
        [-3.0, -2.0, -6.0],  # against 3 tokens: -1 - 2; against 1: -1 + 0.5 * -2; -6
        [-9.5, -6.0, -7.5],  # against 2: -3 - 4 + 0.5 * -5; -6; against 1: -3 + 0.5 * -9
    ]


def test_alpha_one_changes_nothing():
    assert ld(TOKENS, 1.0) == ld(TOKENS, None) == [[-3.0, -3.0, -6.0], [-12.0, -6.0, -12.0]]


def test_alpha_zero_cuts_both_to_the_shorter():
    assert ld(TOKENS, 0.0) == [[-3.0, -1.0, -6.0], [-7.0, -6.0, -3.0]]


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_packed_sums_equal_a_loop_over_pairs(alpha):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 40, (30,), generator=generator)
    tokens = -3 * torch.rand(int(lengths.sum()) + 7, generator=generator)
    completion = torch.cat([torch.arange(30).repeat_interleave(lengths), torch.full((7,), 30)])
    winners, losers = torch.randint(0, 30, (2, 50), generator=generator)
    both = ld_sums(tokens, alpha, lengths, completion, Pairing(winners, losers, winners[:1]))
    parts = tokens[: int(lengths.sum())].split(lengths.tolist())

    def plain(own: int, other: int) -> float:
        weights = [1.0 if at < len(parts[other]) else alpha for at in range(len(parts[own]))]
        return sum(weight * token for weight, token in zip(weights, parts[own].tolist(), strict=True))

    pairs = list(zip(winners.tolist(), losers.tolist(), strict=True))
    assert both.chosen.tolist() == pytest.approx([plain(winner, loser) for winner, loser in pairs], abs=1e-4)
    assert both.rejected.tolist() == pytest.approx([plain(loser, winner) for winner, loser in pairs], abs=1e-4)


def test_the_gradient_of_a_token_is_its_weight_summed_over_its_pairs():
    tokens = TOKENS.clone().requires_grad_()
    both = ld_sums(tokens, 0.25)
    (both.chosen.sum() + both.rejected.sum()).backward()
    # first completion: 1 + 1, 1 + 0.25; second: 1 + 1, 1 + 0.25, 0.25 + 0.25; third: 1 + 1; padding: none
    assert tokens.grad.tolist() == pytest.approx([2, 1.25, 2, 1.25, 0.5, 2, 0, 0])


def test_the_gradient_of_the_sums_matches_finite_differences():
    tokens = TOKENS.double().requires_grad_()

    def weighted(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = ld_sums(values, 0.25)
        return both.chosen, both.rejected

    assert torch.autograd.gradcheck(weighted, tokens)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_token_that_is_not_finite_spoils_the_pairs_of_its_completion_and_no_other(alpha, bad):
    tokens = TOKENS.clone()
    tokens[2] = bad  # of the second completion
    both = ld_sums(tokens, alpha)
    assert torch.isfinite(both.chosen).all()
    assert torch.isfinite(both.rejected).tolist() == [False, True, False]


def test_short_completions_behind_a_long_pack_keep_their_digits():
    lengths = torch.tensor([40_000, 1, 2])
    tokens = torch.cat([torch.full((40_000,), -9.123456), torch.tensor([-0.001, -0.002, -0.003])])
    completion = torch.arange(3).repeat_interleave(lengths)
    pairing = Pairing(torch.tensor([1]), torch.tensor([2]), torch.tensor([1]))
    both = ld_sums(tokens, 0.0, lengths, completion, pairing)
    assert both.chosen.item() == pytest.approx(-0.001, rel=1e-5)
    assert both.rejected.item() == pytest.approx(-0.002, rel=1e-5)


def test_an_empty_pack_has_no_pairs():
    none, padding = torch.zeros(0, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    tokens, pairing = torch.zeros(4), Pairing(none, none, none)
    assert ld_sums(tokens, 0.5, none, padding, pairing).chosen.shape == (0,)
    assert wpo_weights(wpo_log_weights(tokens, tokens, none, padding), pairing).shape == (0,)


def test_wpo_weighs_a_pair_by_both_mean_likelihoods_less_what_a_sample_would_have():
    squares = torch.tensor([-0.5, -1.5, -2.0, -2.0, -2.0, -5.0, 0.0, 0.0])
    # means of log pi - log sum pi^2: (-0.5 - 0.5) / 2 = -0.5; (-1 - 2 - 3) / 3 = -2; -1
    weights = weights_of(TOKENS, squares)
    assert weights.tolist() == pytest.approx([math.exp(-2.5), math.exp(-1.5), math.exp(-3.0)])


def test_wpo_weighs_an_even_choice_by_one():
    """Among v equally likely tokens log pi = log sum pi^2 = -log v: on the policy's own samples nothing changes."""
    even = torch.full((8,), -math.log(50))
    assert weights_of(even, even).tolist() == [1.0, 1.0, 1.0]


def test_no_gradient_flows_through_the_weights_of_wpo():
    tokens = TOKENS.clone().requires_grad_()
    assert not weights_of(tokens, TOKENS).requires_grad

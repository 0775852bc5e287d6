"""Losses by hand: pi(c) = -3, pi(r) = -5, ref(c) = ref(r) = -4, beta = 0.1, so r_c = 1, r_r = -1, d = 2."""

import pytest
import torch

from tandem.config.schema import Dpo
from tandem.loss.objective import Pairing, pair_loss
from tandem.loss.pairs import PairRatios
from tandem.loss.preference import PREFERENCE_LOSSES, dpo
from tandem.loss.sft import sft

POLICY, REFERENCE = torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -4.0])
ONE_PAIR = Pairing(torch.tensor([0]), torch.tensor([1]), torch.tensor([0]))
LENGTHS = torch.tensor([2, 4])


def test_dpo_of_the_worked_example():
    pair = PairRatios(torch.tensor([1.0]), torch.tensor([-1.0]))
    assert pair.margin.item() == 2.0
    assert dpo(pair, beta=0.1).item() == pytest.approx(0.598139, abs=1e-6)  # -log sigmoid(0.2)


def test_equal_policy_and_reference_give_log_two():
    loss = pair_loss(REFERENCE, REFERENCE, LENGTHS, ONE_PAIR, Dpo())
    assert loss.preference.item() == pytest.approx(0.693147, abs=1e-6)


def test_sigmoid_is_an_alias():
    assert PREFERENCE_LOSSES["sigmoid"] is PREFERENCE_LOSSES["dpo"]


def test_rewards_are_scaled_by_beta():
    loss = pair_loss(POLICY, REFERENCE, LENGTHS, ONE_PAIR, Dpo())
    assert loss.rewards_chosen.item() == pytest.approx(0.1)
    assert loss.rewards_rejected.item() == pytest.approx(-0.1)
    assert (loss.logps_chosen.item(), loss.logps_rejected.item()) == (-3.0, -5.0)


def test_averaging_divides_each_ratio_by_its_own_completion_length():
    loss = pair_loss(POLICY, REFERENCE, LENGTHS, ONE_PAIR, Dpo(preference_average_log_probs=True))
    assert loss.rewards_chosen.item() == pytest.approx(0.1 * 1 / 2)
    assert loss.rewards_rejected.item() == pytest.approx(0.1 * -1 / 4)
    assert loss.preference.item() == pytest.approx(0.656350, abs=1e-6)  # -log sigmoid(0.1 * 0.75)
    assert loss.sft.item() == pytest.approx(3 / 2)  # follows, unless set


def test_sft_is_the_negative_log_probability_of_the_best():
    assert sft(torch.tensor([-3.0]), torch.tensor([2]), average=False).item() == 3.0
    assert sft(torch.tensor([-3.0]), torch.tensor([2]), average=True).item() == 1.5


def test_with_three_completions_every_pair_counts_and_the_best_is_taken_once():
    policy = torch.tensor([-3.0, -5.0, -9.0])
    pairing = Pairing(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2]), torch.tensor([0]))
    loss = pair_loss(policy, torch.zeros(3), torch.ones(3, dtype=torch.long), pairing, Dpo())
    margins = (loss.rewards_chosen - loss.rewards_rejected).tolist()
    assert margins == pytest.approx([0.2, 0.6, 0.4])
    assert loss.sft.tolist() == [3.0]


@pytest.mark.parametrize("margin", [-1e4, 1e4])
def test_huge_margins_stay_finite(margin):
    pair = PairRatios(torch.tensor([margin], requires_grad=True), torch.tensor([0.0]))
    loss = dpo(pair, beta=0.1)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert pair.chosen.grad is not None and torch.isfinite(pair.chosen.grad).all()


def test_gradient_of_dpo_matches_finite_differences():
    chosen = torch.tensor([0.3, -1.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.1, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda c, r: dpo(PairRatios(c, r), beta=0.1), (chosen, rejected))

"""From log-probabilities to PairLoss: averaging, divergence, several losses, rewards, SFT.

pi(c) = -3, pi(r) = -5, ref(c) = ref(r) = -4, beta = 0.1, lengths 2 and 4: r_c = 1, r_r = -1, d = 2.
"""

import math

import pytest
import torch
from declared import needed_settings

from tandem.completions import Completions, Pairing
from tandem.config.sections.dpo import Dpo
from tandem.loss.losses import LOSSES
from tandem.loss.objective import (
    PairLoss,
    combined_losses,
    implicit_rewards,
    pair_loss,
    pairs_from_sums,
    reward_slopes,
    sft,
)
from tandem.loss.pairs import PairSums

POLICY, REFERENCE = torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -4.0])
ONE_PAIR = Pairing(torch.tensor([0]), torch.tensor([1]), torch.tensor([0]))
LENGTHS = torch.tensor([2, 4])


def loss_of(dpo: Dpo, policy=POLICY, reference=REFERENCE, lengths=LENGTHS, pairing=ONE_PAIR, **kwargs) -> PairLoss:
    record = Completions(
        policy=policy,
        reference=reference,
        num_tokens=lengths,
        drift=torch.zeros_like(policy),
        pairing=pairing,
        **{"preference": torch.zeros(len(policy), dtype=torch.long), **kwargs},
    )
    return pair_loss(record, dpo)


def sums_of(policy, reference=REFERENCE, lengths=LENGTHS, scores=None) -> PairSums:
    """Of the one pair."""
    both = ONE_PAIR.both
    return PairSums(policy=both(policy), reference=both(reference), num_tokens=both(lengths), scores=scores)


def test_equal_policy_and_reference_give_log_two():
    assert loss_of(Dpo(), policy=REFERENCE).pair_losses.item() == pytest.approx(0.693147, abs=1e-6)


def test_rewards_are_scaled_by_beta():
    loss = loss_of(Dpo())
    assert loss.rewards.chosen.item() == pytest.approx(0.1)
    assert loss.rewards.rejected.item() == pytest.approx(-0.1)
    assert (loss.policy.chosen.item(), loss.policy.rejected.item()) == (-3.0, -5.0)


def _settings():
    """Every loss, alone and with each setting that changes what its rewards are."""
    for name, loss in LOSSES.items():
        needed = needed_settings(name)
        yield {"preference_loss": name, **needed}
        if "preference_average_log_probs" in loss.input_settings:
            yield {"preference_loss": name, "preference_average_log_probs": True, **needed}
        if "f_divergence" in loss.input_settings:
            for divergence in ({"f_divergence": "js"}, {"f_divergence": "forward_kl"}):
                yield {"preference_loss": name, "preference_average_log_probs": True, **divergence, **needed}
    yield {"f_divergence": "alpha", "f_alpha": 0.5}
    yield {"preference_loss": {"dpo": 1.0, "sigmoid_norm": 0.5}}
    yield {"preference_loss": {"sigmoid_norm": 1.0, "simpo": 0.5}}
    yield {"preference_loss": {"simpo": 1.0, "cpo": 0.5}}


@pytest.mark.parametrize("settings", list(_settings()), ids=str)
def test_slopes_are_those_of_the_rewards(settings):
    beta = {} if settings.get("preference_loss") == "orpo" else {"reference_policy_kl_penalty": 0.7}
    dpo = Dpo(**settings, **beta)

    def pairs(nats: float):
        return pairs_from_sums(sums_of((POLICY + nats).double(), REFERENCE.double(), LENGTHS.double()), dpo)

    more, less, h = implicit_rewards(pairs(1e-3), dpo), implicit_rewards(pairs(-1e-3), dpo), 2e-3
    slopes = reward_slopes(pairs(0.0), dpo)
    assert slopes.chosen.item() == pytest.approx((more.chosen - less.chosen).item() / h, rel=1e-4)
    assert slopes.rejected.item() == pytest.approx((more.rejected - less.rejected).item() / h, rel=1e-4)
    assert loss_of(Dpo(), policy=POLICY.clone().requires_grad_()).reward_slopes.chosen.requires_grad is False


def test_averaging_divides_each_ratio_by_its_own_completion_length():
    loss = loss_of(Dpo(preference_average_log_probs=True))
    assert loss.rewards.chosen.item() == pytest.approx(0.1 * 1 / 2)
    assert loss.rewards.rejected.item() == pytest.approx(0.1 * -1 / 4)
    assert loss.pair_losses.item() == pytest.approx(0.656350, abs=1e-6)  # -log sigmoid(0.1 * 0.75)
    assert loss.sft.item() == pytest.approx(3 / 2)  # follows, unless set
    assert (loss.policy.chosen.item(), loss.policy.rejected.item()) == (-3.0, -5.0)


def test_averaging_reaches_aot_too():
    # Margins of means: policy -3/2 + 5/4 = -0.25, reference -4/2 + 4/4 = -1, so delta = 0.75.
    loss = loss_of(Dpo(preference_loss="aot", preference_average_log_probs=True))
    assert loss.pair_losses.item() == pytest.approx(0.656350, abs=1e-6)


def test_ipo_is_summed_or_averaged_as_asked():
    assert loss_of(Dpo(preference_loss="ipo")).pair_losses.item() == pytest.approx(9.0)  # (2 - 5)^2
    averaged = loss_of(Dpo(preference_loss="ipo", preference_average_log_probs=True))
    assert averaged.pair_losses.item() == pytest.approx(18.0625)  # (0.75 - 5)^2


def test_the_divergence_acts_on_the_averaged_ratios():
    averaged = loss_of(Dpo(f_divergence="forward_kl", preference_average_log_probs=True))
    # 1 - exp(-1/2) = 0.393469, 1 - exp(1/4) = -0.284025
    assert averaged.rewards.chosen.item() == pytest.approx(0.0393469, abs=1e-7)
    assert averaged.rewards.rejected.item() == pytest.approx(-0.0284025, abs=1e-7)
    assert averaged.pair_losses.item() == pytest.approx(math.log(1 + math.exp(-0.0677494)), abs=1e-6)


def test_alpha_near_one_is_near_plain_dpo():
    near = loss_of(Dpo(f_divergence="alpha", f_alpha=1.0001)).pair_losses
    torch.testing.assert_close(near, loss_of(Dpo()).pair_losses, atol=1e-3, rtol=0)


def test_several_losses_are_summed_with_their_weights():
    both = loss_of(Dpo(preference_loss={"dpo": 0.8, "bco_pair": 0.2}))
    assert both.pair_losses.item() == pytest.approx(0.8 * 0.598139 + 0.2 * 1.288793, abs=1e-6)


def test_one_loss_with_weight_one_is_that_loss():
    assert torch.equal(loss_of(Dpo(preference_loss={"dpo": 1.0})).pair_losses, loss_of(Dpo()).pair_losses)
    assert torch.equal(loss_of(Dpo(preference_loss="sigmoid")).pair_losses, loss_of(Dpo()).pair_losses)


def test_the_settings_of_a_loss_reach_it():
    smoothed = loss_of(Dpo(label_smoothing=0.1, reference_policy_kl_penalty=0.5)).pair_losses
    assert smoothed.item() == pytest.approx(0.9 * 0.313262 + 0.1 * 1.313262, abs=1e-6)  # log s(1), log s(-1)
    tuned = loss_of(Dpo(preference_loss="simpo", reference_policy_kl_penalty=2.0, simpo_gamma=0.0)).pair_losses
    assert tuned.item() == pytest.approx(0.974077, abs=1e-6)  # -log s(2 * -0.25)


def test_rewards_without_a_reference_are_those_the_loss_compares():
    simpo = loss_of(Dpo(preference_loss="simpo"))
    assert simpo.rewards.chosen.item() == pytest.approx(0.1 * -3 / 2)
    assert simpo.rewards.rejected.item() == pytest.approx(0.1 * -5 / 4)
    assert loss_of(Dpo(preference_loss="cpo")).rewards.chosen.item() == pytest.approx(0.1 * -3)


def test_rewards_of_length_normalised_dpo_are_per_token():
    assert loss_of(Dpo(preference_loss="sigmoid_norm")).rewards.chosen.item() == pytest.approx(0.1 * 1 / 2)
    beside_dpo = loss_of(Dpo(preference_loss={"dpo": 1.0, "sigmoid_norm": 1.0}))
    assert beside_dpo.rewards.chosen.item() == pytest.approx(0.1 * 1)


def test_scores_reach_the_losses_and_their_absence_is_no_number():
    dpo = Dpo(preference_loss="rpo_sq")
    scored = pairs_from_sums(sums_of(POLICY, scores=ONE_PAIR.both(torch.tensor([1.0, 0.0]))), dpo)
    assert combined_losses(scored, dpo).item() == pytest.approx(0.64)
    assert math.isnan(combined_losses(pairs_from_sums(sums_of(POLICY), dpo), dpo).item())


def test_weights_multiply_the_preference_loss_only():
    weighted = loss_of(Dpo(wpo=True), wpo_log_weights=torch.tensor([math.log(0.5), 0.0]))
    assert weighted.pair_losses.item() == pytest.approx(0.5 * 0.598139, abs=1e-6)
    assert weighted.sft.item() == 3.0


def test_a_weight_multiplies_the_losses_of_the_pairs_of_its_preference_and_not_the_sft_loss():
    # Two preferences, of two and three completions; the second has two pairs.
    loss = loss_of(
        Dpo(),
        torch.tensor([-3.0, -5.0, -3.0, -5.0, -3.0]),
        torch.full((5,), -4.0),
        torch.ones(5, dtype=torch.long),
        pairing=Pairing(torch.tensor([0, 2, 2]), torch.tensor([1, 3, 4]), torch.tensor([0, 2])),
        preference=torch.tensor([0, 0, 1, 1, 1]),
        columns={"weight": torch.tensor([0.5, 3.0])},
    )
    # -log s(0.2) = 0.598139; the last pair has d = 0: log 2
    assert loss.pair_losses.tolist() == pytest.approx([0.5 * 0.598139, 3 * 0.598139, 3 * 0.693147], abs=1e-5)
    assert loss.sft.tolist() == [3.0, 3.0]


def test_the_weight_of_a_row_and_that_of_wpo_multiply():
    weights = {"wpo_log_weights": torch.tensor([math.log(0.5), 0.0]), "columns": {"weight": torch.tensor([4.0])}}
    assert loss_of(Dpo(wpo=True), **weights).pair_losses.item() == pytest.approx(0.5 * 4 * 0.598139, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        ({}, 0.854355),  # -log s(0.1 * 2 - 0.5) = log(1 + exp(0.3))
        ({"preference_loss": "sigmoid"}, 0.854355),
        ({"label_smoothing": 0.1}, 0.9 * 0.854355 + 0.1 * 0.554355),
        ({"preference_loss": "sigmoid_norm"}, 0.928057),  # -log s(0.1 * 0.75 - 0.5)
        ({"preference_average_log_probs": True}, 0.928057),
        ({"preference_loss": {"dpo": 1.0, "sigmoid_norm": 2.0}}, 0.854355 + 2 * 0.928057),
    ],
)
def test_a_margin_is_subtracted_before_the_sigmoid(settings, by_hand):
    loss = loss_of(Dpo(**settings), columns={"margin": torch.tensor([0.5])})
    assert loss.pair_losses.item() == pytest.approx(by_hand, abs=2e-6)
    assert loss.rewards.chosen.item() == loss_of(Dpo(**settings)).rewards.chosen.item()


def test_losses_read_the_columns_that_they_declare_and_no_others():
    """A loss that read a margin without declaring it would be refused; one that declared it in vain would ignore it."""
    for name, loss in LOSSES.items():
        dpo = Dpo(preference_loss=name, **needed_settings(name))
        scores = {"score": torch.tensor([1.0, 0.0])}
        plain = loss_of(dpo, columns=scores).pair_losses
        with_margin = loss_of(dpo, columns={**scores, "margin": torch.tensor([0.5])}).pair_losses
        assert torch.equal(plain, with_margin) == ("margin" not in loss.columns), name


def test_weights_that_were_asked_for_cannot_be_forgotten():
    with pytest.raises(AssertionError):
        loss_of(Dpo(wpo=True))


def test_rewards_and_their_slopes_carry_no_gradient():
    loss = loss_of(Dpo(), policy=POLICY.clone().requires_grad_())
    reported = (loss.rewards.chosen, loss.rewards.rejected, loss.reward_slopes.chosen, loss.reward_slopes.rejected)
    assert not any(value.requires_grad for value in reported)
    assert loss.pair_losses.requires_grad and loss.sft.requires_grad


def test_sft_is_the_negative_log_probability_of_the_best():
    assert sft(torch.tensor([-3.0]), torch.tensor([2]), average=False).item() == 3.0
    assert sft(torch.tensor([-3.0]), torch.tensor([2]), average=True).item() == 1.5


def test_with_three_completions_every_pair_counts_and_the_best_is_taken_once():
    pairing = Pairing(torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2]), torch.tensor([0]))
    loss = loss_of(
        Dpo(), torch.tensor([-3.0, -5.0, -9.0]), torch.zeros(3), torch.ones(3, dtype=torch.long), pairing=pairing
    )
    margins = (loss.rewards.chosen - loss.rewards.rejected).tolist()
    assert margins == pytest.approx([0.2, 0.6, 0.4])
    assert loss.sft.tolist() == [3.0]

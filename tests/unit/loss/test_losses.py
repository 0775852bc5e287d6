"""Each loss by hand, its gradient, its limits, and the identities between losses.

The worked pair: pi(c) = -3, pi(r) = -5, ref(c) = ref(r) = -4, so r_c = 1, r_r = -1, d = 2; beta = 0.1, so beta d = 0.2.
Lengths n_c = 2, n_r = 4; scores R_c = 1, R_r = 0. With s(0.2) = 0.549834:
log s(0.2) = -0.598139, log s(-0.2) = -0.798139, log s(0.1) = -0.644397, log s(-0.1) = -0.744397.
"""

import math
import re
from pathlib import Path

import pytest
import torch
from declared import needed_settings

from tandem.completions import ChosenRejected
from tandem.config.sections.dpo import Dpo
from tandem.loss.declare import Loss, loss
from tandem.loss.losses import LOSSES
from tandem.loss.objective import pairs_from_sums
from tandem.loss.pairs import Pairs, PairSums

PAGE = Path(__file__).parents[3] / "docs" / "losses.md"

# Where the default of a setting would hide its effect.
SETTINGS = {"robust": {"label_smoothing": 0.1}}


def both(chosen, rejected, **kwargs) -> ChosenRejected:
    return ChosenRejected(torch.tensor(chosen, **kwargs), torch.tensor(rejected, **kwargs))


def make_pairs(
    policy: ChosenRejected,
    reference: ChosenRejected,
    num_tokens: ChosenRejected | None = None,
    scores: ChosenRejected | None = None,
) -> Pairs:
    pairs = len(policy.chosen)
    num_tokens = num_tokens or both([2] * pairs, [4] * pairs)
    scores = scores or both([1.0] * pairs, [0.0] * pairs, dtype=policy.chosen.dtype)
    return pairs_from_sums(PairSums(policy=policy, reference=reference, num_tokens=num_tokens, scores=scores), Dpo())


def loss_of(name: str, pairs: Pairs, **settings) -> torch.Tensor:
    """At the defaults of the configuration, where neither this file nor the declaration of the loss says otherwise."""
    arguments = LOSSES[name].arguments(Dpo(preference_loss=name, **needed_settings(name)))
    given = {**arguments, **SETTINGS.get(name, {}), **settings}
    return LOSSES[name].function(pairs, **{key: given[key] for key in arguments})


WORKED = make_pairs(both([-3.0], [-5.0]), both([-4.0], [-4.0]))

BY_HAND = {
    "dpo": 0.598139,  # -log s(0.2)
    "sigmoid": 0.598139,
    "ipo": 9.0,  # (2 - 1 / 0.2)^2
    "rpo_sq": 0.64,  # (0.2 - 1)^2
    # s(1) = 0.731059, log s(1) = -0.313262, log s(-1) = -1.313262:
    # 0.731059 * (-0.313262 + 0.598139) + 0.268941 * (-1.313262 + 0.798139)
    "rpo_bwd_kl": 0.069724,
    "rpo_fwd_kl": 0.075256,  # 0.549834 * (-0.598139 + 0.313262) + 0.450166 * (-0.798139 + 1.313262)
    "hinge": 0.8,  # 1 - 0.2
    "robust": 0.573139,  # (0.9 * 0.598139 - 0.1 * 0.798139) / 0.8
    # log 0.999 = -0.001001, log 0.001 = -6.907755:
    # 0.549834 * (-0.598139 + 0.001001) + 0.450166 * (-0.798139 + 6.907755)
    "exo_pair": 2.422015,
    "nca_pair": 1.338793,  # 0.644397 + 0.5 * 0.744397 + 0.5 * 0.644397
    "bco_pair": 1.288793,  # 0.644397 + 0.644397
    "sppo_hard": 32.0,  # (1 - 5)^2 + (-1 + 5)^2
    "aot": 0.598139,  # one pair: nothing to sort
    "aot_unpaired": 0.598139,
    "apo_zero": 0.950042,  # s(0.1) = 0.524979: (1 - 0.524979) + 0.475021
    "apo_down": 0.975145,  # 0.524979 + (1 - 0.549834)
    "discopop": 0.814763,  # m = s(0.2 / 0.05) = 0.982014: 0.017986 * 0.598139 + 0.982014 * exp(-0.2)
    "sigmoid_norm": 0.656350,  # -log s(0.1 * (1/2 + 1/4))
    "simpo": 0.989712,  # -log s(0.1 * (-3/2 + 5/4) - 0.5)
    # log odds: -1.5 - log(1 - 0.223130) = -1.247518 and -1.25 - log(1 - 0.286505) = -0.912420:
    # 1.5 - log s(-1.247518 + 0.912420)
    "orpo": 2.374667,
    "cpo": 2.098139,  # 0.598139 + 3/2
}


def test_every_loss_has_a_value_computed_by_hand():
    assert list(LOSSES) == list(BY_HAND)


def test_the_values_by_hand_are_at_the_defaults_of_the_configuration():
    dpo = Dpo()
    assert (dpo.reference_policy_kl_penalty, dpo.label_smoothing, dpo.gt_reward_scale) == (0.1, 0.0, 1.0)
    assert (dpo.simpo_gamma, dpo.orpo_lambda, dpo.cpo_alpha, dpo.discopop_tau) == (0.5, 1.0, 1.0, 0.05)


@pytest.mark.parametrize("name", LOSSES)
def test_the_worked_pair(name):
    assert loss_of(name, WORKED).tolist() == pytest.approx([BY_HAND[name]], abs=2e-6)


@pytest.mark.parametrize(
    ("name", "setting", "by_hand"),
    [
        ("dpo", {"label_smoothing": 0.1}, 0.618139),  # 0.9 * 0.598139 + 0.1 * 0.798139
        ("aot", {"label_smoothing": 0.1}, 0.618139),
        ("aot_unpaired", {"label_smoothing": 0.1}, 0.618139),
        ("rpo_sq", {"gt_reward_scale": 3.0}, 7.84),  # (0.2 - 3)^2
        ("rpo_bwd_kl", {"gt_reward_scale": 0.2}, 0.0),  # given 0.2, implied 0.2
        ("rpo_fwd_kl", {"gt_reward_scale": 0.2}, 0.0),
        ("simpo", {"simpo_gamma": 0.0}, 0.705725),  # -log s(-0.025)
        ("simpo", {"beta": 2.0}, 1.313262),  # -log s(2 * -0.25 - 0.5)
        ("orpo", {"orpo_lambda": 0.5}, 1.937333),  # 1.5 + 0.5 * 0.874667
        ("cpo", {"cpo_alpha": 0.5}, 1.348139),  # 0.598139 + 0.5 * 1.5
        ("discopop", {"discopop_tau": 1.0}, 0.719428),  # m = s(0.2): 0.450166 * 0.598139 + 0.549834 * 0.818731
        ("ipo", {"beta": 0.25}, 0.0),  # 1 / (2 beta) = 2 = d
        ("sppo_hard", {"beta": 0.5}, 0.0),
        ("hinge", {"beta": 1.0}, 0.0),  # 1 - 2 < 0
    ],
)
def test_what_a_setting_does(name, setting, by_hand):
    assert loss_of(name, WORKED, **setting).tolist() == pytest.approx([by_hand], abs=2e-6)


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("dpo", math.log(2)),
        ("ipo", 25.0),  # 1 / (4 beta^2)
        ("hinge", 1.0),
        ("robust", math.log(2)),
        ("nca_pair", 2 * math.log(2)),
        ("bco_pair", 2 * math.log(2)),
        ("sppo_hard", 50.0),  # 2 * 5^2
        ("aot", math.log(2)),
        ("aot_unpaired", math.log(2)),
        ("apo_zero", 1.0),
        ("apo_down", 1.0),
        ("discopop", 0.5 * math.log(2) + 0.5),
        ("sigmoid_norm", math.log(2)),
        ("rpo_sq", 1.0),
    ],
)
def test_where_a_loss_starts_while_policy_and_reference_are_equal(name, by_hand):
    start = make_pairs(both([-3.0, -40.0], [-5.0, -2.0]), both([-3.0, -40.0], [-5.0, -2.0]))
    assert loss_of(name, start).tolist() == pytest.approx([by_hand, by_hand], abs=1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.7])
@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].start is not None])
def test_the_declared_start_is_the_loss_while_policy_and_reference_are_equal(name, beta):
    equal = both([-3.0, -40.0], [-5.0, -2.0], dtype=torch.float64)
    chosen = Dpo(preference_loss=name, reference_policy_kl_penalty=beta, **needed_settings(name))
    start = LOSSES[name].start_value(chosen)
    assert loss_of(name, make_pairs(equal, equal), beta=beta).tolist() == pytest.approx([start, start], rel=1e-12)


def test_only_losses_of_scores_or_without_a_reference_have_no_declared_start():
    without = [name for name, declared in LOSSES.items() if declared.start is None]
    assert without == [
        name for name, declared in LOSSES.items() if "score" in declared.columns or not declared.needs_reference
    ]


# Pair A is the worked one. Pair B: pi -6 and -5, ref -2 and -7, so r_c = -4, r_r = 2.
TWO = make_pairs(both([-3.0, -6.0], [-5.0, -5.0]), both([-4.0, -2.0], [-4.0, -7.0]))


def test_aot_compares_sorted_margins_over_the_batch():
    # Margins of the policy 2, -1, of the reference 0, 5; sorted -1, 2 less 0, 5: -1, -3. Pair by pair: 2, -6.
    by_hand = [0.744397, 0.854355]  # -log s(-0.1), -log s(-0.3)
    assert loss_of("aot", TWO).tolist() == pytest.approx(by_hand, abs=1e-6)


def test_unpaired_aot_compares_sorted_ratios_over_the_batch():
    # r_c 1, -4 and r_r -1, 2; sorted -4, 1 less -1, 2: -3, -1.
    assert loss_of("aot_unpaired", TWO).tolist() == pytest.approx([0.854355, 0.744397], abs=1e-6)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_the_order_of_the_batch_does_not_matter_to_aot(name):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(8, generator=generator) for _ in range(4)]
    order = torch.randperm(8, generator=generator)
    pairs, shuffled = (
        make_pairs(ChosenRejected(a, b), ChosenRejected(c, d))
        for a, b, c, d in (values, [value[order] for value in values])
    )
    assert torch.equal(loss_of(name, pairs), loss_of(name, shuffled))


def test_aot_of_one_pair_is_dpo():
    for name in ("aot", "aot_unpaired"):
        assert torch.equal(loss_of(name, WORKED, label_smoothing=0.2), loss_of("dpo", WORKED, label_smoothing=0.2))


def test_length_normalised_dpo_is_dpo_of_averages():
    policy, reference, lengths = (
        both([-3.0, -6.0], [-5.0, -5.0]),
        both([-4.0, -2.0], [-4.0, -7.0]),
        both([2, 9], [4, 3]),
    )
    sums = PairSums(policy=policy, reference=reference, num_tokens=lengths)
    averaged = pairs_from_sums(sums, Dpo(preference_average_log_probs=True))
    summed = pairs_from_sums(sums, Dpo())
    assert torch.allclose(loss_of("sigmoid_norm", summed), loss_of("dpo", averaged))


def test_robust_without_noise_is_dpo():
    assert torch.equal(loss_of("robust", TWO, label_smoothing=0.0), loss_of("dpo", TWO))


def test_robust_is_unbiased_under_flipped_labels():
    """With eps of the labels flipped its mean is the loss of the true labels: what the paper builds it for."""
    flipped = make_pairs(both([-5.0], [-3.0]), both([-4.0], [-4.0]))
    mean = 0.9 * loss_of("robust", WORKED) + 0.1 * loss_of("robust", flipped)
    assert torch.allclose(mean, loss_of("dpo", WORKED))


def test_exo_is_a_distance_from_the_smoothed_label():
    # s(beta d) = 1 - eps at d = 10 * log(0.9 / 0.1): nothing is left to learn.
    there = make_pairs(both([10 * math.log(9)], [0.0]), both([0.0], [0.0]))
    assert loss_of("exo_pair", there, label_smoothing=0.1).item() == pytest.approx(0, abs=1e-6)


def test_forward_and_backward_rpo_change_places_with_given_and_implied():
    # implied 0.2 and given 1 against implied 1 and given 0.2
    swapped = make_pairs(both([10.0], [0.0]), both([0.0], [0.0]), scores=both([0.2], [0.0]))
    assert torch.allclose(loss_of("rpo_fwd_kl", WORKED), loss_of("rpo_bwd_kl", swapped))


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_matches_finite_differences(name):
    generator = torch.Generator().manual_seed(3)

    def logps() -> torch.Tensor:
        return (-1 - 6 * torch.rand(5, generator=generator, dtype=torch.float64)).requires_grad_()

    policy, reference = [logps(), logps()], ChosenRejected(logps().detach(), logps().detach())

    def loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        return loss_of(name, make_pairs(ChosenRejected(chosen, rejected), reference), beta=0.7)

    assert torch.autograd.gradcheck(loss, policy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chosen", "rejected"), [(-1.0, -1e4), (-1e4, -1.0), (0.0, 0.0), (-1e4, -1e4), (-1e-9, -2.0)])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_stay_finite_at_huge_margins(name, chosen, rejected, dtype):
    policy = ChosenRejected(*(torch.tensor([value], dtype=dtype, requires_grad=True) for value in (chosen, rejected)))
    reference = both([-5e3], [-5e3], dtype=dtype)
    for beta in (0.1, 10.0):
        loss = loss_of(name, make_pairs(policy, reference, both([1], [1])), beta=beta)
        assert loss.dtype == dtype and torch.isfinite(loss).all()
        gradients = torch.autograd.grad(loss.sum(), [policy.chosen, policy.rejected], materialize_grads=True)
        assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_the_odds_keep_their_digits_near_certainty():
    # p = exp(-1e-4): log p - log(1 - p) = -1e-4 - log(9.9995e-5) = 9.210290
    pairs = make_pairs(both([-2e-4], [-4e-4]), both([0.0], [0.0]))
    equal_odds = 2e-4 / 2 + math.log(2)
    assert loss_of("orpo", pairs).item() == pytest.approx(equal_odds, abs=1e-7)
    from tandem.loss.losses import _log_odds

    assert _log_odds(torch.tensor(-1e-4)).item() == pytest.approx(9.210290, abs=1e-5)


def test_discopop_is_logistic_far_below_zero_and_exponential_far_above():
    below = make_pairs(both([-100.0], [0.0]), both([0.0], [0.0]))
    above = make_pairs(both([100.0], [0.0]), both([0.0], [0.0]))
    assert loss_of("discopop", below).item() == pytest.approx(10.000045, abs=1e-5)  # -log s(-10)
    assert loss_of("discopop", above).item() == pytest.approx(math.exp(-10), rel=1e-5)


# Declarations


@pytest.fixture
def declarations():
    """Losses that a test declares are forgotten after it."""
    before = dict(LOSSES)
    yield LOSSES
    LOSSES.clear()
    LOSSES.update(before)


def test_a_declaration_takes_name_arguments_and_formula_from_the_function(declarations):
    @loss(aliases=("plain_margin",), needs_reference=False)
    def margin(pair, *, beta, simpo_gamma):
        """-beta d + gamma. Of this test.

        More about it.
        """
        return simpo_gamma - beta * pair.policy.margin

    declared: Loss = declarations["margin"]
    assert declarations["plain_margin"] is declared
    assert (declared.name, declared.formula) == ("margin", "-beta d + gamma. Of this test.")
    assert declared.keys == ("reference_policy_kl_penalty", "simpo_gamma")
    assert declared.arguments(Dpo()) == {"beta": 0.1, "simpo_gamma": 0.5}
    assert (declared.needs_reference, declared.scope, declared.start_value(Dpo())) == (False, "pair", None)


def test_two_losses_cannot_have_one_name(declarations):
    with pytest.raises(AssertionError, match="two losses are called sigmoid"):

        @loss(aliases=("sigmoid",))
        def other(pair, *, beta):
            """A loss of another name."""


@pytest.mark.parametrize("name", LOSSES)
def test_docs_list_every_loss_once_and_cite_its_papers(name):
    page = PAGE.read_text(encoding="utf-8")
    first_columns = re.findall(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \|", page, re.MULTILINE)
    assert sum(f"`{name}`" in column.split(", ") for column in first_columns) == 1
    papers = re.findall(r"\d{4}\.\d{5}", LOSSES[name].formula)
    assert papers and all(paper in page for paper in papers)

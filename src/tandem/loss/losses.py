"""All losses. Each function takes Pairs and returns one value per pair. docs/losses.md explains when to use which loss.

In the formulas, c is the chosen and r the rejected completion, n_c and n_r are their lengths in tokens, R_c and R_r their scores.
r_c and r_r are their log-ratios log pi - log ref, and d = r_c - r_r. s is the sigmoid, eps the label smoothing, and NLL(c) is
-log pi(c). A loss has the name of its function. The keyword arguments of the function are keys of section dpo, except `beta`,
which is reference_policy_kl_penalty. The configuration imports this module, so torch is imported only when a loss is computed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tandem.loss.declare import LOSSES, Bounds, Published, loss, published_beta

if TYPE_CHECKING:
    from torch import Tensor

    from tandem.loss.pairs import Pairs

__all__ = ["LOSSES"]

LOG_2 = math.log(2)

# Mean log-probabilities are capped here. Closer to 0 they are rounding noise in float32, and at 0 the odds are infinite.
NEARLY_CERTAIN = -1e-6


# The paper uses 0.1 and 0.5; since Zephyr, 0.01 is common.
@loss(
    aliases=("sigmoid",),
    start=LOG_2,
    averaged_as="sigmoid_norm",
    columns=("margin",),
    published=(published_beta(0.01, "arXiv:2305.18290", most=0.5),),
)
def dpo(pair: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """-(1 - eps) log s(beta d) - eps log s(-beta d). Eq. 7 of arXiv:2305.18290; eps > 0 is conservative DPO.

    If the data gives a margin m, beta d - m replaces beta d, as in arXiv:2402.10571.
    """
    return _smoothed(_minus_margin(beta * pair.ratios.margin, pair), label_smoothing)


@loss(start=lambda beta: 1 / (4 * beta**2))
def ipo(pair: Pairs, *, beta: float) -> Tensor:
    """(d - 1 / (2 beta))^2. Eq. 17 of arXiv:2310.12036, whose tau is beta."""
    return (pair.ratios.margin - 1 / (2 * beta)).square()


@loss(columns=("score",))
def rpo_sq(pair: Pairs, *, beta: float, gt_reward_scale: float) -> Tensor:
    """(beta d - g)^2, g = scale (R_c - R_r). Reward-aware preference optimization, arXiv:2406.11704, 2502.00203."""
    return (beta * pair.ratios.margin - gt_reward_scale * pair.scores.margin).square()


@loss(columns=("score",))
def rpo_bwd_kl(pair: Pairs, *, beta: float, gt_reward_scale: float) -> Tensor:
    """KL(s(g) || s(beta d)) of Bernoulli distributions, g = scale (R_c - R_r). arXiv:2406.11704, 2502.00203."""
    return _bernoulli_kl(gt_reward_scale * pair.scores.margin, beta * pair.ratios.margin)


@loss(columns=("score",))
def rpo_fwd_kl(pair: Pairs, *, beta: float, gt_reward_scale: float) -> Tensor:
    """KL(s(beta d) || s(g)) of Bernoulli distributions, g = scale (R_c - R_r). arXiv:2406.11704, 2502.00203."""
    return _bernoulli_kl(beta * pair.ratios.margin, gt_reward_scale * pair.scores.margin)


@loss(start=1.0)
def hinge(pair: Pairs, *, beta: float) -> Tensor:
    """max(0, 1 - beta d). SLiC-HF, arXiv:2305.10425, on ratios as in arXiv:2309.06657."""
    return (1 - beta * pair.ratios.margin).relu()


@loss(
    start=LOG_2,
    bounds=(Bounds(key="label_smoothing", below=0.5),),
    published=(published_beta(0.01, "arXiv:2403.00409"),),
)
def robust(pair: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """[-(1 - eps) log s(beta d) + eps log s(-beta d)] / (1 - 2 eps). Robust DPO, arXiv:2403.00409."""
    logits = beta * pair.ratios.margin
    flipped = label_smoothing * _log_sigmoid(-logits)
    return (flipped - (1 - label_smoothing) * _log_sigmoid(logits)) / (1 - 2 * label_smoothing)


@loss(
    start=lambda beta, label_smoothing: -LOG_2 - 0.5 * math.log(label_smoothing * (1 - label_smoothing)),
    bounds=(Bounds(key="label_smoothing", above=0, example=0.001, reason="since the logarithm of it is taken"),),
    published=(published_beta(0.1, "arXiv:2402.00856"), Published("label_smoothing", 0.001, 0.001, "arXiv:2402.00856")),
)
def exo_pair(pair: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """s(z) [log s(z) - log(1 - eps)] + s(-z) [log s(-z) - log eps], z = beta d. Eq. 16 of arXiv:2402.00856."""
    logits = beta * pair.ratios.margin
    preferred = logits.sigmoid() * (_log_sigmoid(logits) - math.log(1 - label_smoothing))
    return preferred + (-logits).sigmoid() * (_log_sigmoid(-logits) - math.log(label_smoothing))


@loss(start=2 * LOG_2, published=(published_beta(0.01, "arXiv:2402.05369"),))
def nca_pair(pair: Pairs, *, beta: float) -> Tensor:
    """-log s(beta r_c) - 0.5 log s(-beta r_c) - 0.5 log s(-beta r_r). NCA, arXiv:2402.05369."""
    chosen, rejected = beta * pair.ratios.chosen, beta * pair.ratios.rejected
    return -_log_sigmoid(chosen) - 0.5 * _log_sigmoid(-chosen) - 0.5 * _log_sigmoid(-rejected)


@loss(start=2 * LOG_2, published=(published_beta(0.01, "arXiv:2404.04656"),))
def bco_pair(pair: Pairs, *, beta: float) -> Tensor:
    """-log s(beta r_c) - log s(-beta r_r). Binary classifier optimization, arXiv:2404.04656, without reward shift."""
    return -_log_sigmoid(beta * pair.ratios.chosen) - _log_sigmoid(-beta * pair.ratios.rejected)


@loss(
    start=lambda beta: 1 / (2 * beta**2),
    published=(published_beta(0.001, "arXiv:2405.00675, whose eta is 1 / beta"),),
)
def sppo_hard(pair: Pairs, *, beta: float) -> Tensor:
    """(r_c - 1 / (2 beta))^2 + (r_r + 1 / (2 beta))^2. SPPO, Eq. 4.7 of arXiv:2405.00675 with certain labels."""
    target = 1 / (2 * beta)
    return (pair.ratios.chosen - target).square() + (pair.ratios.rejected + target).square()


# After sorting over the batch, a value belongs to no single pair, so WPO's weight of a pair cannot be applied. aot does not read
# ratios, so an f-divergence would have no effect.
@loss(scope="batch", input_settings=("preference_average_log_probs", "ld_alpha"), start=LOG_2)
def aot(pair: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """The loss dpo with d = (sorted margins of the policy) - (sorted margins of the reference). Paired AOT, arXiv:2406.05882."""
    delta = _sorted(pair.policy.margin) - _sorted(pair.reference.margin)
    return _smoothed(beta * delta, label_smoothing)


@loss(scope="batch", input_settings=("preference_average_log_probs", "ld_alpha", "f_divergence"), start=LOG_2)
def aot_unpaired(pair: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """The loss dpo with d = (sorted r_c) - (sorted r_r). Unpaired AOT, arXiv:2406.05882."""
    delta = _sorted(pair.ratios.chosen) - _sorted(pair.ratios.rejected)
    return _smoothed(beta * delta, label_smoothing)


@loss(start=1.0, published=(published_beta(0.1, "arXiv:2408.06266"),))
def apo_zero(pair: Pairs, *, beta: float) -> Tensor:
    """(1 - s(beta r_c)) + s(beta r_r). Eq. 7 of arXiv:2408.06266."""
    return (-beta * pair.ratios.chosen).sigmoid() + (beta * pair.ratios.rejected).sigmoid()


@loss(start=1.0, lowers_chosen=True, published=(published_beta(0.1, "arXiv:2408.06266"),))
def apo_down(pair: Pairs, *, beta: float) -> Tensor:
    """s(beta r_c) + (1 - s(beta d)). Eq. 8 of arXiv:2408.06266."""
    return (beta * pair.ratios.chosen).sigmoid() + (-beta * pair.ratios.margin).sigmoid()


@loss(
    start=0.5 * LOG_2 + 0.5,
    published=(published_beta(0.05, "arXiv:2406.08414"), Published("discopop_tau", 0.05, 0.05, "arXiv:2406.08414")),
)
def discopop(pair: Pairs, *, beta: float, discopop_tau: float) -> Tensor:
    """(1 - m) (-log s(z)) + m exp(-z), z = beta d, m = s(z / tau). Eq. 5 of arXiv:2406.08414."""
    logits = beta * pair.ratios.margin
    logistic = (-logits / discopop_tau).sigmoid() * -_log_sigmoid(logits)
    # exp(-z) alone overflows for very negative z, where m is nearly 0. There m exp(-z) is at most 1 for tau <= 1.
    return logistic + (_log_sigmoid(logits / discopop_tau) - logits).exp()


@loss(
    averages=True,
    input_settings=("ld_alpha", "wpo"),
    columns=("margin",),
    start=LOG_2,
    published=(published_beta(5.0, "arXiv:2411.15124"),),
)
def sigmoid_norm(pair: Pairs, *, beta: float) -> Tensor:
    """-log s(beta (r_c / n_c - r_r / n_r)). Length-normalized DPO, arXiv:2411.15124."""
    return -_log_sigmoid(_minus_margin(beta * (pair.ratios / pair.num_tokens).margin, pair))


@loss(
    needs_reference=False,
    averages=True,
    input_settings=("wpo",),
    published=(published_beta(2.0, "arXiv:2405.14734", most=10.0),),
)
def simpo(pair: Pairs, *, beta: float, simpo_gamma: float) -> Tensor:
    """-log s(beta (log pi(c) / n_c - log pi(r) / n_r) - gamma). SimPO, arXiv:2405.14734."""
    return -_log_sigmoid(beta * (pair.policy / pair.num_tokens).margin - simpo_gamma)


@loss(needs_reference=False, averages=True, input_settings=("wpo",))
def orpo(pair: Pairs, *, orpo_lambda: float) -> Tensor:
    """NLL(c) / n_c - lambda log s(log odds(c) - log odds(r)), odds = p / (1 - p), log p = log pi / n. ORPO, arXiv:2403.07691."""
    mean = pair.policy / pair.num_tokens
    return -mean.chosen - orpo_lambda * _log_sigmoid(mean.map(_log_odds).margin)


@loss(
    needs_reference=False,
    input_settings=("wpo",),
    published=(Published("cpo_alpha", 1.0, 1.0, "arXiv:2401.08417"),),
)
def cpo(pair: Pairs, *, beta: float, cpo_alpha: float) -> Tensor:
    """-log s(beta (log pi(c) - log pi(r))) + alpha NLL(c) / n_c. CPO, arXiv:2401.08417."""
    return -_log_sigmoid(beta * pair.policy.margin) - cpo_alpha * pair.policy.chosen / pair.num_tokens.chosen


def _log_sigmoid(logits: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(logits)


def _minus_margin(logits: Tensor, pair: Pairs) -> Tensor:
    """Return the logits minus the margins given in the data. Without margins, return the logits."""
    return logits if pair.required_margin is None else logits - pair.required_margin


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - eps) log s(z) - eps log s(-z), where z are the logits and eps is the label smoothing."""
    return -(1 - label_smoothing) * _log_sigmoid(logits) - label_smoothing * _log_sigmoid(-logits)


def _bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(s(p) || s(q)) of two Bernoulli distributions with logits p and q."""
    positive = p.sigmoid() * (_log_sigmoid(p) - _log_sigmoid(q))
    return positive + (-p).sigmoid() * (_log_sigmoid(-p) - _log_sigmoid(-q))


def _sorted(values: Tensor) -> Tensor:
    return values.sort(stable=True).values


def _log_odds(mean_logp: Tensor) -> Tensor:
    """log p - log(1 - p), where log p is `mean_logp`. For p close to 1, log(-expm1(log p)) is more accurate than log(1 - p)."""
    logp = mean_logp.clamp(max=NEARLY_CERTAIN)
    return logp - (-logp.expm1()).log()

"""Preference losses: Pairs in, one loss per pair out. Pure functions, and the table of their names.

In the formulas r_c and r_r are the ratios, d = r_c - r_r, s is the sigmoid and eps the label smoothing.
What each loss reads and needs is told in config/losses.py.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.config.losses import LossName
from tandem.loss.pairs import Pairs

# A mean log-probability nearer to 0 is rounding noise in float32; the odds of a certain completion are infinite.
NEARLY_CERTAIN = -1e-6


def dpo(pair: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """-(1 - eps) log s(beta d) - eps log s(-beta d). Eq. 7 of arXiv:2305.18290; eps > 0 is conservative DPO."""
    return _smoothed(beta * pair.ratios.margin, label_smoothing)


def ipo(pair: Pairs, *, beta: float) -> Tensor:
    """(d - 1 / (2 beta))^2. Eq. 17 of arXiv:2310.12036, whose tau is beta."""
    return (pair.ratios.margin - 1 / (2 * beta)).square()


def rpo_sq(pair: Pairs, *, beta: float, gt_reward_scale: float) -> Tensor:
    """(beta d - g)^2, g = scale (R_c - R_r). Reward-aware preference optimization, arXiv:2406.11704, 2502.00203."""
    return (beta * pair.ratios.margin - gt_reward_scale * pair.scores.margin).square()


def rpo_bwd_kl(pair: Pairs, *, beta: float, gt_reward_scale: float) -> Tensor:
    """KL(given || implied) of the preference's probability: s(g) and s(beta d). arXiv:2406.11704, 2502.00203."""
    return _bernoulli_kl(gt_reward_scale * pair.scores.margin, beta * pair.ratios.margin)


def rpo_fwd_kl(pair: Pairs, *, beta: float, gt_reward_scale: float) -> Tensor:
    """KL(implied || given) of the preference's probability: s(beta d) and s(g). arXiv:2406.11704, 2502.00203."""
    return _bernoulli_kl(beta * pair.ratios.margin, gt_reward_scale * pair.scores.margin)


def hinge(pair: Pairs, *, beta: float) -> Tensor:
    """max(0, 1 - beta d). SLiC-HF, arXiv:2305.10425, on ratios as in arXiv:2309.06657."""
    return F.relu(1 - beta * pair.ratios.margin)


def robust(pair: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """[-(1 - eps) log s(beta d) + eps log s(-beta d)] / (1 - 2 eps). Robust DPO, arXiv:2403.00409."""
    logits = beta * pair.ratios.margin
    flipped = label_smoothing * F.logsigmoid(-logits)
    return (flipped - (1 - label_smoothing) * F.logsigmoid(logits)) / (1 - 2 * label_smoothing)


def exo_pair(pair: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """s(z) [log s(z) - log(1 - eps)] + s(-z) [log s(-z) - log eps], z = beta d. Eq. 16 of arXiv:2402.00856."""
    logits = beta * pair.ratios.margin
    preferred = logits.sigmoid() * (F.logsigmoid(logits) - math.log(1 - label_smoothing))
    return preferred + (-logits).sigmoid() * (F.logsigmoid(-logits) - math.log(label_smoothing))


def nca_pair(pair: Pairs, *, beta: float) -> Tensor:
    """-log s(beta r_c) - 0.5 log s(-beta r_c) - 0.5 log s(-beta r_r). NCA, arXiv:2402.05369."""
    chosen, rejected = beta * pair.ratios.chosen, beta * pair.ratios.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(pair: Pairs, *, beta: float) -> Tensor:
    """-log s(beta r_c) - log s(-beta r_r). Binary classifier optimization, arXiv:2404.04656, without reward shift."""
    return -F.logsigmoid(beta * pair.ratios.chosen) - F.logsigmoid(-beta * pair.ratios.rejected)


def sppo_hard(pair: Pairs, *, beta: float) -> Tensor:
    """(r_c - 1 / (2 beta))^2 + (r_r + 1 / (2 beta))^2. SPPO, Eq. 4.7 of arXiv:2405.00675 with certain labels."""
    target = 1 / (2 * beta)
    return (pair.ratios.chosen - target).square() + (pair.ratios.rejected + target).square()


def aot(pair: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """dpo of the sorted margins of the policy less the sorted margins of the reference. arXiv:2406.05882, paired."""
    delta = _sorted(pair.policy.margin) - _sorted(pair.reference.margin)
    return _smoothed(beta * delta, label_smoothing)


def aot_unpaired(pair: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """dpo of the sorted r_c less the sorted r_r. arXiv:2406.05882, unpaired."""
    delta = _sorted(pair.ratios.chosen) - _sorted(pair.ratios.rejected)
    return _smoothed(beta * delta, label_smoothing)


def apo_zero(pair: Pairs, *, beta: float) -> Tensor:
    """(1 - s(beta r_c)) + s(beta r_r). Eq. 7 of arXiv:2408.06266."""
    return (-beta * pair.ratios.chosen).sigmoid() + (beta * pair.ratios.rejected).sigmoid()


def apo_down(pair: Pairs, *, beta: float) -> Tensor:
    """s(beta r_c) + (1 - s(beta d)). Eq. 8 of arXiv:2408.06266."""
    return (beta * pair.ratios.chosen).sigmoid() + (-beta * pair.ratios.margin).sigmoid()


def discopop(pair: Pairs, *, beta: float, discopop_tau: float) -> Tensor:
    """(1 - m) (-log s(z)) + m exp(-z), z = beta d, m = s(z / tau). Eq. 5 of arXiv:2406.08414."""
    logits = beta * pair.ratios.margin
    logistic = (-logits / discopop_tau).sigmoid() * -F.logsigmoid(logits)
    # exp(-z) alone overflows where m has long vanished; for tau <= 1 their product never exceeds 1 there.
    return logistic + (F.logsigmoid(logits / discopop_tau) - logits).exp()


def sigmoid_norm(pair: Pairs, *, beta: float) -> Tensor:
    """-log s(beta (r_c / n_c - r_r / n_r)). Length-normalized DPO, arXiv:2411.15124."""
    return -F.logsigmoid(beta * (pair.ratios / pair.num_tokens).margin)


def simpo(pair: Pairs, *, beta: float, simpo_gamma: float) -> Tensor:
    """-log s(beta (log pi(c) / n_c - log pi(r) / n_r) - gamma). SimPO, arXiv:2405.14734."""
    return -F.logsigmoid(beta * (pair.policy / pair.num_tokens).margin - simpo_gamma)


def orpo(pair: Pairs, *, orpo_lambda: float) -> Tensor:
    """NLL(c) / n_c - lambda log s(log odds(c) - log odds(r)), odds of the mean log-probability. arXiv:2403.07691."""
    mean = pair.policy / pair.num_tokens
    return -mean.chosen - orpo_lambda * F.logsigmoid(mean.map(_log_odds).margin)


def cpo(pair: Pairs, *, beta: float, cpo_alpha: float) -> Tensor:
    """-log s(beta (log pi(c) - log pi(r))) + alpha NLL(c) / n_c. CPO, arXiv:2401.08417."""
    return -F.logsigmoid(beta * pair.policy.margin) - cpo_alpha * pair.policy.chosen / pair.num_tokens.chosen


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """The form of conservative DPO: the label is wrong with probability eps."""
    return -(1 - label_smoothing) * F.logsigmoid(logits) - label_smoothing * F.logsigmoid(-logits)


def _bernoulli_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL of two coins given by their logits."""
    heads = p.sigmoid() * (F.logsigmoid(p) - F.logsigmoid(q))
    return heads + (-p).sigmoid() * (F.logsigmoid(-p) - F.logsigmoid(-q))


def _sorted(values: Tensor) -> Tensor:
    return torch.sort(values, stable=True).values


def _log_odds(mean_logp: Tensor) -> Tensor:
    """log p - log(1 - p) for log p <= 0; log(-expm1) keeps the digits of 1 - p where p is close to 1."""
    logp = mean_logp.clamp(max=NEARLY_CERTAIN)
    return logp - (-torch.expm1(logp)).log()


PREFERENCE_LOSSES: dict[LossName, Callable[..., Tensor]] = {
    "dpo": dpo,
    "sigmoid": dpo,
    "ipo": ipo,
    "rpo_sq": rpo_sq,
    "rpo_bwd_kl": rpo_bwd_kl,
    "rpo_fwd_kl": rpo_fwd_kl,
    "hinge": hinge,
    "robust": robust,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "sigmoid_norm": sigmoid_norm,
    "simpo": simpo,
    "orpo": orpo,
    "cpo": cpo,
}

"""Pairs, the input of every loss, and how it is computed: the sums of LD-DPO, f-divergences, the weights of WPO.

Values per token are stored completion by completion and may be padded at the end. Nothing here waits for the device.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.completions import ChosenRejected, Completions, Pairing, sum_completions

# Beyond this exponent, exp continues as its tangent: it still increases, and its square is still finite in float32.
LARGEST_EXPONENT = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSums:
    """Log-probabilities of the chosen and the rejected completion of each pair, summed over tokens. LD-DPO uses weighted sums."""

    policy: ChosenRejected  # log pi
    reference: ChosenRejected  # log ref; zeros without a reference
    num_tokens: ChosenRejected  # completion lengths
    scores: ChosenRejected | None = None  # given in the data
    required_margin: Tensor | None = None  # [pairs], given in the data


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The input of every preference loss. Log-probabilities are summed over tokens, or averaged if averaging is configured."""

    policy: ChosenRejected  # log pi
    reference: ChosenRejected  # log ref; zeros without a reference
    ratios: ChosenRejected  # r = log pi - log ref, transformed by the f-divergence
    num_tokens: ChosenRejected  # completion lengths
    scores: ChosenRejected  # given in the data; NaN if not given
    required_margin: Tensor | None = None  # [pairs], given in the data; None: no margin


def pair_sums(completions: Completions, ld_alpha: float | None) -> PairSums:
    """Return the summed log-probabilities of the chosen and the rejected completion of each pair.

    `ld_alpha`: the token weight of LD-DPO, which needs the prefix sums in `completions`; None: LD-DPO is not used.
    """
    scores, margin = completions.columns.get("score"), completions.columns.get("margin")
    return PairSums(
        policy=_ld(completions.both(completions.policy), completions.policy_prefix, ld_alpha),
        reference=_ld(completions.both(completions.reference), completions.reference_prefix, ld_alpha),
        num_tokens=completions.both(completions.num_tokens),
        scores=None if scores is None else completions.both(scores),
        required_margin=None if margin is None else completions.per_pair(margin),
    )


def _ld(total: ChosenRejected, prefix: ChosenRejected | None, ld_alpha: float | None) -> ChosenRejected:
    """Return the weighted sums of LD-DPO (arXiv:2409.06411).

    Tokens beyond the length of the pair's shorter completion have weight `ld_alpha`.
    `total`: sums over all tokens. `prefix`: sums over the first n tokens, where n is the length of the shorter completion.
    Example: chosen tokens [a, b] and rejected tokens [c, d, e] give a + b and c + d + ld_alpha * e.
    """
    if ld_alpha is None:
        return total
    assert prefix is not None, "dpo.ld_alpha needs the prefixes of both completions"
    return ChosenRejected(
        ld_alpha * total.chosen + (1 - ld_alpha) * prefix.chosen,
        ld_alpha * total.rejected + (1 - ld_alpha) * prefix.rejected,
    )


def prefix_sums(tokens: Tensor, lengths: Tensor, pairing: Pairing) -> ChosenRejected:
    """Sum the first n tokens of both completions of each pair, where n is the length of the pair's shorter completion."""
    shorter = torch.minimum(lengths[pairing.winners], lengths[pairing.losers])
    # A token that is not finite makes the plain sum of its completion not finite. In the running sum it must not affect others.
    finite = torch.where(torch.isfinite(tokens), tokens, 0.0)
    # float64: the running sum grows over the whole pack, and the sum of a short completion must keep its digits.
    before = F.pad(finite.double().cumsum(0), (1, 0))
    starts = pairing.both(lengths.cumsum(0) - lengths)
    return starts.map(lambda start: before[start + shorter] - before[start])


@torch.no_grad()
def wpo_log_weights(token_logps: Tensor, token_log_squares: Tensor, lengths: Tensor, completion: Tensor) -> Tensor:
    """Return the logarithm of WPO's weight of each completion: the mean over tokens of log pi(token) - log sum_v pi(v)^2.

    `token_log_squares`: log sum_v pi(v)^2 at each token, summed over the vocabulary. `lengths` and `completion` are as in
    `sum_completions`.
    """
    return sum_completions(token_logps - token_log_squares, lengths, completion).total / lengths


def wpo_weights(log_weights: Tensor, pairing: Pairing) -> Tensor:
    """Return WPO's weight of each pair: the product of the weights of its completions. Eq. 2 of arXiv:2406.11827. [pairs]"""
    return (log_weights[pairing.winners] + log_weights[pairing.losers]).exp()


def apply_divergence(ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """Transform the log-ratio r for an f-divergence between policy and reference: arXiv:2309.16240.

    reverse_kl: r; forward_kl: 1 - exp(-r); js: log 2 + log s(r); alpha: (exp((a - 1) r) - 1) / (a - 1), where a is `alpha`.
    Each of these is f'(u) with u = pi / ref, plus a constant that makes the value 0 at r = 0. The paper's alpha-divergence has
    f'(u) = (1 - u^-alpha) / alpha, so the paper's alpha is 1 - a.
    """
    if divergence == "js":
        return math.log(2) + F.logsigmoid(ratio)
    order = _order(divergence, alpha)
    if order == 1.0:
        return ratio
    return _expm1((order - 1) * ratio) / (order - 1)


def divergence_slope(ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """Return the derivative of `apply_divergence` with respect to the log-ratio."""
    if divergence == "js":
        return torch.sigmoid(-ratio)
    order = _order(divergence, alpha)
    if order == 1.0:
        return torch.ones_like(ratio)
    return ((order - 1) * ratio).clamp(max=LARGEST_EXPONENT).exp()


def _order(divergence: str, alpha: float) -> float:
    """Return the parameter a with which the alpha-divergence is the given divergence: reverse_kl, forward_kl or alpha."""
    return {"reverse_kl": 1.0, "forward_kl": 0.0, "alpha": alpha}[divergence]


def _expm1(exponent: Tensor) -> Tensor:
    """exp(exponent) - 1. Above LARGEST_EXPONENT, the tangent at LARGEST_EXPONENT replaces the function."""
    beyond = F.relu(exponent - LARGEST_EXPONENT)
    return torch.expm1(exponent.clamp(max=LARGEST_EXPONENT)) + math.exp(LARGEST_EXPONENT) * beyond

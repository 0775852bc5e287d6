"""From log-probabilities per token and completion to Pairs, the input of every loss.

Tokens are stored completion by completion and may be padded at the end. Nothing here waits for the device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.completions import CompletionLogps, sum_completions

# Beyond it an exponential goes on as its tangent: it still rises, and its square is still finite in float32.
LARGEST_EXPONENT = 30.0


@dataclass(frozen=True, slots=True)
class ChosenRejected:
    """One number for each completion of each pair."""

    chosen: Tensor  # [pairs]
    rejected: Tensor  # [pairs]

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected

    def __sub__(self, other: "ChosenRejected") -> "ChosenRejected":
        return ChosenRejected(self.chosen - other.chosen, self.rejected - other.rejected)

    def __truediv__(self, other: "ChosenRejected") -> "ChosenRejected":
        return ChosenRejected(self.chosen / other.chosen, self.rejected / other.rejected)

    def map(self, function: Callable[[Tensor], Tensor]) -> "ChosenRejected":
        return ChosenRejected(function(self.chosen), function(self.rejected))


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which completions form the pairs, and which is the best of each preference: indices into the completions."""

    winners: Tensor  # [pairs]
    losers: Tensor  # [pairs]
    best: Tensor  # [preferences]

    def sides(self, values: Tensor) -> ChosenRejected:
        """A number per completion, seen from the pairs."""
        return ChosenRejected(values[self.winners], values[self.losers])


@dataclass(frozen=True, slots=True)
class Pairs:
    """All that any preference loss reads.

    Log-probabilities are sums over tokens, or means where averaging is on, tokens weighted as LD-DPO asks.
    """

    policy: ChosenRejected  # log pi
    reference: ChosenRejected  # log ref; zeros without a reference
    ratios: ChosenRejected  # r = log pi - log ref, or what the f-divergence makes of it
    num_tokens: ChosenRejected  # completion lengths
    scores: ChosenRejected  # given in the data; NaN where there are none


def pair_sums(tokens: Tensor, sums: CompletionLogps, pairing: Pairing, ld_alpha: float | None) -> ChosenRejected:
    """The log-probability of both completions of each pair; `sums` are those of `tokens`.

    With LD-DPO (arXiv:2409.06411) tokens beyond the length of the pair's shorter completion count `ld_alpha`.
    lengths [2, 3], one pair, tokens [a, b, c, d, e] -> chosen a + b, rejected c + d + ld_alpha * e
    """
    plain = pairing.sides(sums.total)
    if ld_alpha is None:
        return plain
    shared = torch.minimum(sums.num_tokens[pairing.winners], sums.num_tokens[pairing.losers])
    heads = _heads(tokens, sums.num_tokens, pairing, shared)
    return ChosenRejected(
        ld_alpha * plain.chosen + (1 - ld_alpha) * heads.chosen,
        ld_alpha * plain.rejected + (1 - ld_alpha) * heads.rejected,
    )


def _heads(tokens: Tensor, lengths: Tensor, pairing: Pairing, shared: Tensor) -> ChosenRejected:
    """The sum of the first `shared` tokens of both completions of each pair, as differences of running sums."""
    # A token that is not finite shall spoil its own completion, by the plain sum, and not all that stand behind it.
    finite = torch.where(torch.isfinite(tokens), tokens, 0.0)
    # float64: the running sum grows over the whole pack, and the digits of a short completion must survive in it.
    before = F.pad(finite.double().cumsum(0), (1, 0))
    starts = pairing.sides(lengths.cumsum(0) - lengths)
    return starts.map(lambda start: before[start + shared] - before[start])


@torch.no_grad()
def wpo_weights(
    token_logps: Tensor, token_log_squares: Tensor, lengths: Tensor, completion: Tensor, pairing: Pairing
) -> Tensor:
    """[pairs] w_c w_r, w = exp(mean over tokens of log pi(token) - log sum_v pi(v)^2). Eq. 2 of arXiv:2406.11827.

    No gradient flows through them. Segments are those of `sum_completions`.
    """
    means = sum_completions(token_logps - token_log_squares, lengths, completion).total / lengths
    return (means[pairing.winners] + means[pairing.losers]).exp()


def diverged(ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """What replaces the log-ratio r when another f-divergence holds the policy to the reference: arXiv:2309.16240.

    reverse_kl: r; forward_kl: 1 - exp(-r); js: log 2 + log s(r); alpha: (exp((a - 1) r) - 1) / (a - 1).
    With u = pi / ref each is f'(u) up to a constant, chosen so that it is 0 at r = 0. The paper writes
    f'(u) = (1 - u^-alpha) / alpha: its alpha is 1 - a here.
    """
    if divergence == "js":
        return math.log(2) + F.logsigmoid(ratio)
    order = {"reverse_kl": 1.0, "forward_kl": 0.0, "alpha": alpha}[divergence]
    if order == 1.0:
        return ratio
    return _expm1((order - 1) * ratio) / (order - 1)


def divergence_slope(ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """The derivative of `diverged` with respect to the log-ratio."""
    if divergence == "js":
        return torch.sigmoid(-ratio)
    order = {"reverse_kl": 1.0, "forward_kl": 0.0, "alpha": alpha}[divergence]
    if order == 1.0:
        return torch.ones_like(ratio)
    return ((order - 1) * ratio).clamp(max=LARGEST_EXPONENT).exp()


def _expm1(exponent: Tensor) -> Tensor:
    beyond = F.relu(exponent - LARGEST_EXPONENT)
    return torch.expm1(exponent.clamp(max=LARGEST_EXPONENT)) + math.exp(LARGEST_EXPONENT) * beyond

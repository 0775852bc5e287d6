"""Token log-probabilities in; per pair, sums that weigh tokens (LD-DPO) or the weight of the pair (WPO) out.

Tokens stand completion by completion and may be padded at the end. Nothing here waits for the device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.completions import CompletionLogps, sum_completions
from tandem.loss.pairs import Pairing, Sides


def pair_sums(tokens: Tensor, sums: CompletionLogps, pairing: Pairing, ld_alpha: float | None) -> Sides:
    """The log-probability of both completions of each pair; `sums` are those of `tokens`.

    With LD-DPO (arXiv:2409.06411) tokens beyond the length of the pair's shorter completion count `ld_alpha`.
    lengths [2, 3], one pair, tokens [a, b, c, d, e] -> chosen a + b, rejected c + d + ld_alpha * e
    """
    plain = pairing.sides(sums.total)
    if ld_alpha is None:
        return plain
    shared = torch.minimum(sums.num_tokens[pairing.winners], sums.num_tokens[pairing.losers])
    heads = _heads(tokens, sums.num_tokens, pairing, shared)
    return Sides(
        ld_alpha * plain.chosen + (1 - ld_alpha) * heads.chosen,
        ld_alpha * plain.rejected + (1 - ld_alpha) * heads.rejected,
    )


def _heads(tokens: Tensor, lengths: Tensor, pairing: Pairing, shared: Tensor) -> Sides:
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

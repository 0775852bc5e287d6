"""Completions, the record that losses and metrics read: one entry per completion of a micro-batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChosenRejected:
    """One number per pair for the chosen completion, and one number per pair for the rejected completion."""

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
    """The chosen and the rejected completion of each pair, and the best completion of each preference.

    All are indices of completions in the micro-batch.
    """

    winners: Tensor  # [pairs]
    losers: Tensor  # [pairs]
    best: Tensor  # [preferences]

    def both(self, values: Tensor) -> ChosenRejected:
        """Return the value of the chosen and of the rejected completion of each pair. `values`: one value per completion."""
        return ChosenRejected(values[self.winners], values[self.losers])


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """The completions of a micro-batch, as losses and metrics read them.

    Example: preference 0 has two completions and one pair, preference 1 has three completions and two pairs. Then `policy` has
    five entries, `preference` is 0 0 1 1 1, `winners` is 0 2 2, `losers` is 1 3 4 and `best` is 0 2.
    Only `policy` and `policy_prefix` carry a gradient.
    """

    policy: Tensor  # [completions] float64: log pi, summed over the scored tokens
    reference: Tensor  # [completions] float64: log ref; zeros without a reference
    num_tokens: Tensor  # [completions] int64: scored tokens
    drift: Tensor  # [completions] float64: half the squared log-ratio, summed over tokens; estimates the KL
    preference: Tensor  # [completions] int64: index of its preference in the micro-batch
    pairing: Pairing
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # data columns (columns.py) of the micro-batch, by name
    wpo_log_weights: Tensor | None = None  # [completions], only with WPO (loss/pairs.py)
    # Only with LD-DPO: sums over the first n tokens of both completions, where n is the length of the pair's shorter completion.
    policy_prefix: ChosenRejected | None = None
    reference_prefix: ChosenRejected | None = None

    def both(self, values: Tensor) -> ChosenRejected:
        """Return the value of the chosen and of the rejected completion of each pair. `values`: one value per completion."""
        return self.pairing.both(values)

    def per_pair(self, values: Tensor) -> Tensor:
        """Return, for each pair, the value of its preference. `values`: one value per preference.

        With the pairs of the class's example, [a, b] gives [a, b, b].
        """
        return values[self.preference[self.pairing.winners]]


@dataclass(frozen=True, slots=True)
class CompletionLogps:
    """Log-probability of each completion, summed over its tokens, and the number of tokens."""

    total: Tensor  # [completions] float64
    num_tokens: Tensor  # [completions] int64


class _SumSegments(torch.autograd.Function):
    """Sums the values of each contiguous segment. The backward pass is deterministic, because it needs no atomic additions.

    Values are summed in float64. In float32 every addition would lose digits, and losses are differences of such sums.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor, segment: Tensor) -> Tensor:
        ctx.save_for_backward(segment)
        ctx.dtype = values.dtype
        # unsafe=True skips the check of the lengths, which would wait for the device. They come from a Pack.
        return torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (segment,) = ctx.saved_tensors
        return grad[segment].to(ctx.dtype), None, None


def sum_completions(token_logps: Tensor, lengths: Tensor, completion: Tensor) -> CompletionLogps:
    """Sum the log-probabilities of the scored tokens of each completion.

    `lengths`: scored tokens of each completion. `completion`: index of the completion that each token belongs to.
    `token_logps` and `completion` may be padded at the end. Padding counts as one additional completion, which is dropped.
    Example: lengths [2, 1], completion [0, 0, 1, 2, 2] and token_logps [a, b, c, -, -] give the sums [a + b, c].
    """
    padding = len(token_logps) - lengths.sum()
    with_padding = torch.cat([lengths, padding.reshape(1)])
    total = _SumSegments.apply(token_logps, with_padding, completion)[:-1]
    return CompletionLogps(total, lengths)

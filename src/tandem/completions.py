"""The record that losses and metrics read: one entry per completion of a micro-batch. Pairs are indices into it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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
    """Which completions form pairs, and which is the best of each preference, as indices into the completions."""

    winners: Tensor  # [pairs]
    losers: Tensor  # [pairs]
    best: Tensor  # [preferences]

    def both(self, values: Tensor) -> ChosenRejected:
        """Given one value per completion, return the values of the chosen and the rejected completion of each pair."""
        return ChosenRejected(values[self.winners], values[self.losers])


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """A micro-batch as the losses and metrics read it.

    Example: two preferences, with two completions and one pair, and with three completions and two pairs:
    policy [5], preference 0 0 1 1 1, winners 0 2 2, losers 1 3 4, best 0 2.
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
        """Given one value per completion, return the values of the chosen and the rejected completion of each pair."""
        return self.pairing.both(values)

    def per_pair(self, values: Tensor) -> Tensor:
        """Expand one value per preference to one per pair. In the example above: [a, b] -> [a, b, b]"""
        return values[self.preference[self.pairing.winners]]


@dataclass(frozen=True, slots=True)
class CompletionLogps:
    """Log-probability of each completion, summed over its tokens, and the number of tokens."""

    total: Tensor  # [completions] float64
    num_tokens: Tensor  # [completions] int64


class _SumSegments(torch.autograd.Function):
    """Sums over contiguous segments. The backward pass needs no atomic additions, so it is deterministic.

    Sums are in float64: in float32 they would lose digits with every token, and losses are differences of sums.
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
    """Sum scored tokens per completion.

    `token_logps` and `completion` may be padded at the end. Padding counts as one additional completion, which is dropped.
    lengths [2, 1], completion [0, 0, 1, 2, 2]: tokens [a, b, c, -, -] -> [a + b, c]
    """
    padding = len(token_logps) - lengths.sum()
    with_padding = torch.cat([lengths, padding.reshape(1)])
    total = _SumSegments.apply(token_logps, with_padding, completion)[:-1]
    return CompletionLogps(total, lengths)

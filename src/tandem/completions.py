"""The record between model and loss: log-probabilities per completion, summed over its tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CompletionLogps:
    """Log-probability of each completion, summed over its tokens, and how many there were."""

    total: Tensor  # [completions] float64
    num_tokens: Tensor  # [completions] int64


class _SumSegments(torch.autograd.Function):
    """Sums over contiguous segments; the backward only reads, so no atomic addition makes it vary between runs.

    In float64: a running sum in float32 loses digits with every token, and losses take differences of sums.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, lengths: Tensor, segment: Tensor) -> Tensor:
        ctx.save_for_backward(segment)
        ctx.dtype = values.dtype
        # unsafe: without the check of the lengths, which would wait for the device; they come from a Pack.
        return torch.segment_reduce(values.double(), "sum", lengths=lengths, unsafe=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (segment,) = ctx.saved_tensors
        return grad[segment].to(ctx.dtype), None, None


def sum_completions(token_logps: Tensor, lengths: Tensor, completion: Tensor) -> CompletionLogps:
    """Sum scored tokens per completion.

    `token_logps` and `completion` may be padded at the end; padding belongs to one completion more, which is left out.
    lengths [2, 1], completion [0, 0, 1, 2, 2]: tokens [a, b, c, -, -] -> [a + b, c]
    """
    padding = len(token_logps) - lengths.sum()
    with_padding = torch.cat([lengths, padding.reshape(1)])
    total = _SumSegments.apply(token_logps, with_padding, completion)[:-1]
    return CompletionLogps(total, lengths)

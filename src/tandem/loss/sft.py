"""The SFT loss: log-probabilities of the best completions in, one loss per preference out."""

from torch import Tensor


def sft(logps: Tensor, num_tokens: Tensor, *, average: bool) -> Tensor:
    """-log pi(completion), summed over its tokens or averaged."""
    return -(logps / num_tokens) if average else -logps

"""Samples tokens reproducibly: each request has its own random numbers, whatever batch it is in."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from tandem.generation.records import Request, Sampling


def random_numbers(requests: Sequence[Request], sampling: Sampling, num_tokens: int) -> Tensor:
    """[requests, num_tokens] float64 in [0, 1): the number that chooses each token. A row depends only on its request."""
    rows = [
        np.random.Generator(np.random.Philox(key=int.from_bytes(request.random_key(sampling.seed), "big")))
        for request in requests
    ]
    return torch.from_numpy(np.stack([row.random(num_tokens) for row in rows]))


def choose_tokens(logits: Tensor, numbers: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """Choose a token per row by inverting the cumulative distribution at the row's number. logits: [rows, vocabulary].

    Probabilities 0.2, 0.5, 0.3 add up to 0.2, 0.7, 1.0: the number 0.1 gives token 0, 0.2 gives 1, 0.9 gives 2.
    """
    probabilities = (logits.double() / temperature).softmax(-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # The most probable token is always kept: nothing comes before it.
        is_cut = ordered.cumsum(-1) - ordered >= top_p
        probabilities = probabilities.masked_fill(torch.zeros_like(is_cut).scatter(-1, order, is_cut), 0)
    cumulative = probabilities.cumsum(-1)
    # At a number of 1 - 2**-53 the product can round up to the total: the last token with a probability is taken then.
    targets = (numbers[:, None] * cumulative[:, -1:]).minimum(cumulative[:, -1:].nextafter(cumulative.new_zeros(1)))
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


class SeededSampling(LogitsProcessor):
    """Leaves only the sampled token of every row possible, so that transformers' greedy search takes it."""

    def __init__(self, numbers: Tensor, num_prompt_tokens: int, sampling: Sampling):
        self._numbers, self._num_prompt_tokens, self._sampling = numbers, num_prompt_tokens, sampling

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        step = input_ids.shape[1] - self._num_prompt_tokens
        chosen = choose_tokens(
            scores, self._numbers[:, step], temperature=self._sampling.temperature, top_p=self._sampling.top_p
        )
        return torch.full_like(scores, float("-inf")).scatter(-1, chosen[:, None], 0.0)

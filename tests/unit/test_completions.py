"""Sums of token log-probabilities per completion."""

import torch

from tandem.completions import sum_completions


def test_tokens_are_summed_per_completion_and_padding_is_left_out():
    tokens = torch.tensor([-1.0, -2.0, -4.0, float("nan"), -99.0], requires_grad=True)
    sums = sum_completions(tokens, torch.tensor([2, 1]), torch.tensor([0, 0, 1, 2, 2]))
    assert sums.total.tolist() == [-3.0, -4.0]
    assert sums.num_tokens.tolist() == [2, 1]
    (sums.total * torch.tensor([5.0, 7.0])).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.dtype == torch.float32
    assert tokens.grad.tolist() == [5.0, 5.0, 7.0, 0.0, 0.0]


def test_sums_over_long_completions_keep_their_precision():
    tokens = -torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 3
    sums = sum_completions(tokens, torch.tensor([20_000]), torch.zeros(20_000, dtype=torch.int64))
    exact = tokens.double().sum().item()
    assert abs(sums.total.item() - exact) < 1e-9 * abs(exact)

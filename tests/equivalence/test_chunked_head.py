"""Promise 1: the chunked head equals a full log-softmax, forward and backward, for any chunk size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.completions import sum_completions
from tandem.model.head import HeadRule, chunked_logps

TOKENS, HIDDEN, VOCABULARY = 13, 6, 17


def tensors(seed, bias):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=g, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(VOCABULARY, generator=g, dtype=torch.float64, requires_grad=True) if bias else None
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=g)
    outer = torch.randn(TOKENS, generator=g, dtype=torch.float64)
    return hidden, weight, offset, targets, outer


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    chunk=st.integers(1, 20),
    bias=st.booleans(),
    frozen=st.booleans(),
    scale=st.sampled_from([1.0, 0.25]),
    softcap=st.sampled_from([None, 2.0]),
)
def test_any_chunk_size_equals_the_full_log_softmax(seed, chunk, bias, frozen, scale, softcap):
    hidden, weight, offset, targets, outer = tensors(seed, bias)
    head = [part.requires_grad_(not frozen) for part in (weight, offset) if part is not None]
    inputs = [hidden] if frozen else [hidden, *head]

    logits = torch.nn.functional.linear(hidden, weight, offset) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    full = logits.log_softmax(-1)[torch.arange(TOKENS), targets]
    want = torch.autograd.grad((full * outer).sum(), inputs)

    rule = HeadRule(scale, softcap)
    chunked = chunked_logps(hidden, weight, offset, targets, rule=rule, chunk=chunk)
    got = torch.autograd.grad((chunked * outer).sum(), inputs)

    torch.testing.assert_close(chunked, full, atol=1e-12, rtol=1e-12)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_gradcheck_in_float64():
    hidden, weight, offset, targets, _ = tensors(0, True)
    rule = HeadRule(0.5, 3.0)

    def head(h, w, b):
        return chunked_logps(h, w, b, targets, rule=rule, chunk=4)

    assert torch.autograd.gradcheck(head, (hidden, weight, offset))


def test_bfloat16_weight_gradient_does_not_depend_on_the_chunk():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(4096, 8, generator=g).bfloat16()
    targets = torch.randint(16, (4096,), generator=g)

    def gradient(chunk):
        weight = torch.ones(16, 8, dtype=torch.bfloat16, requires_grad=True)
        chunked_logps(hidden, weight, None, targets, chunk=chunk).sum().backward()
        return weight.grad.float()

    # Added up in bfloat16 over 512 chunks the sums drift by several percent; in float32 they agree to rounding.
    whole, pieces = gradient(4096), gradient(8)
    assert ((whole - pieces).abs().max() / whole.abs().max()).item() < 0.01


def test_no_gradient_flows_back_from_padding():
    values = torch.tensor([1.0, 2.0, 4.0, 100.0, 100.0], requires_grad=True)
    sums = sum_completions(values, torch.tensor([2, 1]), torch.tensor([0, 0, 1, 2, 2]))
    assert sums.total.tolist() == [3.0, 4.0]
    (sums.total * torch.tensor([10.0, 20.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [10.0, 10.0, 20.0, 0.0, 0.0]


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_logps_are_float32_when_computing_in_bfloat16(chunk):
    hidden, weight = torch.randn(5, 4).bfloat16(), torch.randn(9, 4).bfloat16()
    assert chunked_logps(hidden, weight, None, torch.zeros(5, dtype=torch.long), chunk=chunk).dtype == torch.float32


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_logits_of_bfloat16_states_are_never_rounded_to_bfloat16(bias, frozen):
    """Between 16 and 32, values of bfloat16 differ by 0.125. Rounded logits would be off by up to half of that."""
    g = torch.Generator().manual_seed(0)
    hidden = (3 * torch.randn(50, 64, generator=g)).bfloat16()
    weight = torch.randn(97, 64, generator=g).bfloat16()
    offset = torch.randn(97, generator=g).bfloat16() if bias else None
    targets = torch.randint(97, (50,), generator=g)

    def results(dtype):
        states = hidden.to(dtype).requires_grad_()
        head = weight.to(dtype).requires_grad_(not frozen), None if offset is None else offset.to(dtype)
        logps = chunked_logps(states, *head, targets, chunk=16)
        logps.sum().backward()
        return logps.detach(), states.grad

    (exact, slope), (got, got_slope) = results(torch.float64), results(torch.bfloat16)
    assert 16 < (hidden.double() @ weight.double().T).abs().max() < 128
    torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=1e-6)
    # Gradients leave in bfloat16, rounded once as products and once as sums.
    assert ((got_slope.double() - slope).norm() / slope.norm()).item() < 0.005

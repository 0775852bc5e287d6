"""What stands for a log-ratio under each f-divergence."""

import math

import pytest
import torch

from tandem.loss.pairs import LARGEST_EXPONENT, apply_divergence, divergence_slope

RATIOS = torch.tensor([-1.0, 0.0, 2.0])
KINDS = [("reverse_kl", 1.0), ("forward_kl", 1.0), ("js", 1.0), ("alpha", 0.5), ("alpha", 1.0), ("alpha", 2.0)]


@pytest.mark.parametrize(
    ("divergence", "alpha", "by_hand"),
    [
        ("reverse_kl", 1.0, [-1.0, 0.0, 2.0]),
        ("forward_kl", 1.0, [-1.718282, 0.0, 0.864665]),  # 1 - e, 0, 1 - exp(-2)
        ("js", 1.0, [-0.620115, 0.0, 0.566219]),  # 0.693147 + log s(-1) = 0.693147 - 1.313262; ... - 0.126928
        ("alpha", 0.5, [-1.297443, 0.0, 1.264241]),  # (exp(0.5) - 1) / -0.5, 0, (exp(-1) - 1) / -0.5
        ("alpha", 2.0, [-0.632121, 0.0, 6.389056]),  # exp(-1) - 1, 0, exp(2) - 1
    ],
)
def test_by_hand(divergence, alpha, by_hand):
    assert apply_divergence(RATIOS, divergence, alpha).tolist() == pytest.approx(by_hand, abs=1e-6)


def test_alpha_goes_from_forward_to_reverse_kl():
    assert torch.equal(apply_divergence(RATIOS, "alpha", 1.0), RATIOS)
    assert torch.equal(apply_divergence(RATIOS, "alpha", 0.0), apply_divergence(RATIOS, "forward_kl", 1.0))
    for near in (1 - 1e-7, 1 + 1e-7):
        assert apply_divergence(RATIOS, "alpha", near).tolist() == pytest.approx(RATIOS.tolist(), rel=1e-6)


@pytest.mark.parametrize(("divergence", "alpha"), KINDS)
def test_around_zero_all_are_alike(divergence, alpha):
    """The slope is f''(1), 1 by these definitions; for Jensen-Shannon one half."""
    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    value = apply_divergence(zero, divergence, alpha)
    value.sum().backward()
    assert value.item() == pytest.approx(0, abs=1e-15)
    assert zero.grad.item() == pytest.approx(0.5 if divergence == "js" else 1.0)


@pytest.mark.parametrize(("divergence", "alpha"), KINDS)
def test_the_gradient_matches_finite_differences(divergence, alpha):
    ratios = torch.tensor([-3.0, -0.1, 0.4, 2.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda ratio: apply_divergence(ratio, divergence, alpha), ratios)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("divergence", "alpha"), KINDS)
def test_huge_ratios_stay_finite_even_squared(divergence, alpha, dtype):
    ratios = torch.tensor([-1e4, 1e4], dtype=dtype, requires_grad=True)
    value = apply_divergence(ratios, divergence, alpha)
    value.square().sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(ratios.grad).all()


def test_beyond_the_largest_exponent_the_tangent_goes_on():
    steep = torch.tensor([-LARGEST_EXPONENT - 2], dtype=torch.float64, requires_grad=True)
    value = apply_divergence(steep, "forward_kl", 1.0)
    value.sum().backward()
    slope = math.exp(LARGEST_EXPONENT)
    assert value.item() == pytest.approx(1 - slope - 2 * slope)
    assert steep.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(("divergence", "alpha"), KINDS)
def test_the_slope_is_the_derivative(divergence, alpha):
    beyond = LARGEST_EXPONENT + 10
    ratios = torch.tensor([-beyond, -3.0, 0.0, 0.4, beyond], dtype=torch.float64, requires_grad=True)
    apply_divergence(ratios, divergence, alpha).sum().backward()
    assert divergence_slope(ratios.detach(), divergence, alpha).tolist() == pytest.approx(ratios.grad.tolist())

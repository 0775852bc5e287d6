"""Linear layers whose products are computed in float8."""

import pytest
import torch
from torch import nn

from tandem.model.float8 import BACKWARD, FORWARD, Float8Linear, compute_in_float8, fits

# A number is rounded by at most 1/16 of itself in the forward's dtype, 1/8 in the backward's: so much less as errors average
# out over the numbers of a product.
MOST = 0.06


def layers(bias=True):
    torch.manual_seed(0)
    plain, other = nn.Linear(64, 96, bias=bias), nn.Linear(64, 96, bias=bias)
    other.load_state_dict(plain.state_dict())
    compute_in_float8([other])
    assert type(other) is Float8Linear
    return plain, other


def results(layer, x, outer):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    out.backward(outer)
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


def off(one, other):
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e6])
def test_products_are_those_of_a_plain_layer_to_the_rounding_of_float8(bias, scale):
    plain, other = layers(bias)
    x, outer = torch.randn(2, 48, 64) * scale, torch.randn(2, 48, 96) * 1e-6
    got, want = results(other, x, outer), results(plain, x, outer)
    for mine, exact in zip(got, want, strict=True):
        assert mine.shape == exact.shape and mine.dtype == exact.dtype
        assert off(mine, exact) < MOST
    assert off(got[1], want[1]) > 1e-3  # and not those of a plain layer


def test_compiled_it_is_the_same():
    torch._dynamo.reset()
    _, layer = layers()
    x, outer = torch.randn(48, 64), torch.randn(48, 96)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    assert all(map(torch.equal, results(compiled, x, outer), results(layer, x, outer)))


def test_numbers_do_not_depend_on_larger_ones_beside_them():
    """Rounded to the same whatever the factor, unless they fall below what it leaves of the range."""
    _, layer = layers()
    x = torch.randn(48, 64)
    x = x.sign() * x.abs().clamp(min=0.1)
    beside = torch.randn(16, 64) * 100
    assert torch.equal(layer(torch.cat([x, beside]))[:48], layer(x))


def test_the_largest_number_is_finite_in_float8():
    for dtype in (FORWARD, BACKWARD):
        for largest in (torch.finfo(dtype).max, 1.0, 0.3, 3.0, 1e-5, 12345.678, 2.0**-20, 2.0**20):
            _, layer = layers(bias=False)
            x = torch.full((16, 64), largest)
            assert layer(x).isfinite().all()
            assert all(one.isfinite().all() for one in results(layer, x, torch.full((16, 96), largest)))


def test_zeros_stay_zeros():
    _, layer = layers(bias=False)
    out, by_x, by_weight = results(layer, torch.zeros(16, 64), torch.zeros(16, 96))
    assert not out.any() and not by_x.any() and not by_weight.any()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(bad):
    _, layer = layers()
    x = torch.randn(16, 64)
    x[3, 5] = bad
    assert not layer(x)[3].isfinite().any()


def test_only_plain_linear_layers_of_fitting_sides_are_changed():
    assert fits(nn.Linear(64, 96)) and fits(nn.Linear(4096, 512))
    assert not fits(nn.Linear(64, 90)) and not fits(nn.Linear(60, 96))
    assert not fits(nn.Linear(2048, 128))  # a router
    assert not fits(nn.LayerNorm(64))
    model = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 65)), nn.Embedding(64, 64)])
    compute_in_float8(list(model))
    assert [type(module).__name__ for module in model.modules()][2:] == ["Float8Linear", "Linear", "Embedding"]
    assert list(model.state_dict()) == ["0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias", "1.weight"]

"""Low-precision weights and moments: nothing is lost on average, skipped updates change nothing, seeds give the random bits."""

from typing import Any

import pytest
import torch

from tandem.model.precision import rounding
from tandem.training import adamw
from tandem.training.adamw import MEAN_CODE, SQUARE_CODE, RoundedAdamW, Rule, StateDtype

LR = 1e-4


def rule(state_dtype: StateDtype = "float32", *, stochastic=True, weight_decay=0.1):
    return Rule(0.9, 0.98, 1e-8, weight_decay, stochastic, state_dtype)


def gradients(step, *shapes):
    """Of very different sizes along a row, with a direction that stays."""
    g, same = torch.Generator().manual_seed(step), torch.Generator().manual_seed(99)
    return [
        torch.randn(shape, generator=g) * torch.logspace(-3, 0, shape[-1]) + 0.3 * torch.randn(shape, generator=same)
        for shape in shapes
    ]


def run(how, *, weights=torch.float32, steps=100, skip=(), seed=1, clip=2.0, shapes=((64, 512), (512,))):
    """The parameters and their optimizer after some steps, and where they began."""
    g = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=g).to(weights) for shape in shapes]
    parameters = [torch.nn.Parameter(value.clone()) for value in start]
    optimizer: Any = RoundedAdamW(parameters, how, lr=LR, seed=seed)
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients(step, *shapes), strict=True):
            parameter.grad = (gradient * clip).to(weights)
        optimizer.grad_scale = torch.tensor(clip)
        optimizer.found_inf = torch.tensor(float(step in skip))
        optimizer.step()
    return [p.detach() for p in parameters], optimizer, start


def plain(start, steps=100):
    """What torch's own AdamW makes of the same start and gradients."""
    parameters = [torch.nn.Parameter(value.float().clone()) for value in start]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients(step, *(p.shape for p in parameters)), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [p.detach() for p in parameters]


def relative_error(got, want, start):
    """Of the way that was gone."""
    return ((got.float() - want).norm() / (want - start.float()).norm()).item()


def test_in_float32_it_is_torchs_adamw():
    got, _, start = run(rule())
    for mine, theirs in zip(got, plain(start), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("state_dtype", "most"), [("bfloat16", 0.01), ("int8", 0.04)])
def test_low_precision_moments_give_nearly_the_same_updates(state_dtype, most):
    got, _, start = run(rule(state_dtype))
    want = plain(start)
    assert relative_error(got[0], want[0], start[0]) < most
    # and not to one side of it
    assert abs((got[0] - want[0]).mean().item()) < 1e-3 * (want[0] - start[0]).abs().mean().item()


def test_a_slow_average_rounded_to_nearest_does_not_move():
    """With beta2 0.999 a moment changes by a thousandth: less than half a rounding step of bfloat16."""
    value = torch.full((100_000,), 1.0)
    smaller = value * 0.999
    assert (smaller.to(torch.bfloat16) == value.to(torch.bfloat16)).all()
    chance = rounding.hash_int32(torch.arange(100_000, dtype=torch.int32))
    assert rounding.to_bfloat16(smaller, chance).float().mean().item() == pytest.approx(0.999, abs=1e-4)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000, 0x7F800000, -0x800000])
def test_non_finite_values_stay_non_finite_for_any_random_bits(bits):
    """A GPU's NaN has all bits set: one more in the last that is kept would be 0."""
    value = torch.full((1000,), bits, dtype=torch.int32).view(torch.float32)
    chance = rounding.hash_int32(torch.arange(1000, dtype=torch.int32))
    assert torch.equal(rounding.to_bfloat16(value, chance).isnan(), value.isnan())
    assert not rounding.to_bfloat16(value, chance).isfinite().any()


def test_bfloat16_weights_move_on_average_as_float32_ones_do_and_by_nearest_rounding_they_do_not():
    start = [torch.full((64, 512), 1.0), torch.ones(512)]

    def moved(stochastic):
        parameters = [torch.nn.Parameter(value.to(torch.bfloat16)) for value in start]
        optimizer: Any = RoundedAdamW(parameters, rule(stochastic=stochastic, weight_decay=0.0), lr=1e-5, seed=3)
        for _ in range(50):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
            optimizer.step()
        return (parameters[0].detach().float() - 1).mean().item()

    assert moved(stochastic=True) == pytest.approx(-50 * 1e-5, rel=0.05)
    assert moved(stochastic=False) == 0.0


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_a_skipped_update_changes_nothing(state_dtype):
    steps = 7
    without, one, _ = run(rule(state_dtype), weights=torch.bfloat16, steps=steps)
    with_skips, other, _ = run(rule(state_dtype), weights=torch.bfloat16, steps=steps + 2, skip=(steps, steps + 1))
    for a, b in zip(without, with_skips, strict=True):
        assert torch.equal(a, b)
    for before, after in zip(one.state.values(), other.state.values(), strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_not_finite_does_not_reach_a_skipped_weight():
    parameter = torch.nn.Parameter(torch.ones(4, 32, dtype=torch.bfloat16))
    optimizer: Any = RoundedAdamW([parameter], rule("int8"), lr=LR, seed=0)
    parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(float("nan")), torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(4, 32, dtype=torch.bfloat16))
    assert all(bool((value == 0).all()) for value in optimizer.state[parameter].values())


def test_random_bits_depend_on_the_seed():
    first, _, _ = run(rule("int8"), weights=torch.bfloat16, steps=5)
    again, _, _ = run(rule("int8"), weights=torch.bfloat16, steps=5)
    other, _, _ = run(rule("int8"), weights=torch.bfloat16, steps=5, seed=2)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


def test_a_shard_is_rounded_like_the_same_rows_of_the_full_tensor():
    weight, grad = (torch.randn(8, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    count, one, zero = torch.tensor(1.0), torch.tensor(1.0), torch.tensor(0.0)
    scalars = adamw._scalars(1e-3, count, one, zero, rule("bfloat16"))

    def updated(rows, first):
        state = [torch.zeros(len(rows) * 64, dtype=torch.bfloat16) for _ in range(2)]
        new = weight[rows].flatten().clone()
        start = torch.tensor(first + 5, dtype=torch.int32)
        adamw._update(new, grad[rows].flatten(), *state, [], scalars, start, stochastic=True)
        return torch.cat([new, *state])

    whole, below, above = updated(range(8), 0), updated(range(3), 0), updated(range(3, 8), 3 * 64)
    for number in range(3):
        one = whole.reshape(3, 512)[number]
        two = torch.cat([below.reshape(3, 192)[number], above.reshape(3, 320)[number]])
        assert torch.equal(one, two)


@pytest.mark.parametrize("how", [MEAN_CODE, SQUARE_CODE])
def test_codes_keep_the_mean_and_the_largest(how):
    levels, _ = how
    values = torch.logspace(-9, 0, 256)[None]
    if how == MEAN_CODE:
        values = values * torch.tensor([1.0, -1.0]).repeat(128)
    total = torch.zeros_like(values)
    for draw in range(2000):
        chance = rounding.hash_int32(torch.arange(256, dtype=torch.int32)[None] + 1000 * draw)
        codes, top = adamw._encode(values, how, chance)
        assert top.item() == 1.0
        assert codes.abs().max() <= levels
        total += adamw._decode(codes, top, how)
    # the smallest step above zero decides how much a mean of so many draws still wanders
    torch.testing.assert_close(total / 2000, values, atol=2e-6, rtol=0.02)


def largest_steps(how, gradient, steps=40):
    """Of every step the largest change of a weight, as a multiple of the learning rate."""
    parameter = torch.nn.Parameter(torch.zeros(16, 512))
    optimizer: Any = RoundedAdamW([parameter], how, lr=1.0, seed=1)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    for step in range(steps):
        before = parameter.detach().clone()
        parameter.grad = gradient(torch.randn(16, 512, generator=torch.Generator().manual_seed(step)))
        optimizer.step()
        yield (parameter.detach() - before).abs().max().item()


@pytest.mark.parametrize(
    "gradient",
    [
        lambda noise: noise * torch.logspace(-9, 0, 512),  # hundreds of times the rate without the limit
        lambda noise: 0.01 * noise * (noise.abs() > 2),  # four times
    ],
    ids=["of very different sizes", "rare"],
)
@pytest.mark.parametrize("beta2", [0.98, 0.999])
def test_steps_with_8_bit_moments_stay_within_what_adamw_can_do(gradient, beta2):
    how = Rule(0.9, beta2, 1e-8, 0.0, True, "int8")
    for number, largest in enumerate(largest_steps(how, gradient), start=1):
        assert largest <= 1.0001 * adamw._largest_step(torch.tensor(float(number)), how).item()


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.98), (0.9, 0.999), (0.9, 0.81), (0.95, 0.5), (0.0, 0.9)])
def test_the_largest_step_is_that_of_the_worst_gradients(beta1, beta2):
    """With gradients (beta1 / beta2)^k, k steps before the last, AdamW's step is the largest there is."""
    how = Rule(beta1, beta2, 0.0, 0.0, True, "int8")
    for count in (1, 2, 10, 30):
        ago = torch.arange(count, dtype=torch.float64)
        limit = adamw._largest_step(torch.tensor(float(count)), how).item()

        def step(gradients, ago=ago, count=count):
            mean = (1 - beta1) * (beta1**ago * gradients).sum() / (1 - beta1**count)
            square = (1 - beta2) * (beta2**ago * gradients**2).sum() / (1 - beta2**count)
            return (mean / square.sqrt()).item()

        assert step((beta1 / beta2) ** ago) == pytest.approx(limit, rel=1e-4)
        other = torch.randn(100, count, generator=torch.Generator().manual_seed(count)).double()
        assert max(step(gradients) for gradients in other) <= limit * 1.0001


def test_a_row_of_zeros_has_codes_of_zero():
    codes, top = adamw._encode(torch.zeros(2, 16), SQUARE_CODE, torch.zeros(2, 16, dtype=torch.int32))
    assert not codes.any()
    assert not top.any()
    assert not adamw._decode(codes, top, SQUARE_CODE).any()


def test_random_bits_are_uniform():
    draws = rounding.hash_int32(torch.arange(200_000, dtype=torch.int32))
    for bits in (draws & 0xFFFF, (draws >> 16) & 0xFFFF):
        share = bits.double() / 0x10000
        assert share.mean().item() == pytest.approx(0.5, abs=0.003)
        assert share.var().item() == pytest.approx(1 / 12, rel=0.01)
    assert draws.unique().numel() == 200_000


@pytest.mark.parametrize(("columns", "block"), [(512, 256), (576, 192), (96, 96), (10, 10), (257, 257), (1536, 256)])
def test_how_many_numbers_share_a_scale(columns, block):
    assert adamw._block(columns) == block


@pytest.mark.parametrize(("state_dtype", "size"), [("float32", 8), ("bfloat16", 4), ("int8", 2 + 8 / 256)])
def test_state_bytes_match_the_allocated_states(state_dtype, size):
    parameter = torch.nn.Parameter(torch.zeros(4, 512))
    optimizer = RoundedAdamW([parameter], rule(state_dtype), lr=LR, seed=0)
    moments = [value for name, value in optimizer.state[parameter].items() if name != "step"]
    assert sum(value.numel() * value.element_size() for value in moments) == size * parameter.numel()
    assert adamw.state_bytes(state_dtype) == size

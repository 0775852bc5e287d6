"""Two versions of AdamW: torch's fused AdamW on each rank's shards, and an AdamW with low-precision weights or moments.

Rounding to nearest loses small updates: at the learning rates of preference training, bfloat16 weights hardly change, and a
slow moving average does not change at all. Stochastic rounding preserves the updates on average. Each step uses new random bits.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from tandem.model.distributed.shards import local_shard
from tandem.model.precision.rounding import first_index, hash_int32, to_bfloat16
from tandem.training.offload import HostStates, Piece

StateDtype = Literal["float32", "bfloat16", "int8"]

MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
# How many numbers share a scale when moments are stored in 8 bits.
NUMBERS_PER_SCALE = 256
# (levels, power): code c stands for (c / levels) ** power times the largest value of its block. Codes are dense near zero,
# where most values are.
MEAN_CODE = (127, 3)
SQUARE_CODE = (255, 4)


@dataclass(frozen=True, slots=True)
class Rule:
    """The settings of AdamW and of rounding, which do not change during a run."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    stochastic: bool  # whether bfloat16 weights are rounded stochastically
    state_dtype: StateDtype


class LocalAdamW(AdamW):
    """torch's fused AdamW, applied to each rank's shards. The result is exact, because the update is elementwise.

    Updating DTensors instead would take the host several times as long, and the GPU would wait for the host at every step.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        ratios: Sequence[float] | None = None,
        offload: bool = False,
        **kwargs: Any,
    ):
        """`ratios`: for each parameter, its learning rate as a multiple of the rate of the group; None: 1.

        `offload`: keep the moments in host memory.
        """
        super().__init__(parameters, fused=True, **kwargs)
        given: list[nn.Parameter] = self.param_groups[0]["params"]
        self._ratios = dict(zip(given, ratios or [1.0] * len(given), strict=True))
        self.host_states = HostStates({p: _moments(_shape_of(p), "float32") for p in given}) if offload else None
        for parameter in given:
            moments: Any = self.host_states.parts(parameter) if self.host_states else _moments(parameter, "float32")
            self.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [parameter for parameter in self.param_groups[0]["params"] if parameter.grad is not None]
        steps = {parameter: self.state[parameter]["step"] for parameter in given}
        if self.host_states is None:
            self._apply([_on_device(one, self.state[one]) for one in given], list(steps.values()))
            return
        for pieces in self.host_states.buckets(given):
            # A parameter of several pieces is counted once.
            self._apply(pieces, [steps[piece.parameter].clone() for piece in pieces])
        torch._foreach_add_(list(steps.values()), 1 - self.found_inf)

    def _apply(self, pieces: list[Piece], steps: list[Tensor]) -> None:
        (group,) = self.param_groups
        for ratio in dict.fromkeys(self._ratios[piece.parameter] for piece in pieces):
            own = [number for number, piece in enumerate(pieces) if self._ratios[piece.parameter] == ratio]
            self._update([pieces[number] for number in own], [steps[number] for number in own], lr=ratio * group["lr"])

    def _update(self, pieces: list[Piece], steps: list[Tensor], *, lr: Any) -> None:
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        adamw(
            [piece.weight for piece in pieces],
            [piece.grad for piece in pieces],
            *([piece.states[name] for piece in pieces] for name in MOMENTS),
            max_exp_avg_sqs=[],
            state_steps=steps,
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


class RoundedAdamW(Optimizer):
    """AdamW with low-precision weights or moments.

    Like torch's fused AdamW, it divides gradients by `grad_scale` (used here for clipping), and skips the update if `found_inf`
    is set.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        rule: Rule,
        *,
        lr: float,
        seed: int,
        ratios: Sequence[float] | None = None,
        offload: bool = False,
    ):
        """`ratios`: for each parameter, its learning rate as a multiple of the rate of the group; None: 1.

        `offload`: keep the moments in host memory.
        """
        super().__init__(parameters, {"lr": lr})
        self.rule = rule
        given: list[nn.Parameter] = self.param_groups[0]["params"]
        self._ratios = list(ratios or [1.0] * len(given))
        # One step count for all parameters: an update is applied or skipped for all of them.
        count = torch.zeros((), device=given[0].device)
        kept = self.rule.state_dtype
        self.host_states = HostStates({p: _moments(_shape_of(p), kept) for p in given}) if offload else None
        for parameter in given:
            moments: Any = self.host_states.parts(parameter) if self.host_states else _moments(parameter, kept)
            self.state[parameter] = {"step": count, **moments}
        # The random bits of each parameter are derived from these numbers.
        places = [[first_index(p), seed * 1_000_003 + number] for number, p in enumerate(given)]
        self._firsts, self._salts = torch.tensor(places).to(torch.int32).to(count.device).unbind(1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        count = self.state[group["params"][0]]["step"]
        count.add_(1 - self.found_inf)
        scalars = {
            ratio: _scalars(ratio * group["lr"], count, self.grad_scale, skipped=self.found_inf, rule=self.rule)
            for ratio in dict.fromkeys(self._ratios)
        }
        starts = self._firsts + hash_int32(self._salts + hash_int32(count.to(torch.int32)))
        start_of = dict(zip(group["params"], starts, strict=True))
        ratio_of = dict(zip(group["params"], self._ratios, strict=True))
        for piece in self._pieces([parameter for parameter in group["params"] if parameter.grad is not None]):
            if piece.weight.numel():
                own = ratio_of[piece.parameter]
                self._update(piece, scalars[own], start_of[piece.parameter] + _as_int32(piece.first))

    def _pieces(self, given: list[nn.Parameter]) -> Iterator[Piece]:
        if self.host_states is None:
            yield from (_on_device(parameter, self.state[parameter]) for parameter in given)
            return
        for pieces in self.host_states.buckets(given):
            yield from pieces

    def _update(self, piece: Piece, scalars: Tensor, start: Tensor) -> None:
        moments = [piece.states[name] for name in MOMENTS]
        scales = [piece.states[name] for name in SCALES if name in piece.states]
        block = piece.weight.numel() // scales[0].numel() if scales else 1
        # One row per scale, or flat if there are no scales.
        shape = (-1, block) if scales else (-1,)
        rows = [tensor.reshape(shape) for tensor in (piece.weight, piece.grad, *moments)]
        update: Any = _compiled() if piece.weight.is_cuda else _update
        update(*rows, [scale.reshape(-1, 1) for scale in scales], scalars, start, self.rule.stochastic)


def _on_device(parameter: nn.Parameter, state: dict[str, Any]) -> Piece:
    """Return this rank's shard of a parameter with its states, which are on the device."""
    # Detached, because a compiled update refuses a parameter whose gradient has another dtype.
    weight, grad = local_shard(parameter.detach()), local_shard(parameter.grad)
    return Piece(parameter, weight, grad, {name: local_shard(one) for name, one in state.items()}, first=0)


def _shape_of(parameter: nn.Parameter) -> Tensor:
    """Return a tensor without numbers that is like this rank's shard of a parameter."""
    return torch.empty_like(local_shard(parameter.detach()), device="meta")


def _as_int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def _moments(parameter: Tensor, dtype: StateDtype) -> dict[str, Tensor]:
    """Return zeros for both moments, sharded like the parameter.

    With dtype int8, vectors are still stored in float32: they are small.
    """
    if dtype != "int8" or parameter.ndim < 2:
        kept = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        return {name: torch.zeros_like(parameter, dtype=kept) for name in MOMENTS}
    codes = {
        "exp_avg": torch.zeros_like(parameter, dtype=torch.int8),
        "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.uint8),
    }
    block = _block(parameter.shape[-1])
    # Slicing gives one number per block, in a tensor that is sharded like the parameter.
    return codes | {name: torch.zeros_like(parameter[..., ::block], dtype=torch.float32) for name in SCALES}


def _block(columns: int) -> int:
    """Return how many numbers of a row share a scale: the largest divisor of `columns` that is at most NUMBERS_PER_SCALE.

    If this divisor is very small, the whole row shares one scale.
    """
    most = max(size for size in range(1, NUMBERS_PER_SCALE + 1) if columns % size == 0)
    return most if most >= NUMBERS_PER_SCALE // 16 else columns


def state_bytes(dtype: StateDtype) -> float:
    """Return the bytes of optimizer state per trained parameter: both moments and their scales."""
    return len(MOMENTS) * {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 4 / NUMBERS_PER_SCALE}[dtype]


@cache
def _compiled() -> Any:
    return torch.compile(_update, dynamic=True, fullgraph=True)


def _scalars(lr: float, count: Tensor, grad_scale: Tensor, skipped: Tensor, rule: Rule) -> Tensor:
    """Return the scalars of an update as one tensor on the device, so that the host never waits for the device.

    Constants are included, because a compiled call with Python floats would spend nearly half of its time on converting them.
    """
    given = (lr, rule.weight_decay, 1 - rule.beta1, 1 - rule.beta2, rule.eps)
    same = [torch.full_like(count, number) for number in given]
    debias1, debias2 = 1 - rule.beta1**count, 1 - rule.beta2**count
    return torch.stack([*same, debias1, debias2, _largest_step(count, rule), grad_scale, skipped])


def _largest_step(count: Tensor, rule: Rule) -> Tensor:
    """Return the largest step that AdamW can take after `count` gradients of any size, as a multiple of the learning rate.

    mean = (1 - beta1) sum beta1^k g_k and square = (1 - beta2) sum beta2^k g_k^2. With r = beta1^2 / beta2, Cauchy-Schwarz gives
    |mean| <= (1 - beta1) sqrt(sum r^k) sqrt(square / (1 - beta2)). For betas 0.9 and 0.98, the largest step is 1 after one
    gradient, and 1.7 in the limit.
    """
    if rule.beta2 == 0:
        return torch.full_like(count, float("inf"))
    ratio = rule.beta1**2 / rule.beta2
    total = count if ratio == 1 else (1 - ratio**count) / (1 - ratio)
    debias1, debias2 = 1 - rule.beta1**count, 1 - rule.beta2**count
    return (1 - rule.beta1) * (total * debias2 / (1 - rule.beta2)).sqrt() / debias1


def _update(
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    scales: list[Tensor],
    scalars: Tensor,
    start: Tensor,
    stochastic: bool,
) -> None:
    """Update one tensor in place.

    `start`: seeds the random bits. The bits of element i are a hash of `start` + i.
    """
    rate, weight_decay, toward1, toward2, eps, debias1, debias2, largest, grad_scale, skipped = scalars.unbind()
    slope = grad.float() / grad_scale
    old_mean = _decode(mean, scales[0], MEAN_CODE) if scales else mean.float()
    old_square = _decode(square, scales[1], SQUARE_CODE) if scales else square.float()
    new_mean = old_mean + (slope - old_mean) * toward1
    new_square = old_square + (slope * slope - old_square) * toward2
    step = new_mean / debias1 / ((new_square / debias2).sqrt() + eps)
    if scales:
        # Codes are coarse: a squared moment may be rounded to 0 although the mean is not.
        step = step.clamp(-largest, largest)
    moved = weight.float() * (1 - rate * weight_decay) - rate * step

    places = torch.arange(weight.numel(), dtype=torch.int32, device=weight.device).reshape(weight.shape)
    bits = hash_int32(places + start)
    # Three values are rounded. Two use 16 of these bits each; the third uses new ones.
    weight_bits, mean_bits, square_bits = bits, bits >> 16, hash_int32(bits + 1)
    done = skipped == 0
    _assign(weight, _round(moved, weight.dtype, weight_bits) if stochastic else moved, done)
    if scales:
        for stored, value, scale, code, code_bits in (
            (mean, new_mean, scales[0], MEAN_CODE, mean_bits),
            (square, new_square, scales[1], SQUARE_CODE, square_bits),
        ):
            codes, top = _encode(value, code, code_bits)
            _assign(stored, codes, done)
            _assign(scale, top, done)
    else:
        _assign(mean, _round(new_mean, mean.dtype, mean_bits), done)
        _assign(square, _round(new_square, square.dtype, square_bits), done)


def _assign(stored: Tensor, value: Tensor, done: Tensor) -> None:
    """Copy `value` to `stored`, unless the update is skipped."""
    stored.copy_(torch.where(done, value.to(stored.dtype), stored))


def _round(value: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    return to_bfloat16(value, bits) if dtype == torch.bfloat16 else value


def _decode(codes: Tensor, top: Tensor, code: tuple[int, int]) -> Tensor:
    levels, power = code
    part = codes.float() / levels
    return part.abs() ** (power - 1) * part * top


def _encode(value: Tensor, code: tuple[int, int], bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of the values, and the largest absolute value of each row.

    A value between two codes is rounded stochastically.
    """
    levels, power = code
    top = value.abs().amax(-1, keepdim=True)
    part = value.abs() / top.clamp(min=torch.finfo(torch.float32).tiny)
    below = (part ** (1 / power) * levels).floor().clamp(max=levels - 1)
    low, high = (below / levels) ** power, ((below + 1) / levels) ** power
    up = (bits & 0xFFFF).float() / 0x10000 < (part - low) / (high - low)
    return (below + up.float()) * value.sign(), top

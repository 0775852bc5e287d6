"""An experiment: compute the layers' matrix products in float8, and measure how much log-probabilities depend on packing.

    python benchmarks/float8.py --model FOLDER --data hh_harmless_test.jsonl.gz [--preferences 12]

The preferences are computed in packs, and again one per row; in bfloat16, and with products in float8. Prints the differences
of log-probabilities. The last line is one JSON object. The same products are available as `--float8` in benchmarks/train.py
and as "float32, products in float8" in precision.py.

Each tensor is scaled by one factor, a power of two that brings its largest number into float8's range. The factor does not
affect how a number is rounded, unless the number is ten thousand times smaller than the largest.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options import options_of
from torch import Tensor, nn

from tandem.config.load import load_config
from tandem.errors import TandemError
from tandem.model.architecture import decoder_layers
from tandem.model.distributed.process_group import Ranks, join_process_group, leave_process_group
from tandem.training.start.references import load_sharded
from tandem.training.start.setup import Setup, set_up

# Inputs and weights need precision, gradients need range.
FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# The kernels need sides that are multiples of this.
MULTIPLE = 16
# Products this many times narrower on one side stay as they are: a router, say, is cheap to compute but sensitive.
NARROW = 10


def compute_in_float8(layers: list[nn.Module]) -> None:
    """Compute every plain linear layer of suitable size in float8."""
    for layer in layers:
        for module in layer.modules():
            if fits(module):
                module.__class__ = Float8Linear


def fits(module: nn.Module) -> bool:
    if type(module) is not nn.Linear:
        return False
    sides = module.in_features, module.out_features
    return max(sides) < NARROW * min(sides) and not any(side % MULTIPLE for side in sides)


class Float8Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out: Any = _Product.apply(input.flatten(0, -2), self.weight, self.bias)
        return out.unflatten(0, input.shape[:-1])


class _Product(torch.autograd.Function):
    """x @ weight.T + bias"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight = _factor(x, FORWARD), _factor(weight, FORWARD)
        small = _cast(x, of_x, FORWARD)
        ctx.save_for_backward(small, of_x, weight, of_weight)
        ctx.has_bias = bias is not None
        out = _product(small, _cast(weight, of_weight, FORWARD).t(), of_x * of_weight, x.dtype, fast=True)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, of_x, weight, of_weight = ctx.saved_tensors
        of_grad = _factor(grad, BACKWARD)
        small = _cast(grad, of_grad, BACKWARD)
        by_x = _product(small, _by_columns(_cast(weight, of_weight, FORWARD)), of_grad * of_weight, grad.dtype)
        by_weight = _product(small.t().contiguous(), _by_columns(x), of_grad * of_x, grad.dtype)
        return by_x, by_weight, grad.sum(0) if ctx.has_bias else None


def _factor(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two that scales a tensor into float8: its largest number lands in the upper half of the range.

    Zero if a number is infinite, which becomes NaN.
    """
    largest = values.abs().amax().float().clamp(min=1e-12)
    return torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest)))


def _cast(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.float() * factor).to(dtype)


def _by_columns(values: Tensor) -> Tensor:
    """The same matrix in column-major order, which the kernels need for the right side of a product."""
    return values.t().contiguous().t()


def _product(left: Tensor, right: Tensor, factor: Tensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """left @ right / factor. `fast` accumulates in fewer bits, as is usual in the forward pass."""
    if left.is_cuda:
        one = torch.ones_like(factor)
        return torch._scaled_mm(left, right, scale_a=1 / factor, scale_b=one, out_dtype=dtype, use_fast_accum=fast)
    return (left.float() @ right.float() / factor).to(dtype)


# The same preferences packed in two ways


def logps(setup: Setup, ranks: Ranks, cuts: list[Any], *, float8: bool) -> list[np.ndarray]:
    """Token log-probabilities of every completion, in the order of the preferences; each group in `cuts` is packed separately."""
    policy = load_sharded(setup, setup.source, ranks)
    if float8:
        compute_in_float8(decoder_layers(policy.model))
    found: dict[int, list[np.ndarray]] = {}
    for chosen in cuts:
        for pack in setup.plan.train.micro_batches(np.array(chosen)):
            inputs = policy.inputs(pack, ranks.device)
            with torch.no_grad():
                values = policy(inputs)[: inputs.num_scored].double().cpu().numpy()
            parts = iter(np.split(values, np.cumsum(pack.completion_lengths)[:-1]))
            for preference in pack.preferences.tolist():
                found[preference] = [next(parts) for _ in setup.plan.train.store[preference].completions]
    return [part for preference in sorted(found) for part in found[preference]]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--preferences", type=int, default=12)
    o = parser.parse_args()
    given = [
        f"policy.model_name={o.model}",
        f"data.train.data_path={o.data}",
        "policy.precision=bfloat16",
        "policy.packing.pack_length=1024",
        "policy.max_total_sequence_length=512",
        "data.max_filtered_share=0.9",
        f"policy.train_global_batch_size={o.preferences}",
    ]
    ranks = join_process_group()
    try:
        setup = set_up(load_config(None, given).config, ranks.device)
    except TandemError as error:
        raise SystemExit(f"float8.py: {error}") from None
    together, alone = [range(o.preferences)], [[number] for number in range(o.preferences)]
    results = {}
    print(f"{'':<30} {'a token':>10} {'a completion':>14} {'a pair':>10}")
    for name, float8 in (("bfloat16", False), ("products in float8", True)):
        one, other = (logps(setup, ranks, cuts, float8=float8) for cuts in (together, alone))
        tokens = np.mean([abs(a - b).mean() for a, b in zip(one, other, strict=True)])
        sums = np.array([(a - b).sum() for a, b in zip(one, other, strict=True)])
        pairs = sums[::2] - sums[1::2]
        results[name] = [float(tokens), float(np.sqrt((sums**2).mean())), float(np.sqrt((pairs**2).mean()))]
        print(f"{name:<30} {results[name][0]:>10.4f} {results[name][1]:>14.3f} {results[name][2]:>10.3f}", flush=True)
    leave_process_group()
    print(json.dumps({"benchmark": "float8", "preferences": o.preferences, "differences": results}))


if __name__ == "__main__":
    main()

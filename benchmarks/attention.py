"""Times attention over one pack, forward and backward: FlexAttention with several block sizes and kernel options, and flash
kernels over the same preferences with every prompt repeated.

    python benchmarks/attention.py [--heads 12 --kv-heads 2 --dim 128] [--length 16384] [--prompt-mean 200]

Lengths are log-normal, as in benchmarks/train.py. Needs a GPU. Prints a table; its last line is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from options import options_of
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tandem.data.text.tokens import TokenizedPreference
from tandem.model.attention.pack_attention import SMALL_BLOCK_OPTIONS, block_mask
from tandem.model.attention.varlen import attend_runs, runs_of
from tandem.packing.layout import lay_out

CUDA = torch.device("cuda")
SIDES = ("M1", "N1", "M2", "N2")
HEAD_START = 400_000_000  # GPU clock cycles, about a fifth of a second


def backward(size: int, warps: int, stages: int) -> dict[str, Any]:
    return {f"bwd_BLOCK_{side}": size for side in SIDES} | {"bwd_num_warps": warps, "bwd_num_stages": stages}


def forward(m: int, n: int, warps: int, stages: int) -> dict[str, Any]:
    return {"fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_warps": warps, "fwd_num_stages": stages}


# By name: the block size of the mask, and the kernel options.
FLEX: dict[str, tuple[int, dict[str, Any]]] = {
    "flex": (128, {}),
    "flex, forward 128 x 128": (128, forward(128, 128, 8, 2)),
    "flex, forward 64 x 64": (128, forward(64, 64, 4, 3)),
    "flex, backward 64": (128, backward(64, 4, 3)),
    "flex, rows safe": (128, {"ROWS_GUARANTEED_SAFE": True}),
    "flex, TMA": (128, {"USE_TMA": True}),
    "flex, blocks of 64": (64, SMALL_BLOCK_OPTIONS),
    "flex, blocks of 64, 3 stages": (64, SMALL_BLOCK_OPTIONS | backward(64, 4, 3)),
    "flex, blocks of 64, 2 stages forward": (64, SMALL_BLOCK_OPTIONS | {"fwd_num_stages": 2}),
    "flex, blocks of 64, 8 warps": (64, SMALL_BLOCK_OPTIONS | backward(64, 8, 2)),
    "flex, blocks of 64, 1 stage": (64, SMALL_BLOCK_OPTIONS | backward(64, 4, 1)),
    "flex, blocks of 64, 32 x 64": (64, SMALL_BLOCK_OPTIONS | {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N2": 32}),
    "flex, blocks of 256": (256, {}),
}


def made_preferences(o: argparse.Namespace) -> list[TokenizedPreference]:
    """Random preferences, as many as fit in one row."""
    rng = np.random.default_rng(0)

    def length(mean: float) -> int:
        return max(4, int(rng.lognormal(np.log(mean) - 0.7**2 / 2, 0.7)))

    made: list[TokenizedPreference] = []
    room = o.length
    while True:
        sizes = length(o.prompt_mean), length(o.completion_mean), length(o.completion_mean)
        if (room := room - sum(sizes)) < 0:
            return made
        prompt, *answers = (np.zeros(size, np.int32) for size in sizes)
        made.append(TokenizedPreference(prompt, tuple(answers), ((0, 1),), "made"))


def milliseconds(call: Callable[..., Tensor], o: argparse.Namespace, length: int) -> tuple[float, float, Tensor]:
    """Milliseconds of forward, and of forward with backward; and the output."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, length, o.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (o.heads, o.kv_heads, o.kv_heads)
    )
    outer = torch.randn_like(q)

    def timed(work: Callable[[], Any]) -> float:
        for _ in range(3):
            work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(HEAD_START)  # otherwise the GPU waits for the host, and the host is timed
        start.record()
        for _ in range(o.times):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / o.times

    def both() -> None:
        torch.autograd.grad(call(q, k, v), (q, k, v), outer)

    return timed(lambda: call(q, k, v)), timed(both), call(q, k, v).detach()


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--prompt-mean", type=float, default=200)
    parser.add_argument("--completion-mean", type=float, default=250)
    parser.add_argument("--times", type=int, default=30)
    o = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention.py times kernels of a GPU, and there is none.")
    preferences = made_preferences(o)
    numbers = range(len(preferences))
    shared = lay_out(numbers, preferences, length=o.length)
    repeated_length = -(-sum(2 * len(p.prompt) + sum(map(len, p.completions)) for p in preferences) // 256) * 256
    repeated = lay_out(numbers, preferences, length=repeated_length, arrangement="repeated")
    found: dict[str, dict[str, float]] = {}
    plain: Tensor | None = None
    print(f"{len(preferences)} preferences, {o.length:,} tokens with shared prompts, {repeated_length:,} without")
    print(f"{'':<38} {'forward':>9} {'with backward':>14} {'difference':>11}")

    def measure_and_print(name: str, call: Callable[..., Tensor], length: int) -> None:
        nonlocal plain
        try:
            forward, both, out = milliseconds(call, o, length)
        except Exception as error:
            print(f"{name:<38} {str(error).splitlines()[0][:80]}", flush=True)
            return
        plain = out if plain is None else plain
        off = (out - plain).abs().max().item() if out.shape == plain.shape else float("nan")
        found[name] = {"forward": round(forward, 3), "both": round(both, 3), "difference": off}
        print(f"{name:<38} {forward:>9.2f} {both:>14.2f} {off:>11.1e}", flush=True)

    grouped = o.heads != o.kv_heads
    for name, (block, options) in FLEX.items():
        torch._dynamo.reset()
        compiled, mask = torch.compile(flex_attention, dynamic=False), block_mask(shared, None, CUDA, block)
        given = {"block_mask": mask, "enable_gqa": grouped, "kernel_options": options}
        measure_and_print(name, lambda q, k, v, c=compiled, g=given: c(q, k, v, **g), o.length)
    torch._dynamo.reset()
    compiled, mask = torch.compile(flex_attention, dynamic=False), block_mask(repeated, None, CUDA)
    given = {"block_mask": mask, "enable_gqa": grouped}
    measure_and_print("flex, prompts repeated", lambda q, k, v: compiled(q, k, v, **given), repeated_length)
    runs = runs_of(repeated, None, CUDA)
    measure_and_print(
        "varlen, prompts repeated", lambda q, k, v: attend_runs(q, k, v, runs, scaling=None), repeated_length
    )
    print(json.dumps({"benchmark": "attention", **vars(o), "milliseconds": found, "torch": torch.__version__}))


if __name__ == "__main__":
    main()

"""Times forward and backward of one linear layer with an adapter, as in peft and fused into the layer's product.

    python benchmarks/adapters.py [--shape qwen2.5-1.5b] [--tokens 16384] [--rank 16]

"Joined" is src/tandem/model/lora/joined.py. Every variant is compiled. The times are meaningful only on a GPU. Prints a table
and, as its last line, one JSON object.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from made_model import NAMES, SHAPES
from options import options_of
from torch import Tensor

from tandem.model.lora.joined import joined_linear

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def frozen(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """The layer without an adapter: a lower bound on the time."""
    return F.linear(x, weight)


def as_peft(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    return F.linear(x, weight) + F.linear(F.linear(x, down), up) * scale


def joined(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    return joined_linear(x, weight, None, down, up, scale)


WAYS: dict[str, Layer] = {
    "no adapter": frozen,
    "as peft": as_peft,
    "joined": joined,
}


def linears(shape: str) -> dict[str, tuple[int, int, int]]:
    """For each kind of linear layer: inputs, outputs, and how many a decoder layer has."""
    sizes = dict(zip(NAMES, SHAPES[shape].sizes, strict=True))
    hidden, wide = sizes["hidden_size"], sizes["intermediate_size"]
    narrow = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    return {
        "q, o": (hidden, hidden, 2),
        "k, v": (hidden, narrow, 2),
        "gate, up": (hidden, wide, 2),
        "down": (wide, hidden, 1),
    }


def timed(way: Layer, given: list[Tensor], scale: float, repeats: int) -> tuple[float, list[Tensor]]:
    """Milliseconds per forward and backward, and a list of the output and the gradients."""
    x, weight, down, up, outer = given
    layer: Any = torch.compile(way, dynamic=False)

    def once() -> list[Tensor]:
        for one in (x, down, up):
            one.grad = None
        out = layer(x, weight, down, up, scale)
        out.backward(outer)
        return [out.detach(), *(one.grad for one in (x, down, up) if one.grad is not None)]

    def wait() -> None:
        if x.is_cuda:
            torch.cuda.synchronize()

    for _ in range(2):
        once()
    results = once()
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        once()
    wait()
    return (time.perf_counter() - started) / repeats * 1000, results


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=20)
    o = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found: dict[str, dict[str, float]] = {}
    print(f"{'milliseconds':<14}" + "".join(f"{way:>14}" for way in WAYS) + f"{'joined - peft, relative':>26}")
    for name, (inputs, outputs, count) in linears(o.shape).items():
        g = torch.Generator(device).manual_seed(0)

        def made(*size: int, g: torch.Generator = g) -> Tensor:
            return torch.randn(*size, device=device, generator=g).div(size[-1] ** 0.5).to(dtype)

        x, weight, outer = made(o.tokens, inputs), made(outputs, inputs), made(o.tokens, outputs)
        given = [
            x.requires_grad_(),
            weight,
            made(o.rank, inputs).requires_grad_(),
            made(outputs, o.rank).requires_grad_(),
            outer,
        ]
        times, results = {}, {}
        for way, layer in WAYS.items():
            times[way], results[way] = timed(layer, given, 2.0, o.repeats)
        off = max(
            ((mine - theirs).norm() / theirs.norm()).item()
            for mine, theirs in zip(results["joined"], results["as peft"], strict=True)
        )
        found[name] = {**times, "count": count, "difference": off}
        print(f"{name:<14}" + "".join(f"{spent:>14.3f}" for spent in times.values()) + f"{off:>26.1e}", flush=True)
    whole = {way: sum(row[way] * row["count"] for row in found.values()) for way in WAYS}
    print(f"{'a layer':<14}" + "".join(f"{spent:>14.3f}" for spent in whole.values()))
    print(json.dumps({"benchmark": "adapters", **vars(o), "torch": torch.__version__, "found": found, "layer": whole}))


if __name__ == "__main__":
    main()

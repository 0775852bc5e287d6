"""Times the head alone, forward and backward: log-probabilities of targets from hidden states, compared with other heads.

    python benchmarks/head.py [--tokens 16384] [--hidden 1536] [--vocabulary 151936]

Compares tandem's head, full logits in plain torch and, if installed, the heads of TRL, cut-cross-entropy and Liger. Every
token's log-probability has a separate gradient, as in a preference loss; Liger's head supports only a sum, which is less work.
The times are meaningful only on a GPU. Prints a table and, as its last line, one JSON object.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from options import options_of
from torch import Tensor

from tandem.model.head import auto_head_chunk, chunked_logps

Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads(device: torch.device, vocabulary: int) -> Iterator[tuple[str, Head]]:
    """Heads that can be imported, by name. Each maps hidden states, weight and targets to log-probabilities (or their sum)."""
    chunk = auto_head_chunk(vocabulary, device)
    yield "tandem", lambda hidden, weight, targets: chunked_logps(hidden, weight, None, targets, chunk=chunk)

    def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    yield "full logits", plain
    try:
        from trl.trainer import utils as of_trl  # pyright: ignore[reportMissingImports]

        made: Any = of_trl._ChunkedLogProbFunction.apply
        size = of_trl._CHUNKED_LOGPROB_CHUNK_SIZE
        yield (
            "TRL",
            lambda hidden, weight, targets: made(hidden, weight, None, targets, 1.0, size, None, 1.0, ("log_probs",))[
                0
            ],
        )
    except (ImportError, AttributeError) as error:
        print(f"TRL: {error}")
    try:
        from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

        yield (
            "cut-cross-entropy",
            lambda hidden, weight, targets: -linear_cross_entropy(hidden, weight, targets, reduction="none"),
        )
    except ImportError as error:
        print(f"cut-cross-entropy: {error}")
    try:
        from liger_kernel import transformers as of_liger  # pyright: ignore[reportMissingImports]

        loss = of_liger.LigerFusedLinearCrossEntropyLoss(reduction="sum")
        yield "Liger (a sum)", lambda hidden, weight, targets: -loss(weight, hidden, targets)
    except ImportError as error:
        print(f"Liger: {error}")


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=5)
    o = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    states = torch.randn(o.tokens, o.hidden, device=device, dtype=torch.bfloat16)
    matrix = (torch.randn(o.vocabulary, o.hidden, device=device) / o.hidden**0.5).to(torch.bfloat16)
    targets = torch.randint(o.vocabulary, (o.tokens,), device=device)
    outer = torch.randn(o.tokens, device=device)
    found: dict[str, Any] = {}
    print(f"{'':<20} {'ms':>8} {'GiB':>7} {'TFLOP/s':>8} {'largest difference':>19}")
    exact: Tensor | None = None
    for name, head in heads(device, o.vocabulary):
        hidden, weight = states.clone().requires_grad_(), matrix.clone().requires_grad_()
        base = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        try:
            milliseconds, peak, values = timed(head, hidden, weight, targets, outer, o.repeats, device)
        except torch.OutOfMemoryError:
            print(f"{name:<20} out of memory")
            continue
        useful = 6 * o.tokens * o.hidden * o.vocabulary
        exact = values if exact is None else exact
        off = (values - exact).abs().max().item() if values.shape == exact.shape else None
        found[name] = {
            "milliseconds": round(milliseconds, 2),
            "gib": round((peak - base) / 2**30, 2),
            "useful_tflops": round(useful / milliseconds / 1e9, 1),
            "largest_difference": off,
        }
        row = found[name]
        difference = "" if off is None else f"{off:.1e}"
        print(
            f"{name:<20} {row['milliseconds']:>8} {row['gib']:>7} {row['useful_tflops']:>8} {difference:>19}",
            flush=True,
        )
    print(json.dumps({"benchmark": "head", **vars(o), "torch": torch.__version__, "found": found}))


def timed(
    head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, outer: Tensor, repeats: int, device: torch.device
) -> tuple[float, int, Tensor]:
    """Milliseconds per forward and backward, the peak memory, and the log-probabilities."""

    def once() -> Tensor:
        values = head(hidden, weight, targets)
        (values if values.ndim == 0 else (values * outer).sum()).backward()
        hidden.grad = weight.grad = None
        return values.detach()

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    once()
    values = once()
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(repeats):
        once()
    wait()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return (time.perf_counter() - started) / repeats * 1000, peak, values


if __name__ == "__main__":
    main()

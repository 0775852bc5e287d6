"""Compares tandem's pinned host memory with torch's: how long pinning takes, and how long it blocks work on the GPU.

    python benchmarks/pinned_memory.py [--gib 16] [--repeats 3]

A thread pins memory for tensors of 233 MiB, while the main
thread launches small kernels and waits for each, as a training step does. Needs a GPU. The last line is one JSON object.
"""

import gc
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from options import options_of

from tandem.training.checkpoint.host_copy import PinnedMemory

TENSOR_BYTES = 233 * 1024**2


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--gib", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("memory is pinned for a GPU, and there is none")
    num_tensors = options.gib * 1024**3 // TENSOR_BYTES
    ways: dict[str, Callable[[int], Any]] = {"tandem": pin_by_tandem, "torch": pin_by_torch}
    results: dict[str, Any] = {
        name: [time_pinning(pin, num_tensors) for _ in range(options.repeats)] for name, pin in ways.items()
    }
    for name, found in results.items():
        medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
        print(f"{name:<7}" + "  ".join(f"{key} {value:.3f}" for key, value in medians.items()))
    print(
        json.dumps({"benchmark": "pinned_memory", **vars(options), **results, "device": torch.cuda.get_device_name()})
    )


def pin_by_tandem(num_tensors: int) -> PinnedMemory:
    empty = {str(i): torch.empty(TENSOR_BYTES, dtype=torch.uint8, device="meta") for i in range(num_tensors)}
    return PinnedMemory(empty)


def pin_by_torch(num_tensors: int) -> list[torch.Tensor]:
    return [torch.empty(TENSOR_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(num_tensors)]


def time_pinning(pin: Callable[[int], Any], num_tensors: int) -> dict[str, float]:
    """Pin in a thread; return its time, the longest wait for a kernel during it, one copy, and the memory taken."""
    kept: list[Any] = []
    before = _used_gib()
    started = time.perf_counter()
    thread = threading.Thread(target=lambda: kept.append(pin(num_tensors)))
    thread.start()
    longest = 0.0
    numbers = torch.ones(1024, device="cuda")
    while thread.is_alive():
        launched = time.perf_counter()
        numbers.mul_(1.0)
        torch.cuda.synchronize()
        longest = max(longest, time.perf_counter() - launched)
    seconds = time.perf_counter() - started
    places = list(kept[0].places.values()) if isinstance(kept[0], PinnedMemory) else kept[0]
    _fill(places)
    used = _used_gib() - before
    source = torch.ones(TENSOR_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    launched = time.perf_counter()
    torch._foreach_copy_(places, [source] * len(places), non_blocking=True)
    torch.cuda.synchronize()
    rate = len(places) * TENSOR_BYTES / 1e9 / (time.perf_counter() - launched)
    if isinstance(kept[0], PinnedMemory):
        kept[0].release()
    places.clear()
    kept.clear()
    gc.collect()
    getattr(torch._C, "_host_emptyCache", lambda: None)()  # a build without CUDA does not have it
    return {"pin_seconds": seconds, "longest_wait_seconds": longest, "copy_gb_per_second": rate, "host_gib": used}


def _fill(places: list[torch.Tensor]) -> None:
    """Write to every page, so that all of them exist."""
    for place in places:
        place.zero_()


def _used_gib() -> float:
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free = int(facts["MemAvailable"].split()[0])
    return (int(facts["MemTotal"].split()[0]) - free) / 1024**2


if __name__ == "__main__":
    main()

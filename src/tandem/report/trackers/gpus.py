"""How busy and how full the GPUs are, looked at by a thread of its own: gpu.jsonl, and the newest summary for trackers."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tandem.config.sections.logger import GpuMonitoring
from tandem.storage.ownership import open_own

GIB = 2**30


def sample_gpus() -> dict[str, float]:
    """Every visible GPU as nvidia-smi would show it now: percent of time busy, GiB used and there."""
    found: dict[str, float] = {}
    for number in range(torch.cuda.device_count()):
        found[f"gpu.{number}.util"] = float(torch.cuda.utilization(number))
        found[f"gpu.{number}.mem_gb"] = torch.cuda.device_memory_used(number) / GIB
        found[f"gpu.{number}.mem_total_gb"] = torch.cuda.get_device_properties(number).total_memory / GIB
    return found


class GpuMonitor:
    """Looks at the GPUs every collection_interval; sums up every flush_interval."""

    def __init__(
        self,
        path: Path,
        intervals: GpuMonitoring,
        warn: Callable[[str], None],
        sample: Callable[[], dict[str, float]] = sample_gpus,
    ):
        self._path, self._intervals, self._warn, self._sample = path, intervals, warn, sample
        self._newest: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpus", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, float]:
        """The newest summary, once."""
        newest, self._newest = self._newest, {}
        return newest

    def close(self) -> None:
        self._stop.set()
        self._thread.join(1)  # a driver that hangs is left behind

    def _watch(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_own(self._path, "a") as file:
                while not self._stop.is_set():
                    summary = summed_up(self._samples())
                    if summary:
                        self._newest = summary
                        file.write(json.dumps({"time": time.time(), **summary}) + "\n")
                        file.flush()
        except Exception as error:  # by the driver, its library, the disk: none of them a reason to stop training
            self._warn(f"GPUs are not monitored: {type(error).__name__}: {error}")

    def _samples(self) -> list[dict[str, float]]:
        """What is seen in one flush_interval, or until the end."""
        samples, end = [], time.monotonic() + self._intervals.flush_interval
        while time.monotonic() < end and not self._stop.wait(self._intervals.collection_interval):
            samples.append(self._sample())
        return samples


def summed_up(samples: list[dict[str, float]]) -> dict[str, float]:
    """Utilisation as its mean, memory as its peak.

    [{"gpu.0.util": 50, "gpu.0.mem_gb": 1}, {"gpu.0.util": 100, "gpu.0.mem_gb": 3}] -> {"gpu.0.util": 75, "gpu.0.mem_gb": 3}
    """
    names = samples[0] if samples else {}
    return {
        name: sum(s[name] for s in samples) / len(samples) if name.endswith(".util") else max(s[name] for s in samples)
        for name in names
    }

"""Samples GPU utilisation and memory in a thread, writes summaries to gpu.jsonl, and keeps the newest summary for trackers."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tandem.config.sections.logger import GpuMonitoring
from tandem.storage.cache import GIB
from tandem.storage.ownership import open_own


def sample_gpus() -> dict[str, float]:
    """Return the utilisation in percent, the used memory and the total memory in GiB of every visible GPU."""
    found: dict[str, float] = {}
    for number in range(torch.cuda.device_count()):
        found[f"gpu.{number}.util"] = float(torch.cuda.utilization(number))
        found[f"gpu.{number}.mem_gb"] = torch.cuda.device_memory_used(number) / GIB
        found[f"gpu.{number}.mem_total_gb"] = torch.cuda.get_device_properties(number).total_memory / GIB
    return found


class GpuMonitor:
    """Samples the GPUs every `collection_interval` seconds, and writes a summary every `flush_interval` seconds."""

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
        """Return the newest summary. Each summary is returned only once; without a new summary, return an empty dict."""
        newest, self._newest = self._newest, {}
        return newest

    def close(self) -> None:
        self._stop.set()
        self._thread.join(1)  # does not wait for a driver that hangs

    def _watch(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open_own(self._path, "a") as file:
                while not self._stop.is_set():
                    summary = summarise(self._samples())
                    if summary:
                        self._newest = summary
                        file.write(json.dumps({"time": time.time(), **summary}) + "\n")
                        file.flush()
        except Exception as error:  # an error of the driver, its library or the disk does not stop training
            self._warn(f"GPU monitoring is switched off: {type(error).__name__}: {error}")

    def _samples(self) -> list[dict[str, float]]:
        """Collect samples for one flush_interval, or until the monitor is closed."""
        samples, end = [], time.monotonic() + self._intervals.flush_interval
        while time.monotonic() < end and not self._stop.wait(self._intervals.collection_interval):
            samples.append(self._sample())
        return samples


def summarise(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean utilisation and the peak memory over all samples.

    Example: [{"gpu.0.util": 50, "gpu.0.mem_gb": 1}, {"gpu.0.util": 100, "gpu.0.mem_gb": 3}] gives
    {"gpu.0.util": 75, "gpu.0.mem_gb": 3}.
    """
    names = samples[0] if samples else {}
    return {
        name: sum(s[name] for s in samples) / len(samples) if name.endswith(".util") else max(s[name] for s in samples)
        for name in names
    }

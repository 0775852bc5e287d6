"""The lines of metrics.jsonl in; the same numbers, under trackers' names, to every tracker of the run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tandem.config.logger import Logger
from tandem.printable import without_password
from tandem.train.trackers.adapters import Metrics, Opening
from tandem.train.trackers.feed import Feed
from tandem.train.trackers.gpus import GpuMonitor

TIMING = ("step_seconds", "loader_wait_seconds", "pairs_per_second", "tokens_per_second")
HARDWARE = "hardware"


class Tracking:
    """What the loop tells every record to. Without trackers it does nothing."""

    def __init__(self, feed: Feed | None = None, gpus: GpuMonitor | None = None):
        self._feed, self._gpus = feed, gpus

    def log(self, record: dict[str, Any]) -> None:
        if self._feed is None:
            return
        step, metrics = named(record)
        hardware = self._gpus.take() if self._gpus else {}
        self._feed.put(step, metrics | {f"{HARDWARE}/{name}": value for name, value in hardware.items()})

    def close(self) -> None:
        if self._gpus:
            self._gpus.close()
        if self._feed:
            self._feed.close()


def start_tracking(
    logger: Logger,
    run: Path,
    config: str,
    step: int,
    records: Sequence[dict[str, Any]],
    say: Callable[[str], None],
    warn: Callable[[str], None],
    *,
    on_gpu: bool,
) -> Tracking:
    """Open what is enabled, behind the run's back.

    config: as config.yaml shows it. step: that the run goes on from; records: the lines of metrics.jsonl so far.
    """
    log_dir = run / "logs" if logger.log_dir is None else Path(logger.log_dir) / run.resolve().name
    feed = gpus = None
    if logger.enabled:
        kept = [named(record) for record in records if record["step"] == step]
        public = yaml.safe_load(without_password(config))
        opening = Opening(str(run), str(log_dir), step, kept, logger.model_dump(), public)
        try:
            feed = Feed(logger.enabled, opening, say, warn)
        except OSError as error:
            warn(f"{', '.join(logger.enabled)} cannot be fed: {error}. The run goes on; metrics.jsonl has everything.")
    if logger.monitor_gpus and on_gpu:
        gpus = GpuMonitor(log_dir / "gpu.jsonl", logger.gpu_monitoring, warn)
    return Tracking(feed, gpus)


def named(record: dict[str, Any]) -> tuple[int, Metrics]:
    """A line's step and its numbers, under `split/name`; how long things took under `timing/split/name`.

    {"step": 3, "split": "train", "loss": 0.5, "step_seconds": 2.0} -> 3, {"train/loss": 0.5, "timing/train/step_seconds": 2.0}
    """
    split = record["split"]
    return record["step"], {
        f"timing/{split}/{name}" if name in TIMING else f"{split}/{name}": value
        for name, value in record.items()
        if name not in ("step", "split", "data")
    }

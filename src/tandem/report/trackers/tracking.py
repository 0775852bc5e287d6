"""Sends the records of metrics.jsonl to the trackers of the run. A background thread passes them to a separate process."""

import importlib.util
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import yaml

from tandem.config.sections.logger import Logger
from tandem.errors import ConfigError
from tandem.isolation import isolated_environment
from tandem.report.trackers.adapters import Metrics, Opening
from tandem.report.trackers.child import CLOSE_SECONDS
from tandem.report.trackers.gpus import GpuMonitor
from tandem.report.trackers.nemo_trl_names import OtherNames
from tandem.storage.ownership import open_own
from tandem.terminal.commands import install_command
from tandem.terminal.printable import without_password

QUEUE_RECORDS = 1000
SLOW_SECONDS = 30.0
# -P: otherwise a folder `wandb` in the working directory would be imported instead of the package.
CHILD = (sys.executable, "-P", "-m", "tandem.report.trackers.child")


def check_packages(logger: Logger) -> None:
    """Raise ConfigError if the package of an enabled tracker is not installed."""
    for name in logger.enabled:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a plain folder of that name has no origin
            raise ConfigError(
                f"logger.{name}_enabled = true: the package {name} is not installed. In the tandem checkout, run "
                f"{install_command(name)}, or set logger.{name}_enabled=false."
            )


class Feed:
    """Sends records to the process of the trackers. A thread takes the records from a queue, so that training never waits.

    Records that do not reach the trackers are counted.
    """

    def __init__(
        self,
        trackers: Sequence[str],
        opening: Opening,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ):
        self._say, self._warn = say, warn
        self._left = list(trackers)
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._num_put = self._num_delivered = 0
        self._asked_at: float | None = None  # time of the message that has no answer yet
        self._warned_slow = False
        self._killed = False
        log = Path(opening.log_dir) / "trackers.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        # A new session, so that Ctrl-C reaches only the run, which then closes the trackers.
        with open_own(log, "ab") as errors:
            self._process = subprocess.Popen(
                CHILD,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                env=isolated_environment(),
                start_new_session=True,
            )
        for name in trackers:
            self._queue.put({"tracker": name, "opening": asdict(opening)})
        self._thread = threading.Thread(target=self._deliver, name="trackers", daemon=True)
        self._thread.start()

    def put(self, step: int, metrics: Metrics, by_tracker: Mapping[str, Metrics] | None = None) -> None:
        """Queue a record for the trackers. If the queue is full, the record is lost and counted as such.

        `by_tracker`: metrics that each tracker gets in addition, because their names depend on the tracker.
        """
        if not self._left:  # the user was warned when the last one was switched off
            return
        self._num_put += 1
        asked_at = self._asked_at
        if asked_at is not None and time.monotonic() - asked_at > SLOW_SECONDS and not self._warned_slow:
            self._warned_slow = True
            names = ", ".join(self._left)
            self._warn(
                f"{names}: no answer for {SLOW_SECONDS:g} seconds. The run continues; metrics.jsonl has every record."
            )
        if self._queue.qsize() < QUEUE_RECORDS:
            self._queue.put({"step": step, "metrics": metrics, "by_tracker": by_tracker or {}})

    def close(self) -> None:
        """Wait up to CLOSE_SECONDS for queued records to be sent, and warn about records that were not sent."""
        self._queue.put({"close": True})
        self._thread.join(CLOSE_SECONDS)
        names = ", ".join(self._left)
        if self._thread.is_alive():
            self._killed = True
            self._process.kill()
            self._thread.join(1)
        lost = self._num_put - self._num_delivered
        if self._left and lost:
            self._warn(f"{lost} of {self._num_put} records did not reach {names}; metrics.jsonl has them all.")
        elif self._killed:
            self._warn(f"{names} did not finish within {CLOSE_SECONDS:g} seconds of the run's end and was stopped.")

    def _deliver(self) -> None:
        """Send the queued messages one by one, and wait for the answer to each. Runs in the thread."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            while self._left:
                message = self._queue.get()
                self._ask(message, stdin, stdout)
                self._num_delivered += "metrics" in message
                if "close" in message:
                    break
        except OSError as error:
            if not self._killed:
                self._warn(f"trackers are switched off: their process ended ({error}). The run continues without them.")
                self._left = []
        finally:
            with suppress(OSError):  # buffered text that can no longer be written
                stdin.close()
            self._process.wait()

    def _ask(self, message: dict[str, Any], stdin: IO[str], stdout: IO[str]) -> None:
        self._asked_at = time.monotonic()
        stdin.write(json.dumps(message) + "\n")
        stdin.flush()
        line = stdout.readline()
        self._asked_at = None
        if not line:
            raise OSError(f"exit code {self._process.wait()}")
        answer = json.loads(line)
        if answer["place"]:
            self._say(f"Tracked by {message['tracker']}: {answer['place']}")
        for name, reason in answer["failed"].items():
            self._warn(
                f"{name} is switched off: {reason.rstrip('.')}. The run continues; metrics.jsonl has every record."
            )
            self._left.remove(name)


# Values that differ between equal runs.
TIMING = ("step_seconds", "loader_wait_seconds", "pairs_per_second", "tokens_per_second", "memory_gib")
HARDWARE = "hardware"


class Tracking:
    """Passes every record of the training loop to the trackers. Without trackers, this class does nothing."""

    def __init__(
        self,
        feed: Feed | None = None,
        gpus: GpuMonitor | None = None,
        *,
        others: OtherNames | None = None,
        trackers: Sequence[str] = (),
    ):
        """`others`: names of other trainers, also logged. `trackers`: the enabled trackers, on which TRL's names depend."""
        self._feed, self._gpus = feed, gpus
        self._others, self._trackers = others, trackers

    def log(self, record: dict[str, Any]) -> None:
        if self._feed is None:
            return
        step, metrics = tracker_metrics(record, self._others)
        by_tracker = {name: self._others.trl_metrics(record, name) for name in self._trackers} if self._others else None
        hardware = self._gpus.take() if self._gpus else {}
        self._feed.put(step, metrics | {f"{HARDWARE}/{name}": value for name, value in hardware.items()}, by_tracker)

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
    others: OtherNames,
) -> Tracking:
    """Open the enabled trackers in the background.

    `config`: the text of config.yaml. `step`: the step that the run resumes from. `records`: the records already in
    metrics.jsonl. `others`: names of other trainers that are also logged.
    """
    log_dir = run / "logs" if logger.log_dir is None else Path(logger.log_dir) / run.resolve().name
    feed = gpus = None
    if logger.enabled:
        opening = Opening(
            run=str(run),
            log_dir=str(log_dir),
            step=step,
            kept=[
                (step, tracker_metrics(record, others)[1] | others.trl_metrics(record, "tensorboard"))
                for record in records
                if record["step"] == step
            ],
            settings=logger.model_dump(),
            config=yaml.safe_load(without_password(config)),
        )
        try:
            feed = Feed(logger.enabled, opening, say, warn)
        except OSError as error:
            names = ", ".join(logger.enabled)
            warn(f"{names} cannot be started: {error}. The run continues; metrics.jsonl has every record.")
    if logger.monitor_gpus and on_gpu:
        gpus = GpuMonitor(log_dir / "gpu.jsonl", logger.gpu_monitoring, warn)
    return Tracking(feed, gpus, others=others, trackers=logger.enabled)


def tracker_metrics(record: dict[str, Any], others: OtherNames | None = None) -> tuple[int, Metrics]:
    """Return the step of a record, and its metrics under the names that all trackers show.

    A metric is named `split/name`; a duration or speed is named `timing/split/name`.
    Example: {"step": 3, "split": "train", "loss": 0.5, "step_seconds": 2.0} gives
    3, {"train/loss": 0.5, "timing/train/step_seconds": 2.0}.
    """
    split = record["split"]
    ours = {
        f"timing/{split}/{name}" if name in TIMING else f"{split}/{name}": value
        for name, value in record.items()
        if name not in ("step", "split", "data")
    }
    return record["step"], others.with_nemo(record, ours) if others else ours

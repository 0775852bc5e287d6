"""Sends the metrics of a run to trackers (TensorBoard, W&B, MLflow).

Each tracker's package is imported when the tracker is opened.
"""

import hashlib
import json
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem.storage.cache import read_json, replacing
from tandem.storage.ownership import refuse_other_than_file
from tandem.terminal.printable import without_password

Metrics = dict[str, float]

MLFLOW_PARAMS_AT_ONCE = 100
MLFLOW_PARAM_LENGTH = 500
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")  # a part of file names and addresses
OTHER_URI = "Choose another logger.mlflow.tracking_uri."
NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w.\-:/ ]")


@dataclass(frozen=True, slots=True)
class Opening:
    """The facts about a run that its trackers need when they are opened."""

    run: str  # the run directory
    log_dir: str
    step: int  # the step that the run resumes from; 0 for a new run
    kept: list[tuple[int, Metrics]]  # the records of that step in metrics.jsonl, under TensorBoard's names
    settings: dict[str, Any]  # the section `logger`
    config: dict[str, Any]  # the configuration as in config.yaml

    @property
    def name(self) -> str:
        return Path(self.run).resolve().name


class Tracker(Protocol):
    """A destination for the metrics of a run, in addition to metrics.jsonl."""

    place: str  # URL or path where the user can see them

    def log(self, step: int, metrics: Metrics) -> None: ...

    def close(self) -> None: ...


class Tensorboard:
    """Writes TensorBoard event files.

    When a run is resumed, TensorBoard discards the earlier events of the steps that are repeated.
    """

    def __init__(self, opening: Opening):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events: Any = event_pb2  # its names are generated at run time
        self._summaries: Any = summary_pb2
        given = opening.settings["tensorboard"]["log_dir"]
        self.place = given or str(Path(opening.log_dir) / "tensorboard")
        is_resumed = TrackerRuns(opening.run).find("tensorboard", self.place) is not None
        self._writer = EventFileWriter(self.place, flush_secs=5)
        if is_resumed:
            # TensorBoard then discards the events of this and later steps in earlier files.
            start = self._events.SessionLog
            self._write(opening.step, session_log=start(status=start.START))
            for step, metrics in opening.kept:
                self.log(step, metrics)
        else:
            flat = {key: _scalar(value) for key, value in flattened(opening.config)}
            self._write(0, summary=hparams_pb(flat))
            TrackerRuns(opening.run).keep("tensorboard", self.place, "events")

    def log(self, step: int, metrics: Metrics) -> None:
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        self._write(step, summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **what))


class Wandb:
    """Writes to a W&B run. A resumed training run continues the same W&B run. W&B ignores steps that it already has."""

    def __init__(self, opening: Opening):
        import wandb

        settings = opening.settings["wandb"]
        where = f"{settings['entity'] or ''}/{settings['project']}"
        kept = TrackerRuns(opening.run)
        run_id = kept.find("wandb", where) or secrets.token_hex(4)
        kept.keep("wandb", where, run_id)
        Path(opening.log_dir).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=settings["project"],
            entity=settings["entity"],
            name=settings["name"] or opening.name,
            mode=settings["mode"],
            id=run_id,
            resume="allow",
            dir=opening.log_dir,  # W&B creates the folder `wandb` there
            config=opening.config,
            allow_val_change=True,
            settings=wandb.Settings(console="off"),
        )
        self.place = self._run.url or str(Path(self._run.dir).parent)
        self._reached = opening.step

    def log(self, step: int, metrics: Metrics) -> None:
        # W&B drops records of steps before the last one, such as the export of a run that stopped early.
        self._reached = max(self._reached, step)
        self._run.log(metrics, step=self._reached)

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """Writes to an MLflow run.

    A resumed training run continues the same MLflow run, and skips metrics that MLflow already has.
    """

    def __init__(self, opening: Opening):
        from mlflow import MlflowClient

        settings = opening.settings["mlflow"]
        uri = settings["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            Path(opening.log_dir).mkdir(parents=True, exist_ok=True)
            refuse_other_than_file(Path(opening.log_dir) / "mlflow.db")
            uri = f"sqlite:///{Path(opening.log_dir).resolve()}/mlflow.db"
        refuse_other_database(uri)
        self._client = MlflowClient(tracking_uri=uri)
        kept = TrackerRuns(opening.run)
        found = kept.find("mlflow", uri)
        self._reached: dict[str, int] | None = None if found is None else {}
        if found is None:
            self._id = self._start(settings, opening)
            kept.keep("mlflow", uri, self._id)
        else:
            self._id = found
            self._client.update_run(self._id, status="RUNNING")
        self.place = f"{without_password(uri)}, experiment {settings['experiment_name']}, run {self._id}"

    def _start(self, settings: dict[str, Any], opening: Opening) -> str:
        from mlflow.entities import Param

        name = settings["experiment_name"]
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run_id = self._client.create_run(number, run_name=settings["run_name"] or opening.name).info.run_id
        params = [Param(key, str(_scalar(value))[:MLFLOW_PARAM_LENGTH]) for key, value in flattened(opening.config)]
        for start in range(0, len(params), MLFLOW_PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=params[start : start + MLFLOW_PARAMS_AT_ONCE])
        return run_id

    def log(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = {NOT_IN_MLFLOW_NAMES.sub("_", name): value for name, value in metrics.items()}
        new = [Metric(name, value, now, step) for name, value in named.items() if not self._has(name, step)]
        if new:
            self._client.log_batch(self._id, metrics=new)

    def _has(self, name: str, step: int) -> bool:
        """Return whether MLflow already has this metric at this step.

        A resumed run does not send the metric again, because MLflow would show two values for the step.
        """
        if self._reached is None:
            return False
        if name not in self._reached:
            past = self._client.get_metric_history(self._id, name)
            self._reached[name] = max((one.step for one in past), default=-1)
        return step <= self._reached[name]

    def close(self) -> None:
        self._client.set_terminated(self._id)


def refuse_other_database(uri: str) -> None:
    """Raise ValueError if `uri` is an SQLite database of another program. MLflow would add tables to such a database."""
    from sqlalchemy import make_url

    if not uri.startswith("sqlite"):
        return
    path = Path((make_url(uri).database or "").removeprefix("file:"))
    if not path.is_file() or path.stat().st_size == 0:
        return
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path}: not readable as an SQLite database ({error}). {OTHER_URI}") from None
    if tables and "experiments" not in tables:
        raise ValueError(f"{path}: not an MLflow database. MLflow would add its tables to it. {OTHER_URI}")


TRACKERS: dict[str, Callable[[Opening], Tracker]] = {"tensorboard": Tensorboard, "wandb": Wandb, "mlflow": Mlflow}


class TrackerRuns:
    """The file trackers.json in a run directory.

    For each tracker, the file stores the ID of the run in the tracker, and a hash of the tracker's address.
    """

    def __init__(self, run: str):
        self._path = Path(run) / "trackers.json"

    def find(self, tracker: str, where: str) -> str | None:
        kept = self._read().get(tracker)
        run_id = kept.get("id") if isinstance(kept, dict) and kept.get("where") == _digest(where) else None
        return run_id if isinstance(run_id, str) and RUN_ID.fullmatch(run_id) else None

    def keep(self, tracker: str, where: str, run_id: str) -> None:
        text = json.dumps(self._read() | {tracker: {"where": _digest(where), "id": run_id}}, indent=2)
        with replacing(self._path) as file:
            file.write(text)

    def _read(self) -> dict[str, Any]:
        """Return the content of the file.

        If the file is missing or damaged, return an empty dict, so that trackers start new runs.
        """
        try:
            kept = read_json(self._path)
        except ValueError:
            return {}
        return kept if isinstance(kept, dict) else {}


def _digest(where: str) -> str:
    """Return a hash of an address. The address is not stored, because it may contain a password."""
    return hashlib.sha256(where.encode()).hexdigest()[:16]


def flattened(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested mappings to pairs (key, value). Example: {"a": {"b": 1}} yields ("a.b", 1)."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _scalar(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else json.dumps(value)

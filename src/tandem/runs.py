"""Reads the directory of a run, also one that is still being written, damaged, or from a stranger. Never writes to it.

Files are opened without following links and only if they are plain files; sizes are limited. Whatever cannot be read is left
out and listed in `Run.problems`.
"""

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from tandem.config.schema import Config
from tandem.config.sections.datasets import DatasetFields
from tandem.config.validation import flatten
from tandem.errors import ConfigError
from tandem.run_numbers import Interval, accuracy_of, num_missing, number_in, numbers_shown
from tandem.storage.cache import is_export
from tandem.storage.ownership import lock_holder, step_in
from tandem.terminal.arguments import in_command
from tandem.terminal.commands import with_other_path
from tandem.terminal.printable import counted, escaped
from tandem.training.checkpoint.ranking import Record, measured_on, records_in
from tandem.training.run.directory import stored_config
from tandem.training.run.failure import failure_of
from tandem.training.run.other_folders import SWEEP_FILE, other_than_run, run_around, run_of_checkpoints

Status = Literal["finished", "running", "stopped", "failed"]  # failed: in a sweep, which says so in its log
T = TypeVar("T")

MIB = 1024 * 1024
MAX_METRICS_BYTES = 256 * MIB  # about 200,000 steps
MAX_JSON_BYTES = 32 * MIB
MAX_SAMPLE_BYTES = 4 * MIB  # of one file
MAX_SAMPLE_FILES = 1000
MAX_REJECT_BYTES = 64 * MIB
MAX_ENTRIES = 10_000  # of a folder
SHOWN_RESULTS = 3  # validation sets in a line of text
# Keys that only say where a run is; every run has other values.
PLACES = ("run.dir", "run.name", "config_version")

VALIDATION_SETS = ("data.validation.", "data.val_data_paths.")


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """A verdict as verdicts.json holds it."""

    name: str
    split: str
    text: str


@dataclass(frozen=True, slots=True)
class Result:
    """The validation of one set: before training if it was measured then, and the last one."""

    split: str
    before: Record | None
    last: Record
    best: Record  # lowest loss after at least one step; the last one if there is no other

    @property
    def accuracy(self) -> Interval | None:
        return accuracy_of(self.last)

    @property
    def shown(self) -> str:
        """The set with its loss and accuracy, for a line of text."""
        return f"{self.split} {numbers_shown(self.last)}".rstrip()

    @property
    def accuracy_before(self) -> float | None:
        return None if self.before is None else number_in(self.before, "accuracy")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The contents of a run's directory, as far as they can be read."""

    path: Path
    status: Status
    config: Mapping[str, Any]  # every key and its value
    changed: Mapping[str, tuple[Any, Any]]  # keys whose value is not the default: (value, default)
    steps: Sequence[Record]  # the training steps of metrics.jsonl, in order
    validations: Mapping[str, Sequence[Record]]  # by split
    exported: Mapping[str, Record]  # the validations of the exported model, by split
    verdicts: Sequence[StoredVerdict]  # empty until the run ends
    samples: Mapping[int, Sequence[Mapping[str, str | None]]]  # answers to validation prompts, by step
    checkpoints: Sequence[int]
    best: int | None
    latest: int | None
    rejects: Mapping[tuple[str, str], int]  # (split, reason) -> skipped rows
    setup: Mapping[str, Any]  # setup.json: data, settings, versions, a pack
    pairs: Mapping[str, Any]  # pairs.json: the pairs of the newest validation
    gpu: Sequence[Mapping[str, float]]  # logs/gpu.jsonl
    error: str | None = None  # of a run that failed in a sweep: the first line
    problems: Sequence[str] = field(default=())  # what could not be read, in sentences

    def __repr__(self) -> str:
        """Where the run is, how far it is, and its results. A notebook prints this, so settings are left out."""
        steps = f"step {self.step:,}" + (f" of {self.num_steps:,}" if self.num_steps else "")
        results = [one.shown for one in self.results[:SHOWN_RESULTS]]
        more = [f"{len(self.results) - SHOWN_RESULTS} more sets"] if len(self.results) > SHOWN_RESULTS else []
        problems = [counted(len(self.problems), "problem")] if self.problems else []
        return escaped(f"<Run {self.path}: {', '.join([self.status, steps, *results, *more, *problems])}>")

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def step(self) -> int:
        """The newest step."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def num_steps(self) -> int | None:
        """The last step of the run, if it is known."""
        planned = self.setup.get("num_steps")
        return planned if type(planned) is int and planned > 0 else None

    @property
    def model(self) -> Path | None:
        return self.path / "model" if self.status == "finished" else None

    @cached_property
    def results(self) -> Sequence[Result]:
        """The result on each validation set, those of the last measured pairs."""
        return tuple(_result(split, records) for split, records in self.validations.items())

    @property
    def seconds(self) -> float:
        """Time in training steps."""
        return sum(number_in(record, "step_seconds") or 0.0 for record in self.steps)


def open_run(path: str | Path) -> Run:
    """Read a run. ConfigError if the path does not exist, or is not a run's directory."""
    folder = Path(path)
    refuse_other_than_run(folder)
    reader = _Reader(folder)
    records = reader.metrics()
    changed, config = reader.config()
    validations: dict[str, list[Record]] = {}
    for record in records:
        if record["split"].startswith("validation-"):
            validations.setdefault(record["split"], []).append(record)
    status = status_of(folder)
    steps = [record for record in records if record["split"] == "train" and record["step"] > 0]
    setup, latest = reader.mapping("setup.json"), reader.link("latest")
    if status == "finished":
        reader.note_missing_steps(
            [record["step"] for record in steps], latest or (0 if steps else setup.get("num_steps"))
        )
    return Run(
        path=folder,
        status=status,
        error=failure_of(folder) if status == "failed" else None,
        config=config,
        changed=changed,
        steps=steps,
        validations=validations,
        exported={record["split"]: record for record in records if record["split"].startswith("exported-")},
        verdicts=reader.verdicts(),
        samples=reader.samples(),
        checkpoints=reader.checkpoints(),
        best=reader.link("best"),
        latest=latest,
        rejects=reader.rejects(),
        setup=setup,
        pairs=reader.mapping("pairs.json"),
        gpu=reader.gpu(),
        problems=tuple(reader.problems),
    )


def stored_pairs(folder: Path) -> Mapping[str, Any]:
    """The content of pairs.json alone; empty if there is none."""
    return _Reader(folder).mapping("pairs.json")


def list_runs(folder: str | Path, each: Callable[[list[Path]], Iterable[Path]] = iter) -> list[Run]:
    """Read every run in a folder, or the folder itself if it is a run, sorted by name. `each`: a progress bar over the paths."""
    place = Path(folder)
    if not place.is_dir():
        train = "`tandem train`" if in_command() else "tandem.train()"
        raise ConfigError(
            f"{place}: there is no such folder here. {train} starts a run in runs; {_listing()} lists the runs of another folder."
        )
    if run_of_checkpoints(place) is not None:
        refuse_other_than_run(place)
    found = [place] if _is_run(place) else [path for path in _entries(place) if _is_run(path)]
    return [open_run(path) for path in each(sorted(found, key=_natural))]


def list_sweeps(folder: str | Path) -> list[Path]:
    """The sweeps in a folder, sorted by name."""
    return sorted((path for path in _entries(Path(folder)) if (path / SWEEP_FILE).is_file()), key=_natural)


def refuse_other_than_run(folder: Path) -> None:
    """Refuse a path that is not a run's directory, with a message that says what it is."""
    if not folder.exists():
        raise ConfigError(f"{folder}: there is no such directory. {_listing()} lists the runs in a folder.")
    if what := other_than_run(folder):
        run = run_around(folder)
        hint = "" if run is None else f" {with_other_path(folder, run)}"
        raise ConfigError(f"{folder}: {what}.{hint}")


def _listing() -> str:
    """What lists the runs in a folder: a command, or a call from Python."""
    return "`tandem runs FOLDER`" if in_command() else "tandem.list_runs(FOLDER)"


def status_of(folder: Path) -> Status:
    """Whether a run has exported its model, or a process holds its lock, or its sweep says that it failed, or neither."""
    if is_export(folder / "model"):
        return "finished"
    if lock_holder(folder) is not None:
        return "running"
    return "stopped" if failure_of(folder) is None else "failed"


def _result(split: str, records: Sequence[Record]) -> Result:
    last = records[-1]
    same = [record for record in records if measured_on(record) == measured_on(last)]
    before = same[0] if same[0]["step"] == 0 and len(same) > 1 else None
    trained = [record for record in same if record["step"] > 0 and number_in(record, "loss") is not None]
    best = min(trained, key=lambda record: record["loss"], default=last)
    return Result(split=split, before=before, last=last, best=best)


def _is_run(path: Path) -> bool:
    return not path.name.startswith(".") and path.is_dir() and (path / "config.yaml").is_file()


def _natural(path: Path) -> list[tuple[int, float | str]]:
    """A sort key in which run-2 comes before run-10, and lr-5e-07 before lr-1e-06."""
    parts = re.split(r"((?:0\.)?\d{1,18}(?:e-\d{1,2})?)", path.name)
    return [(0, float(part)) if i % 2 else (1, part) for i, part in enumerate(parts) if part]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(islice(folder.iterdir(), MAX_ENTRIES))
    except OSError:
        return []


class _Reader:
    """Reads the files of one run, and notes what it could not read."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.problems: list[str] = []

    def config(self) -> tuple[dict[str, tuple[Any, Any]], dict[str, Any]]:
        """The changed keys, and all keys."""
        stored = None if self._bytes("config.yaml", MAX_JSON_BYTES) is None else stored_config(self._folder)
        if stored is None:
            self.problems.append("config.yaml is damaged, so no settings are shown.")
            return {}, {}
        config, defaults = flatten(stored), flatten(Config().model_dump())
        of_sets = DatasetFields().model_dump()  # of validation sets, of which the default configuration has none
        for key in config.keys() - defaults.keys():
            if key.startswith(VALIDATION_SETS):
                defaults[key] = of_sets.get(key.rpartition(".")[2])
        changed = {
            key: (value, defaults.get(key))
            for key, value in config.items()
            if key not in PLACES and value != defaults.get(key)
        }
        return changed, config

    def metrics(self) -> list[Record]:
        return self._records("metrics.jsonl", records_in)

    def note_missing_steps(self, steps: Sequence[int], last: Any) -> None:
        """Note that metrics.jsonl lacks steps up to `last`, unless something else that is wrong with it is noted already."""
        missing = num_missing(steps, last if type(last) is int else 0)
        if missing and not any(problem.startswith("metrics.jsonl") for problem in self.problems):
            what = "1 step is" if missing == 1 else f"{missing:,} steps are"
            self.problems.append(f"metrics.jsonl: {what} missing, though the run is finished.")

    def gpu(self) -> list[dict[str, float]]:
        return self._records("logs/gpu.jsonl", lambda content: [_numbers(line) for line in content.splitlines()])

    def verdicts(self) -> list[StoredVerdict]:
        found = self._json("verdicts.json")
        texts = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        return [
            StoredVerdict(name=one["name"], split=one["split"], text=one["text"])
            for one in texts
            if all(isinstance(one.get(part), str) for part in ("name", "split", "text"))
        ]

    def samples(self) -> dict[int, list[dict[str, str | None]]]:
        """The answers of the first and the last validation, which are the ones compared."""
        folder = self._folder / "samples"
        if folder.is_symlink():
            return {}
        steps = [step_in(path.stem) for path in _entries(folder) if path.suffix == ".jsonl"]
        ordered = sorted(step for step in steps if step is not None)[:MAX_SAMPLE_FILES]
        found = {step: self._samples(step) for step in dict.fromkeys([*ordered[:1], *ordered[-1:]])}
        return {step: answers for step, answers in found.items() if answers}

    def _samples(self, step: int) -> list[dict[str, str | None]]:
        content = self._bytes(f"samples/step_{step}.jsonl", MAX_SAMPLE_BYTES) or b""
        lines = (_parsed(line) for line in content.splitlines())
        names = ("place", "prompt", "policy", "reference")
        return [
            {name: text if isinstance(text := line.get(name), str) else None for name in names}
            for line in lines
            if isinstance(line, dict) and isinstance(line.get("policy"), str)
        ]

    def checkpoints(self) -> list[int]:
        steps = [step_in(path.name) for path in _entries(self._folder / "checkpoints") if path.is_dir()]
        return sorted(step for step in steps if step is not None)

    def link(self, name: str) -> int | None:
        try:
            return step_in(str((self._folder / "checkpoints" / name).readlink()))
        except OSError:
            return None

    def rejects(self) -> dict[tuple[str, str], int]:
        content = self._bytes("rejects.jsonl", MAX_REJECT_BYTES) or b""
        lines = (_parsed(line) for line in content.splitlines())
        return dict(
            Counter((str(line.get("split")), str(line.get("reason"))) for line in lines if isinstance(line, dict))
        )

    def mapping(self, name: str) -> dict[str, Any]:
        found = self._json(name)
        return found if isinstance(found, dict) else {}

    def _json(self, name: str) -> Any:
        content = self._bytes(name, MAX_JSON_BYTES)
        if content is None:
            return None
        if (found := _parsed(content)) is None:
            self.problems.append(f"{name} is damaged.")
        return found

    def _records(self, name: str, parse: Callable[[bytes], list[T | None]]) -> list[T]:
        """The intact records. A last line without its end is still being written, so it is no problem."""
        content = self._bytes(name, MAX_METRICS_BYTES, cut=True) or b""
        complete = content[: content.rfind(b"\n") + 1]
        records = parse(complete)
        if damaged := sum(record is None for record in records):
            lines = "1 line is" if damaged == 1 else f"{damaged:,} lines are"
            self.problems.append(f"{name}: {lines} damaged and left out.")
        return [record for record in records if record is not None]

    def _bytes(self, name: str, limit: int, *, cut: bool = False) -> bytes | None:
        """The content of a file; None if it is missing or refused. cut: of a longer file, its first `limit` bytes."""
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            what = "a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)
            self.problems.append(f"{name} is not read: {what}.")
            return None
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                self.problems.append(f"{name} is not read: not a plain file.")
                return None
            if found.st_size > limit:
                what = f"only its first {limit:,} bytes are read" if cut else "it is not read"
                self.problems.append(f"{name} has {found.st_size:,} bytes, over the limit of {limit:,}: {what}.")
                if not cut:
                    return None
            return file.read(limit)


def _parsed(content: bytes) -> Any:
    """The JSON value, or None if there is none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _numbers(line: bytes) -> dict[str, float] | None:
    found = _parsed(line)
    if not isinstance(found, dict):
        return None
    return {name: value for name in found if (value := number_in(found, name)) is not None}

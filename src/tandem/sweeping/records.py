"""The result of a sweep: one record per run, and of all together."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tandem.config.tracked import tracked_metric
from tandem.errors import ConfigError
from tandem.page.sections import final_record
from tandem.run_numbers import Interval, accuracy_of
from tandem.runs import Run, open_run
from tandem.terminal.printable import counted, escaped, listed
from tandem.training.checkpoint.ranking import Ranking

# planned: not started, or of an earlier start and not continued yet
Status = Literal["planned", "finished", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Tracked:
    """The best value of the metric that ranks the checkpoints of a run, and its step."""

    metric: str  # validation-default_loss
    value: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    path: Path
    values: tuple[str, ...]  # overrides of the swept keys: dpo.sft_loss_weight=0.1
    status: Status = "planned"
    error: str | None = None  # of a run that failed
    exit_code: int | None = None  # of the process of a run that failed
    log: Path
    accuracy: Interval | None = None  # of the exported model, or of the last validation
    tracked: Tracked | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """The runs of a sweep, in the order of the grid, and the page that compares them."""

    folder: Path
    swept: tuple[str, ...]  # keys
    runs: tuple[SweepRun, ...]
    best: SweepRun | None = None  # of the finished runs, the highest accuracy on the same pairs; None: not comparable
    best_is_clear: bool = False  # whether the intervals of all other finished runs are below that of the best
    page: Path | None = None  # None if no run has written anything yet

    def __repr__(self) -> str:
        """Where the sweep is, how its runs ended, and the best of them. A notebook prints this."""
        ends = Counter(run.status for run in self.runs)
        runs = f"{counted(len(self.runs), 'run')} ({listed(f'{num} {one}' for one, num in ends.items())})"
        lines = [f"{self.folder}: {runs} of {listed(self.swept)}"]
        if self.best is not None and (found := self.best.accuracy) is not None:
            accuracy = f"accuracy {found.share:.3f} ({found.low:.3f} to {found.high:.3f})"
            lines.append(f"best: {self.best.name}, {accuracy}{'' if self.best_is_clear else ', not clearly'}")
        return "<SweepResult " + "\n  ".join(map(escaped, lines)) + ">"

    @property
    def failed(self) -> tuple[SweepRun, ...]:
        return tuple(run for run in self.runs if run.status == "failed")

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain types, for JSON."""
        runs = [{**asdict(run), "path": str(run.path), "log": str(run.log)} for run in self.runs]
        return {
            "folder": str(self.folder),
            "swept": list(self.swept),
            "runs": runs,
            "best": None if self.best is None else self.best.name,
            "best_is_clear": self.best_is_clear,
            "page": None if self.page is None else str(self.page),
        }


def read_runs(runs: Sequence[SweepRun]) -> dict[str, Run]:
    """Read the directories of runs, by name. Runs that have written nothing are left out."""
    found = {}
    for run in runs:
        with suppress(ConfigError):
            found[run.name] = open_run(run.path)
    return found


def measured(run: SweepRun, read: Run | None) -> SweepRun:
    """Return the record with the results that are in the directory of the run."""
    final = None if read is None or not read.results else final_record(read)
    accuracy = None if final is None else accuracy_of(final[2])
    return replace(run, accuracy=accuracy, tracked=None if read is None else _tracked(read))


def _tracked(run: Run) -> Tracked | None:
    sets = [split.removeprefix("validation-") for split in run.validations]
    name = run.config.get("checkpointing.metric_name")
    try:
        tracked = tracked_metric(name if isinstance(name, str) else None, sets)
    except ConfigError:  # a set that was never measured
        return None
    if tracked is None:
        return None
    records = run.steps if tracked.split == "train" else run.validations.get(tracked.split, ())
    higher = run.config.get("checkpointing.higher_is_better") is True
    ranking = Ranking(tracked, higher_is_better=higher, records=records)
    step = ranking.best_step()
    return None if step is None else Tracked(str(tracked), ranking.best_value(), step)

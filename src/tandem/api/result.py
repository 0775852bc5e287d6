"""What `tandem.train` returns, read from the directory of the run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.config.schema import Config
from tandem.run_numbers import numbers_shown
from tandem.runs import SHOWN_RESULTS, Record, StoredVerdict, open_run
from tandem.storage.ownership import step_in
from tandem.terminal.printable import escaped
from tandem.training.checkpoint.ranking import records_in
from tandem.training.run.directory import checkpoint_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """A run after training: where its files are, what was measured, and what was found.

    `pandas.DataFrame(result.metrics)` is a table with one row per step and validation.
    """

    run_dir: Path
    model: Path | None  # the exported model, in the Hugging Face layout; None if the run was stopped before its end
    checkpoints: tuple[Path, ...]  # in the order of their steps
    metrics: list[Record] = field(repr=False)  # the lines of metrics.jsonl: step, split, loss, accuracy, ...
    verdicts: tuple[StoredVerdict, ...]  # findings, in words; empty if the run was stopped before its end
    best_step: int | None  # the checkpoint that ranks first by checkpointing.metric_name; None without checkpoints
    last_step: int
    stopped_by: str | None = None  # why the run was stopped before its end

    @property
    def report(self) -> Path | None:
        """The page with curves, pairs and settings."""
        page = self.run_dir / "report.html"
        return page if page.is_file() else None

    @property
    def final(self) -> Mapping[str, Record]:
        """The last record of each split: result.final["validation-default"]["accuracy"]."""
        return {record["split"]: record for record in self.metrics}

    def __repr__(self) -> str:
        """Where the run is and its last results, as a notebook prints them."""
        sets = [split for split in self.final if split.startswith("validation-")]
        lines = [str(self), *(f"{split}: {numbers_shown(self.final[split])}" for split in sets[:SHOWN_RESULTS])]
        return f"<TrainResult {'; '.join(map(escaped, lines))}>"

    def __str__(self) -> str:
        what = f"its model is in {self.model}" if self.model else f"stopped by {self.stopped_by}"
        return f"{self.run_dir}, step {self.last_step}: {what}"


def read_result(run: Path, config: Config, stopped_by: str | None = None) -> TrainResult:
    """Read a run's directory."""
    read, metrics = open_run(run), run / "metrics.jsonl"
    folder = checkpoint_dir(config, run)
    steps = {step: path for path in folder.glob("step_*") if path.is_dir() and (step := step_in(path.name)) is not None}
    records: list[dict[str, Any] | None] = records_in(metrics.read_bytes() if metrics.is_file() else b"")
    return TrainResult(
        run_dir=run,
        model=read.model,
        checkpoints=tuple(steps[step] for step in sorted(steps)),
        metrics=[record for record in records if record is not None],
        verdicts=tuple(read.verdicts),
        best_step=_step_of_link(folder / "best"),
        last_step=read.step,
        stopped_by=stopped_by,
    )


def _step_of_link(link: Path) -> int | None:
    return step_in(str(link.readlink())) if link.is_symlink() else None

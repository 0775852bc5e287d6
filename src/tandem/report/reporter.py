"""Writes metrics.jsonl and prints the progress of a run: as a bar on a terminal, as plain lines elsewhere, or as JSON lines."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from tandem.data.preflight import HELD_OUT, NGRAM, PERCENTILES, Lengths, Preflight, warnings_of
from tandem.errors import writing
from tandem.failpoints import fail_point
from tandem.report.start_times import StartTimes
from tandem.storage.ownership import open_own
from tandem.terminal.console import SafeConsole, printing_above
from tandem.terminal.printable import counted, escaped, scrubbed, shortened
from tandem.terminal.text import table, wrap
from tandem.training.checkpoint.ranking import records_in

if TYPE_CHECKING:  # otherwise `tandem prepare` would import everything that training needs
    from tandem.training.samples import Sample
    from tandem.training.validation import ValidationReport

# silent: not even warnings, for ranks other than 0
Verbosity = Literal["silent", "quiet", "normal", "verbose"]

PLAIN_WIDTH = 120
ANSWER_CHARACTERS = 300
SHOWN_FILES = 3
MUCH_OVERLAP = 0.3  # share of validation n-grams that are in the training set
BAR_CELLS = 20  # smallest width of a progress bar
TIME_CELLS = 8  # width of the remaining time
STEP_LINES = 50  # about how many steps of a run stay visible on a terminal


class MetricsFile:
    """The file metrics.jsonl, with one JSON object per line. Every line is flushed when it is written."""

    has_lost_lines = False  # whether lines from before the checkpoint that the run resumes from are missing

    def __init__(self, path: Path, keep_bytes: int | None = 0):
        self._path = path
        self._file = open_own(path, "a")
        # Lines written after the checkpoint that the run resumes from belong to steps that are repeated.
        if keep_bytes is not None:
            is_cut = path.stat().st_size < keep_bytes
            self._file.truncate(_end_of_last_line(path) if is_cut else keep_bytes)
            self.has_lost_lines = is_cut or None in self._lines()

    def write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record) + "\n"
        half = len(line) // 2
        with writing(self._path):
            for part in (line[:half], line[half:]):
                fail_point("metrics.write")
                self._file.write(part)
                self._file.flush()

    def records(self) -> list[dict[str, Any]]:
        """Return all records that can be read, including records from before the run was resumed."""
        return [record for record in self._lines() if record is not None]

    def size(self) -> int:
        """Flush the file to disk, and return its size in bytes."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def _lines(self) -> list[dict[str, Any] | None]:
        return records_in(self._path.read_bytes())


def _end_of_last_line(path: Path) -> int:
    """Return the size of the file in bytes without an incomplete last line."""
    return path.read_bytes().rfind(b"\n") + 1


class NoMetricsFile(MetricsFile):
    """A MetricsFile that writes nothing, for ranks other than 0. Only rank 0 writes metrics."""

    def __init__(self) -> None:
        pass

    def write(self, record: dict[str, Any]) -> None:
        pass

    def records(self) -> list[dict[str, Any]]:
        return []

    def size(self) -> int:
        return 0


class Reporter:
    """Prints messages, tables and progress. Progress bars and line wrapping are used only on a terminal."""

    def __init__(
        self,
        verbosity: Verbosity = "normal",
        console: Console | None = None,
        *,
        as_json: bool = False,
        started: float | None = None,
    ):
        """Print to `console`, or to standard output.

        `as_json`: print records and the result as JSON lines on standard output, and everything else on standard error.
        `started`: as `began` of StartTimes.
        """
        in_ci = os.environ.get("CI", "") not in ("", "0", "false")
        self.console = console or SafeConsole(stderr=as_json, force_terminal=False if in_ci else None)
        if console is None and not self.console.is_terminal:
            self.console.width = PLAIN_WIDTH
        self.verbosity = verbosity
        self.as_json = as_json
        self.start_times = StartTimes(started)
        self.shows_parts = False  # whether to show the preference loss and the SFT loss next to their sum

    def say(self, text: str = "", *, hang: int | None = None) -> None:
        """Print a message, wrapped at words on a terminal. `hang`: the indentation of continuation lines."""
        if self.verbosity in ("normal", "verbose"):
            self._print(text, hang=hang)

    def command(self, text: str) -> None:
        """Print a command for the user to copy. A command is never wrapped."""
        if self.verbosity in ("normal", "verbose"):
            self._draw(f"  {text}")

    def detail(self, text: str) -> None:
        if self.verbosity == "verbose":
            self._print(text, style="dim")

    def warn(self, text: str, *, command: str = "") -> None:
        """Print a warning. `command`: a command that the user may want to run, printed on a separate line."""
        if self.verbosity != "silent":
            self._print(f"warning: {text}", style="yellow")
            if command:
                self._draw(f"  {command}")

    def _print(self, text: str, *, style: str = "", hang: int | None = None) -> None:
        shown = shortened(scrubbed(text))
        self._draw(wrap(shown, self.console.width, hang) if self.console.is_terminal else shown, style)

    def _draw(self, text: str, style: str = "") -> None:
        # Escaped here, because rich silently drops some control characters.
        self.console.print(Text(escaped(text), style), soft_wrap=True)

    def end(self, text: str) -> None:
        """Print where the results are. Quiet runs print this too."""
        if self.verbosity == "quiet" and not self.as_json:
            self._print(text)
        else:
            self.say(f"\n{text}")

    def record(self, record: dict[str, Any]) -> None:
        """Print a record of metrics.jsonl as a JSON line. Does nothing unless as_json is set."""
        if self.as_json:
            print(json.dumps(record), flush=True)

    def result(self, run: Path) -> None:
        """Print the run directory and the last record of every split as a JSON line. Does nothing unless as_json is set."""
        if self.as_json:
            metrics = run / "metrics.jsonl"
            records = records_in(metrics.read_bytes() if metrics.is_file() else b"")
            final = {record["split"]: record for record in records if record is not None}
            print(json.dumps({"run_dir": str(run), "final": final}), flush=True)

    def choices(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print the names and values of the settings that affect the result."""
        self.say("\nSettings that affect the result")
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.say(f"  {name:<{width}}  {value}", hang=width + 4)

    def preflight(self, sets: Sequence[Preflight], rejects: Mapping[str, Path]) -> None:
        """Print a table of the sets, with notes and warnings. `rejects`: for each set, the file that lists its skipped rows."""
        holds_out = any(s.num_held_out for s in sets)
        held_out = ["held out"] if holds_out else []
        numbered = ["rows", "accepted", "bad", "filtered", *held_out, "pairs", "prompt tok", "compl. tok", "longest"]
        rows = []
        for s in sets:
            left_out = [sum(s.counts.bad.values()), sum(s.counts.filtered.values())]
            left_out += [s.num_held_out] if holds_out else []
            numbers = [s.counts.rows, s.counts.accepted, *left_out, s.num_pairs, s.prompt_tokens, s.completion_tokens]
            rows.append([s.name, *(f"{n:,}" for n in [*numbers, s.longest]), f"{s.shared_saving:.0%}"])
        self._table("Data", ["set", *numbered, "sharing can save"], rows)
        for s in sets:
            how = "read as " if s.format != HELD_OUT else ""
            self.say(f"  {s.name}: {how}{s.format}, {s.format_reason}")
            if len(s.files) > 1:
                more = ", ..." if len(s.files) > SHOWN_FILES else ""
                self.say(f"  {s.name}: {len(s.files)} files: {', '.join(s.files[:SHOWN_FILES])}{more}")
            if s.num_held_out:
                num_trained = s.counts.accepted - s.num_held_out
                self.say(
                    f"  {s.name}: {num_trained:,} of {s.counts.accepted:,} preferences {_are(num_trained)} trained on, the "
                    f"other {s.num_held_out:,} {_are(s.num_held_out)} held out; pairs and tokens are of those trained on"
                )
            skipped = s.counts.bad | s.counts.filtered
            for reason, count in skipped.items():
                self.say(f"  {s.name}: skipped {count:,}: {reason}")
            if skipped:
                self.say(f"  {s.name}: skipped rows are listed in {rejects[s.name]}")
            warnings = warnings_of(s)
            for note, count in ((note, count) for note, count in s.notes.items() if note not in warnings):
                place = f" (first at {s.noted_at[note]})" if note in s.noted_at else ""
                self.say(f"  {s.name}: noted {count:,}: {note}{place}")
            for warning in warnings.values():
                self.warn(warning)
            if s.prompt_overlap is not None:
                shared = (
                    f", {NGRAM}-gram overlap of completions {s.ngram_overlap:.1%}"
                    if s.ngram_overlap is not None
                    else ""
                )
                self.say(f"  {s.name}: prompt overlap with training {s.prompt_overlap}{shared}")
                if (s.ngram_overlap or 0) > MUCH_OVERLAP:
                    self.warn(f"much of {s.name} is in the training set too, so its loss says little about new text.")
                if s.prompt_overlap:
                    shared = f"{counted(s.prompt_overlap, 'prompt')} of {s.name} {_are(s.prompt_overlap)}"
                    self.warn(f"{shared} in the training set too.")

    def lengths(self, rows: dict[str, Lengths]) -> None:
        """Print a table of length statistics in tokens: mean, percentiles and longest."""
        columns = ["of", "mean", *(f"p{p}" for p in PERCENTILES), "longest"]
        cells = [
            [name, f"{of.mean:,.1f}", *(f"{n:,}" for n in of.percentiles.values()), f"{of.longest:,}"]
            for name, of in rows.items()
        ]
        self._table("", columns, cells)

    def step(self, record: dict[str, Any], total: int) -> None:
        """Print the metrics of a step.

        On a terminal, the bar shows every step, so only about STEP_LINES steps of a run are printed.
        """
        step = record["step"]
        line = f"step {step}/{total}"
        parts = [
            *self._losses(record),
            f"accuracy {record['accuracy']:.3f}",
            f"margin {_margin(record)}",
            f"grad {record['grad_norm']:.2f}",
            f"lr {record['lr']:.2e}",
            f"{record['pairs_per_second']:.1f} pairs/s",
        ]
        if not self.console.is_terminal:
            self.say("  ".join([line, *parts]))
        elif self.verbosity == "verbose" or step in (1, total) or step % _line_period(total) == 0:
            self.say("  ".join([line, *_fitting(parts, self.console.width - cell_len(line), gap=2)]))

    def numbers(self, record: dict[str, Any]) -> list[str]:
        """Return the metrics to show next to the progress bar, the most important first."""
        return [
            *self._losses(record),
            f"accuracy {record['accuracy']:.3f}",
            f"margin {_margin(record)}",
            f"{record['pairs_per_second']:.1f} pairs/s",
        ]

    def _losses(self, record: dict[str, Any]) -> list[str]:
        """Format the loss. If `shows_parts` is set, also format the preference loss and the SFT loss, both unweighted."""
        names = {"loss": "loss", **({"preference": "preference_loss", "sft": "sft_loss"} if self.shows_parts else {})}
        return [f"{shown} {record[name]:.4f}" for shown, name in names.items()]

    def _validation_metrics(self) -> list[str]:
        """Return the names of the metrics that validation tables show."""
        parts = ["preference_loss", "sft_loss"] if self.shows_parts else []
        return ["loss", *parts, "accuracy", "rewards_margin_mean", "rewards_chosen_mean", "rewards_rejected_mean"]

    def validations(self, title: str, reports: Sequence["ValidationReport"]) -> None:
        """Print a table of validation metrics, one row per set."""
        names = self._validation_metrics()
        rows = [[r.split, str(r.num_pairs), *(_number(r.metrics[name]) for name in names)] for r in reports]
        self._table(title, ["set", "pairs", *(_short(name) for name in names)], rows)

    def samples(self, step: int, samples: Sequence["Sample"]) -> None:
        """Print the answers to each prompt: first the reference's answer, then the policy's."""
        self.say(f"\nAnswers after step {step}" if step else "\nAnswers before training")
        for sample in samples:
            self.say(f"  {sample.place}: {_one_line(sample.prompt)}")
            if sample.reference is not None:
                self.say(f"    reference: {_answer(sample.reference)}")
            self.say(f"    policy:    {_answer(sample.policy)}")

    def change(
        self,
        title: str,
        times: tuple[str, str],
        before: Sequence["ValidationReport"],
        after: Sequence["ValidationReport"],
    ) -> None:
        """Print a table that compares the metrics of `before` and `after`, one row per set and metric.

        `times`: the column titles.
        """
        names = self._validation_metrics()
        start = {report.split: report.metrics for report in before}
        rows = [
            [report.split, _short(name), _number(start[report.split][name]), _number(report.metrics[name])]
            for report in after
            if report.split in start
            for name in names
        ]
        self._table(title, ["set", "metric", *times], rows)

    def table(self, columns: list[str], rows: list[list[str]]) -> None:
        self._table("", columns, rows)

    def _table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        if self.verbosity not in ("normal", "verbose") or not rows:
            return
        if title:
            self.say(title)
        width = self.console.width if self.console.is_terminal else None
        for line, is_heading in table(columns, rows, width):
            self._draw(scrubbed(line), "bold" if is_heading else "")

    @contextmanager
    def progress(self, what: str, total: int, done: int = 0, unit: str = "") -> Iterator[Callable[..., None]]:
        """Show a progress bar on a terminal. Yields a function that advances the bar and sets the metrics next to the bar.

        `done`: how much of `total` is already done. `unit`: text after the number, such as "%". Without a unit, the bar shows
        "3/9".
        """
        if self.verbosity not in ("normal", "verbose") or not self.console.is_terminal:
            yield lambda advance=1, numbers=(): None
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f} " + unit) if unit else MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[words]}", markup=False),
        )

        def update(advance: int = 1, numbers: Sequence[str] = ()) -> None:
            # Metrics that would make the bar too short are left out, the last ones first.
            taken = sum((cell_len(what), 1, BAR_CELLS, 1, cell_len(f"{total}/{total}"), 1, TIME_CELLS))
            words = " ".join(_fitting(numbers, self.console.width - taken, gap=1))
            bar.update(task, advance=advance, words=words)

        with (
            printing_above(self.console),
            Progress(
                *columns, console=self.console, transient=True, redirect_stdout=False, redirect_stderr=False
            ) as bar,
        ):
            task = bar.add_task(what, total=total, completed=done, words="")
            yield update


def _fitting(parts: Sequence[str], width: int, gap: int) -> list[str]:
    """Return as many of the first parts as fit into the width. A gap of `gap` cells precedes each part."""
    ends = accumulate(gap + cell_len(part) for part in parts)
    return [part for part, end in zip(parts, ends, strict=True) if end <= width]


def _line_period(total: int) -> int:
    """Return the number of steps between two printed lines.

    This is the smallest of 1, 2, 5, 10, 20, ... with which a run prints at most STEP_LINES lines.
    """
    period = 1
    while total > STEP_LINES * period:
        period = period * 5 // 2 if str(period).startswith("2") else period * 2
    return period


def _margin(record: dict[str, Any]) -> str:
    return f"{round(record['rewards_margin_mean'], 3) + 0.0:.3f}"


def _one_line(text: str) -> str:
    """Return the text without line breaks, cut to ANSWER_CHARACTERS characters."""
    line = " ".join(text.split())
    return line if len(line) <= ANSWER_CHARACTERS else line[: ANSWER_CHARACTERS - 1] + "…"


def _answer(text: str) -> str:
    """Return an answer as one line. If the answer is only white space, describe the white space instead."""
    return _one_line(text) if text.strip() else f"{text[:20]!r} ({len(text)} characters of white space)"


def _short(metric: str) -> str:
    return metric.removesuffix("_mean").replace("_", " ")


def _number(value: float) -> str:
    return f"{round(value, 4) + 0.0:.4f}"  # + 0.0 turns -0.0 into 0.0


def _are(num: int) -> str:
    return "is" if num == 1 else "are"

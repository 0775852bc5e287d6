"""Describes runs for a list: as rows of a table, and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from tandem.page.comparison import differing_keys, validated_record
from tandem.page.curves import SEVERITY
from tandem.page.html import number, percent
from tandem.page.sections import shown
from tandem.run_numbers import accuracy_of, number_in
from tandem.runs import Record, Run

COLUMNS = ["run", "status", "steps", "!", "at", "accuracy", "95 % interval", "loss", "margin"]
LEGEND = (
    "!: how many verdicts are warnings; at: the step of the results (of the exported model, if there is one); "
    "-: not measured"
)
MAX_STRUCTURE_CHARACTERS = 60  # of a list or a mapping among the settings
METRICS = ("loss", "accuracy", "rewards_margin_mean", "rewards_chosen_mean", "rewards_rejected_mean", "kl_per_token")


def list_row(run: Run) -> list[str]:
    """The cells of COLUMNS. The result is that of the exported model or of the last validation."""
    record: Record = validated_record(run) or {}
    interval = accuracy_of(record)
    return [
        run.name,
        run.status,
        f"{run.step:,}" if run.num_steps in (None, run.step) else f"{run.step:,}/{run.num_steps:,}",
        _num_warnings(run),
        f"{record['step']:,}" if record else "-",
        "-" if interval is None else percent(interval.share),
        "-" if interval is None else f"{percent(interval.low)} to {percent(interval.high)}",
        *(
            number(number_in(record, name)).replace("−", "-").replace("–", "-")
            for name in ("loss", "rewards_margin_mean")
        ),
    ]


def changed_keys(runs: Sequence[Run]) -> list[list[str]]:
    """Of a single run, its changed keys as key=value; of several, the keys in which they differ."""
    keys = differing_keys(runs) if len(runs) > 1 else runs[0].changed
    # A run without a set, for instance, has none of its keys.
    return [[f"{key}={_shortened(run.config[key])}" for key in keys if key in run.config] for run in runs]


def shortened_settings(settings: Sequence[str], width: int) -> str:
    """Join as many settings as fit into `width` cells: "a=1, b=2 (+3 more)". If not even one fits, the first is cut."""
    for num in range(len(settings) - 1, 0, -1):
        line = f"{', '.join(settings[:num])} (+{len(settings) - num} more)"
        if cell_len(line) <= width:
            return line
    rest = f" (+{len(settings) - 1} more)" if len(settings) > 1 else ""
    return f"{set_cell_size(settings[0], max(1, width - cell_len(rest) - 1)).rstrip()}…{rest}"


def _num_warnings(run: Run) -> str:
    """The number of verdicts that name a problem; of a run without verdicts, which has not ended, a dash."""
    num = sum(SEVERITY.get(verdict.name, "warn") not in ("good", "info") for verdict in run.verdicts)
    return str(num) if run.verdicts else "-"


def _shortened(value: Any) -> str:
    text = shown(value)
    is_long = isinstance(value, dict | list) and len(text) > MAX_STRUCTURE_CHARACTERS
    return f"{text[: MAX_STRUCTURE_CHARACTERS - 1]}…" if is_long else text


def as_json(run: Run) -> dict[str, Any]:
    """A run as JSON, for programs."""
    return {
        "path": str(run.path),
        "name": run.name,
        "status": run.status,
        "step": run.step,
        "num_steps": run.num_steps,
        "seconds": run.seconds,
        "changed": {key: value for key, (value, _) in run.changed.items()},
        "validation": {result.split: _measured(result.before, result.last, result.best) for result in run.results},
        "exported": {split: _numbers(record) for split, record in run.exported.items()},
        "verdicts": [{"name": one.name, "split": one.split, "text": one.text} for one in run.verdicts],
        "checkpoints": list(run.checkpoints),
        "best": run.best,
        "latest": run.latest,
        "model": None if run.model is None else str(run.model),
        "problems": list(run.problems),
    }


def _measured(before: dict[str, Any] | None, last: dict[str, Any], best: dict[str, Any]) -> dict[str, Any]:
    interval = accuracy_of(last)
    return {
        "before": None if before is None else _numbers(before),
        "last": _numbers(last),
        "accuracy_interval": None if interval is None else [interval.low, interval.high],
        "best_step": best["step"],
    }


def _numbers(record: dict[str, Any]) -> dict[str, float | None]:
    return {"step": record["step"], **{name: number_in(record, name) for name in METRICS}}

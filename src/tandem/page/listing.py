"""Describes runs for a list: as rows of a table, and as JSON."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from tandem.config.sections.datasets import DatasetFields
from tandem.page.comparison import TRAINING_PATH, differing_keys, validated_record
from tandem.page.curves import SEVERITY
from tandem.page.html import number, percent
from tandem.page.sections import shown
from tandem.run_numbers import accuracy_of, number_in
from tandem.runs import Record, Run
from tandem.training.run.directory import CODE
from tandem.training.run.failure import log_of

COLUMNS = ["run", "status", "steps", "!", "at", "accuracy", "95 % interval", "loss", "margin"]
LEGEND = (
    "!: how many verdicts are warnings; at: the step of the results (of the exported model, if there is one); "
    "-: not measured"
)
MAX_STRUCTURE_CHARACTERS = 60  # of a list or a mapping among the settings
DIGEST_CHARACTERS = 12  # of a SHA-256
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
    """Of a single run, its training data and its changed keys as key=value; of several, the keys in which they differ.

    Of several, the settings that the fewest runs share come first, because they tell a run from the others.
    """
    if len(runs) == 1:
        (run,) = runs
        keys = [*run.changed] if TRAINING_PATH in run.changed else [TRAINING_PATH, *run.changed]
        return [[_setting(key, run) for key in keys if not key.startswith(CODE) and _is_listed(key, run)]]
    nums = {key: Counter(map(_comparable, values)) for key, values in differing_keys(runs).items()}
    rows = [[key for key in nums if _is_listed(key, run)] for run in runs]
    return [
        [_setting(key, run) for key in sorted(keys, key=lambda key: nums[key][_comparable(run.config[key])])]
        for keys, run in zip(rows, runs, strict=True)
    ]


def _comparable(value: Any) -> str:
    """A value as a text, because a list cannot be counted."""
    return json.dumps(value, sort_keys=True, default=str)


def _is_listed(key: str, run: Run) -> bool:
    """Whether a setting of a run is listed. A run without a set has none of its keys, and no held-out share is the default."""
    return key in run.config and not (key == "data.validation_share" and not run.config[key])


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


def _setting(key: str, run: Run) -> str:
    value = run.config[key]
    if key.startswith(CODE):
        return f"code of {key.removeprefix(CODE)}=SHA-256 {str(value)[:DIGEST_CHARACTERS]}"
    if key == "data.train" and isinstance(value, list):
        value = [_dataset(one) for one in value]
    return f"{key}={_shortened(value)}"


def _dataset(value: Any) -> Any:
    """The fields of a dataset that differ from their defaults; of one that has no others, its path."""
    if not isinstance(value, dict):
        return value
    defaults = DatasetFields().model_dump()
    given = {name: field for name, field in value.items() if field != defaults.get(name)}
    return given["data_path"] if given.keys() == {"data_path"} else given


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
        "error": run.error,
        "log": None if run.error is None else str(log_of(run.path)),
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

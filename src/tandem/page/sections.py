"""The sections of a run's page on its result: headline, verdicts, curves, data, settings and files."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.config.schema import Config
from tandem.page.curves import CHART_OF_VERDICT, SEVERITY, Chart
from tandem.page.document import callout, empty, figure, section
from tandem.page.html import Markup, duration, joined, number, percent, table, tag
from tandem.report.verdicts import judge
from tandem.run_numbers import accuracy_of, number_in
from tandem.runs import Record, Run, StoredVerdict
from tandem.terminal.printable import counted
from tandem.training.run.directory import stored_config

MAX_TITLE_CHARACTERS = 70
MAX_VALUE_CHARACTERS = 200


def verdicts_of(run: Run) -> list[StoredVerdict]:
    """The verdicts of the run; of one that has not ended, those on its steps so far."""
    if run.verdicts or not run.steps:
        return list(run.verdicts)
    try:
        config = Config.model_validate(stored_config(run.path) or {})
        records = [*run.steps, *(record for records in run.validations.values() for record in records)]
        found = judge(records, config, has_ended=False)
        return [StoredVerdict(name=one.name, split=one.split, text=one.text) for one in found]
    except (ValueError, KeyError, TypeError, ArithmeticError):  # a configuration or records that are damaged
        return []


def final_record(run: Run) -> tuple[str, Record | None, Record] | None:
    """The split, the record before training, and the record of the result: of the exported model if it was measured."""
    if run.results:
        result = run.results[0]
        exported = run.exported.get(result.split.replace("validation-", "exported-", 1))
        return result.split, result.before, exported or result.last
    return ("training pairs", run.steps[0] if len(run.steps) > 1 else None, run.steps[-1]) if run.steps else None


def headline(run: Run) -> Markup:
    """The result in one line: accuracy before and after with its interval."""
    found = final_record(run)
    after = None if found is None else accuracy_of(found[2])
    if found is None or after is None:
        return tag("span", "no result yet")
    before = None if found[1] is None else number_in(found[1], "accuracy")
    return joined(
        [
            f"{_accuracy_name(run)} ",
            None if before is None else joined([tag("span", percent(before), class_="before"), " → "]),
            tag("strong", percent(after.share)),
            tag("span", f" ({percent(after.low)} to {percent(after.high)})", class_="interval"),
        ]
    )


def _accuracy_name(run: Run) -> str:
    """Without a validation, the result is that of a batch that was trained on, which says little."""
    return "accuracy" if run.results else "accuracy in training"


def summary(run: Run, charts: Sequence[Chart], verdicts: Sequence[StoredVerdict]) -> Markup:
    """The result at a glance, and every verdict with a link to its chart."""
    return section(
        "summary",
        "Summary",
        _progress(run),
        _tiles(run),
        *(verdict_callout(one, charts, linked=True) for one in verdicts),
        *(callout("warn", "Not everything could be read.", problem) for problem in run.problems),
        None if verdicts or not run.steps else empty("There is no verdict yet: it needs a validation after a step."),
    )


def _progress(run: Run) -> Markup | None:
    """Where a run that has not finished is."""
    if run.status == "finished":
        return None
    of = f" of {run.num_steps:,}" if run.num_steps else ""
    where = f"step {run.step:,}{of}"
    if run.status == "running":
        return callout("info", "This run is training:", f"{where} when this page was written.")
    resume = tag("code", f"tandem train --resume {shlex.quote(str(run.path))}")
    if run.error is not None:
        return callout("bad", "This run failed", joined([f"at {where}: {run.error} To resume it: ", resume]))
    return callout("warn", "This run stopped before its end,", joined([f"at {where}. To resume it: ", resume]))


def verdict_callout(verdict: StoredVerdict, charts: Sequence[Chart], *, linked: bool = False) -> Markup:
    chart = CHART_OF_VERDICT.get(verdict.name)
    is_drawn = any(one["id"] == chart for one in charts)
    link = (f"#chart-{chart}", "See the chart") if linked and chart and is_drawn else None
    title, rest = _parts(verdict)
    body = joined([rest, " ", tag("span", f"({verdict.split})", class_="split")])
    return callout(SEVERITY.get(verdict.name, "warn"), title, body, link)


def _parts(verdict: StoredVerdict) -> tuple[str, str]:
    """A title and the rest: "accuracy is flat: 0.5 on ..." -> "Accuracy is flat.", "0.5 on ..."."""
    words = verdict.text.replace(" -> ", " → ")
    start, colon, rest = words.partition(": ")
    if not colon or len(start) > MAX_TITLE_CHARACTERS:
        return f"{_sentence(verdict.name.replace('_', ' '))}.", _sentence(words)
    return f"{_sentence(start)}.", _sentence(rest)


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]


def _tiles(run: Run) -> Markup:
    tiles = [_tile("Steps", _steps(run), f"{duration(run.seconds)} of training" if run.steps else "none yet")]
    found = final_record(run)
    if found is not None:
        split, before, last = found
        after = accuracy_of(last)
        if after is not None:
            note = f"{percent(after.low)} to {percent(after.high)}, {counted(last['num_pairs'], 'pair')}"
            tiles.insert(
                0, _tile(_sentence(_accuracy_name(run)), _change(before, last, "accuracy", percent), note, main=True)
            )
        tiles += [
            _tile("Loss", _change(before, last, "loss", _brief), split),
            _tile("Margin", _change(before, last, "rewards_margin_mean", _brief), "chosen minus rejected reward"),
        ]
        if (far := number_in(last, "kl_per_token")) is not None:
            tiles.append(_tile("Distance", number(far, 3), "nats per token from the reference"))
    if run.steps and (speed := number_in(run.steps[-1], "tokens_per_second")) is not None:
        tiles.append(_tile("Speed", number(speed, 3), "tokens per second, last step"))
    return tag("dl", *tiles, class_="tiles")


def _brief(value: float) -> str:
    return number(value, 3)


def _steps(run: Run) -> str:
    done = run.num_steps in (None, run.step)
    return f"{run.step:,}" if done else f"{run.step:,} / {run.num_steps:,}"


def _tile(name: str, value: object, note: object, *, main: bool = False) -> Markup:
    inside = tag("dt", name), tag("dd", value, class_="value"), tag("dd", note, class_="note")
    return tag("div", *inside, class_="tile main" if main else "tile")


def _change(before: Record | None, last: Record, name: str, shown: Any) -> Markup:
    after = number_in(last, name)
    start = None if before is None else number_in(before, name)
    now = tag("span", "–" if after is None else shown(after))
    return now if start is None else joined([tag("span", shown(start), " → ", class_="before"), now])


def figures_of(charts: Sequence[Chart], verdicts: Sequence[StoredVerdict]) -> list[Markup]:
    """The places of charts, each with the verdicts that speak of it."""
    return [
        figure(
            chart, *(verdict_callout(one, charts) for one in verdicts if CHART_OF_VERDICT.get(one.name) == chart["id"])
        )
        for chart in charts
    ]


def curves(run: Run, charts: Sequence[Chart], verdicts: Sequence[StoredVerdict]) -> Markup:
    """Every chart over steps."""
    figures = figures_of([one for one in charts if one["id"] != "fill"], verdicts)
    intro = "Faint lines are single steps, strong ones their moving average. Dots are validations."
    return section(
        "curves",
        "Curves",
        tag("div", *figures, class_="grid") if figures else empty("No step has been recorded yet."),
        _validation_table(run),
        intro=intro if figures else "",
    )


def _validation_table(run: Run) -> Markup | None:
    columns = ("loss", "accuracy", "rewards_margin_mean", "rewards_chosen_mean", "rewards_rejected_mean")
    rows = []
    for split, records in {**run.validations, **{s: [r] for s, r in run.exported.items()}}.items():
        for record in records:
            interval = accuracy_of(record)
            shown = "–" if interval is None else f"{percent(interval.low)} to {percent(interval.high)}"
            numbers = [number_in(record, name) for name in columns]
            cells = [number(value) if i != 1 or value is None else percent(value) for i, value in enumerate(numbers)]
            rows.append([split, f"{record['step']:,}", cells[0], cells[1], shown, *cells[2:]])
    if not rows:
        return None
    heads = ["set", "step", "loss", "accuracy", "95 % interval", "margin", "reward chosen", "reward rejected"]
    return tag(
        "details",
        tag("summary", f"Validations as a table ({len(rows):,})"),
        table(heads, rows[:200], numeric=range(1, 8)),
        None if len(rows) <= 200 else empty(f"The first 200 of {len(rows):,}; metrics.jsonl has all."),
    )


def settings(run: Run) -> Markup:
    setup = run.setup
    versions, choices = _texts(setup.get("versions")), setup.get("choices")
    pairs = [(str(one[0]), str(one[1])) for one in choices if _is_pair(one)] if isinstance(choices, list) else []
    changed = [[tag("code", key), shown(value), shown(default)] for key, (value, default) in run.changed.items()]
    every = [[tag("code", key), shown(value)] for key, value in run.config.items() if key not in run.changed]
    return section(
        "settings",
        "Settings and versions",
        tag("h3", "Settings that differ from the defaults"),
        table(["key", "value", "default"], changed) if changed else empty("None: every key has its default."),
        None if not pairs else joined([tag("h3", "What determines the result"), _definitions(pairs)]),
        tag("details", tag("summary", f"All other keys ({len(every)})"), table(["key", "value"], every)),
        tag("h3", "Versions"),
        _definitions(list(versions.items())) if versions else empty("Not recorded."),
        tag("h3", "Files"),
        _definitions(_files(run)),
    )


def _files(run: Run) -> list[tuple[str, str]]:
    kept = ", ".join(f"step {step:,}{_mark(step, run)}" for step in run.checkpoints) or "none"
    model = "exported" if run.model is not None else "not exported yet"
    skipped = sum(run.rejects.values())
    return [("directory", str(run.path)), ("checkpoints", kept), ("model", model), ("skipped rows", f"{skipped:,}")]


def _mark(step: int, run: Run) -> str:
    marks = [name for name, marked in (("best", run.best), ("latest", run.latest)) if marked == step]
    return f" ({', '.join(marks)})" if marks else ""


def _definitions(pairs: Sequence[tuple[str, str]]) -> Markup:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="facts")


def _texts(found: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, Mapping) else {}


def _is_pair(one: Any) -> bool:
    return isinstance(one, list) and len(one) == 2


def shown(value: Any) -> str:
    """A value as in a configuration file, cut if it is very long."""
    words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return words if len(words) <= MAX_VALUE_CHARACTERS else f"{words[:MAX_VALUE_CHARACTERS]}…"

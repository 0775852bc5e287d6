"""Turns the records of a run into charts: what each shows, its series, and the marks on it. The page's script draws them.

A chart is a mapping that is embedded in the page as JSON. Series of training steps are averaged into at most MAX_POINTS points,
and smoothed, with the unsmoothed values kept behind the line.
"""

import math
from collections.abc import Sequence
from typing import Any

from tandem.run_numbers import accuracy_of, number_in, wilson
from tandem.runs import Record, Run
from tandem.training.checkpoint.ranking import measured_on

Chart = dict[str, Any]
Series = dict[str, Any]
Points = list[tuple[float, float]]  # (step, value)

MAX_POINTS = 500
SMOOTHED_FROM = 20  # steps; a shorter curve is drawn as it is
WINDOWS = 25  # a smoothed point averages the steps of this fraction of the run
NUM_COLOURS = 8
# Where each verdict is shown: the chart that it speaks of.
CHART_OF_VERDICT = {
    "hardly_trained": "loss",
    "warm_up_only": "accuracy",
    "accuracy_flat": "accuracy",
    "accuracy_reversed": "accuracy",
    "chosen_falling": "rewards",
    "length_learnt": "length",
    "kl_running_away": "kl",
    "only_hurt": "loss",
    "best_long_ago": "loss",
    "diverged": "loss",
    "stopped_early": "loss",
}
SEVERITY = {
    "sound": "good",
    "stopped_early": "info",
    "exported_best": "info",
    "diverged": "bad",
    "only_hurt": "bad",
    "accuracy_reversed": "bad",
}


def run_charts(run: Run) -> list[Chart]:
    """The charts of one run that have anything to show."""
    charts = [
        _metric_chart(run, "loss", "Loss", "loss", help="The value that training minimises."),
        _accuracy_chart(run),
        _two_chart(
            run,
            *("rewards", "Rewards", "rewards_chosen_mean", "rewards_rejected_mean"),
            help="Mean implicit reward: beta times the log-probability relative to the reference.",
        ),
        _margin_chart(run),
        _metric_chart(
            run, "kl", "Distance from the reference", "kl_per_token", unit="nats per token", help="KL estimate."
        ),
        _two_chart(
            run,
            *("logps", "Log-probabilities", "logps_chosen_mean", "logps_rejected_mean"),
            unit="nats per completion",
            help="Mean log-probability of a completion under the policy.",
        ),
        *_parts_charts(run),
        _plain_chart(run, "grad", "Gradient norm", "grad_norm", help="Before clipping."),
        _plain_chart(run, "lr", "Learning rate", "lr", smooth=False),
        _plain_chart(run, "speed", "Speed", "tokens_per_second", unit="tokens per second"),
        _memory_chart(run),
        _plain_chart(
            run, "fill", "Pack fill", "pack_fill", format="percent", help="Share of the computed positions with tokens."
        ),
    ]
    return [chart for chart in charts if chart["series"]]


def _chart(id: str, title: str, series: Sequence[Series | None], **more: Any) -> Chart:
    shown = [one for one in series if one is not None and one["x"]]
    return {"kind": "line", "id": id, "title": title, "x": "step", "series": shown, "unit": "", "help": "", **more}


def _metric_chart(run: Run, id: str, title: str, name: str, **more: Any) -> Chart:
    series = [_train(run.steps, name, "training", 0)]
    for number, (split, records) in enumerate(run.validations.items(), start=1):
        series.append(_validation(records, name, _set_name(split), number))
    marks = _best_mark(run) if name == "loss" else []
    return _chart(id, title, series, marks=marks, **more)


def _best_mark(run: Run) -> list[dict[str, Any]]:
    """The step of the lowest validation loss, if it is not the last."""
    for result in run.results[:1]:
        if 0 < result.best["step"] < result.last["step"]:
            return [{"x": result.best["step"], "label": "best"}]
    return []


def _accuracy_chart(run: Run) -> Chart:
    series = [_pooled_accuracy(run.steps)]
    for number, (split, records) in enumerate(run.validations.items(), start=1):
        series.append(validation_accuracy(records, _set_name(split), number))
    help = "Share of pairs whose chosen completion has the higher reward, with 95 % intervals."
    return _chart("accuracy", "Accuracy", series, format="percent", range=[0, 1], help=help, guides=[0.5])


def validation_accuracy(records: Sequence[Record], name: str, colour: int) -> Series:
    """The accuracy of every validation with its interval."""
    found = [(record["step"], interval) for record in same_pairs(records) if (interval := accuracy_of(record))]
    found = _thinned(found)
    return {
        "name": name,
        "colour": colour % NUM_COLOURS,
        "dots": True,
        "x": [step for step, _ in found],
        "y": [short(interval.share) for _, interval in found],
        "low": [short(interval.low) for _, interval in found],
        "high": [short(interval.high) for _, interval in found],
    }


def _pooled_accuracy(steps: Sequence[Record]) -> Series | None:
    """The accuracy of the training pairs, those of neighbouring steps together, with its interval."""
    known = [
        (record["step"], share, num)
        for record in steps
        if (share := number_in(record, "accuracy")) is not None and (num := number_in(record, "num_pairs"))
    ]
    if not known:
        return None
    half = _half_window(len(known))
    right, pairs = _sums([share * num for _, share, num in known]), _sums([num for _, _, num in known])
    points = []
    for i in _sampled(len(known)):
        low, high = max(0, i - half), min(len(known), i + half + 1)
        num = pairs[high] - pairs[low]
        points.append((known[i][0], wilson((right[high] - right[low]) / num, num)))
    return {
        "name": "training",
        "colour": 0,
        "x": [step for step, _ in points],
        "y": [short(interval.share) for _, interval in points],
        "low": [short(interval.low) for _, interval in points],
        "high": [short(interval.high) for _, interval in points],
    }


def _two_chart(run: Run, id: str, title: str, chosen: str, rejected: str, **more: Any) -> Chart:
    series = [
        _train(run.steps, chosen, "chosen", "chosen"),
        _train(run.steps, rejected, "rejected", "rejected"),
    ]
    for split, records in list(run.validations.items())[:1]:
        for name, role in ((chosen, "chosen"), (rejected, "rejected")):
            one = _validation(records, name, f"{role}, {_set_name(split)}", role)
            series.append(one if one is None else {**one, "dashed": True})
    return _chart(id, title, series, **more)


def _margin_chart(run: Run) -> Chart:
    train = _train(run.steps, "rewards_margin_mean", "training", 0)
    series = [train]
    for number, (split, records) in enumerate(run.validations.items(), start=1):
        one = _validation(records, "rewards_margin_mean", _set_name(split), number)
        if one is not None:
            spread = {record["step"]: record for record in same_pairs(records)}
            bounds = [[number_in(spread[x], f"rewards_margin_{p}") for x in one["x"]] for p in ("p10", "p90")]
            if all(value is not None for bound in bounds for value in bound):
                one["low"], one["high"] = ([short(value or 0.0) for value in bound] for bound in bounds)
        series.append(one)
    help = "Reward of the chosen minus the rejected completion: mean, and for validation the middle 80 % of the pairs."
    return _chart("margin", "Margin", series, help=help, guides=[0])


def _parts_charts(run: Run) -> list[Chart]:
    """The parts of the loss, if it has two."""
    weight = run.config.get("dpo.sft_loss_weight")
    if not isinstance(weight, int | float) or weight <= 0:
        return []
    return [
        _metric_chart(run, "preference", "Preference loss", "preference_loss", help="Unweighted."),
        _metric_chart(run, "sft", "SFT loss", "sft_loss", help="Unweighted."),
    ]


def _plain_chart(run: Run, id: str, title: str, name: str, *, smooth: bool = True, **more: Any) -> Chart:
    return _chart(id, title, [_train(run.steps, name, "training", 0, smooth=smooth)], **more)


def _memory_chart(run: Run) -> Chart:
    series = [_train(run.steps, "memory_gib", "peak so far", 0, smooth=False)]
    return _chart("memory", "Memory", series, unit="GiB", zero=True)


def _train(steps: Sequence[Record], name: str, label: str, colour: int | str, *, smooth: bool = True) -> Series | None:
    points = [(record["step"], value) for record in steps if (value := number_in(record, name)) is not None]
    if not points:
        return None
    half = _half_window(len(points)) if smooth else 0
    sums = _sums([value for _, value in points])
    kept = _sampled(len(points))
    means = [_mean(sums, i - half, i + half + 1) for i in kept]
    series = {
        "name": label,
        "colour": colour,
        "x": [points[i][0] for i in kept],
        "y": [short(value) for value in means],
    }
    if half:
        size = max(1, math.ceil(len(points) / MAX_POINTS))
        series["raw"] = [short(_mean(sums, i + 1 - size, i + 1)) for i in kept]
    return series


def _validation(records: Sequence[Record], name: str, label: str, colour: int | str) -> Series | None:
    same = same_pairs(records)
    points = _thinned([(one["step"], value) for one in same if (value := number_in(one, name)) is not None])
    if not points:
        return None
    colour = colour if isinstance(colour, str) else colour % NUM_COLOURS
    x, y = [step for step, _ in points], [short(value) for _, value in points]
    return {"name": label, "colour": colour, "dots": True, "x": x, "y": y}


def metric_series(run: Run, name: str, colour: int) -> Series | None:
    """One run in a comparison: its first validation set, or its training steps if there is none."""
    for records in list(run.validations.values())[:1]:
        if name == "accuracy":
            return validation_accuracy(records, run.name, colour)
        return _validation(records, name, run.name, colour)
    return _train(run.steps, name, run.name, colour % NUM_COLOURS)


def comparison_charts(runs: Sequence[Run]) -> list[Chart]:
    """The charts of several runs, one line for each."""
    shown = [
        ("accuracy", "Accuracy", {"format": "percent", "range": [0, 1], "guides": [0.5]}),
        ("loss", "Loss", {}),
        ("rewards_margin_mean", "Margin", {"guides": [0]}),
        ("rewards_chosen_mean", "Reward of the chosen completions", {"guides": [0]}),
        ("kl_per_token", "Distance from the reference", {"unit": "nats per token"}),
    ]
    help = "The first validation set of each run, or its training steps if it has none."
    charts = [
        _chart(name, title, [metric_series(run, name, i) for i, run in enumerate(runs)], help=help, **more)
        for name, title, more in shown
    ]
    trained = [
        ("train_loss", "Training loss", "loss", {}),
        ("lr", "Learning rate", "lr", {"help": ""}),
        ("speed", "Speed", "tokens_per_second", {"unit": "tokens per second", "help": ""}),
    ]
    for id, title, name, more in trained:
        series = [_train(run.steps, name, run.name, i % NUM_COLOURS) for i, run in enumerate(runs)]
        for one in filter(None, series):
            one.pop("raw", None)
        charts.append(_chart(id, title, series, **more))
    for chart in charts:
        for number, one in enumerate(chart["series"]):
            one["dashed"] = number >= NUM_COLOURS
    return [chart for chart in charts if chart["series"]]


def same_pairs(records: Sequence[Record]) -> list[Record]:
    """The records on the same pairs as the last one; a set may have changed when the run was resumed."""
    return [record for record in records if measured_on(record) == measured_on(records[-1])]


def short(value: float) -> float:
    """Five digits are enough for a chart."""
    return float(f"{value:.5g}")


def _set_name(split: str) -> str:
    name = split.removeprefix("validation-")
    return "validation" if name == "default" else f"validation, {name}"


def _half_window(num: int) -> int:
    return 0 if num < SMOOTHED_FROM else max(1, num // (2 * WINDOWS))


def _sums(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def _mean(sums: list[float], low: int, high: int) -> float:
    low, high = max(0, low), min(len(sums) - 1, high)
    return (sums[high] - sums[low]) / (high - low)


def _sampled(num: int) -> list[int]:
    """At most about MAX_POINTS indices, evenly spaced, the last one included: 7 of 3 points -> 2, 5, 6."""
    size = max(1, math.ceil(num / MAX_POINTS))
    kept = list(range(size - 1, num, size))
    return kept if kept and kept[-1] == num - 1 else [*kept, num - 1]


def _thinned(points: list[Any]) -> list[Any]:
    return [points[i] for i in _sampled(len(points))] if points else []

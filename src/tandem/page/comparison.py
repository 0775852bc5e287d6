"""The page that compares several runs: their results, the settings in which they differ, and their curves together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.page.curves import NUM_COLOURS, comparison_charts
from tandem.page.document import callout, document, empty, figure, footer, header, section
from tandem.page.html import Markup, duration, joined, number, percent, table, tag
from tandem.page.sections import final_record, shown
from tandem.run_numbers import Interval, accuracy_of, number_in
from tandem.runs import Record, Run
from tandem.training.checkpoint.ranking import measured_on
from tandem.training.run.directory import CODE

TRAINING_PATH = "data.train.data_path"


@dataclass(frozen=True, slots=True)
class Best:
    """The run with the highest accuracy, and how clear that is."""

    run: Run
    accuracy: Interval
    is_clear: bool  # whether the intervals of all other finished runs are below it
    num_equal: int  # other finished runs with the same accuracy


def best_of(runs: Sequence[Run]) -> Best | None:
    """The best finished run by accuracy on its first validation set; None unless all finished runs used the same pairs.

    Accuracy, because losses of different betas or loss functions have different scales. Of equal ones, the run
    with the larger margin wins, before rewards are scaled by beta. What an unfinished run measured last is not its result.
    """
    finished = [run for run in runs if run.status == "finished"]
    measured = [(run, record) for run in finished if (record := validated_record(run)) is not None]
    if len(measured) < 2 or len({measured_on(record) for _, record in measured}) > 1:
        return None
    known = [(run, record, interval) for run, record in measured if (interval := accuracy_of(record)) is not None]
    if len(known) < 2:
        return None
    ordered = sorted(known, key=lambda one: (one[2].share, _unscaled_margin(one[0], one[1])), reverse=True)
    (run, _, accuracy), *others = ordered
    return Best(
        run,
        accuracy,
        is_clear=all(other.high < accuracy.low for _, _, other in others),
        num_equal=sum(other.share == accuracy.share for _, _, other in others),
    )


def _unscaled_margin(run: Run, record: Record) -> float:
    """The mean margin in nats, which does not grow with beta as rewards do."""
    beta = number_in(run.config, "dpo.reference_policy_kl_penalty") or 1.0
    return (number_in(record, "rewards_margin_mean") or 0.0) / beta


NO_BEST = "it takes two or more finished runs, all validated on the same pairs."


def how_clear(*, is_clear: bool, num_equal: int) -> str:
    """Say in a sentence how sure it is that the best run is better than the others."""
    if is_clear:
        return "The intervals of all other finished runs are below it."
    if num_equal:
        return (
            f"{num_equal} other {'run has' if num_equal == 1 else 'runs have'} the same accuracy; the run with the largest "
            "margin before scaling by beta is marked."
        )
    return "Its interval overlaps with that of another run: the difference may be chance."


def validated_record(run: Run) -> Record | None:
    """The record of the result on a validation set; None if there is none: a batch of training pairs is no such result."""
    found = final_record(run)
    return found[2] if found is not None and run.results else None


def differing_keys(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The keys in which the runs differ, with the value of each run: changed by the user in at least one of them.

    A run on the bundled pairs, whose path is the default, has the path too. The code of a function is compared among the runs
    that use the function; that others do not is in the key that names it.
    """
    keys = dict.fromkeys([*(key for run in runs for key in run.changed), TRAINING_PATH])
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    return {key: found for key, found in values.items() if _differ(key, found)}


def _differ(key: str, values: Sequence[Any]) -> bool:
    compared = [one for one in values if one is not None] if key.startswith(CODE) else values
    return any(one != compared[0] for one in compared[1:])


def comparison(runs: Sequence[Run]) -> str:
    """The complete page."""
    charts, best = comparison_charts(runs), best_of(runs)
    links = [("results", "Results"), ("differences", "Settings"), ("curves", "Curves")]
    title = f"{len(runs)} runs"
    top = joined(["best: ", tag("strong", best.run.name), f" {percent(best.accuracy.share)}"]) if best else Markup("")
    body = joined(
        [
            header(title, top, links),
            tag("main", _results(runs, best), _differences(runs), _curves(charts), footer()),
        ]
    )
    return document(f"tandem: {title}", body, {"charts": charts})


def _results(runs: Sequence[Run], best: Best | None) -> Markup:
    heads = ["run", "accuracy", "95 % interval", "loss", "margin", "distance", "steps", "time", "status"]
    rows = [_row(i, run, best) for i, run in enumerate(runs)]
    return section("results", "Results", _verdict(best), table(heads, rows, numeric=range(1, 8), class_="results"))


def _row(i: int, run: Run, best: Best | None) -> list[object]:
    record: Record = validated_record(run) or {}
    interval = accuracy_of(record)
    mark = tag("span", "best", class_="badge good") if best is not None and run is best.run else None
    name = joined([tag("span", class_=f"key c{i % NUM_COLOURS}"), tag("span", run.name, title=run.path), " ", mark])
    return [
        name,
        "–" if interval is None else percent(interval.share),
        "–" if interval is None else f"{percent(interval.low)} to {percent(interval.high)}",
        *(number(number_in(record, key)) for key in ("loss", "rewards_margin_mean", "kl_per_token")),
        f"{run.step:,}",
        duration(run.seconds),
        run.status,
    ]


def _verdict(best: Best | None) -> Markup:
    if best is None:
        return callout("info", "No run is marked as the best:", NO_BEST)
    found = f"{best.run.name}: {percent(best.accuracy.share)} ({percent(best.accuracy.low)} to {percent(best.accuracy.high)})."
    clear = how_clear(is_clear=best.is_clear, num_equal=best.num_equal)
    if best.is_clear:
        return callout("good", "Best accuracy:", f"{found} {clear}")
    return callout("info", "Best accuracy:", f"{found} {clear} Validate on more pairs to be sure.")


def _differences(runs: Sequence[Run]) -> Markup:
    differing = differing_keys(runs)
    rows = [[tag("code", key), *(shown(value) for value in values)] for key, values in differing.items()]
    inside = table(["key", *(run.name for run in runs)], rows) if rows else empty("The runs have the same settings.")
    return section("differences", "Settings that differ", inside)


def _curves(charts: Sequence[dict[str, Any]]) -> Markup:
    figures = [figure(chart) for chart in charts]
    return section("curves", "Curves", tag("div", *figures, class_="grid") if figures else empty("No run has steps."))

"""Prints the plan of a sweep, and its result as a table."""

from tandem.page.comparison import NO_BEST, how_clear
from tandem.page.html import percent
from tandem.report.reporter import Reporter
from tandem.sweeping.records import SweepResult, SweepRun
from tandem.terminal.printable import counted


def show_plan(plan: SweepResult, reporter: Reporter) -> None:
    """Print the runs that a sweep would train."""
    finished = sum(run.status == "finished" for run in plan.runs)
    reporter.say(
        f"{counted(len(plan.runs), 'run')} in {plan.folder}, of which {finished} are finished. Nothing is trained.\n"
    )
    reporter.table(["run", "settings"], [[run.name, " ".join(run.values)] for run in plan.runs])


def show_result(result: SweepResult, reporter: Reporter) -> None:
    """Print a table of the runs, the best of them marked, and where the page is."""
    metrics = dict.fromkeys(run.tracked.metric for run in result.runs if run.tracked and run.status == "finished")
    # Of several metrics, each row says which one.
    metric = next(iter(metrics)).replace("_", " ") if len(metrics) == 1 else "tracked metric"
    reporter.say(f"\nSwept: {', '.join(result.swept)}")
    rows = [_row(run, result, names_metric=len(metrics) > 1) for run in result.runs]
    reporter.table(["run", "accuracy", "95 % interval", metric, "at step"], rows)
    if result.best is not None and result.best.accuracy is not None:
        share = result.best.accuracy.share
        finished = [run.accuracy for run in result.runs if run.status == "finished" and run.accuracy is not None]
        equal = [accuracy for accuracy in finished if accuracy.share == share]
        clear = how_clear(is_clear=result.best_is_clear, num_equal=len(equal) - 1)
        reporter.say(f"* best accuracy: {percent(share)}. {clear}")
    else:
        reporter.say(f"No run is marked as the best: {NO_BEST}")
    if result.page is not None:
        reporter.end(f"{result.page} compares the runs: open it in a browser.")


def _row(run: SweepRun, result: SweepResult, *, names_metric: bool) -> list[str]:
    mark = "* " if result.best is not None and run.name == result.best.name else "  "
    is_finished = run.status == "finished"
    # What an unfinished run measured last, perhaps before its first step, is not its result.
    interval, tracked = (run.accuracy, run.tracked) if is_finished else (None, None)
    value = "-" if tracked is None else f"{tracked.value:.4f}"
    return [
        f"{mark}{run.name}",
        run.status if not is_finished else "-" if interval is None else percent(interval.share),
        "-" if interval is None else f"{percent(interval.low)} to {percent(interval.high)}",
        f"{tracked.metric} {value}" if names_metric and tracked is not None else value,
        "-" if tracked is None else f"{tracked.step:,}",
    ]

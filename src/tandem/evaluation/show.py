"""Prints an Evaluation as tables of at most 80 columns."""

from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text

from tandem.evaluation.compare import LISTED_PAIRS
from tandem.evaluation.intervals import Estimate
from tandem.evaluation.records import Benchmark, Comparison, Evaluation, Group
from tandem.evaluation.rewardbench import TIES
from tandem.report.per_pair import described
from tandem.terminal.arguments import option
from tandem.terminal.console import SafeConsole
from tandem.terminal.printable import counted, escaped, listed
from tandem.terminal.text import table, wrap
from tandem.training.run.other_folders import run_of_model

WIDTH = 80
NAME_CELLS = 28  # of a group's name
SHOWN_PAIRS = 5  # of those that a comparison lists
FEW_PROMPTS = 30
METRICS = {
    "accuracy": "reward accuracy",
    "logps_accuracy": "log-probability accuracy",
    "logps_per_token_accuracy": "log-probability accuracy, per token",
    "rewards_margin": "reward margin",
    "logps_margin": "log-probability margin",
    "loss": "loss",
}


def show(found: Evaluation, console: SafeConsole, per_pair: Path | None = None, *, has_replaced: bool = False) -> None:
    """Print everything that was measured. `per_pair`: the file with every pair; `has_replaced`: whether there was one before."""
    printer = _Printer(console)
    printer.say(_heading(found))
    for text in found.left_out:
        printer.say(text)
    for name, reasons in found.skipped.items():
        printer.say(f"{name}: left out {listed(f'{count:,} ({reason})' for reason, count in reasons.items())}")
    if found.total is not None:
        _show_total(found, found.total, printer)
        for title, groups in {
            "By set": found.by_set if len(found.by_set) > 1 else (),
            f"By {found.by}": found.by_field,
            "By length of the chosen completion": found.by_length,
            "By rank": found.by_rank_distance,
        }.items():
            _show_groups(title, groups, found, printer)
        _show_calibration(found, printer)
        for benchmark in found.benchmarks:
            _show_benchmark(benchmark, printer)
    if found.comparison is not None:
        _show_comparison(found.model, found.comparison, printer, _why_no_rewards(found, found.comparison))
    _show_harness(found, printer)
    if per_pair is not None:
        printer.say(f"\n{per_pair}: {described(has_replaced=has_replaced)}")


class _Printer:
    """Prints lines and tables in the width of the terminal, at most 80 columns."""

    def __init__(self, console: SafeConsole):
        self._console = console
        self._width = min(WIDTH, console.width) if console.is_terminal else WIDTH

    def say(self, text: str) -> None:
        self._console.print(Text(escaped(wrap(text, self._width))), soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if not rows:
            return
        self.say(f"\n{title}" if title else "")
        for line, is_heading in table(columns, rows, self._width):
            self._console.print(Text(escaped(line), "bold" if is_heading else ""), soft_wrap=True)


def _heading(found: Evaluation) -> str:
    if found.total is None:
        return f"{found.model}: tasks of the LM Evaluation Harness"
    how = {
        "implicit reward": f"implicit rewards of {found.loss}, beta {found.beta:g}" if found.beta is not None else "",
        "log-probability": f"log-probabilities only; implicit rewards need {_what_has_a_reference(found.model)}",
        "model score": "scores of the model",
    }[found.scored_by]
    against = f", reference {found.reference}" if found.reference else ""
    speed = (
        f"{found.seconds:.1f} s"
        if found.pairs_per_second is None
        else (f"{found.seconds:.1f} s, {found.pairs_per_second:,.0f} pairs/s")
    )
    return (
        f"{found.model}: {how}{against}\n"
        f"{counted(found.total.num_pairs, 'pair')} of {counted(found.total.num_prompts, 'prompt')}, {found.precision} ({speed})"
    )


def _what_has_a_reference(model: str) -> str:
    """Return the option that names a reference, and, if the model is the export of a run, this run, which has a reference."""
    asked, run = option("reference", metavar="MODEL"), run_of_model(Path(model))
    return asked if run is None else f"{asked}, or the run, {run}"


def _show_total(found: Evaluation, total: Group, printer: _Printer) -> None:
    rows = []
    for name, label in METRICS.items():
        estimate: Estimate | None = getattr(total, name)
        if name == "accuracy" and found.scored_by == "model score":
            label = "accuracy of scores"
        if estimate is not None:
            rows.append([label, _value(estimate.value), _interval(estimate)])
    if (best := found.best_of_n) is not None:
        mean = best.completions_per_prompt
        which = f"best of N right, N {mean:.3g} on average" if best.is_mixed else f"best of {mean:.0f} right"
        label = f"{which} ({counted(best.num_prompts, 'prompt')})"
        rows.append([label, _value(best.accuracy.value), _interval(best.accuracy)])
    if found.calibration is not None:
        rows.append(["calibration error (ECE)", _value(found.calibration.expected_error), ""])
    printer.table("", ["metric", "value", "95 % interval"], rows)
    if total.num_prompts < FEW_PROMPTS:
        printer.say(f"Only {counted(total.num_prompts, 'prompt')}: the intervals are wide, and approximate.")


def _show_groups(title: str, groups: Sequence[Group], found: Evaluation, printer: _Printer) -> None:
    if not groups:
        return
    columns = ["set", "pairs"]
    has_rewards = groups[0].accuracy is not None
    columns += ["accuracy", "95 % interval", "margin"] if has_rewards else []
    if groups[0].logps_accuracy is not None:
        columns += ["logp acc.", *([] if has_rewards else ["95 % interval"]), "per token"]
    rows = []
    for group in groups:
        row = [_shortened(group.name), f"{group.num_pairs:,}"]
        if group.accuracy is not None and group.rewards_margin is not None:
            row += [_share(group.accuracy), _interval(group.accuracy), f"{group.rewards_margin.value:.3g}"]
        if group.logps_accuracy is not None and group.logps_per_token_accuracy is not None:
            interval = [] if has_rewards else [_interval(group.logps_accuracy)]
            row += [_share(group.logps_accuracy), *interval, _share(group.logps_per_token_accuracy)]
        rows.append(row)
    printer.table(title, columns, rows)


def _show_calibration(found: Evaluation, printer: _Printer) -> None:
    if found.calibration is None:
        return
    rows = [
        [f"{one.low:.2f} to {one.high:.2f}", f"{one.num_pairs:,}", f"{one.confidence:.3f}", f"{one.accuracy:.3f}"]
        for one in found.calibration.bins
    ]
    printer.table(
        "Calibration: sigmoid(|margin|) and the share ordered correctly",
        ["of", "pairs", "confidence", "accuracy"],
        rows,
    )


def _show_benchmark(found: Benchmark, printer: _Printer) -> None:
    rows = [[name, f"{found.num_prompts[name]:,}", _value(value)] for name, value in found.subsets.items()]
    printer.table(f"{found.name}, by subset", ["set", "prompts", "score"], rows)
    rows = [[name, _value(value)] for name, value in found.sections.items()]
    printer.table("", ["set", "score"], [*rows, [f"{found.name} score", _value(found.score)]])
    if found.missing:
        printer.say(f"Not in the score (no prompts): {', '.join(found.missing)}.")
    if found.uncounted:
        printer.say(f"Not in the score (not part of {found.name}): {', '.join(found.uncounted)}.")
    if found.num_alone:
        have = "has" if found.num_alone == 1 else "have"
        printer.say(
            f"{counted(found.num_alone, 'prompt')} of Ties {have} no counterpart in the data (ref:N and tied:N belong together), "
            "so the score of Ties is too low."
        )
    if any(name.lower() == TIES and not 0 <= value <= 1 for name, value in found.subsets.items()):
        printer.say("The published formula of Ties gives -0.01 to 1.01.")


def _show_comparison(model: str, found: Comparison, printer: _Printer, note: str = "") -> None:
    names = {"accuracy": "reward", "logps_accuracy": "logp", "logps_per_token_accuracy": "logp per token"}
    rows = [
        [
            names[one.metric],
            f"{one.value:.3f}",
            f"{one.against:.3f}",
            f"{one.difference.value:+.3f}",
            _interval(one.difference, signed=True),
            f"{one.num_better}/{one.num_worse}",
            f"{one.p_value:.2g}",
        ]
        for one in found.differences
    ]
    printer.say(f"\nAccuracy of {model} (A) against {found.against} (B), {counted(found.num_pairs, 'pair')}")
    if found.num_left_out:
        verb = "is" if found.num_left_out == 1 else "are"
        printer.say(f"{counted(found.num_left_out, 'pair')} that only one of them could read {verb} left out")
    printer.table("", ["metric", "A", "B", "A - B", "95 % interval", "better/worse", "p"], rows)
    if note:
        printer.say(note)
    rows = [
        [
            _shortened(pair.place, 40),
            f"{pair.chosen} > {pair.rejected}",
            f"{pair.margin:.3g}",
            f"{pair.against_margin:.3g}",
        ]
        for pair in found.pairs[:SHOWN_PAIRS]
    ]
    heading = f"Pairs that they order differently by {names[found.metric]}{_shown_of(found, len(rows))}"
    printer.table(heading, ["of", "pair", "margin A", "margin B"], rows)


def _why_no_rewards(found: Evaluation, comparison: Comparison) -> str:
    """Return a sentence that says which model has no rewards, and what gives it rewards. Empty if rewards are compared."""
    scored_by = {found.model: found.scored_by, comparison.against: comparison.scored_by}
    without = [name for name, by in scored_by.items() if by == "log-probability"]
    if not without:
        return ""
    if without == [found.reference]:
        return f"Rewards are not compared: {found.reference} is the reference, and its rewards are all zero."
    runs = [run for name in without if (run := run_of_model(Path(name))) is not None]
    names, several = " and ".join(without), len(without) > 1
    what, advice = f"{'have' if several else 'has'} no reference", f"add {option('reference', metavar='MODEL')}"
    if len(runs) == len(without):
        what = "are model folders without a reference" if several else "is a model folder without a reference"
        advice = f"give the {'runs' if several else 'run'}, {' and '.join(map(str, runs))}, or {advice}"
    return f"Rewards are not compared: {names} {what}. To compare them, {advice}."


def _shown_of(found: Comparison, num_shown: int) -> str:
    """Return text that says how many of the pairs are listed, and how to see more of them."""
    num = next(one.num_better + one.num_worse for one in found.differences if one.metric == found.metric)
    return f": {num_shown} of {num:,} (--json lists up to {LISTED_PAIRS})" if num > num_shown else ""


def _show_harness(found: Evaluation, printer: _Printer) -> None:
    if not found.harness:
        return
    # They ran in the order reference, compared model, model. The letters of the last two are those of a comparison.
    models = list(dict.fromkeys(name for one in found.harness for name in one.values))[::-1]
    models.sort(key=lambda name: name != found.model)
    letters = {name: chr(ord("A") + number) for number, name in enumerate(models)}
    printer.say("\nLM Evaluation Harness")
    for name, letter in letters.items():
        printer.say(f"  {letter}: {name}")
    rows = []
    for one in found.harness:
        cells = []
        for name in models:
            error = one.stderrs.get(name)
            value = one.values.get(name)
            cells.append("" if value is None else f"{value:.4g}" + ("" if error is None else f" ±{error:.2g}"))
        rows.append([_shortened(one.task), _shortened(one.metric, 20), *cells])
    printer.table("", ["set", "metric", *letters.values()], rows)


def _share(estimate: Estimate) -> str:
    return f"{estimate.value:.3f}"


def _value(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def _interval(estimate: Estimate, *, signed: bool = False) -> str:
    if estimate.low is None or estimate.high is None:
        return "none"
    if signed:
        return f"{estimate.low:+.3f} to {estimate.high:+.3f}"
    return f"{_value(estimate.low)} to {_value(estimate.high)}"


def _shortened(name: str, most: int = NAME_CELLS) -> str:
    """A name of at most `most` cells: the end of a path says more than its beginning."""
    name = " ".join(name.split())
    return name if cell_len(name) <= most else f"...{name[-(most - 3) :]}"

"""`tandem runs`: lists runs with their results and the settings in which they differ."""

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.app import app, expand_home_callback, with_bar


@app.command("runs")
def show_runs(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", callback=expand_home_callback, help="The folder that holds the runs.")
    ] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the table.")] = False,
) -> None:
    """List runs with their results and changed settings."""
    from rich.cells import cell_len

    from tandem.page.listing import COLUMNS, LEGEND, changed_keys, list_row, shortened_settings
    from tandem.page.listing import as_json as run_as_json
    from tandem.report.reporter import Reporter
    from tandem.runs import list_runs, list_sweeps
    from tandem.sweeping.missing import missing_runs
    from tandem.training.run.failure import described_failure

    reporter = Reporter("quiet" if as_json or quiet else "normal")
    runs = list_runs(folder, with_bar("Reading runs", reporter))
    if as_json:
        print(json.dumps([run_as_json(run) for run in runs], ensure_ascii=False, indent=1))
        return
    table = Reporter("normal")
    sweeps = [f"Sweep: `tandem runs {shlex.quote(str(sweep))}` lists its runs." for sweep in list_sweeps(folder)]
    missing = missing_runs(Path(folder))
    if not runs:
        table.say("\n".join([*missing, *sweeps]) or f"{folder}: no runs. `tandem train` starts one.")
        return
    table.table(COLUMNS, [list_row(run) for run in runs])
    reporter.say(LEGEND)
    reporter.say(
        "\nData, and settings other than the defaults" if len(runs) == 1 else "\nSettings in which they differ"
    )
    is_cut = False
    for run, settings in zip(runs, changed_keys(runs), strict=True):
        name, line = f"  {run.name}: ", ", ".join(settings) or "none"
        is_cut = is_cut or any(one.endswith("…") for one in settings)
        if reporter.console.is_terminal and cell_len(name + line) > reporter.console.width:
            line, is_cut = shortened_settings(settings, reporter.console.width - cell_len(name)), True
        reporter.say(f"{name}{line}", hang=4)
    if is_cut:
        reporter.say("--json lists every changed setting with its complete value.")
    failed = [f"{run.name}: {described_failure(run.path, run.error)}" for run in runs if run.error is not None]
    problems = [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    for heading, texts in (
        ("Runs that failed", failed),
        ("Not everything could be read", problems),
        ("Runs of this sweep without results", missing),
    ):
        if texts:
            reporter.say(f"\n{heading}")
        for text in texts:
            reporter.say(f"  {text}", hang=4)
    if sweeps:
        reporter.say("\n" + "\n".join(sweeps))

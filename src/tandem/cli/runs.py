"""`tandem runs`: lists runs with their results and the settings in which they differ."""

import json
import shlex
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

    from tandem.page.listing import COLUMNS, LEGEND, changed_keys, list_row, settings_line
    from tandem.page.listing import as_json as run_as_json
    from tandem.report.reporter import Reporter
    from tandem.runs import list_runs, list_sweeps

    reporter = Reporter("quiet" if as_json or quiet else "normal")
    runs = list_runs(folder, with_bar("Reading runs", reporter))
    if as_json:
        print(json.dumps([run_as_json(run) for run in runs], ensure_ascii=False, indent=1))
        return
    table = Reporter("normal")
    sweeps = [f"Sweep: `tandem runs {shlex.quote(str(sweep))}` lists its runs." for sweep in list_sweeps(folder)]
    if not runs:
        table.say("\n".join(sweeps) or f"{folder}: no runs. `tandem train` starts one.")
        return
    table.table(COLUMNS, [list_row(run) for run in runs])
    reporter.say(LEGEND)
    reporter.say("\nSettings other than the defaults" if len(runs) == 1 else "\nSettings in which they differ")
    every = changed_keys(runs)
    names = [f"  {run.name}: " for run in runs]
    width = reporter.console.width if reporter.console.is_terminal else None
    widths = [None if width is None else width - cell_len(name) for name in names]
    lines = [settings_line(keys, width) for keys, width in zip(every, widths, strict=True)]
    for name, line in zip(names, lines, strict=True):
        reporter.say(f"{name}{line}", hang=4)
    if any(line != settings_line(keys, None) for keys, line in zip(every, lines, strict=True)):
        reporter.say("--json lists all changed settings.")
    if sweeps:
        reporter.say("\n" + "\n".join(sweeps))

"""`tandem runs`: lists runs with their results and the settings in which they differ."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.app import app, expand_home_callback


@app.command("runs")
def show_runs(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", callback=expand_home_callback, help="The folder that holds the runs.")
    ] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the table.")] = False,
) -> None:
    """List the runs in a folder with their results and changed settings."""
    from tandem.page.listing import COLUMNS, changed_keys, list_row
    from tandem.page.listing import as_json as run_as_json
    from tandem.report.reporter import Reporter
    from tandem.runs import list_runs

    reporter = Reporter("quiet" if as_json or quiet else "normal")

    def with_bar(paths: list[Path]) -> Iterator[Path]:
        with reporter.progress("Reading runs", len(paths)) as done:
            for path in paths:
                yield path
                done(1)

    runs = list_runs(folder, with_bar)
    if as_json:
        print(json.dumps([run_as_json(run) for run in runs], ensure_ascii=False, indent=1))
        return
    table = Reporter("normal")
    if not runs:
        table.say(f"{folder}: no runs. `tandem train` starts one.")
        return
    table.table(COLUMNS, [list_row(run) for run in runs])
    reporter.say("\nChanged settings" if len(runs) == 1 else "\nSettings in which they differ")
    for run, keys in zip(runs, changed_keys(runs), strict=True):
        reporter.say(f"  {run.name}: {', '.join(keys) or 'none'}", hang=4)

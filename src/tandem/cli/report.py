"""`tandem report`: writes the page of a run, or a comparison of several runs."""

import json
from typing import Annotated

import typer

from tandem.cli.app import app, expand_home_callback, with_bar


@app.command()
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Directories of runs.")],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            callback=expand_home_callback,
            help="Write the page to FILE. Default: RUN/report.html, SWEEP/comparison.html, or comparison.html for several runs.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Also print the runs as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")] = False,
) -> None:
    """Write a page on a run, or compare several runs.

    It shows curves, verdicts, pairs, packing, data and settings, in one file that needs no network.
    """
    from tandem.page.comparison import NO_BEST, how_clear
    from tandem.page.listing import as_json as run_as_json
    from tandem.page.write import write_report
    from tandem.report.reporter import Reporter
    from tandem.terminal.printable import escaped

    written = write_report(runs, out, with_bar("Reading runs", Reporter("quiet" if quiet or as_json else "normal")))
    if as_json:
        best = None if written.best is None else str(written.best.run.path)
        content = {
            "page": str(written.page),
            "has_replaced": written.has_replaced,
            "runs": [run_as_json(run) for run in written.runs],
            "best": best,
            "left_out": list(written.left_out),
        }
        print(json.dumps(content, ensure_ascii=False, indent=1))
    elif not quiet:
        for text in written.left_out:
            print(text)
        replaced = " and replaces the earlier page" if written.has_replaced else ""
        print(f"{written.page} is written{replaced}: open it in a browser.")
        for problem in [f"{one.path}: {problem}" for one in written.runs for problem in one.problems]:
            print(f"Not everything could be read: {escaped(problem)}")
        if len(written.runs) > 1 and written.best is None:
            print(f"No run is marked as the best: {NO_BEST}")
        elif (found := written.best) is not None:
            print(f"Best accuracy: {found.run.name}. {how_clear(is_clear=found.is_clear, num_equal=found.num_equal)}")

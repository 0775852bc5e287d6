"""`tandem sweep`: trains one run for every combination of values, and compares the runs."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.app import AllowCode, AllowEnv, ConfigFile, FromFormat, app, expand_home_callback
from tandem.errors import CheckpointError, ConfigError, DataError, NonFiniteError, TandemError
from tandem.rank_variables import is_distributed

if TYPE_CHECKING:
    from tandem.sweeping.records import SweepResult

# Of errors that the same settings and data cause again.
REPEATING_EXIT_CODES = tuple(error.exit_code for error in (ConfigError, DataError, CheckpointError, NonFiniteError))


@app.command("sweep")
def run_sweep(
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=A,B,...", help="Keys with values to try, and KEY=VALUE for settings that all runs share."
        ),
    ],
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    allow_code: AllowCode = False,
    from_format: FromFormat = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            callback=expand_home_callback,
            help="Directory of the sweep, new or to continue. Default: runs/sweep-N.",
        ),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Runs to train at a time. Default: 1 on a CPU, as many as fit on a GPU."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check every configuration and list the runs, but train nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result, warnings and errors.")] = False,
) -> None:
    """Train one run per combination of values, and compare them.

    The same command again continues the sweep.
    """
    if is_distributed():
        raise ConfigError("tandem sweep starts the processes of its runs itself. Start it without torchrun.")

    from tandem.report.reporter import Reporter
    from tandem.sweeping.plan import Reading, make_plan

    reporter = Reporter("quiet" if quiet else "normal", as_json=as_json)
    plan = make_plan(overrides, config, Reading(tuple(allow_env or ()), allow_code, from_format), reporter.progress)

    from tandem.sweeping.show import show_plan, show_result
    from tandem.sweeping.sweep import run_plan

    result = run_plan(plan, out=out, parallel=parallel, dry_run=dry_run, reporter=reporter)
    if as_json:
        print(json.dumps(result.as_dict(), ensure_ascii=False, indent=1))
    else:
        (show_plan if dry_run else show_result)(result, Reporter("normal"))
    if result.failed:
        raise TandemError(_describe_failures(result))


def _describe_failures(result: "SweepResult") -> str:
    """Return which runs failed, and for which of them the same command can help."""
    failed = [run.name for run in result.failed]
    again = [run.name for run in result.failed if run.exit_code in REPEATING_EXIT_CODES]
    text = f"{len(failed)} of {len(result.runs)} runs failed: {', '.join(failed)}. Their logs are in {result.folder}/logs. "
    if not again:
        return f"{text}The same command retries them."
    if again == failed:
        return f"{text}The same command would fail in the same way: fix what the messages report first."
    return f"{text}The same command retries them. Before that, fix what is reported for {', '.join(again)}."

"""`tandem train`: options in, a run out."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.app import LOADING, AllowEnv, ConfigFile, Overrides, among_several, app, in_home_folder
from tandem.errors import AlreadyReportedError, ConfigError, TandemError
from tandem.terminal.commands import override
from tandem.terminal.streams import continue_without_reader


@app.command()
def train(
    overrides: Overrides = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", callback=in_home_folder, help="Go on with the run in DIR, under its own configuration."
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run, whatever is there.")] = False,
    per_pair: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            callback=in_home_folder,
            help="At the end, write every pair's numbers there, the least margin first.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each record as a line of JSON, and the result as the last one.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only warnings, errors and the end.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more.")] = False,
) -> None:
    """Train on preferences. Without any argument: the embedded default, a tiny model on bundled pairs."""
    from tandem.config.load import load_config, require_training_set
    from tandem.paths import check_resumed, check_run

    continue_without_reader("tandem: standard output was closed. The run continues without it.")
    if resume is not None:
        if config is not None or fresh:
            raise ConfigError("--resume takes its configuration from DIR: leave out --config and --fresh.")
        check_resumed(Path(resume))
        config, overrides = f"{resume}/config.yaml", [*(overrides or []), override("run.dir", resume)]
    try:
        loaded = load_config(config, overrides or [], allow_env or ())
        require_training_set(loaded.config)
        check_run(loaded, fresh=fresh, per_pair=Path(per_pair) if per_pair else None)
    except TandemError as error:  # which all workers meet alike: one of each machine says so
        raise error if os.environ.get("LOCAL_RANK", "0") == "0" else AlreadyReportedError(error.exit_code) from None
    silent = quiet or (as_json and not verbose)
    if not silent and os.environ.get("RANK", "0") == "0":
        print(LOADING, flush=True, file=sys.stderr if as_json else sys.stdout)

    from tandem.model.distributed.process_group import leave_process_group
    from tandem.report.reporter import Reporter
    from tandem.train.trainer import train as run_training

    reporter = Reporter("quiet" if silent else "verbose" if verbose else "normal", as_json=as_json)
    try:
        run_training(loaded, reporter, fresh=fresh, per_pair=Path(per_pair) if per_pair else None)
    except BaseException:
        if not among_several():  # which might wait for one that is gone
            leave_process_group()
        raise
    leave_process_group()

"""`tandem train`: checks options and paths, then runs the training."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.app import LOADING_MESSAGE, AllowEnv, ConfigFile, Overrides, app, expand_home_callback, is_distributed
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
            metavar="DIR",
            callback=expand_home_callback,
            help="Resume the run in DIR with the configuration saved there.",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run instead of resuming an unfinished one.")
    ] = False,
    per_pair: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            callback=expand_home_callback,
            help="After training, write the metrics of every pair to FILE, smallest margin first.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each record as a line of JSON, and the result as the last line.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings, errors and the result.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print more details.")] = False,
) -> None:
    """Train on preferences. Without arguments, train a tiny model on the bundled pairs."""
    from tandem.config.load import load_config, require_training_set
    from tandem.paths import check_resumed, check_run

    continue_without_reader("tandem: standard output was closed. The run continues without it.")
    if resume is not None:
        if config is not None or fresh:
            raise ConfigError("--resume uses the configuration saved in DIR. Leave out --config and --fresh.")
        check_resumed(Path(resume))
        config, overrides = f"{resume}/config.yaml", [*(overrides or []), override("run.dir", resume)]
    try:
        loaded = load_config(config, overrides or [], allow_env or ())
        require_training_set(loaded.config)
        check_run(loaded, fresh=fresh, per_pair=Path(per_pair) if per_pair else None)
    except TandemError as error:  # every rank raises it; one per machine reports it
        raise error if os.environ.get("LOCAL_RANK", "0") == "0" else AlreadyReportedError(error.exit_code) from None
    silent = quiet or (as_json and not verbose)
    if not silent and os.environ.get("RANK", "0") == "0":
        print(LOADING_MESSAGE, flush=True, file=sys.stderr if as_json else sys.stdout)

    from tandem.model.distributed.process_group import leave_process_group
    from tandem.report.reporter import Reporter
    from tandem.train.trainer import train as run_training

    reporter = Reporter("quiet" if silent else "verbose" if verbose else "normal", as_json=as_json)
    try:
        run_training(loaded, reporter, fresh=fresh, per_pair=Path(per_pair) if per_pair else None)
    except BaseException:
        if not is_distributed():  # leaving the group could wait for a rank that is gone
            leave_process_group()
        raise
    leave_process_group()

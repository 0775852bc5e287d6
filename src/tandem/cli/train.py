"""`tandem train`: checks options and paths, then trains."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.app import (
    LOADING_MESSAGE,
    AllowCode,
    AllowEnv,
    ConfigFile,
    FromFormat,
    Overrides,
    app,
    expand_home_callback,
    is_distributed,
)
from tandem.errors import AlreadyReportedError, ConfigError, TandemError
from tandem.terminal.commands import override
from tandem.terminal.streams import continue_without_reader

if TYPE_CHECKING:
    from tandem.config.load import LoadedConfig
    from tandem.report.reporter import Verbosity


@app.command()
def train(
    overrides: Overrides = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    allow_code: AllowCode = False,
    from_format: FromFormat = None,
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
            help="After training, write the metrics of each pair to FILE, sorted from the smallest margin.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print records as lines of JSON. The last line is the result.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings, errors and the result.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print more details about the run.")] = False,
) -> None:
    """Train a model on preferences. Without arguments, train a tiny model on the bundled pairs."""
    from tandem.paths import check_resumed

    continue_without_reader("tandem: standard output was closed. The run continues without it.")
    if resume is not None:
        if config is not None or fresh:
            raise ConfigError("--resume uses the configuration saved in DIR. Leave out --config and --fresh.")
        check_resumed(Path(resume))
        config, overrides = f"{resume}/config.yaml", [*(overrides or []), override("run.dir", resume)]
    per_pair_file = Path(per_pair) if per_pair else None
    with _reported_once_per_machine():
        loaded = _load_checked(
            config,
            overrides or [],
            allow_env or [],
            fresh=fresh,
            per_pair=per_pair_file,
            allow_code=allow_code,
            from_format=from_format,
        )
    silent = quiet or (as_json and not verbose)
    if not silent and os.environ.get("RANK", "0") == "0":
        print(LOADING_MESSAGE, flush=True, file=sys.stderr if as_json else sys.stdout)
    verbosity: Verbosity = "quiet" if silent else "verbose" if verbose else "normal"
    _train_and_leave_group(loaded, verbosity, as_json=as_json, fresh=fresh, per_pair=per_pair_file)


def _load_checked(
    config: str | None,
    overrides: list[str],
    allow_env: list[str],
    *,
    fresh: bool,
    per_pair: Path | None,
    allow_code: bool,
    from_format: str | None,
) -> "LoadedConfig":
    """Load the configuration, and check everything that can be checked without torch."""
    from tandem.config.load import load_config, require_training_set
    from tandem.paths import check_run

    loaded = load_config(config, overrides, allow_env, allow_code=allow_code, from_format=from_format)
    require_training_set(loaded.config)
    check_run(loaded, fresh=fresh, per_pair=per_pair)
    return loaded


@contextmanager
def _reported_once_per_machine() -> Iterator[None]:
    """Inside this context, let local rank 0 of each machine report an error that every rank raises. Other ranks exit silently."""
    try:
        yield
    except TandemError as error:
        raise error if os.environ.get("LOCAL_RANK", "0") == "0" else AlreadyReportedError(error.exit_code) from None


def _train_and_leave_group(
    loaded: "LoadedConfig", verbosity: "Verbosity", *, as_json: bool, fresh: bool, per_pair: Path | None
) -> None:
    from tandem.model.distributed.process_group import leave_process_group
    from tandem.report.reporter import Reporter
    from tandem.training.trainer import train as run_training

    reporter = Reporter(verbosity, as_json=as_json)
    try:
        run_training(loaded, reporter, fresh=fresh, per_pair=per_pair)
    except BaseException:
        if not is_distributed():  # leaving the group could wait for a lost rank
            leave_process_group()
        raise
    leave_process_group()

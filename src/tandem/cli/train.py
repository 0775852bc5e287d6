"""`tandem train`: checks options and paths, then trains."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.app import (
    ARGUMENTS,
    LOADING_MESSAGE,
    STARTED,
    AllowCode,
    AllowEnv,
    ConfigFile,
    FromFormat,
    Overrides,
    app,
    expand_home_callback,
    reported_once_per_machine,
    with_option,
)
from tandem.errors import ConfigError
from tandem.rank_variables import check_rank_variables, is_distributed
from tandem.terminal.commands import override
from tandem.terminal.streams import continue_without_reader

if TYPE_CHECKING:
    from tandem.config.load import LoadedConfig
    from tandem.report.reporter import Verbosity


@app.command()
def train(
    context: typer.Context,
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
    from tandem.config.load import load_config, require_training_set
    from tandem.launch.choose import choose_launcher, num_local_ranks, started_by
    from tandem.launch.local import train_on_ranks
    from tandem.launch.srun import adopt_srun_variables
    from tandem.model.distributed.mesh import mesh_shape
    from tandem.model.files.read_ahead import reading_ahead
    from tandem.paths import check_resumed, check_run

    adopt_srun_variables()
    check_rank_variables()
    continue_without_reader("tandem: standard output was closed. The run continues without it.")
    if resume is not None:
        if config is not None or fresh:
            raise ConfigError("--resume uses the configuration saved in DIR. Leave out --config and --fresh.")
        check_resumed(Path(resume))
        config, overrides = f"{resume}/config.yaml", with_option(overrides or [], "--resume", "run.dir", resume)
    per_pair_file = Path(per_pair) if per_pair else None
    with reported_once_per_machine():
        loaded = load_config(config, overrides or [], allow_env or [], allow_code=allow_code, from_format=from_format)
        require_training_set(loaded.config)
        launcher = choose_launcher(loaded.config.cluster)
        num_ranks = num_local_ranks(loaded) if launcher == "local" else int(os.environ.get("WORLD_SIZE", "1"))
        if launcher != "ray":  # whose cluster decides
            mesh_shape(loaded.config.policy.parallel, num_ranks)
        # Another trainer's batch size may be that of one rank. Only the ranks can compare it with that of a run to resume.
        ranks_check = loaded.translation is not None and (launcher == "ray" or (launcher == "local" and num_ranks > 1))
        if not ranks_check:
            check_run(loaded, fresh=fresh, per_pair=per_pair_file)
    silent = quiet or (as_json and not verbose)
    is_first = os.environ.get("RANK", "0") == "0" and started_by() not in ("local", "ray")  # who has printed it already
    if not silent and is_first:
        print(LOADING_MESSAGE, flush=True, file=sys.stderr if as_json else sys.stdout)
    if launcher == "local" and num_ranks > 1:
        train_on_ranks(context.meta[ARGUMENTS], num_ranks)
        return
    if launcher == "ray":
        from tandem.launch.ray_train import train_with_ray

        arguments = _restartable(context.meta[ARGUMENTS], loaded, fresh=fresh)
        train_with_ray(arguments, loaded.config.cluster, loaded.config.policy.parallel)
        return
    verbosity: Verbosity = "quiet" if silent else "verbose" if verbose else "normal"
    with reading_ahead(loaded.config):
        _train_and_leave_group(loaded, verbosity, as_json=as_json, fresh=fresh, per_pair=per_pair_file)


def _restartable(arguments: list[str], loaded: "LoadedConfig", *, fresh: bool) -> list[str]:
    """Return arguments that resume the run when they are used again: --fresh would start another one."""
    if not fresh:
        return arguments
    from tandem.training.run.directory import choose_run_dir

    run = choose_run_dir(loaded, fresh=True)
    return [*(one for one in arguments if one != "--fresh"), override("run.dir", str(run))]


def _train_and_leave_group(
    loaded: "LoadedConfig", verbosity: "Verbosity", *, as_json: bool, fresh: bool, per_pair: Path | None
) -> None:
    from tandem.model.distributed.process_group import leave_process_group
    from tandem.report.reporter import Reporter
    from tandem.training.trainer import train as run_training

    reporter = Reporter(verbosity, as_json=as_json, started=STARTED)
    try:
        run_training(loaded, reporter, fresh=fresh, per_pair=per_pair)
    except BaseException:
        if not is_distributed():  # leaving the group could wait for a lost rank
            leave_process_group()
        raise
    leave_process_group()

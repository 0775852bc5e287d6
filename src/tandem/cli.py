"""The command `tandem`: parse, call, exit. Nothing heavy is imported before a command needs it."""

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tandem import __version__
from tandem.commands import key_of, override
from tandem.errors import (
    ConfigError,
    DiskError,
    StoppedError,
    TandemError,
    Terminated,
    ToldError,
    full_disk,
)
from tandem.isolation import isolated
from tandem.streams import continue_without_reader, print_error, print_traceback, watched_streams


class Interrupted(Exception):
    """Ctrl-C, and what it means for the command."""


class Commands(TyperGroup):
    """Typer ends without a word on Ctrl-C: so that a word is said, it gets to see something else."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted(LEFT_BEHIND.get(str(ctx.invoked_subcommand), "")) from None


LOADING = "Loading torch and transformers (some seconds)"
LEFT_BEHIND = {"prepare": ": nothing half-done was kept; the same command starts again."}

app = typer.Typer(
    cls=Commands,
    name="tandem",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train language models on preferences: packed, prefix-shared, exact.",
)


def _in_home(path: str | None) -> str | None:
    """A shell leaves ~ as it is in --option=~/path."""
    from tandem.config.section import in_home

    return None if path is None else in_home(path)


ConfigFile = Annotated[
    str | None, typer.Option("--config", "-c", metavar="FILE", callback=_in_home, help="A YAML configuration.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the configuration: key=value, +key=value, ~key."),
]
AllowEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-env", metavar="NAME", help="Let a file send this variable to trackers or the hub; repeatable."
    ),
]


@app.command()
def train(
    overrides: Overrides = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="DIR", callback=_in_home, help="Go on with the run in DIR, under its own configuration."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start a new run, whatever is there.")] = False,
    per_pair: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            callback=_in_home,
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
        raise error if os.environ.get("LOCAL_RANK", "0") == "0" else ToldError(error.exit_code) from None
    silent = quiet or (as_json and not verbose)
    if not silent and os.environ.get("RANK", "0") == "0":
        print(LOADING, flush=True, file=sys.stderr if as_json else sys.stdout)

    from tandem.model.workers import stop_workers
    from tandem.train.report import Reporter
    from tandem.train.trainer import train as run_training

    reporter = Reporter("quiet" if silent else "verbose" if verbose else "normal", as_json=as_json)
    try:
        run_training(loaded, reporter, fresh=fresh, per_pair=Path(per_pair) if per_pair else None)
    except BaseException:
        if not _among_several():  # which might wait for one that is gone
            stop_workers()
        raise
    stop_workers()


@app.command("inspect")
def inspect_row(
    data: Annotated[
        str, typer.Argument(metavar="DATA", callback=_in_home, help="A data file, a pattern, or embedded.")
    ],
    overrides: Overrides = None,
    row: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE:]N",
            callback=_in_home,
            help="The line (or element) to show, of FILE among several; the first usable.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="M", help="Whose tokenizer and template: policy.model_name.")
    ] = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    positions: Annotated[bool, typer.Option("--positions", help="Show position ids too.")] = False,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", callback=_in_home, help="Write the same as a page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show a preference as the model will see it: tokens, special tokens, and which are scored."""
    from tandem.config.load import load_config
    from tandem.config.section import EMBEDDED

    named = re.compile(r"\+*data\.train(\.data_path=|=(?!\{)|=.*data_path)")
    if given := next((one for one in overrides or [] if named.match(one)), None):
        raise ConfigError(f"inspect {data} shows that file, so that {given} has no say in it. Leave it out.")
    if row is not None and not re.fullmatch(r"(.*:)?[1-9]\d*", row):
        raise ConfigError(f"--row {row}: give the number of a row, from 1 on; of one file among several, FILE:N.")
    # Data of one's own is seen under the usual limits, as `prepare` and `train` see it, not under the embedded default's.
    usual = [] if data == EMBEDDED or config else [f"policy.model_name={EMBEDDED}"]
    changes = [*usual, *_with_option(overrides or [], "--model", "policy.model_name", model)]
    loaded = load_config(config, changes, allow_env or ())

    from tandem import inspect
    from tandem.console import SafeConsole

    inspect.do_without_torch()
    found = inspect.inspect_data(data, loaded.config, row)
    if html is not None:
        inspect.write_page(found, Path(html), positions=positions)
    if as_json:
        print(inspect.as_json(found))
    elif html is None:
        inspect.show(found, SafeConsole(), positions=positions)
    else:
        print(f"{html}  {found.place} as a page")


@app.command()
def prepare(
    overrides: Overrides = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    pack_sizes: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Pack lengths; policy.packing.pack_length without it.")
    ] = None,
    packing_algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="The same as policy.packing.algorithm=NAME.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="The same as run.seed=N.")] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", callback=_in_home, help="Write each set into a folder there, to be trained on by its path."
        ),
    ] = None,
    from_nemo: Annotated[
        str | None,
        typer.Option(metavar="FILE", callback=_in_home, help="Read NeMo Aligner's packed .npy instead of data.train."),
    ] = None,
    to_nemo: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", callback=_in_home, help="Also write NeMo Aligner's packed_{size}_seed{seed}.npy there."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say only warnings and errors.")] = False,
) -> None:
    """Tokenise and pack the training and validation sets ahead of training, and show what is in them."""
    from tandem.config.load import load_config, require_training_set
    from tandem.config.section import EMBEDDED
    from tandem.paths import check_output, check_paths

    changes = _with_option(overrides or [], "--packing-algorithm", "policy.packing.algorithm", packing_algorithm)
    changes = _with_option(changes, "--seed", "run.seed", seed)
    loaded = load_config(config, changes, allow_env or ())
    if from_nemo is None:
        require_training_set(loaded.config)
    lengths = _lengths(pack_sizes)
    output, nemo = (Path(folder) if folder else None for folder in (output_dir, to_nemo))
    if from_nemo is None:
        check_output("--output-dir", output)
        check_output("--to-nemo", nemo)
        check_paths(loaded.config)

    from tandem.train.report import Reporter

    reporter = Reporter("quiet" if quiet or as_json else "normal")
    reporter.say(LOADING)

    from tandem import prepare as preparing

    if from_nemo is not None:
        if to_nemo is not None or lengths:
            raise ConfigError(
                "--from-nemo reads packs as pairs and writes a set: leave out --to-nemo and --pack-sizes."
            )
        if [one.data_path for one in loaded.config.data.training_sets] != [EMBEDDED]:
            raise ConfigError("--from-nemo reads its FILE in place of data.train: leave out data.train.")
        if output is None:
            raise ConfigError("--from-nemo needs --output-dir, where the set is written.")
        found = preparing.prepare_from_nemo(loaded.config, Path(from_nemo), output)
        preparing.show_imported(found, output, loaded, reporter)
        return
    prepared = preparing.prepare_data(loaded.config, reporter.progress, lengths, output, nemo)
    if as_json:
        print(preparing.as_json(prepared))
    else:
        preparing.show(prepared, reporter)


def _with_option(overrides: list[str], option: str, key: str, value: str | int | None) -> list[str]:
    """Overrides, and the one that an option stands for."""
    if value is None:
        return overrides
    if given := next((one for one in overrides if key_of(one) == key), None):
        raise ConfigError(f"{option} {value} and {given} are the same setting. Leave out one.")
    return [*overrides, override(key, value)]


def _lengths(given: str | None) -> list[int]:
    from tandem.config.policy import LONGEST_PACK

    try:
        lengths = [int(part) for part in (given or "").split(",") if part.strip()]
    except ValueError:
        lengths = [0]
    if any(not 1 <= length <= LONGEST_PACK for length in lengths):
        raise ConfigError(f"--pack-sizes {given}: not a list of lengths up to {LONGEST_PACK}, such as 4096,8192.")
    return sorted(set(lengths))


@app.command("config")
def show_config(
    overrides: Overrides = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON schema, for editors.")] = False,
) -> None:
    """Print the configuration in force, all keys resolved."""
    if schema:
        import json

        from tandem.config.schema import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    from tandem.config.load import load_config

    print(load_config(config, overrides or [], allow_env or ()).as_yaml(), end="")


@app.command("fail-points", hidden=True)  # for those who work on tandem
def fail_points() -> None:
    """List the places where TANDEM_FAIL_AT=POINT[:COUNT][=disk_full] kills the process, to try what survives it."""
    from tandem.failpoints import POINTS

    width = max(map(len, POINTS))
    for point, description in POINTS.items():
        print(f"{point:<{width}}  {description}")


def _version(show: bool) -> None:
    if show:
        print(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; a user's mistake ends in one message and its exit code, never in a traceback."""
    sys.excepthook = print_traceback
    with isolated(), watched_streams():
        _run_command()


def _run_command() -> None:
    from tandem.failpoints import read_fail_point
    from tandem.train.stopping import terminated_cleanly

    try:
        read_fail_point()
        with terminated_cleanly():
            app(standalone_mode=True)
    except StoppedError as error:
        print(f"tandem: {error}", file=sys.stderr)
        _leave(error.exit_code)
    except ToldError as error:
        _leave(error.exit_code)
    except TandemError as error:
        _fail(error)
    except Terminated:
        print("tandem: stopped by SIGTERM", file=sys.stderr)
        _leave(143)
    except (Interrupted, KeyboardInterrupt) as error:
        print(f"tandem: interrupted{error}", file=sys.stderr)
        _leave(130)
    except Exception as error:
        if full := full_disk(error):
            _fail(DiskError(f"the disk is full: {full}. Checkpoints already there are whole."))
        if _is_lost_worker(error):
            _fail(
                TandemError(
                    "another worker ended, so this one cannot go on. Checkpoints already there are whole; the same command "
                    "goes on from the newest."
                )
            )
        raise


def _is_lost_worker(error: Exception) -> bool:
    """Whether talking to another worker failed. Gloo raises a plain RuntimeError."""
    return (
        _among_several()
        and isinstance(error, RuntimeError)
        and (type(error).__name__.startswith("Dist") or "gloo" in str(error))
    )


def _among_several() -> bool:
    """Whether torchrun started other workers with this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _fail(error: TandemError) -> None:
    print_error(f"tandem: error: {error}")
    _leave(error.exit_code)


def _leave(exit_code: int) -> None:
    """End. One of several workers does without tearing down: threads that wait for workers already gone would abort."""
    if _among_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    main()

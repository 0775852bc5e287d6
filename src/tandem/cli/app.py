"""The Typer application that commands register with, and the options that several commands share."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tandem import __version__
from tandem.errors import AlreadyReportedError, ConfigError, TandemError
from tandem.terminal.arguments import command_words
from tandem.terminal.commands import key_of, override
from tandem.terminal.printable import byte_that_is_not_utf8

if TYPE_CHECKING:
    from tandem.report.reporter import Reporter


STARTED = time.perf_counter()  # about when the process started
ARGUMENTS = "tandem.arguments"  # in the context of a command: everything after `tandem` on the command line


class Interrupted(Exception):
    """The user pressed Ctrl-C. The message says what happened to the command's files; it may be empty."""


class CommandGroup(TyperGroup):
    """A group of commands that raises Interrupted on Ctrl-C, so that `main` can print a message.

    Typer alone would exit silently.
    """

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return [name for name in HELP_ORDER if name in self.commands]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        ctx.meta[ARGUMENTS] = list(args)
        for argument in args:
            refuse_undecodable(argument)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            with command_words(ctx.meta[ARGUMENTS]):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted(INTERRUPT_HINTS.get(str(ctx.invoked_subcommand), "")) from None


HELP_ORDER = (
    *("train", "launch", "sweep", "eval", "report", "watch", "runs", "generate", "chat", "export"),
    *("plan", "doctor", "inspect", "prepare", "config", "fail-points"),
)
LOADING_MESSAGE = "Loading torch and transformers (a few seconds)"
NOTHING_KEPT = ". No incomplete files were kept; run the same command to start again."
GENERATED_KEPT = ". With --out, complete lines were kept; run the same command to continue."
INTERRUPT_HINTS = {"prepare": NOTHING_KEPT, "export": NOTHING_KEPT, "generate": GENERATED_KEPT}

app = typer.Typer(
    cls=CommandGroup,
    name="tandem",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train language models on preference pairs, with DPO and related losses, on packed sequences.",
)


def refuse_undecodable(argument: str) -> None:
    """Raise ConfigError if an argument is not UTF-8. Python replaces each such byte by a lone surrogate."""
    if (at := byte_that_is_not_utf8(argument)) is not None:
        raise ConfigError(
            f"{argument}: not UTF-8 at byte {at}, and tokenizers and many file formats take only UTF-8. Write this argument in "
            "UTF-8; if it names a file or folder, rename that."
        )


def expand_home_callback(path: str | None) -> str | None:
    """Expand ~ in the value of an option. Shells do not expand ~ in --option=~/path."""
    from tandem.config.sections.section import expand_home

    return None if path is None else expand_home(path)


ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config", "-c", metavar="FILE", callback=expand_home_callback, help="Read the configuration from FILE."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Set a key of the configuration, or reset it with ~KEY. `tandem config` lists the keys.",
    ),
]
AllowEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-env",
        metavar="NAME",
        help="Let the configuration file send environment variable NAME to trackers or the hub. Repeatable.",
    ),
]

FromFormat = Annotated[
    str | None,
    typer.Option(
        "--from-format",
        metavar="NAME",
        help="The trainer that the configuration was written for, if it is not recognised: nemo-rl, nemo-aligner, trl, "
        "llama-factory or axolotl.",
    ),
]

AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Let the configuration file name Python code to run (FILE.py:FUNCTION). Overrides on the command line always may.",
    ),
]


def with_option(overrides: list[str], option: str, key: str, value: str | int | None) -> list[str]:
    """Return `overrides` plus the override key=value. If `value` is None, return `overrides` unchanged.

    Raise ConfigError if `overrides` already sets `key`. `option`: the command-line option that gave the value, for the message.
    """
    if value is None:
        return overrides
    if given := next((one for one in overrides if key_of(one) == key), None):
        raise ConfigError(f"{option} {value} and {given} set the same key. Leave out one of them.")
    return [*overrides, override(key, value)]


def with_bar(what: str, reporter: "Reporter") -> Callable[[list[Path]], Iterator[Path]]:
    """Return a function that goes through paths and shows a progress bar meanwhile."""

    def each(paths: list[Path]) -> Iterator[Path]:
        with reporter.progress(what, len(paths)) as done:
            for path in paths:
                yield path
                done(1)

    return each


@contextmanager
def reported_once_per_machine() -> Iterator[None]:
    """Inside this context, let local rank 0 of each machine report an error that every rank raises. Other ranks exit silently."""
    try:
        yield
    except TandemError as error:
        raise error if os.environ.get("LOCAL_RANK", "0") == "0" else AlreadyReportedError(error.exit_code) from None


def _version(show: bool) -> None:
    if show:
        print(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass

"""The application that commands register with, and the options that several commands share."""

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tandem import __version__
from tandem.errors import ConfigError
from tandem.terminal.commands import key_of, override


class Interrupted(Exception):
    """Ctrl-C during a command, with a hint about the state it leaves."""


class CommandGroup(TyperGroup):
    """Turns Ctrl-C into Interrupted, so that `main` can print a message. Typer itself would exit silently."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return [name for name in HELP_ORDER if name in self.commands]

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted(INTERRUPT_HINTS.get(str(ctx.invoked_subcommand), "")) from None


HELP_ORDER = ("train", "eval", "inspect", "prepare", "config", "fail-points")
LOADING_MESSAGE = "Loading torch and transformers (a few seconds)"
INTERRUPT_HINTS = {"prepare": ". No incomplete files were kept; run the same command to start again."}

app = typer.Typer(
    cls=CommandGroup,
    name="tandem",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train language models on preference pairs, in exact packed batches that share prompts.",
)


def expand_home_callback(path: str | None) -> str | None:
    """Expand ~ in the value of an option, which shells do not do in --option=~/path."""
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
    typer.Argument(metavar="KEY=VALUE", help="Override the configuration: key=value, +key=value or ~key."),
]
AllowEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-env",
        metavar="NAME",
        help="Let a configuration file send this environment variable to trackers or the hub. Repeatable.",
    ),
]


def with_option(overrides: list[str], option: str, key: str, value: str | int | None) -> list[str]:
    """Add the override that an option is short for; refuse an option whose key is also overridden."""
    if value is None:
        return overrides
    if given := next((one for one in overrides if key_of(one) == key), None):
        raise ConfigError(f"{option} {value} and {given} set the same key. Leave out one of them.")
    return [*overrides, override(key, value)]


def is_distributed() -> bool:
    """Whether torchrun started several ranks, of which this process is one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


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

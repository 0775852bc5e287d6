"""The application that commands register with, and the options that several of them take."""

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tandem import __version__
from tandem.errors import ConfigError
from tandem.terminal.commands import key_of, override


class Interrupted(Exception):
    """Ctrl-C, and what it means for the command."""


class Commands(TyperGroup):
    """Typer ends without a word on Ctrl-C: so that a word is said, it gets to see something else."""

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return [name for name in IN_HELP if name in self.commands]

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted(LEFT_BEHIND.get(str(ctx.invoked_subcommand), "")) from None


IN_HELP = ("train", "inspect", "prepare", "config", "fail-points")
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


def in_home_folder(path: str | None) -> str | None:
    """A shell leaves ~ as it is in --option=~/path."""
    from tandem.config.sections.section import in_home

    return None if path is None else in_home(path)


ConfigFile = Annotated[
    str | None, typer.Option("--config", "-c", metavar="FILE", callback=in_home_folder, help="A YAML configuration.")
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


def with_option(overrides: list[str], option: str, key: str, value: str | int | None) -> list[str]:
    """Overrides, and the one that an option stands for."""
    if value is None:
        return overrides
    if given := next((one for one in overrides if key_of(one) == key), None):
        raise ConfigError(f"{option} {value} and {given} are the same setting. Leave out one.")
    return [*overrides, override(key, value)]


def among_several() -> bool:
    """Whether torchrun started other workers with this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


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

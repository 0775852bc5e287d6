"""`tandem inspect`: shows the tokens of one row of a data file."""

import re
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.app import AllowEnv, ConfigFile, Overrides, app, expand_home_callback, with_option
from tandem.errors import ConfigError


@app.command("inspect")
def inspect_row(
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", callback=expand_home_callback, help="A data file, a glob pattern, or embedded."),
    ],
    overrides: Overrides = None,
    row: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE:]N",
            callback=expand_home_callback,
            help="Line (or array element) to show, of FILE if there are several. Default: the first usable row.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Use its tokenizer and chat template. Same as policy.model_name=MODEL."),
    ] = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    positions: Annotated[bool, typer.Option("--positions", help="Also show position ids.")] = False,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", callback=expand_home_callback, help="Write an HTML page to FILE.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a preference as the model will see it.

    Lists its tokens, special tokens included, and marks the ones that are scored.
    """
    from tandem.config.load import load_config
    from tandem.config.sections.section import EMBEDDED

    named = re.compile(r"\+*data\.train(\.data_path=|=(?!\{)|=.*data_path)")
    if given := next((one for one in overrides or [] if named.match(one)), None):
        raise ConfigError(f"inspect {data} shows that file, so {given} has no effect. Leave it out.")
    if row is not None and not re.fullmatch(r"(.*:)?[1-9]\d*", row):
        raise ConfigError(f"--row {row}: not a row number. Count from 1; with several files, write FILE:N.")
    # The user's own data is shown under the usual limits, as `prepare` and `train` apply them, not the embedded default's.
    usual_limits = [] if data == EMBEDDED or config else [f"policy.model_name={EMBEDDED}"]
    changes = [*usual_limits, *with_option(overrides or [], "--model", "policy.model_name", model)]
    loaded = load_config(config, changes, allow_env or ())

    from tandem import inspect
    from tandem.terminal.console import SafeConsole

    inspect.do_without_torch()
    found = inspect.inspect_data(data, loaded.config, row)
    if html is not None:
        inspect.write_page(found, Path(html), positions=positions)
    if as_json:
        print(inspect.as_json(found))
    elif html is None:
        inspect.show(found, SafeConsole(), positions=positions)
    else:
        print(f"Wrote {found.place} to {html}")

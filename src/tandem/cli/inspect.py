"""`tandem inspect`: shows the tokens of one row of a data file."""

import re
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.app import (
    AllowCode,
    AllowEnv,
    ConfigFile,
    FromFormat,
    Overrides,
    app,
    expand_home_callback,
    with_option,
)
from tandem.errors import ConfigError


@app.command("inspect")
def inspect_row(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            callback=expand_home_callback,
            help="A data file, a glob pattern, or `embedded` for the bundled pairs.",
        ),
    ],
    overrides: Overrides = None,
    row: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE:]N",
            callback=expand_home_callback,
            help="Show row N, counted from 1; of FILE, if DATA is several files. Default: the first usable row.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Use the tokenizer and chat template of MODEL. Same as policy.model_name=MODEL."
        ),
    ] = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    allow_code: AllowCode = False,
    from_format: FromFormat = None,
    positions: Annotated[bool, typer.Option("--positions", help="Also show the position id of each token.")] = False,
    html: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", callback=expand_home_callback, help="Write an HTML page to FILE instead of printing."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show one row of a data file as the model will see it.

    Prints all tokens of the row, including special tokens, and marks the tokens that the loss scores.
    """
    from tandem.config.load import load_config
    from tandem.config.sections.section import EMBEDDED

    named = re.compile(r"\+*data\.train(\.data_path=|=(?!\{)|=.*data_path)")
    if given := next((one for one in overrides or [] if named.match(one)), None):
        raise ConfigError(f"inspect shows {data}, so {given} has no effect. Leave it out.")
    if row is not None and not re.fullmatch(r"(.*:)?[1-9]\d*", row):
        raise ConfigError(f"--row {row}: not a row number. Count from 1; with several files, write FILE:N.")
    # For the user's own data, apply the same length limits as `prepare` and `train`, not those of the embedded default.
    usual_limits = [] if data == EMBEDDED or config else [f"policy.model_name={EMBEDDED}"]
    changes = [*usual_limits, *with_option(overrides or [], "--model", "policy.model_name", model)]
    loaded = load_config(config, changes, allow_env or (), allow_code=allow_code, from_format=from_format)

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

"""`tandem inspect`: a row of data in, its tokens out."""

import re
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.app import AllowEnv, ConfigFile, Overrides, app, in_home_folder, with_option
from tandem.errors import ConfigError


@app.command("inspect")
def inspect_row(
    data: Annotated[
        str, typer.Argument(metavar="DATA", callback=in_home_folder, help="A data file, a pattern, or embedded.")
    ],
    overrides: Overrides = None,
    row: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE:]N",
            callback=in_home_folder,
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
        str | None, typer.Option(metavar="FILE", callback=in_home_folder, help="Write the same as a page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show a preference as the model will see it: tokens, special tokens, and which are scored."""
    from tandem.config.load import load_config
    from tandem.config.sections.section import EMBEDDED

    named = re.compile(r"\+*data\.train(\.data_path=|=(?!\{)|=.*data_path)")
    if given := next((one for one in overrides or [] if named.match(one)), None):
        raise ConfigError(f"inspect {data} shows that file, so that {given} has no say in it. Leave it out.")
    if row is not None and not re.fullmatch(r"(.*:)?[1-9]\d*", row):
        raise ConfigError(f"--row {row}: give the number of a row, from 1 on; of one file among several, FILE:N.")
    # Data of one's own is seen under the usual limits, as `prepare` and `train` see it, not under the embedded default's.
    usual = [] if data == EMBEDDED or config else [f"policy.model_name={EMBEDDED}"]
    changes = [*usual, *with_option(overrides or [], "--model", "policy.model_name", model)]
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
        print(f"{html}  {found.place} as a page")

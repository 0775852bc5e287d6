"""`tandem config`: prints the resolved configuration, or its JSON schema."""

from typing import Annotated

import typer

from tandem.cli.app import AllowCode, AllowEnv, ConfigFile, Overrides, app


@app.command("config")
def show_config(
    overrides: Overrides = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    allow_code: AllowCode = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of configuration files, for editors.")
    ] = False,
) -> None:
    """Print the complete configuration: every key with its value."""
    if schema:
        import json

        from tandem.config.schema import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    from tandem.config.load import load_config

    print(load_config(config, overrides or [], allow_env or (), allow_code=allow_code).as_yaml(), end="")

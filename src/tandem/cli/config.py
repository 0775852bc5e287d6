"""`tandem config`: prints the resolved configuration, its JSON schema, or the translation of another trainer's file."""

from typing import Annotated

import typer

from tandem.cli.app import AllowCode, AllowEnv, ConfigFile, FromFormat, Overrides, app, expand_home_callback
from tandem.errors import ConfigError


@app.command("config")
def show_config(
    overrides: Overrides = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    allow_code: AllowCode = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            callback=expand_home_callback,
            help="Translate another trainer's configuration, and print the keys that it sets.",
        ),
    ] = None,
    from_format: FromFormat = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With --from, show how every key was translated.")
    ] = False,
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

    if source is not None and config is not None:
        raise ConfigError("--from and --config both name a configuration file. Leave out one of them.")
    given = {"allow_code": allow_code, "from_format": from_format}
    loaded = load_config(source or config, overrides or [], allow_env or (), **given)
    if loaded.translation is not None:
        from tandem.report.reporter import Reporter
        from tandem.report.translation import say_translation

        say_translation(loaded.translation, loaded.file, Reporter("normal", as_json=True), all_keys=verbose)
    if source is None:
        print(loaded.as_yaml(), end="")
    elif loaded.translation is None:
        raise ConfigError(
            f"{source}: not recognised as the configuration of another trainer. If it is one, name it with --from-format; "
            "tandem's own files are read by --config."
        )
    else:
        from tandem.config.source.yaml_text import to_yaml

        print(to_yaml(loaded.translation.tree), end="")

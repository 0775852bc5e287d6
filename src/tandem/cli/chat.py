"""`tandem chat`: a conversation with a model, or with two at a time."""

import sys
from typing import Annotated

import typer

from tandem.cli.app import LOADING_MESSAGE, app
from tandem.cli.generate import (
    ApiKeyEnv,
    BaseUrl,
    ChatTemplate,
    Compare,
    MaxNewTokens,
    Model,
    Seed,
    Temperature,
    Timeout,
    TopP,
    write_at_once,
)
from tandem.errors import ConfigError


@app.command("chat")
def chat(
    model: Model,
    compare: Compare = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = None,
    engine: Annotated[str, typer.Option(metavar="NAME", help="transformers or http.")] = "transformers",
    chat_template: ChatTemplate = None,
    base_url: BaseUrl = None,
    api_key_env: ApiKeyEnv = None,
    timeout: Timeout = 300.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only answers and errors.")] = False,
) -> None:
    """Talk to a model. Reads one turn per line, also from a pipe; /help lists the commands."""
    from tandem.generation.chat import Chat, read_lines, refuse_vllm, speakers
    from tandem.generation.generate import export_checkpoints, name_models
    from tandem.generation.records import EngineSettings, make_sampling

    if sys.stdin is None:
        raise ConfigError(
            "standard input is closed, so no line can be read. Start the chat on a terminal, or pipe lines in."
        )
    sampling = make_sampling(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed)
    settings = EngineSettings(
        name=engine,  # type: ignore[arg-type]
        chat_template=chat_template,
        base_url=base_url,
        api_key_env=api_key_env,
        timeout_seconds=timeout,
    )
    refuse_vllm(settings)
    models = name_models(model, compare, settings)

    from tandem.terminal.console import SafeConsole

    if not quiet and engine != "http":
        print(LOADING_MESSAGE, file=sys.stderr)
    export_checkpoints(models, lambda text: None if quiet else print(text, file=sys.stderr))
    with speakers(models, sampling, settings) as loaded:
        for one in loaded:
            if notice := one.ready.cut_notice(sampling):
                print(f"warning: {notice}", file=sys.stderr)
        if not quiet:
            how = "greedy" if sampling.is_greedy else f"temperature {sampling.temperature:g}"
            names = " and ".join(one.name for one in models)
            print(f"{names}, {how}, up to {max_new_tokens} tokens. /help lists commands.", file=sys.stderr)
        talk = Chat(loaded, SafeConsole(), write_at_once, lambda text: print(text, end="", file=sys.stderr, flush=True))
        for line in read_lines(sys.stdin):
            if not talk.handle(line):
                break
    # On a terminal the user saw the error and continued.
    if talk.exit_code and not sys.stdin.isatty():
        raise typer.Exit(talk.exit_code)

"""`tandem generate`: completions of prompts, by one model or two."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.app import LOADING_MESSAGE, app, expand_home_callback
from tandem.errors import ConfigError
from tandem.terminal.printable import counted

if TYPE_CHECKING:
    from tandem.generation.generate import Generation, Named
    from tandem.generation.records import EngineSettings, Prompt, Sampling

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN",
        callback=expand_home_callback,
        help="A model folder, a hub name, embedded, a run (its exported model) or a checkpoint. With http: a name there.",
    ),
]
Compare = Annotated[
    str | None,
    typer.Option(
        metavar="BASE", callback=expand_home_callback, help="Also ask this model, and show both side by side."
    ),
]
Temperature = Annotated[float | None, typer.Option(metavar="T", help="Sample with this temperature. Default: greedy.")]
TopP = Annotated[float | None, typer.Option(metavar="P", help="Sample from the most probable tokens up to this share.")]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Longest completion, in tokens.")]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Seed of sampling. Default: 0.")]
EngineOption = Annotated[str, typer.Option(metavar="NAME", help="transformers, vllm or http.")]
ChatTemplate = Annotated[
    str | None,
    typer.Option(metavar="FILE", callback=expand_home_callback, help="A .jinja file, or none for plain text."),
]
BaseUrl = Annotated[str | None, typer.Option(metavar="URL", help="http: the server, such as http://localhost:8000/v1.")]
ApiKeyEnv = Annotated[str | None, typer.Option(metavar="NAME", help="http: environment variable that holds the key.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="http: longest wait for an answer.")]


Prompts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        callback=expand_home_callback,
        help="Rows with prompt or messages (JSONL, CSV, Parquet), preference data, a .txt of prompts, or embedded.",
    ),
]
OnePrompt = Annotated[str | None, typer.Option(metavar="TEXT", help="A single prompt.")]
Samples = Annotated[int, typer.Option("--samples", "-n", metavar="K", help="Completions per prompt.")]
BatchSize = Annotated[str, typer.Option(metavar="N", help="Sequences at a time, or auto.")]
BatchingOption = Annotated[str, typer.Option(metavar="HOW", help="auto, padded or continuous.")]
VllmPython = Annotated[
    str | None,
    typer.Option(metavar="PATH", callback=expand_home_callback, help="vllm: the Python interpreter that has vLLM."),
]
Endpoint = Annotated[str, typer.Option(metavar="NAME", help="http: chat or completions.")]
Concurrency = Annotated[int, typer.Option(metavar="N", help="http: requests at a time.")]
TokenIds = Annotated[bool, typer.Option("--token-ids", help="http: ask for token ids (vLLM servers).")]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        callback=expand_home_callback,
        help="Write JSON lines to FILE (.jsonl), or continue an incomplete one.",
    ),
]
OwnFormat = Annotated[
    bool,
    typer.Option("--allow-code", help="Read --prompts with the run's own format (FILE.py:FUNCTION) if no other fits."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines as in --out; with --out, print a summary.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only completions, warnings and errors.")]


@app.command("generate")
def generate_completions(
    model: Model,
    prompts: Prompts = None,
    prompt: OnePrompt = None,
    compare: Compare = None,
    samples: Samples = 1,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_new_tokens: MaxNewTokens = 256,
    seed: Seed = None,
    engine: EngineOption = "transformers",
    batch_size: BatchSize = "auto",
    batching: BatchingOption = "auto",
    chat_template: ChatTemplate = None,
    vllm_python: VllmPython = None,
    base_url: BaseUrl = None,
    endpoint: Endpoint = "chat",
    api_key_env: ApiKeyEnv = None,
    timeout: Timeout = 300.0,
    concurrency: Concurrency = 8,
    token_ids: TokenIds = False,
    out: Out = None,
    allow_code: OwnFormat = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Generate completions of prompts, greedily or sampled."""
    from tandem.generation.paths import check_out, check_template

    if (prompts is None) == (prompt is None):
        raise ConfigError("Give either --prompts FILE or --prompt TEXT.")
    if out is not None:
        check_out(Path(out))
    if chat_template is not None:
        check_template(chat_template)

    from tandem.generation.generate import name_models
    from tandem.generation.records import EngineSettings, make_sampling

    sampling = make_sampling(
        num_samples=samples, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed
    )
    settings = EngineSettings(
        name=engine,  # type: ignore[arg-type]
        batch_size=parse_batch_size(batch_size),
        batching=batching,  # type: ignore[arg-type]
        chat_template=chat_template,
        vllm_python=vllm_python,
        base_url=base_url,
        endpoint=endpoint,  # type: ignore[arg-type]
        api_key_env=api_key_env,
        timeout_seconds=timeout,
        concurrency=concurrency,
        token_ids=token_ids,
    )
    models = name_models(model, compare, settings)
    options = {"prompts": prompts, "prompt": prompt, "out": out, "allow_code": allow_code}
    _generate(models, sampling, settings, **options, as_json=as_json, quiet=quiet)


def _generate(
    models: "Sequence[Named]",
    sampling: "Sampling",
    settings: "EngineSettings",
    *,
    prompts: str | None,
    prompt: str | None,
    out: str | None,
    allow_code: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Read the prompts, generate, and print or write the completions."""
    from tandem.generation.generate import export_checkpoints, generate_prompts, own_formats
    from tandem.generation.prompts import one_prompt, prompts_from

    if prompt is not None:
        found, num_skipped = one_prompt(prompt), 0
    else:
        found, num_skipped = prompts_from(prompts or "", own_formats(models, allow_code=allow_code))

    from tandem.report.reporter import Reporter

    # Messages and the progress bar go to standard error, so that standard output holds only completions.
    reporter = Reporter("quiet" if quiet else "normal", as_json=True)
    if num_skipped:
        reporter.warn(f"{counted(num_skipped, 'row')} of {prompts} without a usable prompt: skipped.")
    if settings.name != "http":
        reporter.say(LOADING_MESSAGE)
    export_checkpoints(models, reporter.say)
    streams = prompt is not None and len(models) == 1 and sampling.num_samples == 1 and out is None and not as_json
    generation = generate_prompts(
        models,
        found,
        sampling,
        settings,
        out=out,
        progress=reporter.progress,
        write=write_at_once if streams else None,
        warn=reporter.warn,
        num_skipped=num_skipped,
    )
    _show(generation, found, sampling.num_samples, as_json=as_json, quiet=quiet, streamed=streams)


def _show(
    generation: "Generation", prompts: "Sequence[Prompt]", samples: int, *, as_json: bool, quiet: bool, streamed: bool
) -> None:
    from tandem.generation import show
    from tandem.generation.output import as_line
    from tandem.terminal.console import SafeConsole

    if as_json and generation.out is not None:
        print(json.dumps(show.as_json(generation)))
    elif as_json:
        for record in generation.records:
            print(as_line(record))
    elif streamed:
        [one] = generation.records[0]["completions"]
        write_at_once("\n" if quiet else f"{show.streamed_end(one['completion'], one['finish'])}\n")
    elif generation.out is not None:
        if not quiet:
            print(show.summary(generation, samples))
    else:
        show.show_records(generation, prompts, SafeConsole())


def write_at_once(text: str) -> None:
    """Print a piece of text without a newline."""
    sys.stdout.write(text)
    sys.stdout.flush()


def parse_batch_size(given: str) -> int | None:
    if given == "auto":
        return None
    try:
        return int(given)
    except ValueError:
        raise ConfigError(f"--batch-size {given}: give auto or a number of sequences from 1.") from None

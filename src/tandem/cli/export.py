"""`tandem export`: exports a checkpoint of a run as a model folder, measures it, and uploads it if asked to."""

from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.app import LOADING_MESSAGE, AllowCode, AllowEnv, app, expand_home_callback
from tandem.errors import ConfigError
from tandem.rank_variables import is_distributed

if TYPE_CHECKING:
    from tandem.exporting.checkpoint import Exported
    from tandem.report.reporter import Reporter


@app.command()
def export(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT", callback=expand_home_callback, help="A run, or one of its checkpoints."
        ),
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="best|latest|step_N", help="Which checkpoint of RUN. Default: its export.checkpoint (latest)."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="auto, float32, bfloat16 or float16. Default: export.dtype of the run."),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Export the LoRA adapters alone.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Merge the LoRA adapters into the model.")] = False,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", callback=expand_home_callback, help="Write to DIR. Default: RUN/exports/step_N."),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest weight file. Default: export.max_shard_size (5GB).")
    ] = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Do not measure the export on the run's validation sets.")
    ] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="Also write a GGUF file, with llama.cpp's converter.")] = False,
    llama_cpp: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            callback=expand_home_callback,
            help="A checkout of llama.cpp. Default: LLAMA_CPP, or the PATH.",
        ),
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPO", help="Upload the export to OWNER/NAME on the Hugging Face hub.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the export, and list what would be uploaded; upload nothing.")
    ] = False,
    allow_env: AllowEnv = None,
    allow_code: AllowCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings, errors and the result.")] = False,
) -> None:
    """Export a checkpoint of a run as a model folder.

    The folder loads in transformers and vLLM, is measured on the run's validation sets, and has a model card.
    """
    from tandem.exporting.request import request_export
    from tandem.report.reporter import Reporter

    if adapter and merged:
        raise ConfigError("--adapter and --merged exclude each other. Leave out one of them.")
    if is_distributed():
        raise ConfigError("tandem export works in one process. Start it without torchrun.")
    request = request_export(
        run,
        checkpoint=checkpoint,
        dtype=dtype,
        form="adapter" if adapter else "merged" if merged else None,
        out=out,
        max_shard_size=max_shard_size,
        measured=not no_measure,
        gguf=gguf,
        llama_cpp=llama_cpp,
        push_to_hub=push_to_hub,
        dry_run=dry_run,
        allow_env=allow_env or (),
        allow_code=allow_code,
    )
    reporter = Reporter("quiet" if quiet or as_json else "normal")
    reporter.say(LOADING_MESSAGE)

    from tandem.exporting.checkpoint import run_export

    done = run_export(request, reporter)
    if as_json:
        print(done.as_json())
    else:
        _show(done, reporter)


def _show(done: "Exported", reporter: "Reporter") -> None:
    from tandem.report.reporter import Reporter

    reporter.end(f"{done.folder}  the aligned {done.form} ({done.dtype}): step {done.step}")
    if done.gguf is not None:
        reporter.say(f"{done.gguf}  the same model for llama.cpp")
    if done.upload is not None:
        if done.upload.address is None:  # the list is the result, which is printed with --quiet too
            reporter = Reporter("normal")
        is_done = done.upload.address is not None
        where = done.upload.address or f"{done.upload.repository}, without --dry-run"
        reporter.say(f"{'Uploaded to' if is_done else 'Would be uploaded to'} {where}")
        reporter.table(["file", "bytes"], [[name, f"{size:,}"] for name, size in done.upload.files.items()])

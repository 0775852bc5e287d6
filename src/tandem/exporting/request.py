"""Checks the options of an export and finds the checkpoint to export. This module does not import torch."""

import json
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tandem.config.load import LoadedConfig, load_config
from tandem.config.schema import Config, Export, canonical_size
from tandem.config.sections.section import expand_home
from tandem.config.validation import dtype_meant
from tandem.errors import CheckpointError, ConfigError
from tandem.exporting.gguf import find_converter
from tandem.exporting.hub import check_repository
from tandem.storage.cache import is_checkpoint, is_export, is_run, read_json, real_path, sha256_of
from tandem.storage.ownership import lock_holder, step_in
from tandem.terminal.arguments import option
from tandem.terminal.commands import resume_call
from tandem.terminal.printable import listed
from tandem.training.run.directory import checkpoint_dir, is_finished, refuse_links
from tandem.training.run.other_folders import hint_of_run, what_runs_it_holds, why_not_a_run

RECORD = "tandem_export.json"  # says which checkpoint an export was made from, with which settings
GIVE_A_RUN = "Give the directory of a run, or one of its checkpoints."
Form = Literal["adapter", "merged"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of a run. Its path ends in step_N; the links best and latest are already resolved."""

    place: Path
    step: int
    run: Path | None  # None if the checkpoint is not in a run's directory


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """The options of an export, checked as far as possible before weights load."""

    checkpoint: Checkpoint
    loaded: LoadedConfig
    config: Config  # with the options of the export applied
    folder: Path
    made_of: dict[str, str]  # identifies the export: its checkpoint and its form
    is_written: bool  # the folder holds this export already
    measured: bool
    converter: Path | None  # llama.cpp's, for GGUF
    repository: str | None  # on the hub
    dry_run: bool


def request_export(
    run: str | Path,
    *,
    checkpoint: str | None = None,
    dtype: str | None = None,
    form: Form | None = None,
    out: str | Path | None = None,
    max_shard_size: str | None = None,
    measured: bool = True,
    gguf: bool = False,
    llama_cpp: str | Path | None = None,
    push_to_hub: str | None = None,
    dry_run: bool = False,
    allow_env: Collection[str] = (),
    allow_code: bool = False,
) -> ExportRequest:
    """Find the checkpoint and its configuration, and check the options. `tandem export --help` explains the options."""
    if dry_run and push_to_hub is None:
        raise ConfigError(
            f"{option('dry_run')} lists what {option('push_to_hub')} would upload. Add "
            f"{option('push_to_hub', metavar='REPO')}, or leave out {option('dry_run')}."
        )
    if llama_cpp is not None and not gguf:
        raise ConfigError(
            f"{option('llama_cpp', llama_cpp)} has no effect without {option('gguf')}. Add "
            f"{option('gguf', True)}, or leave it out."
        )
    given = Path(expand_home(str(run)))
    # Only a measured export reads data.
    loaded = load_config(str(_config_file(given)), [], allow_env, allow_code=allow_code, needs_formats=measured)
    found = _find(given, checkpoint or None, loaded.config)
    config = _with_options(loaded.config, dtype, form, max_shard_size, found)
    if gguf and config.policy.lora.enabled and not config.export.merge_lora:
        raise ConfigError(
            f"{option('gguf')} converts a complete model, not adapters alone. Add {option('form', 'merged')}."
        )
    converter = find_converter(llama_cpp) if gguf else None
    if push_to_hub is not None:
        check_repository(push_to_hub, dry_run=dry_run)
    folder = Path(expand_home(str(out))) if out is not None else _default_folder(found, dtype, form)
    made_of = _made_of(found, config.export)
    return ExportRequest(
        checkpoint=found,
        loaded=loaded,
        config=config,
        folder=folder,
        made_of=made_of,
        is_written=_is_written(folder, made_of, found.step),
        measured=measured,
        converter=converter,
        repository=push_to_hub,
        dry_run=dry_run,
    )


def read_record(folder: Path) -> dict[str, Any]:
    """Return the contents of tandem_export.json in an export folder. If the file is missing or damaged, return an empty dict."""
    try:
        found = read_json(folder / RECORD)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _config_file(given: Path) -> Path:
    """Return the path of the run's config.yaml. For a checkpoint outside of a run, return the copy in the checkpoint."""
    if not given.exists():
        raise ConfigError(f"{given}: there is no such directory. {GIVE_A_RUN}")
    if not given.is_dir():
        raise ConfigError(f"{given}: a file, not a directory. {GIVE_A_RUN}")
    if is_checkpoint(given):
        run = _run_of(real_path(given))
        return (run or given) / "config.yaml"
    refuse_links(given)
    if (given / "config.yaml").is_file():
        return given / "config.yaml"
    # What is said of a folder that holds runs names one of them.
    hint = hint_of_run(given) or ("" if what_runs_it_holds(given) else f" {GIVE_A_RUN}")
    raise ConfigError(f"{given}: {why_not_a_run(given)}.{hint}")


def _run_of(place: Path) -> Path | None:
    """Return the run directory that contains a checkpoint; None if the checkpoint is not in a run directory."""
    run = place.parent.parent
    return run if place.parent.name == "checkpoints" and (run / "config.yaml").is_file() else None


def _find(given: Path, checkpoint: str | None, config: Config) -> Checkpoint:
    if is_checkpoint(given):
        if checkpoint is not None:
            raise ConfigError(
                f"{option('checkpoint', checkpoint)}: {given} is a checkpoint itself. Leave out {option('checkpoint')}."
            )
        place = real_path(given)
        step = step_in(place.name)
        if step is None:
            raise CheckpointError(f"{given}: a checkpoint, but its folder is not named step_N. Restore its name.")
        named = given.with_name(place.name) if given.parent.resolve() == place.parent else place
        return Checkpoint(named, step, _run_of(named) or _run_of(place))
    folder = checkpoint_dir(config, given)
    steps = sorted(step for path in folder.glob("step_*") if (step := step_in(path.name)) is not None and path.is_dir())
    if not steps:
        raise CheckpointError(
            f"{given}: no checkpoints in {folder}, so there is nothing to export.{_why_none(given, config)}"
        )
    asked = checkpoint or config.export.checkpoint
    step = _step(asked, folder, steps)
    if step not in steps:
        has = ", ".join(f"step_{one}" for one in steps)
        raise CheckpointError(
            f"{option('checkpoint', asked)}: {folder} has no such checkpoint{_why_removed(step, steps, config)}. Use best, "
            f"latest, or one of these: {has}."
        )
    return Checkpoint(folder / f"step_{step}", step, given)


def _why_removed(step: int | None, steps: list[int], config: Config) -> str:
    """Return text that says why the checkpoint of an earlier step is gone. Empty if the settings of the run do not say why."""
    given = config.checkpointing
    was_due = isinstance(given.save_period, float) or (step is not None and step % given.save_period == 0)
    if step is None or not 0 < step < steps[-1] or not was_due or len(steps) < given.keep_top_k:
        return ""
    best = "best" if given.keep_top_k == 1 else f"{given.keep_top_k} best"
    return f". The run keeps the latest and the {best} (checkpointing.keep_top_k={given.keep_top_k}), and removes the others"


def _why_none(run: Path, config: Config) -> str:
    """Return text that says why a run has no checkpoints, and where its model is or how to train it."""
    why = " It was trained with checkpointing.enabled=false." if not config.checkpointing.enabled else ""
    if is_finished(run):
        return f"{why} The model that it exported is in {run / 'model'}."
    if why:
        return why
    process = lock_holder(run)
    return (
        f" Train it first: {resume_call(str(run))}"
        if process is None
        else f" It is being trained by process {process}."
    )


def _step(asked: str, folder: Path, steps: list[int]) -> int | None:
    """Return the step that `best`, `latest` or `step_N` means. Without a link, `latest` means the newest step."""
    if asked not in ("best", "latest"):
        return step_in(asked)
    link = folder / asked
    if link.is_symlink():
        return step_in(str(link.readlink()))
    return steps[-1] if asked == "latest" else None


def _with_options(
    config: Config, dtype: str | None, form: Form | None, max_shard_size: str | None, found: Checkpoint
) -> Config:
    if form is not None and not config.policy.lora.enabled:
        use = "export" if form == "adapter" else "merge"
        raise ConfigError(
            f"{option('form', form)}: {found.run or found.place} trained all weights, so there are no adapters to {use}. "
            f"Leave out {option('form', form)}."
        )
    dtypes = get_args(Export.model_fields["dtype"].annotation)
    if dtype is not None and dtype not in dtypes:
        hint = f" Did you mean {meant}?" if (meant := dtype_meant(dtype)) else ""
        raise ConfigError(
            f"{option('dtype', dtype)}: not a data type of an export.{hint} Use one of {', '.join(dtypes)}."
        )
    pattern = Export.model_json_schema()["properties"]["max_shard_size"]["pattern"]
    if max_shard_size is not None and not re.fullmatch(pattern, max_shard_size):
        raise ConfigError(f"{option('max_shard_size', max_shard_size)}: not a size. Write 5GB or 500MB, for example.")
    size = None if max_shard_size is None else canonical_size(max_shard_size)
    changes: dict[str, Any] = {"max_shard_size": size, "dtype": dtype}
    changes["merge_lora"] = None if form is None else form == "merged"
    export = config.export.model_copy(update={key: value for key, value in changes.items() if value is not None})
    return config.model_copy(update={"export": export})


def _default_folder(found: Checkpoint, dtype: str | None, form: Form | None) -> Path:
    if found.run is None:
        raise ConfigError(
            f"{found.place}: not in the directory of a run, so the export has no default folder. Add "
            f"{option('out', metavar='DIR')}."
        )
    ending = "".join(f"-{one}" for one in (form, dtype) if one is not None and one != "auto")
    return found.run / "exports" / f"step_{found.step}{ending}"


def _made_of(found: Checkpoint, export: Export) -> dict[str, str]:
    manifest = found.place / "manifest.json"
    digest = sha256_of(manifest) if manifest.is_file() else ""
    settings = export.model_dump(exclude={"checkpoint"})
    return {"checkpoint": digest, **{name: str(value) for name, value in settings.items()}}


def _is_written(folder: Path, made_of: dict[str, str], step: int) -> bool:
    """Return whether a folder already contains this export, of `step`. Raise ConfigError if it contains anything else."""
    if folder.is_symlink() or not os.path.lexists(folder):
        if folder.is_symlink():
            raise ConfigError(f"{option('out', folder)}: a symbolic link. Give the folder itself, or another one.")
        return False
    if not folder.is_dir():
        raise ConfigError(f"{option('out', folder)}: a file, not a folder. Choose another {option('out')}.")
    if not any(folder.iterdir()):
        return False
    record = read_record(folder)
    if record.get("made_of") == made_of and is_export(folder):
        return True
    if "step" not in record:
        what = "a run" if is_run(folder) else "not empty"
        raise ConfigError(
            f"{option('out', folder)}: {what}, and tandem does not overwrite it. Choose a folder that does not exist yet."
        )
    another = folder.with_name(f"{folder.name}-step_{step}")
    choose = "Choose another folder" if os.path.lexists(another) else f"Choose another folder, such as {another}"
    raise ConfigError(
        f"{option('out', folder)}: {_what_differs(record, made_of, step)}, and tandem does not overwrite it. {choose}, or "
        "delete this one."
    )


def _what_differs(record: dict[str, Any], made_of: dict[str, str], step: int) -> str:
    """Return how the export in a folder, described by its tandem_export.json, differs from the one that is asked for."""
    if record["step"] != step:
        return f"it holds the export of step {record['step']}, and this is the export of step {step}"
    then = record.get("made_of")
    if not isinstance(then, dict) or then.get("checkpoint") != made_of["checkpoint"]:
        return f"it holds the export of step {step} of another run"
    changes = listed(f"{key} {then.get(key)}, now {now}" for key, now in made_of.items() if then.get(key) != now)
    return f"it holds an export of this step, {step}, in another form ({changes or 'incomplete'})"


def record_text(request: ExportRequest, step: int, **facts: Any) -> str:
    """Return the text of tandem_export.json: what the export was made from, the step and `facts`. The text contains no paths."""
    return json.dumps({"made_of": request.made_of, "step": step, **facts}, indent=1) + "\n"

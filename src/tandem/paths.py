"""Checks every path in a configuration before heavy modules are imported, so that a wrong path is reported at once."""

from collections.abc import Mapping
from pathlib import Path

from tandem.config.load import LoadedConfig
from tandem.config.schema import Config
from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.section import EMBEDDED
from tandem.data.read.files import find_files
from tandem.data.read.hub import is_hub_name
from tandem.errors import CheckpointError, ConfigError, DataError
from tandem.model.files.source import check_path, refuse_missing, refuse_revision
from tandem.storage.cache import is_checkpoint
from tandem.training.run.directory import choose_run_dir, is_finished, refuse_links
from tandem.training.run.other_folders import run_around, why_not_a_run


def check_run(loaded: LoadedConfig, *, fresh: bool, per_pair: Path | None) -> None:
    """Raise an error if a path of a run is wrong. `per_pair`: the file to which results per pair are written, or None.

    If the run is finished and `per_pair` is None, the model and the data are not needed, and their paths are not checked.
    """
    if per_pair is not None:
        from tandem.report.per_pair import check_per_pair

        check_per_pair(per_pair)
    if per_pair is not None or not is_finished(choose_run_dir(loaded, fresh=fresh)):
        check_paths(loaded.config)


def check_resumed(run: Path) -> None:
    """Raise a CheckpointError if the directory given to --resume is not a run, and a ConfigError if it does not exist."""
    if is_checkpoint(run):
        raise CheckpointError(
            f"--resume {run}: a checkpoint, not a run. Give the run directory, and it resumes from its newest intact checkpoint: "
            f"--resume {run_around(run) or run.resolve().parent.parent}"
        )
    refuse_links(run)
    if not run.exists() and not (run.parent / "config.yaml").is_file():
        raise ConfigError(f"--resume {run}: there is no such directory.")
    if not (run / "config.yaml").is_file():
        inside = (run.resolve().parent / "config.yaml").is_file()
        hint = f" Did you mean --resume {run.parent}?" if inside else ""
        what = why_not_a_run(run) if run.exists() else "there is no such directory"
        raise CheckpointError(f"--resume {run}: {what}.{hint}")


def check_paths(config: Config) -> None:
    """Raise an error if a model or a data file of the configuration does not exist."""
    check_models(config)
    training, validation = config.data.training_sets, config.data.validation_sets
    names = ["train"] if len(training) == 1 else [f"train-{i}" for i in range(len(training))]
    check_data(
        dict(zip(names, training, strict=True)) | {f"validation-{name}": one for name, one in validation.items()}
    )


def check_models(config: Config) -> None:
    refuse_revision(config.policy)
    check_path("policy.model_name", config.policy.model_name, config.policy.revision)
    if config.reference.model is not None:
        check_path("reference.model", config.reference.model)
    for key, name in (
        ("policy.tokenizer.name", config.policy.tokenizer.name),
        ("policy.lora.adapter", config.policy.lora.adapter),
    ):
        if name is not None and not Path(name).exists() and not name.endswith(".model"):
            refuse_missing(key, name)


def check_data(sets: Mapping[str, DatasetFields]) -> None:
    """Raise one DataError that lists every set whose files are missing."""
    problems: dict[str, DataError] = {}
    for name, one in sets.items():
        path = one.data_path
        if path is None or path == EMBEDDED or is_hub_name(path) or (Path(path) / "manifest.json").is_file():
            continue  # a format with a default path, the embedded data, a hub dataset or a prepared folder: checked later
        try:
            find_files(path, one)
        except DataError as error:
            problems[name] = error
    if problems:
        lines = [f"{name}: {problem}" for name, problem in problems.items()]
        raise DataError("\n\n".join(lines) if len(lines) > 1 else str(next(iter(problems.values()))))


def check_output(option: str, folder: Path | None) -> None:
    """Raise a ConfigError if an output folder is not empty or cannot be created. A missing folder is created."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        has_files = any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{option} {folder}: {error.strerror}. Choose another folder.") from None
    if has_files:
        raise ConfigError(f"{option} {folder}: not empty. Choose another folder, or empty this one.")

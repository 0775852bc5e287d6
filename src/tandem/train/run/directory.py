"""Which directory a run has: a new one, or one to go on with. One process at a time may hold it."""

import fcntl
import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml
from pydantic import ValidationError

from tandem.config.load import LoadedConfig
from tandem.config.schema import Config
from tandem.config.yaml_text import YamlLimitError, read_yaml_text
from tandem.errors import CheckpointError, ConfigError
from tandem.storage.cache import fingerprint, is_export
from tandem.storage.ownership import open_own, refuse_other_than_file, refuse_other_than_folder
from tandem.terminal.commands import override, tandem_command

# What a run writes in its directory, beside its checkpoints.
FILES = (
    *("config.yaml", "lock", "metrics.jsonl", "rejects.jsonl", "references.json", "trackers.json", "verdicts.json"),
    *("logs/gpu.jsonl", "logs/mlflow.db", "logs/trackers.log", "samples/step_*.jsonl"),
)
FOLDERS = ("checkpoints", "logs", "model", "samples")
# What their temporary files become, as regular expressions.
TEMPORARY_NAMES = (
    *(re.escape(name) for name in FILES if "/" not in name),
    *(r"metrics\.step_[0-9]+(\.[0-9]+)?\.jsonl", "model"),
)
# Keys that do not change what is learned up to a step: they may differ when a run goes on.
MAY_CHANGE = (
    "run.name",
    "run.dir",
    "run.deterministic",
    "dpo.max_num_steps",
    "dpo.max_num_epochs",
    "dpo.early_stopping_patience",
    "dpo.val_",
    "data.validation",
    "data.num_workers",
    "data.val_data_paths",
    "data.on_bad_row",  # what is read is known by its content
    "data.max_bad_share",
    "data.max_filtered_share",
    "policy.activation_checkpointing",
    "policy.attention",
    "policy.compile",
    "policy.head_chunk_tokens",
    "policy.packing.packs_per_micro_batch",
    "reference.mode",
    "checkpointing.",
    "export.",
    "logger.",
)
# But not where the schedule is a share of the run: the steps so far followed one of another length.
LENGTH = ("dpo.max_num_steps", "dpo.max_num_epochs")
# Models and data, which are compared by their content.
KNOWN_BY_CONTENT = (
    "data.train",
    "data.default",
    "policy.model_name",
    "policy.lora.adapter",
    "policy.tokenizer.name",
    "policy.tokenizer.chat_template",
    "reference.model",
    "reference.cache_dir",
)
# The same where each batch is packed by itself: rows then decide nothing but speed.
MAY_CHANGE_BY_BATCH = ("policy.packing.pack_length", "policy.packing.share_prompts", "policy.packing.algorithm")


def choose_run_dir(loaded: LoadedConfig, *, fresh: bool) -> Path:
    """The run's directory: as given, or the newest unfinished one of the same configuration, or the next free number.

    checkpointing.checkpoint_dir, given alone, is the run's directory.
    """
    config = loaded.config
    key = "run.dir" if config.run.dir is not None else "checkpointing.checkpoint_dir"
    named = config.run.dir if config.run.dir is not None else config.checkpointing.checkpoint_dir
    if named is not None and Path(named).is_file():
        raise ConfigError(f"{key} = {named}: a file, not a directory. Choose another {key}.")
    if named is not None and not fresh:
        given = Path(named)
        refuse_links(given)
        if (given / "config.yaml").is_file():
            refuse_other_than_export(given)
            refuse_other_config(given, loaded)
        elif given.is_dir() and any(path.name != "lock" and not path.name.startswith(".") for path in given.iterdir()):
            raise ConfigError(f"{key} = {given}: not empty, and {no_run(given)}. Choose another directory.")
        return given
    parent, stem = (Path(named).parent, Path(named).name) if named else (Path("runs"), config.run.name)
    numbers = _numbers(parent, stem)
    now = _config_now(loaded)
    for run in () if fresh else (parent / f"{stem}-{number}" for number in numbers):
        if not is_finished(run) and _stored_config(run) == now:
            refuse_links(run)
            refuse_other_than_export(run)
            return run
    return parent / f"{stem}-{numbers[0] + 1 if numbers else 1}"


def earlier_run(run: Path, loaded: LoadedConfig) -> tuple[str, str] | None:
    """Of a new run's predecessor that this configuration could resume or extend: what it is, and the command that does it."""
    if loaded.config.run.dir is not None:
        return None
    stem, _, number = run.name.rpartition("-")
    elder = run.with_name(f"{stem}-{int(number) - 1}") if _is_number(number) else run
    stored = _stored_config(elder) if elder != run else None
    if stored is None or _differences(stored, loaded):
        return None
    old, new = _flat(stored), _flat(_config_now(loaded))
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    changed = [override(key, new.get(key)) for key in keys]
    how = tandem_command("train", "--resume", str(elder), *loaded.options, *changed)
    if not is_finished(elder):
        return (
            f"{elder} is unfinished and differs in {', '.join(changed)} alone, which changes nothing that is learned. To resume "
            "it:",
            how,
        )
    longer = [key in LENGTH and _is_greater(new.get(key), old.get(key)) for key in keys]
    return (
        (f"{elder} is finished and shorter, and the same but for that. To extend it:", how)
        if keys and all(longer)
        else None
    )


def _is_greater(new: int | None, old: int | None) -> bool:
    """Of limits, of which null is none."""
    return old is not None and (new is None or new > old)


def _numbers(parent: Path, stem: str) -> list[int]:
    """Of the directories stem-1, stem-2, ..., the newest first."""
    numbers = [path.name[len(stem) + 1 :] for path in parent.glob(f"{glob.escape(stem)}-*")]
    return sorted((int(number) for number in numbers if _is_number(number)), reverse=True)


def _is_number(text: str) -> bool:
    """Of the digits 0 to 9: others, as in tandem-², are digits to Python and not numbers."""
    return text.isascii() and text.isdigit()


def refuse_links(run: Path) -> None:
    """Refuse a run of which a file is a link, or something else that is not a file: it would be written elsewhere."""
    for name in FILES:
        for path in run.glob(name) if "*" in name else [run / name]:
            refuse_other_than_file(path)
    for name in FOLDERS:
        refuse_other_than_folder(run / name)


def no_run(folder: Path) -> str:
    """What to say of a folder without config.yaml."""
    kept = sorted(folder.glob("checkpoints/step_*/config.yaml"))
    return f"its config.yaml is gone; {kept[-1]} is a copy" if kept else "it holds no config.yaml, so it is no run"


def is_finished(run: Path) -> bool:
    """A run's last act is to publish its exported model."""
    return is_export(run / "model")


def refuse_other_than_export(run: Path) -> None:
    """Refuse a folder `model` that no run exported: the run's own could not get that name in the end."""
    model = run / "model"
    if model.is_dir() and not is_export(model) and (model.is_symlink() or any(model.iterdir())):
        raise CheckpointError(
            f"{model}: a directory without an exported model, and this run exports its model under that name. Move it elsewhere."
        )


def refuse_other_config(run: Path, loaded: LoadedConfig) -> None:
    """Refuse to go on with a run under settings that would change what is learned; the difference is shown."""
    stored = _stored_config(run)
    if stored is None:
        raise CheckpointError(
            f"{run}/config.yaml is damaged: it cannot be read as a configuration. Every checkpoint of the run holds a copy: "
            "put it back from there, or choose another run.dir."
        )
    if differences := _differences(stored, loaded):
        by_share = loaded.config.policy.scheduler_spans_run and any(
            f"  {key}:" in " ".join(differences) for key in LENGTH
        )
        why = "policy.scheduler is a share of the run, so its length decides the learning rate of every step.\n"
        raise CheckpointError(
            f"{run} holds a run with another configuration:\n"
            + "\n".join(differences)
            + "\n"
            + (why if by_share else "")
            + "Take the old values back, or choose another run.dir for another run."
        )


def _differences(stored: dict[str, Any], loaded: LoadedConfig) -> list[str]:
    """What differs between a run's configuration and this one, and would change what is learned."""
    old, new = _flat(stored), _flat(_config_now(loaded))
    by_batch = {old.get("policy.packing.mode"), new.get("policy.packing.mode")} == {"batch"}
    return [
        f"  {key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and _changes_learning(key, loaded.config, by_batch=by_batch)
    ]


def _changes_learning(key: str, config: Config, *, by_batch: bool) -> bool:
    """Whether a key decides what is learned up to a step. by_batch: whether each batch is packed alone."""
    bound = ("data.validation_share", *(LENGTH if config.policy.scheduler_spans_run else ()))
    return key in bound or not key.startswith(MAY_CHANGE + (MAY_CHANGE_BY_BATCH if by_batch else ()))


def values_from_environment(loaded: LoadedConfig) -> dict[str, str]:
    """A digest of each setting that changes what is learned and is taken from the environment, by what it is called.

    config.yaml has these as they were written, ${oc.env:NAME}, whatever the environment says.
    """
    config, given = loaded.config, {".".join(map(str, place)) for place in loaded.from_environment}
    by_batch = config.policy.packing.mode == "batch"
    values = {
        key: value
        for key, value in _flat(config.model_dump()).items()
        if any(f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.") for one in given)  # betas.0 is in betas
        and _changes_learning(key, config, by_batch=by_batch)
        and not key.startswith(KNOWN_BY_CONTENT)
    }
    if any(key.startswith("data.train") for key in given):
        values["data.train.weight"] = [one.weight for one in config.data.training_sets]
    return {
        f"value of {key}, which is taken from the environment,": fingerprint(value) for key, value in values.items()
    }


def refuse_others_checkpoints(run: Path, folder: Path, *, has_checkpoints: bool) -> None:
    """A run that has not begun does not go on from what lies in a folder that another wrote to."""
    if has_checkpoints and folder != run / "checkpoints" and not (run / "metrics.jsonl").exists():
        raise CheckpointError(
            f"checkpointing.checkpoint_dir = {folder}: it holds checkpoints of another run, and {run} is a new one. Choose "
            "another checkpointing.checkpoint_dir, or leave it out."
        )


def is_asked_for_more(run: Path, loaded: LoadedConfig) -> bool:
    """Whether a finished run was configured to end elsewhere than it would now: only then may there be more to train."""
    old, new = _flat(_stored_config(run) or {}), _flat(_config_now(loaded))
    return any(old.get(key) != new.get(key) for key in (*LENGTH, "dpo.early_stopping_patience"))


@contextmanager
def held(run: Path, key: str = "run.dir") -> Iterator[None]:
    """Hold the directory for this process; a second one is refused. A dead process holds nothing. key: that gives it."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = open_own(run / "lock", "a+")
    except OSError as error:
        raise ConfigError(f"{key} = {run}: cannot be written ({error.strerror}). Choose another {key}.") from None
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _read_lock(lock) or "unknown"
            raise CheckpointError(
                f"{run} is in use by process {holder}. Wait for it, or choose another {key}."
            ) from None
        if not re.fullmatch("[0-9]*", _read_lock(lock)):
            raise CheckpointError(
                f"{run}/lock: not written by tandem, which keeps the number of its process there. Move it elsewhere."
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _read_lock(lock: IO[str]) -> str:
    return os.pread(lock.fileno(), 64, 0).decode("ascii", "replace").strip()


def _stored_config(run: Path) -> dict[str, Any] | None:
    try:
        stored = yaml.safe_load(read_yaml_text(run / "config.yaml"))
    except (OSError, ValueError, yaml.YAMLError, YamlLimitError):
        return None
    return _with_defaults(stored) if isinstance(stored, dict) else None


def _config_now(loaded: LoadedConfig) -> dict[str, Any]:
    """The configuration in force as a run's config.yaml would be read again."""
    return _with_defaults(yaml.safe_load(loaded.as_yaml()))


def _with_defaults(stored: dict[str, Any]) -> dict[str, Any]:
    """A configuration that an earlier version may have written: keys that were added since have their defaults."""
    try:
        return Config.model_validate(stored).model_dump()
    except ValidationError:  # a value that is taken from the environment, or a key that is gone
        return _filled(Config().model_dump(), stored)


def _filled(usual: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    both = [key for key in given if isinstance(given[key], dict) and isinstance(usual.get(key), dict)]
    return {**usual, **given, **{key: _filled(usual[key], given[key]) for key in both}}


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree}
    return {k: v for key, value in tree.items() for k, v in _flat(value, f"{prefix}{key}.").items()}

"""Chooses the directory of a run: a new one, or one to resume."""

import glob
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tandem.config.load import LoadedConfig
from tandem.config.schema import Config
from tandem.config.source.yaml_text import YamlLimitError, read_own_yaml
from tandem.config.validation import flatten
from tandem.errors import CheckpointError, ConfigError
from tandem.storage.cache import fingerprint, is_export, real_path
from tandem.storage.ownership import refuse_other_than_file, refuse_other_than_folder
from tandem.terminal.arguments import in_command, option
from tandem.terminal.commands import override, tandem_command
from tandem.training.run.other_folders import checkpoints_in, why_not_a_run

TRANSLATION_FILE = "translation.txt"  # what became of the keys of another trainer's configuration
# The files that a run writes in its directory, except checkpoints.
FILES = (
    *("config.yaml", "lock", "metrics.jsonl", "rejects.jsonl", "references.json", "trackers.json", "verdicts.json"),
    *("setup.json", "pairs.json", "report.html", TRANSLATION_FILE),
    *("logs/gpu.jsonl", "logs/mlflow.db", "logs/trackers.log", "samples/step_*.jsonl"),
)
FOLDERS = ("checkpoints", "exports", "logs", "model", "samples")
# The final names of files that a run first writes under a temporary name, as regular expressions.
TEMPORARY_NAMES = (
    *(re.escape(name) for name in FILES if "/" not in name),
    *(r"metrics\.step_[0-9]+(\.[0-9]+)?\.jsonl", "model"),
)
# Keys that each run has of its own: a run that is resumed keeps them, and a new one gets others.
OWN_KEYS = ("run.dir", "run.code")
CODE = "run.code."  # followed by FILE.py:FUNCTION; the value is a SHA-256
# Keys that do not affect the weights after a given step, so they may change when a run is resumed.
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
    "data.on_bad_row",  # the accepted rows are compared by content
    "data.max_bad_share",
    "data.max_filtered_share",
    "policy.activation_checkpointing",
    "policy.attention",
    "policy.compile",
    "policy.head_chunk_tokens",
    "policy.optimizer.offload",
    "policy.packing.packs_per_micro_batch",
    "policy.parallel.",
    "reference.mode",
    "checkpointing.",
    "export.",
    "logger.",
    "cluster.",
)
# Keys that may not change if the learning-rate schedule spans the run, because they change the rate of every step.
LENGTH_KEYS = ("dpo.max_num_steps", "dpo.max_num_epochs")
# Models and data, which are compared by content.
COMPARED_BY_CONTENT = (
    "data.train",
    "data.default",
    "policy.model_name",
    "policy.lora.adapter",
    "policy.tokenizer.name",
    "policy.tokenizer.chat_template",
    "reference.model",
    "reference.cache_dir",
)
# Keys that may also differ if each batch is packed separately, because rows then affect only speed.
MAY_CHANGE_BY_BATCH = ("policy.packing.pack_length", "policy.packing.share_prompts", "policy.packing.algorithm")


def choose_run_dir(loaded: LoadedConfig, *, fresh: bool) -> Path:
    """Return the directory of the run.

    If run.dir is set, this is run.dir; otherwise, checkpointing.checkpoint_dir. If neither is set, it is the newest unfinished
    run of the same configuration, or else a new directory with the next free number. With `fresh`, it is always a new directory.
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
            _refuse_other_checkpoint_dir(given, config)
        elif given.is_dir() and any(path.name != "lock" and not path.name.startswith(".") for path in given.iterdir()):
            raise ConfigError(f"{key} = {given}: not empty, and {why_not_a_run(given)}. Choose another directory.")
        return given
    parent, stem = (Path(named).parent, Path(named).name) if named else (Path("runs"), config.run.name)
    numbers = numbers_in(parent, stem)
    now = _config_now(loaded)
    for run in () if fresh else (parent / f"{stem}-{number}" for number in numbers):
        if not is_finished(run) and stored_config(run) == now:
            refuse_links(run)
            refuse_other_than_export(run)
            return run
    return parent / f"{stem}-{numbers[0] + 1 if numbers else 1}"


def checkpoint_dir(config: Config, run: Path) -> Path:
    """Return the checkpoint directory.

    If run.dir and checkpointing.checkpoint_dir are both set and differ, this is checkpoint_dir. Otherwise it is `checkpoints`
    in the run directory.
    """
    return _checkpoint_dir(config.run.dir, config.checkpointing.checkpoint_dir, run)


def _checkpoint_dir(run_dir: str | None, given: str | None, run: Path) -> Path:
    if given is None or run_dir is None or real_path(given) == real_path(run):
        return run / "checkpoints"
    return Path(given)


def _refuse_other_checkpoint_dir(run: Path, config: Config) -> None:
    """Raise CheckpointError if the configuration names another checkpoint directory than that of the run's checkpoints."""
    stored = stored_config(run) or {}
    run_dir, given = stored.get("run", {}).get("dir"), stored.get("checkpointing", {}).get("checkpoint_dir")
    old, new = _checkpoint_dir(run_dir, given, run), checkpoint_dir(config, run)
    if real_path(old) != real_path(new) and checkpoints_in(old):
        raise CheckpointError(
            f"checkpointing.checkpoint_dir = {config.checkpointing.checkpoint_dir or 'null'}: the checkpoints of {run} are in "
            f"{old}. Restore checkpointing.checkpoint_dir, or first move them to {new}."
        )


def earlier_run(run: Path, loaded: LoadedConfig) -> tuple[str, str] | None:
    """Return a hint and a command if this configuration could resume or extend the previous run; otherwise None."""
    if loaded.config.run.dir is not None:
        return None
    stem, _, number = run.name.rpartition("-")
    earlier = run.with_name(f"{stem}-{int(number) - 1}") if _is_number(number) else run
    stored = stored_config(earlier) if earlier != run else None
    if stored is None or _differences(stored, loaded):
        return None
    changes = _changed(stored, _config_now(loaded))
    changed = [override(key, value) for key, value in sorted(changes.items())]
    how = tandem_command("train", "--resume", str(earlier), *loaded.options, *changed)
    if not is_finished(earlier):
        return (
            f"{earlier} is unfinished and differs only in {', '.join(changed)}. A run may be resumed with such a change. To "
            "resume it:",
            how,
        )
    old = flatten(stored)
    longer = [key in LENGTH_KEYS and _is_raised(value, old.get(key)) for key, value in changes.items()]
    return (
        (f"{earlier} is finished and differs only in having fewer steps. To extend it:", how)
        if changes and all(longer)
        else None
    )


def other_run_hint(run: Path, loaded: LoadedConfig) -> str:
    """Return how to train a configuration that `run` cannot continue with, as a sentence: a command that runs as printed."""
    if not in_command():
        return f"Choose another run.dir, or start a new run with {option('fresh', True)}."
    changed = _changed(stored_config(run) or {}, _config_now(loaded))
    if loaded.config.run.dir is not None and loaded.config.checkpointing.checkpoint_dir is not None:
        changed["checkpointing.checkpoint_dir"] = None  # it has the checkpoints of `run`
    keys = [override(key, value) for key, value in changed.items()]
    return f"Train a new run: {tandem_command('train', '--config', f'{run}/config.yaml', *loaded.options, *keys, '--fresh')}"


def _changed(old: Any, new: Any, key: str = "") -> dict[str, Any]:
    """Return the new values of keys that differ, without OWN_KEYS. A section that has other keys than before is one value."""
    if key in OWN_KEYS:
        return {}
    if not isinstance(old, dict) or not isinstance(new, dict) or (key and old.keys() != new.keys()):
        return {} if old == new else {key: new}
    return {
        one: value
        for name in new
        for one, value in _changed(old.get(name), new[name], f"{key}.{name}" if key else name).items()
    }


def _is_raised(new: int | None, old: int | None) -> bool:
    """Return whether a limit was raised from `old` to `new`. None means no limit."""
    return old is not None and (new is None or new > old)


def numbers_in(parent: Path, stem: str) -> list[int]:
    """Return the numbers N of the existing directories named `stem-N`, the highest first."""
    numbers = [path.name[len(stem) + 1 :] for path in parent.glob(f"{glob.escape(stem)}-*")]
    return sorted((int(number) for number in numbers if _is_number(number)), reverse=True)


def _is_number(text: str) -> bool:
    """Return whether the text consists of the digits 0 to 9. Python's isdigit alone also accepts other digits, as in tandem-²."""
    return text.isascii() and text.isdigit()


def refuse_links(run: Path) -> None:
    """Refuse a run directory in which a link replaces a file or folder, because the run would write to another place.

    Also refuse a folder in place of a file, and a file in place of a folder.
    """
    for name in FILES:
        for path in run.glob(name) if "*" in name else [run / name]:
            refuse_other_than_file(path)
    for name in FOLDERS:
        refuse_other_than_folder(run / name)


def is_finished(run: Path) -> bool:
    """Return whether the run has exported its model. The export is the last action of a run."""
    return is_export(run / "model")


def refuse_other_than_export(run: Path) -> None:
    """Raise CheckpointError if the run's folder `model` is not an export, because the run exports its model under that name."""
    model = run / "model"
    if model.is_dir() and not is_export(model) and (model.is_symlink() or any(model.iterdir())):
        raise CheckpointError(
            f"{model}: a directory without an exported model, and this run exports its model under that name. Move it elsewhere."
        )


def refuse_other_config(run: Path, loaded: LoadedConfig) -> None:
    """Raise CheckpointError if the configuration differs from the run's in settings that would change the trained model.

    The message lists the differences.
    """
    stored = stored_config(run)
    if stored is None:
        raise CheckpointError(
            f"{run}/config.yaml is damaged: it cannot be read as a configuration. Restore it from a checkpoint of the run, which "
            "has a copy, or choose another run.dir."
        )
    if differences := _differences(stored, loaded):
        by_share = loaded.config.policy.scheduler_spans_run and any(
            f"  {key}:" in " ".join(differences) for key in LENGTH_KEYS
        )
        hint = other_run_hint(run, loaded)
        why = "policy.scheduler spans the run, so its length determines the learning rate of every step.\n"
        raise CheckpointError(
            f"{run} contains a run with another configuration:\n"
            + "\n".join(differences)
            + "\n"
            + (why if by_share else "")
            + f"Restore the old values, or {hint[0].lower()}{hint[1:]}"
        )


def _differences(stored: dict[str, Any], loaded: LoadedConfig) -> list[str]:
    """Return the differences between a run's stored configuration and the current one that would change the trained model."""
    old, new = flatten(stored), flatten(_config_now(loaded))
    by_batch = {old.get("policy.packing.mode"), new.get("policy.packing.mode")} == {"batch"}
    return [
        f"  the code of {key.removeprefix(CODE)}, which has changed"
        if key.startswith(CODE) and key in old and key in new
        else f"  {key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and _affects_weights(key, loaded.config, by_batch=by_batch)
    ]


def _affects_weights(key: str, config: Config, *, by_batch: bool) -> bool:
    """Return whether a key affects the trained weights. `by_batch`: whether each batch is packed separately."""
    fixed = ("data.validation_share", *(LENGTH_KEYS if config.policy.scheduler_spans_run else ()))
    return key in fixed or not key.startswith(MAY_CHANGE + (MAY_CHANGE_BY_BATCH if by_batch else ()))


def values_from_environment(loaded: LoadedConfig) -> dict[str, str]:
    """Return hashes of the settings that come from environment variables and affect the trained weights.

    config.yaml stores such a setting as ${oc.env:NAME}, which stays the same if the variable changes. The keys of the returned
    dict are phrases that name the settings in messages.
    """
    config, given = loaded.config, {".".join(map(str, place)) for place in loaded.from_environment}
    by_batch = config.policy.packing.mode == "batch"
    values = {
        key: value
        for key, value in flatten(config.model_dump()).items()
        if any(f"{key}.".startswith(f"{one}.") or one.startswith(f"{key}.") for one in given)  # betas.0 is in betas
        and _affects_weights(key, config, by_batch=by_batch)
        and not key.startswith(COMPARED_BY_CONTENT)
    }
    if any(key.startswith("data.train") for key in given):
        values["data.train.weight"] = [one.weight for one in config.data.training_sets]
    return {
        f"value of {key}, which is taken from the environment,": fingerprint(value) for key, value in values.items()
    }


def refuse_others_checkpoints(run: Path, folder: Path, *, has_checkpoints: bool) -> None:
    """Raise CheckpointError if a new run would use a checkpoint_dir that holds the checkpoints of another run."""
    if has_checkpoints and folder != run / "checkpoints" and not (run / "metrics.jsonl").exists():
        raise CheckpointError(
            f"checkpointing.checkpoint_dir = {folder}: it contains checkpoints of another run, and {run} is a new one. Choose "
            "another checkpointing.checkpoint_dir, or leave it out."
        )


def may_be_extended(run: Path, loaded: LoadedConfig) -> bool:
    """Return whether the configuration may ask for more steps than a finished run has trained.

    It may do so if one of these keys has changed: dpo.max_num_steps, dpo.max_num_epochs, dpo.early_stopping_patience.
    """
    old, new = flatten(stored_config(run) or {}), flatten(_config_now(loaded))
    return any(old.get(key) != new.get(key) for key in (*LENGTH_KEYS, "dpo.early_stopping_patience"))


def stored_config(run: Path) -> dict[str, Any] | None:
    """Return the configuration in a run's config.yaml, with defaults for keys that it does not have; None if it is damaged."""
    try:
        stored = read_own_yaml(run / "config.yaml")
    except (OSError, ValueError, yaml.YAMLError, YamlLimitError):
        return None
    return _with_defaults(stored) if isinstance(stored, dict) else None


def _config_now(loaded: LoadedConfig) -> dict[str, Any]:
    """Return the current configuration in the form in which it would be read from config.yaml."""
    return _with_defaults(loaded.as_tree())


def _with_defaults(stored: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with defaults for missing keys. An earlier version of tandem did not write newer keys."""
    try:
        return Config.model_validate(stored).model_dump()
    except ValidationError:  # a value from the environment, or a key that was removed
        return _filled(Config().model_dump(), stored)


def _filled(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    both = [key for key in given if isinstance(given[key], dict) and isinstance(defaults.get(key), dict)]
    return {**defaults, **given, **{key: _filled(defaults[key], given[key]) for key in both}}

"""Which directory a run has: a new one, or one to go on with. One process at a time may hold it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tandem.config.load import LoadedConfig
from tandem.errors import CheckpointError, ConfigError

# Keys that do not change what is learned up to a step: they may differ when a run goes on.
MAY_CHANGE = (
    "run.name",
    "run.dir",
    "run.deterministic",
    "dpo.max_num_steps",
    "dpo.val_",
    "data.validation",
    "data.num_workers",
    "data.val_data_paths",
    "checkpointing.",
    "logger.",
)


def choose_run_dir(loaded: LoadedConfig, *, fresh: bool) -> Path:
    """The run's directory: as given, or the unfinished one of the same configuration, or the next free number."""
    run = loaded.config.run
    if run.dir is not None and Path(run.dir).is_file():
        raise ConfigError(f"run.dir = {run.dir}: a file, not a directory. Choose another run.dir.")
    if run.dir is not None and not fresh:
        given = Path(run.dir)
        if (given / "config.yaml").is_file():
            refuse_other_config(given, loaded)
        elif given.is_dir() and any(path.name != "lock" and not path.name.startswith(".") for path in given.iterdir()):
            raise ConfigError(f"run.dir = {given}: not empty and not a run. Choose another directory.")
        return given
    parent, stem = (Path(run.dir).parent, Path(run.dir).name) if run.dir else (Path("runs"), run.name)
    numbers = sorted(
        int(number) for path in parent.glob(f"{stem}-*") if (number := path.name[len(stem) + 1 :]).isdigit()
    )
    if numbers and not fresh:
        newest = parent / f"{stem}-{numbers[-1]}"
        if not is_finished(newest) and _stored_config(newest) == yaml.safe_load(loaded.as_yaml()):
            return newest
    return parent / f"{stem}-{numbers[-1] + 1 if numbers else 1}"


def is_finished(run: Path) -> bool:
    """A run's last act is to publish its exported model."""
    return (run / "model").is_dir()


def refuse_other_config(run: Path, loaded: LoadedConfig) -> None:
    """Refuse to go on with a run under settings that would change what is learned; the difference is shown."""
    stored = _stored_config(run)
    if stored is None:
        raise CheckpointError(
            f"{run}/config.yaml is damaged: it cannot be read as a configuration. Every checkpoint of the run holds a copy: "
            "put it back from there, or choose another run.dir."
        )
    old, new = _flat(stored), _flat(yaml.safe_load(loaded.as_yaml()))
    differences = [
        f"  {key}: {old.get(key)!r} there, {new.get(key)!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and (not key.startswith(MAY_CHANGE) or key == "data.validation_share")
    ]
    if differences:
        raise CheckpointError(
            f"{run} holds a run with another configuration:\n" + "\n".join(differences) + "\n"
            "Take the old values back, or choose another run.dir for another run."
        )


def refuse_longer(run: Path, loaded: LoadedConfig) -> None:
    """A finished run is exported: it does not go on because a longer one is asked for now."""
    old, new = _flat(_stored_config(run) or {}), _flat(yaml.safe_load(loaded.as_yaml()))
    for key in ("dpo.max_num_steps", "dpo.max_num_epochs"):
        if key in old and old[key] != new[key]:
            raise CheckpointError(
                f"{run} is finished, with {key} = {old[key]}; it does not go on with {new[key]}. Choose another run.dir, or "
                "--fresh without --resume."
            )


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Hold the directory for this process; a second one is refused. A dead process holds nothing."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        file = (run / "lock").open("a+")
    except OSError as error:
        raise ConfigError(f"run.dir = {run}: cannot be written ({error.strerror}). Choose another run.dir.") from None
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise CheckpointError(
                f"{run} is in use by process {holder}. Wait for it, or choose another run.dir."
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _stored_config(run: Path) -> dict[str, Any] | None:
    try:
        stored = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return stored if isinstance(stored, dict) else None


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix.rstrip("."): tree}
    return {k: v for key, value in tree.items() for k, v in _flat(value, f"{prefix}{key}.").items()}

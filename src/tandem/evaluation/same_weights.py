"""Refuses to compare a model with itself. Does not import torch."""

import filecmp
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.errors import ConfigError
from tandem.exporting.request import RECORD
from tandem.model.files.source import checkpoint_export
from tandem.storage.cache import is_checkpoint, real_path
from tandem.terminal.arguments import option

if TYPE_CHECKING:
    from tandem.evaluation.request import ModelRequest, Subject

# Files of an export that do not change what the model computes.
ABOUT_THE_MODEL = ("README.md", "manifest.json", RECORD)


def refuse_same_weights(subject: "Subject", other: "Subject") -> None:
    """Raise ConfigError if two models have the same name, folder or files, such as a run and the export of its last step.

    A checkpoint has files once it is exported to the cache.
    """
    mine, theirs = _weights(subject.model), _weights(other.model)
    if mine == theirs or (isinstance(mine, Path) and isinstance(theirs, Path) and _have_equal_files(mine, theirs)):
        raise ConfigError(
            f"{option('against', other.name)}: the same weights as {option('model', subject.name)}, so there is nothing to "
            "compare. Give another model or run."
        )


def _weights(model: "ModelRequest") -> Path | tuple[str, str | None]:
    """Return the folder of a model's weights (of its adapter, which belongs to one base), or its hub name and revision."""
    policy = model.policy
    name = policy.lora.adapter if policy.lora.enabled and policy.lora.adapter is not None else policy.model_name
    if not Path(name).exists():
        return name, policy.revision
    exported = checkpoint_export(model.key, name) if is_checkpoint(Path(name)) else None
    return real_path(name if exported is None or not exported.is_dir() else exported)


def _have_equal_files(mine: Path, theirs: Path) -> bool:
    """Whether two folders have the same files, byte for byte. Different weights differ early, so few bytes of them are read."""
    try:
        sizes = _sizes(mine)
        return (
            any(name.endswith(".safetensors") for name in sizes)
            and sizes == _sizes(theirs)
            and all(
                filecmp.cmp(mine / name, theirs / name, shallow=False) for name in sorted(sizes, key=sizes.__getitem__)
            )
        )
    except OSError:
        return False  # loading the model reports what cannot be read


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file that belongs to the model."""
    return {
        file.name: file.stat().st_size
        for file in folder.iterdir()
        if file.is_file() and file.name not in ABOUT_THE_MODEL
    }

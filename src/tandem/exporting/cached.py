"""Exports checkpoints to the cache, if the configuration or a command names them as models.

`model/files/source.py` finds the exports in the cache, so each checkpoint is exported only once.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from tandem.config.schema import Config
from tandem.config.source.yaml_text import YamlLimitError, read_own_yaml
from tandem.errors import CheckpointError
from tandem.isolation import separate_environment
from tandem.model.files.source import checkpoint_export
from tandem.storage.cache import check_cache_dir, is_checkpoint
from tandem.terminal.arguments import option, setting


def export_named_checkpoints(config: Config, say: Callable[[str], None]) -> None:
    """Export each checkpoint that policy.model_name or reference.model names, unless its export is already in the cache."""
    for key, name in {"policy.model_name": config.policy.model_name, "reference.model": config.reference.model}.items():
        if name is not None:
            export_checkpoint(key, name, say)


def export_checkpoint(key: str, name: str, say: Callable[[str], None]) -> None:
    """Export `name` to the cache, if it is a checkpoint that is not there yet. key: what names it, for messages.

    A separate process exports the checkpoint, so that this process uses no memory for it, and the export waits for no other rank.
    """
    if not is_checkpoint(Path(name)) or checkpoint_export(key, name).is_dir():
        return
    check_cache_dir()
    say(f"Exporting {name} to the cache ({option(key) if key.isidentifier() else key})")
    merged = ["--merged"] if _has_adapters(Path(name)) else []
    out = ["--out", str(checkpoint_export(key, name))]
    command = [sys.executable, "-P", "-m", "tandem", "export", name, "--no-measure", "--quiet", *merged, *out]
    environment = separate_environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        said = done.stderr.strip().removeprefix("tandem: error: ").splitlines() or [f"exit code {done.returncode}"]
        raise CheckpointError(f"{setting(key, name)}: this checkpoint cannot be exported: {said[0][:1000]}")


def _has_adapters(place: Path) -> bool:
    try:
        config = read_own_yaml(place / "config.yaml")
        return bool(config["policy"]["lora"]["enabled"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, YamlLimitError):
        return False  # the export reports what is wrong with the file

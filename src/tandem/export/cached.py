"""Exports checkpoints that a configuration names as models, once, into the cache. `model/files/source.py` finds them there."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from tandem.config.schema import Config
from tandem.config.yaml_text import YamlLimitError, read_yaml_text
from tandem.errors import CheckpointError
from tandem.isolation import isolated_environment
from tandem.model.files.source import checkpoint_export
from tandem.storage.cache import check_cache_dir, is_checkpoint

# Variables that would make the child process a rank of the run that starts it, or fail where that run is to fail.
OF_THIS_PROCESS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TANDEM_FAIL_AT")


def export_named_checkpoints(config: Config, say: Callable[[str], None]) -> None:
    """Export each checkpoint that policy.model_name or reference.model names, unless the cache holds it already.

    A process of its own exports it, so that nothing of it stays in memory and no rank waits inside it for another.
    """
    named = {"policy.model_name": config.policy.model_name, "reference.model": config.reference.model}
    for key, name in named.items():
        if name is None or not is_checkpoint(Path(name)) or checkpoint_export(key, name).is_dir():
            continue
        check_cache_dir()
        say(f"Exporting {name} to the cache ({key})")
        merged = ["--merged"] if _has_adapters(Path(name)) else []
        out = ["--out", str(checkpoint_export(key, name))]
        command = [sys.executable, "-P", "-m", "tandem", "export", name, "--no-measure", "--quiet", *merged, *out]
        environment = {
            key: value for key, value in isolated_environment().items() if not key.startswith(OF_THIS_PROCESS)
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            said = done.stderr.strip().removeprefix("tandem: error: ").splitlines() or [f"exit code {done.returncode}"]
            raise CheckpointError(f"{key} = {name}: this checkpoint cannot be exported: {said[0][:1000]}")


def _has_adapters(place: Path) -> bool:
    try:
        config = yaml.safe_load(read_yaml_text(place / "config.yaml"))
        return bool(config["policy"]["lora"]["enabled"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, YamlLimitError):
        return False  # the export reports what is wrong with the file

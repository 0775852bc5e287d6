"""Switches off telemetry, and imports from the working directory, for a command and its child processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# The variables that switch off the telemetry of the packages in use.
NO_TELEMETRY = {
    "DO_NOT_TRACK": "true",  # MLflow accepts only this spelling
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",  # otherwise even offline runs look up its host
}
# Same as python -P, for every Python process started from here on.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def isolated_environment() -> dict[str, str]:
    """The environment of a child process."""
    return {**os.environ, **NO_TELEMETRY, **SAFE_PATH}


@contextmanager
def isolated() -> Iterator[None]:
    """Apply the isolated environment to this process and its children. Enter it before importing the packages."""
    before = dict(os.environ)
    os.environ.update(isolated_environment())
    try:
        yield
    finally:
        for name in {**NO_TELEMETRY, **SAFE_PATH}:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)

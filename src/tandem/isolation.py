"""No telemetry from a command and its children, and no imports from the working directory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Telemetry that the packages in use would send, each off by the variable that its package reads.
NO_TELEMETRY = {
    "DO_NOT_TRACK": "true",  # MLflow understands no other spelling
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",  # offline runs, too, looked up its host
}
# The same as python -P, for every Python process started from here on.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def isolated_environment() -> dict[str, str]:
    """The environment of a child process."""
    return {**os.environ, **NO_TELEMETRY, **SAFE_PATH}


@contextmanager
def isolated() -> Iterator[None]:
    """Within, this process and its children have that environment; to be entered before the packages are imported."""
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

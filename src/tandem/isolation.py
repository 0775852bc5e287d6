"""Sets environment variables that disable telemetry and keep Python from importing modules from the working directory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

# Disable the telemetry of packages that tandem uses.
NO_TELEMETRY = {
    "DO_NOT_TRACK": "true",  # MLflow accepts only this spelling
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",  # otherwise offline runs resolve the host name of the error-reporting server
}
# The same as python -P, for all child processes that run Python.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
# Variables that tandem sets for a process that it starts.
LAUNCHER = "TANDEM_LAUNCHER"  # what started this process, which starts no ranks itself: local, ray, slurm or sweep
STORE_FD = "TANDEM_STORE_FD"  # of the first rank: an open socket on which its store listens
GPU_INDEX = "TANDEM_GPU_INDEX"  # the GPU of this rank among those that it sees, if not that of its local rank
OF_TANDEM = (LAUNCHER, STORE_FD, GPU_INDEX, "TANDEM_FAIL_AT")
# Beginnings of the names of variables that a separate process does not get: it is not a rank of this run, and must not fail
# where tests make this run fail.
OF_THIS_PROCESS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", *OF_TANDEM)


def isolated_environment() -> dict[str, str]:
    """Return the environment to start child processes with: the current one plus NO_TELEMETRY and SAFE_PATH."""
    return {**os.environ, **NO_TELEMETRY, **SAFE_PATH}


def separate_environment() -> dict[str, str]:
    """Return the environment for a child process that runs another tandem command, which has nothing to do with this run."""
    return {key: value for key, value in isolated_environment().items() if not key.startswith(OF_THIS_PROCESS)}


@contextmanager
def isolated() -> Iterator[None]:
    """Set the variables of NO_TELEMETRY and SAFE_PATH inside this context.

    Enter the context before packages that send telemetry are imported.
    """
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

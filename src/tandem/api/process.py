"""What a call from Python must not leave behind in its process: settings of torch, the environment, a process group."""

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.config.load import LoadedConfig
from tandem.errors import ConfigError, TandemError
from tandem.isolation import isolated
from tandem.storage.compile_cache import kept_compile_caches
from tandem.terminal.printable import SECRETS, Secrets
from tandem.user_code import refuse_while_loading

_busy = threading.Lock()  # a process can be in one process group, and has one state of random numbers


@contextmanager
def own_process(function: str, loaded: LoadedConfig | None = None) -> Iterator[None]:
    """A context for the work of a call from Python. `function`: its name, for messages.

    Restores what the work changes. Values of environment variables that the configuration reads are hidden in errors, also
    when they are printed later.
    """
    refuse_while_loading(function)
    if not _busy.acquire(blocking=False):
        raise ConfigError(
            f"{function}: another call is at work in this process, which can do one at a time. Wait for it, or use another one."
        )
    try:
        with (
            warnings.catch_warnings(),  # packages add filters
            isolated(),
            _same_environment(),
            kept_compile_caches(),
            _same_torch(),
            SECRETS.holding(loaded.secrets if loaded else Secrets()),
        ):
            try:
                yield
            except TandemError as error:
                # The text without secrets, which are forgotten when another configuration is loaded.
                error.args = (str(error), *error.args[1:])
                raise
    finally:
        _busy.release()


@contextmanager
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


@contextmanager
def _same_torch() -> Iterator[None]:
    import torch
    import torch.distributed as dist

    was_joined, hook = dist.is_initialized(), sys.excepthook
    is_deterministic, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    threads, dtype, random_state = torch.get_num_threads(), torch.get_default_dtype(), torch.get_rng_state()
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    device, gpu_state = (torch.cuda.current_device(), torch.cuda.get_rng_state()) if on_gpu else (None, None)
    try:
        yield
    finally:
        if dist.is_initialized() and not was_joined:
            dist.destroy_process_group()
        sys.excepthook = hook  # a process group writes its rank before every traceback
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(random_state)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if device is not None and gpu_state is not None:
            torch.cuda.set_device(device)
            torch.cuda.set_rng_state(gpu_state, device)

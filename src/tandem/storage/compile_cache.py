"""Where torch and Triton keep compiled layers and kernels: in tandem's cache. Torch's default is lost when a machine restarts."""

import getpass
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tandem.storage.cache import cache_dir

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
TRITON = "TRITON_CACHE_DIR"


def compile_caches(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that name the compile caches. Values that the user set are kept.

    Torch and Triton find entries by hashes of their own source, their versions and the type of the GPU, among others, so an entry
    is never used with another version. Torch loads entries with pickle, so a folder that belongs to another user is not used. If
    tandem's cache cannot be written, the folder is torch's default in the temporary folder; without one, there are no variables.
    """
    inductor = _given(INDUCTOR, environment) or _own_folder() or _torch_default()
    triton = _given(TRITON, environment) or (None if inductor is None else f"{inductor}/triton")
    return {name: value for name, value in ((INDUCTOR, inductor), (TRITON, triton)) if value is not None}


@contextmanager
def kept_compile_caches() -> Iterator[None]:
    """Set the variables of `compile_caches` inside this context. Enter it before torch's compiler is imported, which sets one."""
    chosen = compile_caches()
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _given(name: str, environment: Mapping[str, str]) -> str | None:
    """Return what the user set. Torch itself sets both variables to its default when it is imported and when it compiles."""
    value = environment.get(name)
    return None if not value or _torch_default() in (value, *map(str, Path(value).parents)) else value


def _torch_default() -> str | None:
    """Return torch's own folder, as torch/_inductor/runtime/cache_dir_utils.py chooses it. None: no temporary folder exists."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container without a name for this user
        user = f"uid_{os.getuid()}"
    try:
        return f"{tempfile.gettempdir()}/torchinductor_{user}"
    except OSError:
        return None


def _own_folder() -> str | None:
    """Return this user's folder in tandem's cache, or None if it is another user's or cannot be written. Leaves nothing there."""
    try:
        folder = cache_dir().absolute() / f"compile-{os.getuid()}"
        existing = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
        if existing == folder:
            is_usable = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and folder.stat().st_uid == os.getuid()
        else:
            Path(
                tempfile.mkdtemp(prefix=".tandem-", dir=existing)
            ).rmdir()  # torch ends with a traceback where it cannot do this
            is_usable = True
        return str(folder) if is_usable else None
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None

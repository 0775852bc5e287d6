"""Reads weight files while torch is imported and data is prepared, so that loading the weights does not wait for the disk."""

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.config.schema import Config
from tandem.data.store.pool import default_workers
from tandem.model.files.source import weights_on_disk
from tandem.storage.cache import REMEMBERED_BYTES, content_note, known_content, remember_content

# Large, because the thread takes Python's lock twice for each, for which imports then wait.
CHUNK_BYTES = 64 * 1024 * 1024
# With fewer, reading and hashing would take time from the imports: on two busy cores, a start took 1.3 to 2.3 times as long.
FEWEST_CPUS = 4
MEMORY_SHARE = 0.5  # of the available memory: files that take more would be read only to be dropped again
MEMINFO = Path("/proc/meminfo")
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
THREAD = "tandem-read-ahead"


@contextmanager
def reading_ahead(config: Config) -> Iterator[None]:
    """Read the weights of a run's models into the system's file cache, in a thread. Also store their hashes, which a run needs.

    Only files that are on this machine are read, and only if they fit in memory. Errors are ignored, because loading reports
    them. The thread stops at the end of this context, which does not wait for it.
    """
    stopped = threading.Event()
    if files := _files_to_read(config):
        threading.Thread(target=_read_all, args=(files, stopped.is_set), name=THREAD, daemon=True).start()
    try:
        yield
    finally:
        stopped.set()


def _files_to_read(config: Config) -> list[Path]:
    """Return the large weight files of a run's models; none if they do not fit in memory or there are few CPUs.

    One rank of a machine reads for all. Of several machines, each loads only a part of the files, so none reads ahead.
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    if (
        os.environ.get("LOCAL_RANK", "0") != "0"
        or os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks
        or default_workers() < FEWEST_CPUS
    ):
        return []
    policy, reference = config.policy, config.reference
    models = [("policy.model_name", policy.model_name, policy.revision)]
    if reference.mode == "live" and reference.model is not None:
        models.append(("reference.model", reference.model, None))
    sizes: dict[Path, int] = {}
    for key, name, revision in models:
        with suppress(Exception):  # a model that is not here yet, or is refused later
            sizes |= {file: file.stat().st_size for file in weights_on_disk(key, name, revision)}
    if sum(sizes.values()) > MEMORY_SHARE * _available_memory():
        return []
    return [file for file, size in sizes.items() if size >= REMEMBERED_BYTES]


def _read_all(files: list[Path], stopped: Callable[[], bool]) -> None:
    for file in files:
        with suppress(Exception):  # loading reports what is wrong
            _read(file, stopped)


def _read(path: Path, stopped: Callable[[], bool]) -> None:
    """Read a file to its end, or until `stopped()`. Store its hash if it is not known yet."""
    note = content_note(path)
    hashed = None if note is None or known_content(note) else hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while not stopped():
            if not (num_bytes := file.readinto(buffer)):
                if hashed is not None and note is not None:
                    remember_content(note, hashed.hexdigest())
                return
            if hashed is not None:
                hashed.update(buffer[:num_bytes])


def _available_memory() -> int:
    """Return the memory that is free or caches files, in bytes; 0 if it cannot be found out."""
    if not MEMINFO.is_file() or not (
        found := re.search(r"^MemAvailable: +(\d+) kB", MEMINFO.read_text(), re.MULTILINE)
    ):
        return 0
    limits = [file.read_text().strip() for file in CONTAINER_LIMITS if file.is_file()]
    return min([int(found[1]) * 1024, *(int(limit) for limit in limits if limit.isdigit())])

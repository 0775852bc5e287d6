"""Checks the folders that training writes to: whether they can be written, and how much space is free."""

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.diagnosis.finding import Finding, finding
from tandem.storage.cache import GIB, cache_dir, free_bytes
from tandem.storage.compile_cache import INDUCTOR, TRITON, compile_caches

WRITTEN_BYTES = 1024 * 1024  # of a write test


@dataclass(frozen=True, slots=True)
class Place:
    """A folder, what it is for, and how much free space it should have."""

    name: str
    folder: Path
    wanted_gib: float  # less is a warning
    needed_gib: float  # less is a problem
    instead: str  # what to do
    grows: bool = False  # nothing is ever removed from it, so its size is reported


def place_findings(*, has_gpu: bool) -> list[Finding]:
    """Check the cache, the run directory, the temporary folder, shared memory and, with a GPU, the compile caches."""
    places = [
        Place("cache", cache_dir(), 5, 0.1, "Set TANDEM_CACHE to a directory on another disk."),
        Place("models", _hub_cache(), 5, 0.1, "Set HF_HOME to a directory on another disk."),
        Place("runs", Path("runs"), 10, 0.1, "Change to another directory, or set run.dir."),
    ]
    temporary, wrong = _temporary_folder()
    if temporary is not None:
        places.append(Place("temporary files", temporary, 1, 0.05, "Set TMPDIR to a directory on another disk."))
    if Path("/dev/shm").is_dir():
        fix = "In a container, start it with --shm-size=1g."
        places.append(Place("shared memory", Path("/dev/shm"), 0.06, 0.005, fix))
    if has_gpu:
        places += _compile_caches()
    return [*wrong, *map(check_place, places)]


def check_place(place: Place) -> Finding:
    """Write a file to a folder (or to the one that it would be created in), remove it, and check the free space."""
    existing = next((one for one in (place.folder.absolute(), *place.folder.absolute().parents) if one.exists()), None)
    if existing is None or not existing.is_dir():
        return finding(place.name, "problem", f"{existing or place.folder} is not a directory", fix=place.instead)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{place.folder} cannot be written ({error.strerror})"
        return finding(place.name, "problem", text, fix=place.instead)
    free = free_bytes(place.folder)
    if free is None:
        return finding(place.name, "ok", f"{place.folder} can be written")
    used = f"{_size(place.folder) / GIB:.2g} GiB used, " if place.grows else ""
    text = f"{place.folder}: {used}{free / GIB:.3g} GiB free"
    if free < place.needed_gib * GIB:
        return finding(place.name, "problem", f"{text}: the disk is full", fix=f"Free some space. {place.instead}")
    if free < place.wanted_gib * GIB:
        return finding(place.name, "warning", f"{text}, which may be too little", fix=place.instead)
    return finding(place.name, "ok", text)


def _hub_cache() -> Path:
    """Return where the hub's library stores downloaded models."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _temporary_folder() -> tuple[Path | None, list[Finding]]:
    try:
        return Path(tempfile.gettempdir()), []
    except OSError:
        text = "no temporary folder can be written"
        return None, [finding("temporary files", "problem", text, fix="Set TMPDIR to a writable directory.")]


def _compile_caches() -> list[Place]:
    """Return the folders that this command's training would compile into."""
    names = {TRITON: "Triton's cache", INDUCTOR: "compile cache"}
    found = compile_caches()
    return [
        Place(name, Path(found[variable]), 1, 0.05, f"Set {variable} to another directory.", grows=True)
        for variable, name in names.items()
        if variable in found
    ]


def _size(folder: Path) -> int:
    """Return the size of all files in a folder. Files that disappear meanwhile are not counted."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(f"{place}/{name}").st_size
    return total

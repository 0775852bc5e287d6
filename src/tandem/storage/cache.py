"""Provides the cache directory, manifests, and functions that write files and folders atomically.

Files and folders are written under a temporary name, then synced to the disk and renamed.
"""

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from tandem.errors import ConfigError, writing
from tandem.failpoints import fail_point
from tandem.storage.ownership import (
    MARKER,
    create_temporary,
    refuse_other_than_folder,
    remove_abandoned,
    temporary_folder,
)

GIB = 2**30
# Hashes of larger files are stored in the cache. Hashing runs at about 0.7 GB/s, so smaller files are hashed each time.
REMEMBERED_BYTES = 16 * 1024 * 1024
MANIFEST_FINGERPRINT = "fingerprint_of_manifest"
MAX_MANIFEST_BYTES = 256 * 1024 * 1024  # much larger than any real manifest
PUBLISHED_IN_CACHE = ("tokens", "packs", "reference", "models")
NOTED_IN_CACHE = ("hashes", "hub", "rows", "tokenizers")
# Of files in other formats, compressed ones included: other programs, and tandem itself, would fail to read JSON lines there.
OTHER_SUFFIXES = (".csv", ".tsv", ".parquet", ".arrow", ".feather", ".xlsx", ".gz", ".zst", ".bz2", ".xz", ".zip")


def cache_dir() -> Path:
    """Return the cache directory: `$TANDEM_CACHE`, or `tandem` in the user's cache directory."""
    if given := os.environ.get("TANDEM_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem"


def check_cache_dir() -> None:
    """Raise an error if the cache directory cannot be created or written. This is checked before any work is done.

    Also remove temporary folders that killed processes on this machine left in the cache directory.
    """
    folder = cache_dir()
    check_writable(folder, f"the cache directory {folder}", "Set TANDEM_CACHE to a writable directory.")
    for kind in (*PUBLISHED_IN_CACHE, *NOTED_IN_CACHE):
        refuse_other_than_folder(folder / kind)
    for kind in PUBLISHED_IN_CACHE:
        remove_abandoned(folder / kind, ".+", is_held=False)


def check_writable(folder: Path, what: str, instead: str) -> None:
    """Raise a ConfigError if a directory cannot be created or written.

    `what`: the directory in words, at the start of the message. `instead`: what to do, at the end of the message.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{what} cannot be written ({error.strerror}). {instead}") from None


def refuse_other_suffix(place: str, path: Path) -> None:
    """Raise ConfigError if JSON lines are to be written to a file with the name of another format. `place`: what names it."""
    if path.suffix.lower() in OTHER_SUFFIXES:
        raise ConfigError(
            f"{place}: JSON lines are written, which a {path.suffix} file does not hold. Give a name that ends in .jsonl, such "
            f"as {path.with_suffix('.jsonl')}."
        )


def free_bytes(folder: Path) -> int | None:
    """Return the free disk space where a folder is, or would be created. Return None if it cannot be found out."""
    place = folder.absolute()
    existing = next((one for one in (place, *place.parents) if one.is_dir()), None)
    try:
        return None if existing is None else shutil.disk_usage(existing).free
    except OSError:
        return None


def real_path(path: str | Path) -> Path:
    """Return the path with links resolved. Unlike Path.resolve, this does not raise an error on circular links."""
    return Path(os.path.realpath(path))


def outside_of(folder: Path, file: Path) -> Path | None:
    """Return the target of `file` if it is a link to outside `folder`, else None.

    Links within the hub's cache are allowed: models--NAME/snapshots/COMMIT/config.json -> models--NAME/blobs/HASH
    """
    target = real_path(file)
    in_hub_cache = target.parent.name == "blobs" and (target.parent.parent / "snapshots").is_dir()
    return None if in_hub_cache or target.is_relative_to(real_path(folder)) else target


def refuse_outside(folder: Path, file: Path) -> None:
    """Raise a ConfigError if `file` is a link to outside `folder`.

    Such a link in a downloaded folder could make a private file of the user part of the exported model.
    """
    if target := outside_of(folder, file):
        raise ConfigError(
            f"{file}: a link to {target}, outside the model's folder. Model files are read only from that folder. Replace the "
            "link with a copy of the file."
        )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_of(path: Path) -> str:
    """Return the SHA-256 of a file. Hashes of large files are cached by path, size, times and inode.

    The times include ctime, because archives and copies may restore an old modification time, but cannot set ctime.
    """
    note = content_note(path)
    if note is None:
        return sha256_of(path)
    if known := known_content(note):
        return known
    digest = sha256_of(path)
    remember_content(note, digest)
    return digest


def content_note(path: Path) -> Path | None:
    """Return the file in the cache that holds the hash of a large file as it is now. Return None for a small file."""
    stat = path.stat()
    if stat.st_size < REMEMBERED_BYTES:
        return None
    times = stat.st_mtime_ns, stat.st_ctime_ns
    return cache_dir() / "hashes" / fingerprint(str(path.resolve()), stat.st_size, *times, stat.st_ino)


def known_content(note: Path) -> str | None:
    """Return the hash that `remember_content` stored."""
    return known if note.is_file() and len(known := note.read_text()) == 64 else None


def remember_content(note: Path, digest: str) -> None:
    """Store the hash of a file. `note`: by `content_note`, before the file was read."""
    with suppress(OSError):  # without a writable cache, the file is hashed again the next time
        note.parent.mkdir(parents=True, exist_ok=True)
        with replacing(note) as file:
            file.write(digest)


def fingerprint(*parts: Any) -> str:
    """Return a short hash: the first 32 hexadecimal digits of the SHA-256 of the parts as canonical JSON."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def sync_folder(folder: Path) -> None:
    """Flush `folder`, and all files and folders in it, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync_file(path)


def sync_file(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str, what: str) -> None:
    """Replace the content of a file atomically: readers see either the old or the new text, never a part of it.

    `what`: the name of a fail point before the rename, where tests can kill the process.
    """
    with replacing(path, what) as file:
        file.write(text)


@contextmanager
def replacing(path: Path, what: str | None = None, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Yield a temporary file that is open for writing. If the block succeeds, rename the temporary file to `path`.

    An existing file or link at `path` is replaced. `what`: the name of a fail point before the rename, where tests can
    kill the process.
    """
    aside, descriptor = create_temporary(path)
    try:
        with (
            writing(path),
            os.fdopen(descriptor, "wb" if binary else "w", encoding=None if binary else "utf-8") as file,
        ):
            yield file
            file.flush()
            os.fsync(file.fileno())
        if what is not None:
            fail_point(f"{what}.rename")
        aside.replace(path)
        sync_file(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def published(folder: Path, what: str) -> Iterator[Path]:
    """Yield an empty temporary folder next to `folder`. If the block succeeds, rename the temporary folder to `folder`.

    So `folder` is always either absent or complete, even if the process is killed. If two processes write the same
    folder, the result of the first to finish is kept. `what`: the name of the fail points, where tests can kill the
    process.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with writing(folder), temporary_folder(folder) as aside:
        fail_point(f"{what}.begin")
        yield aside
        _follow_umask(aside)
        fail_point(f"{what}.sync")
        sync_folder(aside)
        fail_point(f"{what}.rename")
        try:
            aside.rename(folder)
            (folder / MARKER).unlink()
        except OSError:
            if not folder.is_dir():
                raise
        sync_file(folder.parent)
        fail_point(f"{what}.done")


def _follow_umask(folder: Path) -> None:
    """Give every file the permissions that the umask asks for. safetensors creates files that only the owner can read.

    The permissions are copied from the marker file, which was created with the umask.
    """
    mode = stat.S_IMODE((folder / MARKER).stat().st_mode)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint of a run."""
    return (folder / "state.json").is_file() and (folder / "tensors").is_dir()


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory."""
    return (folder / "config.yaml").is_file() and (folder / "rejects.jsonl").is_file()


def is_export(folder: Path) -> bool:
    """Whether a folder contains an exported model or adapter."""
    described = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    return described and any(folder.glob("*.safetensors"))


def write_manifest(folder: Path, known: Mapping[str, str] = MappingProxyType({}), **facts: Any) -> None:
    """Write `manifest.json` with `facts`, the SHA-256 of the other files in the folder, and a fingerprint of the manifest.

    `known`: file name -> SHA-256, for files whose hash is already known. These files are not read.
    """
    excluded = ("manifest.json", MARKER)
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in excluded]
    names = {str(path.relative_to(folder)): path for path in paths}
    files = {name: known.get(name) or sha256_of(path) for name, path in names.items()}
    manifest = json.loads(json.dumps({**facts, "files": files}))  # as it will be read back
    text = json.dumps({**manifest, MANIFEST_FINGERPRINT: fingerprint(manifest)}, indent=1, sort_keys=True)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path, needed: Collection[str] = ()) -> dict[str, Any]:
    """Read `manifest.json` and verify the SHA-256 of every file that it lists.

    Raise ValueError if a file is missing or has another SHA-256. `needed`: files that the manifest must list.
    """
    manifest = intact_manifest(folder)
    for name in needed:
        if name not in manifest["files"]:
            raise ValueError(f"{folder}/manifest.json does not list {name}")
    for name, digest in manifest["files"].items():
        if not _is_inside(name):
            raise ValueError(f"{folder}/manifest.json lists {name!r}, which is not a path inside this folder")
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        if sha256_of(path) != digest:
            raise ValueError(f"{path} does not match its SHA-256 in the manifest: it was changed or cut off")
    return manifest


def read_json(path: Path) -> Any:
    """Read a JSON file. Raise ValueError if it is not a plain file (a pipe may never end), not JSON, or too large."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("the path is not a file")
        if found.st_size > MAX_MANIFEST_BYTES:
            raise ValueError(f"the file has {found.st_size:,} bytes, more than the limit of {MAX_MANIFEST_BYTES:,}")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from error


def intact_manifest(folder: Path) -> dict[str, Any]:
    """Read `manifest.json` without verifying the files that it lists. Raise ValueError if it is missing or damaged."""
    try:
        manifest = read_json(folder / "manifest.json")
        manifest["files"].items()
        own = manifest.pop(MANIFEST_FINGERPRINT, None)  # early manifests do not have it
        is_intact = own is None or own == fingerprint(manifest)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder}/manifest.json is missing or damaged ({error})") from error
    if not is_intact:
        raise ValueError(f"{folder}/manifest.json is missing or damaged (it does not match its own fingerprint)")
    return manifest


def _is_inside(name: str) -> bool:
    """Whether a name in a manifest is a path inside the manifest's folder: relative, without `..`."""
    return bool(name) and "\0" not in name and not name.startswith("/") and ".." not in name.split("/")

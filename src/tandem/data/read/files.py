"""A dataset's path in; the files that hold it, in order, out: from this machine or from the hub."""

import glob
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tandem.config.sections.datasets import DatasetFields
from tandem.data.read.hub import choose_files, hub_files, is_hub_name
from tandem.errors import DataError
from tandem.terminal.printable import listed

ANY_DEPTH = "**/*"
MAX_FILES = 100_000


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read, and the name its rows are known by."""

    path: Path
    name: str


def find_files(data_path: str, given: DatasetFields) -> list[SourceFile]:
    """The files that a path names, in order.

    One file; all that a pattern with * ? [ ] matches; a folder written by datasets' `save_to_disk`; a folder laid out
    like a dataset of the hub; or a dataset of the hub, org/name.
    """
    if not data_path:  # else it would be the folder one stands in
        raise DataError("data_path is empty. Give a file, a folder, or the name of a hub dataset (org/name).")
    path = Path(data_path)
    if path.is_file():
        _refuse_parts(data_path, given, "a file")
        return [SourceFile(path, data_path)]
    if any(sign in data_path for sign in "*?["):
        _refuse_parts(data_path, given, "a pattern")
        matching = _few(data_path, map(Path, glob.iglob(data_path, recursive=True)))  # noqa: PTH207
        files = sorted(name for name in matching if name.is_file())
        if not files:
            raise DataError(f"{data_path}: no file matches this pattern.")
        return [SourceFile(file, str(file)) for file in files]
    if path.is_dir():
        _refuse_prepared(path)
        files = _saved(path, given) if _is_saved(path) else _of_folder(path, given)
        return [SourceFile(file, str(file)) for file in files]
    if path.exists():
        raise DataError(f"{data_path}: neither a file nor a folder, but a pipe or a device. Write its rows to a file.")
    if is_hub_name(data_path):
        found = hub_files(data_path, subset=given.subset, split=given.split, revision=given.revision)
        return [SourceFile(file, f"{data_path}/{name}") for name, file in found.files.items()]
    if "://" in data_path:
        raise DataError(f"{data_path}: an address, from which nothing is fetched. {_instead_of(data_path)}")
    raise DataError(f"{data_path}: no such file or folder, and not the name of a hub dataset (org/name).")


def _few(data_path: str, paths: Iterator[Path]) -> list[Path]:
    """What a path leads to; a home directory, or all of a disk, is refused before it has been searched."""
    found = list(islice(paths, MAX_FILES + 1))
    if len(found) > MAX_FILES:
        raise DataError(
            f"{data_path}: more than {MAX_FILES:,} files and folders, which no dataset has. Name a file, a smaller folder or a "
            "narrower pattern."
        )
    return found


def _instead_of(address: str) -> str:
    """What to give for an address on the net: a hub dataset's name, where that can be told."""
    on_hub = re.match(r"(?:hf://datasets/|https?://(?:www\.)?huggingface\.co/datasets/)([\w.-]+/[\w.-]+)", address)
    return f"Give the hub dataset by its name: {on_hub[1]}." if on_hub else "Download the file and give its path."


def _refuse_parts(data_path: str, given: DatasetFields, what: str) -> None:
    """A file is what it is: it has no subsets, no revisions and, like one that datasets loads, the split train alone."""
    for key, value in (("subset", given.subset), ("revision", given.revision)):
        if value is not None:
            raise DataError(f"{data_path}: {what}, which has no {key} {value!r}. Leave out {key}.")
    if given.split not in (None, "train"):
        raise DataError(f"{data_path}: {what}, which has no split {given.split!r}. Leave out split.")


def _refuse_prepared(path: Path) -> None:
    """A folder of `tandem prepare` that lost a file, or one that holds several of them, is no hub dataset."""
    if prepared := sorted(manifest.parent for manifest in path.glob("*/manifest.json")):
        raise DataError(f"{path}: holds prepared sets. Name one of them: {listed(prepared)}.")
    missing = [name for name in ("manifest.json", "tokens.arrow") if not (path / name).is_file()]
    if len(missing) == 1:
        raise DataError(f"{path}: prepared data, but {missing[0]} is missing. Prepare it again, with tandem prepare.")


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _saved(path: Path, given: DatasetFields) -> list[Path]:
    """The Arrow files of a folder written by `save_to_disk`: of the wanted split, if it holds several."""
    try:
        in_splits = (path / "dataset_dict.json").is_file()
        if in_splits:
            splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            split = given.split or "train"
            if split not in splits:
                raise DataError(f"{path}: it has no split {split!r}. Set split to one of: {listed(splits)}.")
            path = path / split
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if not in_splits and given.split not in (None, state.get("_split") or "train"):
            raise DataError(f"{path}: one saved dataset, which has no split {given.split!r}. Leave out split.")
        names = [file["filename"] for file in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise DataError(f"{path}: saved with its rows rearranged by an index. Save it again, flattened.")
        if any(Path(name).name != name for name in names):
            raise DataError(f"{path}: state.json names files outside of the folder.")
        missing = next((name for name in names if not (path / name).is_file()), None)
        if missing is not None:
            raise DataError(f"{path}: state.json names {missing}, which is not there. Save the dataset again.")
        return [path / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not a whole folder of datasets' save_to_disk ({error}).") from None


def _of_folder(path: Path, given: DatasetFields) -> list[Path]:
    """A folder like a dataset of the hub, such as a copy of one: README.md or names tell subsets and splits."""
    if given.revision is not None:
        raise DataError(f"{path}: a folder, which has no revision {given.revision!r}. Leave out revision.")
    inside = _few(str(path), path.glob(ANY_DEPTH))
    listing = sorted(str(file.relative_to(path)) for file in inside if file.is_file())
    readme = (path / "README.md").read_text("utf-8", "replace") if "README.md" in listing else ""
    chosen = choose_files(str(path), listing, readme, subset=given.subset, split=given.split)
    return [path / name for name in chosen]

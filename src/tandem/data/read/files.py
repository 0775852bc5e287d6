"""Finds the files that a data path names, on this machine or on the hub, in the order in which they are read."""

import difflib
import glob
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tandem.config.sections.datasets import DatasetFields
from tandem.data.read.hub import choose_files, hub_files, is_data, is_hub_name
from tandem.errors import DataError, one_line
from tandem.storage.cache import is_run
from tandem.terminal.printable import listed
from tandem.training.run.other_folders import SWEEP_FILE

ANY_DEPTH = "**/*"
MAX_FILES = 100_000
SEARCHED_NAMES = 1000  # in a folder, for one like a missing name
ROWS_FILE = re.compile(r"[0-9a-f]{32}\.jsonl")  # in the folder rows of the cache (api/rows.py)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read, and the name that messages use for it."""

    path: Path
    name: str


def find_files(data_path: str, given: DatasetFields) -> list[SourceFile]:
    """Return the files that a data path names, in the order in which they are read.

    The path can be a file, a pattern with * ? [ ], a folder written by `save_to_disk` of the datasets library, a folder
    laid out like a hub dataset, or the name of a hub dataset (org/name).
    """
    if not data_path:  # Path("") is the current folder
        raise DataError("data_path is empty. Give a file, a folder, or the name of a hub dataset (org/name).")
    path = Path(data_path)
    if path.is_file():
        _refuse_hub_options(data_path, given, "a file")
        return [SourceFile(path, data_path)]
    if any(sign in data_path for sign in "*?["):
        _refuse_hub_options(data_path, given, "a pattern")
        matching = _list_limited(data_path, map(Path, glob.iglob(data_path, recursive=True)))  # noqa: PTH207
        files = sorted(name for name in matching if name.is_file())
        if not files:
            raise DataError(f"{data_path}: no file matches this pattern.")
        return [SourceFile(file, str(file)) for file in files]
    if path.is_dir():
        _refuse_prepared(path)
        files = _saved_files(path, given) if _is_saved(path) else _files_in_folder(path, given)
        return [SourceFile(file, str(file)) for file in files]
    if path.exists():
        raise DataError(f"{data_path}: a pipe or a device, not a file or a folder. Write its rows to a file.")
    if is_hub_name(data_path):
        try:
            found = hub_files(data_path, subset=given.subset, split=given.split, revision=given.revision)
        except DataError as error:
            if path.parent.is_dir():
                raise DataError(f"{error} As a path: no such file or folder.{_near(path, lists=True)}") from None
            raise
        return [SourceFile(file, f"{data_path}/{name}") for name, file in found.files.items()]
    if "://" in data_path:
        raise DataError(f"{data_path}: tandem does not download from URLs. {_url_hint(data_path)}")
    if path.parent.name == "rows" and ROWS_FILE.fullmatch(path.name):
        raise DataError(
            f"{data_path}: this file of the cache, with the rows that a call from Python gave, no longer exists. Make the same "
            "call with the same rows again: it writes the file, and resumes the run if it is unfinished."
        )
    raise DataError(f"{data_path}: no such file or folder, and not the name of a hub dataset (org/name).{_near(path)}")


def _near(path: Path, *, lists: bool = False) -> str:
    """Return a question with a name in the same folder that is like a missing one. `lists`: if there is none, what there is."""
    try:
        names = [one.name for one in islice(path.parent.iterdir(), SEARCHED_NAMES) if not one.name.startswith(".")]
    except OSError:  # there is no such folder, or it cannot be read
        return ""
    # The endings alone, .jsonl and .jsonl, do not make two names alike.
    stems = difflib.get_close_matches(path.stem, {Path(name).stem for name in names})
    if near := difflib.get_close_matches(path.name, [name for name in names if Path(name).stem in stems], n=1):
        return f" Did you mean {path.parent / near[0]}?"
    return f" {path.parent} holds {listed(sorted(names))}." if lists and names else ""


def _list_limited(data_path: str, paths: Iterator[Path]) -> list[Path]:
    """Return the paths as a list. Raise a DataError if there are more than MAX_FILES, so that a whole disk is not searched."""
    found = list(islice(paths, MAX_FILES + 1))
    if len(found) > MAX_FILES:
        raise DataError(
            f"{data_path}: over {MAX_FILES:,} files and folders, too many for a dataset. Give a file, a smaller folder or a "
            "narrower pattern."
        )
    return found


def _url_hint(address: str) -> str:
    """Return advice on what to set as data_path instead of a URL: the name of a hub dataset, or the path of a downloaded file."""
    on_hub = re.match(r"(?:hf://datasets/|https?://(?:www\.)?huggingface\.co/datasets/)([\w.-]+/[\w.-]+)", address)
    return f"Give the hub dataset by its name: {on_hub[1]}." if on_hub else "Download the file and give its path."


def _refuse_hub_options(data_path: str, given: DatasetFields, what: str) -> None:
    """Raise a DataError if subset, revision, or a split other than train is set. They have no effect on a file or a pattern."""
    for key, value in (("subset", given.subset), ("revision", given.revision)):
        if value is not None:
            raise DataError(f"{data_path}: {key} = {value!r} has no effect on {what}. Leave out {key}.")
    if given.split not in (None, "train"):
        raise DataError(f"{data_path}: {what} has no split {given.split!r}. Leave out split.")


def _refuse_prepared(path: Path) -> None:
    """Raise a DataError if a folder holds several prepared sets, or a prepared set with a missing file."""
    if prepared := sorted(manifest.parent for manifest in path.glob("*/manifest.json")):
        raise DataError(f"{path}: the folder contains prepared sets. Give the path of one of them: {listed(prepared)}.")
    missing = [name for name in ("manifest.json", "tokens.arrow") if not (path / name).is_file()]
    if len(missing) == 1:
        raise DataError(f"{path}: {missing[0]} is missing from this prepared set. Run tandem prepare again.")


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _saved_files(path: Path, given: DatasetFields) -> list[Path]:
    """Return the Arrow files of a folder written by `save_to_disk`.

    If the folder has splits, return only the files of the configured split.
    """
    try:
        in_splits = (path / "dataset_dict.json").is_file()
        if in_splits:
            splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            split = given.split or "train"
            if split not in splits:
                raise DataError(f"{path}: there is no split {split!r}. Set split to one of: {listed(splits)}.")
            path = path / split
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if not in_splits and given.split not in (None, state.get("_split") or "train"):
            raise DataError(f"{path}: the saved dataset has no split {given.split!r}. Leave out split.")
        names = [file["filename"] for file in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise DataError(
                f"{path}: the dataset was saved with an index over its rows, which tandem cannot read. Call "
                "flatten_indices() and save it again."
            )
        if any(Path(name).name != name for name in names):
            raise DataError(
                f"{path}: state.json names files outside this folder, which are not read. Save the dataset again."
            )
        missing = next((name for name in names if not (path / name).is_file()), None)
        if missing is not None:
            raise DataError(f"{path}: state.json names {missing}, but this file is missing. Save the dataset again.")
        return [path / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: not a complete folder of save_to_disk ({one_line(error)}). Save the dataset again."
        ) from None


def _files_in_folder(path: Path, given: DatasetFields) -> list[Path]:
    """Return the data files of a folder laid out like a hub dataset. README.md or the file names define subsets and splits."""
    if given.revision is not None:
        raise DataError(f"{path}: revision = {given.revision!r} has no effect on a folder. Leave out revision.")
    inside = _list_limited(str(path), path.glob(ANY_DEPTH))
    listing = sorted(str(file.relative_to(path)) for file in inside if file.is_file())
    readme = (path / "README.md").read_text("utf-8", "replace") if "README.md" in listing else ""
    try:
        chosen = choose_files(str(path), listing, readme, subset=given.subset, split=given.split, is_local=True)
    except DataError:
        _refuse_runs(path, listing)
        raise
    return [path / name for name in chosen]


def _refuse_runs(path: Path, listing: list[str]) -> None:
    """Raise a DataError if a folder is a run, or holds runs in it or in its folders, whose files are not data."""
    if is_run(path):
        raise DataError(f"{path}: a run, not data. Give a file of preference pairs.")
    runs = [Path(file).parent for file in listing if Path(file).name == "config.yaml" and is_run((path / file).parent)]
    if not runs:
        return
    data = [file for file in listing if is_data(file) and Path(file).name != SWEEP_FILE]
    others = [file for file in data if not any(run in Path(file).parents for run in runs)]
    which = f"one of its other files, such as {path / others[0]}" if others else "a file of preference pairs"
    raise DataError(f"{path}: it holds runs, such as {path / runs[0]}, not data. Give {which}.")

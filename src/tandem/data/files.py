"""A dataset's path in; the files that hold it, in order, out."""

import glob
from dataclasses import dataclass
from pathlib import Path

from tandem.config.schema import DatasetFields
from tandem.errors import DataError


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read, and the name its rows are known by."""

    path: Path
    name: str


def find_files(data_path: str, given: DatasetFields) -> list[SourceFile]:
    """The files that a path names: one file, or all that a pattern with * ? [ ] matches, in order of their names."""
    path = Path(data_path)
    if path.is_file():
        return [SourceFile(path, data_path)]
    if any(sign in data_path for sign in "*?["):
        files = sorted(name for name in map(Path, glob.glob(data_path, recursive=True)) if name.is_file())  # noqa: PTH207
        if not files:
            raise DataError(f"{data_path}: no file matches this pattern.")
        return [SourceFile(file, str(file)) for file in files]
    if path.is_dir():
        raise DataError(f"{data_path}: a directory. Name its files, for example by the pattern {path}/*.jsonl.")
    raise DataError(f"{data_path}: no such file. Check data.train.data_path and the validation paths.")

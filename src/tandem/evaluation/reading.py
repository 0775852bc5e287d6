"""Finds out how each set of an evaluation is read, and recognises RewardBench's files. Does not import torch."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.formats import NOTHING_FITS, detect_format, unused_key
from tandem.data.formats.paths import with_paths
from tandem.data.formats.user_formats import own_format
from tandem.data.read.files import SourceFile, find_files
from tandem.data.read.hub import is_hub_name
from tandem.data.read.sources import RowError, SourceRow, read_chunks, rows_of
from tandem.data.store.opening import is_prepared
from tandem.errors import DataError
from tandem.evaluation.rewardbench import EXAMPLE_COUNTS, PRIOR_SETS
from tandem.terminal.arguments import option
from tandem.terminal.printable import listed
from tandem.user_code import RefusedCodeError

if TYPE_CHECKING:
    from tandem.evaluation.data_requests import DataRequest
    from tandem.evaluation.request import Subject

SetKind = Literal["pairs", "RewardBench", "RewardBench 2"]
SHOWN_FIELDS = 12
READING_KEYS = ("prompt_key", "chosen_key", "rejected_key")
REWARDBENCH_2_KEYS = ("prompt", "chosen", "rejected", "num_correct", "total_completions", "subset")  # and id


def check_code(data: "Iterable[DataRequest]", subject: "Subject") -> None:
    """Raise RefusedCodeError if a set is read by a function that may not be run. Sets on the hub are not downloaded for it."""
    for one in data if subject.refused_formats else ():
        if one.fields is not None or not is_hub_name(one.path):
            kind_and_fields(one, subject)


def check_field(data: "Iterable[DataRequest]", by: str) -> None:
    """Raise DataError if no row of a set has the field by which results are given. Sets on the hub are checked later."""
    for one in data:
        if not is_hub_name(one.path):
            require_field(one, one.fields or DatasetFields(data_path=one.path), by)


def require_field(one: "DataRequest", fields: DatasetFields, by: str) -> None:
    """Raise DataError if no row of a set has a value for a field. Reads up to the first row that has one."""
    if is_prepared(Path(one.path)):
        raise DataError(
            f"{option('by', by)}: {one.path} is prepared, and keeps tokens only. Give the file that it was made from."
        )
    names: list[str] | None = None  # of the first row's fields
    for row in rows_in(find_files(one.path, fields)):
        if row.value.get(by) not in (None, ""):
            return
        names = [name for name in row.value if name != by] if names is None else names
    if names is not None:
        raise DataError(
            f"{option('by', by)}: no row of {one.path} has a value for this field. Give a field of the rows, such as those of "
            f"the first row: {listed(names, most=SHOWN_FIELDS)}."
        )


def kind_and_fields(one: "DataRequest", subject: "Subject") -> tuple[SetKind, DatasetFields]:
    """What kind of set it is, and how its rows are read.

    The data keys of a run apply if the first row has them, and its format function if nothing else reads the row; its prompt
    files always do, because they are part of its prompts.
    """
    if one.fields is not None:
        _refuse_code(one.fields, subject)
        return "pairs", one.fields.model_copy(update={"data_path": one.path})
    fields = subject.config.data.default if subject.sets_fields else DatasetFields()
    fields = fields.model_copy(update={"data_path": one.path})
    _refuse_code(fields, subject)
    if is_prepared(Path(one.path)):
        return "pairs", fields
    files = find_files(one.path, fields)
    first = next(rows_in(files), None)
    keys: Mapping[str, Any] = {} if first is None else first.value
    if subject.run is not None and not subject.sets_fields:
        trained = subject.config.data.training_sets[0]
        wording = {name: getattr(trained, name) for name in ("prompt_file", "system_prompt_file")}
        names = {name: getattr(trained, name) for name in READING_KEYS}
        fits = all(name in keys for name in names.values())
        if trained.paths_and_labels:
            names |= {name: getattr(trained, name) for name in ("label_key", "label_values", "columns")}
            fits = first is not None and _has_format(first, trained)
        fields = fields.model_copy(update={**wording, **(names if fits else {})})
    if first is not None and not subject.sets_fields and not fields.columns:
        fits = detect_format(first, fields) != NOTHING_FITS
        own = None if fits else own_format(first, subject.own_formats, subject.refused_formats)
        fields = fields if own is None else fields.model_copy(update={"dataset_name": own})
    return _kind(keys, files[0].path), fields


def _refuse_code(fields: DatasetFields, subject: "Subject") -> None:
    """Raise RefusedCodeError if a set is read by a function that may not be run."""
    if (why := subject.refused_formats.get(str(fields.dataset_name))) is not None:
        raise RefusedCodeError(why)


def _has_format(row: SourceRow, fields: DatasetFields) -> bool:
    """Whether a row can be read with the paths and label settings of a run."""
    try:
        found = detect_format(with_paths(row, fields), fields)
    except RowError:
        return False
    return found != NOTHING_FITS and unused_key(found[0], fields) is None


def _kind(keys: Mapping[str, Any], file: Path) -> SetKind:
    if all(name in keys for name in REWARDBENCH_2_KEYS) and isinstance(keys["chosen"], list):
        return "RewardBench 2"
    if all(name in keys for name in ("prompt", "chosen", "rejected")) and (
        keys.get("subset") in EXAMPLE_COUNTS or prior_set(keys, file) is not None
    ):
        return "RewardBench"
    return "pairs"


def prior_set(keys: Mapping[str, Any], file: Path) -> str | None:
    """The prior set that a file of preference-test-sets holds: anthropic_hhh-00000-of-00001.parquet -> anthropic_hhh"""
    return next(
        (name for name in (keys.get("subset"), file.name.split("-")[0].split(".")[0]) if name in PRIOR_SETS), None
    )


def rows_in(files: list[SourceFile]) -> Iterator[SourceRow]:
    """The rows of files that can be parsed."""
    for file in files:
        for chunk in read_chunks(file.path, file.name):
            yield from (row for row in rows_of(chunk) if isinstance(row, SourceRow))

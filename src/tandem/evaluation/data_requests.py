"""Which sets an evaluation measures. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.section import EMBEDDED
from tandem.embedded.files import VALIDATION
from tandem.errors import ConfigError
from tandem.storage.cache import real_path
from tandem.terminal.arguments import option

if TYPE_CHECKING:
    from tandem.evaluation.request import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRequest:
    """A set to measure. fields: how to read it; None: decided by its first row."""

    name: str
    path: str
    fields: DatasetFields | None = None


def each_once(data: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the data without repetitions, under the first name of each, and a sentence for each name that is left out."""
    first: dict[Path, str] = {}  # by place on disk
    left_out = []
    for name in data:
        place = real_path(_path(name))
        if place in first:
            which = "named twice" if first[place] == name else f"the same data as {first[place]}"
            left_out.append(f"{name} is {which}, and measured once.")
        first.setdefault(place, name)
    return tuple(first.values()), tuple(left_out)


def data_requests(data: Sequence[str], subject: "Subject", *, tasks: bool) -> tuple[DataRequest, ...]:
    """The sets to measure: those given or, without any, the validation sets of the run."""
    if data:
        return tuple(DataRequest(name=name, path=_path(name)) for name in data)
    if subject.run is None:
        if tasks:
            return ()
        raise ConfigError(
            f"{option('model', subject.name)}: not a run, so give {option('data')}: one or more files of preference pairs, "
            "or embedded."
        )
    sets = subject.config.data.validation_sets
    if not sets and not tasks:
        raise ConfigError(
            f"{option('model', subject.name)}: the run has no validation set. Give {option('data')}: a file of preference "
            "pairs."
        )
    return tuple(
        DataRequest(
            name=name,
            path=_path(str(fields.data_path or "")),
            fields=fields,
        )
        for name, fields in sets.items()
    )


def _path(name: str) -> str:
    return str(VALIDATION) if name == EMBEDDED else name

"""Opens the sets of an evaluation: tokenises each, and labels the rows by which its results are grouped."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.config.sections.datasets import DatasetFields
from tandem.data.read.files import find_files
from tandem.data.store.opening import open_store
from tandem.data.store.processes import Processes
from tandem.data.store.selection import Preferences
from tandem.data.store.sets import PERCENT, ProgressBar, percent_of
from tandem.data.store.token_store import TokenStore
from tandem.data.text.template import Template
from tandem.errors import ConfigError, DataError
from tandem.evaluation.data_requests import DataRequest
from tandem.evaluation.reading import SetKind, kind_and_fields, prior_set, require_field, rows_in
from tandem.evaluation.request import Subject
from tandem.evaluation.rewardbench import EXAMPLE_COUNTS, TIES, ties_kind_and_number
from tandem.terminal.printable import listed

SHOWN_ROWS = 3


@dataclass(frozen=True, slots=True)
class RowLabels:
    """Values of a row that decide how its results are grouped."""

    subset: str = ""  # of RewardBench
    id: str = ""
    num_correct: int = 0  # of RewardBench 2
    field: str = ""  # the value of the field that `by` names


@dataclass(frozen=True)
class EvaluationSet:
    """A tokenised set, and the labels of its rows by place (empty unless results are grouped by them)."""

    name: str
    kind: SetKind
    store: TokenStore
    labels: Mapping[str, RowLabels]

    @cached_property
    def prompts(self) -> list[bytes]:
        """A digest of the prompt of each preference: preferences of one prompt are not independent."""
        return [blake2b(one.prompt.tobytes(), digest_size=16).digest() for one in self.store]

    @property
    def skipped(self) -> dict[str, int]:
        return self.store.counts.bad | self.store.counts.filtered

    def labels_of(self, preferences: NDArray[np.int64]) -> list[RowLabels]:
        return [self.labels.get(self.store.place(int(index)), RowLabels()) for index in preferences]


@dataclass(frozen=True, slots=True)
class OpenSets:
    """The sets of an evaluation."""

    sets: tuple[EvaluationSet, ...]

    def by_split(self) -> dict[str, Preferences]:
        return {one.name: one.store for one in self.sets}


def open_evaluation_sets(
    data: tuple[DataRequest, ...],
    subject: Subject,
    template: Template,
    max_length: int,
    by: str | None,
    bar: ProgressBar,
) -> OpenSets:
    """Tokenise, or find tokenised, every set. Every pair of completions with different ranks is measured."""
    settings = subject.config.data
    opened = []
    with Processes(template) as processes:
        for one in data:
            kind, fields = kind_and_fields(one, subject)
            with bar(f"Tokenising {Path(one.name).name}", PERCENT, unit="%") as advance:
                try:
                    store = open_store(
                        one.path,
                        fields,
                        template,
                        settings,
                        max_length,
                        progress=percent_of(advance),
                        processes=processes,
                    )
                except (ConfigError, DataError) as error:
                    raise type(error)(str(error).replace("data.train.", "data.default.")) from None
            labels = _labels(one, fields, by) if by is not None or kind != "pairs" else {}
            if kind == "RewardBench 2":
                _check_rewardbench_2(labels)
            opened.append(EvaluationSet(one.name, kind, store, labels))
    return OpenSets(tuple(opened))


def _labels(one: DataRequest, fields: DatasetFields, by: str | None) -> dict[str, RowLabels]:
    """The labels of every row, by its place. The file is read a second time: the store keeps tokens only."""
    if by is not None:
        require_field(one, fields, by)
    labels = {}
    files = find_files(one.path, fields)
    for file in files:
        for row in rows_in([file]):
            subset = row.value.get("subset")
            if subset not in EXAMPLE_COUNTS and (prior := prior_set(row.value, file.path)) is not None:
                subset = prior
            value = "" if by is None else row.value.get(by)
            chosen = row.value.get("chosen")
            labels[row.place] = RowLabels(
                subset=str(subset or ""),
                id=_as_text(row.value.get("id")),
                num_correct=len(chosen) if isinstance(chosen, list) else 0,
                field=_as_text(value),
            )
    return labels


def _check_rewardbench_2(labels: Mapping[str, RowLabels]) -> None:
    """Raise DataError unless every row has an id, and those of Ties are ref:N, with one correct completion, or tied:N.

    Each is given once: the score compares the two of each N.
    """
    if without_id := [place for place, label in labels.items() if not label.id]:
        raise DataError(
            f"{listed(without_id, most=SHOWN_ROWS)}: no id, which every row of RewardBench 2 has. Give the published ids, or "
            "leave out the key total_completions to measure the file as plain pairs."
        )
    first: dict[tuple[str, int], str] = {}
    for place, label in labels.items():
        if label.subset.lower() != TIES:
            continue
        try:
            kind_and_number = ties_kind_and_number(label.id)
        except ValueError:
            raise DataError(
                f"{place}: id = {listed([repr(label.id)])}, but the score of Ties needs ref:N for a prompt with one correct "
                "completion and tied:N for its counterpart with several, such as ref:7 and tied:7. Give the published ids, "
                "or leave out the rows of Ties."
            ) from None
        if kind_and_number[0] == "ref" and label.num_correct > 1:
            raise DataError(
                f"{place}: id = {label.id}, but chosen has {label.num_correct} completions. The score of Ties needs one correct "
                f"completion of ref:N and several of its counterpart, tied:N. Correct the id or chosen."
            )
        if (earlier := first.setdefault(kind_and_number, place)) != place:
            raise DataError(
                f"{place}: id = {label.id} is that of {earlier} too, but the score of Ties needs different ids. Remove one "
                "of the rows."
            )


def _as_text(value: Any) -> str:
    return "" if value is None else str(value)

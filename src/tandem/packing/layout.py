"""Lays out tokenized preferences as a Pack: rows of fixed length in which each prompt is followed by its completions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tandem.columns import Column, columns_in_use
from tandem.data.text.tokens import TokenizedPreference

IntArray = NDArray[np.int64]

# How a preference is laid out in rows:
#   shared    prompt | completion 0 | completion 1           in one row, the prompt once
#   repeated  prompt | completion 0 | prompt | completion 1  in one row, the prompt for each completion
#   separate  prompt | completion 0                          one row for each completion
# A preference that is longer than a row takes several rows alone. Each holds the prompt and the next completions that fit.
Arrangement = Literal["shared", "repeated", "separate"]

FILLER = -1


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows of tokens. Also defines which positions attend to which, and which position predicts each scored token.

    A tree is a prompt with the completions that share it. Branch 0 of a tree is the prompt, and every completion is a branch.
    A position attends to itself, and to earlier positions of the same tree that are in the prompt or in the same branch.
    Filler has tree -1 and attends only to itself.
    """

    token_ids: IntArray  # [rows, length]
    position_ids: IntArray  # [rows, length]; in a completion they continue from the prompt's length
    tree: IntArray  # [rows, length]
    branch: IntArray  # [rows, length]; 0 for the prompt, 1.. for its completions
    predicting: IntArray  # [scored] flat position (row * length + column) that predicts each scored token
    target_ids: IntArray  # [scored]
    completion_lengths: IntArray  # [completions], number of scored tokens; these are stored completion by completion
    columns: Mapping[str, NDArray[np.float32]]  # values given in the data, by name: [completions] or [preferences]
    winners: IntArray  # [pairs], indices into the completions
    losers: IntArray  # [pairs]
    best: IntArray  # [preferences], index of the best completion, which the SFT loss uses
    owner: IntArray  # [completions], index into `preferences`
    preferences: IntArray  # [preferences], index in the data set

    @property
    def num_pairs(self) -> int:
        return len(self.winners)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are not filler."""
        return int((self.tree != FILLER).sum())


def lay_out(
    indices: Sequence[int],
    preferences: Sequence[TokenizedPreference],
    *,
    length: int,
    arrangement: Arrangement = "shared",
) -> Pack:
    """Lay out preferences one after another in a row.

    With arrangement separate, every completion has its own row, which starts with a copy of the prompt.
    `indices`: the index of each preference in the data set. Without preferences, the result is a row of filler.
    """
    plans = [_rows(preference, length, arrangement) for preference in preferences]
    one_row = arrangement != "separate" and all(len(plan) == 1 for plan in plans)
    writer = _Writer(length, 1 if one_row else sum(len(plan) for plan in plans))
    predicting: list[IntArray] = []
    winners: list[int] = []
    losers: list[int] = []
    best: list[int] = []
    num_completions = 0
    for preference, plan in zip(preferences, plans, strict=True):
        for trees in plan:
            if not one_row:
                writer.next_row()
            for tree in trees:
                predicting += writer.tree(preference.prompt, [preference.completions[number] for number in tree])
        winners += [num_completions + winner for winner, _ in preference.pairs]
        losers += [num_completions + loser for _, loser in preference.pairs]
        best.append(num_completions + preference.pairs[0][0])
        num_completions += len(preference.completions)
    completions = [completion for preference in preferences for completion in preference.completions]
    if any(preference.unscored for preference in preferences):
        scored = [p.scored(number) for p in preferences for number in range(len(p.completions))]
        predicting = [positions[kept] for positions, kept in zip(predicting, scored, strict=True)]
        completions = [completion[kept] for completion, kept in zip(completions, scored, strict=True)]
    return Pack(
        token_ids=writer.token_ids,
        position_ids=writer.position_ids,
        tree=writer.tree_ids,
        branch=writer.branch_ids,
        predicting=_concatenate(predicting),
        target_ids=_concatenate(completions),
        completion_lengths=np.array([len(completion) for completion in completions], np.int64),
        columns=_columns(preferences),
        winners=np.array(winners, np.int64),
        losers=np.array(losers, np.int64),
        best=np.array(best, np.int64),
        owner=np.repeat(np.arange(len(preferences)), np.array([len(p.completions) for p in preferences], np.int64)),
        preferences=np.array(indices, np.int64),
    )


def join(packs: Sequence[Pack]) -> Pack:
    """Join packs with the same row length into one pack, a micro-batch. It has the rows of all packs."""
    if len(packs) == 1:
        return packs[0]
    positions = np.cumsum([0, *(pack.token_ids.size for pack in packs)])
    completions = np.cumsum([0, *(len(pack.completion_lengths) for pack in packs)])
    preferences = np.cumsum([0, *(len(pack.preferences) for pack in packs)])

    def stacked(field: str) -> IntArray:
        return np.concatenate([getattr(pack, field) for pack in packs])

    def shifted(field: str, by: IntArray) -> IntArray:
        return np.concatenate([getattr(pack, field) + start for pack, start in zip(packs, by, strict=False)])

    return Pack(
        token_ids=stacked("token_ids"),
        position_ids=stacked("position_ids"),
        tree=stacked("tree"),
        branch=stacked("branch"),
        predicting=shifted("predicting", positions),
        target_ids=stacked("target_ids"),
        completion_lengths=stacked("completion_lengths"),
        columns=_joined_columns(packs),
        winners=shifted("winners", completions),
        losers=shifted("losers", completions),
        best=shifted("best", completions),
        owner=shifted("owner", preferences),
        preferences=stacked("preferences"),
    )


class _Writer:
    """Writes tokens into rows, from left to right."""

    def __init__(self, length: int, rows: int):
        self.length, self.row, self.at, self.trees = length, 0, 0, 0
        self.started = False
        shape = (max(rows, 1), length)
        self.token_ids = np.zeros(shape, np.int64)
        self.position_ids = np.zeros(shape, np.int64)
        self.tree_ids = np.full(shape, FILLER, np.int64)
        self.branch_ids = np.zeros(shape, np.int64)

    def next_row(self) -> None:
        if self.started:
            self.row, self.at = self.row + 1, 0
        self.started = True

    def tree(self, prompt: NDArray[np.int32], completions: Sequence[NDArray[np.int32]]) -> list[IntArray]:
        """Write a prompt and its completions. Return, for each completion, the positions that predict its tokens.

        Example: a prompt of 4 tokens at columns 0-3, completions of 2 and 3 tokens at columns 4-5 and 6-8:
          position ids  0 1 2 3 | 4 5 | 4 5 6
          predicting              3 4 | 3 6 7     (the last prompt position predicts the first token of every completion)
        """
        last_prompt = self._write(prompt, 0, 0) + len(prompt) - 1
        predicting = []
        for branch, completion in enumerate(completions, start=1):
            start = self._write(completion, branch, len(prompt))
            predicting.append(np.array([last_prompt, *range(start, start + len(completion) - 1)], np.int64))
        self.trees += 1
        return predicting

    def _write(self, ids: NDArray[np.int32], branch: int, first_position: int) -> int:
        start, end = self.at, self.at + len(ids)
        assert end <= self.length, f"{end} tokens do not fit in a row of {self.length}"
        self.token_ids[self.row, start:end] = ids
        self.position_ids[self.row, start:end] = np.arange(first_position, first_position + len(ids))
        self.tree_ids[self.row, start:end] = self.trees
        self.branch_ids[self.row, start:end] = branch
        self.at = end
        return self.row * self.length + start


def _rows(preference: TokenizedPreference, length: int, arrangement: Arrangement) -> list[list[list[int]]]:
    """Return the rows of a preference: a list of rows. A row is a list of trees; a tree is a list of completion indices.

    With arrangement shared, completions in the same row share one prompt. With repeated, every completion has its own copy.
    Example: a prompt of 4 tokens, completions of 2, 3 and 2 tokens. In rows of 10, shared gives [[[0, 1]], [[2]]] and repeated
    gives [[[0]], [[1]], [[2]]]. In rows of 11, shared gives [[[0, 1, 2]]].
    """
    prompt = len(preference.prompt)
    rows: list[list[list[int]]] = []
    room = 0
    for number, completion in enumerate(preference.completions):
        shares = arrangement == "shared" and rows
        takes = len(completion) if shares else prompt + len(completion)
        if arrangement == "separate" or takes > room:
            rows.append([[number]])
            room = length - prompt - len(completion)
        else:
            room -= takes
            if shares:
                rows[-1][-1].append(number)
            else:
                rows[-1].append([number])
    return rows


def _columns(preferences: Sequence[TokenizedPreference]) -> dict[str, NDArray[np.float32]]:
    """Return the values of the data columns in use. A preference that does not give a column has the column's default value."""
    columns = columns_in_use(name for preference in preferences for name in preference.columns)
    return {c.name: np.array([value for p in preferences for value in p.values(c.name)], c.dtype) for c in columns}


def _joined_columns(packs: Sequence[Pack]) -> dict[str, NDArray[np.float32]]:
    def values(pack: Pack, column: Column) -> NDArray[np.float32]:
        num = len(pack.completion_lengths) if column.per == "completion" else len(pack.preferences)
        return pack.columns.get(column.name, np.full(num, column.default, column.dtype))

    columns = columns_in_use(name for pack in packs for name in pack.columns)
    return {column.name: np.concatenate([values(pack, column) for pack in packs]) for column in columns}


def _concatenate(parts: Sequence[NDArray[np.integer]]) -> IntArray:
    return np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)

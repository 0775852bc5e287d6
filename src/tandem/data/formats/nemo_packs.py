"""Reads and writes the packed files of NeMo Aligner, `packed_{size}_seed{seed}.npy`.

These files are pickles, and unpickling can run arbitrary code. `plain_pickle` reads them as data instead: nothing that a
file names is imported or called.

A sequence is a prompt followed by one completion. Each pack is a dict of several sequences, in the order chosen,
rejected, chosen, rejected, ... `input_ids` and `labels` are concatenated over all sequences. `seq_boundaries` is 0,
followed by the end of each sequence. `lengths` and `reward` have one value per sequence.

There are two layouts of labels. For the prompt 5 6 and the answer 7 8, they are:

              in place (Aligner 0.6, and write_nemo)    one ahead (Aligner 0.7)
   input_ids  5    6    7  8                            5    6  7
   labels     -100 -100 7  8                            -100 7  8
"""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.config.sections.section import MAX_SCORE
from tandem.data.formats.plain_pickle import Array, Refused, describe, load_objects
from tandem.data.text.tokens import IntArray, TokenizedPreference
from tandem.errors import DataError
from tandem.storage.cache import replacing

NOT_SCORED = -100  # the label of tokens that do not count in the loss: prompt, tool turns, padding
DEFAULT_REWARDS = (1.0, 0.0)  # of chosen and rejected if the data has none
MAX_ID = np.iinfo(np.int32).max
KEYS = ("input_ids", "labels", "reward", "lengths", "seq_boundaries")
PACK_AGAIN_HINT = "Pack it again, or prepare from the JSONL file that it was packed from."


def read_nemo(file: Path) -> list[list[TokenizedPreference]]:
    """Return the packs of a file, each as a list of preferences.

    Each preference has two completions, with their rewards as scores. All pairs are returned, even those with equal or
    over-long completions. Labels may be at the positions of their tokens or one position before. This layout is
    detected, and must be the same in the whole file.
    """
    if file.exists() and not file.is_file() and not file.is_dir():
        raise DataError(f"{file}: a pipe or a device. Give the path of a packed_*.npy file.")
    entries, num_bytes = _load_packs(file)
    _check_amount(entries, num_bytes, file)
    entries.reverse()
    packs: list[list[_Sequence]] = []
    while entries:  # entries are freed one by one: tokens as Python integers take nine times the memory
        packs.append(_sequences(entries.pop(), f"{file}: pack {len(packs)}"))
    ahead = _labels_are_ahead([sequence for pack in packs for sequence in pack])
    return [
        [
            _preference(pack[i].in_place(ahead), pack[i + 1].in_place(ahead), f"{file}:{number}.{i // 2}", i)
            for i in range(0, len(pack), 2)
        ]
        for number, pack in enumerate(packs)
    ]


def write_nemo(file: Path, packs: Iterable[Sequence[TokenizedPreference]]) -> None:
    """Write packs in the format of NeMo Aligner. The file is written completely or not at all.

    Each pair of a preference becomes two sequences: the prompt with the chosen completion, and the prompt with the
    rejected completion. Each label is at the position of its token. Packs without pairs are left out.
    """
    entries = [entry for pack in packs if (entry := _entry(pack))["lengths"]]
    array = np.empty(len(entries), object)
    array[:] = entries
    data = pickle.dumps(array, protocol=3)
    # numpy 2 writes a new module name, which the numpy in Aligner's containers cannot load. All versions can load the old name.
    head, rest = data[:64].replace(b"numpy._core.", b"numpy.core."), memoryview(data)[64:]
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file, binary=True) as sink:
        np.lib.format.write_array_header_1_0(sink, np.lib.format.header_data_from_array_1_0(array))
        sink.write(head)
        sink.write(rest)


def nemo_pack_tokens(preference: TokenizedPreference) -> int:
    """Return the number of tokens that a preference takes in a NeMo pack.

    Each pair of the preference becomes two sequences. A sequence of n tokens counts as n - 1, because the last token is
    only a label, not an input.
    """
    lengths = [len(preference.prompt) + len(completion) - 1 for completion in preference.completions]
    return sum(lengths[winner] + lengths[loser] for winner, loser in preference.pairs)


def single_pairs(preference: TokenizedPreference) -> Iterator[TokenizedPreference]:
    """Yield each pair as a separate preference with two completions, so that pairs can go into different NeMo packs."""
    for pair in preference.pairs:
        yield TokenizedPreference(
            prompt=preference.prompt,
            completions=tuple(preference.completions[i] for i in pair),
            pairs=((0, 1),),
            place=preference.place,
            unscored=tuple(preference.unscored[i] for i in pair) if preference.unscored else (),
            columns={"score": tuple(preference.scores[i] for i in pair)},
        )


# Writing


def _entry(pack: Sequence[TokenizedPreference]) -> dict[str, list[Any]]:
    """Return the dict that represents a pack in the file."""
    entry: dict[str, list[Any]] = {key: [] for key in KEYS}
    entry["seq_boundaries"].append(0)
    for pair in (pair for preference in pack for pair in single_pairs(preference)):
        entry["reward"] += _rewards(pair)
        for i in (0, 1):
            labels = np.full(len(pair.completions[i]), NOT_SCORED, np.int32)
            scored = pair.scored(i)
            if not len(scored):
                raise DataError(
                    f"{pair.place}: a completion has no scored tokens, which a NeMo pack cannot represent. Remove the row."
                )
            labels[scored] = pair.completions[i][scored]
            entry["input_ids"] += pair.prompt.tolist() + pair.completions[i].tolist()
            entry["labels"] += [NOT_SCORED] * len(pair.prompt) + labels.tolist()
            entry["lengths"].append(len(pair.prompt) + len(labels))
            entry["seq_boundaries"].append(len(entry["input_ids"]))
    return entry


def _rewards(pair: TokenizedPreference) -> tuple[float, ...]:
    if all(isnan(score) for score in pair.scores):
        return DEFAULT_REWARDS
    if not all(isfinite(score) for score in pair.scores):
        chosen, rejected = pair.scores
        raise DataError(
            f"{pair.place}: the scores are {chosen:g} (chosen) and {rejected:g} (rejected), but a NeMo pack needs two "
            "finite numbers. Give both completions a score, or neither."
        )
    return tuple(float(score) for score in pair.scores)


# Reading


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A prompt with one completion, without padding, as read from a file."""

    ids: IntArray
    labels: IntArray
    reward: float
    place: str

    @property
    def not_in_place(self) -> NDArray[np.intp]:
        """The positions at which the label is not the token at the same position. Labels of -100 are ignored."""
        return np.flatnonzero((self.labels != self.ids) & (self.labels != NOT_SCORED))

    @property
    def not_ahead(self) -> NDArray[np.intp]:
        """The positions at which the label is not the token at the next position. Labels of -100 are ignored."""
        labels = self.labels[:-1]
        return np.flatnonzero((labels != self.ids[1:]) & (labels != NOT_SCORED))

    def in_place(self, ahead: bool) -> "_Sequence":
        """Return the sequence with each label at the position of its token.

        `ahead`: whether each label is one position before its token now. If `ahead` is False, the sequence is not changed.
        If `ahead` is True, ids 5 6 7 with labels -100 7 8 are returned as ids 5 6 7 8 with labels -100 -100 7 8.
        """
        if not ahead:
            return self
        labels = np.concatenate([np.array([NOT_SCORED], np.int32), self.labels])
        ids = np.append(self.ids, self.labels[-1])
        known = len(ids) - int(labels[-1] == NOT_SCORED)
        return _Sequence(ids[:known], labels[:known], self.reward, self.place)


def _load_packs(file: Path) -> tuple[list[Any], int]:
    """Return the packs of a file as unchecked objects, and the size of the file in bytes."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}. Give the path of a packed_*.npy file.") from None
    try:
        return load_objects(data), len(data)
    except Refused as refused:
        raise DataError(f"{file}: {refused}. {PACK_AGAIN_HINT}") from None


def _check_amount(entries: list[Any], num_bytes: int, file: Path) -> None:
    """Raise a DataError if the lists of a file hold more numbers than the file has bytes.

    This is possible if the file refers to the same list many times. A small file could then take all memory.
    """
    values = (value for entry in entries if isinstance(entry, dict) for value in entry.values())
    num_numbers = sum(len(items) for value in values if (items := _items(value)) is not None)
    if num_numbers > num_bytes:
        raise DataError(
            f"{file}: {num_bytes} bytes expand to {num_numbers} numbers, because lists are repeated. {PACK_AGAIN_HINT}"
        )


def _sequences(entry: Any, place: str) -> list[_Sequence]:
    """Return the sequences of a pack. Raise a DataError if a value is invalid. The layout of the labels is not checked here."""
    if not isinstance(entry, dict):
        raise DataError(f"{place}: {describe(entry)}, not a dict with {', '.join(KEYS)}. {PACK_AGAIN_HINT}")
    if entry.keys() != set(KEYS):
        odd = min(entry.keys() ^ set(KEYS))
        raise DataError(
            f"{place}: {describe(odd)} is {'missing' if odd in KEYS else 'an unknown key'}. {PACK_AGAIN_HINT}"
        )
    ids, labels, rewards, lengths, bounds = (_listed(entry[key], key, place) for key in KEYS)
    bounds = _as_integers(bounds, "boundary", place).tolist()
    _check_bounds(bounds, len(ids), place)
    for key, values, what, num in (
        ("labels", labels, "tokens", len(ids)),
        ("lengths", lengths, "sequences", len(bounds) - 1),
        ("reward", rewards, "sequences", len(bounds) - 1),
    ):
        if len(values) != num:
            raise DataError(f"{place}: {len(values)} {key} for {num} {what}. {PACK_AGAIN_HINT}")
    return [
        _sequence(ids[start:end], labels[start:end], length=length, reward=reward, place=f"{place}, sequence {i}")
        for i, ((start, end), length, reward) in enumerate(zip(pairwise(bounds), lengths, rewards, strict=True))
    ]


def _check_bounds(bounds: list[int], num_tokens: int, place: str) -> None:
    if not bounds or bounds[0] != 0:
        raise DataError(
            f"{place}: seq_boundaries start with {bounds[0] if bounds else 'nothing'}, not with 0. {PACK_AGAIN_HINT}"
        )
    for i, (start, end) in enumerate(pairwise(bounds)):
        if start >= end:
            raise DataError(
                f"{place}, sequence {i}: seq_boundaries do not increase: {end} follows {start}. {PACK_AGAIN_HINT}"
            )
    if bounds[-1] != num_tokens:
        raise DataError(
            f"{place}: seq_boundaries end with {bounds[-1]}, but there are {num_tokens} tokens. {PACK_AGAIN_HINT}"
        )
    if len(bounds) % 2 == 0 or len(bounds) == 1:
        raise DataError(
            f"{place}: {len(bounds) - 1} sequences cannot be divided into pairs of chosen and rejected. {PACK_AGAIN_HINT}"
        )


def _sequence(tokens: list[Any], labelled: list[Any], *, length: Any, reward: Any, place: str) -> _Sequence:
    """Return a sequence without its padding: only the first `length` tokens. Raise a DataError if a value is invalid."""
    if type(length) is not int or not 0 < length <= len(tokens):
        raise DataError(
            f"{place}: the sequence has {len(tokens)} tokens, but its length is given as {describe(length)}. {PACK_AGAIN_HINT}"
        )
    ids, labels = _as_integers(tokens, "token", place), _as_integers(labelled, "label", place)
    if (wrong := np.flatnonzero((ids < 0) | (ids > MAX_ID))).size:
        raise DataError(f"{place}: token {wrong[0]} is {ids[wrong[0]]}, which is not a token id. {PACK_AGAIN_HINT}")
    is_id = (labels >= 0) & (labels <= MAX_ID)
    if (wrong := np.flatnonzero(~is_id & (labels != NOT_SCORED))).size:
        raise DataError(
            f"{place}: label {wrong[0]} is {labels[wrong[0]]}, neither a token id nor {NOT_SCORED}. {PACK_AGAIN_HINT}"
        )
    if is_id[length:].any():
        raise DataError(
            f"{place}: the sequence has length {length}, but tokens after this length have labels. {PACK_AGAIN_HINT}"
        )
    if not is_id.any():
        raise DataError(f"{place}: all labels are {NOT_SCORED}, so the sequence has no completion. {PACK_AGAIN_HINT}")
    if not _is_finite(reward):
        raise DataError(f"{place}: its reward is {describe(reward)}, not a finite number. {PACK_AGAIN_HINT}")
    if abs(reward) > MAX_SCORE:
        raise DataError(
            f"{place}: its reward {describe(reward)} is too large. Scores are stored as float32, up to "
            f"{MAX_SCORE:.1e}. {PACK_AGAIN_HINT}"
        )
    return _Sequence(ids[:length].astype(np.int32), labels[:length].astype(np.int32), float(reward), place)


def _labels_are_ahead(sequences: list[_Sequence]) -> bool:
    """Return True if labels are one position before their tokens, False if they are at the positions of their tokens.

    A single sequence may match both layouts, for example if its completion has one token. So all sequences of the file
    are compared. If both layouts match all of them, return False. If neither layout does, raise a DataError.
    """
    not_in_place = next((sequence for sequence in sequences if sequence.not_in_place.size), None)
    not_ahead = next((sequence for sequence in sequences if sequence.not_ahead.size), None)
    if not_in_place is None or not_ahead is None:
        return not_in_place is not None
    for sequence in (not_in_place, not_ahead):
        if sequence.not_in_place.size and sequence.not_ahead.size:
            i, j, ids, labels = sequence.not_in_place[0], sequence.not_ahead[0], sequence.ids, sequence.labels
            raise DataError(
                f"{sequence.place}: labels match neither their tokens (label {i} is {labels[i]}, token {i} is {ids[i]}) nor the "
                f"next tokens (label {j} is {labels[j]}, token {j + 1} is {ids[j + 1]}). {PACK_AGAIN_HINT}"
            )
    raise DataError(
        f"{not_in_place.place}: each label is the next token, but in {not_ahead.place.rpartition(': ')[2]} each label "
        f"is the token itself. All sequences of a file must have the same layout. {PACK_AGAIN_HINT}"
    )


def _preference(chosen: _Sequence, rejected: _Sequence, place: str, number: int) -> TokenizedPreference:
    """Make a preference from two sequences whose labels are at the positions of their tokens.

    The prompt consists of the tokens before the first label that is not -100.
    """
    starts = [int(np.flatnonzero(sequence.labels != NOT_SCORED)[0]) for sequence in (chosen, rejected)]
    prompt, other = chosen.ids[: starts[0]], rejected.ids[: starts[1]]
    if not np.array_equal(prompt, other):
        pair = f"{chosen.place.rpartition(', ')[0]}, sequences {number} and {number + 1}"
        raise DataError(
            f"{pair}: their prompts differ ({_difference(prompt, other)}), but a pair must have one prompt. {PACK_AGAIN_HINT}"
        )
    if not len(prompt):
        raise DataError(
            f"{chosen.place}: the first token of the sequence has a label, so there is no prompt. {PACK_AGAIN_HINT}"
        )
    answers = [sequence.labels[start:] for sequence, start in zip((chosen, rejected), starts, strict=True)]
    unscored = tuple(np.flatnonzero(labels == NOT_SCORED).astype(np.int32) for labels in answers)
    return TokenizedPreference(
        prompt=prompt,
        completions=(chosen.ids[starts[0] :], rejected.ids[starts[1] :]),
        pairs=((0, 1),),
        columns={"score": (chosen.reward, rejected.reward)},
        place=place,
        unscored=unscored if any(len(positions) for positions in unscored) else (),
    )


def _difference(prompt: IntArray, other: IntArray) -> str:
    """Describe the first difference between two prompts."""
    num = min(len(prompt), len(other))
    if (differing := np.flatnonzero(prompt[:num] != other[:num])).size:
        return f"token {differing[0]} is {prompt[differing[0]]} and {other[differing[0]]}"
    return f"{len(prompt)} and {len(other)} tokens"


def _items(value: Any) -> list[Any] | NDArray[Any] | None:
    """Return the items of a list or an array, or None for anything else."""
    return value if isinstance(value, list) else value.values if isinstance(value, Array) else None


def _listed(value: Any, key: str, place: str) -> list[Any]:
    if (items := _items(value)) is None:
        raise DataError(f"{place}: {key} is {describe(value)}, not a list. {PACK_AGAIN_HINT}")
    return items if isinstance(items, list) else items.tolist()


def _as_integers(values: list[Any], what: str, place: str) -> NDArray[np.int64]:
    """Return a list of integers as an array. Raise a DataError that shows the first value that is not a 64-bit integer."""
    with suppress(OverflowError):
        if set(map(type, values)) <= {int}:
            return np.array(values, np.int64)
    i = next(i for i, value in enumerate(values) if type(value) is not int or not -(2**63) <= value < 2**63)
    raise DataError(f"{place}: {what} {i} is {describe(values[i])}, not a 64-bit integer. {PACK_AGAIN_HINT}")


def _is_finite(value: Any) -> bool:
    with suppress(OverflowError):  # an integer too large for a float
        return type(value) in (int, float) and isfinite(value)
    return False

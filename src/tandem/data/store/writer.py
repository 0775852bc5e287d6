"""Chunks of rows in; tokenised, checked and counted by a recipe, and written to disk, out."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain, islice
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tandem.config.sections.datasets import MAX_EXPANSION, DatasetFields
from tandem.data.formats.formats import NOTHING_FITS, detect_format, read_preference
from tandem.data.formats.preference import Preference
from tandem.data.formats.prompt_files import Wording
from tandem.data.formats.row_columns import with_columns
from tandem.data.read.files import SourceFile
from tandem.data.read.limits import MESSAGE_CHARACTERS, REJECTS_BYTES, format_bytes
from tandem.data.read.sources import Chunk, RowError, SourceRow, read_chunks, rows_of
from tandem.data.store.notes import notes_on
from tandem.data.store.pool import TEMPLATE_BYTES, Watch, bounded_memory
from tandem.data.store.tokens_file import as_stream, schema_with
from tandem.data.text.template import Rendered, Template
from tandem.data.text.tokens import TokenizedPreference, encode, fit_length, render
from tandem.errors import DataError

SHOWN_PER_REASON = 3
# Rows whose keys are compared with the formats.
ROWS_TRIED = 1000
# Texts encoded together: their tokens are all in memory until over-long ones are left out.
CHARACTERS_AT_ONCE = 8 * 1024 * 1024
# What a tokenizer may take for some texts. Fast ones take 170 bytes a character, and encode 1,000,000 characters a second.
ENCODE_BYTES, BYTES_PER_CHARACTER = 4 * 1024**3, 1024
CHARACTERS_PER_SECOND = 10_000  # in addition to the limit of a row
# Lengths at which over-long preferences are counted, so that a user can choose the limit.
LIMITS = tuple(2**power for power in range(8, 18))
TWICE = "preferences that stand in it already"
OPPOSED = "preferences that another row states the other way round"


@dataclass(slots=True)
class Prepared:
    """The outcome of the rows of a chunk, or of several."""

    rejects: list[dict[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    noted_at: dict[str, str] = field(default_factory=dict)  # where each note was first made
    longer_than: Counter[int] = field(default_factory=Counter)
    digests: bytes = b""  # of each accepted preference, 8 bytes each, as in the batch
    batch: bytes = b""  # the accepted rows, as an Arrow stream

    def note(self, note: str, place: str) -> None:
        """Count what is worth a count though the row is used."""
        self.notes[note] += 1
        self.noted_at.setdefault(note, place)


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides what a set's rows become, but the template. Called with a chunk, in whatever process."""

    keys: DatasetFields
    format_name: str
    wording: Wording
    pairing: str
    max_length: int
    overlong: str
    default_scores: tuple[float | None, float | None] = (None, None)  # of the best completion, and of the others

    def __call__(self, template: Template, chunk: Chunk, watch: Watch) -> Prepared:
        prepared = Prepared()
        if chunk.has_bom:
            prepared.note("byte-order mark at the start of a file", chunk.file)
        rows = self._tokenized(template, _numbered_rows(chunk), prepared, watch)
        return settle(rows, prepared, self.max_length, self.overlong, self.default_scores, tuple(self.keys.columns))

    def _tokenized(
        self, template: Template, rows: Iterator[tuple[int, SourceRow | RowError]], prepared: Prepared, watch: Watch
    ) -> Iterator[TokenizedPreference | RowError]:
        number = 0
        while rendered := self._render_some(template, rows, watch):
            number += 1
            for preference, texts in (item for item in rendered if not isinstance(item, RowError)):
                for note in notes_on(preference, texts, template, self.pairing):
                    prepared.note(note, preference.place)
            yield from self._encoded(template, rendered, watch, number)

    def _encoded(
        self, template: Template, rendered: list[tuple[Preference, Rendered] | RowError], watch: Watch, number: int
    ) -> list[TokenizedPreference | RowError]:
        """The rows of some texts, under bounds that grow with the texts: a tokenizer may expand them, or never end."""
        characters = sum(item[1].num_characters for item in rendered if not isinstance(item, RowError))
        watch.at(number, more_seconds=(1 + characters) / CHARACTERS_PER_SECOND)
        with bounded_memory(ENCODE_BYTES + characters * BYTES_PER_CHARACTER):
            encoded = list(encode(rendered, template, self.pairing))
        watch.off()
        return encoded

    def _render_some(
        self, template: Template, rows: Iterator[tuple[int, SourceRow | RowError]], watch: Watch
    ) -> list[tuple[Preference, Rendered] | RowError]:
        """The next rows as texts: all of a chunk at once, but for texts of extraordinary length."""
        rendered, characters = [], 0
        with bounded_memory():
            for number, row in rows:
                item = self._rendered(template, row, number, watch)
                rendered.append(item)
                characters += 0 if isinstance(item, RowError) else item[1].num_characters
                if characters > CHARACTERS_AT_ONCE:
                    break
        watch.off()
        return rendered

    def _rendered(
        self, template: Template, row: SourceRow | RowError, number: int, watch: Watch
    ) -> tuple[Preference, Rendered] | RowError:
        watch.at(number)
        if isinstance(row, RowError):
            return row
        try:
            preference = read_preference(row, self.keys, self.format_name, self.wording)
            preference = with_columns(preference, row, self.keys)
            return render(preference, template, self.pairing)
        except RowError as error:
            return error


def settle(
    rows: Iterable[TokenizedPreference | RowError],
    prepared: Prepared,
    max_length: int,
    overlong: str,
    default_scores: tuple[float | None, float | None] = (None, None),
    columns: tuple[str, ...] = (),
) -> Prepared:
    """Accept or reject tokenised rows, and count what is worth a count. `columns`: those that keys name."""
    accepted, lengths = [], []
    for row in rows:
        if isinstance(row, TokenizedPreference):
            lengths.append(row.longest)
            row = fit_length(row, max_length, overlong)
            if lengths[-1] > max_length and isinstance(row, TokenizedPreference):
                prepared.note(f"over-long, cut by data.overlong={overlong}", row.place)
        if isinstance(row, RowError):
            prepared.rejects.append(_as_reject(row))
            continue
        row = _with_scores(row, *default_scores)
        accepted.append(row)
        scores = row.scores
        if any(scores[winner] < scores[loser] for winner, loser in row.pairs):
            prepared.note("chosen scored below rejected", row.place)
    prepared.longer_than.update({limit: sum(length > limit for length in lengths) for limit in LIMITS})
    prepared.digests = b"".join(map(digest_of, accepted))
    prepared.batch = as_stream(accepted, prepared.digests, columns) if accepted else b""
    return prepared


def write_store(
    chunks: Iterable[Prepared], folder: Path, rejects_bytes: int = REJECTS_BYTES, columns: Iterable[str] = ()
) -> dict[str, Any]:
    """Write `tokens.arrow` and `rejects.jsonl`, the outcome of the rows, into a folder; return what a manifest should say
    about them.

    rejects_bytes: that `rejects.jsonl` may take. All rejects are counted, listed or not.
    """
    bad: Counter[str] = Counter()
    filtered: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    noted_at: dict[str, str] = {}
    longer_than: Counter[int] = Counter(dict.fromkeys(LIMITS, 0))
    examples: list[dict[str, str]] = []
    digests = bytearray()
    with (
        _RejectsFile(folder / "rejects.jsonl", rejects_bytes) as rejects,
        pa.OSFile(str(folder / "tokens.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, schema_with(columns)) as writer,
    ):
        for prepared in chunks:
            for batch in pa.ipc.open_stream(prepared.batch) if prepared.batch else ():
                writer.write_batch(batch)
            for reject in prepared.rejects:
                counter = bad if reject["kind"] == "bad" else filtered
                counter[reject["reason"]] += 1
                rejects.write(reject)
                if counter[reject["reason"]] <= SHOWN_PER_REASON:
                    examples.append(reject)
            notes.update(prepared.notes)
            noted_at = prepared.noted_at | noted_at
            longer_than.update(prepared.longer_than)
            digests += prepared.digests
    twice, first_at = repeated(np.frombuffer(digests, np.dtype("<u8")), folder / "tokens.arrow")
    notes.update(twice)
    noted_at |= first_at
    accepted = len(digests) // 8
    return {
        "counts": {
            "rows": accepted + bad.total() + filtered.total(),
            "accepted": accepted,
            "bad": dict(bad),
            "filtered": dict(filtered),
        },
        "examples": examples,
        "notes": dict(notes),
        "noted_at": noted_at,
        "longer_than": {str(limit): count for limit, count in sorted(longer_than.items())},
    }


class _RejectsFile:
    """`rejects.jsonl`, a line for each reject, up to a size; then one line that counts those which are not listed."""

    def __init__(self, path: Path, max_bytes: int):
        self._file, self._max_bytes = path.open("w", encoding="utf-8"), max_bytes
        self._num_bytes = self._num_left_out = 0
        self._first_left_out: dict[str, str] = {}

    def __enter__(self) -> "_RejectsFile":
        return self

    def write(self, reject: dict[str, str]) -> None:
        line = json.dumps(reject) + "\n"  # ASCII
        if self._num_left_out or self._num_bytes + len(line) > self._max_bytes:
            self._first_left_out = self._first_left_out or reject
            self._num_left_out += 1
            return
        self._num_bytes += len(line)
        self._file.write(line)

    def __exit__(self, *_: object) -> None:
        if self._num_left_out:
            limit = format_bytes(self._max_bytes)
            message = f"{self._num_left_out} rows from here on are not listed: this file is limited to {limit}."
            self._file.write(json.dumps({**self._first_left_out, "message": message}) + "\n")
        self._file.close()


def repeated(digests: NDArray[np.uint64], tokens: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Count the rows of `tokens` that repeat another row, or repeat it with chosen and rejected swapped; also return the first
    place of each."""
    order = np.argsort(digests, kind="stable")
    each = digests[order]
    # Opposites, which differ in the last bit, are neighbours.
    same, opposite = each[1:] == each[:-1], each[1:] ^ each[:-1] == 1
    found: dict[str, int] = {}
    first: dict[str, int] = {}
    if same.any():
        found[TWICE], first[TWICE] = int(same.sum()), int(order[1:][same].min())
    if opposite.any():
        ones = each[:-1][opposite]
        starts, middles = np.searchsorted(each, ones), np.searchsorted(each, ones + 1)
        ends = np.searchsorted(each, ones + 1, "right")
        found[OPPOSED] = int((ends - starts).sum())
        first[OPPOSED] = int(np.minimum(order[starts], order[middles]).min())
    return found, {note: _place_of(tokens, row) for note, row in first.items()}


def _place_of(tokens: Path, row: int) -> str:
    with pa.memory_map(str(tokens)) as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            if row < batch.num_rows:
                return batch["place"][row].as_py()
            row -= batch.num_rows
    raise IndexError(row)


def format_of(files: list[SourceFile], keys: DatasetFields, max_expansion: float = MAX_EXPANSION) -> tuple[str, str]:
    """The name of the files' format and why: as given, or detected from the first row whose keys fit one."""
    if keys.dataset_name != "auto":
        return keys.dataset_name, "as data.*.dataset_name says"
    chunks = (chunk for file in files for chunk in read_chunks(file.path, file.name, 1, max_expansion))
    rows = (row for chunk in chunks for row in rows_of(chunk) if isinstance(row, SourceRow))
    for row in islice(rows, ROWS_TRIED):
        name, reason = found = detect_format(row, keys)
        if found != NOTHING_FITS:
            return name, f"{reason} of {row.place}" if len(files) > 1 or row.line > 1 else reason
    return NOTHING_FITS


def _numbered_rows(chunk: Chunk) -> Iterator[tuple[int, SourceRow | RowError]]:
    try:
        yield from zip(chunk.numbers, rows_of(chunk), strict=True)
    except MemoryError:
        raise DataError(
            f"{chunk.file}:{chunk.numbers[0]}-{chunk.numbers[-1]}: these rows take over {format_bytes(TEMPLATE_BYTES)} "
            "of memory once they are parsed. Remove what is not a preference from them."
        ) from None


def _as_reject(row: RowError) -> dict[str, str]:
    message = row.message
    if len(message) > MESSAGE_CHARACTERS:
        message = f"{message[:MESSAGE_CHARACTERS]}..."
    return {"place": row.place, "kind": row.kind, "reason": row.reason, "message": message}


def _with_scores(row: TokenizedPreference, best: float | None, other: float | None) -> TokenizedPreference:
    """Fill in the scores that the data does not give, if there are defaults."""
    if best is None and other is None:
        return row
    losers = {loser for _, loser in row.pairs}
    winners = {winner for winner, _ in row.pairs} - losers  # several where the best rank is shared
    scores = row.scores
    defaults = [best if i in winners else other for i in range(len(scores))]
    filled = [
        default if isnan(score) and default is not None else score
        for score, default in zip(scores, defaults, strict=True)
    ]
    return replace(row, columns={**row.columns, "score": tuple(filled)})


def digest_of(row: TokenizedPreference) -> bytes:
    """Return a digest of a preference's tokens. The digests of a pair and of the same pair with chosen and rejected swapped
    differ in one bit.

    The order of the completions does not matter.
    """
    digest = blake2b(row.prompt.tobytes(), digest_size=8)
    completions = [completion.tobytes() for completion in row.completions]
    pairs = sorted((completions[winner], completions[loser]) for winner, loser in row.pairs)
    opposite = len(pairs) == 1 and pairs[0][0] > pairs[0][1]
    for completion in sorted(pairs[0]) if len(pairs) == 1 else chain.from_iterable(pairs):
        digest.update(b"|" + completion)
    number = int.from_bytes(digest.digest(), "little")
    return (number & ~1 | opposite).to_bytes(8, "little")

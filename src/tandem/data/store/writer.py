"""Tokenises and checks the rows of a set in chunks (Recipe), and writes the results to disk (write_store)."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
from tandem.data.formats.paths import with_paths
from tandem.data.formats.preference import Preference
from tandem.data.formats.prompt_files import Wording
from tandem.data.formats.rated import split_tree
from tandem.data.formats.row_columns import with_columns
from tandem.data.formats.user_formats import converted
from tandem.data.read.files import SourceFile
from tandem.data.read.limits import MESSAGE_CHARACTERS, REJECTS_BYTES, format_bytes
from tandem.data.read.sources import Chunk, RowError, SourceRow, read_chunks, rows_of
from tandem.data.store.notes import notes_on
from tandem.data.store.pool import TEMPLATE_BYTES, RowMonitor, bounded_memory
from tandem.data.store.tokens_file import as_stream, schema_with
from tandem.data.text.template import Rendered, Template
from tandem.data.text.tokens import TokenizedPreference, encode, fit_length, render
from tandem.errors import DataError
from tandem.failpoints import fail_point

SHOWN_PER_REASON = 3  # examples of rejects in the manifest
MAX_ROWS_TRIED = 1000  # rows that are tried when the format is detected
# Texts encoded together. Their tokens are all in memory until over-long preferences are left out.
CHARACTERS_AT_ONCE = 8 * 1024 * 1024
# Limits on the tokenizer's memory and time. Fast ones take 170 bytes per character and encode 1,000,000 characters per second.
ENCODE_BYTES, BYTES_PER_CHARACTER = 4 * 1024**3, 1024
CHARACTERS_PER_SECOND = 10_000  # time in addition to the limit for a row
# For each of these lengths, longer preferences are counted, so that a user can choose the limit.
LIMITS = tuple(2**power for power in range(8, 18))
REPEATED = "preferences that repeat an earlier one"
SWAPPED = "preferences that another row has with chosen and rejected swapped"


@dataclass(slots=True)
class ChunkResult:
    """The result of tokenising a chunk: the accepted rows, the rejected rows, and notes on problems."""

    rejects: list[dict[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    noted_at: dict[str, str] = field(default_factory=dict)  # the place of the first row with each note
    longer_than: Counter[int] = field(default_factory=Counter)  # number of preferences over each of LIMITS
    digests: bytes = b""  # 8 bytes for each accepted preference
    batch: bytes = b""  # the accepted rows, as an Arrow stream

    def note(self, note: str, place: str) -> None:
        """Count a note: a text about a problem in the row at `place`."""
        self.notes[note] += 1
        self.noted_at.setdefault(note, place)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings, other than the template, that determine how the rows of a set are tokenised.

    Calling a Recipe tokenises one chunk of rows. This happens in a worker process.
    """

    keys: DatasetFields
    format_name: str
    wording: Wording
    pairing: str
    max_length: int
    overlong: str
    default_scores: tuple[float | None, float | None] = (None, None)  # of the best completion, and of all others

    def __call__(self, template: Template, chunk: Chunk, monitor: RowMonitor) -> ChunkResult:
        result = ChunkResult()
        if chunk.has_bom:
            result.note("byte-order mark at the start of a file", chunk.file)
        rows = self._tokenized(template, self._split_trees(_numbered_rows(chunk)), result, monitor)
        return accept_rows(
            rows,
            result,
            max_length=self.max_length,
            overlong=self.overlong,
            default_scores=self.default_scores,
            columns=tuple(self.keys.number_columns),
        )

    def _split_trees(
        self, rows: Iterator[tuple[int, SourceRow | RowError]]
    ) -> Iterator[tuple[int, SourceRow | RowError]]:
        """Yield the rows. In place of a tree of Open Assistant, yield a row for each of its prompts with ranked replies."""
        for number, row in rows:
            if self.format_name != "oasst_tree" or isinstance(row, RowError):
                yield number, row
                continue
            try:
                yield from ((number, one) for one in split_tree(row, self.keys))
            except RowError as error:
                yield number, error

    def _tokenized(
        self,
        template: Template,
        rows: Iterator[tuple[int, SourceRow | RowError]],
        result: ChunkResult,
        monitor: RowMonitor,
    ) -> Iterator[TokenizedPreference | RowError]:
        number = 0
        while rendered := self._render_some(template, rows, monitor):
            number += 1
            for preference, texts in (item for item in rendered if not isinstance(item, RowError)):
                for note in notes_on(preference, texts, template, self.pairing):
                    result.note(note, preference.place)
            yield from self._encoded(template, rendered, monitor, number)

    def _encoded(
        self,
        template: Template,
        rendered: list[tuple[Preference, Rendered] | RowError],
        monitor: RowMonitor,
        number: int,
    ) -> list[TokenizedPreference | RowError]:
        """Encode rendered rows, with limits on time and memory in case the tokenizer hangs. The limits grow with the texts."""
        characters = sum(item[1].num_characters for item in rendered if not isinstance(item, RowError))
        monitor.start_row(number, extra_seconds=(1 + characters) / CHARACTERS_PER_SECOND)
        with bounded_memory(ENCODE_BYTES + characters * BYTES_PER_CHARACTER):
            encoded = list(encode(rendered, template, self.pairing))
        monitor.end_row()
        return encoded

    def _render_some(
        self, template: Template, rows: Iterator[tuple[int, SourceRow | RowError]], monitor: RowMonitor
    ) -> list[tuple[Preference, Rendered] | RowError]:
        """Render the next rows of the chunk. Stop once the rendered texts exceed CHARACTERS_AT_ONCE in total."""
        rendered, characters = [], 0
        with bounded_memory():
            for number, row in rows:
                item = self._rendered(template, row, number, monitor)
                rendered.append(item)
                characters += 0 if isinstance(item, RowError) else item[1].num_characters
                if characters > CHARACTERS_AT_ONCE:
                    break
        monitor.end_row()
        return rendered

    def _rendered(
        self, template: Template, row: SourceRow | RowError, number: int, monitor: RowMonitor
    ) -> tuple[Preference, Rendered] | RowError:
        monitor.start_row(number)
        if isinstance(row, RowError):
            return row
        try:
            read, name = converted(with_paths(row, self.keys), self.format_name)
            preference = read_preference(read, self.keys, name, self.wording)
            preference = with_columns(preference, row if self.keys.columns else read, self.keys)
            return render(preference, template, self.pairing)
        except RowError as error:
            return error


def accept_rows(
    rows: Iterable[TokenizedPreference | RowError],
    result: ChunkResult,
    *,
    max_length: int,
    overlong: str,
    default_scores: tuple[float | None, float | None] = (None, None),
    columns: tuple[str, ...] = (),
) -> ChunkResult:
    """Add tokenised rows to `result`, and return `result`. `columns`: the optional columns to store.

    Over-long rows are truncated or rejected, missing scores are set to `default_scores`, and rows with problems
    are counted in the notes of `result`.
    """
    accepted, lengths = [], []
    for row in rows:
        if isinstance(row, TokenizedPreference):
            lengths.append(row.longest)
            row = fit_length(row, max_length, overlong)
            if lengths[-1] > max_length and isinstance(row, TokenizedPreference):
                result.note(f"over-long, cut by data.overlong={overlong}", row.place)
        if isinstance(row, RowError):
            result.rejects.append(_as_reject(row))
            continue
        row = _with_scores(row, *default_scores)
        accepted.append(row)
        scores = row.scores
        if any(scores[winner] < scores[loser] for winner, loser in row.pairs):
            result.note("chosen scored below rejected", row.place)
    result.longer_than.update({limit: sum(length > limit for length in lengths) for limit in LIMITS})
    result.digests = b"".join(map(digest_of, accepted))
    result.batch = as_stream(accepted, result.digests, columns) if accepted else b""
    return result


def write_store(
    results: Iterable[ChunkResult], folder: Path, rejects_bytes: int = REJECTS_BYTES, columns: Iterable[str] = ()
) -> dict[str, Any]:
    """Write `tokens.arrow` and `rejects.jsonl` to a folder, and return the counts and notes for its manifest.

    `rejects_bytes`: the maximum size of `rejects.jsonl`. Rejected rows that do not fit are counted but not listed.
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
        for result in results:
            for batch in pa.ipc.open_stream(result.batch) if result.batch else ():
                writer.write_batch(batch)
            for reject in result.rejects:
                counter = bad if reject["kind"] == "bad" else filtered
                counter[reject["reason"]] += 1
                rejects.write(reject)
                if counter[reject["reason"]] <= SHOWN_PER_REASON:
                    examples.append(reject)
            notes.update(result.notes)
            noted_at = result.noted_at | noted_at
            longer_than.update(result.longer_than)
            digests += result.digests
            fail_point("tokens.chunk")
    repeats, first_places = count_repeats(np.frombuffer(digests, np.dtype("<u8")), folder / "tokens.arrow")
    notes.update(repeats)
    noted_at |= first_places
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
    """Writes `rejects.jsonl`: one line per rejected row, up to a maximum size.

    If some rows do not fit, the last line gives their number.
    """

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


def count_repeats(digests: NDArray[np.uint64], tokens: Path) -> tuple[dict[str, int], dict[str, str]]:
    """Count preferences that repeat an earlier one, and preferences that another row has with chosen and rejected swapped.

    Return two dicts with the keys REPEATED and SWAPPED: the counts, and the file and line of the first such preference.
    `tokens`: the tokens.arrow file, which contains the file and line of each preference.
    """
    order = np.argsort(digests, kind="stable")
    in_order = digests[order]
    # Digests of swapped pairs differ only in the last bit, so they are next to each other.
    same, swapped = in_order[1:] == in_order[:-1], in_order[1:] ^ in_order[:-1] == 1
    found: dict[str, int] = {}
    first: dict[str, int] = {}
    if same.any():
        found[REPEATED], first[REPEATED] = int(same.sum()), int(order[1:][same].min())
    if swapped.any():
        # Rows with digest d and rows with d + 1 are swapped: starts | d d d | middles | d+1 d+1 | ends
        evens = in_order[:-1][swapped]
        starts, middles = np.searchsorted(in_order, evens), np.searchsorted(in_order, evens + 1)
        ends = np.searchsorted(in_order, evens + 1, "right")
        found[SWAPPED] = int((ends - starts).sum())
        first[SWAPPED] = int(np.minimum(order[starts], order[middles]).min())
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
    """Return the name of the files' format and the reason for it.

    The format is the configured one, or else that of the first row with a known format.
    """
    if keys.dataset_name != "auto":
        return keys.dataset_name, "set by data.*.dataset_name"
    chunks = (chunk for file in files for chunk in read_chunks(file.path, file.name, 1, max_expansion))
    rows = (row for chunk in chunks for row in rows_of(chunk) if isinstance(row, SourceRow))
    for row in islice(rows, MAX_ROWS_TRIED):
        with suppress(RowError):
            name, reason = found = detect_format(with_paths(row, keys), keys)
            if found == NOTHING_FITS:
                continue
            if keys.columns:
                return name, "by the paths of data.*.columns"
            return name, f"{reason} of {row.place}" if len(files) > 1 or row.line > 1 else reason
    return NOTHING_FITS


def _numbered_rows(chunk: Chunk) -> Iterator[tuple[int, SourceRow | RowError]]:
    try:
        yield from zip(chunk.numbers, rows_of(chunk), strict=True)
    except MemoryError:
        raise DataError(
            f"{row_range(chunk)}: these rows take over {format_bytes(TEMPLATE_BYTES)} of memory once they are parsed. "
            "Remove large fields that are not part of the preferences."
        ) from None


def row_range(chunk: Chunk) -> str:
    """Return the file and the line numbers of a chunk's rows, such as pairs.jsonl:1-1000."""
    return f"{chunk.file}:{chunk.numbers[0]}-{chunk.numbers[-1]}"


def _as_reject(row: RowError) -> dict[str, str]:
    message = row.message
    if len(message) > MESSAGE_CHARACTERS:
        message = f"{message[:MESSAGE_CHARACTERS]}..."
    return {"place": row.place, "kind": row.kind, "reason": row.reason, "message": message}


def _with_scores(row: TokenizedPreference, best: float | None, other: float | None) -> TokenizedPreference:
    """Replace missing scores: by `best` for the best completions, by `other` for all others. None leaves a score missing."""
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
    """Return a digest of a preference's tokens. It does not depend on the order of the completions.

    If the chosen and rejected completion of a single pair are swapped, only the last bit of the digest changes.
    """
    digest = blake2b(row.prompt.tobytes(), digest_size=8)
    pairs = pair_bytes(row)
    last_bit = len(pairs) == 1 and pairs[0][0] > pairs[0][1]
    for completion in sorted(pairs[0]) if len(pairs) == 1 else chain.from_iterable(pairs):
        digest.update(b"|" + completion)
    number = int.from_bytes(digest.digest(), "little")
    return (number & ~1 | last_bit).to_bytes(8, "little")


def pair_bytes(row: TokenizedPreference) -> list[tuple[bytes, bytes]]:
    """Return (tokens of the winner, tokens of the loser) for each pair, as bytes, in sorted order."""
    completions = [completion.tobytes() for completion in row.completions]
    return sorted((completions[winner], completions[loser]) for winner, loser in row.pairs)

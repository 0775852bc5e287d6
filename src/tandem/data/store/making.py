"""Tokenises the files of a set and stores the result in the cache, alone or together with the other machines of a run."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.formats.formats import unused_key
from tandem.data.formats.prompt_files import Wording
from tandem.data.formats.row_columns import refused_as
from tandem.data.read.files import SourceFile
from tandem.data.read.limits import REJECTS_BYTES
from tandem.data.read.sources import Chunk, read_chunks
from tandem.data.store.machines import Machines, Section
from tandem.data.store.pool import default_workers
from tandem.data.store.processes import Processes
from tandem.data.store.tokens_file import FORMAT_VERSION
from tandem.data.store.writer import ChunkResult, Recipe, format_of, write_store
from tandem.errors import DataError
from tandem.storage.cache import check_cache_dir, content_of, published, write_manifest

BYTES_PER_WORKER = 512 * 1024  # with less data per worker, starting another one takes longer than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A set to open, and the settings that determine its tokens."""

    source: str
    keys: DatasetFields
    data: Data
    max_length: int
    processes: Processes
    progress: Callable[[float], None]
    machines: Machines

    @property
    def limits(self) -> dict[str, Any]:
        """The settings that must be the same as when a folder was prepared: key -> value."""
        return {
            "policy.max_total_sequence_length": self.max_length,
            "data.pairing": self.data.pairing,
            "data.overlong": truncation(self.data),
            "data.default_chosen_reward": self.data.default_chosen_reward,
            "data.default_rejected_reward": self.data.default_rejected_reward,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NewStore:
    """A store that is not in every cache yet: what it is made of, and its fingerprints."""

    files: list[SourceFile]
    wording: Wording
    made_of: dict[str, Any]
    name: str  # its fingerprint
    tokens_fingerprint: str
    folder: Path
    is_missing: bool  # in the cache of this machine


def make_store(request: Request, new: NewStore, section: Section) -> None:
    """Tokenise the files and write the store. If other machines miss it too, each tokenises a share of the rows."""
    workers = _num_workers(request.data, new.files)
    together = section.divides(new.name, is_missing=new.is_missing, num_workers=workers)
    if not together and not new.is_missing:
        return
    check_cache_dir()
    recipe, format_reason = _make_recipe(request, new.files, new.wording)
    chunks = _first_rows(_chunks(new.files, request.progress, request.data.max_expansion), request.keys.max_rows)

    def tokenize(own: Iterable[Chunk]) -> Iterator[ChunkResult]:
        return request.processes.tokenize(recipe, own, workers)

    if not together:
        _write(request, new, recipe, format_reason, results=tokenize(chunks))
        return
    if section.is_writer(new.folder, is_missing=new.is_missing):
        _write(request, new, recipe, format_reason, results=section.results(chunks, tokenize))
    else:
        for _ in section.results(chunks, tokenize):
            pass
    section.end(new.folder)


def _write(
    request: Request, new: NewStore, recipe: Recipe, format_reason: str, *, results: Iterable[ChunkResult]
) -> None:
    """Write the results of all rows to the store."""
    columns = request.keys.number_columns
    with published(new.folder, "tokens") as aside:
        rejects_bytes = max(REJECTS_BYTES, sum(file.path.stat().st_size for file in new.files))
        facts = write_store(results, aside, rejects_bytes, columns)
        facts |= {"format": recipe.format_name, "format_reason": format_reason}
        _refuse_changed(new.files, new.made_of)
        # With a bad value in an optional column, its row is left out, so the tokens differ too.
        if columns and not any(refused_as(column) in facts["counts"]["bad"] for column in columns):
            facts["tokens_fingerprint"] = new.tokens_fingerprint
        write_manifest(aside, format_version=FORMAT_VERSION, fingerprint=new.name, made_of=new.made_of, **facts)


def _make_recipe(request: Request, files: list[SourceFile], wording: Wording) -> tuple[Recipe, str]:
    """Return a Recipe (the settings for tokenising the files), and a text that says why the data format was chosen."""
    keys, data = request.keys, request.data
    format_name, reason = format_of(files, keys, data.max_expansion)
    if unused := unused_key(format_name, keys):
        raise DataError(
            f"{keys.data_path}: read as {format_name} ({reason}), which does not use {unused} = {getattr(keys, unused)}. "
            "Leave it out, or set another format with dataset_name."
        )
    recipe = Recipe(
        keys=keys,
        format_name=format_name,
        wording=wording,
        pairing=data.pairing,
        max_length=request.max_length,
        overlong=data.overlong,
        default_scores=(data.default_chosen_reward, data.default_rejected_reward),
    )
    return recipe, reason


def _refuse_changed(files: list[SourceFile], made_of: dict[str, Any]) -> None:
    """Raise a DataError if a file changed while it was read. `made_of` contains the hash of each file before it was read."""
    for file, (name, _, content) in zip(files, made_of["sources"], strict=True):
        if not file.path.is_file() or content_of(file.path) != content:
            raise DataError(
                f"{name}: the file changed while it was read, so its rows may be a mix of two versions. Nothing was stored; "
                "start again when the file is complete."
            )


def _chunks(files: list[SourceFile], progress: Callable[[float], None], max_expansion: float) -> Iterator[Chunk]:
    """Yield the chunks of all files in order, and report the progress with `progress`."""
    sizes = [max(1, file.path.stat().st_size) for file in files]
    for number, file in enumerate(files):
        for chunk in read_chunks(file.path, file.name, max_expansion=max_expansion):
            progress((sum(sizes[:number]) + chunk.done * sizes[number]) / sum(sizes))
            yield chunk


def _first_rows(chunks: Iterator[Chunk], most: int | None) -> Iterator[Chunk]:
    """Yield chunks up to `most` rows in all; None: all chunks."""
    for chunk in chunks:
        yield chunk if most is None else replace(chunk, numbers=chunk.numbers[:most])
        if most is not None and (most := most - len(chunk.numbers)) <= 0:
            return


def truncation(data: Data) -> str | None:
    """Return `data.overlong` if it truncates, else None: with drop and with error, the stored tokens are the same."""
    return data.overlong if data.overlong.startswith("truncate") else None


def _num_workers(data: Data, files: list[SourceFile]) -> int:
    if data.num_workers != "auto":
        return data.num_workers
    size = sum(file.path.stat().st_size for file in files)
    return min(default_workers(), 1 + size // BYTES_PER_WORKER)

"""Opens the tokenised rows (TokenStore) of a set: a prepared folder, or a store in the cache, which is created if necessary."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.formats.formats import unused_key
from tandem.data.formats.prompt_files import Wording, wording_of
from tandem.data.formats.row_columns import refused_as
from tandem.data.read.files import SourceFile, find_files
from tandem.data.read.hub import DATA_FILE
from tandem.data.read.limits import REJECTS_BYTES
from tandem.data.read.sources import Chunk, read_chunks
from tandem.data.store.check import check_manifest, check_rejects
from tandem.data.store.duplicates import DUPLICATE
from tandem.data.store.notes import NO_SYSTEM
from tandem.data.store.pool import default_workers
from tandem.data.store.processes import Processes
from tandem.data.store.token_store import Counts, TokenStore, open_cached_store
from tandem.data.store.tokens_file import FORMAT_VERSION
from tandem.data.store.writer import Recipe, format_of, write_store
from tandem.data.text.template import Template
from tandem.data.text.tokenizer import state_of
from tandem.errors import DataError
from tandem.storage.cache import (
    cache_dir,
    check_cache_dir,
    content_of,
    fingerprint,
    published,
    read_manifest,
    write_manifest,
)
from tandem.user_code import is_user_function, known_function

BYTES_PER_WORKER = 512 * 1024  # with less data per worker, starting another one takes longer than it saves
NOT_JSON_HINT = (
    "The file is not in JSON Lines format, one object per line. Other formats are recognised by their ending: .json (one JSON "
    "array), .csv, .parquet and .arrow, each also with .gz or .zst."
)
JSON_ARRAY_HINT = "If the file is one JSON array, rename it to end in .json."
PREPARE_AGAIN_HINT = "Prepare it again, with tandem prepare."


class TooFewUsableError(DataError):
    """Raised if too many rows of a set are bad or filtered.

    `shares`: the smallest values of data.max_bad_share and data.max_filtered_share with which the set is accepted.
    """

    def __init__(self, message: str, shares: dict[str, float] | None = None):
        super().__init__(message)
        self.shares = shares or {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A set to open, and the settings that determine its tokens."""

    source: str
    keys: DatasetFields
    data: Data
    max_length: int
    processes: Processes
    progress: Callable[[float], None]

    @property
    def limits(self) -> dict[str, Any]:
        """The settings that must be the same as when a folder was prepared: key -> value."""
        return {
            "policy.max_total_sequence_length": self.max_length,
            "data.pairing": self.data.pairing,
            "data.overlong": _truncation(self.data),
            "data.default_chosen_reward": self.data.default_chosen_reward,
            "data.default_rejected_reward": self.data.default_rejected_reward,
        }


def open_store(
    source: str,
    keys: DatasetFields,
    template: Template,
    data: Data,
    max_length: int,
    *,
    progress: Callable[[float], None] = lambda share: None,
    processes: Processes | None = None,
    check_shares: bool = True,
) -> TokenStore:
    """Open a tokenised set: a prepared folder, a store in the cache, or a data file that is tokenised now.

    `progress`: called with the fraction done. `processes`: to reuse. `check_shares`: refuse too many bad or filtered rows.
    """
    with nullcontext(processes) if processes else Processes(template) as processes:
        request = _Request(
            source=source, keys=keys, data=data, max_length=max_length, processes=processes, progress=progress
        )
        if is_prepared(Path(source)):
            _refuse_settings(source, keys)
            store = _open_prepared(Path(source), processes, {**request.limits, "data.duplicates": data.duplicates})
        else:
            store = _find_or_make(request)
    if check_shares:
        check_usable_shares(store, source, data)
    if keys.system_prompt_file is not None and NO_SYSTEM in store.notes:
        raise DataError(
            f"{source}: system_prompt_file = {keys.system_prompt_file}, but the chat template leaves out system turns. Set one "
            "that renders them with policy.tokenizer.chat_template=FILE.jinja, or leave out system_prompt_file."
        )
    return store


def is_prepared(path: Path) -> bool:
    """Whether a folder was written by `tandem prepare`."""
    return (path / "manifest.json").is_file() and (path / "tokens.arrow").is_file()


def _refuse_settings(source: str, keys: DatasetFields) -> None:
    """Raise a DataError if `keys` has a setting for reading rows: the rows of a prepared folder have already been read."""
    for name, field in DatasetFields.model_fields.items():
        value = getattr(keys, name)
        if name not in ("data_path", "weight") and value != field.default and (name, value) != ("split", "train"):
            raise DataError(f"{source}: already prepared, so {name} = {value} has no effect. Leave it out.")


def _find_or_make(request: _Request) -> TokenStore:
    """Open the store in the cache that was made from the same files with the same settings. Create it if it does not exist."""
    source, keys, processes = request.source, request.keys, request.processes
    files = find_files(source, keys)
    wording = wording_of(keys, source)
    if wording.system is not None and processes.template.source is None:
        raise DataError(
            f"{source}: system_prompt_file = {keys.system_prompt_file}, but there is no chat template to render a system turn. "
            "Set policy.tokenizer.chat_template=FILE.jinja, or leave out system_prompt_file."
        )
    made_of = {
        "sources": [[file.name, str(file.path.resolve()), content_of(file.path)] for file in files],
        "settings": keys.settings_of_tokens,
        "wording": [wording.prompt, wording.system],
        "limits": request.limits,
        "text": _text_fingerprints(processes),
    }
    if is_user_function(keys.dataset_name):
        made_of["code"] = known_function(keys.dataset_name).digest
    tokens_fingerprint = fingerprint(FORMAT_VERSION, made_of)
    if keys.number_columns:
        made_of["columns"] = keys.number_columns
    name = fingerprint(FORMAT_VERSION, made_of)
    folder = cache_dir() / "tokens" / name
    if not folder.is_dir():
        check_cache_dir()
        recipe, format_reason = _make_recipe(request, files, wording)
        with published(folder, "tokens") as aside:
            facts = _tokenize_files(request, files, recipe, aside)
            facts |= {"format": recipe.format_name, "format_reason": format_reason}
            _refuse_changed(files, made_of)
            # With a bad value in an optional column, its row is left out, so the tokens differ too.
            if keys.number_columns and not any(
                refused_as(column) in facts["counts"]["bad"] for column in keys.number_columns
            ):
                facts["tokens_fingerprint"] = tokens_fingerprint
            write_manifest(aside, format_version=FORMAT_VERSION, fingerprint=name, made_of=made_of, **facts)
    return open_cached_store(folder)


def _make_recipe(request: _Request, files: list[SourceFile], wording: Wording) -> tuple[Recipe, str]:
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


def _tokenize_files(request: _Request, files: list[SourceFile], recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Write the tokenised rows of the files to a folder, and return the counts and notes for its manifest."""
    chunks = _first_rows(_chunks(files, request.progress, request.data.max_expansion), request.keys.max_rows)
    rejects_bytes = max(REJECTS_BYTES, sum(file.path.stat().st_size for file in files))
    results = request.processes.tokenize(recipe, chunks, _num_workers(request.data, files))
    return write_store(results, folder, rejects_bytes, request.keys.number_columns)


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


def _open_prepared(folder: Path, processes: Processes, limits: dict[str, Any]) -> TokenStore:
    """Open a prepared folder. Raise a DataError if settings or source files have changed since the folder was prepared."""
    try:
        manifest = read_manifest(folder, needed=("tokens.arrow", "rejects.jsonl"))
        version = manifest["format_version"]
        if version != FORMAT_VERSION:
            raise DataError(
                f"{folder}: prepared in format {version}, but this version of tandem reads format {FORMAT_VERSION}. "
                f"{PREPARE_AGAIN_HINT}"
            )
        check_manifest(manifest, folder)
        check_rejects(folder / "rejects.jsonl")
        _compare_settings(folder, manifest["made_of"], processes, limits)
        return TokenStore(folder, manifest)
    except KeyError as error:
        raise DataError(
            f"{folder}/manifest.json: {error} is missing. The prepared data is damaged. {PREPARE_AGAIN_HINT}"
        ) from None
    except (ValueError, OSError) as error:
        raise DataError(f"{error}. The prepared data is damaged. {PREPARE_AGAIN_HINT}") from None


def _compare_settings(folder: Path, made_of: dict[str, Any], processes: Processes, limits: dict[str, Any]) -> None:
    """Raise a DataError if a setting, the tokenizer, the template or a source file has changed since the folder was prepared."""
    current = {**limits, **(_text_fingerprints(processes) if made_of["text"] else {})}
    prepared = {**made_of["limits"], **made_of["text"]}
    for what, value in current.items():
        if what in prepared and prepared[what] != value:
            before, now = (_as_configured(what, one) for one in (prepared[what], value))
            raise DataError(
                f"{folder}: prepared with {what} = {before}, now {now}. Set {what}={before}, or prepare it again."
                if what in limits
                else f"{folder}: prepared with another {what}. {PREPARE_AGAIN_HINT}"
            )
    for name, path, content in made_of["sources"]:
        if (file := _source_file(path)) and content_of(file) != content:
            raise DataError(f"{folder}: {name} has changed since it was prepared. {PREPARE_AGAIN_HINT}")


def _source_file(path: str) -> Path | None:
    """Return the file at `path`, or None if it does not exist or is not a data file.

    The path comes from a manifest, which may name any path. Only data files are opened.
    """
    file = Path(path)
    if not file.is_absolute() or ".." in file.parts or not file.is_file():
        return None
    file = file.resolve()
    # The hub's cache: datasets--NAME/snapshots/COMMIT/train.jsonl -> datasets--NAME/blobs/HASH
    return file if DATA_FILE.search(file.name) or file.parent.name == "blobs" else None


def _as_configured(what: str, value: Any) -> Any:
    """Return the value of the setting `what` as it is written in a configuration."""
    return ("drop" if what == "data.overlong" else "null") if value is None else value


@lru_cache(maxsize=1)  # takes 0.25 seconds, and a run may have several sets with the same template
def _text_fingerprints(processes: Processes) -> dict[str, str]:
    """Return a dict from name to fingerprint, for everything that determines the tokens of a text."""
    template = processes.template
    t = template.tokenizer
    facts = {
        "tokenizer": [state_of(t), t.eos_token, t.bos_token, *([t.pad_token] if template.pads_with_end else [])],
        "chat template": [template.source, "as_is"] if template.plain_text_as_is else template.source,
        "policy.tokenizer.chat_template_kwargs": template.kwargs,
        "text by the chat template, which may read the date": processes.probe(),
    }
    return {name: fingerprint(value) for name, value in facts.items()}


def _truncation(data: Data) -> str | None:
    """Return `data.overlong` if it truncates, else None: with drop and with error, the stored tokens are the same."""
    return data.overlong if data.overlong.startswith("truncate") else None


def _num_workers(data: Data, files: list[SourceFile]) -> int:
    if data.num_workers != "auto":
        return data.num_workers
    size = sum(file.path.stat().st_size for file in files)
    return min(default_workers(), 1 + size // BYTES_PER_WORKER)


def check_usable_shares(store: TokenStore, source: str, data: Data) -> None:
    """Raise a DataError if too many rows are bad or filtered. The message lists each reason with its count and a few examples."""
    # Duplicates do not count, because data.duplicates=drop asks for their removal.
    not_duplicates = {reason: count for reason, count in store.counts.filtered.items() if reason != DUPLICATE}
    counts = replace(store.counts, filtered=not_duplicates)
    bad, filtered = sum(counts.bad.values()), sum(counts.filtered.values())
    all_bad, all_filtered = _examples(store, counts.bad), _examples(store, counts.filtered)
    if counts.rows == 0:
        raise DataError(f"{source}: the file has no rows. Check that it was written or downloaded completely.")
    if bad == counts.rows:
        (reason, *other_reasons) = counts.bad
        is_list = store.examples[0]["message"].startswith("a list")
        hints = {"malformed JSON": f"\n{NOT_JSON_HINT}", "not an object": f"\n{JSON_ARRAY_HINT}" if is_list else ""}
        hint = "" if other_reasons else hints.get(reason, "")
        raise DataError(f"{source}: none of {counts.rows} rows can be read:\n{all_bad}{hint}")
    problems: list[str] = []
    shares: dict[str, float] = {}
    if 0 < bad <= counts.rows / 2:
        shares["data.max_bad_share"] = _share_for(bad, counts.rows)
    if filtered and counts.accepted:
        shares["data.max_filtered_share"] = _share_for(filtered, counts.rows)
    if bad and data.on_bad_row == "error":
        leave_out = f"leave them out: data.on_bad_row=skip data.max_bad_share={_share_for(bad, counts.rows)}"
        problems.append(f"{bad} of {counts.rows} rows are malformed:\n{all_bad}\n{_how_to_fix(counts, leave_out)}")
    elif bad > data.max_bad_share * counts.rows:
        let_pass = f"set data.max_bad_share={_share_for(bad, counts.rows)}"
        problems.append(
            f"{bad} of {counts.rows} rows are malformed, over data.max_bad_share={data.max_bad_share}:\n{all_bad}\n"
            f"{_how_to_fix(counts, let_pass)}"
        )
    if data.overlong == "error" and (over := counts.filtered.get("over-long")):
        problems.append(
            f"{over} of {counts.rows} preferences are over-long:\n{_examples(store, {'over-long': over})}\n"
            "Raise policy.max_total_sequence_length, or set data.overlong=drop, truncate_prompt or truncate_completion."
        )
    elif filtered > data.max_filtered_share * counts.rows:
        problems.append(
            f"{filtered} of {counts.rows} rows were filtered, over data.max_filtered_share={data.max_filtered_share}:\n"
            f"{all_filtered}\n{_remedy(counts, data)}"
        )
    if problems:
        raise TooFewUsableError("\n".join(f"{source}: {problem}" for problem in problems), shares)
    if counts.accepted == 0:
        raise DataError(
            f"{source}: no usable preference among {counts.rows} rows:\n{_examples(store, counts.bad | counts.filtered)}\n"
            f"{_remedy(counts, data)}"
        )


def _share_for(count: int, rows: int) -> float:
    """Return `count` as a fraction of `rows`, rounded up to whole percent. For 8 of 113 rows, return 0.08."""
    return math.ceil(100 * count / rows) / 100


def _how_to_fix(counts: Counts, alternative: str) -> str:
    """Return advice on malformed rows. `alternative`: advice to skip them.

    If most rows are malformed, `alternative` is left out, because the format is probably wrong.
    """
    bad = sum(counts.bad.values())
    if bad <= counts.rows / 2:
        return f"Fix them, or {alternative}."
    return f"Fix them. {NOT_JSON_HINT}" if counts.bad.get("malformed JSON", 0) > bad / 2 else "Fix them."


def _remedy(counts: Counts, data: Data) -> str:
    """Return advice on filtered rows."""
    remedies = []
    if "over-long" in counts.filtered:
        cuts = [cut for cut in ("truncate_prompt", "truncate_completion") if cut != data.overlong]
        remedies = ["raise policy.max_total_sequence_length", f"set data.overlong={' or '.join(cuts)}"]
    remedies.append("fix the file")
    if counts.accepted:
        remedies.append(f"set data.max_filtered_share={_share_for(sum(counts.filtered.values()), counts.rows)}")
    text = ", or ".join([", ".join(remedies[:-1]), remedies[-1]] if len(remedies) > 1 else remedies)
    return f"{text[0].upper()}{text[1:]}."


def _examples(store: TokenStore, counts: dict[str, int]) -> str:
    """Return lines that list each reason, its count, and a few rows as examples."""
    lines, are_all = [], True
    for reason, count in counts.items():
        lines.append(f"  {reason}: {count}")
        examples = [(e["place"], e["message"]) for e in store.examples if e["reason"] == reason]
        for message in dict.fromkeys(message for _, message in examples):  # each message is printed once
            places = [place for place, same in examples if same == message]
            lines.append(f"    {places[0]}: {message}")
            lines += [f"    {', '.join(places[1:])}: the same."] if places[1:] else []
        are_all = are_all and len(examples) == count
    return "\n".join([*lines, *([] if are_all else [f"  All of them: {store.folder / 'rejects.jsonl'}"])])

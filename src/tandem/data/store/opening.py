"""A dataset in; its TokenStore out: prepared ahead, found in the cache by a fingerprint, or made now."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
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
from tandem.data.store.token_store import Counts, TokenStore
from tandem.data.store.tokens_file import FORMAT_VERSION
from tandem.data.store.writer import Recipe, format_of, write_store
from tandem.data.text.template import Template
from tandem.data.text.tokenizer import state_of
from tandem.errors import DataError
from tandem.storage.cache import cache_dir, content_of, fingerprint, published, read_manifest, write_manifest

# A second process pays for its start from here on.
BYTES_PER_WORKER = 512 * 1024
NOT_JSON = (
    "It is not JSON lines, one object a line. A file that is one JSON array is named .json; .csv, .parquet and .arrow are read "
    "too, each also .gz or .zst."
)
IS_ARRAY = "Is it one JSON array? Such a file is named .json."
PREPARE_AGAIN = "Prepare it again, with tandem prepare."


class TooFewUsableError(DataError):
    """Too much of a set cannot be used. `shares`: the settings that would let it pass, each with its least value."""

    def __init__(self, message: str, shares: dict[str, float] | None = None):
        super().__init__(message)
        self.shares = shares or {}


def open_store(
    source: str,
    keys: DatasetFields,
    template: Template,
    data: Data,
    max_length: int,
    progress: Callable[[float], None] = lambda share: None,
    processes: Processes | None = None,
    *,
    judged: bool = True,
) -> TokenStore:
    """The tokenised form of a set.

    processes: those of the sets before, if there are any. judged: refused if too few of its rows could be used.
    """
    with nullcontext(processes) if processes else Processes(template) as processes:
        store = _open(source, keys, processes, data, max_length, progress)
    if judged:
        judge(store, source, data)
    if keys.system_prompt_file is not None and NO_SYSTEM in store.notes:
        raise DataError(
            f"{source}: system_prompt_file = {keys.system_prompt_file}, but the chat template leaves system turns out. Give one "
            "that writes them, by policy.tokenizer.chat_template=FILE.jinja, or leave out system_prompt_file."
        )
    return store


def _open(
    source: str,
    keys: DatasetFields,
    processes: Processes,
    data: Data,
    max_length: int,
    progress: Callable[[float], None],
) -> TokenStore:
    limits = {
        "policy.max_total_sequence_length": max_length,
        "data.pairing": data.pairing,
        "data.overlong": _cut(data),
        "data.default_chosen_reward": data.default_chosen_reward,
        "data.default_rejected_reward": data.default_rejected_reward,
    }
    if is_prepared(Path(source)):
        _refuse_settings(source, keys)
        return _open_prepared(Path(source), processes, {**limits, "data.duplicates": data.duplicates})
    return _find_or_make(source, keys, processes, data, limits, progress)


def is_prepared(path: Path) -> bool:
    """Whether a folder was written by `tandem prepare`."""
    return (path / "manifest.json").is_file() and (path / "tokens.arrow").is_file()


def _refuse_settings(source: str, keys: DatasetFields) -> None:
    """Refuse settings that change how rows are read: for a prepared set, that is fixed."""
    for name, field in DatasetFields.model_fields.items():
        value = getattr(keys, name)
        if name not in ("data_path", "weight") and value != field.default and (name, value) != ("split", "train"):
            raise DataError(f"{source}: prepared already, so {name} = {value} has no effect. Leave it out.")


def _find_or_make(
    source: str,
    keys: DatasetFields,
    processes: Processes,
    data: Data,
    limits: dict[str, Any],
    progress: Callable[[float], None],
) -> TokenStore:
    files = find_files(source, keys)
    wording = wording_of(keys, source)
    if wording.system is not None and processes.template.source is None:
        raise DataError(
            f"{source}: system_prompt_file = {keys.system_prompt_file}, but there is no chat template to write a system turn "
            "with. Give policy.tokenizer.chat_template=FILE.jinja, or leave it out."
        )
    made_of = {
        "sources": [[file.name, str(file.path.resolve()), content_of(file.path)] for file in files],
        "settings": [keys.dataset_name, keys.prompt_key, keys.chosen_key, keys.rejected_key],
        "wording": [wording.prompt, wording.system],
        "limits": limits,
        "text": _text_facts(processes),
    }
    tokens = fingerprint(FORMAT_VERSION, made_of)
    if keys.columns:
        made_of["columns"] = keys.columns
    name = fingerprint(FORMAT_VERSION, made_of)
    folder = cache_dir() / "tokens" / name
    if not folder.is_dir():
        _make(folder, (name, tokens), files, keys, wording, processes, data, made_of, progress)
    try:
        return TokenStore(folder, read_manifest(folder))
    except (ValueError, OSError) as error:
        raise DataError(f"{error}. The tokenised data is damaged: remove {folder} and start again.") from None


def _make(
    folder: Path,
    fingerprints: tuple[str, str],  # of the set, and of its tokens alone
    files: list[SourceFile],
    keys: DatasetFields,
    wording: Wording,
    processes: Processes,
    data: Data,
    made_of: dict[str, Any],
    progress: Callable[[float], None],
) -> None:
    format_name, reason = format_of(files, keys, data.max_expansion)
    if unused := unused_key(format_name, keys):
        raise DataError(
            f"{keys.data_path}: read as {format_name} ({reason}), which does not look at {unused} = "
            f"{getattr(keys, unused)}. Leave it out, or name another format by dataset_name."
        )
    max_length = made_of["limits"]["policy.max_total_sequence_length"]
    scores = (data.default_chosen_reward, data.default_rejected_reward)
    recipe = Recipe(keys, format_name, wording, data.pairing, max_length, data.overlong, scores)
    with published(folder, "tokens") as aside:
        chunks = _chunks(files, progress, data.max_expansion)
        rejects_bytes = max(REJECTS_BYTES, sum(file.path.stat().st_size for file in files))
        prepared = processes.prepared(recipe, chunks, _num_workers(data, files))
        facts = write_store(prepared, aside, rejects_bytes, keys.columns)
        _refuse_changed(files, made_of)
        facts |= {"format": format_name, "format_reason": reason, "made_of": made_of}
        name, tokens = fingerprints
        # A row without a usable value is left out, and then the tokens are others too.
        if keys.columns and not any(refused_as(column) in facts["counts"]["bad"] for column in keys.columns):
            facts["tokens_fingerprint"] = tokens
        write_manifest(aside, format_version=FORMAT_VERSION, fingerprint=name, **facts)


def _refuse_changed(files: list[SourceFile], made_of: dict[str, Any]) -> None:
    """A store is named after the content that its files had before they were read: it may hold nothing else."""
    for file, (name, _, content) in zip(files, made_of["sources"], strict=True):
        if not file.path.is_file() or content_of(file.path) != content:
            raise DataError(
                f"{name}: it changed while it was read, so that its rows may be of two versions. Nothing was kept; start again "
                "when it is complete."
            )


def _chunks(files: list[SourceFile], progress: Callable[[float], None], max_expansion: float) -> Iterator[Chunk]:
    """The chunks of all files, in the order of the files and their rows."""
    sizes = [max(1, file.path.stat().st_size) for file in files]
    for number, file in enumerate(files):
        for chunk in read_chunks(file.path, file.name, max_expansion=max_expansion):
            progress((sum(sizes[:number]) + chunk.done * sizes[number]) / sum(sizes))
            yield chunk


def _open_prepared(folder: Path, processes: Processes, limits: dict[str, Any]) -> TokenStore:
    """A folder of `tandem prepare`, if it was made with the settings of the configuration, and its sources have not changed."""
    try:
        manifest = read_manifest(folder, needed=("tokens.arrow", "rejects.jsonl"))
        version = manifest["format_version"]
        if version != FORMAT_VERSION:
            raise DataError(
                f"{folder}: prepared in format {version}; this tandem reads format {FORMAT_VERSION}. {PREPARE_AGAIN}"
            )
        check_manifest(manifest, folder)
        check_rejects(folder / "rejects.jsonl")
        _compare(folder, manifest["made_of"], processes, limits)
        return TokenStore(folder, manifest)
    except KeyError as error:
        raise DataError(
            f"{folder}/manifest.json: {error} is missing. The prepared data is damaged. {PREPARE_AGAIN}"
        ) from None
    except (ValueError, OSError) as error:
        raise DataError(f"{error}. The prepared data is damaged. {PREPARE_AGAIN}") from None


def _compare(folder: Path, made_of: dict[str, Any], processes: Processes, limits: dict[str, Any]) -> None:
    now = {**limits, **(_text_facts(processes) if made_of["text"] else {})}
    there = {**made_of["limits"], **made_of["text"]}
    for what, value in now.items():
        if what in there and there[what] != value:
            then, today = (_as_set(what, of) for of in (there[what], value))
            raise DataError(
                f"{folder}: prepared with {what} = {then}, now {today}. Set {what}={then}, or prepare it again."
                if what in limits
                else f"{folder}: prepared with another {what}. {PREPARE_AGAIN}"
            )
    for name, path, content in made_of["sources"]:
        if (file := _source_file(path)) and content_of(file) != content:
            raise DataError(f"{folder}: {name} has changed since it was prepared. {PREPARE_AGAIN}")


def _source_file(path: str) -> Path | None:
    """A source of prepared data, if it is here and is a data file: any other that a manifest names is not touched."""
    file = Path(path)
    if not file.is_absolute() or ".." in file.parts or not file.is_file():
        return None
    file = file.resolve()
    # The hub's cache: datasets--NAME/snapshots/COMMIT/train.jsonl -> datasets--NAME/blobs/HASH
    return file if DATA_FILE.search(file.name) or file.parent.name == "blobs" else None


def _as_set(what: str, value: Any) -> Any:
    """A limit as a configuration spells it."""
    return ("drop" if what == "data.overlong" else "null") if value is None else value


@lru_cache(maxsize=1)  # a run has one template, and maybe several sets; this takes a quarter of a second
def _text_facts(processes: Processes) -> dict[str, str]:
    """What decides the tokens of a text: the tokenizer, the chat template, and what it writes today."""
    template = processes.template
    t = template.tokenizer
    facts = {
        "tokenizer": [state_of(t), t.eos_token, t.bos_token, *([t.pad_token] if template.pads_with_end else [])],
        "chat template": template.source,
        "policy.tokenizer.chat_template_kwargs": template.kwargs,
        "text by the chat template, which may read the date": processes.probe(),
    }
    return {name: fingerprint(value) for name, value in facts.items()}


def _cut(data: Data) -> str | None:
    """How over-long preferences are cut; that others are dropped or refused does not change what is kept."""
    return data.overlong if data.overlong.startswith("truncate") else None


def _num_workers(data: Data, files: list[SourceFile]) -> int:
    if data.num_workers != "auto":
        return data.num_workers
    size = sum(file.path.stat().st_size for file in files)
    return min(default_workers(), 1 + size // BYTES_PER_WORKER)


def judge(store: TokenStore, source: str, data: Data) -> None:
    """Stop where too much of the file could not be used; the message counts every reason and shows a few of each."""
    # Duplicates are left out because data.duplicates=drop asks for it, so they do not count here.
    kept = {reason: count for reason, count in store.counts.filtered.items() if reason != DUPLICATE}
    counts = replace(store.counts, filtered=kept)
    bad, filtered = sum(counts.bad.values()), sum(counts.filtered.values())
    all_bad, all_filtered = _examples(store, counts.bad), _examples(store, counts.filtered)
    if counts.rows == 0:
        raise DataError(f"{source}: the file holds no rows. Was it written, or fetched, to its end?")
    if bad == counts.rows:
        (only, *others) = counts.bad
        is_list = store.examples[0]["message"].startswith("a list")
        hints = {"malformed JSON": f"\n{NOT_JSON}", "not an object": f"\n{IS_ARRAY}" if is_list else ""}
        unlike = "" if others else hints.get(only, "")
        raise DataError(f"{source}: none of {counts.rows} rows can be read:\n{all_bad}{unlike}")
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
    """The smallest share, in whole percent, that lets this many rows pass: 8 of 113 -> 0.08."""
    return math.ceil(100 * count / rows) / 100


def _how_to_fix(counts: Counts, or_else: str) -> str:
    """What to do about malformed rows. Leaving out most of a file is not suggested: often it is another kind of file."""
    bad = sum(counts.bad.values())
    if bad <= counts.rows / 2:
        return f"Fix them, or {or_else}."
    return f"Fix them. {NOT_JSON}" if counts.bad.get("malformed JSON", 0) > bad / 2 else "Fix them."


def _remedy(counts: Counts, data: Data) -> str:
    """What to do about filtered rows."""
    ways = []
    if "over-long" in counts.filtered:
        cuts = [cut for cut in ("truncate_prompt", "truncate_completion") if cut != data.overlong]
        ways = ["raise policy.max_total_sequence_length", f"set data.overlong={' or '.join(cuts)}"]
    ways.append("fix the file")
    if counts.accepted:
        ways.append(f"set data.max_filtered_share={_share_for(sum(counts.filtered.values()), counts.rows)}")
    text = ", or ".join([", ".join(ways[:-1]), ways[-1]] if len(ways) > 1 else ways)
    return f"{text[0].upper()}{text[1:]}."


def _examples(store: TokenStore, counts: dict[str, int]) -> str:
    lines, are_all = [], True
    for reason, count in counts.items():
        lines.append(f"  {reason}: {count}")
        examples = [(e["place"], e["message"]) for e in store.examples if e["reason"] == reason]
        for message in dict.fromkeys(message for _, message in examples):  # equal messages are printed once
            places = [place for place, same in examples if same == message]
            lines.append(f"    {places[0]}: {message}")
            lines += [f"    {', '.join(places[1:])}: the same."] if places[1:] else []
        are_all = are_all and len(examples) == count
    return "\n".join([*lines, *([] if are_all else [f"  All of them: {store.folder / 'rejects.jsonl'}"])])

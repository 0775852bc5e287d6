"""Opens the tokenised rows (TokenStore) of a set: a prepared folder, or a store in the cache, which is created if necessary."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.formats.prompt_files import wording_of
from tandem.data.read.files import find_files
from tandem.data.read.hub import DATA_FILE
from tandem.data.store.check import check_manifest, check_rejects
from tandem.data.store.duplicates import DUPLICATE
from tandem.data.store.machines import ALONE, Machines
from tandem.data.store.making import NewStore, Request, make_store
from tandem.data.store.notes import NO_SYSTEM
from tandem.data.store.processes import Processes
from tandem.data.store.token_store import Counts, TokenStore, open_cached_store
from tandem.data.store.tokens_file import FORMAT_VERSION
from tandem.data.text.template import Template
from tandem.data.text.tokenizer import state_of
from tandem.errors import DataError
from tandem.storage.cache import (
    cache_dir,
    content_of,
    fingerprint,
    read_manifest,
)
from tandem.user_code import is_user_function, known_function

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
    machines: Machines = ALONE,
) -> TokenStore:
    """Open a tokenised set: a prepared folder, a store in the cache, or a data file that is tokenised now.

    `progress`: called with the fraction done. `processes`: to reuse. `check_shares`: refuse too many bad or filtered rows.
    `machines`: those that open the same set, and tokenise it together.
    """
    with nullcontext(processes) if processes else Processes(template) as processes:
        request = Request(
            source=source,
            keys=keys,
            data=data,
            max_length=max_length,
            processes=processes,
            progress=progress,
            machines=machines,
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


def _find_or_make(request: Request) -> TokenStore:
    """Open the store in the cache that was made from the same files with the same settings. Create it if it does not exist."""
    with request.machines.section() as section:
        wanted = _identify(request)
        make_store(request, wanted, section)
    return open_cached_store(wanted.folder)


def _identify(request: Request) -> NewStore:
    """Find the files of a set, and the name of its store in the cache."""
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
    return NewStore(
        files=files,
        wording=wording,
        made_of=made_of,
        name=name,
        tokens_fingerprint=tokens_fingerprint,
        folder=folder,
        is_missing=not folder.is_dir(),
    )


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

"""Reads the entries of Axolotl's `datasets` and `test_datasets`: where a preference set is, and how its rows are laid out."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.config.compat.records import Outcome, TranslatedKey, no_effect
from tandem.config.compat.rules.hugging_face import HUB_NAME, PreferenceSet, SetError, rows_of_split

BINARY = "BinaryPreferenceDataset"
LOADERS = ("json", "csv", "parquet", "arrow")  # in place of a path, with data_files
FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow", ".gz", ".zst")
# What the last part of a type says about rows. Before it is the template: chatml.intel, llama3.intel.
ROWS: dict[str, dict[str, str]] = {
    "default": {},
    "argilla": {
        "dataset_name": BINARY,
        "prompt_key": "instruction",
        "chosen_key": "chosen_response",
        "rejected_key": "rejected_response",
    },
    "argilla_chat": {"dataset_name": "implicit_prompt"},
    "icr": {"dataset_name": BINARY, "prompt_key": "input"},
    "intel": {"dataset_name": BINARY, "prompt_key": "question"},
    "prompt_pairs": {"dataset_name": BINARY},
    "ultra": {"dataset_name": "implicit_prompt"},
}
TEMPLATES = {"chatml": "ChatML", "llama3": "that of Llama 3"}
# The roles of turns, by the names of the fields that hold role and text.
ROLES = {
    ("role", "content"): {"user": {"user"}, "assistant": {"assistant"}, "system": {"system"}, "tool": {"tool"}},
    ("from", "value"): {"user": {"human", "user"}, "assistant": {"gpt", "assistant"}, "system": {"system"}},
}
FIELDS = ("field_messages", "field_chosen", "field_rejected", "message_property_mappings", "roles")
FIELDS = (*FIELDS, "message_field_role", "message_field_content")
SOURCE = ("path", "type", "split", "name", "data_files", "revision")
WITHOUT_EFFECT = ("ds_type", "trust_remote_code", "chat_template", "roles_to_train", "train_on_eos", "train_on_eot")
PART_TARGETS = {
    "path": ("data_path",),
    "data_files": ("data_path",),
    "split": ("split", "max_rows"),
    "name": ("subset",),
    "revision": ("revision",),
}
RAW_FORMATS = {"prompt_format": "{prompt}", "chosen_format": "{chosen}", "rejected_format": "{rejected}"}


def sets_of(entries: Any, key: str) -> list[PreferenceSet]:
    """Return the preference sets of `datasets`. Raise SetError if one cannot be used."""
    entries = [entries] if isinstance(entries, dict) else entries
    if not isinstance(entries, list) or not entries or not all(isinstance(one, dict) for one in entries):
        raise SetError("It must be a list of sets, each with path and type.")
    return [one for i, entry in enumerate(entries) for one in _sets_of(entry, f"{key}[{i}]")]


def parts_of(entries: Any, key: str, outcome: Outcome) -> tuple[TranslatedKey, ...]:
    """Return what becomes of each key inside the entries of `datasets`, whose sets are known to be usable."""
    entries = [entries] if isinstance(entries, dict) else entries
    return tuple(
        TranslatedKey(f"{key}[{i}].{name}", value, _part(name, value, outcome))
        for i, entry in enumerate(entries)
        for name, value in nested_keys(entry)
    )


def nested_keys(entry: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in entry.items():
        if isinstance(value, dict) and value:
            yield from nested_keys(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _part(name: str, value: Any, outcome: Outcome) -> Outcome:
    first = name.split(".")[0]
    if value is None:
        return no_effect("It is not set.")
    if first in WITHOUT_EFFECT:
        return no_effect("Which rows are read, and what is scored, does not depend on it here.")
    if first == "split" and value == "train":
        return no_effect("It is the split that is read anyway.")
    if first in ("roles", "message_property_mappings", "message_field_role", "message_field_content"):
        return no_effect("These names are known without it; others are refused.")
    targets = PART_TARGETS.get(first)
    if targets is None:  # type and field_*: how rows are laid out
        taken = {one for names in PART_TARGETS.values() for one in names}
        settings = {one: given for one, given in outcome.settings.items() if one.rpartition(".")[2] not in taken}
        return replace(outcome, settings=settings or outcome.settings, parts=())
    settings = {one: given for one, given in outcome.settings.items() if one.rpartition(".")[2] in targets}
    return replace(outcome, settings=settings or outcome.settings, note=None, parts=())


def has_raw_text(entries: Any) -> bool:
    """Whether a set gives its texts as they are, with a `type` of its own."""
    return isinstance(entries, list) and any(
        isinstance(one, dict) and isinstance(one.get("type"), dict) for one in entries
    )


def _sets_of(entry: dict[str, Any], where: str) -> list[PreferenceSet]:
    entry = {name: value for name, value in entry.items() if value is not None}
    if unknown := [name for name in entry if name not in (*SOURCE, *FIELDS, *WITHOUT_EFFECT)]:
        raise SetError(f"{where}.{unknown[0]} is not known here. Leave it out, or set data.train instead.")
    layout = _layout(entry, where)
    return [PreferenceSet({**source, **layout.fields}, layout.note, layout.text) for source in _sources(entry, where)]


def _sources(entry: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Where the rows are: on the hub, or in files."""
    path, files = entry.get("path"), entry.get("data_files") or []
    files = [files] if isinstance(files, str) else files
    given = [path, entry.get("split", ""), entry.get("name", ""), entry.get("revision", ""), *files]
    if not path or not all(isinstance(one, str) for one in given):
        raise SetError(f"{where}: path, split, name and data_files must be texts.")
    if any("://" in one for one in given):
        raise SetError(f"{where}: tandem reads files and hub sets. Download {path}, and set its path.")
    split = entry.get("split", "train")
    rows = rows_of_split(split, where)
    if files:
        folder = "" if path in LOADERS else path
        if folder and HUB_NAME.fullmatch(folder) and not Path(folder).is_dir():
            raise SetError(f"{where}: tandem reads complete hub sets. Download data_files, and set path to the file.")
        if "max_rows" in rows and len(files) > 1:
            raise SetError(f"{where}: {split} of several files. Name one file, or leave out the number of rows.")
        first = {"max_rows": rows["max_rows"]} if "max_rows" in rows else {}
        return [{"data_path": str(Path(folder) / file), **first} for file in files]
    if path.endswith(FILES):
        if "split" in rows:
            raise SetError(f"{where}: the file {path} has no split {split}. Leave out split.")
        return [{"data_path": path, **rows}]
    more = {name: entry[key] for name, key in (("subset", "name"), ("revision", "revision")) if key in entry}
    return [{"data_path": path, **more, **rows}]


def _layout(entry: dict[str, Any], where: str) -> PreferenceSet:
    """How the rows are laid out: the format, and the fields of prompt and completions."""
    kind = entry.get("type")
    if isinstance(kind, dict):
        return _raw_text(kind, where)
    if not isinstance(kind, str):
        raise SetError(f"{where} has no type. Name one, such as chat_template.default.")
    template, _, rows = kind.partition(".")
    rows = rows or "default"
    if template == "chat_template" and rows == "default":
        return _messages(entry, where)
    if template == "chat_template" and rows in ("argilla", "argilla_chat"):
        return PreferenceSet({"dataset_name": "implicit_prompt", **_keys(entry)})
    if template in TEMPLATES and rows in ROWS:
        note = f"{kind}: in the tokenizer's own template; in Axolotl, in {TEMPLATES[template]}"
        return PreferenceSet(ROWS[rows], note)
    if kind in ("passthrough", "passthrough.default"):
        return PreferenceSet({"dataset_name": BINARY}, "only messages are put into the chat template", "as_is")
    if kind == "zephyr.nectar":
        raise SetError(
            f"{where}: zephyr.nectar prefers the answers of the last rank, the worst ones. To prefer the best: datasets=null "
            "data.train.data_path=PATH data.train.dataset_name=nectar."
        )
    raise SetError(
        f"{where}: the type {kind} is not known here. Set data.train.data_path and, if needed, prompt_key, chosen_key and "
        "rejected_key."
    )


def _keys(entry: dict[str, Any]) -> dict[str, Any]:
    given = {part: entry.get(f"field_{part}", part) for part in ("chosen", "rejected")}
    return {f"{part}_key": name for part, name in given.items() if name != part}


def _messages(entry: dict[str, Any], where: str) -> PreferenceSet:
    """Rows of messages and two answers, whose fields have configurable names."""
    names = entry.get("message_property_mappings") or {}
    role = names.get("role") or entry.get("message_field_role") or "role"
    text = names.get("content") or entry.get("message_field_content") or "content"
    known, roles = ROLES.get((role, text)), entry.get("roles") or {}
    messages = entry.get("field_messages", "messages")
    if (
        known is None
        or set(names) - {"role", "content"}
        or any(set(names_of) - known.get(target, set()) for target, names_of in roles.items())
        or (role == "from" and messages != "conversations")
    ):
        raise SetError(
            f"{where}: tandem reads messages of role and content (user, assistant), or conversations of from and value (human, "
            "gpt). Rename its fields and roles."
        )
    if role == "from":
        return PreferenceSet({"dataset_name": "sharegpt", **_keys(entry)})
    return PreferenceSet({"dataset_name": BINARY, "prompt_key": messages, **_keys(entry)})


def _raw_text(kind: dict[str, Any], where: str) -> PreferenceSet:
    """A type of the user's: fields, and formats that their texts are put into."""
    if formats := [name for name, plain in RAW_FORMATS.items() if (kind.get(name) or plain) != plain]:
        raise SetError(
            f"{where}: tandem has no {formats[0]}. Write it as a chat template, and set "
            "policy.tokenizer.chat_template=FILE.jinja and data.train."
        )
    prompt = kind.get("field_prompt") or "prompt"
    fields = {"dataset_name": BINARY, **({} if prompt == "prompt" else {"prompt_key": prompt})}
    return PreferenceSet(
        {**fields, **_keys({name: value for name, value in kind.items() if value})}, "texts as they are", "raw"
    )

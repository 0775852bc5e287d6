"""Reads LLaMA-Factory's dataset_info.json, which says where each named set is and how its rows are laid out."""

import json
from pathlib import Path
from typing import Any

from tandem.config.compat.rules.hugging_face import HUB_NAME, PreferenceSet, SetError, rows_of_split
from tandem.config.sections.section import expand_home
from tandem.errors import one_line
from tandem.terminal.printable import listed

MAX_BYTES = 4 * 1024 * 1024
ELSEWHERE = ("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
MEDIA = ("images", "videos", "audios")
# The keys and roles of turns. Each one that `tags` gives must be among those of a style.
TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "system_tag", "observation_tag", "function_tag")
SHAREGPT_TAGS = ({"from"}, {"value"}, {"human", "user"}, {"gpt", "assistant"}, {"system"})
MESSAGE_TAGS = ({"role"}, {"content"}, {"user"}, {"assistant"}, {"system"})
ONE_BREAK = "instruction and input are separated by an empty line; in LLaMA-Factory, by a line break"


def named_sets(names: Any, folder: Any) -> dict[str, PreferenceSet]:
    """Return the sets that `names` lists, separated by commas. Raise SetError if one cannot be used."""
    wanted = [one.strip() for one in names.split(",")] if isinstance(names, str) else names
    if not isinstance(wanted, list) or not wanted or not all(isinstance(one, str) and one for one in wanted):
        raise SetError("It must be a name, or names with commas between them.")
    if isinstance(folder, dict):
        raise SetError("dataset_dir must be the folder of dataset_info.json.")
    if folder == "ONLINE" or str(folder).startswith("REMOTE:"):
        raise SetError(
            "tandem reads dataset_info.json from a folder. Download it, or set data.train.data_path=ORG/NAME."
        )
    file = Path(expand_home(str(folder))) / "dataset_info.json"
    known = _read(file)
    return {name: _set_of(name, known, file) for name in wanted}


def _read(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file():
            raise SetError(
                f"{file}: no such file. Set dataset_dir to its folder, or set data.train.data_path instead of dataset."
            )
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise SetError(f"{file}: over {MAX_BYTES // 1024**2} MiB, too large for a list of sets.")
        known = json.loads(content.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SetError(f"{file}: not readable as JSON: {one_line(error)}") from None
    if not isinstance(known, dict):
        raise SetError(f"{file}: not a JSON object of named sets.")
    return known


def _set_of(name: str, known: dict[str, Any], file: Path) -> PreferenceSet:
    where = f"{file}: {name}"
    if name not in known:
        raise SetError(f"{file} has no set of this name. It has {listed(known)}.")
    entry = known[name]
    parts = [entry, entry.get("columns") or {}, entry.get("tags") or {}] if isinstance(entry, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise SetError(f"{where}: not a JSON object with columns and tags.")
    given = [value for part in parts for value in part.values() if isinstance(value, str)]
    if any("${" in value for value in given):
        raise SetError(f"{where}: a value contains ${{, which tandem would replace. Remove it.")
    for key in ("formatting", "split", "subset", "folder", "hf_hub_url", "file_name"):
        if not isinstance(entry.get(key, ""), str | None):
            raise SetError(f"{where}: {key} must be a text.")
    if not all(isinstance(value, str | None) for part in parts[1:] for value in part.values()):
        raise SetError(f"{where}: columns and tags must be texts.")
    if not entry.get("ranking"):
        raise SetError(f"{where}: ranking is not true, so it has no pairs. Name a set of pairs.")
    if entry.get("num_samples") is not None:
        raise SetError(
            f"{where}: tandem draws no random rows (num_samples). Set data.train.max_rows for the first rows."
        )
    layout = _layout(entry, parts[1], parts[2], where)
    return PreferenceSet({**_source(entry, file, where), **layout.fields}, layout.note)


def _source(entry: dict[str, Any], file: Path, where: str) -> dict[str, Any]:
    """Where the rows are: on the hub, or in a file next to dataset_info.json."""
    if entry.get("folder") and (entry.get("subset") or not entry.get("hf_hub_url")):
        raise SetError(
            f"{where}: tandem reads folder of a hub dataset without subset. Set data.train.data_path to its files."
        )
    if hub := entry.get("hf_hub_url"):
        if not HUB_NAME.fullmatch(hub):
            raise SetError(f"{where}: hf_hub_url must be ORG/NAME.")
        subset = entry.get("subset") or entry.get("folder")
        rows = rows_of_split(entry.get("split") or "train", where)
        return {"data_path": hub, **({"subset": subset} if subset else {}), **rows}
    if other := next((key for key in ELSEWHERE if entry.get(key)), None):
        raise SetError(f"{where}: tandem does not read {other}. Download the set, and set data.train.data_path.")
    if not entry.get("file_name"):
        raise SetError(f"{where}: it has neither hf_hub_url nor file_name.")
    return {"data_path": str(file.parent / entry["file_name"])}


def _layout(entry: dict[str, Any], columns: dict[str, Any], tags: dict[str, Any], where: str) -> PreferenceSet:
    """How the rows are laid out: the format, and the fields of prompt and completions."""
    if media := next((key for key in MEDIA if columns.get(key)), None):
        raise SetError(f"{where}: only text is trained, and its rows have {media}.")
    if columns.get("kto_tag"):
        raise SetError(f"{where}: its rows are unpaired (kto_tag), and tandem trains on pairs.")
    for key in ("system", "tools"):
        if columns.get(key) not in (None, key):
            raise SetError(f"{where}: tandem reads {key} from the column {key}, not {columns[key]}. Rename the column.")
    keys = {f"{part}_key": columns[part] for part in ("chosen", "rejected") if columns.get(part) not in (None, part)}
    match entry.get("formatting") or "alpaca":
        case "sharegpt":
            return _sharegpt(columns, tags, keys, where)
        case "alpaca":
            return _alpaca(columns, keys, where)
        case other:
            raise SetError(f"{where}: tandem reads the formatting alpaca and sharegpt, not {other}.")


def _sharegpt(columns: dict[str, Any], tags: dict[str, Any], keys: dict[str, Any], where: str) -> PreferenceSet:
    messages = columns.get("messages") or "conversations"
    if _fits(tags, SHAREGPT_TAGS) and messages == "conversations":
        return PreferenceSet({"dataset_name": "sharegpt", **keys})
    if tags and _fits(tags, MESSAGE_TAGS):
        return PreferenceSet({"dataset_name": "BinaryPreferenceDataset", "prompt_key": messages, **keys})
    raise SetError(
        f"{where}: tandem reads conversations of from and value (human, gpt), or messages of role and content (user, "
        "assistant). Rename its columns and tags."
    )


def _fits(tags: dict[str, Any], style: tuple[set[str], ...]) -> bool:
    given = {tag: tags[tag] for tag in TAGS if tags.get(tag)}
    return all(given.get(tag, next(iter(allowed))) in allowed for tag, allowed in zip(TAGS, style, strict=False)) and (
        style is SHAREGPT_TAGS or given.get("role_tag") == "role"
    )


def _alpaca(columns: dict[str, Any], keys: dict[str, Any], where: str) -> PreferenceSet:
    """Rows of instruction and input. If columns are given, those that are left out are not read."""
    if not columns.get("chosen"):  # earlier releases: output is a list of both
        return PreferenceSet({"dataset_name": "alpaca_pair"}, ONE_BREAK)
    prompt = columns.get("prompt")
    if prompt and not columns.get("query") and not columns.get("history"):
        return PreferenceSet({"dataset_name": "BinaryPreferenceDataset", "prompt_key": prompt, **keys})
    wanted = {"prompt": "instruction", "query": "input", "history": "history"}
    if any(columns.get(part, name) not in (name, None) for part, name in wanted.items()) or not prompt:
        raise SetError(
            f"{where}: with a query or a history, tandem reads the columns instruction, input and history. Rename them."
        )
    return PreferenceSet({"dataset_name": "alpaca", **keys}, ONE_BREAK if columns.get("query") else None)

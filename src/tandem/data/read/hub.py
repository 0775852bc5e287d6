"""The name of a dataset on the Hugging Face hub in; its commit and local copies of one split's files out."""

import errno
import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, NoReturn

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from tandem.config.yaml_text import YamlLimitError, check_yaml
from tandem.errors import DataError
from tandem.storage.cache import cache_dir, fingerprint, replacing
from tandem.terminal.printable import listed

# The hub's own rule for the names of repositories.
HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
COMMIT = re.compile(r"\w{1,64}", re.ASCII)
LISTING_TIMEOUT_SECONDS = 30
# What is said of a header that cannot be sent. The second quotes it, token and all.
BAD_HEADER = re.compile("codec can't encode|Bearer ")
ONLINE = "Run once without HF_HUB_OFFLINE, or give local files as data_path."


@dataclass(frozen=True, slots=True)
class HubFiles:
    """One split of a dataset, as it stood at one commit."""

    commit: str
    files: dict[str, Path]  # by their names there, in the order in which they are read


def is_hub_name(data_path: str) -> bool:
    """Whether a data path means a dataset on the hub: org/name, not the name of a data file, and nothing here."""
    named = HUB_NAME.fullmatch(data_path) is not None
    return named and DATA_FILE.search(data_path) is None and not Path(data_path).exists()


def hub_files(name: str, *, subset: str | None, split: str | None, revision: str | None) -> HubFiles:
    """Fetch the files of one split into the hub's cache; with HF_HUB_OFFLINE set, find those fetched earlier."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # drawn with escape sequences, which no text may bring to the terminal; models have none either
    if split is not None and "[" in split:
        raise DataError(f"{name}: split={split} asks for a part of a split. Give a whole one, such as split=train.")
    memory = cache_dir() / "hub" / f"{fingerprint(name, subset, split, revision)}.json"
    if constants.HF_HUB_OFFLINE:
        return _recalled(name, memory)
    commit, listing = _list(name, revision)
    readme = _fetch(name, "README.md", commit).read_text("utf-8", "replace") if "README.md" in listing else ""
    chosen = choose_files(name, listing, readme, subset=subset, split=split)
    files = {file: _fetch(name, file, commit) for file in chosen}
    # Only now, so that what is remembered is there.
    _remember(memory, dataset=name, subset=subset, split=split, revision=revision, commit=commit, files=chosen)
    return HubFiles(commit, files)


def _list(name: str, revision: str | None) -> tuple[str, list[str]]:
    """The commit that a revision stands for now, and the names of its files."""
    from huggingface_hub import HfApi

    with _one_line_errors(name, revision):
        info = HfApi().dataset_info(name, revision=revision, timeout=LISTING_TIMEOUT_SECONDS)
        if info.sha is None or info.siblings is None:
            raise ValueError("the answer names no commit or no files")
    listing = sorted(sibling.rfilename for sibling in info.siblings)
    for file in listing:
        if not _is_inside(file):
            raise DataError(
                f"{name}: the hub lists {file!r}, which would lie outside of its folder. Nothing was fetched."
            )
    return info.sha, listing


def _is_inside(file: str) -> bool:
    """Whether a name is one of a file in the repository: relative, without steps upwards."""
    return not file.startswith("/") and ".." not in file.split("/")


def _fetch(name: str, file: str, commit: str) -> Path:
    from huggingface_hub import hf_hub_download

    with _one_line_errors(name, commit):
        return Path(hf_hub_download(name, file, repo_type="dataset", revision=commit))


def _remember(memory: Path, **facts: Any) -> None:
    memory.parent.mkdir(parents=True, exist_ok=True)
    with replacing(memory) as file:
        file.write(json.dumps(facts, indent=1) + "\n")


def _recalled(name: str, memory: Path) -> HubFiles:
    try:
        facts = json.loads(memory.read_text(encoding="utf-8"))
        commit, chosen = facts["commit"], facts["files"]
        if not (COMMIT.fullmatch(commit) and isinstance(chosen, list) and all(map(_is_inside, chosen))):
            raise ValueError
    # Not there, or damaged: either way nothing is remembered.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(
            f"{name}: HF_HUB_OFFLINE is set, and no earlier run here fetched it with the same subset, split and "
            f"revision. {ONLINE}"
        ) from None
    return HubFiles(commit, {file: _kept(name, file, commit) for file in chosen})


def _kept(name: str, file: str, commit: str) -> Path:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file, repo_type="dataset", revision=commit, local_files_only=True))
    except LocalEntryNotFoundError:
        raise DataError(
            f"{name}: HF_HUB_OFFLINE is set, and {file!r} is no longer in the hub's cache {constants.HF_HUB_CACHE}. {ONLINE}"
        ) from None


@contextmanager
def _one_line_errors(name: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise  # a full disk has its own exit code
        raise DataError(f"{name}: {_why(name, revision, error)}") from None


def _why(name: str, revision: str | None, error: Exception) -> str:
    """What went wrong between here and the hub, in one line without the hub's own text, which runs over many."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # a failed download is reported as a copy that is not there
    match error:
        case errors.GatedRepoError():
            return (
                f"its owners ask for consent to their terms. Accept them at {hub}/datasets/{name}, "
                "then set HF_TOKEN to a token of that account."
            )
        case errors.RepositoryNotFoundError():
            return (
                f"nothing here has this name, and neither has a public dataset on {hub}. "
                "Check the spelling, or set HF_TOKEN for a private dataset."
            )
        case errors.RevisionNotFoundError():
            return f"{hub} knows no revision {revision!r} of it. Give a branch, a tag or a commit."
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"{hub} refused access (HTTP {error.response.status_code}). Check HF_TOKEN."
        case errors.HfHubHTTPError():
            return (
                f"{hub} answered HTTP {error.response.status_code}. Try again later, or give local files as data_path."
            )
        case UnicodeEncodeError() | errors.HTTPError() if BAD_HEADER.search(str(error)):
            return "HF_TOKEN holds characters that no token has. Set it anew."
        case errors.HTTPError():  # no answer at all
            return (
                f"no such file or folder here, and {hub} cannot be reached ({_reason(error)}). Check the path, or the "
                "connection, or set HF_HUB_OFFLINE=1 to use what an earlier run fetched."
            )
    return f"cannot be fetched from {hub} ({_reason(error)}). Check HF_ENDPOINT and HF_HOME if they are set."


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


DATA_FILE = re.compile(r"\.(jsonl|json|csv|parquet|arrow)(\.(gz|zst))?\Z", re.IGNORECASE)
# What the `datasets` library writes beside the data.
NOT_DATA = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)
SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*")
KEYWORDS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
GIVE_FILES = "Give the files you want as data_path, such as 'FOLDER/*.jsonl', once they are on this machine."


# Names and paths are shown in messages of one line.
_Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]
_Texts = Annotated[list[_Text], Field(min_length=1)]


class _SplitFiles(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    split: _Text
    path: _Text | _Texts


class _Subset(BaseModel):
    """One entry of `configs`, as far as it says which files there are."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    config_name: _Text = "default"
    data_files: _Text | _Texts | list[_SplitFiles] | None = None
    data_dir: _Text | None = None
    default: bool = False


def choose_files(name: str, listing: list[str], readme: str, *, subset: str | None, split: str | None) -> list[str]:
    """The data files of a split, in order; a DataError that says what there is where the choice is not clear."""
    files = [file for file in listing if _is_data(file)]
    if not files:
        _refuse_without_data(name, listing)
    splits = _splits(_subset(name, _subsets(name, readme), subset), files)
    split = _pick(name, "split", split, splits, usual="train")
    for path, found in splits[split].items():
        if not found:
            raise DataError(
                f"{name}: its README.md gives {path} as split {split!r}, but no data file is there. {GIVE_FILES}"
            )
    chosen = list(dict.fromkeys(file for found in splits[split].values() for file in found))
    kinds = sorted({found[0].lower() for file in chosen if (found := DATA_FILE.search(file))})
    if len(kinds) > 1:  # often one table in several forms, which would be trained on as often
        raise DataError(f"{name}: the split {split!r} has files of several kinds ({listed(kinds)}). {GIVE_FILES}")
    return chosen


def _is_data(file: str) -> bool:
    *folders, base = file.split("/")
    hidden = base.startswith(".") or any(folder.startswith((".", "__")) for folder in folders)
    return not hidden and base not in NOT_DATA and DATA_FILE.search(base) is not None


def _refuse_without_data(name: str, listing: list[str]) -> NoReturn:
    script = next((file for file in listing if file.endswith(".py")), None)
    if script:
        raise DataError(
            f"{name}: it holds no data files, but code that would make them ({script!r}), and tandem runs no code from a "
            "dataset repository. Make the files yourself and give them as data_path."
        )
    raise DataError(
        f"{name}: it holds no data files that tandem reads: .jsonl, .json, .csv, .parquet or .arrow, also as .gz or .zst."
    )


def _subsets(name: str, readme: str) -> list[_Subset]:
    """What `configs` in the front matter says; without it, one subset whose splits are told by names."""
    front = FRONT_MATTER.match(readme.removeprefix("\ufeff"))
    try:
        if front:
            check_yaml(front[1])
        facts = yaml.safe_load(front[1]) if front else None
        configs = facts.get("configs") if isinstance(facts, dict) else None
        return TypeAdapter(list[_Subset]).validate_python(configs or [{}])
    except ValidationError as error:
        place = ".".join(["configs", *map(str, error.errors()[0]["loc"][:2])])
        raise DataError(f"{name}: {place} in its README.md is malformed. {GIVE_FILES}") from None
    except YamlLimitError as error:
        raise DataError(f"{name}: the front matter of its README.md: {error} {GIVE_FILES}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date that is none
        raise DataError(f"{name}: the front matter of its README.md is not YAML. {GIVE_FILES}") from None


def _subset(name: str, subsets: list[_Subset], given: str | None) -> _Subset:
    by_name = {subset.config_name: subset for subset in subsets}
    defaults = [known for known, subset in by_name.items() if subset.default or known == "default"]
    return by_name[_pick(name, "subset", given, by_name, usual=defaults[0] if len(defaults) == 1 else None)]


def _pick(name: str, key: str, given: str | None, known: Iterable[str], usual: str | None) -> str:
    """The one that was given; if none was, the usual one, or the only subset there is: a lone split may be a test set."""
    known = list(known)
    wanted = usual if given is None else given
    if wanted in known:
        return wanted
    if given is None and len(known) == 1 and key == "subset":
        return known[0]
    problem = f"it has several {key}s" if given is None and len(known) > 1 else f"it has no {key} {wanted!r}"
    known.sort(key=lambda one: -SequenceMatcher(None, given or "", one).ratio())
    raise DataError(f"{name}: {problem}. Set {key} to one of: {listed(known)}.")


def _splits(subset: _Subset, files: list[str]) -> dict[str, dict[str, list[str]]]:
    """Split -> path or pattern that the README.md gives for it -> the data files there."""
    folder = posixpath.normpath((subset.data_dir or ".").strip("/"))
    above = "" if folder == "." else f"{folder}/"
    if not subset.data_files:
        by_name = _splits_by_name([file.removeprefix(above) for file in files if file.startswith(above)])
        return {split: {folder: [above + file for file in found]} for split, found in by_name.items()}
    splits: dict[str, dict[str, list[str]]] = {}
    for entry in [subset.data_files] if isinstance(subset.data_files, str) else subset.data_files:
        split, given = (entry.split, entry.path) if isinstance(entry, _SplitFiles) else ("train", entry)
        for path in [given] if isinstance(given, str) else given:
            splits.setdefault(split, {})[path] = [file for file in files if _matches(file, above + path)]
    return splits


def _splits_by_name(files: list[str]) -> dict[str, list[str]]:
    """Shards in data/ name any split; else folders name the known ones, else files do; else all is train."""
    shards: dict[str, list[str]] = {}
    for file in files:
        if shard := SHARD.fullmatch(file):
            shards.setdefault(shard[1], []).append(file)
    if shards:
        return shards
    for part in (posixpath.dirname, posixpath.basename):
        splits = {split: [file for file in files if _says(part(file), words)] for split, words in KEYWORDS.items()}
        if any(splits.values()):
            return {split: found for split, found in splits.items() if found}
    return {"train": files}


def _says(text: str, words: str) -> bool:
    # As a whole word, digits and underscores being no part of one: train1, my_train and train-0 say train; trainer not.
    return re.search(rf"(?<![^-._ 0-9/])(?:{words})(?![^-._ 0-9/])", text) is not None


def _matches(file: str, pattern: str) -> bool:
    return _parts_match(file.split("/"), posixpath.normpath(pattern).split("/"))


def _parts_match(parts: list[str], pattern: list[str]) -> bool:
    """* and ? stay within one name, ** stands for any number of folders: data/** matches data/a/b.csv."""
    if not parts or not pattern:
        return not parts and all(piece == "**" for piece in pattern)
    if pattern[0] == "**":
        return _parts_match(parts, pattern[1:]) or _parts_match(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _parts_match(parts[1:], pattern[1:])

"""Fetches the files of one split of a dataset on the Hugging Face hub, and returns their local paths and the commit."""

import json
import posixpath
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, NoReturn

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from tandem.config.source.yaml_text import YamlLimitError, check_yaml
from tandem.errors import DataError, full_disk, one_line
from tandem.storage.cache import cache_dir, fingerprint, replacing
from tandem.terminal.printable import listed

# The hub's rule for repository names.
HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\b[\w.-]{1,96}\b/\b[\w.-]{1,96}\b", re.ASCII)
COMMIT = re.compile(r"\w{1,64}", re.ASCII)
LISTING_TIMEOUT_SECONDS = 30
# Errors about a header that cannot be sent. The second one quotes the header with the token in it.
BAD_HEADER = re.compile("codec can't encode|Bearer ")
OFFLINE_HINT = "Run once without HF_HUB_OFFLINE, or give local files as data_path."


@dataclass(frozen=True, slots=True)
class HubFiles:
    """The files of one split of a hub dataset, at one commit."""

    commit: str
    files: dict[str, Path]  # by name in the repository, in reading order


def is_hub_name(data_path: str) -> bool:
    """Whether a data path is the name of a hub dataset: org/name, not a data file, and not an existing path."""
    named = HUB_NAME.fullmatch(data_path) is not None
    return named and DATA_FILE.search(data_path) is None and not Path(data_path).exists()


def hub_files(name: str, *, subset: str | None, split: str | None, revision: str | None) -> HubFiles:
    """Fetch the files of one split into the hub's cache. If HF_HUB_OFFLINE is set, return files that an earlier run fetched."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # they write escape sequences to the terminal
    if split is not None and "[" in split:
        raise DataError(
            f"{name}: split={split} is a slice of a split, which is not supported. Give the name of a split, such as "
            "split=train."
        )
    record = cache_dir() / "hub" / f"{fingerprint(name, subset, split, revision)}.json"
    if constants.HF_HUB_OFFLINE:
        return _recorded_files(name, record)
    commit, listing = _list_repository(name, revision)
    readme = _fetch(name, "README.md", commit).read_text("utf-8", "replace") if "README.md" in listing else ""
    chosen = choose_files(name, listing, readme, subset=subset, split=split)
    files = {file: _fetch(name, file, commit) for file in chosen}
    # Last, so that the record only names files that were fetched.
    _write_record(record, dataset=name, subset=subset, split=split, revision=revision, commit=commit, files=chosen)
    return HubFiles(commit, files)


def _list_repository(name: str, revision: str | None) -> tuple[str, list[str]]:
    """Return the current commit of a revision, and the names of the files in that commit."""
    from huggingface_hub import HfApi

    with _one_line_errors(name, revision):
        info = HfApi().dataset_info(name, revision=revision, timeout=LISTING_TIMEOUT_SECONDS)
        if info.sha is None or info.siblings is None:
            raise ValueError("the hub's answer has no commit or no files")
    listing = sorted(sibling.rfilename for sibling in info.siblings)
    for file in listing:
        if not _is_inside(file):
            raise DataError(
                f"{name}: the hub lists {file!r}, a path outside the dataset's folder. Nothing was fetched. Give local "
                "files as data_path instead."
            )
    return info.sha, listing


def _is_inside(file: str) -> bool:
    """Whether a file name is a path inside the repository: relative, and without `..`."""
    return not file.startswith("/") and ".." not in file.split("/")


def _fetch(name: str, file: str, commit: str) -> Path:
    from huggingface_hub import hf_hub_download

    with _one_line_errors(name, commit):
        return Path(hf_hub_download(name, file, repo_type="dataset", revision=commit))


def _write_record(record: Path, **facts: Any) -> None:
    """Write a list of the fetched files to the cache, so that later runs can use the files offline.

    If the cache cannot be written, no error is raised, because only later runs need the list.
    """
    text = json.dumps(facts, indent=1) + "\n"
    try:
        if record.is_file() and record.read_bytes() == text.encode():
            return
        record.parent.mkdir(parents=True, exist_ok=True)
        with replacing(record) as file:
            file.write(text)
    except OSError:
        with suppress(OSError):  # an old record would make offline runs use an older commit
            record.unlink()


def _recorded_files(name: str, record: Path) -> HubFiles:
    """Return the files that an earlier run fetched, as listed in the file `record`."""
    try:
        facts = json.loads(record.read_text(encoding="utf-8"))
        commit, chosen = facts["commit"], facts["files"]
        if not (COMMIT.fullmatch(commit) and isinstance(chosen, list) and all(map(_is_inside, chosen))):
            raise ValueError
    # A damaged record is treated as a missing one.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(
            f"{name}: HF_HUB_OFFLINE is set, and no earlier run fetched this dataset with the same "
            f"subset, split and revision. {OFFLINE_HINT}"
        ) from None
    return HubFiles(commit, {file: _cached_file(name, file, commit) for file in chosen})


def _cached_file(name: str, file: str, commit: str) -> Path:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, file, repo_type="dataset", revision=commit, local_files_only=True))
    except LocalEntryNotFoundError:
        raise DataError(
            f"{name}: HF_HUB_OFFLINE is set, and {file!r} is no longer in the hub's cache {constants.HF_HUB_CACHE}. "
            f"{OFFLINE_HINT}"
        ) from None


@contextmanager
def _one_line_errors(name: str, revision: str | None) -> Iterator[None]:
    """Convert errors inside the block to a DataError with a message of one line. An error about a full disk is not converted."""
    try:
        yield
    except Exception as error:
        if full_disk(error):
            raise  # a full disk has its own exit code
        raise DataError(f"{name}: {_explain(name, revision, error)}") from None


def _explain(name: str, revision: str | None, error: Exception) -> str:
    """Return one line that explains why a request failed. Messages of huggingface_hub span many lines."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # a failed download is reported as a missing local copy
    match error:
        case errors.GatedRepoError():
            return (
                f"access requires accepting the owner's terms. Accept them at {hub}/datasets/{name}, "
                "then set HF_TOKEN to a token of that account."
            )
        case errors.RepositoryNotFoundError():
            return (
                f"no such file or folder, and no public dataset of this name on {hub}. "
                "Check the spelling, or set HF_TOKEN for a private dataset."
            )
        case errors.RevisionNotFoundError():
            return f"there is no revision {revision!r} on {hub}. Give a branch, a tag or a commit."
        case errors.HfHubHTTPError() if error.response.status_code in (401, 403):
            return f"{hub} refused access (HTTP {error.response.status_code}). Check HF_TOKEN."
        case errors.HfHubHTTPError():
            return (
                f"{hub} answered HTTP {error.response.status_code}. Try again later, or give local files as data_path."
            )
        case UnicodeEncodeError() | errors.HTTPError() if BAD_HEADER.search(str(error)):
            return "HF_TOKEN contains characters that are not allowed in a token. Set it again."
        case errors.HTTPError():  # no answer at all
            return (
                f"no such file or folder, and {hub} cannot be reached ({one_line(error)}). Check the path, or the "
                "connection, or set HF_HUB_OFFLINE=1 to use files fetched by an earlier run."
            )
    return f"cannot be fetched from {hub} ({one_line(error)}). Check HF_ENDPOINT and HF_HOME if they are set."


DATA_FILE = re.compile(r"\.(jsonl|json|csv|parquet|arrow)(\.(gz|zst))?\Z", re.IGNORECASE)
# Metadata files of the `datasets` library.
NOT_DATA = ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)
SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*")
KEYWORDS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
GIVE_FILES_HINT = "Download the files you want and give them as data_path, such as 'FOLDER/*.jsonl'."
GIVE_LOCAL_FILES_HINT = "Give the files you want as data_path, such as 'FOLDER/*.jsonl'."


# Names and paths appear in one-line messages.
_Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]
_Texts = Annotated[list[_Text], Field(min_length=1)]


class _SplitFiles(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    split: _Text
    path: _Text | _Texts


class _Subset(BaseModel):
    """One entry of `configs` in the front matter of README.md. Only the fields that name files are read."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    config_name: _Text = "default"
    data_files: _Text | _Texts | list[_SplitFiles] | None = None
    data_dir: _Text | None = None
    default: bool = False


def choose_files(
    name: str, listing: list[str], readme: str, *, subset: str | None, split: str | None, is_local: bool = False
) -> list[str]:
    """Return the data files of a split, in the order in which they are read. `is_local`: `name` is a folder on this machine.

    If the subset or split does not exist or is ambiguous, raise a DataError that lists the available names.
    """
    files = [file for file in listing if is_data(file)]
    if not files:
        _refuse_without_data(name, listing)
    hint = GIVE_LOCAL_FILES_HINT if is_local else GIVE_FILES_HINT
    splits = _splits(_subset(name, _subsets(name, readme, hint), subset, files), files)
    split = _pick(name, "split", split, splits, usual="train")
    for path, found in splits[split].items():
        if not found:
            raise DataError(
                f"{name}: README.md gives {path} for split {split!r}, but there is no data file at that path. {hint}"
            )
    chosen = list(dict.fromkeys(file for found in splits[split].values() for file in found))
    kinds = {found[0].lower(): file for file in reversed(chosen) if (found := DATA_FILE.search(file))}
    if len(kinds) > 1:  # often the same table in several forms, which would be trained on several times
        if is_local:
            patterns = [
                f"'{posixpath.join(name, posixpath.dirname(kinds[kind]), f'*{kind}')}'" for kind in sorted(kinds)
            ]
            hint = f"Give the files of one kind as data_path: {' or '.join(patterns)}."
        raise DataError(f"{name}: the split {split!r} has files of several kinds ({listed(sorted(kinds))}). {hint}")
    return chosen


def is_data(file: str) -> bool:
    *folders, base = file.split("/")
    hidden = base.startswith(".") or any(folder.startswith((".", "__")) for folder in folders)
    return not hidden and base not in NOT_DATA and DATA_FILE.search(base) is not None


def _refuse_without_data(name: str, listing: list[str]) -> NoReturn:
    script = next((file for file in listing if file.endswith(".py")), None)
    if script:
        raise DataError(
            f"{name}: there are no data files, only a script that creates them ({script!r}), and tandem runs no code from a "
            "dataset repository. Create the files yourself and give them as data_path."
        )
    raise DataError(
        f"{name}: there are no data files that tandem can read (.jsonl, .json, .csv, .parquet or .arrow, also as .gz "
        "or .zst). Convert the data to one of these and give it as data_path."
    )


def _subsets(name: str, readme: str, hint: str) -> list[_Subset]:
    """Return the subsets listed under `configs` in the front matter of README.md.

    Without `configs` there is one subset, and its splits are detected from file names.
    """
    front = FRONT_MATTER.match(readme.removeprefix("\ufeff"))
    try:
        if front:
            check_yaml(front[1])
        facts = yaml.safe_load(front[1]) if front else None
        configs = facts.get("configs") if isinstance(facts, dict) else None
        return TypeAdapter(list[_Subset]).validate_python(configs or [{}])
    except ValidationError as error:
        place = ".".join(["configs", *map(str, error.errors()[0]["loc"][:2])])
        raise DataError(f"{name}: {place} in README.md is malformed. {hint}") from None
    except YamlLimitError as error:
        raise DataError(f"{name}: the front matter of README.md: {error} {hint}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: an invalid date
        raise DataError(f"{name}: the front matter of README.md is not YAML. {hint}") from None


def _subset(name: str, subsets: list[_Subset], given: str | None, files: list[str]) -> _Subset:
    """Return the subset with the name `given`: one of README.md, or a folder with data files."""
    by_name = {subset.config_name: subset for subset in subsets}
    folder = (given or "").strip("/")
    if given not in by_name and folder and any(file.startswith(f"{folder}/") for file in files):
        return _Subset(config_name=folder, data_dir=folder)
    defaults = [known for known, subset in by_name.items() if subset.default or known == "default"]
    return by_name[_pick(name, "subset", given, by_name, usual=defaults[0] if len(defaults) == 1 else None)]


def _pick(name: str, key: str, given: str | None, known: Iterable[str], usual: str | None) -> str:
    """Return the name of the subset or split to use: `given`, or `usual` if `given` is None. `key`: "subset" or "split".

    Raise a DataError if `known` does not contain this name. There is one exception: if `given` is None and there is only
    one subset, return that subset. The exception does not apply to a single split, because it may be a test set.
    """
    known = list(known)
    wanted = usual if given is None else given
    if wanted in known:
        return wanted
    if given is None and len(known) == 1 and key == "subset":
        return known[0]
    problem = f"there are several {key}s" if given is None and len(known) > 1 else f"there is no {key} {wanted!r}"
    known.sort(key=lambda one: -SequenceMatcher(None, given or "", one).ratio())
    raise DataError(f"{name}: {problem}. Set {key} to one of: {listed(known)}.")


def _splits(subset: _Subset, files: list[str]) -> dict[str, dict[str, list[str]]]:
    """Return the files of each split as a nested dict: split -> path or pattern from README.md -> data files that match."""
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
    """Group files into splits by their names. Return a dict from split to files.

    If there are shards such as data/train-00000-of-00002.parquet, only shards are used. Otherwise the names of splits are
    searched in folder names, and then in file names. If no split is found, all files belong to train.
    """
    shards: dict[str, list[str]] = {}
    for file in files:
        if shard := SHARD.fullmatch(file):
            shards.setdefault(shard[1], []).append(file)
    if shards:
        return shards
    for part in (posixpath.dirname, posixpath.basename):
        splits = {
            split: [file for file in files if _contains_word(part(file), words)] for split, words in KEYWORDS.items()
        }
        if any(splits.values()):
            return {split: found for split, found in splits.items() if found}
    return {"train": files}


def _contains_word(text: str, words: str) -> bool:
    # Digits and underscores also end a word: train1, my_train and train-0 match train; trainer does not.
    return re.search(rf"(?<![^-._ 0-9/])(?:{words})(?![^-._ 0-9/])", text) is not None


def _matches(file: str, pattern: str) -> bool:
    return _parts_match(file.split("/"), posixpath.normpath(pattern).split("/"))


def _parts_match(parts: list[str], pattern: list[str]) -> bool:
    """Whether the parts of a path match the parts of a pattern.

    In a pattern, * and ? match within one part, and ** matches any number of parts: data/** matches data/a/b.csv.
    """
    if not parts or not pattern:
        return not parts and all(piece == "**" for piece in pattern)
    if pattern[0] == "**":
        return _parts_match(parts, pattern[1:]) or _parts_match(parts[1:], pattern)
    return fnmatchcase(parts[0], pattern[0]) and _parts_match(parts[1:], pattern[1:])

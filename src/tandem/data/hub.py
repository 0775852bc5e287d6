"""The name of a dataset on the Hugging Face hub in; its commit and local copies of one split's files out."""

import errno
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.cache import cache_dir, fingerprint, replacing
from tandem.data.hub_layout import DATA_FILE, choose_files
from tandem.errors import DataError

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

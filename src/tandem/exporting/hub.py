"""Uploads an export folder to the Hugging Face hub, or lists the files that would be uploaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError, TandemError
from tandem.terminal.arguments import option, same_call

MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class Upload:
    """The files that were uploaded to the hub, or that would be uploaded in a dry run."""

    repository: str
    files: dict[str, int]  # size in bytes, by name
    address: str | None  # None: nothing was uploaded

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


def check_repository(name: str, *, dry_run: bool) -> None:
    """Raise ConfigError, before anything is exported, if the name is invalid or the upload cannot work."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
        is_valid = name.count("/") == 1
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{option('push_to_hub', name)}: not the name of a repository. Write OWNER/NAME.")
    if dry_run:
        return
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"{option('push_to_hub', name)}: HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it, or add "
            f"{option('dry_run', True)}."
        )
    if get_token() is None:
        raise ConfigError(
            f"{option('push_to_hub', name)}: there is no token for the hub. Set HF_TOKEN to a token with write access, or "
            "run `hf auth login`."
        )


def uploaded_files(folder: Path) -> dict[str, int]:
    """Return the name and size in bytes of each file to upload. Hidden files are left out."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return {path.name: path.stat().st_size for path in paths}


def push(folder: Path, repository: str, *, step: int, dry_run: bool, api: Any = None) -> Upload:
    """Upload a folder in one commit. A repository that does not exist is created, and is private.

    `api`: the client of the hub; None: `huggingface_hub.HfApi()`. With `dry_run`, nothing is uploaded.
    """
    files = uploaded_files(folder)
    if dry_run:
        return Upload(repository, files, None)
    if api is None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        api = HfApi()
    try:
        # A public repository cannot be taken back; making a private one public takes one click.
        api.create_repo(repository, private=True, exist_ok=True, repo_type="model")
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            allow_patterns=[_literal(name) for name in files],
            commit_message=f"Step {step}, exported with tandem",
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        what = "cannot be reached" if _is_unreachable(error) else "refused the upload"
        raise TandemError(
            f"{option('push_to_hub', repository)}: the hub {what} ({type(error).__name__}: {reason}). The "
            f"export in {folder} is complete; {same_call()} uploads it again."
        ) from None
    return Upload(repository, files, f"https://huggingface.co/{repository}")


def _is_unreachable(error: Exception) -> bool:
    """Whether an error means that the hub did not answer. The hub's client uses httpx or httpx2, with the same names."""
    return isinstance(error, OSError) or any(kind.__name__ == "TransportError" for kind in type(error).__mro__)


def _literal(name: str) -> str:
    """Return a glob pattern that matches exactly this file name."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)

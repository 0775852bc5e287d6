"""Checks the files that `tandem generate` and `tandem chat` write and read, before anything is loaded."""

from pathlib import Path

from tandem.errors import ConfigError
from tandem.storage.cache import refuse_other_suffix
from tandem.terminal.arguments import option


def check_out(path: Path) -> None:
    """Raise ConfigError if a path cannot name the output file. Called before models load."""
    if path.is_dir():
        raise ConfigError(
            f"{option('out', path)}: a folder. Give the name of a file, such as {path / 'completions.jsonl'}."
        )
    refuse_other_suffix(option("out", path), path)
    if not path.parent.is_dir():
        what = (
            "is a file, not a folder. Choose"
            if path.parent.is_file()
            else "does not exist. Create this folder, or choose"
        )
        raise ConfigError(f"{option('out', path)}: {path.parent} {what} another file.")


def check_template(given: str) -> None:
    """Raise ConfigError if a value of chat_template is not a template file, or none for plain text."""
    if given in ("none", "default"):
        return
    if not given.endswith(".jinja"):
        raise ConfigError(
            f"{option('chat_template', given)}: not a file that ends in .jinja. Give one, or none for plain text."
        )
    if not Path(given).is_file():
        raise ConfigError(f"{option('chat_template', given)}: there is no such file. Check the path.")

"""Checks the files that `tandem generate` and `tandem chat` write and read, before anything is loaded."""

from pathlib import Path

from tandem.errors import ConfigError
from tandem.terminal.arguments import option

# Of files in other formats, compressed ones included: other programs, and tandem itself, would fail to read JSON lines there.
OTHER_SUFFIXES = (".csv", ".tsv", ".parquet", ".arrow", ".feather", ".xlsx", ".gz", ".zst", ".bz2", ".xz", ".zip")


def check_out(path: Path) -> None:
    """Raise ConfigError if a path cannot name the output file. Called before models load."""
    if path.is_dir():
        raise ConfigError(
            f"{option('out', path)}: a folder. Give the name of a file, such as {path / 'completions.jsonl'}."
        )
    if path.suffix.lower() in OTHER_SUFFIXES:
        raise ConfigError(
            f"{option('out', path)}: JSON lines are written, which a {path.suffix} file does not hold. Give a name that ends "
            f"in .jsonl, such as {path.with_suffix('.jsonl')}."
        )
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

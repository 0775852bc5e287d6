"""Reads prompts: from a text, from a file with a prompt per line or row, or from preference data. Does not import torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.config.load import load_config
from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.section import EMBEDDED
from tandem.data.formats.formats import NOTHING_FITS, detect_format, read_preference
from tandem.data.formats.preference import (
    TextOrMessages,
    ended_before_answer,
    messages_of,
    prompt_of,
    refuse_other_media,
    tools_of,
    with_system,
)
from tandem.data.formats.prompt_files import Wording, read_text_file, why_unreadable
from tandem.data.formats.user_formats import converted, formats_of, own_format
from tandem.data.read.files import SourceFile, find_files
from tandem.data.read.sources import RowError, SourceRow, read_chunks, rows_of
from tandem.embedded.files import VALIDATION
from tandem.errors import ConfigError, DataError
from tandem.generation.records import Prompt
from tandem.terminal.printable import counted, listed

TEXT_SUFFIXES = (".txt", ".text")
KEYS = DatasetFields()
# Columns that are not copied to the output as `row`: the prompt itself, and what an earlier output added.
PROMPT_COLUMNS = frozenset(["prompt", "messages", "system", "tools", "completions", "generated_by", "row", "id"])
SHOWN_ERRORS = 3


@dataclass(frozen=True, slots=True)
class ListedPrompt(SourceRow):
    """A prompt of a list that was given in Python, and its index there."""

    @property
    def place(self) -> str:
        return f"{self.file}[{self.line}]"


@dataclass(frozen=True, slots=True)
class OwnFormats:
    """The formats of the user's that runs were trained with. They read rows that no known format fits."""

    runs: tuple[Path, ...] = ()  # or checkpoints
    allow_code: bool = False

    def for_rows_like(self, first: SourceRow) -> tuple[str | None, str]:
        """The format that reads the rows of a file like its first; if there is none, what an error says about that."""
        tried: list[str] = []
        for run in self.runs:
            file, without = str(run / "config.yaml"), ["dpo={}", "reference={}"]  # the loss is not needed
            loaded = load_config(file, without, allow_code=self.allow_code, needs_formats=False)
            names = formats_of(loaded.config.data.training_sets)
            if (found := own_format(first, names, loaded.refused_formats)) is not None:
                return found, ""
            tried += names
        return None, f" {' and '.join(tried)}, the format of the run, cannot read it either." if tried else ""


def prompts_from(given: str | Path | Sequence[Any], own: OwnFormats = OwnFormats()) -> tuple[list[Prompt], int]:
    """The prompts of a file, or those in a list of texts, lists of messages and rows; and how many rows have none.

    `embedded` is the bundled validation pairs. Every unusable row is reported in one DataError.
    """
    if isinstance(given, str | Path):
        return _read_files(str(given), own)
    values = [dict(one) if isinstance(one, Mapping) else {"prompt": one} for one in given]
    rows = [ListedPrompt(value, "prompts", number) for number, value in enumerate(values)]
    if not rows:
        raise DataError("prompts is empty. Give a list of texts, lists of messages or rows, or the path of a file.")
    return _collect(rows, "prompts", own)


def one_prompt(text: str) -> list[Prompt]:
    """The prompt given on the command line."""
    if not text.strip():
        raise ConfigError("--prompt is empty. Give a text.")
    try:
        return [Prompt(0, "--prompt", prompt_of(SourceRow({"prompt": text}, "--prompt", 1), "prompt"))]
    except RowError as error:
        raise ConfigError(f"--prompt: {error.message}") from None


def _read_files(path: str, own: OwnFormats) -> tuple[list[Prompt], int]:
    embedded = [SourceFile(VALIDATION, EMBEDDED)]
    files = embedded if path == EMBEDDED else find_files(path, DatasetFields(data_path=path))
    rows = (row for file in files for row in (_lines(file) if file.path.suffix in TEXT_SUFFIXES else _rows(file)))
    return _collect(rows, path, own)


def _rows(file: SourceFile) -> Iterable[SourceRow | RowError]:
    return (row for chunk in read_chunks(file.path, file.name) for row in rows_of(chunk))


def _lines(file: SourceFile) -> Iterable[SourceRow]:
    """A prompt per line; blank lines are skipped."""
    try:
        text = read_text_file(file.path)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file.name}: {why_unreadable(error)}") from None
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            yield SourceRow({"prompt": line.rstrip("\r")}, file.name, number)


def _collect(rows: Iterable[SourceRow | RowError], source: str, own: OwnFormats) -> tuple[list[Prompt], int]:
    prompts: list[Prompt] = []
    errors: list[RowError] = []
    num_filtered = 0
    format_name, hint = None, ""
    is_first = True
    for row in rows:
        try:
            if isinstance(row, RowError):
                raise row
            if is_first and not _has_prompt(row):
                format_name, hint = own.for_rows_like(row)
            is_first = False
            source_row = row if format_name is None else replace(row, value=converted(row, format_name)[0].value)
            prompt, tools = _prompt_of(source_row, hint)
        except RowError as error:
            if error.kind == "filtered":
                num_filtered += 1
            else:
                errors.append(error)
            continue
        others = {key: value for key, value in row.value.items() if key not in PROMPT_COLUMNS}
        prompts.append(Prompt(len(prompts), row.place, prompt, tools, others))
    if errors:
        more = f"\n... and {len(errors) - SHOWN_ERRORS:,} more rows" if len(errors) > SHOWN_ERRORS else ""
        raise DataError("\n".join(map(str, errors[:SHOWN_ERRORS])) + more)
    if not prompts:
        filtered = f"; skipped {counted(num_filtered, 'row')} without a usable prompt" if num_filtered else ""
        raise DataError(
            f"{source}: no prompts{filtered}. Give a file with one prompt per line, or with rows that have a key prompt or "
            "messages."
        )
    return prompts, num_filtered


def _has_prompt(row: SourceRow) -> bool:
    return "prompt" in row.value or "messages" in row.value or detect_format(row, KEYS) != NOTHING_FITS


def _prompt_of(row: SourceRow, hint: str) -> tuple[TextOrMessages, tuple[Any, ...]]:
    """The prompt and tools of a row. A row of preference data gives its prompt even if its completions are unusable.

    `hint`: what an error adds about a row that no format fits.
    """
    refuse_other_media(row)
    if (found := detect_format(row, KEYS)) != NOTHING_FITS:
        try:
            preference = read_preference(row, KEYS, found[0], Wording())
            return preference.prompt, preference.tools
        except RowError:
            if "prompt" not in row.value:
                raise
    if "prompt" in row.value:
        return with_system(row, prompt_of(row, "prompt")), tools_of(row)
    if "messages" in row.value:
        messages = messages_of(row.value["messages"], row, "messages", allowed="a list of messages")
        return ended_before_answer(messages, row, "messages"), tools_of(row)
    raise RowError(
        row.place,
        "missing key",
        f"no key prompt or messages, and not preference data. Keys found: {listed(row.value) or 'none'}.{hint}",
    )

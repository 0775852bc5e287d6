"""Shows one preference of a data file as the model will see it: on the terminal, as an HTML page, or as JSON."""

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from tandem.columns import COLUMNS
from tandem.config.schema import Config
from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.section import EMBEDDED
from tandem.data.formats.row_columns import unread_in
from tandem.data.preflight import warnings_about
from tandem.data.store.duplicates import without_duplicates
from tandem.data.store.opening import check_usable_shares, open_store
from tandem.data.store.token_store import TokenStore
from tandem.data.store.writer import REPEATED, SWAPPED
from tandem.data.text.template import make_template
from tandem.data.text.tokenizer import load_tokenizer
from tandem.data.text.tokens import TokenizedPreference
from tandem.embedded.files import TRAIN
from tandem.errors import ConfigError, DataError, full_disk
from tandem.model.files.source import find_tokenizer_without_torch
from tandem.paths import check_data, check_models
from tandem.storage.cache import real_path, replacing
from tandem.terminal.console import SafeConsole
from tandem.terminal.text import wrap

# Visible replacements of control characters, which a terminal would hide or execute: 27 (escape) becomes U+241B.
VISIBLE = str.maketrans(
    {code: chr(0x2400 + code) for code in range(32)}
    | dict.fromkeys(range(0x7F, 0xA0), "\N{REPLACEMENT CHARACTER}")
    | {"\n": "⏎\n", "\t": "⇥\t"}
)
NO_LIMIT = 2**31 - 1
TOO_LONG = ("over-long", "equal after truncation")
MAX_TOKENS_PER_CHARACTER = 4  # a character has at most 4 UTF-8 bytes, and each token at least one
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tandem inspect</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{stylesheet} body {{ background: {background}; color: {foreground}; }} pre {{ white-space: pre-wrap; }}</style>
</head><body><pre>{code}</pre></body></html>
"""
PAGE_START = PAGE.partition("</title>")[0].encode()


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a prompt or completion."""

    id: int
    text: str
    position: int
    special: bool
    scored: bool


@dataclass(frozen=True, slots=True)
class Inspection:
    """A preference as the model will see it, and facts about its file."""

    place: str
    format: str
    format_reason: str
    rows: int
    accepted: int
    left_out: dict[str, int]  # number of rows left out, by reason
    stops: str | None  # the error about the rows of the file with which training would stop
    duplicates: list[str]  # what training does with preferences that repeat or contradict another one
    note: str | None  # if the preference is over-long: how training handles it
    warnings: list[str]  # the warnings about the file that training prints
    tokenizer: str  # the name of the tokenizer
    has_template: bool
    prompt: list[Token]
    completions: list[list[Token]]
    pairs: list[tuple[int, int]]
    columns: dict[str, list[float | None]]  # numbers from the data: one per completion, or one for the preference
    unread: dict[str, str]  # fields that are not used, with the setting that would make training use them


def do_without_torch() -> None:
    """Make transformers run without torch. Importing torch takes most of the time needed to load a tokenizer.

    None in sys.modules makes the import of torch fail. Tokenizers do not need torch.
    """
    if not {"torch", "transformers"} & sys.modules.keys():
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no warning about missing torch
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]


def inspect_data(data_path: str, config: Config, row: str | None) -> Inspection:
    """Inspect one preference of a data file.

    `row`: the line of the preference, such as 3, or pairs.jsonl:3 if there are several files. If None, inspect the first
    usable row.
    """
    path = str(TRAIN) if data_path == EMBEDDED else data_path
    keys = _keys(config, data_path)
    check_models(config)
    check_data({"data": keys})
    tokenizer = load_tokenizer(find_tokenizer_without_torch(config.policy))
    template = make_template(tokenizer, config.policy.tokenizer)
    store = _open(path, keys, template, config, check_shares=row is None)

    def without_limit() -> TokenStore:
        return _open(path, keys, template, config, max_length=NO_LIMIT, check_shares=False)

    preference, note = (store[0], None) if row is None else _preference_at(row, path, store, config, without_limit)
    if note is None and _may_be_truncated(preference, config):
        note = _truncation_note(preference, without_limit(), config.data.overlong)
    return Inspection(
        place=preference.place,
        format=store.format,
        format_reason=store.format_reason,
        rows=store.counts.rows,
        accepted=store.counts.accepted,
        left_out={**store.counts.bad, **store.counts.filtered},
        stops=_why_training_stops(store, data_path, config),
        duplicates=_duplicates(store, config.data.duplicates),
        note=note,
        warnings=list(warnings_about(data_path, store.notes, store.noted_at).values()),
        tokenizer=config.policy.tokenizer_name,
        has_template=template.source is not None,
        prompt=_tokens(preference.prompt, 0, tokenizer, scored=False),
        completions=[_completion(preference, number, tokenizer) for number in range(len(preference.completions))],
        pairs=list(preference.pairs),
        columns={name: [None if isnan(v) else v for v in values] for name, values in preference.columns.items()},
        unread={column: f"data.train.{COLUMNS[column].key}={column}" for column in unread_in(store.notes)},
    )


def show(inspection: Inspection, console: Console, *, positions: bool) -> None:
    """Print the inspection.

    Neighbouring tokens have different shades, special tokens have reversed colours, and scored tokens have a separate
    colour.
    """
    i = inspection
    left_out = ", ".join(f"{reason}: {count}" for reason, count in i.left_out.items())
    usable = f"{i.accepted} of {i.rows} rows usable" + (f" ({left_out})" if left_out else "")
    summary = f"{i.place}: read as {i.format}, {i.format_reason}; {usable}"
    console.print(wrap(summary, console.width) if console.is_terminal else summary, markup=False)
    if i.stops:
        lines = ["Training stops at rows of this file:", *(f"  {line}" for line in i.stops.splitlines())]
        for text in lines:
            console.print(wrap(text, console.width) if console.is_terminal else text, markup=False, style="bold red")
    for text in i.duplicates:
        console.print(wrap(text, console.width) if console.is_terminal else text, markup=False)
    if i.note:
        console.print(wrap(i.note, console.width) if console.is_terminal else i.note, markup=False, style="bold red")
    for warning in i.warnings:
        text = f"warning: {warning}"
        console.print(wrap(text, console.width) if console.is_terminal else text, markup=False, style="yellow")
    for column, setting in i.unread.items():
        text = f"The field {column} is not used. To use it, set {setting}."
        console.print(wrap(text, console.width) if console.is_terminal else text, markup=False)
    if i.tokenizer == EMBEDDED:
        console.print("Tokens of the embedded model; --model M uses the tokenizer of another model.")
    if not i.has_template:
        console.print("No chat template: texts are used as they are.")
    if given := [f"{name} {i.columns[name][0]:g}" for name in i.columns if COLUMNS[name].per == "preference"]:
        console.print(", ".join(given), markup=False)
    console.print(f"\nprompt: {_tokens_in_words(i.prompt)}, not scored", style="bold", markup=False)
    _print(_coloured(i.prompt, "cyan", positions), console)
    for number, completion in enumerate(i.completions):
        over = [str(loser) for winner, loser in i.pairs if winner == number]
        under = any(loser == number for _, loser in i.pairs)
        better = f", preferred to completion {', '.join(over)}" if over else "" if under else ", in no pair"
        num_scored = sum(token.scored for token in completion)
        which = "scored" if num_scored == len(completion) else f"{num_scored} of them scored"
        numbers = (
            f", {name} {value:g}"
            for name, values in i.columns.items()
            if COLUMNS[name].per == "completion" and (value := values[number]) is not None
        )
        title = f"\ncompletion {number}: {_tokens_in_words(completion)}, {which}{better}{''.join(numbers)}"
        console.print(title, style="bold", markup=False)
        _print(_coloured(completion, "green" if over else "red", positions), console)


def _print(text: Text, console: Console) -> None:
    console.print(text, end="" if text.plain.endswith("\n") else "\n")


def as_json(inspection: Inspection) -> str:
    return json.dumps(asdict(inspection), ensure_ascii=False, indent=1)


def _refuse_other_file(file: Path) -> None:
    """Raise ConfigError if a file exists that is not a page of `write_page`, so that data and reports are never replaced."""
    if not file.exists():
        return
    if file.is_dir():
        raise ConfigError(f"--html {file}: a directory. Give the name of a file.")
    if not file.is_file():  # such as /dev/null, which must not be replaced
        raise ConfigError(f"--html {file}: not a plain file. Give the name of a file.")
    with file.open("rb") as existing:
        start = existing.read(len(PAGE_START) + 1)
    if start and not start.startswith(PAGE_START):
        raise ConfigError(
            f"--html {file}: this file exists and is not a page of tandem inspect, so it is kept. Choose another file."
        )


def write_page(inspection: Inspection, file: Path, *, positions: bool) -> None:
    """Write the output of `show` as a self-contained HTML page. Texts from the data are escaped."""
    _refuse_other_file(file)
    console = SafeConsole(record=True, file=io.StringIO(), width=120, force_terminal=True, soft_wrap=False)
    show(inspection, console, positions=positions)
    try:
        with replacing(real_path(file) if file.is_symlink() else file) as page:
            page.write(console.export_html(theme=MONOKAI, code_format=PAGE))
    except OSError as error:
        if full_disk(error):
            raise
        raise ConfigError(f"--html {file}: {error.strerror}. Choose another file.") from None


def _open(
    path: str, keys: DatasetFields, template: Any, config: Config, *, max_length: int | None = None, check_shares: bool
) -> TokenStore:
    # Bad rows elsewhere in the file are not an error here, because only one row is shown.
    cut = "drop" if max_length or config.data.overlong == "error" else config.data.overlong
    lenient = {"on_bad_row": "skip", "max_bad_share": 1.0, "max_filtered_share": 1.0, "overlong": cut}
    data = config.data.model_copy(update=lenient)
    return open_store(
        path, keys, template, data, max_length or config.policy.max_total_sequence_length, check_shares=check_shares
    )


def _why_training_stops(store: TokenStore, name: str, config: Config) -> str | None:
    """Return the error about bad, filtered or duplicate rows with which `tandem train` would stop; None if it would not."""
    try:
        check_usable_shares(store, name, config.data)
        if config.data.duplicates == "error":
            without_duplicates({"train": store}, config.data)
    except DataError as error:
        return str(error)
    return None


def _duplicates(store: TokenStore, how: str) -> list[str]:
    """Return lines about preferences that repeat another one, or that another one contradicts. `how`: data.duplicates."""
    treatment = {
        "keep": "They are trained on each time; data.duplicates=drop keeps the first.",
        "drop": "data.duplicates=drop leaves them out of training.",
        "error": "data.duplicates=error stops training.",
    }[how]
    advice = {REPEATED: treatment, SWAPPED: "Both are trained on: check which one is right."}
    return [
        f"{note.capitalize()}: {store.notes[note]:,}, the first at {store.noted_at[note]}. {text}"
        for note, text in advice.items()
        if store.notes.get(note)
    ]


def _keys(config: Config, data_path: str) -> DatasetFields:
    """Return the settings for a training set at `data_path`.

    Settings of data.train take precedence over those of data.default.
    """
    given = (config.data.default, config.data.training_sets[0])
    merged = {name: value for one in given for name, value in one.model_dump(exclude_unset=True).items()}
    return DatasetFields(**{**merged, "data_path": data_path})


def _may_be_truncated(preference: TokenizedPreference, config: Config) -> bool:
    is_full = preference.longest == config.policy.max_total_sequence_length
    return is_full and config.data.overlong.startswith("truncate")


def _truncation_note(preference: TokenizedPreference, longer: TokenStore, overlong: str) -> str | None:
    index = _find(longer, preference.place)
    before = preference.longest if index is None else longer[index].longest
    return f"Truncated from {before} tokens by data.overlong={overlong}." if before > preference.longest else None


def _preference_at(
    row: str, path: str, store: TokenStore, config: Config, without_limit: Callable[[], TokenStore]
) -> tuple[TokenizedPreference, str | None]:
    """Return (preference, note) for a row. The note says how training handles an over-long preference, and is None otherwise."""
    if (index := _find(store, row)) is not None:
        return store[index], None
    reject = _reject(row, path, store)
    problem = f"{reject['place']}: {reject['message']}"
    if reject["reason"] not in TOO_LONG:
        raise DataError(problem)
    longer = without_limit()
    index = _find(longer, row)
    if index is None:  # its completions are equal after truncation
        raise DataError(problem)
    does = "stops at it" if config.data.overlong == "error" else "leaves it out"
    return longer[index], f"Training {does}: {problem}"


def _find(store: TokenStore, row: str) -> int | None:
    return next((index for index in range(len(store)) if _is_at(store.place(index), row)), None)


def _is_at(place: str, row: str) -> bool:
    """Whether a place matches a row given by the user. data/b.jsonl:3 matches the rows 3, b.jsonl:3 and data/b.jsonl:3."""
    return place == row or place.endswith((f"/{row}", f":{row}"))


def _reject(row: str, path: str, store: TokenStore) -> dict[str, str]:
    """Return the entry for a row in rejects.jsonl, which lists the rows left out. Raise a DataError if there is no such row."""
    rejects = [json.loads(line) for line in (store.folder / "rejects.jsonl").read_text("utf-8").splitlines()]
    if found := next((reject for reject in rejects if _is_at(reject["place"], row)), None):
        return found
    file, _, number = row.rpartition(":")
    places = [*map(store.place, range(len(store))), *(reject["place"] for reject in rejects)]
    there = [int(place.rpartition(":")[2]) for place in places if not file or _is_at(place.rpartition(":")[0], file)]
    if not there:
        raise DataError(f"{path}: no row comes from a file {file}. Check the name of the file in --row.")
    nearest = min(there, key=lambda other: abs(other - int(number)))
    raise DataError(f"{path}: there is no row {row}. The nearest is {nearest}.")


def _completion(preference: TokenizedPreference, number: int, tokenizer: Any) -> list[Token]:
    tokens = _tokens(preference.completions[number], len(preference.prompt), tokenizer, scored=True)
    scored = set(preference.scored(number).tolist())
    return [token if i in scored else replace(token, scored=False) for i, token in enumerate(tokens)]


def _tokens(ids: Any, start: int, tokenizer: Any, *, scored: bool) -> list[Token]:
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = added | set(tokenizer.all_special_ids)
    texts = _texts([int(id) for id in ids], tokenizer)
    return [
        Token(id=int(id), text=text, position=start + i, special=int(id) in special, scored=scored)
        for i, (id, text) in enumerate(zip(ids, texts, strict=True))
    ]


def _texts(ids: list[int], tokenizer: Any) -> list[str]:
    """Return the text of each token. If several tokens form one character, the last token gets it: "", "", "\N{UNICORN FACE}"."""
    texts: list[str] = []
    pending: list[int] = []
    for id in ids:
        pending.append(id)
        text = tokenizer.decode(pending)
        is_part = text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < MAX_TOKENS_PER_CHARACTER
        texts.append("" if is_part else text)
        pending = pending if is_part else []
    if pending:
        texts[-1] = tokenizer.decode(pending)
    return texts


def _tokens_in_words(tokens: list[Token]) -> str:
    return "1 token" if len(tokens) == 1 else f"{len(tokens)} tokens"


def _coloured(tokens: list[Token], colour: str, positions: bool) -> Text:
    text = Text()
    for i, token in enumerate(tokens):
        shade = colour if token.scored else "cyan"
        style = f"bold black on {shade}" if token.special else shade if i % 2 else f"{shade} on grey19"
        shown = token.text.translate(VISIBLE)
        line, end = (shown[:-1], "\n") if shown.endswith("\n") else (shown, "")
        text.append(line, style=style)
        if positions:
            text.append(f"{str(token.position).translate(SUBSCRIPTS)} ", style="dim")
        text.append(end)
    return text

"""Improves the advice of messages about rows with what a format's own reader does not know: its keys, and data.train.columns."""

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any

from tandem.config.sections.datasets import DatasetFields
from tandem.data.read.sources import RowError, SourceRow

OTHER_FORMAT = "Set data.train.dataset_name to another format."
ADD_OR_SKIP = "Add it to the row, or leave such rows out with data.on_bad_row=skip."
PARTS = ("prompt", "chosen", "rejected")
MAX_DEPTH = 4
# Where the better and the worse answer to a conversation are expected.
ANSWERS_OF = {
    "messages": "Add the worse answer as rejected_response; the last message is then the chosen one.",
    "conversations": "Let it end with the user's turn, and add the better answer as chosen and the worse one as rejected.",
}
# Texts beside a conversation that are no answers to it.
ABOUT_CONVERSATION = ("id", "prompt_id", "prompt", "source", "dataset", "category", "system")


def with_path(error: RowError, keys: DatasetFields) -> RowError:
    """Return an error that names the path in data.train.columns, not the part of a preference that its value is for."""
    if error.kind != "bad":
        return error
    for part in (part for part in PARTS if part in keys.columns):
        path, after = keys.columns[part], error.message.removeprefix(part)
        if after != error.message and after.startswith((":", "[", " is ")):
            return RowError(error.place, error.reason, f"{path}{after}")
    return error


def without_own_keys(error: RowError, own: Collection[str], *, is_detected: bool) -> RowError:
    """Return an error that suggests no key that the format needs for something else, and no other format if this is detected."""
    message = error.message
    for key in own:
        message = message.replace(f" Did you mean {key}?", "")
    if is_detected:
        message = message.replace(OTHER_FORMAT, ADD_OR_SKIP)
    return error if error.kind != "bad" or message == error.message else RowError(error.place, error.reason, message)


def one_conversation(row: SourceRow, keys: DatasetFields) -> tuple[str, str] | None:
    """Return a reason and a message about a row that holds a conversation and no two answers to it, or None."""
    name = next((name for name in ANSWERS_OF if isinstance(row.value.get(name), list)), None)
    if name is None or name == keys.prompt_key or {keys.chosen_key, keys.rejected_key} & row.value.keys():
        return None
    others = {key: value for key, value in row.value.items() if key not in (name, "tools")}
    texts = [key for key, value in others.items() if isinstance(value, str) and key not in ABOUT_CONVERSATION]
    if len(texts) > 1 or any(isinstance(value, Mapping | list) for value in others.values()):
        return None
    return "one conversation", (
        f"one conversation, {name}, as for supervised fine-tuning. That is not a preference, which has a chosen and a rejected "
        f"completion. {ANSWERS_OF[name]}"
    )


def with_columns_named(error: RowError, row: SourceRow) -> RowError:
    """Return an error that names data.train.columns too, if texts of the row are inside other objects."""
    if not any(isinstance(value, Mapping | list) for value in row.value.values()):
        return error
    paths = list(islice(_paths_of_texts(row.value, "", 0), len(PARTS)))
    example = ", ".join(f"{part}: {path}" for part, path in zip(PARTS, paths, strict=False))
    such_as = f", such as '{{{example}}}'" if len(paths) == len(PARTS) else ""
    message = f"{error.message} For texts inside other objects, set data.train.columns to their paths{such_as}."
    return RowError(error.place, error.reason, message)


def _paths_of_texts(value: Any, above: str, depth: int) -> Iterator[str]:
    """Yield the paths of texts: answers.good. Keys that a path would have to quote are left out."""
    if isinstance(value, str) and above:
        yield above
    elif depth < MAX_DEPTH and isinstance(value, Mapping):
        for key, inner in value.items():
            if key.isidentifier():
                yield from _paths_of_texts(inner, f"{above}.{key}" if above else key, depth + 1)
    elif depth < MAX_DEPTH and isinstance(value, list):
        for i, inner in enumerate(value[: len(PARTS)]):
            yield from _paths_of_texts(inner, f"{above}[{i}]", depth + 1)

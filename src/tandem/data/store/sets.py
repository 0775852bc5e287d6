"""A configuration in; its training and validation sets out, tokenised."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tandem.columns import COLUMNS
from tandem.config.losses import needs_scores, spelled, unsupported_column
from tandem.config.schema import Config
from tandem.config.sections.datasets import Data, DatasetFields
from tandem.config.sections.section import EMBEDDED
from tandem.data.formats.row_columns import unread_in
from tandem.data.store.duplicates import without_duplicates
from tandem.data.store.opening import TooFewUsableError, open_store
from tandem.data.store.processes import Processes
from tandem.data.store.selection import Preferences, Selection, hold_out
from tandem.data.store.token_store import TokenStore
from tandem.data.text.template import Template
from tandem.embedded.files import TRAIN, VALIDATION
from tandem.errors import ConfigError, DataError, TandemError
from tandem.storage.cache import replacing

# Where a format that is named after a published set is found, unless a path is given.
PUBLISHED = {
    "HelpSteer3": {"data_path": "nvidia/HelpSteer3", "subset": "preference"},
    "Tulu3Preference": {"data_path": "allenai/llama-3.1-tulu-3-8b-preference-mixture"},
}
PERCENT = 100
LARGEST_MARGIN = 1e9  # that a loss may be asked for: its square, summed over a batch, is far inside float32
IN_LIST = "In a list a set with settings is {data_path: FILE, KEY: VALUE}."

# Opens a bar for a piece of work of a number of steps, or percent; the function it yields takes how many were done.
ProgressBar = Callable[..., AbstractContextManager[Callable[..., None]]]


@dataclass(frozen=True, slots=True)
class Span:
    """Which of the training preferences belong to a training set, and how often an epoch passes over it."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True, slots=True)
class Sets:
    """Every set of a run."""

    read: dict[str, TokenStore]  # as they were read, by split; several training sets are train-0, train-1, ...
    train: Preferences
    spans: tuple[Span, ...]
    validation: dict[str, Preferences]

    def by_split(self) -> dict[str, Preferences]:
        return {"train": self.train, **{f"validation-{name}": store for name, store in self.validation.items()}}


def no_bar(what: str, total: int, unit: str = "") -> AbstractContextManager[Callable[..., None]]:
    return nullcontext(lambda advance=1, numbers=(): None)


def open_sets(config: Config, template: Template, bar: ProgressBar = no_bar) -> Sets:
    """Tokenise, or find tokenised, what the configuration names; hold out a share for validation if it asks for one.

    Errors of several sets are reported together.
    """

    def opened(split: str, given: DatasetFields, embedded: str, processes: Processes) -> TokenStore:
        given = _with_path(given, split)
        path = embedded if given.data_path == EMBEDDED else str(given.data_path)
        length = config.policy.max_total_sequence_length
        with bar(f"Tokenising {split}", PERCENT, unit="%") as advance:
            return open_store(path, given, template, config.data, length, _steps(advance), processes)

    given = config.data.training_sets
    if config.policy.packing.mode == "dataset" and any(one.weight != 1 for one in given):
        raise ConfigError(
            "data.train has weights, but policy.packing.mode=dataset packs every preference once. "
            "Use policy.packing.mode=batch, or leave out the weights."
        )
    names = ["train"] if len(given) == 1 else [f"train-{i}" for i in range(len(given))]
    asked = [(name, one, str(TRAIN)) for name, one in zip(names, given, strict=True)]
    asked += [(f"validation-{name}", one, str(VALIDATION)) for name, one in config.data.validation_sets.items()]
    read: dict[str, TokenStore] = {}
    problems: dict[str, TandemError] = {}
    shares: list[dict[str, float]] = []
    with Processes(template) as processes:
        for split, one, embedded in asked:
            try:
                read[split] = opened(split, one, embedded, processes)
            except (ConfigError, DataError) as error:
                # Messages about rows name the keys of data.train: those of this set take their place.
                message = of_set(str(error), split)
                problems[split] = type(error)(f"{message}\n{IN_LIST}" if "data.train[" in message else message)
                shares += [error.shares] if isinstance(error, TooFewUsableError) else []
    if problems:
        raise _together(problems, _hints(problems, shares, config))
    stores = without_duplicates({name: read[name] for name in names}, config.data)
    validation = {
        name: without_duplicates({name: read[f"validation-{name}"]}, config.data)[name]
        for name in config.data.validation_sets
    }
    read = stores | {f"validation-{name}": store for name, store in validation.items()}
    sets = _joined(stores, [one.weight for one in given], read, validation, config)
    for store in (sets.train, *sets.validation.values()):
        _check_scores(store, config)
    for split, store in sets.read.items():
        _check_columns(split, store, config)
    return sets


def _together(problems: dict[str, TandemError], hints: list[str]) -> TandemError:
    """What is wrong with the sets, as one error of the first one's kind."""
    (first, *others) = problems.values()
    messages = [f"{split}: {problem}" for split, problem in problems.items()] if others else [str(first)]
    return type(first)("\n".join(["\n\n".join(messages), *hints]))


def _hints(problems: dict[str, TandemError], shares: list[dict[str, float]], config: Config) -> list[str]:
    """What is to be known about several of the problems."""
    hints = []
    if any("over-long" in str(problem) for problem in problems.values()) and config.policy.tokenizer_name == EMBEDDED:
        hints.append("Lengths are counted in the embedded model's tokens: name your own by policy.model_name=MODEL.")
    if len(shares) == len(problems) and (least := _for_all(shares, config.data)):
        hints.append(f"To let all of these pass: {least}.")
    return hints


def _for_all(shares: list[dict[str, float]], data: Data) -> str:
    """Settings hold for every set: the value that lets each of several pass."""
    least = {
        key: max(values)
        for key, now in (
            ("data.max_bad_share", data.max_bad_share),
            ("data.max_filtered_share", data.max_filtered_share),
        )
        if len(values := [one[key] for one in shares if key in one]) > 1 and max(values) > now
    }
    skip = ["data.on_bad_row=skip"] if "data.max_bad_share" in least and data.on_bad_row == "error" else []
    return " ".join([*skip, *(f"{key}={value}" for key, value in least.items())])


def _joined(
    stores: dict[str, TokenStore],
    weights: list[float],
    read: dict[str, TokenStore],
    validation: dict[str, TokenStore],
    config: Config,
) -> Sets:
    share = config.data.validation_share
    starts = np.cumsum([0, *(len(store) for store in stores.values())])
    if len(stores) == 1 and not share:
        (only,) = stores.values()
        return Sets(read, only, (Span(0, len(only), weights[0]),), {**validation})
    held = hold_out(list(stores.values()), share, config.run.seed) if share else np.zeros(starts[-1], bool)
    # Where each set's kept preferences begin and end, once those held out are gone.
    kept = np.concatenate([[0], np.cumsum(~held)])[starts]
    spans = tuple(
        Span(int(start), int(end), weight) for (start, end), weight in zip(pairwise(kept), weights, strict=True)
    )
    held_out: dict[str, Preferences] = {"default": Selection(stores, np.flatnonzero(held))} if share else {}
    return Sets(read, Selection(stores, np.flatnonzero(~held)), spans, {**validation, **held_out})


def _check_scores(store: Preferences, config: Config) -> None:
    """Refuse a loss that reads scores where the data gives none; a default is taken only when asked for."""
    if not needs_scores(config.dpo.preference_loss):
        return
    lacking = np.flatnonzero(store.lacks_scores)
    if len(lacking):
        raise DataError(
            f"{store.place(int(lacking[0]))}: no score for every completion, as in {len(lacking)} of {len(store)} "
            f"preferences, but dpo.preference_loss {spelled(config.dpo.preference_loss)} reads scores. Give them "
            "(chosen_reward and rejected_reward, or score), or set data.default_chosen_reward and "
            "data.default_rejected_reward."
        )
    margins = store.score_spread * config.dpo.gt_reward_scale
    if (margins > LARGEST_MARGIN).any():
        first = int(np.argmax(margins > LARGEST_MARGIN))
        raise DataError(
            f"{store.place(first)}: scores {store.score_spread[first]:.3g} apart, times dpo.gt_reward_scale="
            f"{config.dpo.gt_reward_scale:g}, ask for a margin over {LARGEST_MARGIN:.0e}, whose loss and gradient float32 cannot "
            "hold. Rescale the scores, or lower dpo.gt_reward_scale."
        )


def _check_columns(split: str, store: TokenStore, config: Config) -> None:
    """Refuse a prepared set with a column that the loss does not support; for others the configuration is refused."""
    for column in store.columns:
        if why := unsupported_column(config.dpo.preference_loss, column):
            reason, others = why
            key = COLUMNS[column].key
            raise DataError(
                f"{split}: {store.folder} was prepared with a {column}, which {reason}. Prepare it again without {key}, or "
                f"choose {others}."
            )


def columns_in_words(sets: Sets) -> list[tuple[str, str]]:
    """Which columns of the data are used, and which fields would be used if their keys were set."""
    used = [f"{', '.join(store.columns)} of {split}" for split, store in sets.read.items() if store.columns]
    unread = [
        of_set(f"{column} of {split} (data.train.{COLUMNS[column].key}={column} uses it)", split)
        for split, store in sets.read.items()
        for column in unread_in(store.notes)
    ]
    rows = {"columns": "; ".join(used), "columns not used": "; ".join(unread)}
    return [(label, text) for label, text in rows.items() if text]


def of_set(message: str, split: str) -> str:
    """A message about data.train with the keys of the set that it is about."""
    kind, _, name = split.partition("-")
    if kind == "train":
        keys = f"data.train[{name}]" if name else "data.train"
    else:
        keys = "data.validation" if name == "default" else f"data.val_data_paths.{name}"
    return message.replace("data.train.", f"{keys}.")


def write_rejects(read: Mapping[str, TokenStore], path: Path) -> None:
    """Write every row that was left out of a set to one file, with its place and the reason."""
    with replacing(path) as out:
        for split, store in read.items():
            with (store.folder / "rejects.jsonl").open(encoding="utf-8") as rejects:
                for line in rejects:
                    reject = json.loads(line)
                    reject["message"] = of_set(reject["message"], split)
                    out.write(json.dumps({"split": split, **reject}) + "\n")


def _with_path(given: DatasetFields, split: str) -> DatasetFields:
    if given.data_path is not None:
        return given
    if given.dataset_name not in PUBLISHED:
        where = "data.train" if split.startswith("train") else f"validation set {split.removeprefix('validation-')}"
        raise ConfigError(f"{where} has no data_path. Give one, or set data.default.data_path.")
    published: dict[str, Any] = PUBLISHED[given.dataset_name]
    return given.model_copy(update={**published, **({"subset": given.subset} if given.subset else {})})


def _steps(advance: Callable[..., None]) -> Callable[[float], None]:
    """A share of the work, as steps of a bar."""
    done = 0

    def progress(share: float) -> None:
        nonlocal done
        steps = int(share * PERCENT)
        if steps > done:
            advance(steps - done)
            done = steps

    return progress

"""Opens the training and validation sets of a configuration as tokenised data."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tandem.columns import COLUMNS
from tandem.config.losses import ChosenLosses, needs_scores, spelled, unsupported_column
from tandem.config.schema import Config
from tandem.config.sections.datasets import Data, DatasetFields
from tandem.config.sections.section import EMBEDDED
from tandem.data.formats.row_columns import unread_in
from tandem.data.store.duplicates import without_duplicates
from tandem.data.store.machines import ALONE, Machines
from tandem.data.store.opening import TooFewUsableError, open_store
from tandem.data.store.processes import Processes
from tandem.data.store.selection import Preferences, Selection, hold_out
from tandem.data.store.token_store import TokenStore
from tandem.data.text.template import Template
from tandem.embedded.files import TRAIN, VALIDATION
from tandem.errors import ConfigError, DataError, TandemError
from tandem.storage.cache import replacing

# The default paths of formats that are named after a published dataset.
PUBLISHED_SETS = {
    "HelpSteer3": {"data_path": "nvidia/HelpSteer3", "subset": "preference"},
    "Tulu3Preference": {"data_path": "allenai/llama-3.1-tulu-3-8b-preference-mixture"},
}
PERCENT = 100
MAX_MARGIN = 1e9  # the square of this margin, summed over a batch, is still far below the maximum of float32
LIST_SYNTAX_HINT = "In a list, write a set with settings as {data_path: FILE, KEY: VALUE}."

# Opens a progress bar with a label, a total and a unit; yields a function that advances it by a number of steps.
ProgressBar = Callable[..., AbstractContextManager[Callable[..., None]]]


@dataclass(frozen=True, slots=True)
class Span:
    """The range of training preferences that come from one training set. `weight`: how often an epoch uses the set."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True, slots=True)
class Sets:
    """The training and validation sets of a run."""

    read: dict[str, TokenStore]  # each set as it was read, by split; several training sets are train-0, train-1, ...
    train: Preferences
    spans: tuple[Span, ...]
    validation: dict[str, Preferences]

    def by_split(self) -> dict[str, Preferences]:
        return {"train": self.train, **{f"validation-{name}": store for name, store in self.validation.items()}}


def no_bar(what: str, total: int, unit: str = "") -> AbstractContextManager[Callable[..., None]]:
    return nullcontext(lambda advance=1, numbers=(): None)


def open_sets(config: Config, template: Template, bar: ProgressBar = no_bar, machines: Machines = ALONE) -> Sets:
    """Open every set of the configuration, remove duplicates, and hold out training data for validation if configured.

    Errors in several sets are reported together. `machines`: as in `open_store`.
    """

    def opened(split: str, given: DatasetFields, embedded: str, processes: Processes) -> TokenStore:
        given = _with_path(given, split)
        path = embedded if given.data_path == EMBEDDED else str(given.data_path)
        length = config.policy.max_total_sequence_length
        with bar(f"Tokenising {split}", PERCENT, unit="%") as advance:
            return open_store(
                path,
                given,
                template,
                config.data,
                length,
                progress=percent_of(advance),
                processes=processes,
                machines=machines,
            )

    given = config.data.training_sets
    if config.policy.packing.mode == "dataset" and any(one.weight != 1 for one in given):
        raise ConfigError(
            "data.train has weights, but policy.packing.mode=dataset packs every preference exactly once. "
            "Set policy.packing.mode=batch, or leave out the weights."
        )
    names = ["train"] if len(given) == 1 else [f"train-{i}" for i in range(len(given))]
    splits = [(name, one, str(TRAIN)) for name, one in zip(names, given, strict=True)]
    splits += [(f"validation-{name}", one, str(VALIDATION)) for name, one in config.data.validation_sets.items()]
    read: dict[str, TokenStore] = {}
    problems: dict[str, TandemError] = {}
    shares: list[dict[str, float]] = []
    with Processes(template) as processes:
        for split, one, embedded in splits:
            try:
                read[split] = opened(split, one, embedded, processes)
            except (ConfigError, DataError) as error:
                # Messages about rows name keys of data.train; replace them by the keys of this set.
                message = with_set_keys(str(error), split)
                problems[split] = type(error)(f"{message}\n{LIST_SYNTAX_HINT}" if "data.train[" in message else message)
                shares += [error.shares] if isinstance(error, TooFewUsableError) else []
    if problems:
        raise _combined(problems, _hints(problems, shares, config))
    stores = without_duplicates({name: read[name] for name in names}, config.data)
    validation = {
        name: without_duplicates({name: read[f"validation-{name}"]}, config.data)[name]
        for name in config.data.validation_sets
    }
    read = stores | {f"validation-{name}": store for name, store in validation.items()}
    weights = [one.weight for one in given]
    sets = _join(stores=stores, weights=weights, read=read, validation=validation, config=config)
    for store in (sets.train, *sets.validation.values()):
        _check_scores(store, config)
    for split, store in sets.read.items():
        _check_columns(split, store, config)
    return sets


def _combined(problems: dict[str, TandemError], hints: list[str]) -> TandemError:
    """Return one error that lists the problems of all sets. The error has the class of the first problem."""
    (first, *others) = problems.values()
    messages = [f"{split}: {problem}" for split, problem in problems.items()] if others else [str(first)]
    return type(first)("\n".join(["\n\n".join(messages), *hints]))


def _hints(problems: dict[str, TandemError], shares: list[dict[str, float]], config: Config) -> list[str]:
    """Return hints that apply to all sets with problems."""
    hints = []
    if any("over-long" in str(problem) for problem in problems.values()) and config.policy.tokenizer_name == EMBEDDED:
        hints.append("Lengths are counted with the embedded model's tokenizer. Set yours with policy.model_name=MODEL.")
    if len(shares) == len(problems) and (settings := _settings_for_all(shares, config.data)):
        hints.append(f"To accept all of these sets, set {settings}.")
    return hints


def _settings_for_all(shares: list[dict[str, float]], data: Data) -> str:
    """Return settings that raise each limit exceeded by two or more sets, such as "data.max_bad_share=0.1".

    Return "" if no limit is exceeded by two or more sets.
    """
    least = {
        key: max(values)
        for key, current in (
            ("data.max_bad_share", data.max_bad_share),
            ("data.max_filtered_share", data.max_filtered_share),
        )
        if len(values := [one[key] for one in shares if key in one]) > 1 and max(values) > current
    }
    skip = ["data.on_bad_row=skip"] if "data.max_bad_share" in least and data.on_bad_row == "error" else []
    return " ".join([*skip, *(f"{key}={value}" for key, value in least.items())])


def _join(
    *,
    stores: dict[str, TokenStore],
    weights: list[float],
    read: dict[str, TokenStore],
    validation: dict[str, TokenStore],
    config: Config,
) -> Sets:
    """Join the training sets into one, without the preferences that are held out for validation."""
    share = config.data.validation_share
    starts = np.cumsum([0, *(len(store) for store in stores.values())])
    if len(stores) == 1 and not share:
        (only,) = stores.values()
        spans = (Span(start=0, end=len(only), weight=weights[0]),)
        return Sets(read=read, train=only, spans=spans, validation={**validation})
    held = hold_out(list(stores.values()), share, config.run.seed) if share else np.zeros(starts[-1], bool)
    # The start and end of each set among the preferences that are not held out.
    kept = np.concatenate([[0], np.cumsum(~held)])[starts]
    spans = tuple(
        Span(start=int(start), end=int(end), weight=weight)
        for (start, end), weight in zip(pairwise(kept), weights, strict=True)
    )
    held_out: dict[str, Preferences] = {"default": Selection(stores, np.flatnonzero(held))} if share else {}
    train = Selection(stores, np.flatnonzero(~held))
    return Sets(read=read, train=train, spans=spans, validation={**validation, **held_out})


def _check_scores(store: Preferences, config: Config) -> None:
    """Raise a DataError if the loss uses scores, and a preference has a missing score or scores that differ too much."""
    if not needs_scores(config.dpo.preference_loss):
        return
    missing = np.flatnonzero(store.has_missing_scores)
    if len(missing):
        raise DataError(
            f"{store.place(int(missing[0]))}: not every completion has a score ({len(missing)} of {len(store)} "
            f"preferences), but dpo.preference_loss {spelled(config.dpo.preference_loss)} uses scores. Add them "
            "(chosen_reward and rejected_reward, or score), or set data.default_chosen_reward and "
            "data.default_rejected_reward."
        )
    margins = store.score_spread * config.dpo.gt_reward_scale
    if (margins > MAX_MARGIN).any():
        first = int(np.argmax(margins > MAX_MARGIN))
        raise DataError(
            f"{store.place(first)}: scores differ by {store.score_spread[first]:.3g}. Multiplied by dpo.gt_reward_scale="
            f"{config.dpo.gt_reward_scale:g}, this margin is over {MAX_MARGIN:.0e}, and the loss could overflow float32. "
            "Rescale the scores, or lower dpo.gt_reward_scale."
        )


def _check_columns(split: str, store: TokenStore, config: Config) -> None:
    """Raise a DataError if a prepared set has a column that the loss does not support.

    For sets that are not prepared, this was checked when the configuration was loaded.
    """
    for column in store.columns:
        if why := unsupported_column(config.dpo.preference_loss, column):
            reason, others = why
            key = COLUMNS[column].key
            raise DataError(
                f"{split}: {store.folder} was prepared with a {column}, which {reason}. Prepare it again without {key}, or "
                f"choose {others}."
            )


def columns_in_words(sets: Sets, losses: ChosenLosses) -> list[tuple[str, str]]:
    """Return lines (label, text) for a report: which optional columns are used, and which are in the data but not used."""
    used = [f"{', '.join(store.columns)} of {split}" for split, store in sets.read.items() if store.columns]
    unread = [
        with_set_keys(f"{column} of {split} ({_how_to_use(column, losses)})", split)
        for split, store in sets.read.items()
        for column in unread_in(store.notes)
    ]
    rows = {"columns": "; ".join(used), "columns not used": "; ".join(unread)}
    return [(label, text) for label, text in rows.items() if text]


def _how_to_use(column: str, losses: ChosenLosses) -> str:
    """Return the setting that makes the losses use a column, or that they do not support it."""
    if unsupported_column(losses, column) is not None:
        return f"not supported by {spelled(losses)}"
    return f"data.train.{COLUMNS[column].key}={column} uses it"


def with_set_keys(message: str, split: str) -> str:
    """Replace `data.train.` in a message by the configuration key of the set `split`, such as `data.validation.`."""
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
                    reject["message"] = with_set_keys(reject["message"], split)
                    out.write(json.dumps({"split": split, **reject}) + "\n")


def _with_path(given: DatasetFields, split: str) -> DatasetFields:
    if given.data_path is not None:
        return given
    if given.dataset_name not in PUBLISHED_SETS:
        where = "data.train" if split.startswith("train") else f"validation set {split.removeprefix('validation-')}"
        raise ConfigError(
            f"{where} has no data_path. Set it (embedded: the bundled pairs), or set data.default.data_path."
        )
    published: dict[str, Any] = PUBLISHED_SETS[given.dataset_name]
    return given.model_copy(update={**published, **({"subset": given.subset} if given.subset else {})})


def percent_of(advance: Callable[..., None]) -> Callable[[float], None]:
    """Return a function that takes the fraction of the work that is done, and advances a progress bar accordingly."""
    done = 0

    def progress(share: float) -> None:
        nonlocal done
        steps = int(share * PERCENT)
        if steps > done:
            advance(steps - done)
            done = steps

    return progress

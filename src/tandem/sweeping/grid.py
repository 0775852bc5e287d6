"""Parses the arguments of a sweep: keys with several values form a grid, all others apply to every run."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType, RangeSweep
from hydra.errors import HydraException

from tandem.config.source.overrides import parse_override, plain_value
from tandem.errors import ConfigError, one_line
from tandem.terminal.commands import override

MAX_RUNS = 200  # the comparison page shows at most this many
# Keys that say where a run writes, or that the runs of a sweep share.
NOT_SWEPT = {
    "run.dir": "each run gets a directory in that of the sweep",
    "run.name": "a run is named after its values",
    "checkpointing.checkpoint_dir": "each run keeps its checkpoints in its own directory",
    "logger.log_dir": "each run writes to a subfolder with its name",
    "reference.cache_dir": "the runs share the reference",
    "config_version": "it describes the file",
}
MAX_VALUE_CHARACTERS = 40  # of a value in the name of a run
MAX_NAME_CHARACTERS = 150


@dataclass(frozen=True, slots=True)
class Combination:
    """One point of a grid."""

    values: tuple[str, ...]  # overrides of the swept keys: dpo.sft_loss_weight=0.1
    overrides: tuple[str, ...]  # all overrides, in the order of the arguments

    @property
    def described(self) -> str:
        """The values, for a message."""
        return " ".join(self.values)


@dataclass(frozen=True, slots=True)
class Grid:
    """The overrides of a sweep, in the order of the arguments. Each has its alternatives: a single one if it is not swept."""

    alternatives: tuple[tuple[str, ...], ...]
    keys: tuple[str | None, ...]  # for each override, its key if it is swept

    @property
    def swept(self) -> tuple[str, ...]:
        return tuple(key for key in self.keys if key is not None)

    @property
    def num_runs(self) -> int:
        return math.prod(len(one) for one in self.alternatives)

    def combinations(self) -> Iterator[Combination]:
        """Yield every combination. The values of the last key change first."""
        for chosen in product(*self.alternatives):
            values = tuple(one for one, key in zip(chosen, self.keys, strict=True) if key is not None)
            yield Combination(values, chosen)

    @property
    def shared(self) -> Combination:
        """What all runs have in common, without a value of any swept key."""
        given = zip(self.alternatives, self.keys, strict=True)
        return Combination((), tuple(texts[0] for texts, key in given if key is None))

    def names(self) -> list[str]:
        """Return a name for each combination, made of its keys and values: sft_loss_weight-0.1_seed-2."""
        short = _short_names(self.swept)
        names: list[str] = []
        taken: set[str] = set()
        for one in self.combinations():
            parts = [f"{short[key]}-{_end_of_value(value)}" for key, value in zip(self.swept, one.values, strict=True)]
            name = base = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(parts))[:MAX_NAME_CHARACTERS]
            number = 2
            while name.lower() in taken:  # some file systems ignore case
                name, number = f"{base}_{number}", number + 1
            taken.add(name.lower())
            names.append(name)
        return names


def parse_grid(overrides: Sequence[str]) -> Grid:
    """Parse the overrides of a sweep. Raise ConfigError if none has several values, or if the grid is too large."""
    parsed = [parse_override(text) for text in overrides]
    alternatives = [_alternatives(text, one) for text, one in zip(overrides, parsed, strict=True)]
    keys = [one.key_or_group if one.is_sweep_override() else None for one in parsed]
    if not any(keys):
        raise ConfigError(
            "nothing to sweep: no key has several values. Write key=a,b, such as "
            "dpo.reference_policy_kl_penalty=0.05,0.1. For a single run, use `tandem train`."
        )
    given = [one.key_or_group for one in parsed]
    if twice := next((key for key in keys if key is not None and given.count(key) > 1), None):
        raise ConfigError(f"{twice} is given twice, and one of them has several values. Leave out one of them.")
    grid = Grid(tuple(alternatives), tuple(keys))
    if grid.num_runs > MAX_RUNS:
        counts = " x ".join(str(len(one)) for one, key in zip(alternatives, keys, strict=True) if key is not None)
        raise ConfigError(
            f"{counts} values are {grid.num_runs:,} runs, and a sweep has at most {MAX_RUNS}. Give fewer values, or split "
            "the sweep."
        )
    return grid


def _alternatives(text: str, parsed: Override) -> tuple[str, ...]:
    """Return one override for each value of `text`, which is parsed as `parsed`."""
    if not parsed.is_sweep_override():
        return (text,)
    key, value = parsed.key_or_group, parsed.value()
    if reason := NOT_SWEPT.get(key):
        raise ConfigError(
            f"override {text!r}: {key} cannot be swept, because {reason}. Give other keys several values."
        )
    is_listed = isinstance(value, ChoiceSweep | RangeSweep) and not value.shuffle
    if not is_listed or parsed.type == OverrideType.DEL:
        raise ConfigError(
            f"override {text!r}: not a list of values that a sweep can try one by one. Write {key}=a,b or {key}=range(1,4)."
        )
    try:
        values = [plain_value(one) for one in islice(parsed.sweep_iterator(), MAX_RUNS + 1)]
    except (HydraException, ValueError, ArithmeticError) as error:
        raise ConfigError(f"override {text!r}: {one_line(error)}. Write {key}=a,b or {key}=range(1,4).") from None
    if not values:
        raise ConfigError(f"override {text!r}: the range has no values. Write {key}=a,b or {key}=range(1,4).")
    if len(values) > MAX_RUNS:
        raise ConfigError(
            f"override {text!r}: more than {MAX_RUNS} values, and a sweep has at most {MAX_RUNS} runs. Give fewer values."
        )
    return tuple(override(key, one) for one in values)


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest end of each key that no other key has: policy.optimizer.kwargs.lr -> lr."""
    ends = {key: [".".join(key.split(".")[start:]) for start in reversed(range(key.count(".") + 1))] for key in keys}
    return {
        key: next((end for end in ends[key] if sum(end in other for other in ends.values()) == 1), key) for key in keys
    }


def _end_of_value(text: str) -> str:
    """Return the value of an override without quotes and brackets. Of a long one, such as a path, only the end."""
    value = re.sub(r"(?<=\d)e\+(?=\d)", "e", text.partition("=")[2])  # 1e+30 is 1e30: a name keeps no +
    return value.strip("'\"[]{} /")[-MAX_VALUE_CHARACTERS:] or "empty"

"""Loads the functions of the user's that a configuration names, if they may be run, and checks that they have not changed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.losses import LOSS_ARGUMENTS
from tandem.config.validation import GIVEN_BY_USER
from tandem.errors import ConfigError
from tandem.loss.declare import declare_user_loss
from tandem.terminal.commands import advice_to_allow_code
from tandem.user_code import RefusedCodeError, is_user_function, load_function, was_given

LOSS_KEY = "dpo.preference_loss"


class ChangedCodeError(ConfigError):
    """The user's own code has changed since the run that names it began."""


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A function that a configuration names: its key, its name, and whether it affects the trained weights."""

    key: str
    name: str
    trains: bool


@dataclass(frozen=True, slots=True)
class NamedCode:
    """The functions that a configuration names."""

    digests: dict[str, str]  # the SHA-256 of those that affect the trained weights, by name
    refused_formats: dict[str, str]  # why a format was not loaded, by name


def load_named_functions(
    tree: dict[str, Any],
    origins: dict[str, str],
    interpolated: Mapping[str, str],
    *,
    allow_code: bool,
    needs_formats: bool,
) -> NamedCode:
    """Load every function that a configuration names.

    `tree`: the values that the user set. `interpolated`: keys whose values contain interpolations, which may refer to values of
    a file, and this file. Raise RefusedCodeError if a file names a function, unless `allow_code`,
    or this process passed that function itself. Without `needs_formats`, such a format is not loaded.
    """
    named = [one for one in _named_functions(tree) if is_user_function(one.name)]
    refused: dict[NamedFunction, str] = {}
    for one in named:
        file = None if allow_code or was_given(one.name) else _file_that_names(one.key, origins, interpolated)
        if file is not None:
            advice = advice_to_allow_code()
            refused[one] = f"{file}: {one.key} = {one.name} names Python code, which would be run. {advice}"
            if needs_formats or one.key == LOSS_KEY:
                raise RefusedCodeError(refused[one])
    named = [one for one in named if one not in refused]
    loaded, digests = {one.name for one in named}, {}
    pinned = _mapping(_mapping(tree.get("run")).get("code"))
    for one in named:
        function = load_function(one.key, one.name)
        if one.key == LOSS_KEY:
            declare_user_loss(function, ("beta", *LOSS_ARGUMENTS))
        if not one.trains:
            continue
        if pinned.get(one.name, function.digest) != function.digest:
            raise ChangedCodeError(
                f"{one.key} = {one.name}: the code has changed since the run started (SHA-256 {function.digest[:12]}..., then "
                f"{str(pinned[one.name])[:12]}..., without comments and blank lines), so the run would not be the same. Undo the "
                "change, or start a new run."
            )
        digests[one.name] = function.digest
    return NamedCode(digests, {one.name: why for one, why in refused.items() if one.name not in loaded})


def _named_functions(tree: dict[str, Any]) -> Iterator[NamedFunction]:
    chosen = _mapping(tree.get("dpo")).get("preference_loss")
    for name in chosen if isinstance(chosen, dict) else [chosen]:
        yield NamedFunction(LOSS_KEY, str(name), True)
    data = _mapping(tree.get("data"))
    train = data.get("train")
    sets = {"data.default": data.get("default"), "data.train": train, "data.validation": data.get("validation")}
    sets |= {f"data.train[{i}]": one for i, one in enumerate(train if isinstance(train, list) else [])}
    sets |= {f"data.val_data_paths.{name}": one for name, one in _mapping(data.get("val_data_paths")).items()}
    for key, one in sets.items():
        yield NamedFunction(
            f"{key}.dataset_name", str(_mapping(one).get("dataset_name")), "train" in key or "default" in key
        )


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _file_that_names(key: str, origins: Mapping[str, str], interpolated: Mapping[str, str]) -> str | None:
    """Return a file that sets a key, or a part of its value; None if the command line, or Python, set all of it."""
    key = key.partition("[")[0]
    own = [known for known in origins if known == key or known.startswith(f"{key}.")]
    above = [known for known in origins if key.startswith(f"{known}.")]
    files = [origins[known] for known in own or above if origins[known] not in GIVEN_BY_USER]
    files += [file for known, file in interpolated.items() if known == key or known.startswith(f"{key}.")]
    return next(iter(files), None)

"""The settings of `tandem.sweep` as texts, as the command takes them: each run is trained by a command of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.config.load import in_order
from tandem.config.source.overrides import changes_in
from tandem.errors import ConfigError
from tandem.terminal.commands import override
from tandem.user_code import FUNCTION_NAME

SCALARS = (str, bool, int, float, type(None))


def texts_of(overrides: Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> list[str]:
    """Return the overrides of a sweep as texts. In a dict, a list holds the values to try.

    {"run.seed": [1, 2], "dpo.max_num_steps": 50}       run.seed=1,2   dpo.max_num_steps=50
    {"policy.lora.target_modules": [["q"], ["q", "v"]]} policy.lora.target_modules=[q],[q,v]
    """
    return [text for one in in_order(overrides) for text in ([one] if isinstance(one, str) else _texts_of_dict(one))]


def _texts_of_dict(settings: Mapping[str, Any]) -> list[str]:
    texts = []
    for change in changes_in(settings):
        value = _plain(change.key, change.value)
        texts.append(_swept(change.key, value) if isinstance(value, list) else override(change.key, value))
    return texts


def _swept(key: str, values: list[Any]) -> str:
    if not values:
        raise ConfigError(f"{key} = []: no values to try. Give one or more; an empty list as a value is [[]].")
    listed = ",".join(override(key, one).removeprefix(f"{key}=") for one in values)
    return f"{key}={listed}" if len(values) > 1 else f"{key}=choice({listed})"


def _plain(key: str, value: Any) -> Any:
    """Return a value with lists instead of tuples, ranges, and the arrays and numbers of numpy."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple | range):
        return [_plain(key, one) for one in value]
    if isinstance(value, Mapping):
        return {name: _plain(key, one) for name, one in value.items()}
    if not isinstance(value, SCALARS):
        raise ConfigError(
            f"{key}: a value of type {type(value).__name__}. Give a number, a text, true or false, or a list of them."
        )
    if isinstance(value, str) and (found := FUNCTION_NAME.fullmatch(value)) and found["given"]:
        raise ConfigError(
            f"{key} = {found['given']}: this function has no file, and the runs of a sweep are trained by other processes. Put "
            f"it into a file, and give FILE.py:{found['given']}."
        )
    return value

"""Checks the types of the arguments of calls from Python, so that a wrong one is reported before any work and by its name."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

from tandem.api.result import TrainResult
from tandem.config.losses import join_names
from tandem.errors import ConfigError
from tandem.exporting.request import Form
from tandem.report.reporter import Verbosity
from tandem.terminal.arguments import option
from tandem.training.run.callbacks import METHODS

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kind:
    """What an argument may be, and the same in words."""

    fits: Callable[[Any], bool]
    words: str


def _one_of(names: tuple[str, ...]) -> Kind:
    return Kind(lambda value: isinstance(value, str) and value in names, join_names(names, "or"))


def _are(value: Any, types: Any) -> bool:
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Path | Mapping)
    return is_list and all(isinstance(one, types) for one in value)


TEXT = Kind(lambda value: isinstance(value, str), "a text")
TEXTS = Kind(lambda value: not hasattr(value, "__next__") and _are(value, str), "a list of texts")
PATH = Kind(lambda value: isinstance(value, str | Path), "a path")
NUMBER = Kind(lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number")
INTEGER = Kind(lambda value: isinstance(value, Integral) and not isinstance(value, bool), "an integer")
FLAG = Kind(lambda value: isinstance(value, bool), "True or False")
MODEL = Kind(lambda value: isinstance(value, str | Path | TrainResult), "a path, a name, or what train returned")
RUN = Kind(lambda value: isinstance(value, str | Path | TrainResult), "the directory of a run, or what train returned")
RUNS = Kind(
    lambda value: RUN.fits(value) or _are(value, str | Path | TrainResult),
    "directories of runs, or what train returned",
)
CHECKPOINT = Kind(TEXT.fits, "best, latest or step_N")
OBJECTS = Kind(
    lambda value: isinstance(value, Sequence) and not isinstance(value, str | bytes),
    f"a list of objects with one of {', '.join(METHODS)}",
)
# Arguments by their names, which mean the same in every function. Those that take rows, settings, functions or engines are
# checked where they are read.
KINDS = {
    **dict.fromkeys(("model", "reference", "against", "compare"), MODEL),
    **dict.fromkeys(("by", "dtype", "max_shard_size", "push_to_hub", "from_format"), TEXT),
    **dict.fromkeys(("base_url", "api_key_env"), TEXT),
    **dict.fromkeys(("lm_eval", "allow_env"), TEXTS),
    **dict.fromkeys(("per_pair", "include_path", "out", "llama_cpp", "folder", "chat_template", "vllm_python"), PATH),
    **dict.fromkeys(("beta", "temperature", "top_p", "timeout_seconds"), NUMBER),
    **dict.fromkeys(
        ("limit", "num_samples", "max_new_tokens", "seed", "parallel", "batch_size", "concurrency"), INTEGER
    ),
    **dict.fromkeys(("allow_code", "fresh", "measured", "gguf", "dry_run", "token_ids"), FLAG),
    "run": RUN,
    "runs": RUNS,
    "callbacks": OBJECTS,
    "checkpoint": CHECKPOINT,
    "form": _one_of(get_args(Form)),
    "verbosity": _one_of(get_args(Verbosity)),
}


def with_checked_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function: before a call, raise ConfigError for an argument of a type that it does not take."""
    own = signature(function)

    @wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> T:
        try:
            arguments = own.bind(*given, **named).arguments
        except TypeError:
            return function(*given, **named)  # raises Python's own error, which names the function
        for name, value in arguments.items():
            check_argument(name, value, own.parameters[name])
        return function(*given, **named)

    return call


def check_argument(name: str, value: Any, parameter: Parameter | None = None) -> None:
    """Raise ConfigError for a value that the argument does not take. Its default is always right."""
    kind = KINDS.get(name)
    is_default = parameter is not None and value is parameter.default
    if kind is None or is_default or kind.fits(value):
        return
    if isinstance(value, str | int | float):
        raise ConfigError(f"{option(name, value)}: give {kind.words}.")
    raise ConfigError(f"{name} is of type {type(value).__name__}. Give {kind.words}.")

"""The records of generation: prompts, sampling settings, requests to an engine and its answers. Does not import torch."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tandem.data.formats.preference import Message, TextOrMessages
from tandem.errors import ConfigError
from tandem.terminal.arguments import option

DEFAULT_MAX_NEW_TOKENS = 256
MAX_SAMPLES = 4096
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. A temperature of 0 is greedy: always the most probable token."""

    num_samples: int = 1  # completions per prompt
    temperature: float = 0.0
    top_p: float = 1.0  # sample only from the most probable tokens that together have this probability
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS  # of one completion
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def as_dict(self) -> dict[str, Any]:
        """The settings that have an effect, for the output file."""
        limits = {
            "num_samples": self.num_samples,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
        }
        return limits if self.is_greedy else {**limits, "top_p": self.top_p, "seed": self.seed}


def make_sampling(
    *,
    num_samples: int = 1,
    temperature: float | None = None,
    top_p: float | None = None,
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    seed: int | None = None,
) -> Sampling:
    """Check the options; None means that an option was not given. An option that would have no effect is refused."""
    if not 1 <= num_samples <= MAX_SAMPLES:
        raise ConfigError(
            f"{option('num_samples', num_samples)}: give a number of completions from 1 to {MAX_SAMPLES:,}."
        )
    if max_new_tokens < 1:
        raise ConfigError(f"{option('max_new_tokens', max_new_tokens)}: give a number of tokens from 1.")
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"{option('temperature', temperature)}: give 0 (greedy) or a positive number, such as 0.8.")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"{option('top_p', top_p)}: give a probability above 0 and up to 1, such as 0.95.")
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"{option('seed', seed)}: give an integer from 0 to {MAX_SEED}.")
    if not temperature:
        for name, value in (("top_p", top_p), ("seed", seed)):
            if value is not None:
                raise ConfigError(
                    f"{option(name, value)}: has no effect without sampling. Add {option('temperature', 0.8)}, or leave it out."
                )
        if num_samples > 1:
            raise ConfigError(
                f"{option('num_samples', num_samples)}: without sampling, every completion of a prompt would be the same. "
                f"Add {option('temperature', 0.8)}."
            )
    return Sampling(
        num_samples=num_samples,
        temperature=temperature or 0.0,
        top_p=1.0 if top_p is None else top_p,
        max_new_tokens=max_new_tokens,
        seed=seed or 0,
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: its number in the input, its place (file:line), text or messages, tools, and the row's other columns."""

    index: int
    place: str
    prompt: TextOrMessages
    tools: tuple[Any, ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to generate: which sample of which prompt, and the prompt as ids and as messages.

    `repeat` counts earlier prompts with the same ids, so that their samples differ.
    """

    prompt: Prompt
    sample: int
    ids: tuple[int, ...]  # empty if the engine renders the prompt
    repeat: int = 0

    def random_key(self, seed: int) -> bytes:
        """16 bytes that decide this request's random numbers. The number of the prompt and its batch have no influence."""
        content = repr((seed, self.sample, self.repeat, self.ids or as_json_prompt(self.prompt.prompt)))
        return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def seed(self, seed: int) -> int:
        """The seed of this request for another engine, from 0 to 2**31 - 1."""
        return int.from_bytes(self.random_key(seed)[:4], "big") >> 1


@dataclass(frozen=True, slots=True)
class Answer:
    """A generated completion. `ids` include the token that ended it; None if the engine does not report them."""

    request: Request
    text: str
    ids: tuple[int, ...] | None
    finish: str  # stop: ended by the model; length: reached the limit; or another reason given by a server


class Engine(Protocol):
    """Generates the answers to requests."""

    name: str
    version: str

    def answers(self, requests: list[Request]) -> Iterator[Answer]:
        """Yield every answer once, in any order."""
        ...

    def stream(self, request: Request, write: Callable[[str], None]) -> Answer:
        """Generate one answer and pass its text to `write` in pieces."""
        ...

    def close(self) -> None: ...


EngineName = Literal["transformers", "vllm", "http"]
Batching = Literal["auto", "padded", "continuous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Which engine generates, and its settings."""

    name: EngineName = "transformers"
    batch_size: int | None = None  # sequences at a time; None: chosen by the memory of the device
    batching: Batching = "auto"
    chat_template: str | None = None  # FILE.jinja, or none; None: the template of the model or of the run
    vllm_python: str | None = None
    base_url: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    api_key_env: str | None = None
    timeout_seconds: float = 300.0
    concurrency: int = 8
    token_ids: bool = False  # ask the server for token ids (vLLM)


def as_json_prompt(prompt: TextOrMessages) -> str | list[dict[str, Any]]:
    return prompt if isinstance(prompt, str) else as_dicts(prompt)


def as_dicts(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content, **message.more} for message in messages]

"""Generates the answers of the policy and the reference to a few validation prompts, so that a person can compare them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.data.store.selection import Preferences
from tandem.model.policy import Policy
from tandem.storage.cache import replacing

# Enough to judge an answer, few enough not to slow down a validation.
MAX_ANSWER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a validation set, and the token that ends an answer to the prompt."""

    place: str
    text: str
    ids: tuple[int, ...]
    end: int  # the last token of the completions in the data


@dataclass(frozen=True, slots=True)
class Sample:
    """The answers of the policy and the reference to one prompt."""

    place: str
    prompt: str
    policy: str
    reference: str | None  # None if the loss has no reference


@dataclass(frozen=True, slots=True)
class Samples:
    """Prompts, and the reference's answers to them. The answers are generated only once, because the reference never changes."""

    tokenizer: Any
    prompts: tuple[Prompt, ...]
    reference: tuple[str, ...] | None

    def take(self, policy: Policy, device: torch.device) -> list[Sample]:
        """Generate the policy's current answers, and return them with the reference's answers."""
        answers = answers_of(policy, self.tokenizer, self.prompts, device)
        references = self.reference or [None] * len(self.prompts)
        return [
            Sample(place=prompt.place, prompt=prompt.text, policy=answer, reference=reference)
            for prompt, answer, reference in zip(self.prompts, answers, references, strict=True)
        ]


def prompts_of(store: Preferences, tokenizer: Any, count: int) -> tuple[Prompt, ...]:
    """Return the first `count` prompts of a set."""
    prompts = []
    for index in range(min(count, len(store))):
        preference = store[index]
        ids = tuple(preference.prompt.tolist())
        end = int(preference.completions[0][-1])
        prompts.append(Prompt(place=store.place(index), text=tokenizer.decode(list(ids)), ids=ids, end=end))
    return tuple(prompts)


def answers_of(policy: Policy, tokenizer: Any, prompts: Sequence[Prompt], device: torch.device) -> tuple[str, ...]:
    """Return the greedy answer to each prompt. Every rank must call this, because each rank holds only a shard of the weights."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor(prompt.ids, device=device)
        found = policy.generate(ids, max_new_tokens=MAX_ANSWER_TOKENS, end=prompt.end).tolist()
        answers.append(tokenizer.decode(found[:-1] if found and found[-1] == prompt.end else found))
    return tuple(answers)


def write_samples(folder: Path, step: int, samples: Sequence[Sample]) -> None:
    """Write the file `step_N.jsonl`, with one line per prompt. If a validation is repeated, the file is replaced."""
    folder.mkdir(exist_ok=True)
    lines = (json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
    with replacing(folder / f"step_{step}.jsonl") as file:
        file.writelines(lines)

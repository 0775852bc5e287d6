"""A few validation prompts in; what the policy and the reference answer to them, side by side, for a person to read."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.data.store.selection import Preferences
from tandem.model.policy import Policy
from tandem.storage.cache import replacing

# Of an answer: enough to judge it by, few enough not to hold up a validation.
ANSWER_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a validation set, and what ends an answer to it."""

    place: str
    text: str
    ids: tuple[int, ...]
    end: int  # the token its own completions end with


@dataclass(frozen=True, slots=True)
class Sample:
    """Answers to one prompt."""

    place: str
    prompt: str
    policy: str
    reference: str | None  # none where the loss has no reference


@dataclass(frozen=True, slots=True)
class Samples:
    """Prompts, and what the reference answers to them: it is asked once, since it never changes."""

    tokenizer: Any
    prompts: tuple[Prompt, ...]
    reference: tuple[str, ...] | None

    def take(self, policy: Policy, device: torch.device) -> list[Sample]:
        """What the policy answers now."""
        answers = answers_of(policy, self.tokenizer, self.prompts, device)
        references = self.reference or [None] * len(self.prompts)
        return [
            Sample(prompt.place, prompt.text, own, other)
            for prompt, own, other in zip(self.prompts, answers, references, strict=True)
        ]


def prompts_of(store: Preferences, tokenizer: Any, count: int) -> tuple[Prompt, ...]:
    """The first prompts of a set."""
    prompts = []
    for index in range(min(count, len(store))):
        preference = store[index]
        ids = tuple(preference.prompt.tolist())
        end = int(preference.completions[0][-1])
        prompts.append(Prompt(store.place(index), tokenizer.decode(list(ids)), ids, end))
    return tuple(prompts)


def answers_of(policy: Policy, tokenizer: Any, prompts: Sequence[Prompt], device: torch.device) -> tuple[str, ...]:
    """The likeliest answer to each. All workers ask together, since each holds a part of the weights."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor(prompt.ids, device=device)
        found = policy.generate(ids, max_new_tokens=ANSWER_TOKENS, end=prompt.end).tolist()
        answers.append(tokenizer.decode(found[:-1] if found and found[-1] == prompt.end else found))
    return tuple(answers)


def write_samples(folder: Path, step: int, samples: Sequence[Sample]) -> None:
    """`step_N.jsonl`, a line a prompt: a validation done anew writes the same file anew."""
    folder.mkdir(exist_ok=True)
    lines = (json.dumps(asdict(sample), ensure_ascii=False) + "\n" for sample in samples)
    with replacing(folder / f"step_{step}.jsonl") as file:
        file.writelines(lines)

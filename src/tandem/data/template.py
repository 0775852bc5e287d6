"""A Preference in; its prompt and completions as the texts that will be tokenised out."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.config.schema import Tokenizer as TokenizerConfig
from tandem.data.preference import Message, Preference
from tandem.data.sources import RowError
from tandem.errors import ConfigError

PROBE = (Message("user", "How far is the moon?"),)
# Stands around a special token that is only spelled. No text has it: it is one of Unicode's noncharacters.
SHIELD = "\ufdd0"


@dataclass(frozen=True, slots=True)
class Rendered:
    """Texts of one preference; a completion ends with the template's end of turn, or with EOS, once."""

    prompt: str
    completions: tuple[str, ...]
    adds_bos: bool


@dataclass(frozen=True, slots=True)
class Template:
    """The tokenizer's chat template, one from a file, or none (raw text)."""

    tokenizer: Any
    source: str | None
    kwargs: dict[str, Any]
    _special: re.Pattern[str] = field(init=False, repr=False)  # any special token
    _ends: re.Pattern[str] = field(init=False, repr=False)  # one that may end a turn

    def __post_init__(self) -> None:
        t = self.tokenizer
        added = {str(token) for token in t.added_tokens_decoder.values() if token.special}
        special = added | set(t.all_special_tokens)
        object.__setattr__(self, "_special", _any_of(special))
        object.__setattr__(self, "_ends", _any_of(special - {t.bos_token, t.unk_token, t.pad_token} | {t.eos_token}))

    def render(self, preference: Preference) -> Rendered:
        if self.source is None:
            return self._raw(preference)
        messages = tuple(Message(m.role, self._shielded(m.content)) for m in _as_messages(preference.prompt))
        prompt = self._apply(messages, preference.place, add_generation_prompt=True)
        completions = tuple(
            self._completion(messages, prompt, self._shielded(completion.text), preference.place)
            for completion in preference.completions
        )
        return Rendered(prompt, completions, adds_bos=False)

    def _shielded(self, content: str) -> str:
        """Hide special tokens that a message merely spells, so that they are encoded as plain text (see `pieces`)."""
        return self._special.sub(lambda found: f"{SHIELD}{found[0]}{SHIELD}", content)

    def probe(self) -> str:
        """A fixed conversation, rendered: part of the fingerprint, since templates may read the date."""
        return self._apply(PROBE, "the chat template", add_generation_prompt=True) if self.source else ""

    def _raw(self, preference: Preference) -> Rendered:
        if not isinstance(preference.prompt, str):
            raise RowError(
                preference.place,
                "messages without a template",
                "the prompt is a list of messages, but there is no chat template to write it with. "
                "Give policy.tokenizer.chat_template=FILE.jinja, or prompts as plain text.",
            )
        # Raw text is already rendered: special tokens in it are meant, and one at its end ends it.
        completions = tuple(self._ended(completion.text, 0) for completion in preference.completions)
        return Rendered(preference.prompt, completions, adds_bos=True)

    def _completion(self, messages: tuple[Message, ...], prompt: str, text: str, place: str) -> str:
        whole = self._apply((*messages, Message("assistant", text)), place, add_generation_prompt=False)
        if not whole.startswith(prompt):
            at = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
            raise RowError(
                place,
                "prompt is no prefix",
                "the chat template writes the prompt differently once the answer follows: "
                f"...{prompt[max(0, at - 20) : at + 20]!r} becomes ...{whole[max(0, at - 20) : at + 20]!r}. "
                "Give a template that keeps it, by policy.tokenizer.chat_template=FILE.jinja.",
            )
        rest = whole[len(prompt) :]
        # Some templates open the next turn behind the answer: what counts is the first end of turn after it.
        answer = rest.rfind(text.strip())
        return self._ended(rest, answer + len(text.strip()) if answer >= 0 else 0)

    def _ended(self, text: str, after: int) -> str:
        """End with one end-of-turn token. "Yes<|im_end|>\\n" -> "Yes<|im_end|>"; "Yes" -> "Yes</s>"."""
        if after:
            end = self._ends.search(text, after)
        else:
            end = next((found for found in self._ends.finditer(text) if not text[found.end() :].strip()), None)
        return text[: end.end()] if end else text + self.tokenizer.eos_token

    def _apply(self, messages: tuple[Message, ...], place: str, *, add_generation_prompt: bool) -> str:
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self.tokenizer.apply_chat_template(
                conversation,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.kwargs,
            )
        except Exception as error:
            reason = " ".join(str(error).split())
            raise RowError(place, "template fails", f"the chat template fails: {reason}") from None


def make_template(tokenizer: Any, config: TokenizerConfig) -> Template:
    """The template the configuration asks for."""
    given = config.chat_template
    if given is None:
        source = None
    elif given == "default":
        source = tokenizer.chat_template
        if isinstance(source, dict):  # several by name (default, tool_use, rag)
            source = source.get("default")
    elif given.endswith(".jinja"):
        try:
            source = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"policy.tokenizer.chat_template = {given}: not readable: {error}") from None
    else:
        raise ConfigError(
            f"policy.tokenizer.chat_template = {given!r}: give default, null (raw text), or a file ending in .jinja."
        )
    return Template(tokenizer, source, config.chat_template_kwargs)


def _as_messages(prompt: str | tuple[Message, ...]) -> tuple[Message, ...]:
    return (Message("user", prompt),) if isinstance(prompt, str) else prompt


def pieces(rendered: str) -> list[tuple[str, bool]]:
    """A rendered text in pieces, and whether special tokens in each are meant: "a\ufdd0</s>\ufdd0b" -> a, </s> (no), b."""
    return [(part, i % 2 == 0) for i, part in enumerate(rendered.split(SHIELD)) if part]


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token))

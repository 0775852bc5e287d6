"""A Preference in; its prompt and completions as the texts that will be tokenised out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta

from tandem.config.sections.policy import Tokenizer as TokenizerConfig
from tandem.data.formats.preference import Message, Preference
from tandem.data.formats.prompt_files import text_of
from tandem.data.read.sources import RowError
from tandem.data.text.chat import MARK, SHIELD, ChatTemplate, Conversation, as_wanted, renamed, special_tokens
from tandem.data.text.tokenizer import fast_backend, without_dummy_prefix
from tandem.data.text.word_cache import IntArray, WordEncoder
from tandem.errors import ConfigError
from tandem.terminal.printable import listed

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = "How far is the moon?"
PROBE = [{"role": "user", "content": QUESTION}]
MALFORMED = "template malformed"
ANOTHER_TEMPLATE = "Give another by policy.tokenizer.chat_template=FILE.jinja"
# Characters; no line of a data file is longer, so a longer text is the template's doing.
MAX_RENDERED = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a completion's text: what the assistant says is scored; tool turns and headers between are not."""

    text: str
    scored: bool = True


@dataclass(frozen=True, slots=True)
class Rendered:
    """Texts of one preference; a completion ends with the template's end of turn, or with EOS, once."""

    prompt: str
    completions: tuple[tuple[Part, ...], ...]
    adds_bos: bool

    @property
    def num_characters(self) -> int:
        return len(self.prompt) + sum(len(part.text) for parts in self.completions for part in parts)


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The tokenizer's chat template, one from a file, or none (raw text)."""

    tokenizer: Any
    source: str | None
    kwargs: dict[str, Any]
    _special: re.Pattern[str] = field(init=False, repr=False)  # any special token
    _ends: re.Pattern[str] = field(init=False, repr=False)  # one that may end a text
    _turn_ends: re.Pattern[str] = field(init=False, repr=False)  # one that a template may end a turn with
    _chat: ChatTemplate = field(init=False, repr=False)
    _begins: WordEncoder | None = field(init=False, repr=False)  # None if the tokenizer has no fast backend
    _goes_on: WordEncoder | None = field(init=False, repr=False)  # the same for texts that go on from others

    def __post_init__(self) -> None:
        t = self.tokenizer
        special = special_tokens(t)
        object.__setattr__(self, "_special", _any_of(special))
        object.__setattr__(self, "_ends", _any_of(special - {t.bos_token, t.unk_token, t.pad_token} | {t.eos_token}))
        # Some tokenizers pad with the end of turn, which is not their EOS.
        object.__setattr__(self, "_turn_ends", _any_of(special - {t.bos_token, t.unk_token} | {t.eos_token}))
        object.__setattr__(self, "_chat", ChatTemplate(t, self.source or "", self.kwargs))
        backend = fast_backend(t)
        begins = backend and WordEncoder(backend)
        other = backend and without_dummy_prefix(backend)
        object.__setattr__(self, "_begins", begins)
        object.__setattr__(self, "_goes_on", begins if other is backend else WordEncoder(other))

    def encode(self, texts: list[str], *, begins: bool, parse_special: bool = True) -> list[IntArray]:
        """Token ids of each text, nothing added. Some tokenizers put a space before a text: not before one that goes on."""
        encoder = self._begins if begins else self._goes_on
        if encoder is None:
            encoded = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=not parse_special)
            return [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]
        return encoder.encode(texts, parse_special=parse_special)

    @property
    def turn_tokens(self) -> re.Pattern[str]:
        """Finds what marks the turns of a conversation: no prompt that this template writes should hold it already."""
        return self._chat.turn_tokens

    @property
    def pads_with_end(self) -> bool:
        """Whether the template may end turns with the padding token, which is not EOS."""
        pad = self.tokenizer.pad_token
        return bool(pad) and pad != self.tokenizer.eos_token and pad in (self.source or "")

    def render(self, preference: Preference) -> Rendered:
        if self.source is None:
            return self._raw(preference)
        messages, tools = self._shielded_turns(_as_messages(preference.prompt)), self._shielded_in(preference.tools)
        before = _Said(messages, list(tools), preference.place)
        answers = [self._shielded_turns(_as_answer(completion.answer)) for completion in preference.completions]
        [prompt] = self._apply(before, [[]], add_generation_prompt=True)
        # The first turns of all answers by one call: most of its time does not depend on how many it is given.
        firsts = self._apply(before, [answer[:1] for answer in answers], add_generation_prompt=False)
        completions = tuple(
            self._completion(before, prompt, answer, first) for answer, first in zip(answers, firsts, strict=True)
        )
        for answer in answers:
            self._check_calls(before, answer)
        return Rendered(prompt, completions, adds_bos=False)

    def _shielded_turns(self, messages: tuple[Message, ...]) -> Conversation:
        return [
            self._with_more(m) if m.more else {"role": m.role, "content": self._shielded(m.content)} for m in messages
        ]

    def _with_more(self, message: Message) -> dict[str, Any]:
        turn = {"role": message.role, "content": message.content, **message.more}
        if "tool_calls" in turn:
            turn = as_wanted(turn, self._chat.calling)
        return self._shielded_in(turn)

    def _shielded_in(self, value: Any) -> Any:
        """The same for every text inside a value."""
        if isinstance(value, str):
            return self._shielded(value)
        if isinstance(value, Mapping):
            return {self._shielded_in(key): self._shielded_in(inner) for key, inner in value.items()}
        return [self._shielded_in(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _shielded(self, content: str) -> str:
        """Hide special tokens that a message merely spells, so that they are encoded as plain text (see data/text/chat.py)."""
        return self._special.sub(lambda found: f"{SHIELD}{found[0]}{SHIELD}", content)

    def probe(self) -> str:
        """A fixed conversation, rendered: part of the fingerprint, since templates may read the date."""
        return self._probed()[1]

    def example(self) -> Conversation | None:
        """A short conversation that the template takes; None without a template."""
        return self._probed()[0]

    def _probed(self) -> tuple[Conversation | None, str]:
        """Some take no conversation without a system turn, or none of ours at all: then the rows say what it can do."""
        for messages in (PROBE, [SYSTEM, *PROBE]) if self.source else ():
            try:
                [text] = self._apply(_Said(messages, [], "the chat template"), [[]], add_generation_prompt=True)
                return messages, text
            except RowError as error:
                if error.reason == MALFORMED:
                    raise
        return None, ""

    def _raw(self, preference: Preference) -> Rendered:
        if not isinstance(preference.prompt, str):
            raise RowError(
                preference.place,
                "messages without a template",
                "the prompt is a list of messages, but there is no chat template to write it with. "
                "Give policy.tokenizer.chat_template=FILE.jinja, or prompts as plain text.",
            )
        answers = [completion.answer for completion in preference.completions]
        if preference.tools or not all(isinstance(answer, str) for answer in answers):
            raise RowError(
                preference.place,
                "messages without a template",
                "tools, tool calls and completions of several messages need a chat template to write them with. "
                "Give policy.tokenizer.chat_template=FILE.jinja.",
            )
        # Raw text is already rendered: special tokens in it are meant, and one at its end ends it.
        completions = tuple((Part(self._ended(str(answer), 0, self._ends)),) for answer in answers)
        return Rendered(preference.prompt, completions, adds_bos=True)

    def _completion(self, before: "_Said", prompt: str, answer: Conversation, first: str) -> tuple[Part, ...]:
        """The answer's turns as they follow each other: what the assistant says, and what comes between.

        user: 2+2? | assistant: calls add | tool: 4 | assistant: Four.
                     scored       not scored, with     scored
                                  the next header
        """
        parts: list[Part] = []
        written = prompt
        for i, message in enumerate(answer):
            if message["role"] == "assistant":
                whole = first if i == 0 else self._apply(before, [answer[: i + 1]], add_generation_prompt=False)[0]
                said = self._said(_rest(whole, written, before.place), message, is_last=i == len(answer) - 1)
                parts.append(Part(said))
            elif answer[i + 1]["role"] == "assistant":
                [whole] = self._apply(before, [answer[: i + 1]], add_generation_prompt=True)
                said = _rest(whole, written, before.place)
                parts.append(Part(said, scored=False))
            else:
                continue  # of several tool turns the last writes them all
            written += said
        return tuple(parts)

    def _said(self, rest: str, message: dict[str, Any], *, is_last: bool) -> str:
        """Of what an assistant turn and all behind it add, that up to its end of turn.

        Some templates open the next turn behind the answer: what counts is the first end of turn after it. A tool call
        may open with a special token of its own, so a turn that calls ends where nothing but white space follows.
        """
        content, tail = (message["content"] or "").strip(), self._chat.tail
        if message.get("tool_calls") or not content:
            after = 0
        elif tail is not None and rest.endswith(tail):
            after = len(rest) - len(tail)
        else:
            after = max(0, rest.rfind(content)) + len(content)
        said = self._ended(rest, after, self._turn_ends)
        # Only the last turn may be given an EOS that the template did not write: others must lead on to what follows.
        return said if is_last or rest.startswith(said) else rest

    def _ended(self, text: str, after: int, ends: re.Pattern[str]) -> str:
        """End with one end-of-turn token. "Yes<|im_end|>\\n" -> "Yes<|im_end|>"; "Yes" -> "Yes</s>"."""
        if after:
            end = ends.search(text, after)
        else:
            end = next((found for found in ends.finditer(text) if not text[found.end() :].strip()), None)
        return text[: end.end()] if end else text + self.tokenizer.eos_token

    def _check_calls(self, before: "_Said", answer: Conversation) -> None:
        """Some templates know no tool calls and leave them out without a word: an answer would be an empty turn.

        A tool's name may stand anywhere in the text, so names that cannot are looked for instead.
        """
        if not any(message.get("tool_calls") for message in before.messages + answer):
            return
        messages, names = renamed(before.messages + answer, MARK)
        try:
            [text] = self._apply(replace(before, messages=[]), [messages], add_generation_prompt=False)
        except RowError:  # a template that lets nothing be called but what it knows: it looks at the calls
            return
        missing = next((name for mark, name in names.items() if mark not in text), None)
        if missing is not None:
            raise RowError(
                before.place,
                "tool call not written",
                f"the chat template leaves out the call of {missing!r}. Give one that writes tool calls, by "
                "policy.tokenizer.chat_template=FILE.jinja.",
            )

    def _apply(self, before: "_Said", several: list[Conversation], *, add_generation_prompt: bool) -> list[str]:
        """A conversation as text, once with each of the turns that may follow."""
        try:
            conversations = [before.messages + more for more in several]
            texts = self._chat.texts(conversations, before.tools, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            reason = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
            if isinstance(error, TemplateSyntaxError):
                message = f"the chat template is malformed, in line {error.lineno}: {reason}. {ANOTHER_TEMPLATE}."
                raise RowError(before.place, MALFORMED, message) from None
            raise RowError(
                before.place,
                "template fails",
                f"the chat template fails: {reason}. {ANOTHER_TEMPLATE}, or conversations that it takes.",
            ) from None
        longest = max(map(len, texts))
        if longest > MAX_RENDERED:
            raise RowError(before.place, "template fails", f"the chat template writes {longest:,} characters.")
        return texts


@dataclass(frozen=True, slots=True)
class _Said:
    """A conversation so far, the tools that could be called in it, and where it stands."""

    messages: Conversation
    tools: list[Any]
    place: str


def _rest(whole: str, written: str, place: str) -> str:
    """What follows the text written so far; a template that writes that differently now is refused."""
    if whole.startswith(written):
        return whole[len(written) :]
    at = next((i for i, (a, b) in enumerate(zip(written, whole, strict=False)) if a != b), len(whole))
    raise RowError(
        place,
        "prompt is no prefix",
        "the chat template writes the prompt differently once the answer follows: "
        f"...{written[max(0, at - 20) : at + 20]!r} becomes ...{whole[max(0, at - 20) : at + 20]!r}. "
        "Give a template that keeps it, by policy.tokenizer.chat_template=FILE.jinja.",
    )


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
            source = text_of(Path(given))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"policy.tokenizer.chat_template = {given}: cannot be read ({why}). Check the path."
            ) from None
    else:
        raise ConfigError(
            f"policy.tokenizer.chat_template = {given!r}: give default, null (raw text), or a file ending in .jinja."
        )
    _check_values(source, config.chat_template_kwargs)
    return Template(tokenizer, source, config.chat_template_kwargs)


def _check_values(source: str | None, given: dict[str, Any]) -> None:
    """A value that the template never looks at would be ignored without a word."""
    if not given:
        return
    if source is None:
        raise ConfigError(
            "policy.tokenizer.chat_template_kwargs: there is no chat template to read them. Leave them out."
        )
    try:
        read = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source))
    except TemplateError:  # what transformers adds to Jinja is not known here
        return
    if unread := sorted(given.keys() - read):
        raise ConfigError(
            f"policy.tokenizer.chat_template_kwargs.{unread[0]}: the chat template reads no such value. It reads "
            f"{listed(sorted(read))}."
        )


def _as_messages(prompt: str | tuple[Message, ...]) -> tuple[Message, ...]:
    return (Message("user", prompt),) if isinstance(prompt, str) else prompt


def _as_answer(answer: str | tuple[Message, ...]) -> tuple[Message, ...]:
    return (Message("assistant", answer),) if isinstance(answer, str) else answer


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token))

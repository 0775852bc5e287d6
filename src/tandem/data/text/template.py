"""Renders the prompt and completions of a Preference as the texts to tokenise."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta

from tandem.config.sections.policy import Tokenizer as TokenizerConfig
from tandem.data.formats.preference import Message, Preference, TextOrMessages
from tandem.data.formats.prompt_files import read_text_file, why_unreadable
from tandem.data.read.sources import RowError
from tandem.data.text.chat import (
    PROBE_TEXT,
    SHIELD,
    ChatTemplate,
    Conversation,
    convert_calls,
    rename_calls,
    special_tokens,
)
from tandem.data.text.tokenizer import fast_backend, without_dummy_prefix
from tandem.data.text.word_cache import IntArray, WordEncoder
from tandem.errors import ConfigError, one_line
from tandem.terminal.printable import listed

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = "How far is the moon?"
PROBE = [{"role": "user", "content": QUESTION}]
MALFORMED = "template malformed"
ANOTHER_TEMPLATE = "Set another with policy.tokenizer.chat_template=FILE.jinja"
# Lines of data files are shorter, so only the template can have made a longer text.
MAX_RENDERED = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the text of a completion. Assistant turns are scored; tool turns and the turn headers after them are not."""

    text: str
    scored: bool = True


@dataclass(frozen=True, slots=True)
class Rendered:
    """The rendered texts of one preference. Each completion ends with the template's end-of-turn token, or with EOS."""

    prompt: str
    completions: tuple[tuple[Part, ...], ...]
    adds_bos: bool

    @property
    def num_characters(self) -> int:
        return len(self.prompt) + sum(len(part.text) for parts in self.completions for part in parts)


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A tokenizer and its chat template. `source`: the text of the chat template, or None if prompts are used as raw text.

    `plain_text_as_is`: whether rows of plain text are raw text too, and only rows of messages are rendered, as in TRL.
    """

    tokenizer: Any
    source: str | None
    kwargs: dict[str, Any]
    plain_text_as_is: bool = False
    _special: re.Pattern[str] = field(init=False, repr=False)  # any special token
    _ends: re.Pattern[str] = field(init=False, repr=False)  # a special token that may end raw text
    _turn_ends: re.Pattern[str] = field(init=False, repr=False)  # a special token that may end a turn of a template
    _chat: ChatTemplate = field(init=False, repr=False)
    _start_encoder: WordEncoder | None = field(init=False, repr=False)  # None if the tokenizer has no fast backend
    _continuation_encoder: WordEncoder | None = field(init=False, repr=False)  # for texts that continue others

    def __post_init__(self) -> None:
        t = self.tokenizer
        special = special_tokens(t)
        object.__setattr__(self, "_special", _any_of(special))
        object.__setattr__(self, "_ends", _any_of(special - {t.bos_token, t.unk_token, t.pad_token} | {t.eos_token}))
        # Some tokenizers pad with their end-of-turn token, which is not EOS.
        object.__setattr__(self, "_turn_ends", _any_of(special - {t.bos_token, t.unk_token} | {t.eos_token}))
        object.__setattr__(self, "_chat", ChatTemplate(t, self.source or "", self.kwargs))
        backend = fast_backend(t)
        begins = backend and WordEncoder(backend)
        other = backend and without_dummy_prefix(backend)
        object.__setattr__(self, "_start_encoder", begins)
        object.__setattr__(self, "_continuation_encoder", begins if other is backend else WordEncoder(other))

    def encode(self, texts: list[str], *, begins: bool, parse_special: bool = True) -> list[IntArray]:
        """Return the token ids of each text, without BOS or EOS. `begins`: if False, no space is added before the texts."""
        encoder = self._start_encoder if begins else self._continuation_encoder
        if encoder is None:
            encoded = self.tokenizer(texts, add_special_tokens=False, split_special_tokens=not parse_special)
            return [np.asarray(ids, np.int32) for ids in encoded["input_ids"]]
        return encoder.encode(texts, parse_special=parse_special)

    @property
    def turn_tokens(self) -> re.Pattern[str]:
        """A pattern that matches turn markers. The template adds turn markers, so a prompt in the data should not contain any."""
        return self._chat.turn_tokens

    @property
    def pads_with_end(self) -> bool:
        """Whether the template contains the padding token, and this token is not EOS. The padding token may then end turns."""
        pad = self.tokenizer.pad_token
        return bool(pad) and pad != self.tokenizer.eos_token and pad in (self.source or "")

    def is_raw(self, *texts: TextOrMessages, tools: tuple[Any, ...]) -> bool:
        """Whether a prompt, or a prompt and its completions, are encoded as they are."""
        is_plain = not tools and all(isinstance(text, str) for text in texts)
        return self.source is None or (self.plain_text_as_is and is_plain)

    def render(self, preference: Preference) -> Rendered:
        given = (completion.answer for completion in preference.completions)
        if self.is_raw(preference.prompt, *given, tools=preference.tools):
            return self._render_raw(preference)
        before = self._context(preference.prompt, preference.tools, preference.place)
        answers = [self._shielded_turns(as_answer(completion.answer)) for completion in preference.completions]
        [prompt] = self._apply(before, [[]], add_generation_prompt=True)
        # The first turns of all answers are rendered in one call, because a call takes about as long for several.
        firsts = self._apply(before, [answer[:1] for answer in answers], add_generation_prompt=False)
        completions = tuple(
            self._completion(before, prompt, answer, first) for answer, first in zip(answers, firsts, strict=True)
        )
        for answer in answers:
            self._check_calls(before, answer)
        return Rendered(prompt, completions, adds_bos=False)

    def render_prompt(self, prompt: TextOrMessages, tools: tuple[Any, ...], place: str) -> Rendered:
        """A prompt that a model is to answer, as `render` writes it before every completion."""
        if self.is_raw(prompt, tools=tools):
            self._refuse_messages(prompt, place)
            return Rendered(str(prompt), (), adds_bos=True)
        [text] = self._apply(self._context(prompt, tools, place), [[]], add_generation_prompt=True)
        return Rendered(text, (), adds_bos=False)

    def _context(self, prompt: TextOrMessages, tools: tuple[Any, ...], place: str) -> "_Context":
        return _Context(self._shielded_turns(as_messages(prompt)), list(self._shielded_in(tools)), place)

    def _shielded_turns(self, messages: tuple[Message, ...]) -> Conversation:
        return [
            self._with_more(m) if m.more else {"role": m.role, "content": self._shielded(m.content)} for m in messages
        ]

    def _with_more(self, message: Message) -> dict[str, Any]:
        turn = {"role": message.role, "content": message.content, **message.more}
        if "tool_calls" in turn:
            turn = convert_calls(turn, self._chat.tool_call_style)
        return self._shielded_in(turn)

    def _shielded_in(self, value: Any) -> Any:
        """Apply `_shielded` to every text inside a nested value."""
        if isinstance(value, str):
            return self._shielded(value)
        if isinstance(value, Mapping):
            return {self._shielded_in(key): self._shielded_in(inner) for key, inner in value.items()}
        return [self._shielded_in(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _shielded(self, content: str) -> str:
        """Put SHIELD around special tokens in the text of a message, so that they are encoded as plain text."""
        return self._special.sub(lambda found: f"{SHIELD}{found[0]}{SHIELD}", content)

    def probe(self) -> str:
        """Render a fixed conversation, and return the text.

        The text is part of the fingerprint of a store, because a template may write the date.
        """
        return self._render_probe_conversation()[1]

    def example(self) -> Conversation | None:
        """Return a short conversation that the template accepts; None without a template, or if it rejects every one tried."""
        return self._render_probe_conversation()[0]

    def _render_probe_conversation(self) -> tuple[Conversation | None, str]:
        """Return a conversation that the template accepts, and its rendered text.

        It is tried without a system turn, then with one. If both are rejected, or there is no template, return (None, "").
        """
        for messages in (PROBE, [SYSTEM, *PROBE]) if self.source else ():
            try:
                [text] = self._apply(_Context(messages, [], "the chat template"), [[]], add_generation_prompt=True)
                return messages, text
            except RowError as error:
                if error.reason == MALFORMED:
                    raise
        return None, ""

    def _render_raw(self, preference: Preference) -> Rendered:
        self._refuse_messages(preference.prompt, preference.place)
        answers = [completion.answer for completion in preference.completions]
        if preference.tools or not all(isinstance(answer, str) for answer in answers):
            raise RowError(
                preference.place,
                "messages without a template",
                "tools, tool calls and completions of several messages need a chat template. "
                "Set policy.tokenizer.chat_template=FILE.jinja.",
            )
        # Raw text counts as rendered: special tokens in it are parsed, and one at its end is the end of turn.
        completions = tuple((Part(self._ended_raw(str(answer))),) for answer in answers)
        return Rendered(str(preference.prompt), completions, adds_bos=True)

    def _ended_raw(self, text: str) -> str:
        eos = self.tokenizer.eos_token
        if self.plain_text_as_is:  # as in TRL, which adds EOS also after other special tokens
            return text if text.endswith(eos) else text + eos
        return self._ended(text, 0, self._ends)

    def _refuse_messages(self, prompt: TextOrMessages, place: str) -> None:
        """Refuse messages where there is no template."""
        if not isinstance(prompt, str):
            raise RowError(
                place,
                "messages without a template",
                "the prompt is a list of messages, but there is no chat template to render it. "
                "Set policy.tokenizer.chat_template=FILE.jinja, or use prompts of plain text.",
            )

    def _completion(self, before: "_Context", prompt: str, answer: Conversation, first: str) -> tuple[Part, ...]:
        """Split the rendered text of an answer into parts: assistant turns, and the text between them.

        user: 2+2? | assistant: calls add | tool: 4 | assistant: Four.
                     scored       not scored, with     scored
                                  the next header
        """
        parts: list[Part] = []
        rendered_so_far = prompt
        for i, message in enumerate(answer):
            if message["role"] == "assistant":
                rendered = first if i == 0 else self._apply(before, [answer[: i + 1]], add_generation_prompt=False)[0]
                text = self._assistant_text(
                    _text_after(rendered, rendered_so_far, before.place), message, is_last=i == len(answer) - 1
                )
                parts.append(Part(text))
            elif answer[i + 1]["role"] == "assistant":
                [rendered] = self._apply(before, [answer[: i + 1]], add_generation_prompt=True)
                text = _text_after(rendered, rendered_so_far, before.place)
                parts.append(Part(text, scored=False))
            else:
                continue  # consecutive tool turns are rendered with the last of them
            rendered_so_far += text
        return tuple(parts)

    def _assistant_text(self, rest: str, message: dict[str, Any], *, is_last: bool) -> str:
        """Return the text of an assistant turn, cut off after its end-of-turn token. `rest`: the rendered text from this turn on.

        The turn ends at the first end-of-turn token after its content, because some templates also write the beginning of the
        next turn. In a turn with tool calls, special tokens may be part of a call. Such a turn ends at the token that is
        followed only by white space.
        """
        content, tail = (message["content"] or "").strip(), self._chat.tail
        if message.get("tool_calls") or not content:
            after = 0
        elif tail is not None and rest.endswith(tail):
            after = len(rest) - len(tail)
        else:
            after = max(0, rest.rfind(content)) + len(content)
        text = self._ended(rest, after, self._turn_ends)
        # EOS is only added to the last turn: the text of the others must continue with the next turn.
        return text if is_last or rest.startswith(text) else rest

    def _ended(self, text: str, after: int, ends: re.Pattern[str]) -> str:
        """Cut off a text after its end-of-turn token. If the text has no end-of-turn token, add EOS.

        "Yes<|im_end|>\\n" is returned as "Yes<|im_end|>", and "Yes" as "Yes</s>". `after`: the position from which to
        search. If `after` is 0, the token must be followed by nothing but white space.
        """
        if after:
            end = ends.search(text, after)
        else:
            end = next((found for found in ends.finditer(text) if not text[found.end() :].strip()), None)
        return text[: end.end()] if end else text + self.tokenizer.eos_token

    def _check_calls(self, before: "_Context", answer: Conversation) -> None:
        """Raise a RowError if the template silently leaves out tool calls. The answer would become an empty turn.

        The calls are rendered with unique names, because the name of a tool may also appear elsewhere in the text.
        """
        if not any(message.get("tool_calls") for message in before.messages + answer):
            return
        messages, names = rename_calls(before.messages + answer, PROBE_TEXT)
        try:
            [text] = self._apply(replace(before, messages=[]), [messages], add_generation_prompt=False)
        except RowError:  # the template rejects unknown names, so it does read the calls
            return
        missing = next((name for mark, name in names.items() if mark not in text), None)
        if missing is not None:
            raise RowError(
                before.place,
                "tool call not written",
                f"the chat template leaves out the call of {missing!r}. Set one that renders tool calls with "
                "policy.tokenizer.chat_template=FILE.jinja.",
            )

    def _apply(self, before: "_Context", several: list[Conversation], *, add_generation_prompt: bool) -> list[str]:
        """Render the messages of `before`, followed by each continuation in `several`. Return one text per continuation."""
        try:
            conversations = [before.messages + more for more in several]
            texts = self._chat.texts(conversations, before.tools, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            reason = one_line(error)
            if isinstance(error, TemplateSyntaxError):
                message = f"the chat template is malformed in line {error.lineno}: {reason}. {ANOTHER_TEMPLATE}."
                raise RowError(before.place, MALFORMED, message) from None
            raise RowError(
                before.place,
                "template fails",
                f"the chat template fails: {reason}. {ANOTHER_TEMPLATE}, or use conversations that it accepts.",
            ) from None
        longest = max(map(len, texts))
        if longest > MAX_RENDERED:
            raise RowError(
                before.place, "template fails", f"the chat template writes {longest:,} characters. {ANOTHER_TEMPLATE}."
            )
        return texts


@dataclass(frozen=True, slots=True)
class _Context:
    """The messages before an answer, the available tools, and the place of the row in the data."""

    messages: Conversation
    tools: list[Any]
    place: str


def _text_after(rendered: str, rendered_so_far: str, place: str) -> str:
    """Return the part of `rendered` after `rendered_so_far`. Raise a RowError if `rendered` does not begin with that text."""
    if rendered.startswith(rendered_so_far):
        return rendered[len(rendered_so_far) :]
    at = next((i for i, (a, b) in enumerate(zip(rendered_so_far, rendered, strict=False)) if a != b), len(rendered))
    raise RowError(
        place,
        "prompt is not a prefix",
        "the chat template renders the prompt differently when the answer follows: "
        f"...{rendered_so_far[max(0, at - 20) : at + 20]!r} becomes ...{rendered[max(0, at - 20) : at + 20]!r}. "
        "Set a template that does not change the prompt with policy.tokenizer.chat_template=FILE.jinja.",
    )


def make_template(tokenizer: Any, config: TokenizerConfig) -> Template:
    """Return the template that the settings in `policy.tokenizer` select."""
    given = config.chat_template
    if given is None:
        source = None
    elif given == "default":
        source = tokenizer.chat_template
        if isinstance(source, dict):  # several by name (default, tool_use, rag)
            source = source.get("default")
    elif given.endswith(".jinja"):
        try:
            source = read_text_file(Path(given))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"policy.tokenizer.chat_template = {given}: {why_unreadable(error)}") from None
    else:
        raise ConfigError(
            f"policy.tokenizer.chat_template = {given!r}: not a known value. Set default, null (raw text), or a file ending in "
            ".jinja."
        )
    _check_kwargs(source, config.chat_template_kwargs)
    return Template(tokenizer, source, config.chat_template_kwargs, config.plain_text == "as_is")


def _check_kwargs(source: str | None, given: dict[str, Any]) -> None:
    """Raise a ConfigError if chat_template_kwargs has a value that the template does not use. It would be silently ignored."""
    if not given:
        return
    if source is None:
        raise ConfigError(
            "policy.tokenizer.chat_template_kwargs: they have no effect without a chat template. Leave them out."
        )
    try:
        read = meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source))
    except TemplateError:  # it may use extensions that transformers adds to Jinja
        return
    if unread := sorted(given.keys() - read):
        raise ConfigError(
            f"policy.tokenizer.chat_template_kwargs.{unread[0]}: the chat template does not use this value. The template uses "
            f"{listed(sorted(read))}."
        )


def as_messages(prompt: str | tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages of a prompt. A text becomes a single user turn."""
    return (Message("user", prompt),) if isinstance(prompt, str) else prompt


def as_answer(answer: str | tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages of a completion. A text becomes a single assistant turn."""
    return (Message("assistant", answer),) if isinstance(answer, str) else answer


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token))

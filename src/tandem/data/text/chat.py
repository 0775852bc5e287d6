"""Conversations in; their texts by a chat template out, as transformers writes them, with less of its overhead."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Arguments = Literal["object", "text"]


@dataclass(frozen=True, slots=True)
class Calling:
    """How a template wants tool calls: what a turn that says nothing else holds, and what arguments are; None: whatever."""

    silence: str | None = ""
    arguments: Arguments | None = None


def as_wanted(message: dict[str, Any], wanted: Calling) -> dict[str, Any]:
    """A message whose calls a template will write. OpenAI's files have arguments as texts, most templates want objects."""
    calls = message["tool_calls"]
    if isinstance(calls, list):
        calls = [_changed(call, lambda function: _converted(function, wanted.arguments)) for call in calls]
    return {**message, "content": message["content"] or wanted.silence, "tool_calls": calls}


def renamed(messages: list[dict[str, Any]], mark: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The same conversation with every call under a name of its own, and the names there were: {"mark0x": "add"}."""
    names: dict[str, str] = {}

    def rename(function: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(function.get("name"), str):
            return function
        own = f"{mark}{len(names)}x"  # no name of a call is the beginning of another's
        names[own] = function["name"]
        return {**function, "name": own}

    changed = []
    for message in messages:
        calls = message.get("tool_calls")
        more = {"tool_calls": [_changed(call, rename) for call in calls]} if isinstance(calls, list) else {}
        changed.append({**message, **more})
    return changed, names


def _changed(call: Any, change: Any) -> Any:
    """A call is {"function": {"name", "arguments"}}, or {"name", "arguments"} alone."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": change(dict(call["function"]))}
    return change(dict(call))


def _converted(function: dict[str, Any], wanted: Arguments | None) -> dict[str, Any]:
    given = function.get("arguments")
    if wanted == "text" and isinstance(given, Mapping):
        return {**function, "arguments": json.dumps(given, ensure_ascii=False)}
    if wanted == "object" and isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            return function
        return {**function, "arguments": value} if isinstance(value, dict) else function
    return function


# Stands around a special token that is only spelled. It is one of Unicode's noncharacters: a text with it is refused.
SHIELD = "\ufdd0"


def pieces(rendered: str) -> list[tuple[str, bool]]:
    """A rendered text in pieces, and whether special tokens in each are meant: "a\ufdd0</s>\ufdd0b" -> a, </s> (no), b."""
    return [(part, i % 2 == 0) for i, part in enumerate(rendered.split(SHIELD)) if part]


MARK = "tandem6c1d"  # an answer that no template writes by itself
Conversation = list[dict[str, Any]]  # each message has a role, a content, and maybe more
# Written by templates that people have prompts from; some are plain text to their tokenizers.
TURN_MARKS = frozenset(
    [
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|eot_id|>",
        "[INST]",
        "[/INST]",
        "<<SYS>>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<|user|>",
        "<|assistant|>",
        "<|start_of_role|>",
        "<|START_OF_TURN_TOKEN|>",
        "<extra_id_1>",
    ]
)
HTML = frozenset(["<s>", "</s>"])  # special tokens of Llama 2 and others, and tags of texts about web pages
DICT_ATTRIBUTES = frozenset([*dir(dict), *dir(type)])


def special_tokens(tokenizer: Any) -> set[str]:
    return {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | set(
        tokenizer.all_special_tokens
    )


class ChatTemplate:
    """A chat template in transformers' sandbox.

    `apply_chat_template` takes longer to get ready than the template takes to run. So plain conversations go to the
    compiled template itself, once both were seen to write the same; what has tools or tool calls never does.
    """

    def __init__(self, tokenizer: Any, source: str, kwargs: dict[str, Any]):
        self._tokenizer, self._source, self._kwargs = tokenizer, source, kwargs
        self._compiled: Callable[[Conversation, bool], str] | None = None
        self._was_compared = False

    def __reduce__(self) -> Any:  # a compiled template cannot travel
        return ChatTemplate, (self._tokenizer, self._source, self._kwargs)

    def texts(self, several: Sequence[Conversation], tools: list[Any], *, add_generation_prompt: bool) -> list[str]:
        """Each conversation as text."""
        plain = not tools and all(len(message) == 2 for one in several for message in one)
        if plain and self._compiled is not None:
            return [self._compiled(one, add_generation_prompt) for one in several]
        given = {"tools": tools or None, "chat_template": self._source, "add_generation_prompt": add_generation_prompt}
        if any(message["content"] is None for one in several for message in one):
            return self._with_nulls(several, given)
        texts = self._tokenizer.apply_chat_template(list(several), tokenize=False, **given, **self._kwargs)
        if plain and not self._was_compared:
            self._compare(several, texts, add_generation_prompt)
        return texts

    def _with_nulls(self, several: Sequence[Conversation], given: dict[str, Any]) -> list[str]:
        """What `apply_chat_template` makes of them where it does not take the nulls out, as from transformers 5.23 on."""
        from transformers.utils.chat_template_utils import render_jinja_template

        names = {**self._tokenizer.special_tokens_map, **self._kwargs}
        texts, _ = render_jinja_template(list(several), **given, **names)
        return list(texts)

    @cached_property
    def turn_tokens(self) -> re.Pattern[str]:
        """Finds what marks turns: the special tokens that this template writes, and marks that are well known."""
        written = self._tried({"role": "assistant", "content": MARK})
        own = {token for token in special_tokens(self._tokenizer) if token in written} - HTML
        return re.compile("|".join(map(re.escape, sorted(own | TURN_MARKS, key=len, reverse=True))))

    @cached_property
    def tail(self) -> str | None:
        """What the template writes behind the last answer: its end of turn, and maybe more. None if that cannot be told."""
        text = self._tried({"role": "assistant", "content": MARK})
        before, found, behind = text.rpartition(MARK)
        return behind if found and MARK not in before else None

    @cached_property
    def calling(self) -> Calling:
        """How tool calls are put, so that the template writes them.

        Of arguments as a text most templates make a JSON string, {"a": 1} -> "{\\"a\\": 1}"; others can join nothing but
        texts. Some write calls only of a turn whose content is null.
        """
        forms: dict[Arguments, Any] = {"object": {MARK: 1}, "text": json.dumps({MARK: 1})}
        for silence in ("", None):
            taken: list[Arguments] = []
            for form, given in forms.items():
                call = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": given}}
                text = self._tried({"role": "assistant", "content": silence, "tool_calls": [call]})
                if f'"{MARK}"' in text:
                    taken.append(form)
            if taken:
                return Calling(silence, None if len(taken) == 2 else taken[0])
        return Calling()

    def _tried(self, answer: dict[str, Any]) -> str:
        """A short conversation as text, with a system turn where there must be one; nothing from a template that wants others."""
        turns = [{"role": "system", "content": "Well."}, {"role": "user", "content": "Well?"}, answer]
        for conversation in (turns[1:], turns):
            with suppress(Exception):
                [text] = self.texts([conversation], [], add_generation_prompt=False)
                return text
        return ""

    def _compare(self, several: Sequence[Conversation], texts: list[str], add_generation_prompt: bool) -> None:
        self._was_compared = True
        compiled = self._compile()
        if compiled is not None:
            try:
                own = [compiled(one, add_generation_prompt) for one in several]
            except Exception:  # whatever it is, transformers' own way did without it
                return
            self._compiled = compiled if own == texts else None

    def _compile(self) -> Callable[[Conversation, bool], str] | None:
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template
        except ImportError:  # no public name: it may go
            return None
        given = {"tools": None, "documents": None, **self._tokenizer.special_tokens_map, **self._kwargs}
        return _writer(_compile_jinja_template(self._source), given)


def _writer(template: Any, given: dict[str, Any]) -> Callable[[Conversation, bool], str]:
    """What `template.render` does for each text, less what is the same for all of them."""
    template.globals = dict(template.globals)  # a chain of dictionaries, gone through for every text
    template.environment.getattr = _looked_up(template.environment)
    same, concat = {**template.globals, **given}, template.environment.concat

    def write(messages: Conversation, add_generation_prompt: bool) -> str:
        names = {**same, "messages": messages, "add_generation_prompt": add_generation_prompt}
        return concat(template.root_render_func(template.new_context(names, shared=True)))

    return write


def _looked_up(environment: Any) -> Callable[[Any, str], Any]:
    """The sandbox's `message.role`, which tries for an attribute first: where a dict can have none, its key at once."""
    own = type(environment).getattr.__get__(environment)

    def look_up(holder: Any, name: str) -> Any:
        if type(holder) is dict and name in holder and name not in DICT_ATTRIBUTES:
            return holder[name]
        return own(holder, name)

    return look_up

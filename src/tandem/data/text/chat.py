"""Renders conversations with a chat template. The result is the same as that of transformers, with less overhead."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Arguments = Literal["object", "text"]


@dataclass(frozen=True, slots=True)
class ToolCallStyle:
    """How tool calls must be written in a message so that a template renders them."""

    empty_content: str | None = ""  # the content of a turn that has only calls
    arguments: Arguments | None = None  # None: both forms are rendered


def convert_calls(message: dict[str, Any], style: ToolCallStyle) -> dict[str, Any]:
    """Convert the tool calls of a message to the template's style. OpenAI gives arguments as text; most templates need dicts."""
    calls = message["tool_calls"]
    if isinstance(calls, list):
        calls = [
            _change_function(call, lambda function: _convert_arguments(function, style.arguments)) for call in calls
        ]
    return {**message, "content": message["content"] or style.empty_content, "tool_calls": calls}


def rename_calls(messages: list[dict[str, Any]], mark: str) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Give every tool call a unique name. Return the changed messages, and a dict such as {"mark0x": "add"}.

    The dict maps each new name to the original name.
    """
    names: dict[str, str] = {}

    def rename(function: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(function.get("name"), str):
            return function
        own = f"{mark}{len(names)}x"  # no name is a prefix of another
        names[own] = function["name"]
        return {**function, "name": own}

    changed = []
    for message in messages:
        calls = message.get("tool_calls")
        more = {"tool_calls": [_change_function(call, rename) for call in calls]} if isinstance(calls, list) else {}
        changed.append({**message, **more})
    return changed, names


def _change_function(call: Any, change: Any) -> Any:
    """Apply `change` to the function of a tool call.

    A call is written as {"function": {"name", "arguments"}} or as {"name", "arguments"}.
    """
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": change(dict(call["function"]))}
    return change(dict(call))


def _convert_arguments(function: dict[str, Any], style: Arguments | None) -> dict[str, Any]:
    given = function.get("arguments")
    if style == "text" and isinstance(given, Mapping):
        return {**function, "arguments": json.dumps(given, ensure_ascii=False)}
    if style == "object" and isinstance(given, str):
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            return function
        return {**function, "arguments": value} if isinstance(value, dict) else function
    return function


# Put around special tokens that appear in the text of a message. It is a Unicode noncharacter: texts that contain it are refused.
SHIELD = "\ufdd0"


def split_shielded(rendered: str) -> list[tuple[str, bool]]:
    """Split a text at the SHIELD characters into (piece, parse_special). Special tokens between two shields are plain text.

    "a\ufdd0</s>\ufdd0b" is returned as ("a", True), ("</s>", False), ("b", True).
    """
    return [(part, i % 2 == 0) for i, part in enumerate(rendered.split(SHIELD)) if part]


PROBE_TEXT = "tandem6c1d"  # a text that no template contains
Conversation = list[dict[str, Any]]  # each message has a role, a content, and optional keys
# Turn markers of common templates, which prompts may already contain. For some tokenizers they are plain text.
TURN_MARKERS = frozenset(
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
HTML_TAGS = frozenset(["<s>", "</s>"])  # special tokens of Llama 2 and others, but also HTML tags
DICT_ATTRIBUTES = frozenset([*dir(dict), *dir(type)])


def special_tokens(tokenizer: Any) -> set[str]:
    return {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | set(
        tokenizer.all_special_tokens
    )


class ChatTemplate:
    """Renders conversations with a chat template, in the sandbox of transformers.

    `apply_chat_template` spends more time on setup than on rendering. So the compiled template is called directly for
    conversations without tools and tool calls, if a first comparison shows that this gives the same text.
    """

    def __init__(self, tokenizer: Any, source: str, kwargs: dict[str, Any]):
        self._tokenizer, self._source, self._kwargs = tokenizer, source, kwargs
        self._compiled: Callable[[Conversation, bool], str] | None = None
        self._compared = False

    def __reduce__(self) -> Any:  # a compiled template cannot be pickled
        return ChatTemplate, (self._tokenizer, self._source, self._kwargs)

    def texts(self, several: Sequence[Conversation], tools: list[Any], *, add_generation_prompt: bool) -> list[str]:
        """Render each conversation, and return the texts."""
        plain = not tools and all(len(message) == 2 for one in several for message in one)
        if plain and self._compiled is not None:
            return [self._compiled(one, add_generation_prompt) for one in several]
        given = {"tools": tools or None, "chat_template": self._source, "add_generation_prompt": add_generation_prompt}
        if any(message["content"] is None for one in several for message in one):
            return self._with_nulls(several, given)
        texts = self._tokenizer.apply_chat_template(list(several), tokenize=False, **given, **self._kwargs)
        if plain and not self._compared:
            self._compare(several, texts, add_generation_prompt)
        return texts

    def _with_nulls(self, several: Sequence[Conversation], given: dict[str, Any]) -> list[str]:
        """Render as `apply_chat_template` does, but keep null contents, which transformers 5.23 and later removes."""
        from transformers.utils.chat_template_utils import render_jinja_template

        names = {**self._tokenizer.special_tokens_map, **self._kwargs}
        texts, _ = render_jinja_template(list(several), **given, **names)
        return list(texts)

    @cached_property
    def turn_tokens(self) -> re.Pattern[str]:
        """A pattern that matches turn markers: special tokens that this template writes, and turn markers of common templates."""
        written = self._render_probe({"role": "assistant", "content": PROBE_TEXT})
        own = {token for token in special_tokens(self._tokenizer) if token in written} - HTML_TAGS
        return re.compile("|".join(map(re.escape, sorted(own | TURN_MARKERS, key=len, reverse=True))))

    @cached_property
    def tail(self) -> str | None:
        """The text that the template writes after the last answer: the end-of-turn token, and maybe more.

        None if this text is unknown.
        """
        text = self._render_probe({"role": "assistant", "content": PROBE_TEXT})
        before, found, after = text.rpartition(PROBE_TEXT)
        return after if found and PROBE_TEXT not in before else None

    @cached_property
    def tool_call_style(self) -> ToolCallStyle:
        """How tool calls must be written in a message so that the template renders them.

        If arguments are given as text, most templates quote them as a JSON string: {"a": 1} becomes "{\\"a\\": 1}". Other
        templates accept only text. Some templates render calls only if the content of the turn is null.
        """
        forms: dict[Arguments, Any] = {"object": {PROBE_TEXT: 1}, "text": json.dumps({PROBE_TEXT: 1})}
        for empty_content in ("", None):
            taken: list[Arguments] = []
            for form, given in forms.items():
                call = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": given}}
                text = self._render_probe({"role": "assistant", "content": empty_content, "tool_calls": [call]})
                if f'"{PROBE_TEXT}"' in text:
                    taken.append(form)
            if taken:
                return ToolCallStyle(empty_content, None if len(taken) == 2 else taken[0])
        return ToolCallStyle()

    def _render_probe(self, answer: dict[str, Any]) -> str:
        """Render a short conversation that ends with `answer`. Return "" if the template rejects it.

        The conversation is tried first without a system turn, then with one.
        """
        turns = [{"role": "system", "content": "Well."}, {"role": "user", "content": "Well?"}, answer]
        for conversation in (turns[1:], turns):
            with suppress(Exception):
                [text] = self.texts([conversation], [], add_generation_prompt=False)
                return text
        return ""

    def _compare(self, several: Sequence[Conversation], texts: list[str], add_generation_prompt: bool) -> None:
        self._compared = True
        compiled = self._compile()
        if compiled is not None:
            try:
                own = [compiled(one, add_generation_prompt) for one in several]
            except Exception:  # apply_chat_template did not fail, so it is used instead
                return
            self._compiled = compiled if own == texts else None

    def _compile(self) -> Callable[[Conversation, bool], str] | None:
        try:
            from transformers.utils.chat_template_utils import _compile_jinja_template
        except ImportError:  # a private name, which may be removed
            return None
        given = {"tools": None, "documents": None, **self._tokenizer.special_tokens_map, **self._kwargs}
        return _fast_renderer(_compile_jinja_template(self._source), given)


def _fast_renderer(template: Any, given: dict[str, Any]) -> Callable[[Conversation, bool], str]:
    """Return a function that renders like `template.render`, but does the setup only once."""
    template.globals = dict(template.globals)  # faster than the original chain of dictionaries
    template.environment.getattr = _fast_getattr(template.environment)
    same, concat = {**template.globals, **given}, template.environment.concat

    def write(messages: Conversation, add_generation_prompt: bool) -> str:
        names = {**same, "messages": messages, "add_generation_prompt": add_generation_prompt}
        return concat(template.root_render_func(template.new_context(names, shared=True)))

    return write


def _fast_getattr(environment: Any) -> Callable[[Any, str], Any]:
    """Return a faster attribute lookup for templates. In a plain dict, `message.role` is looked up as a key first."""
    own = type(environment).getattr.__get__(environment)

    def look_up(holder: Any, name: str) -> Any:
        if type(holder) is dict and name in holder and name not in DICT_ATTRIBUTES:
            return holder[name]
        return own(holder, name)

    return look_up

"""Messages with tool calls in; the same out, with arguments as a template wants them, or under names that it cannot know."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
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

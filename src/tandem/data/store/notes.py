"""A preference and its texts in; what is worth a count though the row is used out."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from tandem.data.formats.preference import REASONING, Message, Preference
from tandem.data.text.chat import SHIELD
from tandem.data.text.template import Rendered, Template
from tandem.data.text.tokens import pairs_of

NO_SYSTEM = "system turns that the chat template leaves out"
TEMPLATED = "prompts that hold tokens of a chat template, put inside a user turn"
TAGGED = "prompts with Human: and Assistant: tags, put inside a user turn"
AS_TEXT = "messages that are written as a text, and taken as one"
MISSING = "prompts or completions that only say nan, None or null, as tables write a missing value"
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
MESSAGES_AS_TEXT = re.compile(r"""\s*(array\()?\[?\s*\{\s*['"](role|from|content|value)['"]\s*:""")
SPEAKER = re.compile(r"""['"](role|from)['"]\s*:\s*['"](system|user|assistant|tool|human|gpt)['"]""")
NO_VALUE = frozenset(["nan", "NaN", "NAN", "None", "null", "NULL", "<NA>", "NaT", "#N/A", "undefined"])
HARDLY_BY_CHANCE = 10  # characters
# A dialogue as one text: it begins with the human, or both sides have turns, or it ends where the assistant should speak.
HUMAN = re.compile(r"(?:\A|\n)\s*(?:#+ ?)?Human:")
ASSISTANT = re.compile(r"(?:\A|\n)\s*(?:#+ ?)?Assistant:")
SPEAKS = re.compile(r"(?:\A|\s)(?:#+ ?)?(?:Assistant|ASSISTANT):\s*\Z")


def notes_on(preference: Preference, rendered: Rendered, template: Template, pairing: str) -> Iterator[str]:
    """What is worth a count though the row is used."""
    yield from preference.notes
    completions = rendered.completions
    text = rendered.prompt + "".join([part.text for parts in completions for part in parts])
    if len(completions) > 2 and any(completions[a] == completions[b] for a, b in pairs_of(preference, pairing)):
        yield "pairs of identical completions, left out"
    if any(_is_lost(said, text, _said(preference)) for said in _reasoning(preference)):
        yield "reasoning that the chat template leaves out"
    if SHIELD not in text:
        yield from _left_out(preference, rendered, text)
    if isinstance(preference.prompt, str):
        yield from _misread(preference.prompt, preference)
    if template.source is not None:
        yield from _written_already(preference.prompt, template)
    if _is_missing(preference):
        yield MISSING
    if CONTROL.search(text):
        yield "control characters in the text"
    if SHIELD in text:
        yield "special tokens spelled in a message, encoded as plain text"


def _is_missing(preference: Preference) -> bool:
    last = Message("user", preference.prompt) if isinstance(preference.prompt, str) else preference.prompt[-1]
    _, _, paragraph = last.content.rpartition("\n\n") if last.role == "user" else ("", "", "")  # an `input` is one
    answers = (completion.answer for completion in preference.completions)
    ends = (answer if isinstance(answer, str) else answer[-1].content for answer in answers)
    return any(text.strip() in NO_VALUE for text in (paragraph, *ends))


def _written_already(prompt: str | tuple[Message, ...], template: Template) -> Iterator[str]:
    """What a chat template would write and the prompt contains already: it becomes plain text of one turn."""
    asked = [prompt] if isinstance(prompt, str) else [turn.content for turn in prompt if turn.role == "user"]
    if any(map(template.turn_tokens.search, asked)):
        yield TEMPLATED
    if isinstance(prompt, str) and _is_tagged(prompt):
        yield TAGGED


def _is_tagged(prompt: str) -> bool:
    if "Assistant:" not in prompt and "Human:" not in prompt and "ASSISTANT:" not in prompt:
        return False
    first = HUMAN.search(prompt)
    is_first = first is not None and not prompt[: first.start()].strip()
    return is_first or bool(first and ASSISTANT.search(prompt)) or bool(SPEAKS.search(prompt))


def _misread(prompt: str, preference: Preference) -> Iterator[str]:
    """What is a text and was hardly meant to be this one."""
    answers = [completion.answer for completion in preference.completions if isinstance(completion.answer, str)]
    if any(MESSAGES_AS_TEXT.match(text) and SPEAKER.search(text) for text in (prompt, *answers)):
        yield AS_TEXT
    if len(prompt) >= HARDLY_BY_CHANCE and any(answer.startswith(prompt) for answer in answers):
        yield "completions that begin with their prompt"


def _left_out(preference: Preference, rendered: Rendered, text: str) -> Iterator[str]:
    """What a chat template leaves out, and what it adds that is then scored."""
    turns = (Message("user", preference.prompt),) if isinstance(preference.prompt, str) else preference.prompt
    contents = [message.content for message in turns]
    lost = {
        message.role
        for i, message in enumerate(turns)
        if _is_lost(message.content.strip(), rendered.prompt, contents[:i] + contents[i + 1 :])
    }
    if "system" in lost:
        yield NO_SYSTEM
    if lost - {"system"}:
        yield "turns of the prompt that the chat template leaves out"
    described = [tool.get("function", tool) for tool in preference.tools]
    said = _said(preference) if described else []
    if any(_is_lost(str(one.get("name", "")), text, said) for one in described if isinstance(one, Mapping)):
        yield "tools that the chat template leaves out"
    for completion, parts in zip(preference.completions, rendered.completions, strict=True):
        if isinstance(completion.answer, str) and not parts[0].text.lstrip().startswith(completion.answer.strip()[:20]):
            yield "answers before which the chat template writes more, which is scored"
            return


def _said(preference: Preference) -> list[str]:
    """All contents of a preference's turns and answers."""
    turns = (Message("user", preference.prompt),) if isinstance(preference.prompt, str) else preference.prompt
    answers = [completion.answer for completion in preference.completions]
    spoken = chain.from_iterable((Message("assistant", one),) if isinstance(one, str) else one for one in answers)
    return [message.content for message in chain(turns, spoken)]


def _is_lost(words: str, text: str, others: Iterable[str]) -> bool:
    """Whether a text lacks these words, or has them only as often as the other messages together do."""
    return bool(words) and text.count(words) <= sum(other.count(words) for other in others)


def _reasoning(preference: Preference) -> Iterator[str]:
    """The reasoning of the answers, where it is a separate field."""
    answers = [completion.answer for completion in preference.completions if not isinstance(completion.answer, str)]
    for message in chain.from_iterable(answers):
        yield from (said.strip() for key in REASONING if isinstance(said := message.more.get(key), str))

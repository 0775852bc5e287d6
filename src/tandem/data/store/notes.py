"""Makes notes on rows that are used although they look wrong. Notes are counted per set and reported to the user."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from tandem.data.formats.preference import REASONING, Message, Preference
from tandem.data.text.chat import SHIELD
from tandem.data.text.template import Rendered, Template, as_answer, as_messages
from tandem.data.text.tokens import pairs_of

NO_SYSTEM = "system turns that the chat template leaves out"
TEMPLATED = "prompts that hold tokens of a chat template, put inside a user turn"
TAGGED = "prompts with Human: and Assistant: tags, put inside a user turn"
AS_TEXT = "messages that are written as a text, and taken as one"
MISSING = "prompts or completions that only say nan, None or null, as tables write a missing value"
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
MESSAGES_AS_TEXT = re.compile(r"""\s*(array\()?\[?\s*\{\s*['"](role|from|content|value)['"]\s*:""")
ROLE_FIELD = re.compile(r"""['"](role|from)['"]\s*:\s*['"](system|user|assistant|tool|human|gpt)['"]""")
NO_VALUE = frozenset(["nan", "NaN", "NAN", "None", "null", "NULL", "<NA>", "NaT", "#N/A", "undefined"])
MIN_PROMPT_CHARACTERS = 10  # a completion may begin with a shorter prompt by coincidence
# A text is a dialogue if it begins with a Human: tag, has both tags, or ends with an Assistant: tag.
HUMAN = re.compile(r"(?:\A|\n)\s*(?:#+ ?)?Human:")
ASSISTANT = re.compile(r"(?:\A|\n)\s*(?:#+ ?)?Assistant:")
ENDS_WITH_ASSISTANT = re.compile(r"(?:\A|\s)(?:#+ ?)?(?:Assistant|ASSISTANT):\s*\Z")


def notes_on(preference: Preference, rendered: Rendered, template: Template, pairing: str) -> Iterator[str]:
    """Yield a note for each thing that looks wrong in a row. The row is used anyway."""
    yield from preference.notes
    completions = rendered.completions
    text = rendered.prompt + "".join([part.text for parts in completions for part in parts])
    if len(completions) > 2 and any(completions[a] == completions[b] for a, b in pairs_of(preference, pairing)):
        yield "pairs of identical completions, left out"
    if any(_is_left_out(reasoning, text, _contents(preference)) for reasoning in _reasoning(preference)):
        yield "reasoning that the chat template leaves out"
    if SHIELD not in text:
        yield from _template_notes(preference, rendered, text)
    if isinstance(preference.prompt, str):
        yield from _misread_notes(preference.prompt, preference)
    if not rendered.adds_bos:  # raw text may have any markup
        yield from _markup_notes(preference.prompt, template)
    if _is_missing(preference):
        yield MISSING
    if CONTROL.search(text):
        yield "control characters in the text"
    if SHIELD in text:
        yield "special tokens spelled in a message, encoded as plain text"


def _is_missing(preference: Preference) -> bool:
    """Whether the last paragraph of the prompt, or the last message of a completion, is only a word such as nan or None."""
    last = as_messages(preference.prompt)[-1]
    # An Alpaca `input` is the last paragraph of the prompt.
    _, _, paragraph = last.content.rpartition("\n\n") if last.role == "user" else ("", "", "")
    ends = (as_answer(completion.answer)[-1].content for completion in preference.completions)
    return any(text.strip() in NO_VALUE for text in (paragraph, *ends))


def _markup_notes(prompt: str | tuple[Message, ...], template: Template) -> Iterator[str]:
    """Yield notes on turn markers and on Human: or Assistant: tags in the prompt.

    The chat template puts this markup inside a user turn, as plain text.
    """
    user_texts = [turn.content for turn in as_messages(prompt) if turn.role == "user"]
    if any(map(template.turn_tokens.search, user_texts)):
        yield TEMPLATED
    if isinstance(prompt, str) and _is_tagged(prompt):
        yield TAGGED


def _is_tagged(prompt: str) -> bool:
    if "Assistant:" not in prompt and "Human:" not in prompt and "ASSISTANT:" not in prompt:
        return False
    first = HUMAN.search(prompt)
    is_first = first is not None and not prompt[: first.start()].strip()
    return is_first or bool(first and ASSISTANT.search(prompt)) or bool(ENDS_WITH_ASSISTANT.search(prompt))


def _misread_notes(prompt: str, preference: Preference) -> Iterator[str]:
    """Yield notes on lists of messages that are given as one text, and on completions that begin with their prompt."""
    answers = [completion.answer for completion in preference.completions if isinstance(completion.answer, str)]
    if any(MESSAGES_AS_TEXT.match(text) and ROLE_FIELD.search(text) for text in (prompt, *answers)):
        yield AS_TEXT
    if len(prompt) >= MIN_PROMPT_CHARACTERS and any(answer.startswith(prompt) for answer in answers):
        yield "completions that begin with their prompt"


def _template_notes(preference: Preference, rendered: Rendered, text: str) -> Iterator[str]:
    """Yield notes on content that the chat template leaves out, and on text that it adds to completions."""
    turns = as_messages(preference.prompt)
    contents = [message.content for message in turns]
    left_out_roles = {
        message.role
        for i, message in enumerate(turns)
        if _is_left_out(message.content.strip(), rendered.prompt, contents[:i] + contents[i + 1 :])
    }
    if "system" in left_out_roles:
        yield NO_SYSTEM
    if left_out_roles - {"system"}:
        yield "turns of the prompt that the chat template leaves out"
    functions = [tool.get("function", tool) for tool in preference.tools]
    others = _contents(preference) if functions else []
    if any(_is_left_out(str(one.get("name", "")), text, others) for one in functions if isinstance(one, Mapping)):
        yield "tools that the chat template leaves out"
    for completion, parts in zip(preference.completions, rendered.completions, strict=True):
        if isinstance(completion.answer, str) and not parts[0].text.lstrip().startswith(completion.answer.strip()[:20]):
            yield "answers that the chat template begins with more text, which is scored"
            return


def _contents(preference: Preference) -> list[str]:
    """Return the contents of all messages of a preference."""
    answers = [as_answer(completion.answer) for completion in preference.completions]
    return [message.content for message in chain(as_messages(preference.prompt), *answers)]


def _is_left_out(words: str, text: str, others: Iterable[str]) -> bool:
    """Whether the chat template left out `words`, a text from the row.

    This is assumed if `text`, the rendered conversation, contains `words` no more often than `others`, the other texts of
    the row.
    """
    return bool(words) and text.count(words) <= sum(other.count(words) for other in others)


def _reasoning(preference: Preference) -> Iterator[str]:
    """Yield the reasoning texts of the completions, if they are separate fields of the messages."""
    answers = [completion.answer for completion in preference.completions if not isinstance(completion.answer, str)]
    for message in chain.from_iterable(answers):
        yield from (text.strip() for key in REASONING if isinstance(text := message.more.get(key), str))

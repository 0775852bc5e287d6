"""Conversations in which the assistant calls tools, and a chat template that writes them."""

from typing import Any

from letters import letter_tokenizer
from rows import KEYS, pair, said

from tandem.data.formats.formats import read_preference
from tandem.data.formats.preference import Preference
from tandem.data.formats.prompt_files import Wording
from tandem.data.text.template import Template

# tools:add.<end>
# user:hi<end>
# assistant:well call add c d<end>
# tool:four<end>
# assistant:four.<end>
TOOLS = (
    "{% if tools %}{{ 'tools:' }}{% for t in tools %}{{ t.function.name + '.' }}{% endfor %}{{ '<end>\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role + ':' + m.content }}{% for call in m.tool_calls or [] %}"
    "{{ ' call ' + call.function.name }}"
    "{% for name, value in call.function.arguments.items() %}{{ ' ' + name + ' ' + value }}{% endfor %}{% endfor %}"
    "{{ '<end>\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TOKENIZER = letter_tokenizer()
CALLING = Template(TOKENIZER, TOOLS, {})
ADD = {"type": "function", "function": {"name": "add", "parameters": {"c": "number"}}}


def calls(content: Any, name: str = "add", **arguments: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def four(start: str | None = None, **arguments: str) -> list[dict[str, Any]]:
    """A completion that calls a tool, gets "four" and repeats it."""
    return [calls(start, **arguments), said("tool", "four"), said("assistant", "four.")]


def read(**changes: Any) -> Preference:
    """The preference of "yes" over "no" as the answer to "Hi", with changes."""
    return read_preference(pair(**changes), KEYS, "BinaryPreferenceDataset", Wording())

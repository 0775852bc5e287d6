"""Tool calls as templates want them, and templates that leave them out."""

from typing import Any

import pytest
from calling import CALLING, TOKENIZER, TOOLS, calls, read
from rows import said
from sentences import model

from tandem.data.read.sources import RowError
from tandem.data.text.sentencepiece_model import SentencePiece
from tandem.data.text.template import Template

# A call as most templates write it, {"name": "add", "arguments": {"c": "d"}}; as one that joins texts does; as one that takes
# either; and as one that looks at calls only where nothing is said.
AS_JSON = TOOLS.replace(
    "{% for name, value in call.function.arguments.items() %}{{ ' ' + name + ' ' + value }}{% endfor %}",
    "{{ ' ' + call.function.arguments | tojson }}",
)
AS_TEXT = AS_JSON.replace("call.function.arguments | tojson", "call.function.arguments")
AS_EITHER = AS_JSON.replace(
    "call.function.arguments | tojson",
    "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson)",
)
WHERE_NULL = AS_JSON.replace("m.content }}", "(m.content or '') }}").replace(
    "m.tool_calls or []", "(m.tool_calls if m.content is none else []) or []"
)
WITHOUT = TOOLS[: TOOLS.index("{% for call in")] + TOOLS[TOOLS.index("{{ '<end>\n' }}{% endfor %}{% if add") :]


def written(source: str, arguments: Any, content: str = "", tokenizer: Any = TOKENIZER) -> str:
    turn = calls(content)
    turn["tool_calls"][0]["function"]["arguments"] = arguments
    return Template(tokenizer, source, {}).render(read(chosen=[turn])).completions[0][0].text


@pytest.mark.parametrize("source", [AS_JSON, AS_TEXT, AS_EITHER, WHERE_NULL], ids=["json", "text", "either", "null"])
@pytest.mark.parametrize("arguments", [{"c": "d"}, '{"c": "d"}'], ids=["object", "text"])
def test_arguments_are_written_as_json_once_whichever_way_the_data_has_them(source, arguments):
    assert written(source, arguments) == ' call add {"c": "d"}<end>'


def test_a_template_that_needs_null_contents_gets_them_with_a_sentencepiece_model():
    assert ' call add {"c": "d"}' in written(WHERE_NULL, {"c": "d"}, tokenizer=SentencePiece(model()))


@pytest.mark.parametrize(
    ("tool_calls", "message"),
    [
        ("foo", "chosen[0].tool_calls: a text, not a list of calls."),
        ([3], "chosen[0].tool_calls: a list, not a list of calls."),
        ([{"function": {"arguments": {}}}], "chosen[0].tool_calls[0]: the function has no name."),
        ([{"function": "add"}], "chosen[0].tool_calls[0]: the function has no name."),
        ([{"name": "add", "arguments": "c, d"}], "chosen[0].tool_calls[0]: the arguments are not JSON."),
        ([{"name": "add", "arguments": '{"c": '}], "chosen[0].tool_calls[0]: the arguments are not JSON."),
        ([{"name": "add", "arguments": "[3]"}], "chosen[0].tool_calls[0]: the arguments are a list, not an object."),
        ([{"name": "add", "arguments": 3}], "chosen[0].tool_calls[0]: the arguments are 3, not an object."),
    ],
)
def test_a_malformed_call_is_refused_with_its_place(tool_calls, message):
    answer = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    with pytest.raises(RowError) as caught:
        read(chosen=[answer])
    assert (caught.value.reason, caught.value.message) == ("bad tool call", message)


@pytest.mark.parametrize("arguments", [{}, None, "", "{}"])
def test_a_call_may_have_no_arguments(arguments):
    call = {"function": {"name": "add"} if arguments is None else {"name": "add", "arguments": arguments}}
    answer = read(chosen=[{"role": "assistant", "content": "", "tool_calls": [call]}]).completions[0].answer
    assert answer[0].more["tool_calls"] == [call]


def test_reasoning_is_a_text():
    with pytest.raises(RowError) as caught:
        read(chosen=[{"role": "assistant", "content": "yes", "reasoning_content": 3}])
    assert caught.value.message == "chosen[0].reasoning_content: 3, not a text."


def test_the_content_of_a_turn_with_a_call_is_kept():
    assert written(AS_JSON, {}, content="well") == "well call add {}<end>"


@pytest.mark.parametrize("said_elsewhere", ["hi", "add", "call add"])
def test_a_call_that_the_template_leaves_out_is_refused_even_if_its_name_occurs_elsewhere(said_elsewhere):
    silent = Template(TOKENIZER, WITHOUT, {})
    with pytest.raises(RowError) as caught:
        silent.render(read(prompt=said_elsewhere, chosen=[calls("well")]))
    assert (caught.value.reason, caught.value.message) == (
        "tool call not written",
        "the chat template leaves out the call of 'add'. Set one that renders tool calls with "
        "policy.tokenizer.chat_template=FILE.jinja.",
    )


def test_a_call_in_the_prompt_that_the_template_leaves_out_is_refused():
    asked = [said("user", "hi"), calls(""), said("tool", "four")]
    with pytest.raises(RowError, match="leaves out the call of 'add'"):
        Template(TOKENIZER, WITHOUT, {}).render(read(prompt=asked))
    assert " call add<end>" in CALLING.render(read(prompt=asked)).prompt


def test_a_template_that_knows_its_tools_is_believed():
    knowing = TOOLS.replace("' call ' +", "' call ' + {'add': ''}[call.function.name] +")
    rendered = Template(TOKENIZER, knowing, {}).render(read(chosen=[calls("")]))
    assert rendered.completions[0][0].text == " call add<end>"

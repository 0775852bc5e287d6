"""Completions of several messages as texts: what the assistant says is scored, what tools answer is not."""

import json

import pytest
from calling import ADD, CALLING, TOKENIZER, TOOLS, calls, four, read
from rows import KEYS, pair, refusal, row, said

from tandem.data.formats.formats import FORMATS, read_preference
from tandem.data.formats.preference import Preference
from tandem.data.formats.prompt_files import Wording
from tandem.data.read.sources import RowError
from tandem.data.text.template import Part, Rendered, Template


@pytest.mark.parametrize("key", ["images", "video"])
def test_a_row_that_shows_more_than_texts_is_refused(key):
    error = refusal(
        lambda source, keys: read_preference(source, keys, "BinaryPreferenceDataset", Wording()), pair(**{key: ["a"]})
    )
    assert error == (
        "bad",
        "not text",
        f"{key}: only text can be trained on. Remove this column, or the rows that use it.",
    )
    assert read(**{key: []}) == read()


# Texts


def test_assistant_turns_are_scored_with_their_end_and_tool_turns_are_not():
    assert CALLING.render(read(prompt="hi", chosen=four("well"), rejected="no")) == Rendered(
        "user:hi<end>\nassistant:",
        (
            (
                Part("well call add<end>"),
                Part("\ntool:four<end>\nassistant:", scored=False),
                Part("four.<end>"),
            ),
            (Part("no<end>"),),
        ),
        adds_bos=False,
    )


def test_the_parts_put_together_are_the_conversation_as_the_template_writes_it():
    turns = [calls("so"), said("tool", "one"), said("tool", "two"), calls(""), *four()[1:]]
    rendered = CALLING.render(read(prompt="hi", chosen=turns, rejected="no"))
    whole = TOKENIZER.apply_chat_template([said("user", "hi"), *turns], chat_template=TOOLS, tokenize=False)
    assert rendered.prompt + "".join(part.text for part in rendered.completions[0]) + "\n" == whole
    assert [(part.text, part.scored) for part in rendered.completions[0]] == [
        ("so call add<end>", True),
        ("\ntool:one<end>\ntool:two<end>\nassistant:", False),  # several tools answer one after another
        (" call add<end>", True),
        ("\ntool:four<end>\nassistant:", False),
        ("four.<end>", True),
    ]


@pytest.mark.parametrize("without", [{"content": None}, {"content": ""}, {}])
def test_a_tool_call_needs_no_content(without):
    turn = {k: v for k, v in calls("").items() if k != "content"} | without
    assert CALLING.render(read(chosen=[turn], rejected="no")).completions[0] == (Part(" call add<end>"),)


def test_a_message_without_content_or_calls_is_an_empty_completion():
    silent = [calls(""), said("tool", "four"), said("assistant", " ")]
    error = refusal(FORMATS["BinaryPreferenceDataset"].read, pair(chosen=silent))
    assert error == ("filtered", "empty completion", "a completion is empty.")


def test_a_tool_may_answer_nothing():
    rendered = CALLING.render(read(chosen=[calls(""), said("tool", ""), said("assistant", "yes")]))
    assert rendered.completions[0][1] == Part("\ntool:<end>\nassistant:", scored=False)


def test_a_template_that_does_not_end_turns_leads_on_and_only_the_last_gets_eos():
    bare = Template(TOKENIZER, TOOLS.replace("<end>", ""), {})
    assert bare.render(read(chosen=four("so"), rejected="no")).completions == (
        (Part("so call add\n"), Part("tool:four\nassistant:", scored=False), Part("four.\n</s>")),
        (Part("no\n</s>"),),
    )


def test_a_template_that_rewrites_earlier_turns_is_refused():
    forgetful = Template(TOKENIZER, TOOLS.replace("m.content }}", "(m.content if loop.last else '') }}", 1), {})
    with pytest.raises(RowError) as caught:
        forgetful.render(read(prompt=[said("user", "hi")], chosen=four("so"), rejected="no"))
    assert caught.value.reason == "prompt is not a prefix"


def test_a_special_token_that_opens_a_tool_call_does_not_end_the_turn():
    opens = Template(TOKENIZER, TOOLS.replace("' call '", "'</s>'"), {})  # as [TOOL_CALLS] does
    assert opens.render(read(chosen=four("so"), rejected="no")).completions[0] == (
        Part("so</s>add<end>"),
        Part("\ntool:four<end>\nassistant:", scored=False),
        Part("four.<end>"),
    )


def test_an_answer_that_the_next_header_holds_too_ends_with_its_own_turn():
    always = Template(TOKENIZER, TOOLS.replace("{% if add_generation_prompt %}assistant:{% endif %}", "assistant:"), {})
    assert always.render(read(chosen="a", rejected="no")).completions == ((Part("a<end>"),), (Part("no<end>"),))


# Tools


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])])
def test_tools_reach_the_template_from_a_list_or_a_text(tools):
    assert CALLING.render(read(tools=tools)).prompt == "tools:add.<end>\nuser:Hi<end>\nassistant:"


BLANK = " "


@pytest.mark.parametrize("none", [None, [], "", "[]", "null", BLANK])
def test_no_tools_are_none(none):
    assert read(tools=none).tools == ()
    assert CALLING.render(read(tools=none)).prompt == "user:Hi<end>\nassistant:"


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("add", "tools: the text is not JSON."),
        ("{'type': 'function'}", "tools: the text is not JSON."),
        ({"name": "add"}, "tools: an object, not a list of objects that describe tools."),
        ('{"name": "add"}', "tools: an object, not a list of objects that describe tools."),
        (["add"], "tools[0]: a text, not an object that describes a tool."),
        ({}, "tools: an object, not a list of objects that describe tools."),
        (7, "tools: 7, not a list of objects that describe tools."),
    ],
)
def test_tools_that_are_none_are_refused(tools, message):
    def reads(source, keys):
        return read_preference(source, keys, "BinaryPreferenceDataset", Wording())

    assert refusal(reads, pair(tools=tools)) == ("bad", "bad tools", message)


def test_half_a_character_in_a_tool_or_a_call_is_refused():
    with pytest.raises(RowError) as caught:
        read(tools=[{"function": {"name": "\ud800"}}])
    assert (caught.value.reason, caught.value.message) == (
        "lone surrogate",
        "tools: an incomplete character (a lone surrogate) at position 0. Remove it.",
    )
    with pytest.raises(RowError) as caught:
        read(chosen=[calls("", **{"a\ud800": "b"})])
    assert (
        caught.value.message
        == "chosen[0].tool_calls: an incomplete character (a lone surrogate) at position 1. Remove it."
    )


def test_tools_nested_too_deeply_in_a_text_are_refused():
    with pytest.raises(RowError):
        read(tools="[" * 100_000)


@pytest.mark.parametrize("changes", [{"tools": [ADD]}, {"chosen": four()}, {"chosen": [calls("")]}])
def test_tools_calls_and_several_messages_need_a_template(changes):
    with pytest.raises(RowError) as caught:
        Template(TOKENIZER, None, {}).render(read(**changes))
    assert (caught.value.reason, str(caught.value)) == (
        "messages without a template",
        "pairs.jsonl:3: tools, tool calls and completions of several messages need a chat template. Set "
        "policy.tokenizer.chat_template=FILE.jinja.",
    )


# Which roles a completion may have


@pytest.mark.parametrize(
    ("chosen", "reason", "message"),
    [
        (
            [calls(""), said("tool", "four")],
            "wrong roles",
            "chosen: roles assistant, tool, but a completion is one assistant message, or assistant and tool messages "
            "that end in an assistant message.",
        ),
        (
            [said("assistant", "a"), said("user", "b"), said("assistant", "c")],
            "wrong roles",
            "chosen: roles assistant, user, assistant, but a completion is one assistant message, or assistant and "
            "tool messages that end in an assistant message.",
        ),
        (
            [said("system", "a"), said("assistant", "b")],
            "wrong roles",
            "chosen: roles system, assistant, but a completion is one assistant message, or assistant and tool "
            "messages that end in an assistant message.",
        ),
        ([said("tool", "a"), said("assistant", "b")], "roles out of order", "chosen[0]: role tool cannot come first."),
        (
            [said("assistant", "a"), said("assistant", "b")],
            "roles out of order",
            "chosen[1]: role assistant cannot come after assistant.",
        ),
        ([said("assistant", None)], "null", "chosen[0].content is null. Give it a value."),
        ([calls(7)], "wrong type", "chosen[0].content: a number, not a text."),
    ],
)
def test_completions_of_other_roles_are_refused(chosen, reason, message):
    assert refusal(FORMATS["BinaryPreferenceDataset"].read, pair(chosen=chosen)) == ("bad", reason, message)


def test_two_identical_calls_are_filtered():
    error = refusal(FORMATS["BinaryPreferenceDataset"].read, pair(chosen=four(), rejected=four()))
    assert error == (
        "filtered",
        "equal completions",
        "chosen and rejected are identical, so there is no preference to learn.",
    )


# Whole conversations


def from_conversations(chosen: list, rejected: list) -> Preference:
    return FORMATS["implicit_prompt"].read(row({"chosen": chosen, "rejected": rejected}), KEYS)


def roles(messages) -> str:
    return "text" if isinstance(messages, str) else " ".join(message.role for message in messages)


ASKED = said("user", "hi")


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        # Both hear the same tool: its answer belongs to the prompt.
        ([ASKED, *four()], [ASKED, *four()[:2], said("assistant", "two.")], "user assistant tool", ["text", "text"]),
        # They hear other things from it: the prompt ends before the call, which both made.
        (
            [ASKED, *four()],
            [ASKED, calls(None), said("tool", "two"), said("assistant", "four.")],
            "user",
            ["assistant tool assistant"] * 2,
        ),
        # One hears a tool more.
        (
            [ASKED, *four()],
            [ASKED, *four()[:2], said("tool", "two"), said("assistant", "two.")],
            "user",
            ["assistant tool assistant", "assistant tool tool assistant"],
        ),
        # One calls and one answers at once.
        ([ASKED, *four()], [ASKED, said("assistant", "no")], "user", ["assistant tool assistant", "text"]),
        # An earlier exchange belongs to both.
        (
            [ASKED, *four(), ASKED, *four("so")],
            [ASKED, *four(), ASKED, said("assistant", "no")],
            "user assistant tool assistant user",
            ["assistant tool assistant", "text"],
        ),
        # The shorter one is how the longer begins, up to its call.
        ([ASKED, *four()], [ASKED, calls(None)], "user", ["assistant tool assistant", "assistant"]),
    ],
)
def test_the_prompt_is_the_longest_common_beginning_that_an_assistant_turn_follows(chosen, rejected, prompt, answers):
    found = from_conversations(chosen, rejected)
    assert roles(found.prompt) == prompt
    assert [roles(completion.answer) for completion in found.completions] == answers
    assert [completion.rank for completion in found.completions] == [0, 1]


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ([ASKED, *four()], [said("user", "ho"), *four()]),
        ([ASKED, *four(), ASKED, *four()], [ASKED, *four("so"), ASKED, *four()]),
        ([ASKED, *four(), ASKED, said("assistant", "yes")], [ASKED, *four()]),
    ],
)
def test_conversations_with_different_later_user_turns_are_filtered(chosen, rejected):
    with pytest.raises(RowError) as caught:
        from_conversations(chosen, rejected)
    assert (caught.value.kind, caught.value.reason, caught.value.message) == (
        "filtered",
        "prompts differ",
        "chosen and rejected do not answer the same conversation.",
    )


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_conversation_that_does_not_end_in_the_assistants_turn_is_refused(role):
    last = [said("assistant", "so"), ASKED] if role == "user" else four()[:2]
    error = refusal(FORMATS["implicit_prompt"].read, row({"chosen": [ASKED, *last], "rejected": [ASKED, *four()]}))
    assert error == ("bad", "wrong roles", f"chosen ends in a {role} turn; it must end in an assistant turn.")

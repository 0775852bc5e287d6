"""How preferences become texts: prompt as prefix, one end of turn, and what is said of a template that cannot do it."""

import pytest
from letters import CHAT, letter_tokenizer

from tandem.config.sections.policy import Tokenizer as TokenizerConfig
from tandem.data.formats.preference import Completion, Message, Preference
from tandem.data.read.sources import RowError
from tandem.data.text.template import Part, Rendered, Template, make_template
from tandem.errors import ConfigError

TOKENIZER = letter_tokenizer()
ANOTHER = "Set another with policy.tokenizer.chat_template=FILE.jinja, or use conversations that it accepts."
PAIR = Preference("hi", (Completion("yes", 0), Completion("no", 1)), "pairs.jsonl:3")


def with_template(source: str | None, **kwargs) -> Template:
    return Template(TOKENIZER, source, kwargs)


def refusal(template: Template, preference: Preference = PAIR) -> RowError:
    with pytest.raises(RowError) as caught:
        template.render(preference)
    assert (caught.value.kind, caught.value.place) == ("bad", "pairs.jsonl:3")
    return caught.value


def texts(*completions: str) -> tuple[tuple[Part, ...], ...]:
    return tuple((Part(text),) for text in completions)


def of_text(text: str) -> Preference:
    return Preference("hi", (Completion(text, 0), Completion("no", 1)), "pairs.jsonl:3")


# Chat templates


def test_the_prompt_ends_where_the_answer_begins_and_the_answer_with_its_end_of_turn():
    assert with_template(CHAT).render(PAIR) == Rendered(
        "user:hi<end>\nassistant:", texts("yes<end>", "no<end>"), adds_bos=False
    )


def test_prompt_and_completion_joined_are_the_conversation_up_to_its_end():
    messages = (Message("system", "be kind"), Message("user", "hi"), Message("assistant", "ho"), Message("user", "so?"))
    rendered = with_template(CHAT).render(Preference(messages, PAIR.completions, "x"))
    conversation = [{"role": m.role, "content": m.content} for m in (*messages, Message("assistant", "yes"))]
    whole = TOKENIZER.apply_chat_template(conversation, chat_template=CHAT, tokenize=False)
    assert whole == rendered.prompt + rendered.completions[0][0].text + "\n"


def test_a_plain_prompt_is_the_users_turn():
    as_message = Preference((Message("user", "hi"),), PAIR.completions, PAIR.place)
    assert with_template(CHAT).render(PAIR) == with_template(CHAT).render(as_message)


def test_the_newline_after_the_end_of_turn_is_dropped_and_no_other():
    assert with_template(CHAT).render(of_text("a\n")).completions[0] == (Part("a\n<end>"),)


def test_an_end_of_turn_that_is_also_the_padding_token_ends_the_answer_alone():
    tokenizer = letter_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<end>", "eos_token": "<stop>"})
    template = Template(tokenizer, CHAT, {})
    assert template.render(PAIR).completions == texts("yes<end>", "no<end>")
    assert template.pads_with_end
    assert not with_template(CHAT).pads_with_end


def test_a_template_that_does_not_end_the_turn_gets_eos_once():
    bare = CHAT.replace("<end>", "")
    assert with_template(bare).render(PAIR).completions == texts("yes\n</s>", "no\n</s>")


def test_a_template_that_ends_in_eos_gets_no_second():
    ending = "{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}"
    assert with_template(ending).render(PAIR) == Rendered("hi</s>", texts("yes</s>", "no</s>"), adds_bos=False)


def test_values_for_a_template_are_refused_where_there_is_none():
    with pytest.raises(ConfigError) as caught:
        make_template(letter_tokenizer(), TokenizerConfig(chat_template=None, chat_template_kwargs={"date": "today"}))
    assert str(caught.value) == (
        "policy.tokenizer.chat_template_kwargs: they have no effect without a chat template. Leave them out."
    )


def test_a_value_that_the_template_does_not_read_is_refused():
    tokenizer = letter_tokenizer(chat_template=CHAT + "{{ date if thinking else '' }}")
    make_template(tokenizer, TokenizerConfig(chat_template_kwargs={"date": "today", "thinking": False}))
    with pytest.raises(ConfigError) as caught:
        make_template(tokenizer, TokenizerConfig(chat_template_kwargs={"thinkin": False}))
    assert str(caught.value) == (
        "policy.tokenizer.chat_template_kwargs.thinkin: the chat template does not use this value. The template uses "
        "add_generation_prompt, date, messages, thinking."
    )


def test_kwargs_reach_the_template():
    template = with_template("{{ mood }}{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}", mood="calm")
    assert template.render(PAIR).prompt == "calmhi</s>"


def test_a_template_that_raises_is_reported_with_its_reason():
    error = refusal(with_template("{{ raise_exception('no\n  turns') }}"))
    assert (error.reason, str(error)) == (
        "template fails",
        f"pairs.jsonl:3: the chat template fails: no turns. {ANOTHER}",
    )


def test_a_template_that_does_not_parse_is_reported_with_its_reason():
    assert str(refusal(with_template("{% for %}"))) == (
        "pairs.jsonl:3: the chat template is malformed in line 1: Expected an expression, got 'end of statement block'. "
        "Set another with policy.tokenizer.chat_template=FILE.jinja."
    )


def test_a_template_that_changes_the_prompt_is_reported_with_the_first_difference():
    changing = "{{ messages|length }}{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}"
    error = refusal(with_template(changing))
    assert (error.reason, error.message) == (
        "prompt is not a prefix",
        "the chat template renders the prompt differently when the answer follows: ...'1hi</s>' becomes "
        "...'2hi</s>yes</s>'. "
        "Set a template that does not change the prompt with policy.tokenizer.chat_template=FILE.jinja.",
    )


def test_a_template_that_writes_less_with_an_answer_is_refused():
    shrinking = "{{ messages[-1].content }}{% if add_generation_prompt %}</s>{% endif %}"
    assert refusal(with_template(shrinking), of_text("hi")).message == (
        "the chat template renders the prompt differently when the answer follows: ...'hi</s>' becomes ...'hi'. "
        "Set a template that does not change the prompt with policy.tokenizer.chat_template=FILE.jinja."
    )


def test_the_probe_is_a_rendered_conversation_and_empty_for_raw_text():
    assert with_template(CHAT).probe() == "user:How far is the moon?<end>\nassistant:"
    assert with_template(None).probe() == ""


# Raw text


def test_raw_text_is_kept_and_ends_in_eos_once():
    rendered = with_template(None).render(Preference("hi ", (Completion("yes", 0), Completion("no</s>", 1)), "x"))
    assert rendered == Rendered("hi ", texts("yes</s>", "no</s>"), adds_bos=True)


def test_raw_text_already_ended_loses_what_blank_follows():
    assert with_template(None).render(of_text("yes<end>\n\n")).completions[0] == (Part("yes<end>"),)


def test_an_end_of_turn_inside_a_text_does_not_end_it():
    assert with_template(None).render(of_text("yes<end> or no")).completions[0] == (Part("yes<end> or no</s>"),)


def test_messages_without_a_template_are_refused_with_the_way_out():
    error = refusal(with_template(None), Preference((Message("user", "hi"),), PAIR.completions, PAIR.place))
    assert (error.reason, str(error)) == (
        "messages without a template",
        "pairs.jsonl:3: the prompt is a list of messages, but there is no chat template to render it. Set "
        "policy.tokenizer.chat_template=FILE.jinja, or use prompts of plain text.",
    )


# What the configuration asks for


def test_the_configuration_chooses_the_tokenizers_own_template_none_or_a_file(tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages }}", encoding="utf-8")
    tokenizer = letter_tokenizer(chat_template=CHAT)
    assert make_template(tokenizer, TokenizerConfig()).source == CHAT
    assert make_template(tokenizer, TokenizerConfig(chat_template=None)).source is None
    assert make_template(tokenizer, TokenizerConfig(chat_template=str(file))).source == "{{ messages }}"
    assert make_template(letter_tokenizer(), TokenizerConfig()).source is None


def test_a_template_file_that_is_not_utf8_is_refused(tmp_path):
    file = tmp_path / "a.jinja"
    file.write_bytes(b"{# caf\xc3\xa9 #}\n\n{# caf\xe9 #}")
    with pytest.raises(ConfigError) as caught:
        make_template(TOKENIZER, TokenizerConfig(chat_template=str(file)))
    assert str(caught.value) == (
        f"policy.tokenizer.chat_template = {file}: not UTF-8 at byte 6 of line 3. Save the file as UTF-8."
    )


def test_a_template_file_that_is_missing_is_refused(tmp_path):
    file = f"{tmp_path}/no.jinja"
    with pytest.raises(ConfigError) as caught:
        make_template(TOKENIZER, TokenizerConfig(chat_template=file))
    assert str(caught.value) == (
        f"policy.tokenizer.chat_template = {file}: cannot be read (No such file or directory). Check the path."
    )


def test_a_template_that_is_neither_a_file_nor_a_known_word_is_refused():
    with pytest.raises(ConfigError) as caught:
        make_template(TOKENIZER, TokenizerConfig(chat_template="chatml"))
    assert str(caught.value) == (
        "policy.tokenizer.chat_template = 'chatml': not a known value. Set default, null (raw text), or a file ending in .jinja."
    )


# Plain text as it is


def as_is(source: str | None = CHAT) -> Template:
    return Template(TOKENIZER, source, {}, plain_text_as_is=True)


def test_with_plain_text_as_is_only_rows_of_messages_are_rendered_by_the_template():
    assert as_is().render(PAIR) == Rendered("hi", texts("yes</s>", "no</s>"), adds_bos=True)
    as_messages = Preference((Message("user", "hi"),), PAIR.completions, "x")
    assert as_is().render(as_messages) == with_template(CHAT).render(as_messages)
    calls = Message("assistant", "", {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]})
    with_calls = Preference("hi", (Completion((calls,), 0), Completion("no", 1)), "x")
    assert refusal_reason(with_calls) == "tool call not written"


def refusal_reason(preference: Preference) -> str:
    with pytest.raises(RowError) as caught:
        as_is().render(preference)
    return caught.value.reason


@pytest.mark.parametrize("source", [None, CHAT])
@pytest.mark.parametrize(("text", "ended"), [("a<end>", "a<end></s>"), ("a</s>", "a</s>"), ("a</s>\n", "a</s>\n</s>")])
def test_with_plain_text_as_is_every_completion_ends_in_eos_as_in_trl(source, text, ended):
    assert as_is(source).render(of_text(text)).completions == texts(ended, "no</s>")


def test_the_setting_makes_the_template():
    assert make_template(TOKENIZER, TokenizerConfig(plain_text="as_is")).plain_text_as_is
    assert not make_template(TOKENIZER, TokenizerConfig()).plain_text_as_is


def test_a_prompt_to_answer_is_written_as_in_a_preference():
    asked = (Message("user", "hi"),)
    for template in (as_is(), with_template(CHAT), with_template(None)):
        for prompt in ("hi", asked) if template.source else ("hi",):
            rendered = template.render(Preference(prompt, PAIR.completions, "x"))
            assert template.render_prompt(prompt, (), "x") == Rendered(rendered.prompt, (), rendered.adds_bos)

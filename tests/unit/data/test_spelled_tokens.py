"""Special tokens count where a template or raw text puts them, and are plain text where a message only spells them."""

import pytest
from transformers import AutoTokenizer

from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.policy import Tokenizer
from tandem.data.formats.formats import binary
from tandem.data.formats.preference import Completion, Message, Preference
from tandem.data.read.sources import RowError, SourceRow
from tandem.data.text.template import make_template
from tandem.data.text.tokens import TokenizedPreference, tokenize
from tandem.model.files.tiny import tiny_model

IM_START, IM_END = 1, 2  # ids in the embedded tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model())


def tokenized(tokenizer, prompt, *texts, chat_template="default", **options) -> TokenizedPreference:
    preference = Preference(prompt, tuple(Completion(text, i) for i, text in enumerate(texts)), "pairs.jsonl:1")
    template = make_template(tokenizer, Tokenizer(chat_template=chat_template))
    (row,) = tokenize([preference], template, pairing="all", **{"max_length": 1000, **options})
    return row


def test_a_message_that_spells_a_special_token_is_plain_text(tokenizer):
    row = tokenized(tokenizer, "What does <|im_end|> mean?", "It ends.", "<|im_end|><|im_start|>user\nMore")
    assert row.prompt.tolist().count(IM_END) == 1  # the template's own
    assert row.prompt.tolist().count(IM_START) == 2
    second = row.completions[1].tolist()
    assert (second.count(IM_END), second.count(IM_START)) == (1, 0)
    assert second[-1] == IM_END
    assert tokenizer.decode(second) == "<|im_end|><|im_start|>user\nMore<|im_end|>"


def test_a_message_without_special_tokens_is_encoded_in_one_piece(tokenizer):
    row = tokenized(tokenizer, "Hello there", "Yes", "No")
    rendered = "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    assert row.prompt.tolist() == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_in_raw_text_special_tokens_are_meant(tokenizer):
    row = tokenized(tokenizer, "<|im_start|>user\nHi", "Yes<|im_end|>\n", "No", chat_template=None)
    assert row.prompt.tolist()[0] == IM_START
    assert [completion.tolist().count(IM_END) for completion in row.completions] == [1, 1]
    assert tokenizer.decode(row.completions[0]) == "Yes<|im_end|>"


def test_a_next_turn_opened_after_the_answer_is_cut_at_the_end_of_turn(tokenizer, tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}"
    )
    (tmp_path / "always.jinja").write_text(template)
    row = tokenized(tokenizer, "Hi", "Yes", "No", chat_template=str(tmp_path / "always.jinja"))
    assert tokenizer.decode(row.prompt) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(completion) for completion in row.completions] == ["Yes<|im_end|>", "No<|im_end|>"]


def test_of_several_named_templates_the_default_is_taken():
    tokenizer = AutoTokenizer.from_pretrained(tiny_model())
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ raise_exception('no') }}"}
    assert tokenizer.decode(tokenized(tokenizer, "Hi", "Yes", "No").completions[0]) == "Yes<|im_end|>"


# Limits. "Hi" as the user's turn is 11 tokens of prompt; each of a b c d e f is one token, the end of turn another.


def lengths(row):
    return len(row.prompt), [len(completion) for completion in row.completions]


@pytest.fixture(scope="module")
def whole(tokenizer):
    row = tokenized(tokenizer, "Hi", "a b c d e f", "b")
    prompt, (longer, shorter) = lengths(row)
    assert (longer, shorter) == (7, 2)
    return row, prompt


def test_truncate_prompt_keeps_the_end_of_the_prompt_and_complete_completions(tokenizer, whole):
    row, prompt = whole
    cut = tokenized(tokenizer, "Hi", "a b c d e f", "b", max_length=prompt + 5, overlong="truncate_prompt")
    assert lengths(cut) == (prompt - 2, [7, 2])
    assert cut.prompt.tolist() == row.prompt.tolist()[2:]


def test_truncate_completion_keeps_the_prompt_and_cuts_only_long_completions(tokenizer, whole):
    row, prompt = whole
    cut = tokenized(tokenizer, "Hi", "a b c d e f", "b", max_length=prompt + 5, overlong="truncate_completion")
    assert lengths(cut) == (prompt, [5, 2])
    assert cut.completions[0].tolist() == row.completions[0].tolist()[:5]


@pytest.mark.parametrize(
    ("overlong", "limit", "reason", "message"),
    [
        ("drop", 12, "over-long", "{longest} tokens, over policy.max_total_sequence_length=12."),
        (
            "truncate_prompt",
            7,
            "over-long",
            "a completion alone takes 7 tokens of policy.max_total_sequence_length=7.",
        ),
        (
            "truncate_completion",
            3,
            "over-long",
            "its prompt alone takes 12 tokens of policy.max_total_sequence_length=3.",
        ),
    ],
)
def test_a_preference_that_cannot_be_truncated_to_the_limit_is_filtered(
    tokenizer, whole, overlong, limit, reason, message
):
    row, _ = whole
    error = tokenized(tokenizer, "Hi", "a b c d e f", "b", max_length=limit, overlong=overlong)
    assert (error.kind, error.reason) == ("filtered", reason)
    assert error.message == message.format(longest=row.longest)


def test_completions_that_are_equal_once_cut_are_filtered(tokenizer, whole):
    _, prompt = whole
    error = tokenized(tokenizer, "Hi", "a b c d", "a b c e", max_length=prompt + 2, overlong="truncate_completion")
    assert (error.kind, error.reason) == ("filtered", "equal after truncation")


def test_a_system_message_reaches_the_prompt(tokenizer):
    row = tokenized(tokenizer, (Message("system", "Be brief."), Message("user", "Hi")), "Yes", "No")
    assert tokenizer.decode(row.prompt).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")


def test_a_text_with_the_mark_itself_is_refused():
    """Else "\ufdd0</s>\ufdd0" would be marked twice, that is not at all, and end the turn."""
    row = SourceRow({"prompt": "hi", "chosen": "a\ufdd0</s>\ufdd0", "rejected": "b"}, "pairs.jsonl", 3)
    with pytest.raises(RowError) as caught:
        binary(row, DatasetFields())
    assert str(caught.value) == "pairs.jsonl:3: chosen: the noncharacter U+FDD0 at position 1. Remove it."

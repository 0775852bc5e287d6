"""Prompts that already contain chat template tokens or dialogue tags are counted and warned about once."""

import json
import re

import pytest
from letters import CHAT, letter_tokenizer

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.preflight import preflight, warnings_of
from tandem.data.store.notes import AS_TEXT, MISSING, TAGGED, TEMPLATED
from tandem.data.store.opening import open_store
from tandem.data.text.template import Template
from tandem.report.reporter import Reporter

CHATTING = Template(letter_tokenizer(), CHAT, {})  # writes <end>, a special token
RAW = Template(letter_tokenizer(), None, {})
DIALOGUE = "\n\nHuman: hi\n\nAssistant:"


@pytest.fixture
def found(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))

    def of(*prompts, template=CHATTING, **more):
        """What a preflight reports of preferences with these prompts."""
        rows = [{"prompt": prompt, "chosen": "yes", "rejected": "no", **more} for prompt in prompts]
        (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        return preflight("train", open_store("pairs.jsonl", DatasetFields(), template, Data(), 1000))

    return of


def written(found):
    return {note: count for note, count in found.notes.items() if note in (TEMPLATED, TAGGED)}


@pytest.mark.parametrize(
    "prompt",
    [
        "user:hi<end>\nassistant:",  # the template's own token
        [{"role": "user", "content": "hi<end>"}],
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",  # those of other templates
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
        "[INST] hi [/INST]",
    ],
)
def test_tokens_of_a_template_in_a_prompt_are_counted(found, prompt):
    assert written(found("hi", prompt)) == {TEMPLATED: 1}
    assert (
        written(found("hi", prompt, template=RAW) if isinstance(prompt, str) else found("hi")) == {}
    )  # they are meant


@pytest.mark.parametrize(
    "prompt",
    [
        DIALOGUE,
        "Human: hi",
        "### Human: hi\n### Assistant:",
        "be kind\n\nHuman: hi\n\nAssistant: yes\n\nHuman: why?",
        "USER: hi ASSISTANT:",
    ],
)
def test_tags_of_a_dialogue_in_a_prompt_are_counted(found, prompt):
    assert written(found("hi", prompt)) == {TAGGED: 1}
    assert written(found("hi", prompt, template=RAW)) == {}


@pytest.mark.parametrize(
    "prompt",
    [
        "hi",
        "what is a Human: a word?",
        "who wrote Assistant: the film?",
        "<s>gone</s> is a text about web pages",
        "dear assistant: hi",
        [{"role": "user", "content": "finish this: \nHuman: hi\nAssistant:"}],
    ],
)
def test_prompts_that_only_mention_such_words_are_not(found, prompt):
    assert written(found(prompt)) == {}


def test_the_template_finds_its_turn_tokens():
    assert CHATTING.turn_tokens.search("hi<end>")
    assert not CHATTING.turn_tokens.search("hi<unk>")  # special, but not written by it


def test_each_is_warned_about_once_with_count_place_and_what_to_do(found, capsys):
    several = found("hi", "[INST] a [/INST]", "[INST] b [/INST]", DIALOGUE)
    warnings = [
        "train: tokens of a chat template in 2 prompts, the first at pairs.jsonl:2, which become plain text inside a "
        "user turn. "
        "Remove them; or, if prompts and completions are complete texts, set policy.tokenizer.chat_template=null.",
        "train: Human: or Assistant: tags in 1 prompt, the first at pairs.jsonl:4, which become part of a single user "
        "turn. Give messages, or complete dialogues as chosen and rejected (dataset_name=dialogue_text); for complete "
        "texts set policy.tokenizer.chat_template=null.",
    ]
    assert list(warnings_of(several).values()) == warnings
    Reporter("quiet").preflight([several], {})
    printed = " ".join("".join(capsys.readouterr()).split())
    assert re.findall(r"warning: (train: .*?null\.)", printed) == warnings


def test_a_set_without_any_has_no_warning(found):
    assert warnings_of(found("hi", "why?")) == {}


@pytest.mark.parametrize("word", ["nan", "NaN", "None", "null", " nan\n", "<NA>", "#N/A"])
def test_a_word_for_a_missing_value_is_counted_as_a_prompt_or_completion(found, word):
    assert found("hi", chosen=word).notes == {MISSING: 1}
    assert found("hi", rejected=[{"role": "assistant", "content": word}]).notes == {MISSING: 1}
    assert found(word, "hi").notes == {MISSING: 1}
    assert found([{"role": "user", "content": word}], "hi").notes == {MISSING: 1}
    assert found(f"add them up\n\n{word}", "hi").notes == {MISSING: 1}  # the empty input of an instruction


def test_an_answer_that_only_mentions_such_a_word_is_not_counted(found):
    assert found("is nan a number?", "none", chosen="nan is not", rejected="it says:\n\nNone").notes == {}


def test_messages_in_a_text_are_counted_though_it_is_one_message_alone(found):
    turn = {"role": "assistant", "content": "yes"}
    for text in (json.dumps(turn), json.dumps([turn], indent=2), str([turn]), f"array([{turn}], dtype=object)"):
        assert found("hi", chosen=text).notes == {AS_TEXT: 1}
    for text in ('{"value": 3}', '[{"content": "a"}]', '{"role": "admin", "content": 3}'):  # answers in JSON
        assert found("hi", chosen=text).notes == {}


def test_texts_and_labels_that_look_like_mistakes_are_warned_about(found):
    printed = warnings_of(found("hi", "why?", chosen='{"role": "assistant", "content": "a"}', rejected="nan", label=0))
    assert list(printed.values()) == [
        "train: messages written as text in 2 preferences, the first at pairs.jsonl:1, which become part of a single "
        "turn, brackets and quotes included. Give lists of messages (in csv files, as JSON).",
        "train: a prompt or completion that is only nan, None or null in 2 preferences, the first at pairs.jsonl:1, "
        "which is trained on as text. If values are missing, remove these rows or leave the values empty.",
        "train: a label of 0, -1, false or rejected in 2 preferences, the first at pairs.jsonl:1, which is ignored: "
        "chosen is preferred in every row. If it means that rejected is better, swap the two.",
    ]

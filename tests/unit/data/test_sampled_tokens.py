"""Completions that a model sampled are trained on as the tokens that it sampled, not as the tokens of their text."""

import json

import pytest
from letters import CHAT, END, EOS, ids, letter_tokenizer
from tokenizers import decoders

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.formats import read_preference
from tandem.data.formats.preference import Completion, Preference
from tandem.data.formats.prompt_files import Wording
from tandem.data.read.sources import RowError, SourceRow
from tandem.data.text.template import Template
from tandem.data.text.tokens import tokenize
from tandem.generation.generate import generate
from tandem.generation.records import make_sampling

AB = 36  # the tokenizer's own token for "ab", which is also 10, 11


def letters(chat_template: str | None = None) -> Template:
    tokenizer = letter_tokenizer(chat_template=chat_template)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return Template(tokenizer, chat_template, {})


def tokenized(template: Template, *completions: Completion):
    (found,) = tokenize([Preference("hi", completions, "out.jsonl:3")], template, pairing="best_worst", max_length=100)
    return found


@pytest.mark.parametrize("template", [None, CHAT])
def test_sampled_tokens_replace_those_of_the_text(template):
    # "cab" is c, ab for the tokenizer; the model sampled c, a, b. The second completion was cut, so it has no end.
    found = tokenized(
        letters(template),
        Completion("cab", 0, 1.0, (*ids("cab"), EOS)),
        Completion("no", 1, 0.0, tuple(ids("no"))),
    )
    assert [one.tolist() for one in found.completions] == [[*ids("cab"), EOS], ids("no")]
    assert found.unscored == ()
    end = EOS if template is None else END
    own = tokenized(letters(template), Completion("cab", 0), Completion("no", 1, None, tuple(ids("no"))))
    assert own.completions[0].tolist()[:3] == [*ids("c"), AB, end]


@pytest.mark.parametrize("sampled", [tuple(ids("cob")), (12, 99), (12, 2**31 - 1), (*ids("cab"), EOS, EOS)])
def test_tokens_of_another_text_are_refused(sampled):
    error = tokenized(letters(), Completion("cab", 0, 1.0, sampled), Completion("no", 1))
    assert isinstance(error, RowError)
    assert str(error) == (
        "out.jsonl:3: completion_ids are not the tokens of the completion in this tokenizer. Use the tokenizer of the model "
        "that sampled them, or remove completion_ids if the text was edited."
    )


def read(given: object, text: object = "cab") -> Preference:
    completions = [{"completion": text, "completion_ids": given, "score": 1}, {"completion": "no", "score": 0}]
    row = SourceRow({"prompt": "hi", "completions": completions}, "out.jsonl", 3)
    return read_preference(row, DatasetFields(), "scored", Wording())


def test_the_ids_are_read_with_the_scores():
    assert [one.sampled for one in read(ids("cab")).completions] == [tuple(ids("cab")), None]
    assert read(None).completions[0].sampled is None


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("12", "a text"),
        ([], "an empty list"),
        ([1.0], "a list with another value"),
        ([True], "a list with another value"),
        ([-1], "a list with another value"),
        ([2**31], "a list with another value"),
    ],
)
def test_ids_that_are_not_a_list_of_ids(given, what):
    with pytest.raises(RowError) as refused:
        read(given)
    assert str(refused.value) == (
        f"out.jsonl:3: completions[0].completion_ids: {what}, not a list of token ids. Correct it, or remove it."
    )


def test_messages_cannot_have_ids():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(RowError) as refused:
        read([1], [call])
    assert str(refused.value) == (
        "out.jsonl:3: completions[0].completion_ids: only a completion of plain text can have token ids. Remove them."
    )


def test_what_generate_writes_is_trained_on_as_sampled(tmp_path):
    from tandem.config.load import load_config
    from tandem.training.start.machine import this_device
    from tandem.training.start.setup import set_up

    made = generate(
        "embedded",
        ["How far is the moon?", "Why?"],
        sampling=make_sampling(temperature=1.0, num_samples=2, max_new_tokens=6),
    )
    lines = [
        {**record, "completions": [{**one, "score": i} for i, one in enumerate(record["completions"])]}
        for record in made.records
    ]
    file = tmp_path / "scored.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    loaded = load_config(
        None, ["policy.model_name=embedded", f"data.train.data_path={file}", "policy.train_global_batch_size=2"]
    )
    store = set_up(loaded.config, this_device()).plan.train.store
    found = [[one.tolist() for one in store[number].completions] for number in range(2)]
    assert found == [[one["completion_ids"] for one in record["completions"]] for record in made.records]

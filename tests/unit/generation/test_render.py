"""Prompts are rendered as in training, in a process that ends even if a template does not."""

import pytest
from letters import CHAT, END, EOS, ids, letter_tokenizer
from rows import KEYS, pair

from tandem.data.formats.formats import read_preference
from tandem.data.formats.prompt_files import Wording
from tandem.data.text.template import Template
from tandem.data.text.tokens import tokenize
from tandem.errors import DataError
from tandem.generation import render
from tandem.generation.records import Prompt
from tandem.generation.render import Renderer

pytestmark = pytest.mark.usefixtures("of_a_command")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (Template(letter_tokenizer(), CHAT, {}), [*ids("user:hi"), END, *ids("\nassistant:")]),
        (Template(letter_tokenizer(adds_bos=True), None, {}), [0, *ids("hi")]),
    ],
)
def test_ids_are_those_of_the_same_prompt_in_a_preference(template, expected):
    preference = read_preference(pair(prompt="hi"), KEYS, "BinaryPreferenceDataset", Wording())
    [trained] = tokenize([preference], template, pairing="best_worst", max_length=99)
    with Renderer(template) as renderer:
        assert renderer.ids([Prompt(0, "p:1", "hi")]) == [tuple(expected)] == [tuple(trained.prompt.tolist())]
        assert renderer.end_of_turn() == trained.completions[0][-1] == (END if template.source else EOS)


def test_many_prompts_keep_their_order():
    texts = ["a" * n for n in range(1, 150)]
    with Renderer(Template(letter_tokenizer(), None, {})) as renderer:
        found = renderer.ids([Prompt(i, "p", text) for i, text in enumerate(texts)])
    assert [len(one) for one in found] == list(range(1, 150))


def test_a_template_without_an_end_is_stopped_and_the_prompt_named(monkeypatch):
    monkeypatch.setattr(render, "ROW_SECONDS", 0.2)
    endless = "{% for m in messages %}{% if 'x' in m.content %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"  # noqa: E501
    with Renderer(Template(letter_tokenizer(), endless + CHAT, {})) as renderer:
        assert len(renderer.ids([Prompt(4, "p:5", "hi")])) == 1
        with pytest.raises(DataError) as error:
            renderer.ids([Prompt(4, "p:5", "hi"), Prompt(5, "p:6", "x")])
    assert str(error.value) == (
        "p:6: the chat template does not come to an end: 0.2 seconds passed. Give another with --chat-template FILE.jinja."
    )

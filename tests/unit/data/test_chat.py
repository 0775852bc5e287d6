"""A chat template called directly writes what transformers writes, and its sandbox stays one."""

import pytest
from jinja2.exceptions import SecurityError
from letters import letter_tokenizer

from tandem.data.text.chat import ChatTemplate

ASKED = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": "Yes."}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}:{{ m['content'] }}{{ loop.last }}{% endfor %}{{ add_generation_prompt }}",
        "{{ bos_token }}{{ eos_token }}{{ tools }}{{ documents }}{{ mood }}{{ never_given }}{{ messages | length }}",
        "{% for m in messages %}{{ m.nothing }}{{ m.nothing is defined }}{{ m.content.upper() }}{% endfor %}",
        "{% for m in messages %}{{ m.keys() | list }}{{ m.get('role') }}{{ m.items() | list }}{% endfor %}",
        "{% set kept = namespace(said='') %}{% for m in messages %}{% set kept.said = m.role %}{% endfor %}{{ kept.said }}",
        "{{ {'role': 'own', 'keys': 'shadowed'}.role }}{{ {'role': 1}['role'] }}{{ 'a'.__class__ }}{{ messages.mro }}",
    ],
)
def test_a_template_called_directly_writes_what_transformers_writes(source):
    chat = ChatTemplate(letter_tokenizer(), source, {"mood": "good"})
    several = [ASKED, ASKED[:1]]
    for add_generation_prompt in (True, False):
        own = letter_tokenizer().apply_chat_template(
            several, chat_template=source, tokenize=False, add_generation_prompt=add_generation_prompt, mood="good"
        )
        # The first time by transformers, then directly.
        for _ in range(2):
            assert chat.texts(several, [], add_generation_prompt=add_generation_prompt) == own
    assert chat._compiled is not None


def test_a_template_called_directly_cannot_change_the_messages():
    source = "{% if messages | length > 1 %}{{ messages.pop() }}{% endif %}"
    chat = ChatTemplate(letter_tokenizer(), source, {})
    chat.texts([ASKED[:1]], [], add_generation_prompt=False)
    assert chat._compiled is not None
    with pytest.raises(SecurityError, match="'pop' of 'list' object is unsafe"):
        chat.texts([ASKED], [], add_generation_prompt=False)

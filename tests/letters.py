"""A tokenizer whose tokens are letters: a is 10, b is 11, ... z is 35. It has one merge: "ab" is 36."""

from typing import Any

BOS, EOS, END, UNK = 0, 1, 2, 3
OTHERS = {" ": 4, "\n": 5, ":": 6, "?": 7, ".": 8, "!": 9}
LETTERS = {letter: 10 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}

# user:hello<end>
# assistant:
CHAT = (
    "{% for message in messages %}{{ message.role + ':' + message.content + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def letter_tokenizer(*, adds_bos: bool = False, chat_template: str | None = None) -> Any:
    """A fast tokenizer with <s>, </s> (EOS), <end> and <unk>; `adds_bos`: whether it puts <s> before plain text."""
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    special = {"<s>": BOS, "</s>": EOS, "<end>": END, "<unk>": UNK}
    tokenizer = Tokenizer(models.BPE({**special, **OTHERS, **LETTERS, "ab": 36}, [("a", "b")], unk_token="<unk>"))
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<end>"],
    )
    wrapped.chat_template = chat_template
    return wrapped


def ids(text: str) -> list[int]:
    """Token ids letter by letter, without merges: "no!" -> [23, 24, 9]."""
    return [(OTHERS | LETTERS)[letter] for letter in text]

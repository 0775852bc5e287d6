"""Twelve published tokenizers and one fixed preference: where the prompt ends, what is scored, how a completion ends.

TANDEM_TOKENIZERS names a folder with their folders in it; those that are not there are skipped. Each brings a trap: two
BOS, an end of turn that is not EOS, a header after the answer, today's date, thoughts, a system turn that moves.
"""

import os
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tandem.config.sections.policy import Tokenizer
from tandem.data.formats.preference import Completion, Message, Preference
from tandem.data.read.sources import RowError
from tandem.data.text.template import Template, make_template
from tandem.data.text.tokenizer import load_tokenizer
from tandem.data.text.tokens import TokenizedPreference, tokenize

pytestmark = pytest.mark.slow

FOLDER = Path(os.environ.get("TANDEM_TOKENIZERS", "no-tokenizers-here"))
DATE = "26 Jul 2024"
KWARGS = {"llama3_2": {"date_string": DATE}}

QUESTION = Message("user", "How far is the moon?")
PROMPTS = {
    "raw": QUESTION.content,
    "chat": (QUESTION,),
    "system": (Message("system", "Be brief."), QUESTION),
    "two_turns": (Message("user", "Hi."), Message("assistant", "Hello!"), QUESTION),
}
ANSWERS = ("About 384,000 km.", "Very far.")

# Prompt: tokens, the last one. Completions: tokens of each, the first one of each, the last one of both. ⏎ is a line break.
#   deepseek_v3: its configuration asks for a BOS, but transformers 5 puts none before a raw text.
#   llama3: its EOS is <|end_of_text|>; the template ends turns with <|eot_id|>.
#   qwen2_5: its template adds a system turn if there is none.
#   qwen3: the model writes its thoughts itself, empty ones too: four tokens more in every completion.
TABLE = """
command_r_plus  chat       12  255007 <|CHATBOT_TOKEN|>  12 4  35855 About     74340 Very      255001 <|END_OF_TURN_TOKEN|>
command_r_plus  system     18  255007 <|CHATBOT_TOKEN|>  12 4  35855 About     74340 Very      255001 <|END_OF_TURN_TOKEN|>
command_r_plus  two_turns  22  255007 <|CHATBOT_TOKEN|>  12 4  35855 About     74340 Very      255001 <|END_OF_TURN_TOKEN|>
command_r_plus  raw         7  38     ?                  12 4  35855 About     74340 Very      255001 <|END_OF_TURN_TOKEN|>
deepseek_v3     chat        9  128804 <｜Assistant｜>       8 4  18911 About     40067 Very      1      <｜end▁of▁sentence｜>
deepseek_v3     system     12  128804 <｜Assistant｜>       8 4  18911 About     40067 Very      1      <｜end▁of▁sentence｜>
deepseek_v3     two_turns  16  128804 <｜Assistant｜>       8 4  18911 About     40067 Very      1      <｜end▁of▁sentence｜>
deepseek_v3     raw         6  33     ?                   8 4  18911 About     40067 Very      1      <｜end▁of▁sentence｜>
gemma2          raw         7  235336 ?                  12 4  4398 About      9358 Very       1      <eos>
gemma3          chat       15  107    ⏎                  12 4  11040 About     26546 Very      106    <end_of_turn>
gemma3          system     19  107    ⏎                  12 4  11040 About     26546 Very      106    <end_of_turn>
gemma3          two_turns  29  107    ⏎                  12 4  11040 About     26546 Very      106    <end_of_turn>
gemma3          raw         7  236881 ?                  12 4  11040 About     26546 Very      106    <end_of_turn>
gpt2            raw         6  30     ?                   7 4  8585 About      16371 Very      50256  <|endoftext|>
gpt4o           raw         6  30     ?                   8 4  8543 About      29061 Very      199999 <|endoftext|>
llama3          chat       16  271    ⏎⏎                  8 4  10714 About     26840 Very      128009 <|eot_id|>
llama3          system     24  271    ⏎⏎                  8 4  10714 About     26840 Very      128009 <|eot_id|>
llama3          two_turns  30  271    ⏎⏎                  8 4  10714 About     26840 Very      128009 <|eot_id|>
llama3          raw         6  30     ?                   8 4  10714 About     26840 Very      128001 <|end_of_text|>
llama3_1        chat       16  271    ⏎⏎                  8 4  10714 About     26840 Very      128009 <|eot_id|>
llama3_1        system     24  271    ⏎⏎                  8 4  10714 About     26840 Very      128009 <|eot_id|>
llama3_1        two_turns  30  271    ⏎⏎                  8 4  10714 About     26840 Very      128009 <|eot_id|>
llama3_1        raw         7  30     ?                   8 4  10714 About     26840 Very      128009 <|eot_id|>
llama3_2        chat       41  271    ⏎⏎                  8 4  10714 About     26840 Very      128009 <|eot_id|>
llama3_2        system     44  271    ⏎⏎                  8 4  10714 About     26840 Very      128009 <|eot_id|>
llama3_2        two_turns  55  271    ⏎⏎                  8 4  10714 About     26840 Very      128009 <|eot_id|>
llama3_2        raw         7  30     ?                   8 4  10714 About     26840 Very      128009 <|eot_id|>
mistral_nemo    chat        9  4      [/INST]            12 4  29377 About     67724 Very      2      </s>
mistral_nemo    two_turns  16  4      [/INST]            12 4  29377 About     67724 Very      2      </s>
mistral_nemo    raw         7  1063   ?                  12 4  29377 About     67724 Very      2      </s>
qwen2_5         chat       35  198    ⏎                  12 4  10494 About     25756 Very      151645 <|im_end|>
qwen2_5         system     22  198    ⏎                  12 4  10494 About     25756 Very      151645 <|im_end|>
qwen2_5         two_turns  49  198    ⏎                  12 4  10494 About     25756 Very      151645 <|im_end|>
qwen2_5         raw         6  30     ?                  12 4  10494 About     25756 Very      151645 <|im_end|>
qwen3           chat       14  198    ⏎                  16 8  151667 <think>  151667 <think>  151645 <|im_end|>
qwen3           system     22  198    ⏎                  16 8  151667 <think>  151667 <think>  151645 <|im_end|>
qwen3           two_turns  28  198    ⏎                  16 8  151667 <think>  151667 <think>  151645 <|im_end|>
qwen3           raw         6  30     ?                  12 4  10494 About     25756 Very      151645 <|im_end|>
"""
# How the prompt of a chat ends: the header that the answer is generated behind.
HEADER = {
    "command_r_plus": "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "deepseek_v3": "How far is the moon?<｜Assistant｜>",
    "gemma3": "<end_of_turn>\n<start_of_turn>model\n",
    "llama3": "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama3_1": "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama3_2": "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral_nemo": "How far is the moon?[/INST]",
    "qwen2_5": "<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "<|im_end|>\n<|im_start|>assistant\n",
}
# The text that the template writes after the answer's end of turn, if any.
BEHIND = {
    "gemma3": "\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen2_5": "\n",
    "qwen3": "\n",
}
# Those that put a BOS before a plain text.
BEGINS_TEXTS = ("command_r_plus", "gemma2", "gemma3", "llama3_1", "llama3_2", "mistral_nemo")


class Golden(NamedTuple):
    """A row of the table; `text` names the prompt."""

    name: str
    text: str
    cells: list[str]

    @property
    def end(self) -> tuple[int, str]:
        return int(self.cells[-2]), self.cells[-1]

    @property
    def thoughts(self) -> str:
        return "<think>\n\n</think>\n\n" if "<think>" in self.cells else ""


GOLDEN = [Golden(name, text, cells) for name, text, *cells in map(str.split, TABLE.strip().splitlines())]
CHATS = [golden for golden in GOLDEN if golden.text != "raw"]


def case(golden: Golden) -> str:
    return f"{golden.name}-{golden.text}"


each_golden = pytest.mark.parametrize("golden", GOLDEN, ids=case)
each_chat = pytest.mark.parametrize("golden", CHATS, ids=case)


@cache
def tokenizer_of(name: str) -> Any:
    if not (FOLDER / name / "tokenizer.json").is_file():
        pytest.skip(f"TANDEM_TOKENIZERS: no {name} in {FOLDER}")
    return load_tokenizer(FOLDER / name)


def fresh_template(name: str, text: str, **kwargs: Any) -> Template:
    if text == "raw":
        config = Tokenizer(chat_template=None)
    else:
        config = Tokenizer(chat_template="default", chat_template_kwargs=KWARGS.get(name, {}) | kwargs)
    return make_template(tokenizer_of(name), config)


template_of = cache(fresh_template)


def preference(text: str, answers: tuple[Any, ...] = ANSWERS) -> Preference:
    return Preference(PROMPTS[text], tuple(Completion(answer, i) for i, answer in enumerate(answers)), "moon.jsonl:1")


def tokenized(name: str, text: str, answers: tuple[Any, ...] = ANSWERS, **kwargs: Any) -> TokenizedPreference:
    template = template_of(name, "raw" if text == "raw" else "chat", **kwargs)
    (found,) = tokenize([preference(text, answers)], template, pairing="all", max_length=1000)
    assert isinstance(found, TokenizedPreference), found
    return found


def text_of(name: str, ids: Any) -> str:
    return tokenizer_of(name).decode(ids)


@each_golden
def test_tokens_are_as_in_the_table(golden):
    found = tokenized(golden.name, golden.text)
    scored = [completion[found.scored(i)] for i, completion in enumerate(found.completions)]

    def named(id: int) -> list[str]:
        return [str(id), text_of(golden.name, [int(id)]).replace("\n", "⏎")]

    prompt = [str(len(found.prompt)), *named(found.prompt[-1])]
    sizes = [str(len(completion)) for completion in scored]
    starts = [cell for completion in scored for cell in named(completion[0])]
    assert [*prompt, *sizes, *starts, *named(scored[0][-1])] == golden.cells
    assert scored[1][-1] == scored[0][-1]


@each_golden
def test_a_completion_is_the_answer_and_one_end(golden):
    tokenizer = tokenizer_of(golden.name)
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special} | {tokenizer.eos_token_id}
    for answer, completion in zip(ANSWERS, tokenized(golden.name, golden.text).completions, strict=True):
        assert text_of(golden.name, completion) == golden.thoughts + answer + golden.end[1]
        assert [id for id in completion.tolist() if id in special] == [golden.end[0]]


@each_golden
def test_bos_is_only_at_the_beginning(golden):
    # A template that needs a BOS writes it. Raw text gets one if the tokenizer adds it.
    has_bos = golden.name in BEGINS_TEXTS if golden.text == "raw" else golden.name not in ("qwen2_5", "qwen3")
    bos = tokenizer_of(golden.name).bos_token_id
    prompt = tokenized(golden.name, golden.text).prompt.tolist()
    assert [i for i, id in enumerate(prompt) if id == bos] == ([0] if has_bos else [])


@each_chat
def test_the_prompt_ends_with_the_header_of_the_answer(golden):
    prompt = text_of(golden.name, tokenized(golden.name, golden.text).prompt)
    assert prompt.endswith(HEADER[golden.name])
    assert prompt.count(QUESTION.content) == 1


@each_chat
def test_parts_have_the_tokens_of_the_complete_conversation(golden):
    template, tokenizer = template_of(golden.name, "chat"), tokenizer_of(golden.name)
    found = tokenized(golden.name, golden.text)
    for answer, completion in zip(ANSWERS, found.completions, strict=True):
        turns = [{"role": m.role, "content": m.content} for m in (*PROMPTS[golden.text], Message("assistant", answer))]
        whole = tokenizer.apply_chat_template(
            turns, chat_template=template.source, tokenize=False, **KWARGS.get(golden.name, {})
        )
        ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
        parts = [*found.prompt.tolist(), *completion.tolist()]
        assert ids[: len(parts)] == parts
        assert tokenizer.decode(ids[len(parts) :]) == BEHIND.get(golden.name, "")


def test_a_token_that_crosses_the_boundary_is_split_in_two():
    # Behind the header's line break a generating model writes another: \n | \n Very, where the whole has \n\n Very.
    found = tokenized("qwen2_5", "chat", ("\nVery far.", "No."))
    whole = tokenizer_of("qwen2_5")("<|im_start|>assistant\n\nVery far.", add_special_tokens=False)["input_ids"]
    assert whole[2:4] == [271, 25756]
    assert (found.prompt[-1], *found.completions[0][:2]) == (198, 198, 25756)


@each_golden
def test_rows_after_the_first_read_the_same(golden):
    # The first is written by transformers, the others by the compiled template.
    several = [preference(golden.text)] * 3
    first, *others = tokenize(several, fresh_template(golden.name, golden.text), pairing="all", max_length=1000)
    assert isinstance(first, TokenizedPreference)
    for other in others:
        assert isinstance(other, TokenizedPreference)
        assert other.prompt.tolist() == first.prompt.tolist()
        assert [c.tolist() for c in other.completions] == [c.tolist() for c in first.completions]


def test_a_system_turn_that_moves_is_refused():
    # mistral_nemo writes the system turn into the last user turn, but only while no answer follows.
    template = template_of("mistral_nemo", "chat")
    (found,) = tokenize([preference("system")], template, pairing="all", max_length=1000)
    assert isinstance(found, RowError)
    assert (found.kind, found.reason) == ("bad", "prompt is not a prefix")
    assert "'<s>[INST]Be brief.\\n\\nHow far i' becomes ...'<s>[INST]How far is the moon?'" in found.message


def test_the_date_is_the_one_given_or_today():
    given = text_of("llama3_2", tokenized("llama3_2", "chat").prompt)
    assert f"Today Date: {DATE}\n" in given
    template = make_template(tokenizer_of("llama3_2"), Tokenizer())
    before, probe, after = f"{datetime.now():%d %b %Y}", template.probe(), f"{datetime.now():%d %b %Y}"
    assert probe in (given.replace(DATE, before), given.replace(DATE, after))


def test_thoughts_switched_off_belong_to_the_prompt():
    on, off = tokenized("qwen3", "chat"), tokenized("qwen3", "chat", enable_thinking=False)
    empty = [151667, 271, 151668, 271]  # <think> \n\n </think> \n\n
    assert off.prompt.tolist() == [*on.prompt.tolist(), *empty]
    assert [[*empty, *c.tolist()] for c in off.completions] == [c.tolist() for c in on.completions]


def test_reasoning_in_the_content_and_in_its_own_key_render_the_same():
    within = "<think>\nA light-second.\n</think>\n\nVery far."
    separate = (Message("assistant", "Very far.", {"reasoning_content": "A light-second."}),)
    one, other = tokenized("qwen3", "chat", (within, separate, "Far.")).completions[:2]
    assert text_of("qwen3", one) == f"{within}<|im_end|>"
    assert one.tolist() == other.tolist()


def test_of_several_templates_the_default_one_is_taken():
    several = tokenizer_of("command_r_plus").chat_template
    assert set(several) == {"default", "tool_use", "rag"}
    assert template_of("command_r_plus", "chat").source == several["default"]


@pytest.mark.parametrize("golden", [golden for golden in CHATS if golden.text == "chat"], ids=case)
def test_an_answer_of_few_letters_ends_once(golden):
    # Each also occurs in some end of turn or header: <|END_OF_TURN_TOKEN|>, </s>, <|start_header_id|>assistant.
    letters = ("T", "s", "e", "d", "id", "end", "assistant")
    found = tokenized(golden.name, "chat", letters)
    expected = [golden.thoughts + answer + golden.end[1] for answer in letters]
    assert [text_of(golden.name, completion) for completion in found.completions] == expected


# As in gpt-oss: special tokens precede the answer, and its reasoning may contain the answer too.
CHANNELS = """{%- for m in messages -%}
{%- if m.role == "user" -%}<|reserved_special_token_0|>user<|reserved_special_token_1|>{{ m.content }}<|eot_id|>
{%- else -%}<|reserved_special_token_0|>assistant
{%- if m.thinking -%}<|reserved_special_token_2|>analysis<|reserved_special_token_1|>{{ m.thinking }}<|reserved_special_token_3|>
{%- endif -%}<|reserved_special_token_2|>final<|reserved_special_token_1|>{{ m.content }}<|eot_id|>
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|reserved_special_token_0|>assistant{%- endif -%}"""


@pytest.mark.parametrize(("thinking", "answer"), [("It is very far.", "very far."), ("", "n"), ("", "final")])
def test_an_answer_whose_text_also_occurs_earlier_is_complete(thinking, answer):
    said = Message("assistant", answer, {"thinking": thinking} if thinking else {})
    template = Template(tokenizer_of("llama3_1"), CHANNELS, {})
    (part,) = template.render(preference("chat", ((said,), "No."))).completions[0]
    assert part.text.endswith(f"final<|reserved_special_token_1|>{answer}<|eot_id|>")


def test_the_table_has_twelve_tokenizers_each_in_every_way_it_can():
    ways = {name: {golden.text for golden in GOLDEN if golden.name == name} for name, *_ in GOLDEN}
    assert len(ways) == 12
    for name, texts in ways.items():
        chats = set(PROMPTS) - {"raw"} if name in HEADER else set()
        assert texts == {"raw"} | chats - ({"system"} if name == "mistral_nemo" else set())


@pytest.mark.parametrize("name", sorted({golden.name for golden in GOLDEN}))
def test_only_these_have_a_template(name):
    assert (tokenizer_of(name).chat_template is not None) == (name in HEADER)

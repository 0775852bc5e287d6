"""Tokenizers that add a space before every text: a completion continues its prompt and gets none."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.data.formats.preference import Completion, Preference
from tandem.data.text.template import Template
from tandem.data.text.tokens import TokenizedPreference, tokenize

VOCABULARY = {piece: id for id, piece in enumerate(["<unk>", "</s>", "\u2581", *"abcdQ:", "\u2581a", "\u2581Q"])}
MERGES = [("\u2581", "a"), ("\u2581", "Q")]


def with_space_before(where: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(VOCABULARY, MERGES, unk_token="<unk>"))
    if where == "normalizer":  # Llama 2's
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        backend.normalizer = normalizers.Sequence(steps)
    else:  # Mistral's
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def pieces_of(tokenizer, prompt: str, *answers: str) -> tuple[list[str], list[list[str]]]:
    preference = Preference(prompt, tuple(Completion(answer, i) for i, answer in enumerate(answers)), "x:1")
    [row] = tokenize([preference], Template(tokenizer, None, {}), pairing="all", max_length=100)
    assert isinstance(row, TokenizedPreference)
    spelled = tokenizer.convert_ids_to_tokens
    return spelled(row.prompt.tolist()), [spelled(completion.tolist()) for completion in row.completions]


@pytest.mark.parametrize("where", ["normalizer", "pre_tokenizer"])
def test_the_completion_gets_no_extra_space(where):
    tokenizer = with_space_before(where)
    prompt, answers = pieces_of(tokenizer, "Q:", "ab", " ab")
    assert prompt == ["\u2581Q", ":"]
    assert answers == [["a", "b", "</s>"], ["\u2581a", "b", "</s>"]]


@pytest.mark.parametrize("where", ["normalizer", "pre_tokenizer"])
@pytest.mark.parametrize("answer", ["ab", " ab", "a b", "  a"])
def test_prompt_and_completion_have_the_tokens_of_the_complete_text(where, answer):
    tokenizer = with_space_before(where)
    prompt, (tokens, _) = pieces_of(tokenizer, "Q:", answer, "d")
    assert prompt + tokens == tokenizer.tokenize("Q:" + answer + "</s>")


def test_text_after_a_shielded_special_token_gets_no_extra_space():
    tokenizer = with_space_before("normalizer")
    template = Template(tokenizer, "{{ messages[-1].content }}", {})
    preference = Preference("Qa</s>ab", (Completion("Qa</s>abc", 0), Completion("Qa</s>abd", 1)), "x:1")
    [row] = tokenize([preference], template, pairing="all", max_length=100)
    assert isinstance(row, TokenizedPreference)
    # "</s>" is shielded, so it is unknown characters here; the "ab" after it has no space before it.
    assert tokenizer.convert_ids_to_tokens(row.prompt.tolist())[-2:] == ["a", "b"]

"""Preferences as token ids, and the pairs made of their ranks."""

import math

import numpy as np
import pytest
from letters import BOS, CHAT, END, EOS, ids, letter_tokenizer

from tandem.data.formats.preference import Completion, Message, Preference
from tandem.data.read.sources import RowError
from tandem.data.text import tokens
from tandem.data.text.template import Template
from tandem.data.text.tokens import TokenizedPreference, make_pairs, tokenize

RAW = Template(letter_tokenizer(), None, {})
RAW_WITH_BOS = Template(letter_tokenizer(adds_bos=True), None, {})


def preference(prompt="hi", *texts: str, ranks=None, scores=None) -> Preference:
    texts = texts or ("yes", "no")
    ranks, scores = ranks or range(len(texts)), scores or [None] * len(texts)
    completions = tuple(Completion(t, r, s) for t, r, s in zip(texts, ranks, scores, strict=True))
    return Preference(prompt, completions, "pairs.jsonl:3")


def one(item: Preference | RowError, template: Template = RAW, *, pairing="best_worst", max_length=100):
    (result,) = tokenize([item], template, pairing=pairing, max_length=max_length)
    return result


# Pairs. Ranks (0, 2, 1): completion 0 is best, then 2, then 1.


@pytest.mark.parametrize(
    ("ranks", "pairing", "pairs"),
    [
        ((0, 1), "best_worst", [(0, 1)]),
        ((1, 0), "best_worst", [(1, 0)]),
        ((0, 2, 1), "best_worst", [(0, 1)]),
        ((0, 2, 1), "adjacent", [(0, 2), (2, 1)]),
        ((0, 2, 1), "all", [(0, 2), (0, 1), (2, 1)]),
        ((0, 1, 2, 3), "all", [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]),
        # Ties make no pair.
        ((0, 0, 1), "best_worst", [(0, 2)]),
        ((0, 0, 1), "adjacent", [(0, 2), (1, 2)]),
        ((0, 0, 1), "all", [(0, 2), (1, 2)]),
        ((0, 1, 1), "adjacent", [(0, 1), (0, 2)]),
        ((0, 1, 1), "all", [(0, 1), (0, 2)]),
        ((3, 0, 3, 0, 7), "adjacent", [(1, 0), (1, 2), (3, 0), (3, 2), (0, 4), (2, 4)]),
        ((5, 5), "all", []),
        ((5, 5), "best_worst", []),
    ],
)
def test_pairs_are_of_a_better_and_a_worse_completion(ranks, pairing, pairs):
    assert make_pairs(ranks, pairing) == tuple(pairs)


# Token ids


def test_a_preference_is_its_prompt_and_each_completion_ended_by_eos():
    result = one(preference("hi", "yes", "no", scores=[1.5, None]))
    assert isinstance(result, TokenizedPreference)
    assert result.prompt.tolist() == ids("hi")
    assert [c.tolist() for c in result.completions] == [[*ids("yes"), EOS], [*ids("no"), EOS]]
    assert result.pairs == ((0, 1),)
    assert result.scores[0] == 1.5 and math.isnan(result.scores[1])
    assert result.place == "pairs.jsonl:3"
    assert result.longest == 2 + 4
    assert result.prompt.dtype == np.int32


def test_no_token_crosses_the_boundary_of_prompt_and_completion():
    # "ab" is one token, 36; a prompt that ends in "a" before a completion that begins with "b" keeps both.
    result = one(preference("ta", "bc", "ab"))
    assert result.prompt.tolist() == ids("ta")
    assert [c.tolist() for c in result.completions] == [[*ids("bc"), EOS], [36, EOS]]


def test_raw_text_begins_with_bos_where_the_tokenizer_puts_one_and_only_once():
    assert one(preference("hi"), RAW_WITH_BOS).prompt.tolist() == [BOS, *ids("hi")]
    assert one(preference("<s>hi"), RAW_WITH_BOS).prompt.tolist() == [BOS, *ids("hi")]
    assert one(preference("hi"), RAW).prompt.tolist() == ids("hi")


def test_no_completion_begins_with_bos():
    assert one(preference("hi", "yes", "no"), RAW_WITH_BOS).completions[0].tolist() == [*ids("yes"), EOS]


def test_a_chat_template_decides_on_bos_itself_and_ends_turns_once():
    template = Template(letter_tokenizer(adds_bos=True), CHAT, {})
    result = one(preference("hi"), template)
    assert result.prompt.tolist() == [*ids("user:hi"), END, *ids("\nassistant:")]
    assert [c.tolist() for c in result.completions] == [[*ids("yes"), END], [*ids("no"), END]]


def test_the_pairing_is_applied_to_ranks():
    result = one(preference("hi", "a", "b", "c", ranks=[0, 2, 1]), pairing="all")
    assert result.pairs == ((0, 2), (0, 1), (2, 1))


@pytest.mark.parametrize(
    ("ranks", "pairing", "kept", "pairs"),
    [
        ((0, 2, 1), "best_worst", "ab", ((0, 1),)),
        ((2, 1, 0), "best_worst", "ac", ((1, 0),)),
        ((0, 0, 1), "adjacent", "abc", ((0, 2), (1, 2))),
        ((0, 0, 1), "best_worst", "ac", ((0, 1),)),
        ((0, 2, 1), "adjacent", "abc", ((0, 2), (2, 1))),
    ],
)
def test_completions_that_no_pair_needs_are_left_out(ranks, pairing, kept, pairs):
    result = one(preference("hi", "a", "b", "c", ranks=ranks, scores=[1.0, 2.0, 3.0]), pairing=pairing)
    assert [c.tolist() for c in result.completions] == [[*ids(letter), EOS] for letter in kept]
    assert result.pairs == pairs
    assert result.scores == tuple(1.0 + "abc".index(letter) for letter in kept)


def test_a_completion_that_no_pair_needs_may_be_longer_than_the_limit():
    assert isinstance(one(preference("hi", "yes", "how long", "no"), max_length=6), TokenizedPreference)


@pytest.mark.parametrize(
    ("texts", "pairing", "pairs"),
    [("aab", "all", ((0, 2), (1, 2))), ("aab", "adjacent", ((1, 2),)), ("aba", "all", ((0, 1), (1, 2)))],
)
def test_two_identical_completions_of_several_make_no_pair(texts, pairing, pairs):
    assert one(preference("hi", *texts), pairing=pairing).pairs == pairs


def test_a_best_and_a_worst_that_are_identical_are_filtered():
    assert one(preference("hi", "a", "b", "a")).reason == "equal completions"


def test_completions_that_become_identical_when_cut_make_no_pair():
    long = preference("hi", "yes so", "yes no", "no")
    (row,) = tokenize([long], RAW, pairing="all", max_length=5, overlong="truncate_completion")
    assert row.pairs == ((0, 2), (1, 2))


# Rows that cannot be used


def test_a_preference_exactly_as_long_as_the_limit_stays_and_one_token_more_is_filtered():
    # prompt 2, longest completion "yes" + EOS 4
    assert isinstance(one(preference("hi", "yes", "no"), max_length=6), TokenizedPreference)
    error = one(preference("hi", "yes", "no"), max_length=5)
    assert (str(error), error.reason, error.kind) == (
        "pairs.jsonl:3: 6 tokens, over policy.max_total_sequence_length=5.",
        "over-long",
        "filtered",
    )


def test_completions_equal_as_tokens_are_filtered():
    # "ä" and "ö" are both <unk>.
    error = one(preference("hi", "ä", "ö"))
    assert (str(error), error.reason, error.kind) == (
        "pairs.jsonl:3: the completions are identical as tokens.",
        "equal completions",
        "filtered",
    )


def test_a_prompt_without_tokens_is_refused():
    template = Template(letter_tokenizer(), "{% if messages|length > 1 %}{{ messages[-1].content }}{% endif %}", {})
    error = one(preference("hi"), template)
    assert (str(error), error.reason, error.kind) == (
        "pairs.jsonl:3: the prompt has no tokens, so nothing predicts the first completion token.",
        "empty prompt",
        "bad",
    )


def test_errors_pass_through_in_their_place_also_over_several_batches(monkeypatch):
    monkeypatch.setattr(tokens, "BATCH", 2)
    known = RowError("pairs.jsonl:2", "malformed JSON", "x")
    without_template = Preference((Message("user", "hi"),), preference().completions, "pairs.jsonl:4")
    items = [preference("a"), known, preference("b"), without_template, preference("c")]
    results = list(tokenize(items, RAW, pairing="best_worst", max_length=100))
    assert results[1] is known
    assert isinstance(results[3], RowError) and results[3].reason == "messages without a template"
    assert [results[i].prompt.tolist() for i in (0, 2, 4)] == [ids("a"), ids("b"), ids("c")]


def test_a_batch_of_errors_alone_is_encoded_as_nothing():
    known = RowError("pairs.jsonl:2", "malformed JSON", "x")
    assert one(known) is known

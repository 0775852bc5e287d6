"""Numbers a user sees before training, checked by hand."""

import json

import pytest
from letters import letter_tokenizer

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.preflight import preflight
from tandem.data.store.opening import open_store
from tandem.data.store.token_store import TokenStore
from tandem.data.text.template import Template


@pytest.fixture
def store_of(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))

    def make(name: str, *rows: tuple[str, str, str]) -> TokenStore:
        source = tmp_path / name
        lines = [json.dumps({"prompt": p, "chosen": c, "rejected": r}) for p, c, r in rows]
        source.write_text("\n".join(lines), encoding="utf-8")
        return open_store(str(source), DatasetFields(), Template(letter_tokenizer(), None, {}), Data(), 100)

    return make


def test_tokens_pairs_and_the_saving_are_counted(store_of):
    # prompts 4 + 2; completions with their EOS 3 + 2 and 4 + 3
    found = preflight("train", store_of("t", ("what", "no", "y"), ("hi", "yes", "no")))
    assert (found.name, found.format, found.num_pairs) == ("train", "BinaryPreferenceDataset", 2)
    assert (found.prompt_tokens, found.completion_tokens, found.longest) == (6, 12, 7)
    # shared 6 + 12 = 18 tokens, repeated 2 * 6 + 12 = 24
    assert found.shared_saving == pytest.approx(1 - 18 / 24)
    assert found.counts.accepted == 2


def test_a_training_set_overlaps_with_nothing(store_of):
    found = preflight("train", store_of("t", ("hi", "yes", "no")))
    assert (found.prompt_overlap, found.ngram_overlap) == (None, None)


def test_prompts_that_are_also_in_the_training_set_are_counted(store_of):
    train = store_of("t", ("hi", "yes", "no"), ("what", "y", "n"))
    validation = store_of("v", ("hi", "x", "z"), ("hi", "q", "r"), ("wha", "y", "n"))
    assert preflight("v", validation, train).prompt_overlap == 2
    assert preflight("v", validation, train).num_held_out == 0


def test_the_share_of_completion_runs_of_eight_tokens_in_the_training_set(store_of):
    # With EOS, cdefghij has 9 tokens and so 2 runs of 8; cdefghijk has 3, of which the first, cdefghij, is the same;
    # nnn is too short for any.
    train = store_of("t", ("hi", "cdefghij", "nnn"))
    validation = store_of("v", ("hi", "cdefghijk", "nnn"))
    assert preflight("v", validation, train).ngram_overlap == pytest.approx(1 / 3)
    assert preflight("v", train, validation).ngram_overlap == pytest.approx(1 / 2)
    assert preflight("v", train, train).ngram_overlap == 1.0


def test_the_same_tokens_in_another_order_do_not_overlap(store_of):
    train = store_of("t", ("hi", "cdefghij", "n"))
    validation = store_of("v", ("hi", "jihgfedc", "n"))
    assert preflight("v", validation, train).ngram_overlap == 0.0


def test_completions_shorter_than_an_ngram_have_no_overlap(store_of):
    train = store_of("t", ("hi", "yes", "no"))
    assert preflight("v", train, train).ngram_overlap is None

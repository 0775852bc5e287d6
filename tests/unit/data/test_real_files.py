"""Published preference datasets are read without settings: the format and the counts are as expected."""

from pathlib import Path

import pytest

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.store.opening import open_store
from tandem.data.store.token_store import Counts
from tandem.data.text.template import Template
from tandem.data.text.tokenizer import load_tokenizer
from tandem.model.files.tiny import CHAT_TEMPLATE, tiny_model

FOLDER = Path(__file__).parents[4] / "shared" / "data"
UNLIMITED = 1_000_000

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="../shared/data is not here")

EXPECTED = {
    "hh_harmless_test.jsonl.gz": (
        "dialogue_text",
        Counts(rows=2312, accepted=2303, bad={}, filtered={"prompts differ": 5, "empty completion": 4}),
    ),
    "llamafactory_dpo_en_demo.json": ("sharegpt", Counts(rows=300, accepted=300, bad={}, filtered={})),
    "llamafactory_v1_dpo_demo.jsonl": ("messages_pair", Counts(rows=10, accepted=10, bad={}, filtered={})),
    "llms_from_scratch_preference.json": (
        "alpaca",
        Counts(rows=1100, accepted=1094, bad={}, filtered={"equal completions": 6}),
    ),
    "stack_exchange_paired_tiny.json": ("question_responses", Counts(rows=25, accepted=25, bad={}, filtered={})),
}


@pytest.fixture(scope="module")
def template():
    return Template(load_tokenizer(tiny_model()), CHAT_TEMPLATE, {})


def test_every_file_of_the_folder_has_an_expectation():
    assert {file.name for file in FOLDER.iterdir() if file.suffix in (".json", ".jsonl", ".gz")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_file_is_detected_and_counted_without_settings(name, template):
    store = open_store(str(FOLDER / name), DatasetFields(), template, Data(), UNLIMITED)
    assert (store.format, store.counts) == EXPECTED[name]
    assert len(store) == store.counts.accepted
    assert store.num_pairs.sum() == store.counts.accepted

"""Repeated preferences: kept, dropped with their places, or refused, within a set and over several training sets."""

import json
from pathlib import Path

import numpy as np
import pytest
from letters import CHAT, letter_tokenizer

from tandem.config.load import load_config
from tandem.data.preflight import preflights
from tandem.data.read import sources
from tandem.data.store import duplicates as duplicates_module
from tandem.data.store.sets import Sets, Span, open_sets
from tandem.data.store.writer import REPEATED, SWAPPED, digest_of
from tandem.data.text.template import Template
from tandem.errors import DataError

RAW = Template(letter_tokenizer(), None, {})
CHATTING = Template(letter_tokenizer(), CHAT, {})


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path


def pair(prompt: str, chosen: str = "yes", rejected: str = "no", **more) -> dict:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def write(name: str, *rows: dict) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def opened(*overrides: str, template: Template = RAW) -> Sets:
    return open_sets(load_config(None, overrides).config, template)


def places(preferences) -> list[str]:
    return [preferences.place(i) for i in range(len(preferences))]


def rejects(store) -> list[tuple[str, str, str, str]]:
    lines = [json.loads(line) for line in (store.folder / "rejects.jsonl").read_text("utf-8").splitlines()]
    return [(line["place"], line["kind"], line["reason"], line["message"]) for line in lines]


def test_they_are_kept_and_counted_by_default():
    write("a.jsonl", pair("hi"), pair("hi"))
    found = opened("data.train=a.jsonl")
    assert len(found.train) == 2
    assert found.read["train"].notes == {REPEATED: 1}


@pytest.mark.parametrize("rows_a_chunk", [1, 2, 512])
def test_dropped_ones_are_counted_and_listed_with_the_place_of_the_first(monkeypatch, rows_a_chunk):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", rows_a_chunk)
    write("a.jsonl", pair("hi"), pair("so"), pair("hi"), pair("hi", "no", "yes"), pair("x", "y", "y"), pair("hi"))
    found = opened("data.train=a.jsonl", "data.duplicates=drop", "data.max_filtered_share=0.2")
    assert places(found.train) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:4"]
    assert [found.train[i].prompt.tolist() for i in range(3)] == [[17, 18], [28, 24], [17, 18]]
    store = found.read["train"]
    assert (store.counts.rows, store.counts.accepted) == (6, 3)
    assert store.counts.filtered == {"equal completions": 1, "duplicate": 2}
    same = "the same prompt and completions as a.jsonl:1."
    assert rejects(store)[1:] == [
        ("a.jsonl:3", "filtered", "duplicate", same),
        ("a.jsonl:6", "filtered", "duplicate", same),
    ]
    # A swapped pair is not a duplicate, and it is still noted.
    assert store.notes == {SWAPPED: 2}
    assert store.noted_at == {SWAPPED: "a.jsonl:1"}


def test_a_set_without_any_is_the_same_store_whatever_is_asked():
    write("a.jsonl", pair("hi"), pair("so"))
    stores = [opened("data.train=a.jsonl", f"data.duplicates={how}").read["train"] for how in ("keep", "drop", "error")]
    assert len({store.folder for store in stores}) == 1


def test_a_dropped_set_is_found_again_in_the_cache(monkeypatch):
    write("a.jsonl", pair("hi"), pair("hi"))
    first = opened("data.train=a.jsonl", "data.duplicates=drop")
    monkeypatch.setattr(duplicates_module, "published", lambda *_: pytest.fail("written again"))
    again = opened("data.train=a.jsonl", "data.duplicates=drop")
    assert again.train.fingerprint == first.train.fingerprint != opened("data.train=a.jsonl").train.fingerprint


def test_a_dropped_set_that_is_damaged_in_the_cache_is_refused_with_its_folder():
    write("a.jsonl", pair("hi"), pair("hi"))
    folder = opened("data.train=a.jsonl", "data.duplicates=drop").read["train"].folder
    (folder / "rejects.jsonl").write_text("damaged", encoding="utf-8")
    with pytest.raises(DataError) as error:
        opened("data.train=a.jsonl", "data.duplicates=drop")
    assert str(error.value) == (
        f"{folder}/rejects.jsonl does not match its SHA-256 in the manifest: it was changed or cut off. The tokenised data is "
        f"damaged: remove {folder} and start again."
    )


def test_a_later_training_set_loses_what_an_earlier_one_has():
    write("a.jsonl", pair("hi"), pair("so"))
    write("b.jsonl", pair("so"), pair("ah"), pair("ah"))
    found = opened("data.train=[{data_path:a.jsonl,weight:2},b.jsonl]", "data.duplicates=drop")
    assert places(found.train) == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:2"]
    assert found.spans == (Span(0, 2, 2), Span(2, 3, 1))
    assert rejects(found.read["train-1"]) == [
        ("b.jsonl:1", "filtered", "duplicate", "the same prompt and completions as a.jsonl:2."),
        ("b.jsonl:3", "filtered", "duplicate", "the same prompt and completions as b.jsonl:2."),
    ]
    assert [(one.counts.accepted, one.num_pairs, one.notes) for one in preflights(found)] == [(2, 2, {}), (1, 1, {})]


def test_a_training_set_that_holds_nothing_new_is_refused():
    write("a.jsonl", pair("hi"), pair("so"))
    with pytest.raises(DataError) as caught:
        opened("data.train=[a.jsonl,a.jsonl]", "data.duplicates=drop")
    assert str(caught.value) == (
        "train-1: all 2 preferences are also in earlier training sets (a.jsonl:1 is the same as a.jsonl:1), so "
        "data.duplicates=drop leaves none. Leave out this set, or set data.duplicates=keep."
    )


def test_a_validation_set_is_compared_with_itself_alone():
    write("a.jsonl", pair("hi"))
    write("v.jsonl", pair("hi"), pair("hi"), pair("so"))
    found = opened("data.train=a.jsonl", "data.validation=v.jsonl", "data.duplicates=drop")
    assert places(found.validation["default"]) == ["v.jsonl:1", "v.jsonl:3"]
    assert len(found.read["validation-default"]) == 2


def test_a_share_is_held_out_of_what_is_left():
    write("a.jsonl", *[pair(letter) for letter in "abcd"] * 2)
    found = opened("data.train=a.jsonl", "data.duplicates=drop", "data.validation_share=0.25")
    assert (len(found.train), len(found.validation["default"])) == (3, 1)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            "a.jsonl",
            "a.jsonl:3: the row has the same prompt and completions as a.jsonl:1, which "
            "data.duplicates=error does not allow. Remove the duplicate",
        ),
        (
            "[b.jsonl,a.jsonl]",
            "a.jsonl:2: the row has the same prompt and completions as b.jsonl:1, which "
            "data.duplicates=error does not allow. Remove all 2 "
            "duplicates",
        ),
    ],
)
def test_refused_ones_are_named_with_both_places(sets, message):
    write("a.jsonl", pair("hi"), pair("so"), pair("hi"))
    write("b.jsonl", pair("so"))
    with pytest.raises(DataError) as caught:
        opened(f"data.train={sets}", "data.duplicates=error")
    assert str(caught.value) == f"{message}, or set data.duplicates=drop."


def test_what_is_the_same_is_decided_by_the_tokens():
    # Spelled as a text and as messages, with other scores, with completions in another order: the same tokens.
    texts = pair("hi", chosen_reward=1.0, rejected_reward=0.0)
    messages = pair([{"role": "user", "content": "hi"}], chosen_reward=2.0, rejected_reward=0.0)
    write("a.jsonl", texts, messages, pair("hi", rejected="noo"))
    found = opened("data.train=a.jsonl", "data.duplicates=drop", template=CHATTING)
    assert places(found.train) == ["a.jsonl:1", "a.jsonl:3"]


def test_of_several_completions_the_pairs_decide_and_not_their_order():
    def ranked(*ranks: int, texts: str = "abc") -> dict:
        completions = [{"rank": rank, "completion": text} for rank, text in zip(ranks, texts, strict=True)]
        return {"context": "hi", "completions": completions}

    write("a.jsonl", ranked(0, 1, 2), ranked(2, 1, 0, texts="cba"), ranked(2, 1, 0))
    found = opened("data.train=a.jsonl", "data.duplicates=drop", "data.pairing=all")
    assert places(found.train) == ["a.jsonl:1", "a.jsonl:3"]


def test_two_preferences_that_only_share_a_digest_are_both_kept(monkeypatch):
    write("a.jsonl", pair("hi"), pair("so"), pair("hi"))
    monkeypatch.setattr("tandem.data.store.writer.digest_of", lambda row: b"\0" * 8)
    found = opened("data.train=a.jsonl", "data.duplicates=drop", "data.num_workers=0")
    assert places(found.train) == ["a.jsonl:1", "a.jsonl:2"]


def test_the_store_keeps_the_digest_of_every_row():
    write("a.jsonl", *[pair(letter) for letter in "abcd"])
    store = opened("data.train=a.jsonl").read["train"]
    assert store.digests.tolist() == [int.from_bytes(digest_of(row), "little") for row in store]
    assert store.digests.dtype == np.uint64


def test_a_damaged_store_without_duplicates_is_named():
    write("pairs.jsonl", pair("one"), pair("one"), pair("two"))
    store = opened("data.train=pairs.jsonl", "data.duplicates=drop").read["train"]
    tokens = store.folder / "tokens.arrow"
    tokens.write_bytes(tokens.read_bytes() + b"x")
    with pytest.raises(DataError) as caught:
        opened("data.train=pairs.jsonl", "data.duplicates=drop")
    assert str(caught.value) == (
        f"{tokens} does not match its SHA-256 in the manifest: it was changed or cut off. The tokenised data is damaged: remove "
        f"{store.folder} and start again."
    )

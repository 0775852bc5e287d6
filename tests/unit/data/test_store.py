"""Tokenised preferences on disk: read back as written, named by content, judged, and refused when damaged."""

import json

import numpy as np
import pytest
from letters import CHAT, EOS, ids, letter_tokenizer

from tandem.config.schema import Data, DatasetFields
from tandem.data import store as store_module
from tandem.data.store import Counts, open_store
from tandem.data.template import Template
from tandem.errors import DataError

RAW = Template(letter_tokenizer(), None, {})
KEYS = DatasetFields()
LENIENT = Data(on_bad_row="skip", max_bad_share=1.0, max_filtered_share=1.0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def source(tmp_path):
    return tmp_path / "pairs.jsonl"


def write(source, *rows) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    source.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def group(prompt: str, *texts: str) -> dict:
    completions = [{"rank": i, "completion": text, "score": i / 2} for i, text in enumerate(texts)]
    return {"context": prompt, "completions": completions}


def pair(prompt="hi", chosen="yes", rejected="no") -> dict:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def opened(source, data=LENIENT, *, template=RAW, keys=KEYS, max_length=100):
    return open_store(source, keys, template, data, max_length)


def refusal(source, data, **changes) -> str:
    with pytest.raises(DataError) as caught:
        opened(source, data, **changes)
    return str(caught.value)


# Reading back


@pytest.mark.parametrize("rows_per_batch", [1, 2, 8192])
def test_preferences_of_two_to_four_completions_are_read_back_as_written(source, monkeypatch, rows_per_batch):
    monkeypatch.setattr(store_module, "ROWS_PER_BATCH", rows_per_batch)
    rows = [("hi", "yes", "no"), ("what", "a", "bb", "ccc"), ("so", "d", "e", "f", "gg"), ("k", "l", "m")]
    write(source, *(group(*row) for row in rows))
    store = opened(source, Data(pairing="all"))
    assert len(store) == 4
    for number, (row, stored) in enumerate(zip(rows, store, strict=True)):
        assert stored.prompt.tolist() == ids(row[0])
        assert [c.tolist() for c in stored.completions] == [[*ids(text), EOS] for text in row[1:]]
        assert stored.place == store.place(number) == f"{source}:{number + 1}"
        assert stored.scores == tuple(i / 2 for i in range(len(row) - 1))
    assert store[1].pairs == ((0, 1), (0, 2), (1, 2))
    assert store[3].pairs == ((0, 1),)
    assert store.num_pairs.tolist() == [1, 3, 6, 1]
    assert store.num_prompt_tokens.tolist() == [2, 4, 2, 1]
    assert store.num_scored_tokens.tolist() == [4 + 3, 2 + 3 + 4, 2 + 2 + 2 + 3, 2 + 2]
    assert store.longest.tolist() == [2 + 4, 4 + 4, 2 + 3, 1 + 2]


def test_a_completion_without_a_score_has_none(source):
    write(source, pair())
    assert np.isnan(opened(source)[0].scores).tolist() == [True, True]


def test_the_format_is_told_by_the_first_row_that_can_be_read(source):
    write(source, "{", group("hi", "yes", "no"))
    assert opened(source).format == "PreferenceDataset"
    write(source, pair())
    assert opened(source).format == "BinaryPreferenceDataset"


def test_a_format_that_is_given_is_not_guessed(source):
    write(source, group("hi", "yes", "no"))
    assert opened(source, keys=DatasetFields(dataset_name="PreferenceDataset")).format == "PreferenceDataset"
    assert refusal(source, Data(), keys=DatasetFields(dataset_name="BinaryPreferenceDataset")) == (
        f"{source}: 1 of 1 rows are malformed:\n"
        "  missing key: 1\n"
        f"    {source}:1: no key prompt. Keys found: context, completions. data.train.prompt_key names another.\n"
        "Mend them, or set data.on_bad_row=skip to leave them out."
    )


# Counting


def test_every_row_is_accepted_bad_or_filtered(source):
    write(source, pair(), "{", "", pair(chosen="no"), pair(prompt=" "), pair(prompt="what a question"), pair("so"), "[")
    counts = opened(source, max_length=8).counts
    assert counts == Counts(
        rows=7,
        accepted=2,
        bad={"malformed JSON": 2, "empty prompt": 1},
        filtered={"equal completions": 1, "over-long": 1},
    )
    assert counts.accepted + sum(counts.bad.values()) + sum(counts.filtered.values()) == counts.rows


def test_every_row_left_out_is_written_with_place_and_reason(source):
    write(source, pair(), "[3]", pair(chosen="no"))
    lines = (opened(source).folder / "rejects.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "place": f"{source}:2",
            "kind": "bad",
            "reason": "not an object",
            "message": "a list, not a JSON object with a prompt and completions.",
        },
        {
            "place": f"{source}:3",
            "kind": "filtered",
            "reason": "equal completions",
            "message": "chosen and rejected are identical, so the pair teaches nothing.",
        },
    ]


# Judging


def test_a_missing_file_is_named(source):
    assert refusal(source, Data()) == f"{source}: no such file. Check data.train.data_path and the validation paths."


def test_an_empty_file_is_refused(source):
    write(source, "", "")
    assert refusal(source, Data()) == f"{source}: the file holds no rows."


def test_malformed_rows_stop_the_run_with_counts_and_the_first_three_of_each_reason(source):
    write(source, pair(), "[]", "[]", "[]", "[]", pair(prompt=" "))
    assert refusal(source, Data()) == (
        f"{source}: 5 of 6 rows are malformed:\n"
        "  empty prompt: 1\n"
        f"    {source}:6: prompt is empty.\n"
        "  not an object: 4\n"
        f"    {source}:2: a list, not a JSON object with a prompt and completions.\n"
        f"    {source}:3: a list, not a JSON object with a prompt and completions.\n"
        f"    {source}:4: a list, not a JSON object with a prompt and completions.\n"
        "Mend them, or set data.on_bad_row=skip to leave them out."
    )


def test_skipping_stops_beyond_the_share_of_bad_rows_and_not_at_it(source):
    write(source, pair(), pair("so"), pair("why"), pair(prompt=" "))
    assert len(opened(source, Data(on_bad_row="skip", max_bad_share=0.25))) == 3
    assert refusal(source, Data(on_bad_row="skip", max_bad_share=0.24)) == (
        f"{source}: 1 of 4 rows are malformed, over data.max_bad_share=0.24:\n"
        "  empty prompt: 1\n"
        f"    {source}:4: prompt is empty."
    )


def test_over_long_preferences_stop_the_run_where_asked_to(source):
    write(source, pair(), pair("what a question"))
    assert len(opened(source, Data(max_filtered_share=0.5), max_length=8)) == 1
    assert refusal(source, Data(overlong="error", max_filtered_share=0.5), max_length=8) == (
        f"{source}: 1 of 2 preferences are over-long:\n"
        "  over-long: 1\n"
        f"    {source}:2: 19 tokens, over policy.max_total_sequence_length=8.\n"
        "Raise policy.max_total_sequence_length, or set data.overlong=drop."
    )


def test_filtering_stops_beyond_its_share_and_not_at_it(source):
    write(source, pair(), pair("so"), pair("why"), pair(chosen="no"))
    assert len(opened(source, Data(max_filtered_share=0.25))) == 3
    assert refusal(source, Data()) == (
        f"{source}: 1 of 4 rows were filtered, over data.max_filtered_share=0.1:\n"
        "  equal completions: 1\n"
        f"    {source}:4: chosen and rejected are identical, so the pair teaches nothing.\n"
        "Raise policy.max_total_sequence_length if they are over-long, mend the file, or raise the share."
    )


def test_a_file_without_any_usable_preference_is_refused(source):
    write(source, pair(chosen="no"))
    assert refusal(source, Data(max_filtered_share=1.0)) == (
        f"{source}: no usable preference among 1 rows:\n"
        "  equal completions: 1\n"
        f"    {source}:1: chosen and rejected are identical, so the pair teaches nothing."
    )


# The cache


def test_the_same_content_is_tokenised_once(source, tmp_path, monkeypatch):
    write(source, pair())
    first = opened(source)
    monkeypatch.setattr(store_module, "tokenize", lambda *args, **kwargs: pytest.fail("tokenised again"))
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(source.read_bytes())
    assert opened(source).fingerprint == opened(copy).fingerprint == first.fingerprint
    assert opened(source).folder == first.folder


def test_a_set_is_judged_anew_each_time_without_being_tokenised_anew(source, cache):
    write(source, pair(), pair(prompt=" "))
    opened(source)
    assert refusal(source, Data()).startswith(f"{source}: 1 of 2 rows are malformed:\n")
    assert len(list(cache.iterdir())) == 1


def test_whatever_decides_the_tokens_decides_the_name(source):
    write(source, pair())
    names = [
        opened(source).fingerprint,
        opened(source, max_length=99).fingerprint,
        opened(source, LENIENT.model_copy(update={"pairing": "all"})).fingerprint,
        opened(source, keys=DatasetFields(dataset_name="BinaryPreferenceDataset")).fingerprint,
        opened(source, template=Template(letter_tokenizer(), CHAT, {})).fingerprint,
        opened(source, template=Template(letter_tokenizer(), CHAT, {"mood": 1})).fingerprint,
        opened(source, template=Template(letter_tokenizer(adds_bos=True), None, {})).fingerprint,
    ]
    write(source, pair(chosen="yes!"))
    names.append(opened(source).fingerprint)
    assert len(set(names)) == 8


def test_a_damaged_file_is_refused_by_its_name(source):
    write(source, pair())
    folder = opened(source).folder
    tokens = folder / "tokens.arrow"
    content = bytearray(tokens.read_bytes())
    content[len(content) // 2] ^= 1
    tokens.write_bytes(content)
    assert refusal(source, LENIENT) == (
        f"{tokens} does not match its SHA-256 in the manifest: it was changed or cut off. "
        f"The tokenised data is damaged: remove {folder} and start again."
    )


def test_a_missing_file_of_a_store_is_refused_by_its_name(source):
    write(source, pair())
    folder = opened(source).folder
    (folder / "rejects.jsonl").unlink()
    assert refusal(source, LENIENT) == (
        f"{folder}/rejects.jsonl is missing. The tokenised data is damaged: remove {folder} and start again."
    )


def test_a_damaged_manifest_is_refused_by_its_name(source):
    write(source, pair())
    folder = opened(source).folder
    (folder / "manifest.json").write_text("{}", encoding="utf-8")
    assert refusal(source, LENIENT) == (
        f"{folder}/manifest.json is missing or damaged ('files'). "
        f"The tokenised data is damaged: remove {folder} and start again."
    )


def test_a_writer_that_fails_half_way_leaves_nothing(source, cache, monkeypatch):
    def fails(*args, **kwargs):
        raise KeyboardInterrupt

    write(source, pair())
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "_record_batch", fails)
        with pytest.raises(KeyboardInterrupt):
            opened(source)
    assert list(cache.iterdir()) == []
    assert len(opened(source)) == 1

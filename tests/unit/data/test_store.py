"""Tokenised preferences on disk: read back as written, named by content, checked for bad rows, and refused when damaged."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from letters import CHAT, EOS, ids, letter_tokenizer

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.read import sources
from tandem.data.store import making as store_module
from tandem.data.store.opening import open_store
from tandem.data.store.token_store import Counts
from tandem.data.text.template import Template
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
    return open_store(str(source), keys, template, data, max_length)


def refusal(source, data, **changes) -> str:
    with pytest.raises(DataError) as caught:
        opened(source, data, **changes)
    return str(caught.value)


# Reading back


@pytest.mark.parametrize("rows_per_batch", [1, 2, 8192])
def test_preferences_of_two_to_four_completions_are_read_back_as_written(source, monkeypatch, rows_per_batch):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", rows_per_batch)
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


def test_rows_of_no_known_format_are_skipped_when_the_format_is_detected(source):
    write(source, {"comment": "made by hand"}, pair())
    store = opened(source)
    assert (store.format_reason, store.counts.bad) == (
        f"detected from the keys prompt, chosen, rejected of {source}:2",
        {"missing key": 1},
    )


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        (
            {"instruction": "hi", "chosen": "yes", "rejected": "no"},
            {"prompt_key": "question"},
            "read as alpaca (detected from the keys instruction, chosen, rejected), which does not use prompt_key "
            "= question",
        ),
        (
            {"question": "hi", "response_j": "yes", "response_k": "no"},
            {"dataset_name": "question_responses", "chosen_key": "good"},
            "read as question_responses (set by data.*.dataset_name), which does not use chosen_key = good",
        ),
    ],
)
def test_a_key_that_the_format_does_not_use_is_refused(source, row, keys, message):
    write(source, row)
    given = DatasetFields(data_path=str(source), **keys)
    assert refusal(source, LENIENT, keys=given) == (
        f"{source}: {message}. Leave it out, or set another format with dataset_name."
    )


def test_the_keys_of_alpaca_may_be_renamed_by_either_name(source):
    write(source, {"instruction": "hi", "good": "yes", "rejected": "no"})
    for name in ("alpaca", "alpaca_pair"):
        assert len(opened(source, keys=DatasetFields(dataset_name=name, chosen_key="good"))) == 1


def test_a_completion_without_a_score_has_none(source):
    write(source, pair())
    assert np.isnan(opened(source)[0].scores).tolist() == [True, True]


def test_a_score_that_float32_cannot_hold_is_refused_at_its_row(source):
    write(source, pair(), pair() | {"chosen_reward": 1e39, "rejected_reward": 0})
    with pytest.raises(DataError) as caught:
        opened(source, Data())
    assert str(caught.value).splitlines()[:3] == [
        f"{source}: 1 of 2 rows are malformed:",
        "  bad score: 1",
        f"    {source}:2: chosen_reward: 1e+39 is too large. Scores are stored as float32, up to 3.4e+38.",
    ]


def test_the_format_is_detected_from_the_first_row_that_can_be_read(source):
    write(source, "{", group("hi", "yes", "no"))
    store = opened(source)
    assert (store.format, store.format_reason) == (
        "PreferenceDataset",
        f"detected from the keys context, completions of {source}:2",
    )
    write(source, pair())
    store = opened(source)
    assert (store.format, store.format_reason) == (
        "BinaryPreferenceDataset",
        "detected from the keys prompt, chosen, rejected",
    )


def test_a_format_is_remembered_with_its_reason(source):
    write(source, group("hi", "yes", "no"))
    first, again = opened(source), opened(source)
    assert (again.format, again.format_reason) == (first.format, first.format_reason)


def test_a_file_without_a_readable_row_is_refused_row_by_row(source):
    write(source, "{", "[1]")
    message = refusal(source, Data(on_bad_row="skip", max_bad_share=1.0))
    assert message.startswith(f"{source}: none of 2 rows can be read:\n  malformed JSON: 1\n")
    assert "JSON Lines" not in message
    write(source, "once upon a time", "there was")
    assert refusal(source, Data()).endswith(
        "\nThe file is not in JSON Lines format, one object per line. Other formats are recognised by their ending: .json (one "
        "JSON array), .csv, .parquet and .arrow, each also with .gz or .zst."
    )


def test_a_list_of_texts_in_a_json_file_gets_no_hint_to_rename_the_file(tmp_path):
    source = tmp_path / "pairs.json"
    source.write_text('["a"]')
    assert refusal(source, Data()) == (
        f"{source}: none of 1 rows can be read:\n"
        "  not an object: 1\n"
        f"    {source}:1: a text, not a JSON object with a prompt and completions."
    )


def test_an_object_around_rows_is_reported(tmp_path):
    source = tmp_path / "pairs.json"
    source.write_text('{"train": [{"prompt": "a", "chosen": "b", "rejected": "c"}], "test": []}')
    assert refusal(source, Data()) == (
        f"{source}: none of 1 rows can be read:\n"
        "  an object around rows: 1\n"
        f"    {source}:1: an object that contains rows, not a row: train. Save the list as a separate .json file."
    )


@pytest.mark.parametrize(
    ("address", "instead"),
    [
        ("https://huggingface.co/datasets/org/name/blob/main/a.jsonl", "Give the hub dataset by its name: org/name."),
        ("hf://datasets/org/name", "Give the hub dataset by its name: org/name."),
        ("https://example.com/a.jsonl", "Download the file and give its path."),
    ],
)
def test_an_address_is_refused_with_what_to_give_instead(address, instead):
    assert refusal(address, Data()) == f"{address}: tandem does not download from URLs. {instead}"


def test_a_format_that_is_given_is_not_guessed(source):
    write(source, group("hi", "yes", "no"))
    given = opened(source, keys=DatasetFields(dataset_name="PreferenceDataset"))
    assert (given.format, given.format_reason) == ("PreferenceDataset", "set by data.*.dataset_name")
    assert refusal(source, Data(), keys=DatasetFields(dataset_name="BinaryPreferenceDataset")) == (
        f"{source}: none of 1 rows can be read:\n"
        "  missing key: 1\n"
        f"    {source}:1: none of the keys prompt, chosen, rejected. Keys found: context, completions. Set "
        "data.train.prompt_key, chosen_key and rejected_key to other keys, or data.train.dataset_name to another format."
    )


def test_tulu3_reads_by_its_name_what_is_told_as_an_implicit_prompt(source):
    asked = {"role": "user", "content": "hi"}
    sides = {"chosen": "yes", "rejected": "no"}
    write(source, {side: [asked, {"role": "assistant", "content": text}] for side, text in sides.items()})
    chat = Template(letter_tokenizer(), CHAT, {})
    told, named = (
        opened(source, template=chat, keys=DatasetFields(dataset_name=n)) for n in ("auto", "Tulu3Preference")
    )
    assert (told.format, named.format) == ("implicit_prompt", "Tulu3Preference")
    assert told[0].prompt.tolist() == named[0].prompt.tolist()
    assert [c.tolist() for c in told[0].completions] == [c.tolist() for c in named[0].completions]


# Several files, and files of other kinds


def test_the_files_of_a_pattern_are_one_set_in_the_order_of_their_names(tmp_path):
    for name, row in (("b.jsonl", pair("bb")), ("a.jsonl", pair("a")), ("c.csv", pair("ccc"))):
        write(tmp_path / name, row)
    (tmp_path / "c.csv").write_text("prompt,chosen,rejected\nccc,yes,no\n", encoding="utf-8")
    store = opened(tmp_path / "?.*")
    assert [row.place for row in store] == [f"{tmp_path}/a.jsonl:1", f"{tmp_path}/b.jsonl:1", f"{tmp_path}/c.csv:2"]
    assert store.num_prompt_tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("chunk_records", [1, 2, 512])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_max_rows_reads_the_first_rows_of_all_files_of_a_set(tmp_path, monkeypatch, chunk_records, kind):
    monkeypatch.setattr(sources, "CHUNK_RECORDS", chunk_records)
    rows = [pair(prompt=letter * 3) for letter in "abcdef"]
    for name, part in (("1", rows[:4]), ("2", rows[4:])):
        file = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            parquet.write_table(pa.Table.from_pylist(part), file)
        elif kind == "csv":
            file.write_text("prompt,chosen,rejected\n" + "".join(",".join(row.values()) + "\n" for row in part))
        else:
            file.write_text(json.dumps(part) if kind == "json" else "".join(json.dumps(row) + "\n" for row in part))
    everything = [one.prompt.tolist() for one in opened(tmp_path / f"*.{kind}")]
    for most in (1, 3, 4, 5, 100):
        store = opened(tmp_path / f"*.{kind}", keys=DatasetFields(max_rows=most))
        assert [one.prompt.tolist() for one in store] == everything[:most]
        assert store.counts.rows == min(most, 6)


def test_a_file_more_under_a_pattern_is_another_store(tmp_path):
    write(tmp_path / "a.jsonl", pair())
    first = opened(tmp_path / "*.jsonl")
    write(tmp_path / "b.jsonl", pair("so"))
    assert opened(tmp_path / "*.jsonl").fingerprint != first.fingerprint
    assert opened(tmp_path / "a.jsonl").fingerprint == first.fingerprint


def test_the_kind_of_a_file_changes_no_token(tmp_path):
    rows = [pair(), pair("so", "a", "b")]
    write(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected\nhi,yes,no\nso,a,b\n", encoding="utf-8")
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.json", "rows.csv", "rows.jsonl.gz", "rows.parquet"):
        store = opened(tmp_path / name)
        assert [row.prompt.tolist() for row in store] == [ids("hi"), ids("so")]
        assert [c.tolist() for c in store[1].completions] == [[*ids("a"), EOS], [*ids("b"), EOS]]


def test_a_damaged_file_among_several_is_refused_and_leaves_nothing(tmp_path, cache):
    write(tmp_path / "a.jsonl", pair())
    (tmp_path / "b.jsonl").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    assert refusal(tmp_path / "*.jsonl", LENIENT).startswith(f"{tmp_path}/b.jsonl: the archive is damaged or cut off (")
    assert list(cache.iterdir()) == []


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
            "message": "chosen and rejected are identical, so there is no preference to learn.",
        },
    ]


# Judging


def test_a_missing_file_is_named(source):
    assert refusal(source, Data()) == f"{source}: no such file or folder, and not the name of a hub dataset (org/name)."


def test_an_empty_file_is_refused(source):
    write(source, "", "")
    assert (
        refusal(source, Data())
        == f"{source}: the file has no rows. Check that it was written or downloaded completely."
    )


def test_malformed_rows_stop_the_run_with_counts_and_the_first_three_of_each_reason(source, cache):
    write(source, pair(), "[]", "[]", "[]", "[]", pair(prompt=" "))
    message = refusal(source, Data())
    (rejects,) = cache.glob("*/rejects.jsonl")
    assert message == (
        f"{source}: 5 of 6 rows are malformed:\n"
        "  empty prompt: 1\n"
        f"    {source}:6: prompt is empty.\n"
        "  not an object: 4\n"
        f"    {source}:2: a list, not a JSON object with a prompt and completions.\n"
        f"    {source}:3, {source}:4: the same.\n"
        f"  All of them: {rejects}\n"
        "Fix them."
    )


def test_skipping_stops_beyond_the_share_of_bad_rows_and_not_at_it(source):
    write(source, pair(), pair("so"), pair("why"), pair(prompt=" "))
    assert len(opened(source, Data(on_bad_row="skip", max_bad_share=0.25))) == 3
    assert refusal(source, Data(on_bad_row="skip", max_bad_share=0.24)) == (
        f"{source}: 1 of 4 rows are malformed, over data.max_bad_share=0.24:\n"
        "  empty prompt: 1\n"
        f"    {source}:4: prompt is empty.\n"
        "Fix them, or set data.max_bad_share=0.25."
    )


def test_an_empty_prompt_stops_the_run_and_an_empty_completion_is_left_out(source):
    keys = DatasetFields(dataset_name="BinaryPreferenceDataset")
    messages = pair() | {"prompt": [{"role": "user", "content": " "}]}
    write(source, pair(prompt=""), messages, pair(), pair("so"))
    assert refusal(source, Data(), keys=keys) == (
        f"{source}: 2 of 4 rows are malformed:\n"
        "  empty prompt: 2\n"
        f"    {source}:1: prompt is empty.\n"
        f"    {source}:2: prompt[0]: the user turn is empty.\n"
        "Fix them, or leave them out: data.on_bad_row=skip data.max_bad_share=0.5."
    )
    write(source, pair(chosen=""), pair(), pair("so"))
    store = opened(source, Data(max_filtered_share=0.5))
    assert (store.counts.bad, store.counts.filtered) == ({}, {"empty completion": 1})
    assert refusal(source, Data()) == (
        f"{source}: 1 of 3 rows were filtered, over data.max_filtered_share=0.1:\n"
        "  empty completion: 1\n"
        f"    {source}:1: a completion is empty.\n"
        "Fix the file, or set data.max_filtered_share=0.34."
    )


def test_over_long_preferences_stop_the_run_where_asked_to(source):
    write(source, pair(), pair("what a question"))
    assert len(opened(source, Data(max_filtered_share=0.5), max_length=8)) == 1
    assert refusal(source, Data(overlong="error", max_filtered_share=0.5), max_length=8) == (
        f"{source}: 1 of 2 preferences are over-long:\n"
        "  over-long: 1\n"
        f"    {source}:2: 19 tokens, over policy.max_total_sequence_length=8.\n"
        "Raise policy.max_total_sequence_length, or set data.overlong=drop, truncate_prompt or truncate_completion."
    )


def test_filtering_stops_beyond_its_share_and_not_at_it(source):
    write(source, pair(), pair("so"), pair("why"), pair(chosen="no"))
    assert len(opened(source, Data(max_filtered_share=0.25))) == 3
    assert refusal(source, Data()) == (
        f"{source}: 1 of 4 rows were filtered, over data.max_filtered_share=0.1:\n"
        "  equal completions: 1\n"
        f"    {source}:4: chosen and rejected are identical, so there is no preference to learn.\n"
        "Fix the file, or set data.max_filtered_share=0.25."
    )


def test_only_over_long_rows_are_answered_with_the_limit(source):
    write(source, pair(), pair("what a question this is, and how long"))
    assert refusal(source, Data(), max_length=20).endswith(
        "Raise policy.max_total_sequence_length, set data.overlong=truncate_prompt or truncate_completion, fix the "
        "file, or "
        "set data.max_filtered_share=0.5."
    )


def test_a_file_without_any_usable_preference_is_refused(source):
    write(source, pair(chosen="no"))
    assert refusal(source, Data(max_filtered_share=1.0)) == (
        f"{source}: no usable preference among 1 rows:\n"
        "  equal completions: 1\n"
        f"    {source}:1: chosen and rejected are identical, so there is no preference to learn.\n"
        "Fix the file."
    )


def test_malformed_and_filtered_rows_are_told_at_once(source):
    write(source, pair(), pair("so"), pair("why"), pair("how"), pair(chosen="no"), '{"prompt": "a"')
    assert refusal(source, Data()) == (
        f"{source}: 1 of 6 rows are malformed:\n"
        "  malformed JSON: 1\n"
        f"    {source}:6: column 15: malformed JSON: Expecting ',' delimiter.\n"
        "Fix them, or leave them out: data.on_bad_row=skip data.max_bad_share=0.17.\n"
        f"{source}: 1 of 6 rows were filtered, over data.max_filtered_share=0.1:\n"
        "  equal completions: 1\n"
        f"    {source}:5: chosen and rejected are identical, so there is no preference to learn.\n"
        "Fix the file, or set data.max_filtered_share=0.17."
    )


def test_most_of_a_file_is_not_offered_to_be_left_out(source):
    """A JSON array in a file of lines: its last element is a row by itself."""
    source.write_text("[\n" + ",\n".join(map(json.dumps, [pair(), pair("so"), pair("why")])) + "\n]\n")
    assert refusal(source, Data()).endswith(
        "Fix them. The file is not in JSON Lines format, one object per line. Other formats are recognised by their "
        "ending: .json (one JSON array), .csv, .parquet and .arrow, each also with .gz or .zst."
    )


def test_what_is_too_long_however_it_is_cut_is_not_told_to_be_cut_so(source):
    write(source, pair("a prompt of many letters"), pair("another one of many letters"))
    told = refusal(source, Data(overlong="truncate_completion"), max_length=4)
    assert told.endswith("Raise policy.max_total_sequence_length, set data.overlong=truncate_prompt, or fix the file.")


# The cache


def test_the_same_content_in_the_same_place_is_tokenised_once(source, monkeypatch):
    write(source, pair())
    first = opened(source)
    monkeypatch.setattr(store_module, "write_store", lambda *args, **kwargs: pytest.fail("tokenised again"))
    assert opened(source).fingerprint == first.fingerprint
    assert opened(source).folder == first.folder


def test_a_file_that_changes_while_it_is_read_is_refused_and_leaves_nothing(source, cache, monkeypatch):
    """Otherwise the new rows would be stored under the fingerprint of the old file."""
    write_store = store_module.write_store

    def changed_meanwhile(*given):
        write(source, pair(chosen="never"))
        return write_store(*given)

    write(source, pair(chosen="yes"))
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(store_module, "write_store", changed_meanwhile)
        assert refusal(source, LENIENT) == (
            f"{source}: the file changed while it was read, so its rows may be a mix of two versions. Nothing was stored; "
            "start again when the file is complete."
        )
    write(source, pair(chosen="yes"))
    assert opened(source)[0].completions[0].tolist() == [*ids("yes"), EOS]


def test_the_same_content_in_another_place_is_another_store_with_its_own_places(source, tmp_path):
    write(source, pair())
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(source.read_bytes())
    assert opened(source).fingerprint != opened(copy).fingerprint
    assert (opened(source).place(0), opened(copy).place(0)) == (f"{source}:1", f"{copy}:1")


def test_the_limits_on_bad_rows_are_checked_each_time_without_tokenising_again(source, cache):
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
        patched.setattr(store_module, "write_manifest", fails)
        with pytest.raises(KeyboardInterrupt):
            opened(source)
    assert list(cache.iterdir()) == []
    assert len(opened(source)) == 1


def test_an_array_in_a_jsonl_file_gets_a_hint_to_rename_the_file(source):
    source.write_text(json.dumps([pair()]))
    assert refusal(source, Data()).endswith("If the file is one JSON array, rename it to end in .json.")

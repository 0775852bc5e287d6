"""A prepared folder whose files were changed and whose manifest was written again: one message, never a read out of bounds."""

import json
import multiprocessing
import shutil

import numpy as np
import pyarrow as pa
import pytest
from letters import letter_tokenizer

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.store import opening
from tandem.data.store.opening import open_store
from tandem.data.store.token_store import TokenStore
from tandem.data.store.tokens_file import SCHEMA
from tandem.data.text.template import Template
from tandem.errors import DataError
from tandem.storage.cache import read_manifest, write_manifest

RAW = Template(letter_tokenizer(), None, {})
AGAIN = "The prepared data is damaged. Prepare it again, with tandem prepare."
INT32 = pa.int32()
ROWS = [("hi", "yes", "no"), ("what", "a", "bb"), ("so", "dd", "e")]


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A prepared folder of three pairs."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "pairs.jsonl"
    source.write_text(
        "".join(json.dumps(dict(zip(("prompt", "chosen", "rejected"), r, strict=True))) + "\n" for r in ROWS)
    )
    folder = tmp_path / "prepared"
    shutil.copytree(opened(source).folder, folder)
    return folder


def opened(source) -> TokenStore:
    return open_store(str(source), DatasetFields(), RAW, Data(num_workers=0), 100)


def refusal(folder) -> str:
    with pytest.raises(DataError) as caught:
        opened(folder)
    return str(caught.value)


def remake_manifest(folder, **changes) -> None:
    facts = {key: value for key, value in read_manifest_unverified(folder).items() if key not in OWN_KEYS}
    write_manifest(folder, **{**facts, **changes})


OWN_KEYS = ("files", "fingerprint_of_manifest")


def read_manifest_unverified(folder) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def written(folder) -> pa.RecordBatch:
    """The one batch of a folder, not tied to its file."""
    with pa.OSFile(str(folder / "tokens.arrow")) as file:
        return pa.ipc.open_file(file).get_batch(0)


def rewrite(folder, schema=SCHEMA, options=None, times=1, **columns) -> None:
    """Write the batch of a folder again with other columns, and the manifest for it."""
    batch = written(folder)
    arrays = [columns.get(name, batch.column(name) if name in SCHEMA.names else None) for name in schema.names]
    changed = pa.RecordBatch.from_arrays(arrays, schema=schema)
    with pa.OSFile(str(folder / "tokens.arrow"), "wb") as sink:
        with pa.ipc.new_file(sink, schema, options=options) as writer:
            for _ in range(times):
                writer.write_batch(changed)
    remake_manifest(folder)


def lists(*rows, of=INT32) -> pa.LargeListArray:
    return pa.array(rows, pa.large_list(of))


def patch(folder, before: list[int], after: list[int]) -> None:
    """Replace offsets in the bytes of the file, and write the manifest for it."""
    file = folder / "tokens.arrow"
    old, new = (np.array(offsets, np.int64).tobytes() for offsets in (before, after))
    data = file.read_bytes()
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, new))
    remake_manifest(folder)


def test_a_folder_that_nobody_changed_is_opened(prepared):
    rewrite(prepared)
    assert [len(row.prompt) for row in opened(prepared)] == [2, 4, 2]


# Tokens: prompts of 2, 4 and 2; completions of 4 and 3, 2 and 3, 3 and 2 with the end of each.

ATTACKS = {
    "a row that is null": ({"prompt": lists([1, 2], None, [3])}, ": batch 0: prompt has null values"),
    "a token that is null": ({"prompt": lists([1, 2], [None, 2], [3])}, ": batch 0: prompt has null values"),
    "a place that is null": (
        {"place": pa.array(["a", None, "c"], pa.large_string())},
        ": batch 0: place has null values",
    ),
    "a length too long": (
        {"lengths": lists([4, 2**31 - 1], [2, 3], [3, 2])},
        ": batch 0: lengths do not add up to the number of completion tokens",
    ),
    "a length below zero": (
        {"lengths": lists([-4, 11], [2, 3], [3, 2])},
        ": batch 0: a prompt or a completion has no tokens",
    ),
    "a completion without tokens": (
        {"lengths": lists([7, 0], [2, 3], [3, 2])},
        ": batch 0: a prompt or a completion has no tokens",
    ),
    "a prompt without tokens": ({"prompt": lists([], [2], [3])}, ": batch 0: a prompt or a completion has no tokens"),
    "one completion": (
        {"lengths": lists([7], [2, 3], [3, 2])},
        ": batch 0: a preference has fewer than two completions",
    ),
    "a score too few": (
        {"scores": lists([1.0], [1.0, 0.0], [1.0, 0.0], of=pa.float32())},
        ": batch 0: column scores has missing or invalid values",
    ),
    "a score without end": (
        {"scores": lists([1.0, np.inf], [1.0, 0.0], [1.0, 0.0], of=pa.float32())},
        ": batch 0: column scores has missing or invalid values",
    ),
    "a winner without a loser": (
        {"winners": lists([0, 0], [0], [0])},
        ": batch 0: winners and losers do not form pairs",
    ),
    "no pair": (
        {"winners": lists([], [0], [0]), "losers": lists([], [1], [1])},
        ": batch 0: winners and losers do not form pairs",
    ),
    "a winner that does not exist": (
        {"winners": lists([2], [0], [0])},
        ": batch 0: a pair refers to a completion that does not exist",
    ),
    "a loser before the first": (
        {"losers": lists([-1], [1], [1])},
        ": batch 0: a pair refers to a completion that does not exist",
    ),
    "a pair of one": ({"losers": lists([0], [1], [1])}, ": batch 0: a pair compares a completion with itself"),
    "a position beyond": (
        {"unscored": lists([7], [], [])},
        ": batch 0: a position in unscored is outside the completions",
    ),
    "positions that fall": (
        {"unscored": lists([], [3, 1], [2])},
        ": batch 0: positions in unscored are not in increasing order",
    ),
    "a token below zero": ({"prompt": lists([1, -2], [2], [3])}, ": batch 0: a token id is negative"),
}


# Offsets of the prompts, 0 2 6 8, and of the places a b c.
OFFSETS = {
    "a list beyond its values": ([0, 2, 6, 8], [0, 2, 6, 2**40], ": "),
    "a list before its values": ([0, 2, 6, 8], [-(2**33), 2, 6, 8], ": "),
    "lists that overlap": ([0, 2, 6, 8], [0, 6, 2, 8], ": "),
    "values before the first row": ([0, 2, 6, 8], [1, 2, 6, 8], ": batch 0: prompt has values that belong to no row"),
    "values after the last row": ([0, 2, 6, 8], [0, 2, 6, 7], ": batch 0: prompt has values that belong to no row"),
    "a text beyond its bytes": ([0, 10, 20, 30], [0, 10, 20, 2**40], ": "),
    "a text before its bytes": ([0, 10, 20, 30], [-(2**33), 10, 20, 30], ": "),
}


@pytest.mark.parametrize("attack", OFFSETS)
def test_offsets_out_of_bounds_are_refused_and_not_followed(prepared, attack):
    before, after, problem = OFFSETS[attack]
    rewrite(prepared, place=pa.array(["a" * 10, "b" * 10, "c" * 10], pa.large_string()))
    patch(prepared, before, after)
    message = refusal(prepared)
    assert message.startswith(f"{prepared}/tokens.arrow{problem}")
    assert message.endswith(f". {AGAIN}")
    assert "\n" not in message


def test_a_text_that_is_not_utf8_is_refused(prepared):
    file = prepared / "tokens.arrow"
    data = file.read_bytes()
    file.write_bytes(data.replace(b"pairs.jsonl:1", b"pairs.jsonl\xff1"))
    remake_manifest(prepared)
    assert refusal(prepared).startswith(f"{file}: In column 8: Invalid: Invalid UTF8 sequence at string index 0")


@pytest.mark.parametrize("attack", ATTACKS)
def test_columns_that_do_not_fit_are_refused_and_not_followed(prepared, attack):
    columns, problem = ATTACKS[attack]
    rewrite(prepared, **columns)
    message = refusal(prepared)
    assert message.startswith(f"{prepared}/tokens.arrow{problem}")
    assert message.endswith(f". {AGAIN}")
    assert "\n" not in message


def test_positions_that_are_not_scored_may_fall_from_row_to_row(prepared):
    rewrite(prepared, unscored=lists([1, 4], [2], [0, 3]))
    assert [[list(part) for part in row.unscored] for row in opened(prepared)] == [[[1], [0]], [[], [0]], [[0], [0]]]


def test_other_columns_are_refused(prepared):
    schema = SCHEMA.set(0, pa.field("prompt", pa.large_list(pa.int64())))
    rewrite(prepared, schema, prompt=lists([1], [2], [3], of=pa.int64()))
    assert refusal(prepared) == f"{prepared}/tokens.arrow does not have the columns that tandem writes. {AGAIN}"


def test_compressed_batches_are_refused(prepared):
    """Ten million tokens in a few kilobytes."""
    many = pa.LargeListArray.from_arrays(
        pa.array([0, 1, 2, 10_000_000], pa.int64()), pa.array(np.zeros(10_000_000, np.int32))
    )
    rewrite(prepared, options=pa.ipc.IpcWriteOptions(compression="zstd"), prompt=many)
    assert (prepared / "tokens.arrow").stat().st_size < 20_000
    assert refusal(prepared) == (
        f"{prepared}/tokens.arrow has compressed or repeated batches, which tandem does not write. {AGAIN}"
    )


def test_more_rows_than_the_manifest_says_are_refused(prepared):
    rewrite(prepared, times=2)
    assert refusal(prepared) == f"{prepared}/tokens.arrow has 6 rows, but its manifest says 3. {AGAIN}"


def read_all_mutated(folder, at: list[int], answers) -> None:
    """In a separate process, change each of these bytes in turn and read everything."""
    file = folder / "tokens.arrow"
    whole, facts = file.read_bytes(), read_manifest(folder)
    refused = 0
    for byte in at:
        file.unlink()  # an earlier one may still be mapped
        file.write_bytes(whole[:byte] + bytes([whole[byte] ^ (0x80 if byte % 2 else 0x04)]) + whole[byte + 1 :])
        try:
            store = TokenStore(folder, facts)
            for row in store:
                assert max(row.prompt.sum(), *(c.sum() for c in row.completions)) >= 0 and row.place is not None
            assert store.longest.min() > 0 and store.highest_token_id >= 0 and len(store.digests) == 3
        except ValueError as error:
            assert str(file) in str(error)
            refused += 1
    answers.put(refused)


def mutated(folder, at: list[int]) -> int:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=read_all_mutated, args=(folder, at, answers))
    child.start()
    child.join()
    assert child.exitcode == 0
    return answers.get()


def test_no_changed_byte_of_the_tokens_is_followed_out_of_bounds(prepared):
    assert mutated(prepared, list(range(0, (prepared / "tokens.arrow").stat().st_size, 11))) > 50


@pytest.mark.slow
def test_no_byte_of_the_tokens_at_all_is_followed_out_of_bounds(prepared):
    assert mutated(prepared, list(range((prepared / "tokens.arrow").stat().st_size))) > 500


# The manifest


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"counts": {"rows": 3}}, "counts.accepted: Field required"),
        (
            {"counts": {"rows": 3, "accepted": "3", "bad": {}, "filtered": {}}},
            "counts.accepted: Input should be a valid integer",
        ),
        (
            {"counts": {"rows": 4, "accepted": 3, "bad": {}, "filtered": {}}},
            "accepted, bad and filtered rows do not add up to the number of rows",
        ),
        ({"made_of": 5}, "made_of: Input should be a valid dictionary"),
        (
            {"made_of": {"sources": [["a", "b"]], "limits": {}, "text": {}}},
            "made_of.sources.0: List should have at least 3 items",
        ),
        ({"fingerprint": "../../../outside"}, "fingerprint: String should match pattern '^[0-9a-f]{32}$'"),
        ({"longer_than": {"x": 1}}, "longer_than.x.[key]: String should match pattern"),
        ({"examples": [{"place": "a"}]}, "examples.0.kind: Field required"),
        ({"packs": 3}, "packs: Input should be a valid list"),
        ({"notes": None}, "notes: Input should be a valid dictionary"),
    ],
)
def test_a_manifest_of_other_facts_is_refused_by_name(prepared, changes, problem):
    remake_manifest(prepared, **changes)
    message = refusal(prepared)
    assert message.startswith(f"{prepared}/manifest.json: {problem}")
    assert message.endswith(f". {AGAIN}")


def test_a_manifest_without_a_version_is_refused_by_name(prepared):
    facts = {key: value for key, value in read_manifest(prepared).items() if key not in ("files", "format_version")}
    write_manifest(prepared, **facts)
    assert refusal(prepared) == f"{prepared}/manifest.json: 'format_version' is missing. {AGAIN}"


def test_a_manifest_nested_without_end_is_refused(prepared):
    (prepared / "manifest.json").write_text('{"files": ' + "[" * 100_000)
    assert refusal(prepared).startswith(f"{prepared}/manifest.json is missing or damaged (")


@pytest.mark.parametrize("name", ["tokens.arrow", "rejects.jsonl"])
def test_a_manifest_that_leaves_out_a_file_is_refused(prepared, name):
    facts = {key: value for key, value in read_manifest(prepared).items() if key != "files"}
    content = (prepared / name).read_bytes()
    (prepared / name).unlink()
    write_manifest(prepared, **facts)
    (prepared / name).write_bytes(content)
    assert refusal(prepared) == f"{prepared}/manifest.json does not list {name}. {AGAIN}"


@pytest.mark.parametrize(
    "path", ["/proc/self/environ", "/etc/hostname", "{folder}/../pairs.jsonl", "{folder}/link.jsonl"]
)
def test_a_source_that_is_not_a_data_file_is_not_read(prepared, monkeypatch, path):
    (prepared / "link.jsonl").symlink_to("/etc/hostname")
    made_of = read_manifest_unverified(prepared)["made_of"]
    remake_manifest(prepared, made_of={**made_of, "sources": [["pairs", path.format(folder=prepared), "0" * 64]]})
    monkeypatch.setattr(opening, "content_of", lambda file: pytest.fail(f"{file} was read"))
    assert len(opened(prepared)) == 3


def test_a_source_that_changed_is_reported(prepared):
    made_of = read_manifest_unverified(prepared)["made_of"]
    ((name, path, _),) = made_of["sources"]
    remake_manifest(prepared, made_of={**made_of, "sources": [[name, path, "0" * 64]]})
    assert (
        refusal(prepared)
        == f"{prepared}: {path} has changed since it was prepared. Prepare it again, with tandem prepare."
    )


# Rows that were left out

REJECT = '{"place": "a.jsonl:1", "kind": "bad", "reason": "not an object", "message": "a number."}\n'


def test_rows_that_were_left_out_are_read(prepared):
    (prepared / "rejects.jsonl").write_text(REJECT * 2)
    remake_manifest(prepared)
    assert len(opened(prepared)) == 3


@pytest.mark.parametrize(
    "line",
    [
        "\n",
        "5\n",
        "{}\n",
        REJECT.replace('"a number."', "5"),
        "[" * 100_000,
        REJECT.replace("}", ', "split": "x"}'),
        "a" * 2**21,
    ],
    ids=["empty", "number", "object", "type", "nested", "more", "long"],
)
def test_a_line_that_is_not_a_row_left_out_is_refused(prepared, line):
    (prepared / "rejects.jsonl").write_text(REJECT + line)
    remake_manifest(prepared)
    assert refusal(prepared) == f"{prepared}/rejects.jsonl:2: not a valid entry for a row that was left out. {AGAIN}"


def test_rows_left_out_that_are_missing_are_told(prepared):
    (prepared / "rejects.jsonl").unlink()
    remake_manifest(prepared)
    assert refusal(prepared) == f"{prepared}/manifest.json does not list rejects.jsonl. {AGAIN}"

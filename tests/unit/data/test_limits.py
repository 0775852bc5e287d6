"""Small files made to exhaust memory, disk or time are refused at a limit, with a message that says how to raise it."""

import gzip
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from letters import letter_tokenizer

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.read import limits, tables
from tandem.data.read.limits import Expansion, format_bytes, is_nested_too_deep
from tandem.data.read.sources import RowError, SourceRow, read_chunks, read_rows
from tandem.data.store import making
from tandem.data.store.opening import open_store
from tandem.data.text.template import Template
from tandem.errors import DataError

MB = 10**6
PAIR = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
TRUST = "Such a file can fill the memory or the disk. If you trust it, raise data.max_expansion (now 100 times the file's size)."
RAW = Template(letter_tokenizer(), None, {})
LENIENT = Data(on_bad_row="skip", max_bad_share=1.0, max_filtered_share=1.0, num_workers=0)


def refusal(path: Path, **options) -> str:
    with pytest.raises(DataError) as caught:
        for _ in read_chunks(path, **options):
            pass
    return str(caught.value)


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


PACKED = {"gz": gzip.compress, "zst": zstd}


@pytest.fixture
def small_limit(monkeypatch):
    """What may always be unpacked is 20 kB in place of 256 MiB."""
    monkeypatch.setattr(limits, "ALLOWED_EXPANDED_BYTES", 20_000)


# Archives


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("content", [b"\n", b" ", b'{"prompt": "hi"}\n'], ids=["lines", "one line", "rows"])
def test_an_archive_of_lines_that_expands_too_much_is_refused(tmp_path, small_limit, packed, content):
    path = tmp_path / f"bomb.jsonl.{packed}"
    path.write_bytes(PACKED[packed](content * (4 * MB // len(content))))
    size = path.stat().st_size
    limit = max(20_000, 100 * size)
    assert limit < 3 * MB
    assert refusal(path) == f"{path}: the file of {format_bytes(size)} expands to over {format_bytes(limit)}. {TRUST}"


@pytest.mark.parametrize("packed", PACKED)
def test_files_decompressed_to_the_temporary_folder_are_limited(tmp_path, small_limit, monkeypatch, packed):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    written = []
    real = tempfile.NamedTemporaryFile
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda **kw: written.append(real(**kw)) or written[-1])
    path = tmp_path / f"bomb.parquet.{packed}"
    path.write_bytes(PACKED[packed](b"PAR1" + bytes(50 * MB)))
    assert refusal(path).endswith(TRUST)
    assert len(written) == 1
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_ratio_is_not_applied_to_small_files(tmp_path):
    path = tmp_path / "pairs.jsonl.zst"
    path.write_bytes(zstd((json.dumps(PAIR) + "\n").encode() * 100_000))
    assert 5_000_000 / path.stat().st_size > 1_000
    assert sum(1 for row in read_rows(path)) == 100_000


def test_the_key_raises_the_limit(tmp_path, small_limit, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "pairs.jsonl.zst"
    path.write_bytes(zstd((json.dumps(PAIR) + "\n").encode() * 1_000))
    with pytest.raises(DataError, match=r"data\.max_expansion \(now 100 times"):
        open_store(str(path), DatasetFields(), RAW, LENIENT, 100)
    allowed = LENIENT.model_copy(update={"max_expansion": 100_000.0})
    assert len(open_store(str(path), DatasetFields(), RAW, allowed, 100)) == 1_000


# Tables


def in_child(path: Path) -> tuple[str, int]:
    """What the reader says of a file, and how far its memory rose, in a child that cannot take over 8 GiB."""
    answers = multiprocessing.get_context("fork").Queue()

    def work() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (pages + 8 * 1024**3,) * 2)
        pa.set_memory_pool(pa.system_memory_pool())  # the usual one may have reserved a GiB already
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            for _ in read_chunks(path):
                pass
            answers.put(("read to its end", 0))
        except DataError as error:
            answers.put((str(error), 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)))

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    answer = answers.get(timeout=120)
    child.join()
    assert child.exitcode == 0
    return answer


def repeated(text: str, times: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(times, np.int32)), pa.array([text]))


def test_a_table_that_repeats_one_text_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    """Two kilobytes that stand for 15 GB."""
    monkeypatch.setattr(limits, "ALLOWED_MEMORY_BYTES", 300 * MB)
    path = tmp_path / "bomb.parquet"
    one = repeated("a" * 10 * MB, 512)
    table = pa.table(dict.fromkeys(PAIR, one))
    parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 2_000
    message, memory = in_child(path)
    assert (
        message
        == f"{path}: the file of {format_bytes(path.stat().st_size)} takes over 300 MB of memory to read. {TRUST}"
    )
    assert memory < 600 * MB


def test_a_huge_list_of_nulls_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ALLOWED_MEMORY_BYTES", 100 * MB)
    path = tmp_path / "bomb.parquet"
    nulls = pa.ListArray.from_arrays(pa.array([0, 30 * MB], pa.int32()), pa.nulls(30 * MB, pa.int8()))
    parquet.write_table(pa.table({"x": nulls}), path)
    assert path.stat().st_size < 2_000
    message, memory = in_child(path)
    assert (
        message
        == f"{path}: the file of {format_bytes(path.stat().st_size)} takes over 100 MB of memory to read. {TRUST}"
    )
    assert memory < 300 * MB


def test_a_compressed_arrow_file_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ALLOWED_MEMORY_BYTES", 100 * MB)
    path = tmp_path / "bomb.arrow"
    batch = pa.record_batch({"prompt": pa.array(["a" * 150 * MB])})
    with pa.ipc.new_file(path, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    assert path.stat().st_size < 10_000
    message, memory = in_child(path)
    assert (
        message
        == f"{path}: the file of {format_bytes(path.stat().st_size)} takes over 100 MB of memory to read. {TRUST}"
    )
    assert memory < 100 * MB


def views(text: str, times: int) -> pa.Array:
    """Views of one text: its length, first four letters, buffer and offset, many times."""
    view = np.array([len(text), int.from_bytes(text[:4].encode(), "little"), 0, 0], np.int32)
    buffers = [None, pa.py_buffer(np.tile(view, times)), pa.py_buffer(text.encode())]
    return pa.Array.from_buffers(pa.string_view(), times, buffers)


@pytest.mark.parametrize("make", [repeated, views], ids=["dictionary", "view"])
def test_an_arrow_file_that_repeats_one_text_is_refused(tmp_path, small_limit, make):
    path = tmp_path / "bomb.arrow"
    batch = pa.record_batch({"prompt": make("a" * 100_000, 300)})
    with pa.ipc.new_file(path, batch.schema) as writer:
        writer.write_batch(batch)
    size = path.stat().st_size
    assert (
        refusal(path) == f"{path}: the file of {format_bytes(size)} expands to over {format_bytes(100 * size)}. {TRUST}"
    )


def test_a_row_of_a_table_over_the_limit_of_a_line_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_RECORD_BYTES", 1_000)
    path = tmp_path / "pairs.parquet"
    parquet.write_table(pa.table({"prompt": ["a", "b", "c" * 2_000]}), path)
    assert refusal(path) == f"{path}: row 3 is over 64 MB. Remove it or shorten it."


def test_large_rows_of_a_table_come_in_smaller_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_RECORD_BYTES", 1_000)
    path = tmp_path / "pairs.parquet"
    parquet.write_table(pa.table({"prompt": [letter * 400 for letter in "abcde"]}), path)
    chunks = list(read_chunks(path))
    assert [chunk.numbers for chunk in chunks] == [(1, 2), (3,), (4, 5)]
    assert [chunk.done for chunk in chunks] == [2 / 5, 3 / 5, 1.0]
    assert [row.value["prompt"][0] for row in read_rows(path)] == list("abcde")


@pytest.mark.parametrize(
    ("array", "name"),
    [
        (pa.array([[1]], pa.list_view(pa.int8())), "list_view"),
        (pa.array([{"a": [1]}], pa.struct({"a": pa.large_list_view(pa.int8())})), "large_list_view"),
        (pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array(["a"])), "run_end_encoded"),
        (
            pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array(["a"])]),
            "dense_union",
        ),
    ],
)
def test_types_that_can_repeat_values_any_number_of_times_are_refused(tmp_path, array, name):
    path = tmp_path / "pairs.arrow"
    batch = pa.record_batch({"x": array})
    with pa.ipc.new_file(path, batch.schema) as writer:
        writer.write_batch(batch)
    assert refusal(path) == (
        f"{path}: column 'x' has the Arrow type {name}, which tandem cannot read. Convert it to a plain list or text."
    )


# Columns


def test_a_csv_header_of_100_000_columns_is_refused_at_once(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"c{i}" for i in range(100_000)) + "\n")
    start = time.process_time()
    assert refusal(path) == (
        f"{path}:1: 100000 columns, over the limit of 10000. Keep only those of the prompts and completions."
    )
    assert time.process_time() - start < 2


def test_short_rows_below_a_wide_header_are_read_quickly(tmp_path):
    path = tmp_path / "wide.csv"
    path.write_text(",".join(f"c{i}" for i in range(10_000)) + "\n" + "a\n" * 20_000)
    start = time.process_time()
    rows = list(read_rows(path))
    assert len(rows) == 20_000 and all(isinstance(row, RowError) for row in rows)
    assert time.process_time() - start < 5


def test_a_duplicate_column_is_reported_with_its_name(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,chosen,prompt,chosen\n")
    assert refusal(path) == f"{path}:1: the column 'prompt' appears twice in the header. Remove one."


def test_a_table_of_too_many_columns_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_COLUMNS", 2)
    path = tmp_path / "wide.parquet"
    parquet.write_table(pa.table({name: ["a"] for name in PAIR}), path)
    assert refusal(path) == f"{path}: 3 columns, over the limit of 2. Keep only those of the prompts and completions."


# Nesting


def nested(depth: int) -> str:
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


@pytest.mark.parametrize(("depth", "is_read"), [(100, True), (101, False), (900, False)])
def test_json_is_read_to_a_depth_of_100(tmp_path, depth, is_read):
    path = tmp_path / "pairs.jsonl"
    path.write_text(nested(depth) + "\n")
    (row,) = read_rows(path)
    assert isinstance(row, SourceRow) == is_read
    if not is_read:
        assert str(row) == f"{path}:1: JSON nested over 100 levels deep. Flatten it or remove it."


@pytest.mark.parametrize(("depth", "is_read"), [(100, True), (101, False), (900, False)])
def test_elements_of_an_array_are_read_to_a_depth_of_100(tmp_path, depth, is_read):
    path = tmp_path / "pairs.json"
    path.write_text(f"[{nested(1)}, {nested(depth)}]")
    if is_read:
        assert len(list(read_rows(path))) == 2
    else:
        assert refusal(path) == f"{path}: element 2: JSON nested over 100 levels deep. Flatten it or remove it."


def test_depth_is_counted_through_lists_and_objects():
    assert not is_nested_too_deep(json.loads("[" * 100 + "]" * 100))
    assert is_nested_too_deep(json.loads("[" * 101 + "]" * 101))
    assert not is_nested_too_deep([{"a": "[" * 500}] * 1_000)


# Rejects


def test_all_rejects_are_counted_even_if_not_all_are_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(making, "REJECTS_BYTES", 2_000)
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(PAIR) + "\n" + "1\n" * 700)  # 1,450 bytes
    store = open_store(str(path), DatasetFields(), RAW, LENIENT, 100)
    assert store.counts.bad == {"not an object": 700}
    text = (store.folder / "rejects.jsonl").read_text()
    *listed, last = map(json.loads, text.splitlines())
    assert len(text) < 2_300
    assert last == {
        "place": f"{path}:{len(listed) + 2}",
        "kind": "bad",
        "reason": "not an object",
        "message": f"{700 - len(listed)} rows from here on are not listed: this file is limited to 2 kB.",
    }


def test_a_message_has_at_most_a_thousand_characters(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(PAIR) + "\n" + json.dumps({"a" * 50_000: 1, "prompt": "hi"}) + "\n")
    store = open_store(str(path), DatasetFields(), RAW, LENIENT, 100)
    (reject,) = map(json.loads, (store.folder / "rejects.jsonl").read_text().splitlines())
    assert len(reject["message"]) <= 1_003


# The limits themselves


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1_900, "1.9 kB"), (328_000, "328 kB"), (2**28, "268 MB")],
)
def test_bytes_are_formatted_with_units(num_bytes, words):
    assert format_bytes(num_bytes) == words


def test_large_files_are_limited_by_the_ratio_and_small_ones_by_the_amount():
    small, large = (Expansion(Path("pairs.gz"), size, 100.0) for size in (1_000, 10**11))
    assert (small.memory, large.memory) == (2 * 1024**3, 10**13)
    large.add(10**13)  # 100 GB of text at a hundredth of its size
    with pytest.raises(DataError, match=r"pairs.gz: the file of 1 kB expands to over 268 MB"):
        small.add(2**28 + 1)

"""Machines tokenise a set together: every store has the bytes of one machine alone, and a failure of one ends all."""

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from letters import letter_tokenizer
from patience import within

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.store import machines as module
from tandem.data.store import making, opening
from tandem.data.store.machines import ALONE, Machines
from tandem.data.store.opening import open_store
from tandem.data.text.template import Template
from tandem.errors import AlreadyReportedError, DataError

RAW = Template(letter_tokenizer(), None, {})
LENIENT = Data(on_bad_row="skip", max_bad_share=1.0, max_filtered_share=1.0, num_workers=1)
FILES = ("tokens.arrow", "rejects.jsonl", "manifest.json")
SECONDS = 60


@pytest.fixture(autouse=True)
def impatient():
    with within(SECONDS):
        yield


@dataclass
class Network:
    """Exchanges between threads, each of which stands for a machine."""

    count: int
    slots: list[Any] = field(default_factory=list)
    num_exchanges: int = 0

    def __post_init__(self):
        self.slots = [None] * self.count
        self.barrier = threading.Barrier(self.count, timeout=SECONDS / 2)

    def exchange(self, number: int) -> Callable[[Any], list[Any]]:
        def exchange(message):
            self.slots[number] = message
            self.barrier.wait()
            found = list(self.slots)
            self.num_exchanges += number == 0
            self.barrier.wait()
            return found

        return exchange

    def machines(self) -> list[Machines]:
        names = [f"rank {number} on gpu-{number}" for number in range(self.count)]
        return [Machines(number, names, self.exchange(number)) for number in range(self.count)]


@pytest.fixture
def on_machines(monkeypatch, tmp_path):
    """Runs a function for each machine at the same time; the cache is found by thread."""
    caches = threading.local()
    for one in (opening, making):
        if hasattr(one, "cache_dir"):
            monkeypatch.setattr(one, "cache_dir", lambda: getattr(caches, "folder", tmp_path / "alone"))
    monkeypatch.setattr(making, "check_cache_dir", lambda: None)

    def run(do, folders):
        network = Network(len(folders))
        outcomes: list[Any] = [None] * len(folders)

        def work(number, machines):
            caches.folder = folders[number]
            try:
                with machines.taking_part():
                    outcomes[number] = do(number, machines)
            except Exception as error:
                outcomes[number] = error

        threads = [threading.Thread(target=work, args=given) for given in enumerate(network.machines())]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    return run


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A file of 25 chunks with bad rows, repeated rows and swapped rows."""
    monkeypatch.setattr("tandem.data.read.sources.CHUNK_RECORDS", 4)
    monkeypatch.setattr(module, "CHUNKS_PER_ROUND", 6)
    rows = []
    for n in range(97):
        text = "abcdefghij"[n % 10] * (1 + n % 7)
        row = {"prompt": "hi", "chosen": text, "rejected": "no"}
        if n % 13 == 5:
            row = {"prompt": "hi", "chosen": "no", "rejected": text}
        rows.append(json.dumps(row if n % 11 else {"prompt": 1}))
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(rows) + "\n")
    return file


def opened(source, machines, **changes):
    data = LENIENT.model_copy(update=changes)
    return open_store(str(source), DatasetFields(), RAW, data, 100, machines=machines)


def bytes_of(store):
    return {name: (store.folder / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rows", [97, 48, 3, 2])
def test_machines_with_separate_caches_each_write_what_one_alone_writes(on_machines, source, tmp_path, count, rows):
    lines = source.read_text().splitlines(keepends=True)
    source.write_text("".join(lines[:rows]))
    alone = bytes_of(opened(source, ALONE))
    folders = [tmp_path / f"cache-{number}" for number in range(count)]
    workers = [1, 2, 1]  # the share of a machine depends on its workers
    stores = on_machines(lambda number, machines: opened(source, machines, num_workers=workers[number]), folders)
    assert [store.folder.parents[1] for store in stores] == folders
    assert [bytes_of(store) for store in stores] == [alone] * count
    assert not list(tmp_path.rglob(".*"))


def test_machines_tokenise_each_chunk_once(on_machines, source, tmp_path, monkeypatch):
    seen: list[list[int]] = [[], []]
    tokenize = making.Processes.tokenize

    def recorded(self, recipe, chunks, workers):
        def noted():
            for chunk in chunks:
                seen[int(threading.current_thread().name)].append(chunk.numbers[0])
                yield chunk

        return tokenize(self, recipe, noted(), workers)

    monkeypatch.setattr(making.Processes, "tokenize", recorded)

    def do(number, machines):
        threading.current_thread().name = str(number)
        return opened(source, machines)

    on_machines(do, [tmp_path / "one", tmp_path / "two"])
    # 25 chunks of 4 rows; 6 in a round, of which each machine has 3
    assert seen == [
        [1, 5, 9, 25, 29, 33, 49, 53, 57, 73, 77, 81, 97],
        [13, 17, 21, 37, 41, 45, 61, 65, 69, 85, 89, 93],
    ]


def test_of_machines_that_share_a_cache_the_first_writes(on_machines, source, tmp_path, monkeypatch):
    alone = bytes_of(opened(source, ALONE))
    written = []
    write = making._write

    def noted(request, *rest, **others):
        written.append(request.machines._number)
        write(request, *rest, **others)

    monkeypatch.setattr(making, "_write", noted)
    folders = [tmp_path / "shared", tmp_path / "other", tmp_path / "shared"]
    stores = on_machines(lambda number, machines: opened(source, machines), folders)
    assert [bytes_of(store) for store in stores] == [alone] * 3
    assert sorted(written) == [0, 1]
    assert not list(tmp_path.rglob(".*"))


def test_a_machine_that_has_the_store_helps_one_that_has_not(on_machines, source, tmp_path):
    alone = bytes_of(opened(source, ALONE))
    folders = [tmp_path / "alone", tmp_path / "empty"]
    stores = on_machines(lambda number, machines: opened(source, machines), folders)
    assert [bytes_of(store) for store in stores] == [alone] * 2
    again = on_machines(lambda number, machines: opened(source, machines), folders)
    assert [bytes_of(store) for store in again] == [alone] * 2


def test_machines_that_open_different_sets_tokenise_alone(on_machines, source, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    sets = [[source], [other, source]]
    folders = [tmp_path / "one", tmp_path / "two"]
    stores = on_machines(lambda number, machines: [opened(one, machines) for one in sets[number]], folders)
    assert [len(store) for store in stores[0]] == [len(stores[1][1])] == [88]
    assert len(stores[1][0]) == 1


def test_a_data_error_of_one_share_is_raised_by_all_and_the_next_set_is_opened_together(
    on_machines, source, tmp_path, monkeypatch
):
    hung = f"{source}:13: the chat template did not finish within 30 seconds."
    tokenize = making.Processes.tokenize

    def failing(self, recipe, chunks, workers):
        for chunk in chunks:
            if chunk.numbers[0] == 13 and chunk.file.endswith("pairs.jsonl"):  # the first of the second machine
                raise_in_worker()
            yield from tokenize(self, recipe, [chunk], workers)

    def raise_in_worker():
        raise DataError(hung)

    monkeypatch.setattr(making.Processes, "tokenize", failing)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")

    def do(number, machines):
        with pytest.raises(DataError) as raised:
            opened(source, machines)
        return str(raised.value), len(opened(other, machines))

    found = on_machines(do, [tmp_path / "one", tmp_path / "two"])
    assert found == [(f"rank 1 on gpu-1: {hung}", 1)] * 2


def test_an_error_in_the_file_is_that_of_one_machine_alone(on_machines, source, tmp_path):
    data = source.read_bytes()
    damaged = tmp_path / "damaged.json"
    damaged.write_bytes(b"[" + data.replace(b"\n", b",\n")[: len(data) * 2 // 3])
    with pytest.raises(DataError) as alone:
        opened(damaged, ALONE)
    found = on_machines(lambda number, machines: opened(damaged, machines), [tmp_path / "one", tmp_path / "two"])
    assert [str(error) for error in found] == [str(alone.value)] * 2


def test_a_full_disk_of_one_machine_ends_all_and_the_next_start_succeeds(on_machines, source, tmp_path, monkeypatch):
    alone = bytes_of(opened(source, ALONE))
    folders = [tmp_path / "one", tmp_path / "two"]
    with full_disk(monkeypatch, of=1):
        first, second = on_machines(lambda number, machines: opened(source, machines), folders)
    assert isinstance(first, AlreadyReportedError)
    assert first.exit_code == 7
    assert isinstance(second, OSError)
    assert not list(tmp_path.rglob(".*"))
    stores = on_machines(lambda number, machines: opened(source, machines), folders)
    assert [bytes_of(store) for store in stores] == [alone] * 2


@contextmanager
def full_disk(monkeypatch, of):
    write = making.write_manifest

    def failing(aside, **facts):
        if aside.parents[1].name == ("one", "two")[of]:
            raise OSError(28, "No space left on device")
        write(aside, **facts)

    with monkeypatch.context() as patched:
        patched.setattr(making, "write_manifest", failing)
        yield


def test_a_machine_that_fails_before_its_data_ends_the_others(on_machines, source, tmp_path):
    def do(number, machines):
        if number:
            raise DataError("model: it is missing.")
        return opened(source, machines)

    first, second = on_machines(do, [tmp_path / "one", tmp_path / "two"])
    assert isinstance(first, AlreadyReportedError)
    assert first.exit_code == 3
    assert str(second) == "model: it is missing."


def test_a_part_that_arrives_damaged_is_refused(on_machines, source, tmp_path, monkeypatch):
    part = module._Part

    def damaged(results, digest, is_last):
        return part(results[:-1] + b"?", digest, is_last)

    def do(number, machines):
        if number:
            send = machines._send
            machines._send = lambda message: send(
                damaged(message.results, message.digest, message.is_last) if isinstance(message, part) else message
            )
        return opened(source, machines)

    first, _ = on_machines(do, [tmp_path / "one", tmp_path / "two"])
    assert str(first) == (
        "the rows that rank 1 on gpu-1 tokenised arrived damaged on rank 0 on gpu-0. Nothing was stored. Start again; if this "
        "happens again, check the memory and the network of both machines."
    )
    assert not list(tmp_path.glob("*/tokens/*"))
    stores = on_machines(lambda number, machines: opened(source, machines), [tmp_path / "one", tmp_path / "two"])
    assert bytes_of(stores[0]) == bytes_of(stores[1])


def test_a_store_that_does_not_appear_on_a_shared_disk_is_reported(on_machines, source, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SECONDS_TO_APPEAR", 0.2)
    monkeypatch.setattr(Machines, "sees", lambda self, folder: [[True, True], [True, True]])
    folders = [tmp_path / "one", tmp_path / "two"]
    (tmp_path / "two/tokens").mkdir(parents=True)
    _, second = on_machines(lambda number, machines: opened(source, machines), folders)
    assert str(second).startswith(f"{tmp_path}/two/tokens/")
    assert str(second).endswith(
        " was written by another machine, which shares this cache, but it is not visible on rank 1 on gpu-1 after 0.2 seconds. "
        "Check the shared disk, or set TANDEM_CACHE to a directory of this machine."
    )

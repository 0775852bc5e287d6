"""Weight files are read while torch is imported and data is prepared, and reading never harms a run."""

import hashlib
import os
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

import tandem
from tandem.cli import train as command
from tandem.cli.app import app
from tandem.config.load import load_config
from tandem.config.schema import Config
from tandem.model.files import read_ahead
from tandem.model.files.read_ahead import THREAD, reading_ahead
from tandem.storage import cache
from tandem.storage.cache import content_of


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    """A folder with two weight files of 3,000 bytes, which count as large."""
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "REMEMBERED_BYTES", 1000)
    monkeypatch.setattr(read_ahead, "REMEMBERED_BYTES", 1000)
    monkeypatch.setattr(read_ahead, "_available_memory", lambda: 12_000)  # twice the files
    monkeypatch.setattr(read_ahead, "default_workers", lambda: 4)
    folder = tmp_path / "model"
    folder.mkdir()
    names = ["model-1.safetensors", "model-2.safetensors"]
    for name in names:
        (folder / name).write_bytes(os.urandom(3000))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{names[0]}", "b": "{names[1]}"}}}}')
    return folder


def config_of(model: object, **keys: str) -> Config:
    return load_config(None, [f"policy.model_name={model}", *(f"{key}={value}" for key, value in keys.items())]).config


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == THREAD]


def read_completely(config: Config) -> None:
    with reading_ahead(config):
        for thread in threads():
            thread.join(10)
            assert not thread.is_alive()


def test_files_are_read_and_their_hashes_are_known_afterwards(model, monkeypatch):
    expected = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in model.glob("*.safetensors")}
    monkeypatch.setattr(read_ahead, "CHUNK_BYTES", 1024)  # 1,024 + 1,024 + 952
    read_completely(config_of(model))
    monkeypatch.setattr(cache, "sha256_of", lambda path: pytest.fail(f"{path} is hashed again"))
    assert {file: content_of(file) for file in expected} == expected


def test_files_whose_hashes_are_known_are_read_but_not_hashed(model, monkeypatch):
    """The hash of a run before: now only the system's file cache may be empty."""
    for file in model.glob("*.safetensors"):
        content_of(file)
    read, stored = [], []
    real = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *given, **named: read.append(path.name) or real(path, *given, **named)
    )
    monkeypatch.setattr(read_ahead, "remember_content", lambda *given: stored.append(given))
    read_completely(config_of(model))
    assert [name for name in read if name.startswith("model-")] == ["model-1.safetensors", "model-2.safetensors"]
    assert stored == []


def test_a_file_that_changes_while_it_is_read_is_hashed_again(model):
    """The stored hash belongs to the size and times that the file had before."""
    [first, _] = sorted(model.glob("*.safetensors"))
    read_completely(config_of(model))
    first.write_bytes(b"x" * 3000)
    assert content_of(first) == hashlib.sha256(b"x" * 3000).hexdigest()


@pytest.mark.parametrize(
    "harm",
    ["no folder", "no index", "no weights", "a damaged index", "an adapter"],
)
def test_a_model_that_cannot_be_read_is_not_an_error_here(model, harm):
    config = config_of(model)
    index = model / "model.safetensors.index.json"
    if harm == "no folder":
        model.rename(model.with_name("elsewhere"))
    elif harm == "no index":
        index.unlink()
    elif harm == "no weights":
        (model / "model-2.safetensors").unlink()
    elif harm == "a damaged index":
        index.write_text("{")
    else:
        (model / "adapter_config.json").touch()
    with reading_ahead(config):
        assert threads() == []


def test_a_model_of_the_hub_that_is_not_downloaded_is_not_read(model):
    with reading_ahead(config_of("someone/of-no-cache")):
        assert threads() == []


def test_an_error_while_reading_does_not_reach_the_run(model, monkeypatch):
    read = []

    def fail(path: Path, stopped: object) -> None:
        read.append(path.name)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(read_ahead, "_read", fail)
    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    read_completely(config_of(model))
    assert (read, raised) == (["model-1.safetensors", "model-2.safetensors"], [])


def test_files_of_more_than_half_of_the_available_memory_are_not_read(model, monkeypatch):
    with reading_ahead(config_of(model)):
        assert len(threads()) == 1
    monkeypatch.setattr(read_ahead, "_available_memory", lambda: 11_999)
    for thread in threads():
        thread.join()
    with reading_ahead(config_of(model)):
        assert threads() == []


def test_the_limit_of_a_container_counts_as_memory(tmp_path, monkeypatch):
    meminfo, limit, none = tmp_path / "meminfo", tmp_path / "limit", tmp_path / "none"
    meminfo.write_text("MemTotal:       2000 kB\nMemAvailable:   1000 kB\n")
    monkeypatch.setattr(read_ahead, "MEMINFO", meminfo)
    monkeypatch.setattr(read_ahead, "CONTAINER_LIMITS", (limit, none))
    assert read_ahead._available_memory() == 1000 * 1024
    limit.write_text("max\n")
    assert read_ahead._available_memory() == 1000 * 1024
    limit.write_text("512000\n")
    assert read_ahead._available_memory() == 512_000
    monkeypatch.setattr(read_ahead, "MEMINFO", none)
    assert read_ahead._available_memory() == 0


def test_few_cpus_are_left_to_the_imports(model, monkeypatch):
    assert len(read_ahead._files_to_read(config_of(model))) == 2
    monkeypatch.setattr(read_ahead, "default_workers", lambda: 3)
    assert read_ahead._files_to_read(config_of(model)) == []


def test_the_embedded_model_is_not_read():
    assert read_ahead._files_to_read(load_config(None, []).config) == []


def test_one_rank_of_one_machine_reads(model, monkeypatch):
    config = config_of(model)
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert len(read_ahead._files_to_read(config)) == 2
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert read_ahead._files_to_read(config) == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of two machines
    assert read_ahead._files_to_read(config) == []


def test_a_live_reference_is_read_too(model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}')
    (other / "model.safetensors").write_bytes(bytes(2000))
    keys = {"reference.model": str(other)}
    names = [file.name for file in read_ahead._files_to_read(config_of(model, **{**keys, "reference.mode": "live"}))]
    assert names == []  # 8,000 bytes do not fit
    (other / "model.safetensors").write_bytes(b"small")
    (model / "model-2.safetensors").write_bytes(bytes(1000))
    (other / "model.safetensors").write_bytes(bytes(1500))
    for mode, more in (("live", ["model.safetensors"]), ("cached", [])):
        names = [file.name for file in read_ahead._files_to_read(config_of(model, **{**keys, "reference.mode": mode}))]
        assert names == ["model-1.safetensors", "model-2.safetensors", *more]


def test_the_end_of_a_run_does_not_wait_for_a_disk_that_does_not_answer(model, monkeypatch):
    answers, stops = threading.Event(), []

    def hang(path: Path, stopped) -> None:
        answers.wait(30)
        stops.append(stopped())

    monkeypatch.setattr(read_ahead, "_read", hang)
    began = time.perf_counter()
    with reading_ahead(config_of(model)):
        [thread] = threads()
        assert thread.daemon
    assert time.perf_counter() - began < 10
    answers.set()
    thread.join(10)
    assert stops == [True, True]


def test_reading_stops_within_a_chunk(model):
    [file, _] = sorted(model.glob("*.safetensors"))
    read_ahead._read(file, lambda: True)
    assert not (cache.cache_dir() / "hashes").exists()


def test_a_command_reads_before_it_imports_the_trainer(model, monkeypatch):
    read: list[Path] = []
    seen: list[list[Path]] = []

    def train_instead(*_: object, **__: object) -> None:
        for thread in threads():
            thread.join(10)
        seen.append(list(read))

    monkeypatch.setattr(command, "_train_and_leave_group", train_instead)
    monkeypatch.setattr(read_ahead, "_read_all", lambda files, stopped: read.extend(files))
    app(["train", "--quiet", f"policy.model_name={model}", "data.train.data_path=embedded"], standalone_mode=False)
    assert seen == [[model / "model-1.safetensors", model / "model-2.safetensors"]]


def test_a_call_from_python_reads_too(model, monkeypatch):
    read: list[Path] = []
    monkeypatch.setattr(read_ahead, "_read_all", lambda files, stopped: read.extend(files))

    def train_instead(*_: object, **__: object) -> int:
        for thread in threads():
            thread.join(10)
        return len(read)

    monkeypatch.setattr("tandem.api.training._train", train_instead)
    monkeypatch.setattr("tandem.api.training.own_process", lambda *_: nullcontext())
    assert tandem.train({"policy.model_name": str(model), "data.train.data_path": "embedded"}) == 2

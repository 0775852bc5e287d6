"""Folders that are either absent or whole, and manifests that know when a file changed."""

import errno
import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from tandem.errors import CheckpointError, ConfigError, full_disk
from tandem.model.files.tiny import tiny_model, tiny_tokenizer
from tandem.storage import cache
from tandem.storage.cache import (
    cache_dir,
    check_cache_dir,
    check_writable,
    content_of,
    fingerprint,
    published,
    read_manifest,
    real_path,
    sha256_of,
    write_manifest,
)
from tandem.training.run.lock import locked


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_the_cache_directory_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("TANDEM_CACHE", "/t")
    assert cache_dir() == Path("/t")
    monkeypatch.delenv("TANDEM_CACHE")
    assert cache_dir() == Path("/x/tandem")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache_dir() == Path("/h/.cache/tandem")


def test_a_fingerprint_depends_on_content_not_on_the_order_of_keys():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint("a", "b") == sha256(b'["a","b"]').hexdigest()[:32]


def test_parts_of_a_fingerprint_are_separated():
    assert len({fingerprint("ab", "c"), fingerprint("a", "bc"), fingerprint("abc"), fingerprint(["ab", "c"])}) == 4


def test_a_lone_surrogate_can_be_fingerprinted():
    assert fingerprint("\ud800") != fingerprint("\ud801")


def test_changed_content_of_the_same_size_and_modification_time_is_detected(tmp_path, monkeypatch):
    """A model that is unpacked over another of the same shapes, from archives that give every file the same time."""
    monkeypatch.setattr(cache, "REMEMBERED_BYTES", 1)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"old")
    os.utime(file, (0, 0))
    assert content_of(file) == sha256(b"old").hexdigest()
    changed = file.stat().st_ctime_ns
    while file.stat().st_ctime_ns == changed:  # the clock of the file system may not advance for some milliseconds
        file.write_bytes(b"new")
        os.utime(file, (0, 0))
    assert content_of(file) == sha256(b"new").hexdigest()


# Publishing


def test_a_published_folder_appears_complete(tmp_path):
    folder = tmp_path / "made" / "here"
    with published(folder, "tokens") as aside:
        (aside / "file").write_text("x")
        assert not folder.exists()
    assert (folder / "file").read_text() == "x"
    assert names(folder.parent) == ["here"]


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), published(tmp_path / "folder", "tokens") as aside:
        (aside / "file").write_text("x")
        raise RuntimeError
    assert names(tmp_path) == []


def test_the_first_of_two_writers_wins_and_the_second_leaves_nothing(tmp_path):
    folder = tmp_path / "folder"
    with published(folder, "tokens") as second:
        with published(folder, "tokens") as first:
            (first / "file").write_text("first")
        (second / "file").write_text("second")
    assert (folder / "file").read_text() == "first"
    assert names(tmp_path) == ["folder"]


def test_a_file_in_the_way_is_an_error(tmp_path):
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(OSError), published(tmp_path / "folder", "tokens"):
        pass
    assert names(tmp_path) == ["folder"]


def test_a_killed_writer_leaves_no_folder_and_the_next_one_writes_it(tmp_path):
    folder = tmp_path / "folder"
    script = (
        "import os, signal, sys; from pathlib import Path; from tandem.storage.cache import published\n"
        "with published(Path(sys.argv[1]), 'tokens') as aside:\n"
        "    (aside / 'file').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(folder)]).returncode == -9
    assert not folder.exists()
    assert all(name.startswith(".folder.") for name in names(tmp_path))  # what it left is hidden
    with published(folder, "tokens") as aside:
        (aside / "file").write_text("whole")
    assert (folder / "file").read_text() == "whole"


# Manifests


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "inner" / "b").write_bytes(b"two")
    write_manifest(tmp_path, version=7)
    return tmp_path


def refusal(folder) -> str:
    with pytest.raises(ValueError) as caught:
        read_manifest(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", ["../victim", "/etc/hostname", "inner/../../victim", "", "a\0"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused_before_it_is_read(folder, name, monkeypatch):
    (folder / "manifest.json").write_text(json.dumps({"files": {name: "0"}}))
    monkeypatch.setattr(cache, "sha256_of", lambda path: pytest.fail(f"{path} was read"))
    assert refusal(folder) == f"{folder}/manifest.json lists {name!r}, which is not a path inside this folder"


def test_a_manifest_names_the_files_that_are_read(folder):
    assert read_manifest(folder, needed=["a", "inner/b"])["version"] == 7
    with pytest.raises(ValueError) as caught:
        read_manifest(folder, needed=["a", "c"])
    assert str(caught.value) == f"{folder}/manifest.json does not list c"


def test_a_manifest_that_is_a_pipe_is_refused(folder):
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")
    assert refusal(folder) == f"{folder}/manifest.json is missing or damaged (the path is not a file)"


def test_a_huge_manifest_is_not_read(folder):
    os.truncate(folder / "manifest.json", 2**40)
    assert refusal(folder) == (
        f"{folder}/manifest.json is missing or damaged (the file has 1,099,511,627,776 bytes, more than the limit of 268,435,456)"
    )


def test_a_manifest_holds_its_facts_and_the_sha256_of_every_file(folder):
    assert read_manifest(folder) == {
        "version": 7,
        "files": {"a": sha256(b"one").hexdigest(), "inner/b": sha256(b"two").hexdigest()},
    }
    assert sha256_of(folder / "a") == sha256(b"one").hexdigest()


def test_a_changed_file_is_reported(folder):
    (folder / "inner" / "b").write_bytes(b"twp")
    assert refusal(folder) == (
        f"{folder}/inner/b does not match its SHA-256 in the manifest: it was changed or cut off"
    )


def test_a_missing_file_is_named(folder):
    (folder / "a").unlink()
    assert refusal(folder) == f"{folder}/a is missing"


def test_a_missing_manifest_is_reported(tmp_path):
    assert refusal(tmp_path) == (
        f"{tmp_path}/manifest.json is missing or damaged "
        f"([Errno 2] No such file or directory: '{tmp_path}/manifest.json')"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("{}", "'files'"),
        (json.dumps({"files": [1]}), "'list' object has no attribute 'items'"),
    ],
)
def test_a_damaged_manifest_is_reported(tmp_path, text, reason):
    (tmp_path / "manifest.json").write_text(text)
    assert refusal(tmp_path) == f"{tmp_path}/manifest.json is missing or damaged ({reason})"


def test_any_byte_changed_in_a_manifest_is_refused_or_changes_no_fact(folder):
    file = folder / "manifest.json"
    whole, facts = file.read_bytes(), read_manifest(folder)
    accepted = 0
    for at in range(len(whole)):
        for bit in range(8):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            try:
                # The one key that may be absent may also be misspelled: nothing else is then.
                assert facts.items() <= read_manifest(folder).items()
                accepted += 1
            except ValueError as error:
                assert str(error).startswith(f"{folder}/")
    assert accepted < 8 * len("fingerprint_of_manifest") + 32  # and one white space for another


def test_facts_read_back_as_written(tmp_path):
    write_manifest(tmp_path, longer_than={128: 3, 64: 4, 9: 5}, share=0.1, text="ä\ud800", pairs=(1, 2))
    assert read_manifest(tmp_path) == {
        "longer_than": {"128": 3, "64": 4, "9": 5},
        "share": 0.1,
        "text": "ä\ud800",
        "pairs": [1, 2],
        "files": {},
    }


@pytest.mark.parametrize("name", ["tokens", "packs", "reference", "models", "hashes", "hub", "rows", "tokenizers"])
@pytest.mark.parametrize("what", ["a file", "a link to nothing"])
def test_a_file_where_the_cache_has_a_folder_is_refused_and_stays(tmp_path, monkeypatch, name, what):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    if what == "a file":
        (tmp_path / name).write_text("mine")
    else:
        (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(CheckpointError) as refused:
        check_cache_dir()
    assert (
        str(refused.value)
        == f"{tmp_path}/{name}: {what}, but tandem writes a directory with this name. Move it elsewhere."
    )
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_links_in_a_circle_are_paths_too(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    assert real_path(tmp_path / "circle").name == "circle"
    assert real_path(tmp_path / "link") == tmp_path / "folder"


def test_a_folder_that_cannot_be_written_is_refused_in_the_words_of_its_key(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refused:
        check_writable(tmp_path / "file/cache", "reference.cache_dir = cache:", "Choose another reference.cache_dir.")
    assert str(refused.value) == (
        "reference.cache_dir = cache: cannot be written (Not a directory). Choose another reference.cache_dir."
    )


def test_the_embedded_model_is_not_made_where_the_cache_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file"))
    for make in (tiny_model, tiny_tokenizer):
        with pytest.raises(ConfigError) as refused:
            make()
        assert str(refused.value) == (
            f"the cache directory {tmp_path}/file cannot be written (File exists). Set TANDEM_CACHE to a writable directory."
        )


def test_a_large_file_is_hashed_where_the_cache_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cache, "REMEMBERED_BYTES", 3)
    (tmp_path / "large").write_bytes(b"large")
    assert cache.content_of(tmp_path / "large") == sha256(b"large").hexdigest()


def test_a_full_disk_names_the_folder_even_if_its_marker_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tandem.storage.ownership._mark", full)
    with pytest.raises(OSError) as error, published(tmp_path / "export", "export"):
        raise AssertionError
    assert full_disk(error.value).filename == str(tmp_path / "export")
    assert names(tmp_path) == []


def test_a_full_disk_names_the_lock_of_a_run(tmp_path, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.getpid", full)
    with pytest.raises(OSError) as error, locked(tmp_path):
        raise AssertionError
    assert full_disk(error.value).filename == str(tmp_path / "lock")

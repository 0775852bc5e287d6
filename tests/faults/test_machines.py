"""Two machines, each with one rank: they tokenise together, into one cache or two, and compute the reference once."""

import json
import os
import signal

import pytest
from killing import assert_intact, assert_same
from several import lost
from together import Place, named, start_ranks, start_training, train

from tandem.storage.cache import read_manifest

CACHES = {"a shared cache": Place.shared_cache, "separate caches": Place.separate_caches}
STORED = ("tokens", "reference", "packs")


def stored(cache):
    """The bytes of every file of the stores and references in a cache."""
    folders = [folder for kind in STORED for folder in sorted((cache / kind).glob("*"))]
    for folder in folders:
        read_manifest(folder)
    return {str(path.relative_to(cache)): path.read_bytes() for folder in folders for path in sorted(folder.iterdir())}


def changed(cache):
    return {path: path.stat().st_mtime_ns for kind in STORED for path in (cache / kind).rglob("*")}


@pytest.fixture(scope="session")
def one_machine(small):
    """A run on two ranks of one machine, which nothing interrupted. Its first rank tokenised alone."""
    place = Place.one_machine(small.folder / "two")
    if not place.run.exists():
        for ended in train(small, place):
            assert (ended.code, ended.err) == (0, "")
    return place


@pytest.mark.slow
@pytest.mark.parametrize("caches", ["a shared cache", "separate caches"])
def test_machines_store_what_one_stores_and_the_next_run_reads_it(small, one_machine, tmp_path, caches):
    place = CACHES[caches](tmp_path)
    for ended in train(small, place):
        assert (ended.code, ended.err) == (0, "")
    assert_same(place.run, one_machine.run)
    expected = stored(one_machine.caches[0])
    assert len([name for name in expected if name.startswith("tokens/") and name.endswith("tokens.arrow")]) == 2
    assert len([name for name in expected if name.endswith("logps.f32")]) == 2
    for cache in place.caches:
        assert stored(cache) == expected
    before = [changed(cache) for cache in place.caches]
    # Killed if the reference were computed again.
    again = Place(tmp_path / "again/run", place.caches, machines=True)
    for ended in train(small, again, fail_at=dict.fromkeys((0, 1), "reference.chunk")):
        assert (ended.code, ended.err) == (0, "")
    assert_same(again.run, one_machine.run)
    assert [changed(cache) for cache in place.caches] == before


FAULTS = [
    *(("tokens.chunk", rank) for rank in (0, 1)),
    *(("tokens.rename:2", rank) for rank in (0, 1)),
    *(("reference.rename", rank) for rank in (0, 1)),
]


@pytest.mark.parametrize("fault", ["kill", "disk_full"])
@pytest.mark.parametrize(("point", "rank"), FAULTS)
@pytest.mark.slow
def test_a_fault_of_one_machine_ends_both_and_the_next_start_succeeds(small, one_machine, tmp_path, point, rank, fault):
    place = Place.separate_caches(tmp_path)
    ranks = start_training(small, place, fail_at={rank: f"{point}={fault}"})
    ended = [one.ended() for one in ranks]
    failed, other = ended[rank], ended[1 - rank]
    if fault == "kill":
        assert failed.code == -signal.SIGKILL, ended
        assert (other.code, other.err) == (1, lost(f"{named(rank, ranks)} ended"))
    else:
        assert failed.code == 7, ended
        assert failed.err.startswith(
            f"tandem: error: the disk is full (rank {rank} on {os.uname().nodename}): [Errno 28]"
        )
        assert (other.code, other.err) == (7, ""), ended
    assert_intact(*place.folders)
    for one in train(small, place):
        assert (one.code, one.err) == (0, "")
    assert_same(place.run, one_machine.run)


def test_the_ranks_of_one_machine_must_have_one_cache(small, tmp_path):
    separate = Place.separate_caches(tmp_path)
    place = Place(separate.run, separate.caches, machines=False)
    first, second = train(small, place)
    assert (first.code, second.code, second.err) == (2, 2, "")
    assert first.err == (
        f"tandem: error: TANDEM_CACHE: ranks 0 and 1 on {os.uname().nodename} have different cache directories, "
        f"{place.caches[0]} and {place.caches[1]}, but one rank of a machine fills the cache for all of them. Set the same "
        "directory for all ranks of a machine.\n"
    )


@pytest.mark.slow
def test_machines_prepare_together_and_one_prints_the_report(small, one_machine, tmp_path):
    place = Place.separate_caches(tmp_path)
    overrides = small.overrides(place.run)
    arguments = ["prepare", *(one for one in overrides if not one.startswith("run.dir")), "--json"]
    ranks = start_ranks(small.folder / "output", [*arguments, f"--output-dir={tmp_path}/prepared"], place)
    first, second = (one.ended() for one in ranks)
    assert [(one.code, one.err) for one in (first, second)] == [(0, ""), (0, "")]
    assert second.out == ""
    assert json.loads(first.out)["sets"][0]["name"] == "train"
    expected = {name: content for name, content in stored(one_machine.caches[0]).items() if name.startswith("tokens")}
    for cache in place.caches:
        assert {name: content for name, content in stored(cache).items() if name.startswith("tokens")} == expected
    assert (tmp_path / "prepared/train/manifest.json").is_file()
    assert_intact(tmp_path / "prepared")
    # In an output directory that exists, each machine would refuse to write.
    ranks = start_ranks(small.folder / "output", [*arguments, f"--output-dir={tmp_path}/prepared"], place)
    ended = [one.ended() for one in ranks]
    assert [one.code for one in ended] == [2, 2], ended

"""Faults of one of two ranks, in every phase of a run: both end, one says which rank and why, and the run resumes identically."""

import os
import re
import signal
import socket
import time

import pytest
from killing import assert_intact, assert_same
from several import lost
from together import Place, named, start_training, train

# In each phase, where a rank is killed: the point, and which of the ranks pass it.
BOTH, FIRST = (0, 1), (0,)
PHASES = {
    "reading data": [("tokens.chunk", FIRST), ("tokens.rename:2", FIRST), ("packs.sync", FIRST)],
    "loading the model": [("weights.load", BOTH)],
    "the reference": [("reference.chunk:2", BOTH), ("reference.rename", FIRST)],
    "a step": [("step.update:3", BOTH), ("step.done:3", BOTH)],
    "a validation": [("validation.pack:3", BOTH)],
    "a checkpoint": [("checkpoint.part:3", BOTH), ("checkpoint.tensors:3", FIRST), ("checkpoint.rename:3", FIRST)],
    "the export": [("model.gather", BOTH), ("weights.load:2", BOTH), ("model.rename", FIRST)],
}
KILLS = [(point, rank) for points in PHASES.values() for point, ranks in points for rank in ranks]
QUICK = [("step.update:3", 1)]
TIMEOUT = 10
SECONDS_TO_NAME = (
    30  # after the timeout: up to 20 to find out which rank it is and whether it ended, and 10 for a busy machine
)
DISKS = [
    ("tokens.sync", 0),
    ("reference.rename", 0),
    ("metrics.write:8", 0),
    *(("checkpoint.part:3", rank) for rank in BOTH),
    ("checkpoint.rename:3", 0),
    ("model.sync", 0),
]


def marked(cases, quick):
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.fixture(scope="session")
def whole_of_two(small):
    """The run on two ranks that nothing interrupted."""
    place = Place.one_machine(small.folder / "two")
    for ended in train(small, place):
        assert (ended.code, ended.err) == (0, "")
    return place.run


def resumes(small, place, whole, *more):
    assert_intact(*place.folders)
    for ended in train(small, place, *more):
        assert (ended.code, ended.err) == (0, "")
    assert_same(place.run, whole)
    assert_intact(*place.folders)


@pytest.mark.parametrize(("point", "rank"), marked(KILLS, QUICK))
def test_a_killed_rank_is_named_by_the_other_and_the_run_resumes_identically(
    small, whole_of_two, tmp_path, point, rank
):
    place = Place.one_machine(tmp_path)
    ranks = start_training(small, place, fail_at={rank: point})
    ended = [one.ended() for one in ranks]
    assert ended[rank].code == -signal.SIGKILL, ended
    other = ended[1 - rank]
    assert (other.code, other.err) == (1, lost(f"{named(rank, ranks)} ended"))
    resumes(small, place, whole_of_two)


@pytest.mark.parametrize(("point", "rank"), marked(DISKS, [("checkpoint.part:3", 1)]))
def test_a_full_disk_of_one_rank_ends_both_and_the_run_resumes_identically(small, whole_of_two, tmp_path, point, rank):
    place = Place.one_machine(tmp_path)
    ranks = start_training(small, place, fail_at={rank: f"{point}=disk_full"})
    ended = [one.ended() for one in ranks]
    assert (ended[rank].code, ended[rank].err) == (7, full_disk(point, rank))
    other = ended[1 - rank]
    # A rank that waits for the other one in a step finds it gone; one that waits for it to write hears why.
    assert (other.code, other.err) in ((7, ""), (1, lost(f"{named(rank, ranks)} ended")))
    resumes(small, place, whole_of_two)


def full_disk(point, rank):
    return (
        f"tandem: error: the disk is full (rank {rank} on {socket.gethostname()}): [Errno 28] No space left on device: "
        f"'(TANDEM_FAIL_AT={point.partition(':')[0]})'. Checkpoints saved before are intact. Free some space and run the command "
        "again.\n"
    )


@pytest.mark.slow
def test_a_rank_that_is_slow_within_the_timeout_changes_nothing(small, whole_of_two, tmp_path):
    place = Place.one_machine(tmp_path)
    fail_at = {1: "step.update:2=hang", 0: "step.update:3=hang"}
    ranks = start_training(small, place, "policy.parallel.timeout_seconds=60", fail_at=fail_at)
    for number in fail_at:
        ranks[number].wait_until_stopped()
        time.sleep(3)
        os.kill(ranks[number].process.pid, signal.SIGCONT)
    for rank in ranks:
        ended = rank.ended()
        assert (ended.code, ended.err) == (0, "")
    assert_same(place.run, whole_of_two)


@pytest.mark.parametrize("rank", BOTH)
@pytest.mark.slow
def test_a_hung_rank_is_named_after_the_timeout_and_the_run_resumes_identically(small, whole_of_two, tmp_path, rank):
    place = Place.one_machine(tmp_path)
    fail_at = {rank: "step.update:3=hang"}
    ranks = start_training(small, place, f"policy.parallel.timeout_seconds={TIMEOUT}", fail_at=fail_at)
    ranks[rank].wait_until_stopped()
    stopped = time.monotonic()
    other = ranks[1 - rank].ended()
    seconds = time.monotonic() - stopped
    ranks[rank].process.kill()
    assert (other.code, other.err) == (1, lost(f"{named(rank, ranks)} no longer answers"))
    assert seconds < TIMEOUT + SECONDS_TO_NAME
    resumes(small, place, whole_of_two)


@pytest.mark.parametrize("mesh", ["policy.parallel.context=2", "policy.parallel.replicate=2"])
@pytest.mark.slow
def test_with_every_mesh_a_killed_rank_is_named_and_the_run_resumes_identically(small, tmp_path, mesh):
    whole = Place.one_machine(tmp_path / "whole")
    for ended in train(small, whole, mesh):
        assert (ended.code, ended.err) == (0, "")
    for rank in BOTH:
        place = Place.one_machine(tmp_path / f"killed-{rank}")
        ranks = start_training(small, place, mesh, fail_at={rank: "step.update:3"})
        ended = [one.ended() for one in ranks]
        assert ended[rank].code == -signal.SIGKILL, ended
        assert (ended[1 - rank].code, ended[1 - rank].err) == (1, lost(f"{named(rank, ranks)} ended"))
        resumes(small, place, whole.run, mesh)


@pytest.mark.slow
def test_ranks_with_different_data_end_before_the_model_loads(small, whole_of_two, tmp_path):
    place = Place.separate_caches(tmp_path)
    rows = (small.folder / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join([rows[1], rows[0], *rows[2:]]))
    other = [f"data.train.data_path={tmp_path}/train.jsonl"]
    ended = [one.ended() for one in start_training(small, place, of_rank={1: other})]
    assert [one.code for one in ended] == [1, 1], ended
    assert ended[1].err == ""
    lines = ended[0].err.splitlines()
    assert lines[0] == "tandem: error: the ranks differ and would not train the same model:"
    assert re.fullmatch(r"  the data of train: [0-9a-f]{32} on rank 0; [0-9a-f]{32} on rank 1", lines[1])
    assert not place.run.exists()
    resumes(small, place, whole_of_two)


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.slow
def test_a_rank_whose_others_never_start_ends_after_the_timeout(small, tmp_path, alone):
    place, host = Place.one_machine(tmp_path), re.escape(socket.gethostname())
    (rank,) = start_training(small, place, "policy.parallel.timeout_seconds=3", only=alone)
    ended = rank.ended()
    assert ended.code == 1
    assert re.search(  # after a line of torch itself
        f"(^|\n)tandem: error: {'' if alone == 0 else f'rank 1 on {host}: '}not all of the 2 ranks of this run started within "
        r"policy.parallel.timeout_seconds = 3. Look at the output of the others, and check that their machines can reach "
        r"127.0.0.1:[0-9]+\.\n$",
        ended.err,
    ), ended

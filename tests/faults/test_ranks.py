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


def resumes(small, place, whole):
    assert_intact(*place.folders)
    for ended in train(small, place):
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
    # The first rank serves the store through which ranks find each other, so its process cannot be looked up once it is dead.
    who = f"{named(1, ranks)} ended" if rank else "rank 0, or the launcher that ranks find each other through, ended"
    other = ended[1 - rank]
    assert (other.code, other.err) == (1, lost(who))
    resumes(small, place, whole_of_two)


@pytest.mark.parametrize(("point", "rank"), marked(DISKS, [("checkpoint.part:3", 1)]))
def test_a_full_disk_of_one_rank_ends_both_and_the_run_resumes_identically(small, whole_of_two, tmp_path, point, rank):
    place = Place.one_machine(tmp_path)
    ranks = start_training(small, place, fail_at={rank: f"{point}=disk_full"})
    ended = [one.ended() for one in ranks]
    assert (ended[rank].code, ended[rank].err) == (7, full_disk(point, rank))
    other = ended[1 - rank]
    who = f"{named(1, ranks)} ended" if rank else "rank 0, or the launcher that ranks find each other through, ended"
    # A rank that waits for the other one in a step finds it gone; one that waits for it to write hears why.
    assert (other.code, other.err) in ((7, ""), (1, lost(who)))
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
    ranks = start_training(small, place, "policy.parallel.timeout_seconds=60")
    for number, step in ((1, 1), (0, 2)):
        until = time.monotonic() + 120
        while not (place.run / f"checkpoints/step_{step}").exists() and ranks[number].process.is_alive():
            assert time.monotonic() < until
            time.sleep(0.01)
        if ranks[number].process.is_alive():
            os.kill(ranks[number].process.pid, signal.SIGSTOP)
            time.sleep(3)
            os.kill(ranks[number].process.pid, signal.SIGCONT)
    for rank in ranks:
        ended = rank.ended()
        assert (ended.code, ended.err) == (0, "")
    assert_same(place.run, whole_of_two)


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

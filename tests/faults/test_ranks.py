"""Faults of one of two ranks, in every phase of a run: both end, one says which rank and why, and the run resumes identically."""

import signal
import socket

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
QUICK = [("weights.load", 0), ("step.update:3", 1)]
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

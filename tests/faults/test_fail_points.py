"""Killed, or the disk full, at every named place: the same command resumes with identical weights."""

import shutil
import signal

import pytest
from killing import assert_intact, assert_same, outcome

from tandem.failpoints import POINTS
from tandem.training.checkpoint.checkpoints import checkpoints

# The so-many-th time it is passed, where the first would be too early to have anything to lose.
COUNTS = {
    **dict.fromkeys(("checkpoint.begin", "checkpoint.tensors", "checkpoint.sync", "checkpoint.rename"), 3),
    "checkpoint.part": 3,
    **dict.fromkeys(("checkpoint.done", "checkpoint.latest", "checkpoint.best"), 3),
    "metrics.write": 8,  # between the halves of the third step's line
    "tokens.sync": 2,  # the validation set, when the training set is there
    "reference.chunk": 2,
    "step.update": 3,
    "step.done": 3,
    "validation.pack": 3,
}
NOT_WRITES = ("done", "prune", "chunk", "update", "pack", "load", "gather")
WRITES = [point for point in POINTS if point.split(".")[1] not in NOT_WRITES]
# Of these, one of each kind; the others are tried by `make faults`.
QUICK = {"tokens.sync", "reference.rename", "checkpoint.tensors", "model.sync", "config.rename", "metrics.write"}


def is_quick(point):
    return point in QUICK or point in ("step.done", "model.rename", "checkpoint.rename", "checkpoint.latest")


def at(point):
    return f"{point}:{COUNTS.get(point, 1)}"


def folders(run, cache):
    """Where folders get their names last."""
    return [run / "checkpoints", *(cache / kind for kind in ("tokens", "packs", "reference"))]


@pytest.mark.parametrize(
    "point", [one if is_quick(one) else pytest.param(one, marks=pytest.mark.slow) for one in POINTS]
)
def test_a_run_killed_at_a_fail_point_resumes_with_identical_weights(small, whole, tmp_path, point):
    run, cache = tmp_path / "run", tmp_path / "cache"
    small.killed(run, cache, at=at(point))
    assert_intact(*folders(run, cache))
    assert (run / "model").exists() == (point == "model.done")
    assert run.with_name("pairs.jsonl").exists() == (point.split(".")[0] == "model")
    ended = small.run(run, cache)
    assert (ended.code, ended.err) == (0, "")
    assert_same(run, whole)
    assert_intact(*folders(run, cache))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["model.begin", "model.sync", "model.rename", "model.done"])
def test_the_embedded_model_is_made_again_after_a_kill(small, tmp_path, point):
    run, cache = tmp_path / "run", tmp_path / "cache"
    embedded = "policy.model_name=embedded"
    small.killed(run, cache, embedded, at=point)
    assert len(list(cache.glob("models/tiny-*"))) == (point == "model.done")
    assert small.run(run, cache, embedded).code == 0
    assert small.run(tmp_path / "other/run", tmp_path / "other/cache", embedded).code == 0
    assert_same(run, tmp_path / "other/run")


@pytest.mark.parametrize(
    "point", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in WRITES]
)
def test_a_full_disk_ends_in_one_line_and_the_run_resumes_with_identical_weights(small, whole, tmp_path, point):
    run, cache = tmp_path / "run", tmp_path / "cache"
    ended = small.run(run, cache, fail_at=f"{at(point)}=disk_full")
    assert ended.code == 7
    assert ended.err == (
        "tandem: error: the disk is full: [Errno 28] No space left on device: "
        f"'(TANDEM_FAIL_AT={point})'. Checkpoints saved before are intact. Free some space and run the "
        "command again.\n"
    )
    assert_intact(*folders(run, cache))
    if point.startswith("checkpoint."):
        assert checkpoints(run / "checkpoints")
    # Temporary files were removed where possible, because the disk is full.
    assert list(tmp_path.rglob(".*")) == []
    assert small.run(run, cache).code == 0
    assert_same(run, whole)


@pytest.mark.slow
def test_a_run_resumed_three_times_ends_with_identical_weights(small, whole, tmp_path):
    run, cache = tmp_path / "run", tmp_path / "cache"
    small.killed(run, cache, at="step.done:2")
    for point in ("step.done:2", "checkpoint.latest:1", "verdicts.rename", "model.rename"):
        small.killed(run, cache, at=point)
    assert small.run(run, cache).code == 0
    assert_same(run, whole)


def test_an_unknown_fail_point_is_refused(small, tmp_path):
    ended = small.run(tmp_path / "run", tmp_path / "cache", fail_at="checkpoint.renam")
    assert (ended.code, ended.err) == (
        2,
        "tandem: error: TANDEM_FAIL_AT=checkpoint.renam: not a fail point. Write POINT, POINT:COUNT, POINT:COUNT=disk_full "
        "or POINT:COUNT=hang; `tandem fail-points` lists the points.\n",
    )
    assert not (tmp_path / "run").exists()


def test_the_run_to_compare_with_holds_what_is_compared(whole):
    """Otherwise the comparisons would say nothing."""
    found = outcome(whole)
    assert [(line["step"], line["split"]) for line in found["metrics"]] == [
        (0, "validation-default"),
        (1, "train"),
        (2, "train"),
        (2, "validation-default"),
        (3, "train"),
        (4, "train"),
        (4, "validation-default"),
        (4, "exported-default"),
    ]
    losses = [line["loss"] for line in found["metrics"] if line["split"] == "train"]
    assert len(set(losses)) == 4
    assert len(found["pairs"].splitlines()) == 36
    assert found["latest"] == "step_4"


LONGER = ["dpo.max_num_steps=8", "dpo.max_num_epochs=2"]


@pytest.fixture(scope="module")
def extended(small, whole, tmp_path_factory):
    """The run of `SETTINGS`, extended; nothing interrupted it."""
    return extend(small, whole, tmp_path_factory.mktemp("extended"))


def extend(small, whole, folder, fail_at=""):
    run, cache = folder / "run", whole.with_name("cache")
    if not run.exists():
        shutil.copytree(whole, run, symlinks=True)
    ended = small.run(run, cache, *LONGER, fail_at=fail_at)
    assert (ended.code, ended.err) == ((-signal.SIGKILL, "") if fail_at else (0, "")), ended
    return run


@pytest.mark.parametrize(
    "point",
    [
        "config.rename",  # the old export has its new name, the old configuration is there
        pytest.param(
            "metrics.write:2", marks=pytest.mark.slow
        ),  # of the validation that was not yet due at the old end
        "step.done:3",
        pytest.param("checkpoint.rename:2", marks=pytest.mark.slow),
        pytest.param("checkpoint.prune:1", marks=pytest.mark.slow),
        pytest.param("verdicts.rename", marks=pytest.mark.slow),
        "model.rename",
    ],
)
def test_a_run_killed_in_an_extension_resumes_with_identical_weights(small, whole, extended, tmp_path, point):
    run = extend(small, whole, tmp_path, fail_at=point)
    assert not (run / "model").exists()
    assert (run / "model.step_4").is_dir()
    assert_intact(run / "checkpoints")
    extend(small, whole, tmp_path)
    assert_same(run, extended)

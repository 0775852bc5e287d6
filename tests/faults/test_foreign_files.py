"""A user's files in the directories of a run, its checkpoints and the cache, through kills, a resume and an extension."""

import os
import shutil

import pytest
from killing import assert_same

# Of folders with a number after the last dot, only the missing marker says that they are not tandem's.
FOLDERS = [
    ".step_1.backup",
    ".step_2.4194303",
    ".model.4194303",
    "step_100",
    "step_²",
    "step_3.damaged",
    ".abc.4194303",
]
FILES = [".best.txt", ".config.yaml.swp", ".model.bak", ".config.yaml.20261117", "step_007", "notes", ".latest~"]


def place(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        (folder / name / "inner").mkdir(parents=True)
        (folder / name / "inner/mine").write_bytes(os.urandom(20))
    for name in FILES:
        (folder / name).write_bytes(os.urandom(20))
    return {path: path.read_bytes() for name in (*FOLDERS, *FILES) for path in all_files(folder / name)}


def all_files(path):
    return [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]


@pytest.mark.slow
def test_a_users_files_stay_through_kills_a_resume_and_an_extension(small, whole, tmp_path):
    run, cache = tmp_path / "run", tmp_path / "cache"
    small.killed(run, cache, at="checkpoint.rename:2")
    mine = {}
    for folder in (run, run / "checkpoints", *(cache / kind for kind in ("tokens", "packs", "reference", "models"))):
        mine |= place(folder)

    def stays():
        return {path: path.read_bytes() for path in mine} == mine

    for point in ("checkpoint.prune:1", "model.sync"):
        small.killed(run, cache, at=point)
        assert stays()
    temporary = [path for path in tmp_path.rglob(".*") if (path / "written-by-tandem").exists()]
    assert [path.name.rpartition(".")[0] for path in temporary] == [".model"]  # of the last one killed
    ended = small.run(run, cache)
    assert (ended.code, ended.err) == (0, "")
    assert stays()
    assert small.run(run, cache, "dpo.max_num_steps=8", "dpo.max_num_epochs=2").code == 0
    assert stays()
    assert not list(tmp_path.rglob("written-by-tandem"))
    assert {path for path in all_files(run) if path.name[0] == "."} <= mine.keys()


@pytest.mark.slow
def test_a_run_resumed_among_a_users_files_ends_with_identical_weights(small, whole, tmp_path):
    run, cache = tmp_path / "run", tmp_path / "cache"
    small.killed(run, cache, at="checkpoint.prune:2")
    for folder in (run, run / "checkpoints"):
        place(folder)
    assert small.run(run, cache).code == 0
    for name in (*FOLDERS, *FILES):
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).unlink(missing_ok=True)
    assert_same(run, whole)

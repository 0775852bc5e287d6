"""Run directories of a stranger, mutated, are gone on with to their end, or refused in words."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import copy_of, files_below, mutate_file, remake_manifest, try_all
from running import few_pairs, short_run

pytestmark = pytest.mark.slow

NUMBER = 1000
SETTINGS = ["checkpointing.save_period=2", "checkpointing.keep_top_k=1"]
# Links and foreign files where a run keeps its own.
FOREIGN = [
    ".step_1.backup",
    ".best.txt",
    ".config.yaml.swp",
    "step_²",
    "step_1",
    "step_100",
    "step_100.damaged",
    "notes.txt",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unfinished: saved after its last step, and not exported yet."""
    folder = tmp_path_factory.mktemp("run")
    short_run(folder / "run", few_pairs(folder, 20), *SETTINGS)
    shutil.rmtree(folder / "run" / "model")
    return folder / "run"


@pytest.mark.parametrize("part", range(4))
def test_run_directories(tmp_path: Path, run: Path, part: int) -> None:
    victim = tmp_path / "victim"
    copy_of(run, victim)
    (victim / "file.txt").write_text("{}")
    pairs = f"data.train.data_path={run.parent}/few.jsonl"

    def make(rng: random.Random) -> Callable[[], Any]:
        given = copy_of(run, tmp_path / "given")
        kind = rng.random()
        if kind < 0.15:
            _put_foreign(rng, rng.choice([given, given / "checkpoints"]) / rng.choice(FOREIGN), victim)
        elif kind < 0.25:
            _relink(rng, given / "checkpoints" / rng.choice(["best", "latest", "step_4"]), victim)
        else:
            file = rng.choice(files_below(given))
            mutate_file(rng, file, victim)
            if rng.random() < 0.8 and (file.parent / "manifest.json").exists():
                remake_manifest(file.parent)
            if file.parent.name == "tensors" and rng.random() < 0.8:
                remake_manifest(file.parents[1])
        return lambda: short_run(given, pairs, *SETTINGS)

    try_all("run", range(part * NUMBER // 4, (part + 1) * NUMBER // 4), make, victim)


def _put_foreign(rng: random.Random, place: Path, victim: Path) -> None:
    match rng.choice(["file", "folder", "link", "link to folder"]):
        case "file":
            place.write_text("mine")
        case "folder":
            place.mkdir()
            (place / "mine.txt").write_text("mine")
        case "link":
            place.symlink_to(victim / "file.txt")
        case "link to folder":
            place.symlink_to(victim)


def _relink(rng: random.Random, place: Path, victim: Path) -> None:
    """Another thing under the name of a link or checkpoint."""
    if place.is_symlink():
        place.unlink()
    else:
        place.rename(place.with_name(f"was_{place.name}"))
    match rng.choice(["folder", "elsewhere", "upwards", "self", "file", "absent"]):
        case "folder":
            place.mkdir()
            (place / "mine.txt").write_text("mine")
        case "elsewhere":
            place.symlink_to(victim / "checkpoints" / "step_2")
        case "upwards":
            place.symlink_to("../../..")
        case "self":
            place.symlink_to(place.name)
        case "file":
            place.write_text("mine")
        case "absent":
            place.symlink_to("step_77")

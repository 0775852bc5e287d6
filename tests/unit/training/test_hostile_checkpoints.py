"""Checkpoints that a stranger changed, their manifests made again, end in one message before anything is trained."""

import json
from pathlib import Path

import pytest
import torch
from hostile import copy_of, remake_manifest
from running import saving_settings, short_run, unfinished_run
from safetensors import safe_open
from safetensors.torch import save_file

from tandem.errors import CheckpointError
from tandem.storage.cache import is_export

pytestmark = pytest.mark.usefixtures("of_a_command")

HUGE = 10**9  # steps: the schedule alone would be stepped through for hours


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return unfinished_run(folder, saving_settings(folder))


@pytest.fixture
def run(unfinished: Path, tmp_path: Path) -> Path:
    return copy_of(unfinished, tmp_path / "run")


def refusal(run: Path, unfinished: Path, per_pair: Path | None = None) -> str:
    with pytest.raises(CheckpointError) as refused:
        short_run(run, *saving_settings(unfinished.parent), per_pair=per_pair)
    return str(refused.value)


def change(file: Path, **changes: object) -> None:
    found = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in (found | changes).items() if value is not None}))


def test_a_checkpoint_of_a_billion_steps_is_refused(run, unfinished):
    place = (run / "checkpoints/step_3").rename(run / f"checkpoints/step_{HUGE}")
    change(place / "state.json", progress={"step": HUGE})
    remake_manifest(place)
    for link in ("best", "latest"):
        (run / "checkpoints" / link).unlink()
    message = f"{run} has already trained {HUGE} steps, so it cannot be shortened to 4. "
    assert refusal(run, unfinished).startswith(message)
    # a finished run is not trained, but its last checkpoint is loaded
    (run / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (run / "model" / name).touch()
    assert is_export(run / "model")
    assert refusal(run, unfinished, run.with_name("pairs.jsonl")).startswith(message)


def test_a_step_that_is_not_the_one_in_the_folders_name_is_refused(run, unfinished):
    place = run / "checkpoints/step_3"
    change(place / "state.json", progress={"step": [3]})
    remake_manifest(place)
    assert refusal(run, unfinished) == (
        f"{place}/state.json: progress.step is not an integer from 0 to 2^53, so no run can resume from this checkpoint. Move "
        f"{place} elsewhere to resume from an earlier one, or start again with --fresh."
    )


def test_a_checkpoint_without_the_version_of_its_format_is_refused(run, unfinished):
    place = run / "checkpoints/step_3"
    change(place / "manifest.json", format_version=None)
    remake_manifest(place)
    assert refusal(run, unfinished).startswith(f"{place}: written in format None; this tandem reads format ")


def test_a_tensor_that_is_not_a_random_state_is_refused(run, unfinished):
    place = run / "checkpoints/step_3"
    file = place / "tensors/rank_0.safetensors"
    with safe_open(file, framework="pt") as stored:
        tensors, metadata = {name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata()  # noqa: SIM118
    tensors["random.cpu.0"] = torch.full_like(tensors["random.cpu.0"], 255)
    save_file(tensors, file, metadata=metadata)
    remake_manifest(place)
    before = torch.get_rng_state()
    reported = refusal(run, unfinished)
    assert reported.startswith(f"{place}: random.cpu.0 is not a random state (")
    torch.set_rng_state(before)

"""state.json of a checkpoint, as tandem writes it and as a stranger might."""

import json
import os
from dataclasses import asdict

import pytest

from tandem.errors import CheckpointError
from tandem.training.checkpoint.saved_state import Progress, SavedState, read_state

PROGRESS = Progress(step=7, epoch=2, batch=1, metrics_bytes=900, owes_validation=True, spared=3)
FINGERPRINTS = {"training data": "ab", "start model": "cd"}


def checkpoint(folder, text):
    place = folder / "step_7"
    place.mkdir()
    (place / "state.json").write_text(text)
    return place


def refusal(place):
    with pytest.raises(CheckpointError) as refused:
        read_state(place)
    reported, separator, _ = str(refused.value).partition(", so no run can resume from this checkpoint. ")
    assert separator
    return reported.removeprefix(f"{place}/state.json: ")


def test_what_is_written_is_read(tmp_path):
    place = checkpoint(tmp_path, json.dumps({"progress": asdict(PROGRESS), "fingerprints": FINGERPRINTS}))
    assert read_state(place) == SavedState(PROGRESS, FINGERPRINTS)


def test_what_an_earlier_version_did_not_write_has_its_default(tmp_path):
    place = checkpoint(tmp_path, json.dumps({"progress": {"step": 7}, "fingerprints": {}}))
    assert read_state(place).progress == Progress(step=7)


@pytest.mark.parametrize(
    ("changed", "reported"),
    [
        *(
            ({name: value}, f"progress.{name} is not an integer from 0 to 2^53")
            for name in ("step", "batch")
            for value in (-1, 7.0, "7", None)
        ),
        ({"metrics_bytes": 10**400}, "progress.metrics_bytes is not an integer from 0 to 2^53"),
        ({"step": True}, "progress.step is not an integer from 0 to 2^53"),
        ({"owes_validation": 1}, "progress.owes_validation is not true or false"),
        ({"__class__": 1}, "progress has a key that tandem does not write ('__class__')"),
        ({"step": 10**9}, "progress.step is 1000000000, but the folder is named step_7"),
        ({"epoch": 10**9}, "progress counts more epochs or batches than steps (7)"),
        ({"batch": 8}, "progress counts more epochs or batches than steps (7)"),
    ],
)
def test_progress_that_no_run_makes_is_refused(tmp_path, changed, reported):
    state = {"progress": {**asdict(PROGRESS), **changed}, "fingerprints": FINGERPRINTS}
    assert refusal(checkpoint(tmp_path, json.dumps(state))) == reported


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[]", "the key progress is missing, or its value is not a mapping"),
        ('{"progress": 1, "fingerprints": {}}', "the key progress is missing, or its value is not a mapping"),
        ('{"progress": {"step": 7}}', "the key fingerprints is missing, or its value is not a mapping"),
        (
            '{"progress": {"step": 7}, "fingerprints": {"training data": [1]}}',
            "a value of fingerprints is not a string",
        ),
    ],
)
def test_another_tree_is_refused(tmp_path, text, reported):
    assert refusal(checkpoint(tmp_path, text)) == reported


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 5000])
def test_a_file_that_is_not_json_is_refused(tmp_path, text):
    refusal(checkpoint(tmp_path, text))


def test_a_pipe_is_not_waited_for(tmp_path):
    place = checkpoint(tmp_path, "")
    (place / "state.json").unlink()
    os.mkfifo(place / "state.json")
    assert refusal(place) == "the path is not a file"

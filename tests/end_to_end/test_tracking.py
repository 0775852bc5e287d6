"""Every tracker gets the values of metrics.jsonl, each step once. A failing tracker does not affect the run."""

import json
import struct
import sys
import time
from pathlib import Path

import pytest
from fake_tracker import put_in_front
from running import SHORT, VARYING, killed_after, largest_difference, metrics_of, short_run, weights_of

from tandem.cli import main as cli
from tandem.report.trackers import tracking as feed
from tandem.report.trackers.tracking import TIMING, tracker_metrics
from tandem.training import trainer

# Five steps, and three validations of a single batch.
SETTINGS = [
    *("dpo.max_num_steps=5", "dpo.val_period=2", "dpo.val_at_end=true", "checkpointing.save_period=2"),
    *("dpo.val_batches=1", "dpo.val_global_batch_size=4", "policy.train_global_batch_size=4"),
]
ALL_THREE = [f"logger.{name}_enabled=true" for name in ("tensorboard", "wandb", "mlflow")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("plain") / "run", *SETTINGS)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A run with all three trackers, killed after step 3 and resumed from the checkpoint of step 2."""
    run = tmp_path_factory.mktemp("tracked") / "run"
    settings = [*SETTINGS, *ALL_THREE, "logger.wandb.mode=offline", "logger.mlflow.experiment_name=mine"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed, "CLOSE_SECONDS", 120.0)  # so short a run may end before they are open, on a busy machine
        with killed_after(3):
            short_run(run, *settings)
        return short_run(run, *settings)


def points_of(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The values of metrics.jsonl, under the names used in trackers."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        step, metrics = tracker_metrics(json.loads(line))
        for name, value in metrics.items():
            points.setdefault(name, []).append((step, value))
    return points


def untimed(points):
    """A record without the values that change when a step is repeated."""
    return {name: values for name, values in points.items() if not name.startswith("timing/")}


def close_to(points):
    return {name: [(step, pytest.approx(value, rel=1e-6)) for step, value in of] for name, of in points.items()}


@pytest.mark.slow
def test_a_killed_and_resumed_run_has_the_metrics_of_an_uninterrupted_one(tracked, plain):
    for split in ("train", "validation-default", "exported-default"):
        assert metrics_of(tracked, split) == metrics_of(plain, split)
    assert largest_difference(weights_of(tracked), weights_of(plain)) == 0.0


def test_tensorboard_shows_metrics_jsonl_each_step_once(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tracked / "logs/tensorboard"
    assert len(list(folder.iterdir())) == 2  # one file a start
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    shown = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert shown == close_to(points_of(tracked))
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3, 4, 5]
    assert [step for step, _ in shown["validation-default/loss"]] == [2, 4, 5]
    assert b"dpo.reference_policy_kl_penalty" in min(folder.iterdir()).read_bytes()


def test_mlflow_shows_metrics_jsonl_each_step_once(tracked):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracked}/logs/mlflow.db")
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["dpo.reference_policy_kl_penalty"] == "0.1"
    shown = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    points = {name: sorted((one.step, one.value) for one in history) for name, history in shown.items()}
    assert untimed(points) == close_to(untimed(points_of(tracked)))
    assert [step for step, _ in points["timing/train/step_seconds"]] == [1, 2, 3, 4, 5]


def test_wandb_writes_an_offline_run_under_one_id(tracked):
    folders = sorted((tracked / "logs/wandb").glob("offline-run-*"))
    kept = json.loads((tracked / "trackers.json").read_text())["wandb"]["id"]
    assert [folder.name.rsplit("-", 1)[1] for folder in folders] == [kept, kept]
    points: dict[str, dict[int, float]] = {}
    for folder in folders:
        for row in wandb_history(folder / f"run-{kept}.wandb"):
            for name, value in row.items():
                points.setdefault(name, {})[row["_step"]] = value
    shown = {name: sorted(of.items()) for name, of in points.items() if not name.startswith("_")}
    assert untimed(shown) == close_to(untimed(points_of(tracked)))


def wandb_history(path: Path) -> list[dict]:
    """Parse a .wandb file: protocol buffers in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header begins in the last bytes of a block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            record, parts = Record.FromString(parts), b""
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
    return rows


# Bad ones: a package `wandb` that misbehaves

BAD = {
    "raises": {"log": "raise RuntimeError('no')"},
    "is a black hole": {"log": "time.sleep(1e6)"},
    "is a black hole from the start": {"init": "time.sleep(1e6)"},
    "is slow": {"log": "time.sleep(0.7)"},
}


@pytest.mark.parametrize("what", BAD)
def test_a_failing_tracker_does_not_affect_training(what, monkeypatch, tmp_path, plain):
    put_in_front(monkeypatch, tmp_path / "package", **BAD[what])
    monkeypatch.setattr(feed, "CLOSE_SECONDS", 1.0)
    ended = []
    finish = trainer.finish

    def timed(*arguments):
        finish(*arguments)
        ended.append(time.monotonic())

    monkeypatch.setattr(trainer, "finish", timed)
    run = short_run(tmp_path / "run", *SETTINGS, "logger.wandb_enabled=true")
    assert time.monotonic() - ended[0] < 60  # it would take for ever
    for split in ("train", "validation-default", "exported-default"):
        assert metrics_of(run, split) == metrics_of(plain, split)
    assert largest_difference(weights_of(run), weights_of(plain)) == 0.0


# A program that reads along


def test_json_prints_every_record_and_the_result_and_nothing_else(tmp_path, monkeypatch, capfd):
    run = tmp_path / "run"
    settings = [
        setting for setting in SHORT if not setting.startswith("policy.scheduler")
    ]  # so that there is a warning
    command = ["tandem", "train", "--json", *settings, *SETTINGS, f"run.dir={run}"]
    for number in (1, 2):  # the second finds it finished
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code in (0, None)
        printed = capfd.readouterr()
        *records, result = [json.loads(line) for line in printed.out.splitlines()]
        written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert records == (written if number == 1 else [])
        assert result["run_dir"] == str(run)
        assert list(result["final"]) == ["train", "validation-default", "timing/validation", "exported-default"]
        assert result["final"]["train"] == next(record for record in written[::-1] if record["split"] == "train")
        warning = "warning: in 5 steps the learning rate never rises above" if number == 1 else ""
        assert printed.err.startswith(warning)
        assert len(printed.err.splitlines()) == (number == 1)


def test_the_values_that_vary_are_those_tracked_as_timing():
    assert set(TIMING) == set(VARYING)

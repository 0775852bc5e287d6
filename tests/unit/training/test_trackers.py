"""Trackers in the background: the run never waits, lost records are reported, and secrets are not shown."""

import hashlib
import importlib.util
import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict

import pytest
from fake_tracker import put_in_front
from patience import within

from tandem.config.load import load_config
from tandem.config.sections.logger import GpuMonitoring, Logger
from tandem.errors import CheckpointError, ConfigError
from tandem.report.trackers import tracking as feeding
from tandem.report.trackers.adapters import Mlflow, Opening, TrackerRuns, flattened, refuse_other_database
from tandem.report.trackers.gpus import GpuMonitor, summarise
from tandem.report.trackers.tracking import Feed, Tracking, check_packages, tracker_metrics
from tandem.terminal.printable import without_password

FOR_EVER = "time.sleep(1e6)"


class Said(list):
    """Collects printed lines or warnings."""

    def __call__(self, text):
        self.append(text)


def feed_of(folder, warned, said=None):
    opening = Opening(str(folder), str(folder / "logs"), 0, [], Logger().model_dump(), {"run": {"seed": 1}})
    return Feed(["wandb"], opening, said if said is not None else Said(), warned)


def wait_for(condition):
    with within(120):
        while not condition():
            time.sleep(0.02)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Wait for a working tracker, however busy the machine."""
    monkeypatch.setattr(feeding, "CLOSE_SECONDS", 120)


# Names


def test_metrics_are_named_by_split_and_durations_have_a_prefix():
    record = {"step": 3, "split": "train", "loss": 0.5, "step_seconds": 2.0, "accuracy/train-0": 1.0}
    assert tracker_metrics(record) == (
        3,
        {"train/loss": 0.5, "timing/train/step_seconds": 2.0, "train/accuracy/train-0": 1.0},
    )
    assert tracker_metrics({"step": 0, "split": "validation-default", "accuracy": 0.5}) == (
        0,
        {"validation-default/accuracy": 0.5},
    )


def test_hyperparameters_are_flattened():
    assert dict(flattened({"a": {"b": 1, "c": {}}, "d": [2]})) == {"a.b": 1, "a.c": {}, "d": [2]}


# Packages


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "mlflow"])
def test_a_missing_package_is_refused_with_the_command_that_installs_it(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError) as refused:
        check_packages(load_config(None, [f"logger.{name}_enabled=true"]).config.logger)
    assert str(refused.value) == (
        f"logger.{name}_enabled = true: the package {name} is not installed. In the tandem checkout, run "
        f"pip install '.[{name}]', "
        f"or set logger.{name}_enabled=false."
    )


def test_a_folder_named_like_the_package_is_not_the_package(monkeypatch, tmp_path):
    (tmp_path / "mlflow").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)  # another test may have imported it
    with pytest.raises(ConfigError, match="the package mlflow is not installed"):
        check_packages(Logger(mlflow_enabled=True))


def test_packages_of_disabled_trackers_are_not_needed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    check_packages(Logger())


# Bad trackers


def test_a_working_tracker_gets_every_record_without_warnings(monkeypatch, tmp_path):
    written = tmp_path / "written"
    put_in_front(monkeypatch, tmp_path / "p", log=f"print(step, metrics, file=open({str(written)!r}, 'a'))")
    warned, said = Said(), Said()
    feed = feed_of(tmp_path, warned, said)
    for step in range(3):
        feed.put(step, {"a": 0.5})
    feed.close()
    assert written.read_text() == "0 {'a': 0.5}\n1 {'a': 0.5}\n2 {'a': 0.5}\n"
    assert (warned, said) == ([], ["Tracked by wandb: fake://run"])


def test_output_of_a_tracker_goes_to_its_log(monkeypatch, tmp_path, capfd):
    put_in_front(monkeypatch, tmp_path / "p", log="print('hello from it', flush=True); os.system('echo and its child')")
    warned = Said()
    feed = feed_of(tmp_path, warned)
    feed.put(1, {"a": 0.5})
    feed.close()
    assert (tmp_path / "logs/trackers.log").read_text() == "hello from it\nand its child\n"
    assert (warned, capfd.readouterr()) == ([], ("", ""))


@pytest.mark.parametrize("where", ["init", "log"])
def test_a_tracker_that_never_answers_does_not_delay_the_run_and_is_killed_at_its_end(monkeypatch, tmp_path, where):
    put_in_front(monkeypatch, tmp_path / "p", **{where: FOR_EVER})
    warned = Said()
    monkeypatch.setattr(feeding, "CLOSE_SECONDS", 1.5)
    feed = feed_of(tmp_path, warned)
    start = time.monotonic()
    for step in range(5000):
        feed.put(step, {"a": 0.5})
    feed.close()
    assert time.monotonic() - start < 60  # it would take for ever
    assert feed._process.wait(60) != 0  # killed, which a busy machine may be slow to say
    assert warned == ["5000 of 5000 records did not reach wandb; metrics.jsonl has them all."]


def test_a_tracker_that_does_not_answer_is_reported_during_the_run(monkeypatch, tmp_path):
    put_in_front(monkeypatch, tmp_path / "p", log=FOR_EVER)
    monkeypatch.setattr(feeding, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(feeding, "SLOW_SECONDS", 0.2)
    warned = Said()
    feed = feed_of(tmp_path, warned)
    with within(120):
        while not warned:
            feed.put(1, {"a": 0.5})
            time.sleep(0.05)
        feed.put(2, {"a": 0.5})
    assert warned == ["wandb: no answer for 0.2 seconds. The run continues; metrics.jsonl has every record."]
    feed.close()


def test_a_tracker_that_hangs_only_while_closing_is_stopped_and_reported(monkeypatch, tmp_path):
    put_in_front(monkeypatch, tmp_path / "p", finish=FOR_EVER)
    warned = Said()
    monkeypatch.setattr(feeding, "CLOSE_SECONDS", 1.5)
    feed = feed_of(tmp_path, warned)
    feed.put(1, {"a": 0.5})
    wait_for(lambda: feed._num_delivered == 1)
    feed.close()
    assert warned == ["wandb did not finish within 1.5 seconds of the run's end and was stopped."]


def test_records_that_do_not_fit_the_queue_are_dropped_and_counted(monkeypatch, tmp_path):
    go_on = tmp_path / "continue"
    put_in_front(monkeypatch, tmp_path / "p", init=f"while not os.path.exists({str(go_on)!r}): time.sleep(0.02)")
    monkeypatch.setattr(feeding, "QUEUE_RECORDS", 3)
    warned = Said()
    feed = feed_of(tmp_path, warned)
    wait_for(lambda: feed._queue.empty())  # the opening is under way
    for step in range(10):
        feed.put(step, {"a": 0.5})
    go_on.touch()
    feed.close()
    assert warned == ["7 of 10 records did not reach wandb; metrics.jsonl has them all."]


@pytest.mark.parametrize("error", ["RuntimeError", "SystemExit"])
def test_a_tracker_that_raises_is_retried_then_switched_off_with_one_warning(monkeypatch, tmp_path, error):
    tried = tmp_path / "tried"
    raising = f"print(step, file=open({str(tried)!r}, 'a')); raise {error}('no way\\nto http://me:secret@host/')"
    put_in_front(monkeypatch, tmp_path / "p", log=raising)
    warned = Said()
    feed = feed_of(tmp_path, warned)
    for step in range(3):
        feed.put(step, {"a": 0.5})
    wait_for(lambda: warned)
    feed.put(4, {"a": 0.5})
    assert feed._num_put == 3
    feed.close()
    assert tried.read_text() == "0\n0\n0\n"
    assert warned == [
        f"wandb is switched off: {error}: no way to http://host/. The run continues; metrics.jsonl has every record."
    ]


def test_a_tracker_that_ends_its_process_gets_one_warning(monkeypatch, tmp_path):
    put_in_front(monkeypatch, tmp_path / "p", log="os._exit(3)")
    warned = Said()
    feed = feed_of(tmp_path, warned)
    for step in range(3):
        feed.put(step, {"a": 0.5})
    wait_for(lambda: warned)
    feed.close()
    assert warned == ["trackers are switched off: their process ended (exit code 3). The run continues without them."]


def test_hanging_trackers_do_not_outlive_a_killed_run(monkeypatch, tmp_path):
    put_in_front(monkeypatch, tmp_path / "p", init=FOR_EVER)
    code = "from tandem.report.trackers import child; child.CLOSE_SECONDS = 0.2; child.main()"
    orphan = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
    opening = Opening(str(tmp_path), str(tmp_path / "logs"), 0, [], Logger().model_dump(), {})
    orphan.communicate(json.dumps({"tracker": "wandb", "opening": asdict(opening)}) + "\n", timeout=120)
    assert orphan.returncode == 1


def test_records_of_earlier_steps_are_sent_to_wandb_under_the_last_step(monkeypatch, tmp_path):
    """Such as the export of a run that stopped early, which belongs to the best step."""
    steps, warned = tmp_path / "steps", Said()
    put_in_front(monkeypatch, tmp_path / "p", log=f"open({str(steps)!r}, 'a').write(f'{{step}} {{list(metrics)}}\\n')")
    feed = feed_of(tmp_path, warned)
    for step, name in ((3, "train/loss"), (4, "train/loss"), (2, "exported-default/loss")):
        feed.put(step, {name: 0.5})
    feed.close()
    assert warned == []
    assert steps.read_text().splitlines() == ["3 ['train/loss']", "4 ['train/loss']", "4 ['exported-default/loss']"]


# The run that a tracker has


def test_an_address_is_recognised_but_never_written(tmp_path):
    kept = TrackerRuns(str(tmp_path))
    assert kept.find("mlflow", "http://me:secret@host") is None
    kept.keep("wandb", "me/project", "w1")
    kept.keep("mlflow", "http://me:secret@host", "m1")
    assert kept.find("mlflow", "http://me:secret@host") == "m1"
    assert kept.find("wandb", "me/project") == "w1"
    assert kept.find("mlflow", "http://other") is None
    assert "secret" not in (tmp_path / "trackers.json").read_text()
    assert without_password("to http://me:secret@host/a and sqlite:///a") == "to http://host/a and sqlite:///a"


# Databases


def database(path, table):
    with closing(sqlite3.connect(path)) as opened:
        opened.execute(f"CREATE TABLE {table} (x)")
        opened.commit()
    return path.read_bytes()


@pytest.mark.parametrize("uri", ["sqlite:///{}", "sqlite+pysqlite:///{}", "sqlite:///file:{}?uri=true"])
def test_a_database_that_is_not_mlflows_is_refused_and_stays(tmp_path, uri):
    path = tmp_path / "mine.db"
    before = database(path, "mine")
    with pytest.raises(ValueError) as refused:
        refuse_other_database(uri.format(path))
    assert str(refused.value) == (
        f"{path}: not an MLflow database. MLflow would add its tables to it. Choose another logger.mlflow.tracking_uri."
    )
    path.write_text("mine")
    with pytest.raises(ValueError) as refused:
        refuse_other_database(uri.format(path))
    assert str(refused.value) == (
        f"{path}: not readable as an SQLite database (file is not a database). Choose another logger.mlflow.tracking_uri."
    )
    assert path.read_text() == "mine"
    path.write_bytes(before)
    assert names_in(tmp_path) == ["mine.db"]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_database_of_mlflows_and_one_that_is_new_or_empty_are_used(tmp_path):
    database(tmp_path / "mlflow.db", "experiments")
    (tmp_path / "empty.db").touch()
    for uri in ("mlflow.db", "empty.db", "new.db"):
        refuse_other_database(f"sqlite:///{tmp_path}/{uri}")
    refuse_other_database("http://host/")
    refuse_other_database("sqlite://")
    assert names_in(tmp_path) == ["empty.db", "mlflow.db"]


def test_mlflows_own_database_is_never_a_link(tmp_path):
    before = database(tmp_path / "mine.db", "experiments")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/mlflow.db").symlink_to(tmp_path / "mine.db")
    with pytest.raises(CheckpointError) as refused:
        Mlflow(Opening(str(tmp_path), str(tmp_path / "logs"), 0, [], Logger().model_dump(), {}))
    assert str(refused.value) == (
        f"{tmp_path}/logs/mlflow.db: a symbolic link, and writing to it would change a file elsewhere. Remove the link, or "
        "replace it by a copy of the file."
    )
    assert (tmp_path / "mine.db").read_bytes() == before


# GPUs


def test_a_summary_has_mean_utilisation_and_peak_memory():
    seen = [{"gpu.0.util": 50.0, "gpu.0.mem_gb": 1.0}, {"gpu.0.util": 100.0, "gpu.0.mem_gb": 3.0}]
    assert summarise(seen) == {"gpu.0.util": 75.0, "gpu.0.mem_gb": 3.0}
    assert summarise([]) == {}


def test_gpu_samples_are_written_and_their_newest_summary_is_tracked_once(tmp_path):
    path, warned = tmp_path / "logs/gpu.jsonl", Said()
    intervals = GpuMonitoring(collection_interval=0.01, flush_interval=0.05)
    monitor = GpuMonitor(path, intervals, warned, lambda: {"gpu.0.util": 40.0, "gpu.0.mem_gb": 7.0})
    wait_for(lambda: path.exists() and path.read_text())
    monitor.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {key: value for key, value in lines[0].items() if key != "time"} == {"gpu.0.util": 40.0, "gpu.0.mem_gb": 7.0}

    class Put(list):
        def put(self, step, metrics, by_tracker):
            self.append((step, metrics))

    put = Put()
    tracking = Tracking(put, monitor)  # type: ignore[arg-type]
    for step in (1, 2):
        tracking.log({"step": step, "split": "train", "loss": 0.5})
    assert put == [
        (1, {"train/loss": 0.5, "hardware/gpu.0.util": 40.0, "hardware/gpu.0.mem_gb": 7.0}),
        (2, {"train/loss": 0.5}),
    ]
    assert warned == []


def test_gpus_that_cannot_be_read_cause_one_warning(tmp_path):
    warned = Said()

    def failing():
        raise RuntimeError("no driver")

    monitor = GpuMonitor(tmp_path / "gpu.jsonl", GpuMonitoring(collection_interval=0.01), warned, failing)
    wait_for(lambda: warned)
    monitor.close()
    assert (warned, monitor.take()) == (["GPU monitoring is switched off: RuntimeError: no driver"], {})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "[" * 100_000, "\ud800", '{"wandb": 1}', '{"wandb": {"where": 1}}'),
        *(
            json.dumps({"wandb": {"where": "WHERE", "id": run_id}})
            for run_id in ("../../victim", "", 7, None, "a" * 65)
        ),
    ],
)
def test_an_invalid_list_of_tracker_runs_is_ignored(tmp_path, text):
    kept, where = TrackerRuns(str(tmp_path)), hashlib.sha256(b"me/project").hexdigest()[:16]
    (tmp_path / "trackers.json").write_text(text.replace("WHERE", where), errors="backslashreplace")
    assert kept.find("wandb", "me/project") is None
    kept.keep("wandb", "me/project", "w1")
    assert kept.find("wandb", "me/project") == "w1"

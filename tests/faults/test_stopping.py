"""A run that is asked to stop saves its state and exits; the next start resumes with identical weights."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from running import SHORT, largest_difference, metrics_of, short_run, weights_of

from tandem.config.load import load_config
from tandem.errors import ConfigError, StoppedError
from tandem.model import reference
from tandem.report.reporter import Reporter
from tandem.training import step, trainer
from tandem.training.checkpoint import checkpoints as checkpoint
from tandem.training.checkpoint.checkpoints import checkpoints, step_of
from tandem.training.run.stopping import Stopping, stopped_by_signals
from tandem.training.start import build

SETTINGS = [
    *("dpo.max_num_steps=5", "dpo.val_period=2", "dpo.val_at_end=true", "dpo.val_at_start=true"),
    *("dpo.val_batches=2", "dpo.val_global_batch_size=8", "policy.packing.pack_length=512"),
    *("checkpointing.save_period=2", "checkpointing.keep_top_k=9"),
]


@pytest.fixture(autouse=True)
def hearing_sighup():
    """Under nohup the tests inherit a SIGHUP that is ignored, and a run would ignore it too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("whole") / "run", *SETTINGS)


@contextmanager
def signalled(monkeypatch, module, name, call, number=signal.SIGTERM):
    """The signal arrives within the so-many-th call of a function."""
    real = getattr(module, name)
    calls = []

    def watched(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, watched)
        yield


def steps_kept(run):
    return sorted(step_of(place) for place in checkpoints(run / "checkpoints"))


def assert_same(cut, whole):
    for split in ("train", "validation-default", "exported-default"):
        assert metrics_of(cut, split) == metrics_of(whole, split)
    assert largest_difference(weights_of(cut), weights_of(whole)) == 0.0


# where the signal falls, and the checkpoints that are there afterwards
PLACES = {
    "in the third step": (trainer, "train_step", 3, [2, 3]),
    "in a step after which validation is due": (trainer, "train_step", 2, [2]),
    "in a validation": (build, "validate", 2, [2]),
    "in the validation before the first step": (build, "validate", 1, []),
    "in the last validation": (build, "validate", 4, [2, 4, 5]),
    "while saving": (checkpoint, "write_checkpoint", 1, [2, 3]),
    "in an optimizer's update": (step, "_update", 3, [2, 3]),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_stopped_run_resumes_with_identical_weights(tmp_path, monkeypatch, whole, place):
    module, name, call, kept = PLACES[place]
    with signalled(monkeypatch, module, name, call), pytest.raises(StoppedError) as stopped:
        short_run(tmp_path / "run", *SETTINGS)
    assert (str(stopped.value), stopped.value.exit_code) == ("stopped by SIGTERM", 143)
    found = steps_kept(tmp_path / "run")
    # Checkpoints are written in the background: a signal during a write is handled in whatever step runs then.
    assert found == kept or (place == "while saving" and found[0] == 2)
    assert_same(short_run(tmp_path / "run", *SETTINGS), whole)


@pytest.mark.parametrize(("is_terminal", "start"), [(True, "\n"), (False, "")])
def test_on_a_terminal_the_message_begins_on_a_new_line(monkeypatch, capfd, is_terminal, start):
    monkeypatch.setattr(os, "isatty", lambda _: is_terminal)  # where ^C or a progress bar is at the cursor
    with stopped_by_signals(Stopping()):
        os.kill(os.getpid(), signal.SIGINT)
    message = "tandem: stopping after the current step is finished and saved. A second signal stops at once.\n"
    assert capfd.readouterr().err == start + message


def test_layers_that_are_not_compiled_show_no_bar_for_it(tmp_path, monkeypatch):
    shown = []
    real = Reporter.progress

    def watched(self, what, *arguments, **options):
        shown.append(what)
        return real(self, what, *arguments, **options)

    monkeypatch.setattr(Reporter, "progress", watched)
    short_run(tmp_path / "run")
    assert "Training" in shown
    assert "Compiling" not in shown


def test_a_signal_before_the_first_step_stops_immediately(tmp_path, monkeypatch, capfd):
    with signalled(monkeypatch, build, "load_sharded", 1, signal.SIGINT):
        monkeypatch.setattr(build, "make_references", lambda *_, **__: pytest.fail("it did not stop"))
        with pytest.raises(StoppedError) as stopped:
            short_run(tmp_path / "run")
    assert (str(stopped.value), stopped.value.exit_code) == ("stopped by SIGINT", 130)
    assert capfd.readouterr().err == ""  # nothing that is finished or saved first


def test_an_error_after_a_signal_to_all_processes_counts_as_the_stop(tmp_path, monkeypatch):
    def fails(*_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            raise RuntimeError("a process that compiled is gone") from None

    monkeypatch.setattr(build, "compile_shapes", fails)
    with pytest.raises(StoppedError) as stopped:
        short_run(tmp_path / "run")
    assert (str(stopped.value), stopped.value.exit_code) == ("stopped by SIGTERM", 143)


def checkpoints_of(run):
    """The checkpoints that are kept, and which is the best."""
    kept = run / "checkpoints"
    return steps_kept(run), (kept / "best").readlink().name, (kept / "latest").readlink().name


LOSSES = (0.1, 0.6, 0.5, 0.9, 0.8, 1.0)  # by step; that of the start ranks nothing


@pytest.mark.parametrize(
    "place",
    [
        "in a step after which validation is due",
        "in a validation",
        "before the third validation",
    ],
)
@pytest.mark.slow
def test_a_checkpoint_saved_before_its_validation_is_ranked_by_it_later(tmp_path, monkeypatch, place):
    real = build.Training.write

    def written(t, report):
        real(t, replace(report, metrics={**report.metrics, "loss": LOSSES[t.progress.step]}))

    monkeypatch.setattr(build.Training, "write", written)
    settings = [*SETTINGS, "dpo.val_period=1", "checkpointing.save_period=1", "checkpointing.keep_top_k=2"]
    module, name, call, _ = {**PLACES, "before the third validation": (trainer, "train_step", 3, [])}[place]
    with signalled(monkeypatch, module, name, call), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *settings)
    assert checkpoints_of(short_run(tmp_path / "run", *settings)) == ([1, 2, 5], "step_2", "step_5")


def test_a_run_whose_checkpoints_are_missing_says_that_it_starts_from_the_beginning(
    tmp_path, monkeypatch, capsys, whole
):
    with signalled(monkeypatch, trainer, "train_step", 3), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *SETTINGS)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    capsys.readouterr()
    run = short_run(tmp_path / "run", *SETTINGS)
    reported = (
        f"warning: {run} has steps in metrics.jsonl, but no checkpoint to resume from: it starts from the beginning."
    )
    assert reported in " ".join(capsys.readouterr().out.split())
    assert_same(run, whole)


@pytest.mark.parametrize("fewer", [[], ["dpo.val_batches=1"]], ids=["the same pairs", "fewer pairs"])
def test_the_final_table_of_a_resumed_run_includes_its_first_validation(tmp_path, monkeypatch, capsys, fewer):
    with signalled(monkeypatch, trainer, "train_step", 3), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *SETTINGS)
    capsys.readouterr()
    trainer.train(load_config(None, [*SHORT, f"run.dir={tmp_path}/run", *SETTINGS, *fewer]), Reporter())
    printed = " ".join(capsys.readouterr().out.split())
    assert ("Validation set metric before after" in printed) is not bool(fewer)
    assert ("Validation after training" in printed) is bool(fewer)


def test_a_run_without_checkpoints_says_that_it_starts_from_the_beginning(tmp_path, monkeypatch, capsys):
    settings = [*SETTINGS, "checkpointing.enabled=false"]
    with signalled(monkeypatch, trainer, "train_step", 3), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *settings)
    run = short_run(tmp_path / "run", *settings)
    reported = (
        f"warning: {run} has steps in metrics.jsonl, but no checkpoint to resume from: it starts from the beginning."
    )
    assert reported in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_run_stopped_several_times_ends_with_identical_weights(tmp_path, monkeypatch, whole):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        with signalled(monkeypatch, trainer, "train_step", 1, number), pytest.raises(StoppedError) as stopped:
            short_run(tmp_path / "run", *SETTINGS)
        assert stopped.value.exit_code == 128 + number
    assert steps_kept(tmp_path / "run") == [1, 2, 3, 4]
    assert_same(short_run(tmp_path / "run", *SETTINGS), whole)


def test_a_stop_in_the_reference_pass_leaves_no_incomplete_cache(tmp_path, monkeypatch):
    settings = [*SETTINGS, f"reference.cache_dir={tmp_path}/reference"]
    monkeypatch.setattr(reference, "PREFERENCES_PER_PORTION", 16)
    with signalled(monkeypatch, reference, "_start_portion", 2), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *settings)
    assert not list((tmp_path / "reference").iterdir())
    assert steps_kept(tmp_path / "run") == []
    assert len(metrics_of(short_run(tmp_path / "run", *settings))) == 5


@pytest.mark.usefixtures("of_a_command")
def test_the_last_checkpoint_is_named_when_a_run_stops(tmp_path, monkeypatch, capsys):
    with signalled(monkeypatch, trainer, "train_step", 3, signal.SIGINT), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *SETTINGS)
    out = " ".join(capsys.readouterr().out.split())
    assert out.endswith(f"{tmp_path}/run/checkpoints/step_3 is saved; the same command resumes from it.")
    assert "warning" not in out  # nothing is lost


def test_a_stop_warns_that_a_checkpoint_without_optimizer_states_cannot_be_resumed(tmp_path, monkeypatch, capsys):
    with signalled(monkeypatch, trainer, "train_step", 3), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *SETTINGS, "checkpointing.save_optimizer=false")
    out = " ".join(capsys.readouterr().out.split())
    assert out.endswith(
        f"warning: {tmp_path}/run/checkpoints/step_3 is kept, without optimizer states "
        "(checkpointing.save_optimizer=false), so no run can resume from it."
    )


def test_under_nohup_a_closed_terminal_is_ignored(tmp_path, monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with signalled(monkeypatch, trainer, "train_step", 2, signal.SIGHUP):
        assert len(metrics_of(short_run(tmp_path / "run"))) == 4


@pytest.mark.usefixtures("of_a_command")
def test_a_limit_without_checkpoints_is_refused():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["checkpointing.enabled=false", "checkpointing.checkpoint_must_save_by='01:00:00'"])
    assert str(caught.value) == (
        "command line: checkpointing.checkpoint_must_save_by = 01:00:00 needs checkpoints, but checkpointing.enabled=false: the "
        "run would stop without saving. Set checkpointing.enabled=true, or leave out this key."
    )


def test_a_stop_without_checkpoints_warns_that_nothing_was_saved(tmp_path, monkeypatch, capsys):
    with signalled(monkeypatch, trainer, "train_step", 3), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *SETTINGS, "checkpointing.enabled=false")
    assert "No checkpoint was saved." in capsys.readouterr().out


def test_signal_handlers_are_restored_after_the_run(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    short_run(tmp_path / "run", "dpo.max_num_steps=1")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_run_that_must_have_saved_by_a_time_saves_and_stops(tmp_path, whole):
    with pytest.raises(StoppedError) as stopped:
        short_run(
            tmp_path / "run", *SETTINGS, "checkpointing.checkpoint_must_save_by='00:00:00:00'", "dpo.val_at_start=false"
        )
    assert str(stopped.value) == "stopped by checkpointing.checkpoint_must_save_by"
    assert stopped.value.exit_code == 143
    with pytest.raises(ConfigError, match=r"is not a time\. Write DD:HH:MM:SS, such as 00:03:45:00"):
        short_run(tmp_path / "other", "checkpointing.checkpoint_must_save_by=soon")


@pytest.mark.slow
def test_a_time_limit_leaves_time_for_another_step_and_save(tmp_path, monkeypatch):
    """The writer's own time counts, though the run does not wait for it."""
    real = checkpoint.write_checkpoint

    def slow(*arguments):
        real(*arguments)
        time.sleep(1.5)

    monkeypatch.setattr(checkpoint, "write_checkpoint", slow)
    reported = []
    took = Stopping.took
    monkeypatch.setattr(
        Stopping, "took", lambda self, what, seconds: reported.append((what, seconds)) or took(self, what, seconds)
    )
    short_run(tmp_path / "run", "dpo.max_num_steps=2", "checkpointing.save_period=1")
    assert max(seconds for what, seconds in reported if what == "save") > 1.5
    stopping = Stopping(10.0)
    assert not stopping.is_wanted()
    stopping.took("save", 6.0)
    assert stopping.is_wanted()


SLOW = """
import sys, time
from tandem.cli import main as cli
from tandem.training import trainer
seconds, real = float(sys.argv.pop(1)), trainer.train_step
def slow(*arguments, **options):
    print("stepping", flush=True)
    time.sleep(seconds)
    return real(*arguments, **options)
trainer.train_step = slow
cli.main()
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, -signal.SIGTERM), pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.slow)],
)
def test_a_second_signal_ends_the_process_at_once(tmp_path, number, code):
    command = [sys.executable, "-c", SLOW, "60", "train", *SHORT, f"run.dir={tmp_path}/run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if line.strip() == "stepping":
            break
    process.send_signal(number)
    assert "A second signal stops at once" in process.stderr.readline()
    process.send_signal(number)
    assert process.wait(50) == code  # a step takes 60


@pytest.mark.slow
def test_a_stop_exits_with_its_own_code_and_no_traceback(tmp_path):
    command = [sys.executable, "-c", SLOW, "1", "train", *SHORT, f"run.dir={tmp_path}/run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "stepping":
            break
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 143
    assert errors.endswith("tandem: stopped by SIGTERM\n")
    assert "Traceback" not in errors
    assert steps_kept(tmp_path / "run") == [1]


WHILE_LOADING = """
import os, signal, sys
import transformers
from tandem.cli import main as cli
load = transformers.AutoConfig.from_pretrained
def stopped(*arguments, **more):
    os.kill(os.getpid(), signal.SIGTERM)
    return load(*arguments, **more)
transformers.AutoConfig.from_pretrained = stopped
sys.argv = ["tandem", "prepare"]
cli.main()
"""


@pytest.mark.slow
def test_a_stop_inside_a_library_is_not_reported_as_an_error():
    done = subprocess.run([sys.executable, "-c", WHILE_LOADING], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (143, "tandem: stopped by SIGTERM\n")

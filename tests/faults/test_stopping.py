"""Asked to stop, anywhere: the run saves where it stands and exits; the next start goes on to the same end, bit for bit."""

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
from tandem.train import step, trainer
from tandem.train.checkpoint import checkpoints as checkpoint
from tandem.train.checkpoint.checkpoints import checkpoints, step_of
from tandem.train.run.stopping import Stopping, stopped_by_signals
from tandem.train.start import build

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
def test_a_stopped_run_goes_on_to_the_same_end(tmp_path, monkeypatch, whole, place):
    module, name, call, kept = PLACES[place]
    with signalled(monkeypatch, module, name, call), pytest.raises(StoppedError) as stopped:
        short_run(tmp_path / "run", *SETTINGS)
    assert (str(stopped.value), stopped.value.exit_code) == ("stopped by SIGTERM", 143)
    found = steps_kept(tmp_path / "run")
    # The writer works behind the run's back: a signal while it writes is met in whatever step runs then.
    assert found == kept or (place == "while saving" and found[0] == 2)
    assert_same(short_run(tmp_path / "run", *SETTINGS), whole)


@pytest.mark.parametrize(("is_terminal", "start"), [(True, "\n"), (False, "")])
def test_on_a_terminal_the_message_begins_on_a_line_of_its_own(monkeypatch, capfd, is_terminal, start):
    monkeypatch.setattr(os, "isatty", lambda _: is_terminal)  # where ^C or a progress bar is at the cursor
    with stopped_by_signals(Stopping()):
        os.kill(os.getpid(), signal.SIGINT)
    message = "tandem: stopping: the step is finished and saved first. Once more stops at once.\n"
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


def test_before_the_first_step_a_stop_waits_for_nothing(tmp_path, monkeypatch, capfd):
    with signalled(monkeypatch, build, "load_sharded", 1, signal.SIGINT):
        monkeypatch.setattr(build, "make_references", lambda *_: pytest.fail("it went on"))
        with pytest.raises(StoppedError) as stopped:
            short_run(tmp_path / "run")
    assert (str(stopped.value), stopped.value.exit_code) == ("stopped by SIGINT", 130)
    assert capfd.readouterr().err == ""  # nothing that is finished or saved first


def test_what_fails_because_all_processes_were_told_to_stop_is_the_stop(tmp_path, monkeypatch):
    def fails(*_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException:
            raise RuntimeError("a process that compiled is gone") from None

    monkeypatch.setattr(build, "_rehearse", fails)
    with pytest.raises(StoppedError) as stopped:
        short_run(tmp_path / "run")
    assert (str(stopped.value), stopped.value.exit_code) == ("stopped by SIGTERM", 143)


def standing(run):
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
def test_a_checkpoint_saved_before_its_validation_is_ranked_by_it_in_the_end(tmp_path, monkeypatch, place):
    real = build.Training.write

    def written(t, report):
        real(t, replace(report, metrics={**report.metrics, "loss": LOSSES[t.progress.step]}))

    monkeypatch.setattr(build.Training, "write", written)
    settings = [*SETTINGS, "dpo.val_period=1", "checkpointing.save_period=1", "checkpointing.keep_top_k=2"]
    module, name, call, _ = {**PLACES, "before the third validation": (trainer, "train_step", 3, [])}[place]
    with signalled(monkeypatch, module, name, call), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *settings)
    assert standing(short_run(tmp_path / "run", *settings)) == ([1, 2, 5], "step_2", "step_5")


def test_a_run_whose_checkpoints_are_gone_says_that_it_begins_anew(tmp_path, monkeypatch, capsys, whole):
    with signalled(monkeypatch, trainer, "train_step", 3), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *SETTINGS)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    capsys.readouterr()
    run = short_run(tmp_path / "run", *SETTINGS)
    told = f"warning: {run} has steps in metrics.jsonl, but no checkpoint to go on from: it begins anew."
    assert told in " ".join(capsys.readouterr().out.split())
    assert_same(run, whole)


@pytest.mark.parametrize("fewer", [[], ["dpo.val_batches=1"]], ids=["the same pairs", "fewer pairs"])
def test_the_table_at_the_end_of_a_run_that_went_on_has_its_start(tmp_path, monkeypatch, capsys, fewer):
    with signalled(monkeypatch, trainer, "train_step", 3), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *SETTINGS)
    capsys.readouterr()
    trainer.train(load_config(None, [*SHORT, f"run.dir={tmp_path}/run", *SETTINGS, *fewer]), Reporter())
    said = " ".join(capsys.readouterr().out.split())
    assert ("Validation set metric before after" in said) is not bool(fewer)
    assert ("Validation after training" in said) is bool(fewer)


def test_a_run_that_saves_nothing_says_that_it_begins_anew(tmp_path, monkeypatch, capsys):
    settings = [*SETTINGS, "checkpointing.enabled=false"]
    with signalled(monkeypatch, trainer, "train_step", 3), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *settings)
    run = short_run(tmp_path / "run", *settings)
    told = f"warning: {run} has steps in metrics.jsonl, but no checkpoint to go on from: it begins anew."
    assert told in " ".join(capsys.readouterr().out.split())


def test_stopped_again_and_again_it_still_comes_to_the_same_end(tmp_path, monkeypatch, whole):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        with signalled(monkeypatch, trainer, "train_step", 1, number), pytest.raises(StoppedError) as stopped:
            short_run(tmp_path / "run", *SETTINGS)
        assert stopped.value.exit_code == 128 + number
    assert steps_kept(tmp_path / "run") == [1, 2, 3, 4]
    assert_same(short_run(tmp_path / "run", *SETTINGS), whole)


def test_a_stop_in_the_reference_pass_leaves_no_half_of_it(tmp_path, monkeypatch):
    settings = [*SETTINGS, f"reference.cache_dir={tmp_path}/reference"]
    monkeypatch.setattr(reference, "PREFERENCES_PER_PORTION", 16)
    with signalled(monkeypatch, reference, "_ask", 2), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *settings)
    assert not list((tmp_path / "reference").iterdir())
    assert steps_kept(tmp_path / "run") == []
    assert len(metrics_of(short_run(tmp_path / "run", *settings))) == 5


def test_what_is_kept_is_said(tmp_path, monkeypatch, capsys):
    with signalled(monkeypatch, trainer, "train_step", 3, signal.SIGINT), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *SETTINGS)
    out = " ".join(capsys.readouterr().out.split())
    assert out.endswith(f"{tmp_path}/run/checkpoints/step_3 is kept; the same command resumes from it.")
    assert "warning" not in out  # nothing is lost


def test_a_checkpoint_without_optimizer_states_is_not_said_to_go_on(tmp_path, monkeypatch, capsys):
    with signalled(monkeypatch, trainer, "train_step", 3), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *SETTINGS, "checkpointing.save_optimizer=false")
    out = " ".join(capsys.readouterr().out.split())
    assert out.endswith(
        f"warning: {tmp_path}/run/checkpoints/step_3 is kept, without the optimizer's states "
        "(checkpointing.save_optimizer=false): no run can go on from it."
    )


def test_under_nohup_a_closed_terminal_is_ignored(tmp_path, monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    with signalled(monkeypatch, trainer, "train_step", 2, signal.SIGHUP):
        assert len(metrics_of(short_run(tmp_path / "run"))) == 4


def test_a_limit_without_checkpoints_is_refused():
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["checkpointing.enabled=false", "checkpointing.checkpoint_must_save_by='01:00:00'"])
    assert str(caught.value) == (
        "command line: checkpointing.checkpoint_must_save_by = 01:00:00 needs checkpoints, but checkpointing.enabled=false: the "
        "run would stop without saving. Set checkpointing.enabled=true, or leave it out."
    )


def test_without_checkpoints_nothing_is_said_to_be_kept(tmp_path, monkeypatch, capsys):
    with signalled(monkeypatch, trainer, "train_step", 3), pytest.raises(StoppedError):
        short_run(tmp_path / "run", *SETTINGS, "checkpointing.enabled=false")
    assert "No checkpoint was saved." in capsys.readouterr().out


def test_signals_mean_what_they_meant_before_once_the_run_is_over(tmp_path):
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


def test_a_time_limit_leaves_room_for_one_more_step_and_save(tmp_path, monkeypatch):
    """The writer's own time counts, though the run does not wait for it."""
    real = checkpoint.write_checkpoint

    def slow(*arguments):
        real(*arguments)
        time.sleep(1.5)

    monkeypatch.setattr(checkpoint, "write_checkpoint", slow)
    told = []
    took = Stopping.took
    monkeypatch.setattr(
        Stopping, "took", lambda self, what, seconds: told.append((what, seconds)) or took(self, what, seconds)
    )
    short_run(tmp_path / "run", "dpo.max_num_steps=2", "checkpointing.save_period=1")
    assert max(seconds for what, seconds in told if what == "save") > 1.5
    stopping = Stopping(10.0)
    assert not stopping.is_wanted()
    stopping.took("save", 6.0)
    assert stopping.is_wanted()


SLOW = """
import sys, time
from tandem.cli import main as cli
from tandem.train import trainer
seconds, real = float(sys.argv.pop(1)), trainer.train_step
def slow(*arguments):
    print("stepping", flush=True)
    time.sleep(seconds)
    return real(*arguments)
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
    assert "Once more stops at once" in process.stderr.readline()
    process.send_signal(number)
    assert process.wait(50) == code  # a step takes 60


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


def test_a_stop_while_libraries_are_at_work_is_not_taken_for_a_mistake():
    done = subprocess.run([sys.executable, "-c", WHILE_LOADING], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (143, "tandem: stopped by SIGTERM\n")

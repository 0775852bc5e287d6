"""Sweeps with real training: runs share tokens and the reference, and a killed sweep continues with the same results."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from running import VARYING, metrics_of, weights_of

from tandem.storage.cache import is_export

pytestmark = pytest.mark.slow  # every run imports torch in a process of its own

SETTINGS = [
    *("dpo.max_num_steps=4", "policy.train_global_batch_size=8", "dpo.val_period=2", "checkpointing.save_period=1"),
    *("policy.max_total_sequence_length=128", "data.max_filtered_share=1"),
]
BETAS = "dpo.reference_policy_kl_penalty=0.05,0.2"
NAMES = ("reference_policy_kl_penalty-0.05", "reference_policy_kl_penalty-0.2")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "tandem", *arguments]


def environment(cache: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "TANDEM_CACHE": str(cache), **more}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A sweep that nothing interrupted: its directory is `sweep`, next to its cache."""
    folder = tmp_path_factory.mktemp("whole")
    ended = subprocess.run(
        command("sweep", BETAS, *SETTINGS, "--out", str(folder / "sweep"), "--json"),
        env=environment(folder / "cache"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert [run["status"] for run in found["runs"]] == ["finished", "finished"]
    assert (folder / "sweep/comparison.html").is_file()
    return folder


def test_the_second_run_uses_the_tokens_and_the_reference_of_the_first(whole):
    second = (whole / "sweep" / NAMES[1] / "config.yaml").stat().st_mtime
    for kind in ("tokens", "reference"):
        entries = list((whole / "cache" / kind).iterdir())
        assert len(entries) == 2, kind  # of the training and of the validation set
        assert all(path.stat().st_mtime < second for entry in entries for path in entry.iterdir()), kind
    references = [(whole / "sweep" / name / "references.json").read_bytes() for name in NAMES]
    assert references[0] == references[1]


def test_no_later_sweep_computes_the_reference_again(whole, tmp_path):
    """A process that computed it would be killed at this fail point."""
    arguments = ["dpo.reference_policy_kl_penalty=0.1,0.3", *SETTINGS, "--out", str(tmp_path / "sweep")]
    failing = environment(whole / "cache", TANDEM_FAIL_AT="reference.chunk")
    ended = subprocess.run(command("sweep", *arguments), env=failing, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_runs_and_report_read_the_directory_of_a_sweep(whole, tmp_path):
    ended = subprocess.run(command("runs", str(whole / "sweep"), "--json"), capture_output=True, text=True, timeout=100)
    assert sorted(run["name"] for run in json.loads(ended.stdout)) == sorted(NAMES)
    everything = [str(path) for path in sorted((whole / "sweep").iterdir())]
    ended = subprocess.run(
        command("report", *everything, "--out", str(tmp_path / "page.html")),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "page.html").is_file()


@pytest.mark.parametrize("kills_run", [False, True])
def test_a_sweep_killed_in_its_second_run_continues_with_the_same_results(whole, tmp_path, kills_run):
    out = tmp_path / "sweep"
    arguments = command("sweep", BETAS, *SETTINGS, "--out", str(out), "--quiet")
    process = subprocess.Popen(arguments, env=environment(whole / "cache"), stdout=subprocess.DEVNULL)
    log = out / "logs" / f"{NAMES[1]}.log"
    end = time.monotonic() + 300
    while not (log.exists() and "step 1/4" in log.read_text()):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    if kills_run:
        os.kill(int((out / NAMES[1] / "lock").read_text()), signal.SIGKILL)
    assert is_export(out / NAMES[0] / "model")
    ended = subprocess.run(arguments, env=environment(whole / "cache"), capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for name in NAMES:
        for split in ("train", "validation-default", "exported-default"):
            assert metrics_of(out / name, split) == metrics_of(whole / "sweep" / name, split), VARYING
        weights, expected = weights_of(out / name), weights_of(whole / "sweep" / name)
        assert all(bool((weights[key] == expected[key]).all()) for key in expected)


def test_a_run_that_fails_does_not_stop_the_others(whole, tmp_path):
    """With such a learning rate, the loss is not finite after the first step."""
    lr = "policy.optimizer.kwargs.lr=1e30,1e-3"
    arguments = [lr, *SETTINGS, "policy.scheduler=null", "--out", str(tmp_path / "sweep")]
    ended = subprocess.run(
        command("sweep", *arguments), env=environment(whole / "cache"), capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 1
    assert "warning: lr-1e30 failed: " in ended.stdout
    assert ended.stderr == (
        f"tandem: error: 1 of 2 runs failed: lr-1e30. Their logs are in {tmp_path}/sweep/logs. The same "
        "command would fail in the same way: fix what the messages report first.\n"
    )
    assert is_export(tmp_path / "sweep/lr-0.001/model")


def test_ctrl_c_saves_a_checkpoint(whole, tmp_path):
    out = tmp_path / "sweep"
    arguments = command("sweep", BETAS, *SETTINGS[1:], "dpo.max_num_steps=40", "--out", str(out))
    process = subprocess.Popen(
        arguments, env=environment(whole / "cache"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    log = out / "logs" / f"{NAMES[0]}.log"
    while not (log.exists() and "step 1/40" in log.read_text()):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out_text, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert (out / NAMES[0] / "checkpoints/latest").is_symlink()
    assert out_text.splitlines()[-2] == "0 of 2 runs are finished. The same command continues the sweep:"
    assert err.splitlines()[-1] == "tandem: stopped by SIGINT"

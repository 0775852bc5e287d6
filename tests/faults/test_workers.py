"""What befalls one of several workers: all end together, one says why, and nothing saved is lost."""

import signal
import sys
import time

import pytest
from listening import listening
from running import SHORT
from several import ends, lost, named, start, wait_for
from together import run_forked, run_tandem

TANDEM = [sys.executable, "-m", "tandem", "train"]
LONG = [*SHORT, "dpo.max_num_steps=40", "checkpointing.save_period=2", "run.dir=run"]


def test_a_configuration_error_is_reported_once(tmp_path):
    first, second = run_forked(2, tmp_path, run_tandem, "", "train", "policy.model_nam=x")
    assert first.err.startswith("tandem: error: command line: unknown key policy.model_nam.")
    assert second.err == ""
    assert first.code == second.code == 2


def test_bad_data_is_reported_once(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": 1}\n')
    first, second = run_forked(2, tmp_path, run_tandem, "", "train", "data.train.data_path=bad.jsonl")
    assert first.err.startswith("tandem: error: bad.jsonl: none of 1 rows can be read:")
    assert second.err == ""
    assert first.code == second.code == 3


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_saving_and_a_lost_rank_ends_the_others(tmp_path):
    ranks = start(2, [*TANDEM, *LONG], tmp_path)
    wait_for(tmp_path / "run/checkpoints/step_2", ranks)
    if sys.platform == "linux":  # bound to the loopback interface: messages between ranks are not authenticated
        assert [listening(worker.pid) for worker in ranks] == [{"127.0.0.1"}] * 2
    ranks[1].send_signal(signal.SIGTERM)
    first, second = ends(ranks)
    assert first[0].endswith("tandem: stopped by SIGTERM\n")
    assert "Traceback" not in first[0] + second[0]
    assert first[1] == second[1] == 143
    kept = (tmp_path / "run/checkpoints/latest").resolve().name

    ranks = start(2, [*TANDEM, *LONG], tmp_path)
    wait_for(tmp_path / f"run/checkpoints/step_{int(kept[5:]) // 2 * 2 + 2}", ranks)
    ranks[1].kill()
    first, second = ends(ranks)
    assert second[1] == -signal.SIGKILL
    assert first == (lost(f"{named(1, ranks)} ended"), 1)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_after_the_timeout_and_a_lost_rendezvous_ends_the_others(tmp_path):
    waiting = [*TANDEM, *LONG, "policy.parallel.timeout_seconds=10"]
    ranks = start(2, waiting, tmp_path)
    wait_for(tmp_path / "run/checkpoints/step_2", ranks)
    ranks[1].send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    assert ends(ranks[:1]) == [(lost(f"{named(1, ranks)} no longer answers"), 1)]
    assert time.monotonic() - stopped < 30, "the timeout is 10 seconds, and finding out which rank hangs takes 5"
    ranks[1].kill()

    ranks = start(2, waiting, tmp_path)
    wait_for(tmp_path / "run/checkpoints/step_4", ranks)
    ranks[0].kill()
    assert ends(ranks[1:]) == [(lost(f"{named(0, ranks)} ended"), 1)]


# What differs between ranks is made to: the rest is the command itself.
DIFFERENT_ROWS = """
import os
from tandem.training import memory as row_length
row_length.CPU_ROW_TOKENS = (1024, 512)[int(os.environ["RANK"])]
"""
DIFFERENT_CARDS = """
import os
from tandem.cli import main as cli
from tandem.training import trainer
from tandem.training.start import setup
from tandem.training.memory import RowLength
trainer.device_memory = lambda device: (80, 60)[int(os.environ["RANK"])] * 2**30
setup.auto_row_length = lambda need, policy, device, memory: RowLength(memory >> 26, f"fits in {memory >> 30} GiB")
cli.main()
"""


def test_ranks_that_would_pack_differently_end_before_the_first_step(tmp_path):
    arguments = ["train", *SHORT, "run.dir=run", "policy.train_global_batch_size=64"]
    first, second = run_forked(2, tmp_path, run_tandem, DIFFERENT_ROWS, *arguments)
    assert first.err.startswith(
        "tandem: error: the ranks differ and would not train the same model:\n"
        "  the row lengths of train: 256, 512, 768, 896, 1024 on rank 0; 128, 256, 384, 512 on rank 1\n"
    ), first.err
    assert second.err == ""
    assert first.code == second.code == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_rows_fit_the_smallest_card(tmp_path):
    command = [
        sys.executable,
        "-c",
        DIFFERENT_CARDS,
        "train",
        *SHORT,
        "run.dir=run",
        "policy.train_global_batch_size=64",
    ]
    ranks = start(2, [*command, "dpo.max_num_steps=2"], tmp_path)
    printed = [worker.communicate(timeout=300) for worker in ranks]
    assert [worker.returncode for worker in ranks] == [0, 0], printed
    assert "Rows: 1,024 tokens (auto: fits in 60 GiB)" in printed[0][0]

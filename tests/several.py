"""Starts several ranks that train together on this machine, with the environment variables that torchrun would set."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from bfloat16_products import with_bfloat16_products

from tandem.config.load import load_config
from tandem.model.distributed.process_group import leave_process_group
from tandem.report.reporter import Reporter
from tandem.training.trainer import train

WORDS = ["the", "sky", "looks", "blue", "because", "air", "scatters", "short", "waves", "of", "sunlight", "again"]
STEPS = 4
# What runs that are compared with one rank share.
FOUR_STEPS = [
    *(f"dpo.max_num_steps={STEPS}", "dpo.max_num_epochs=4", "policy.optimizer.kwargs.lr=2e-4"),
    "checkpointing.save_period=2",
]
VALIDATED = ["dpo.val_period=2", "dpo.val_batches=2"]


def write_fours(folder: Path) -> None:
    """Write fours.jsonl: prompts with four completions each, of random words."""
    rng = np.random.default_rng(1)

    def text() -> str:
        return " ".join(rng.choice(WORDS, rng.integers(2, 9)))

    fours = [
        {"context": text(), "completions": [{"rank": rank, "completion": text()} for rank in range(4)]}
        for _ in range(12)
    ]
    (folder / "fours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in fours))


def run_dir(folder: Path, name: str) -> Path:
    """Where the run of a case is, by the name of the case."""
    return folder / name.replace(" ", "_").replace(",", "")


def environments(count: int) -> list[dict[str, str]]:
    """The environment that torchrun gives each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if count > torch.cuda.device_count() > 0:
        shared["TANDEM_SHARE_GPU"] = "1"
    return [{**shared, "RANK": str(number), "LOCAL_RANK": str(number)} for number in range(count)]


def start(count: int, command: list[str], folder: Path) -> list[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(command, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True)
        for environment in environments(count)
    ]


def ends(ranks: list[subprocess.Popen[str]]) -> list[tuple[str, int]]:
    """Wait for the ranks. Return what each printed on stderr, and its exit code."""
    return [(rank.communicate(timeout=300)[1], rank.returncode) for rank in ranks]


def wait_for(path: Path, ranks: list[subprocess.Popen[str]]) -> None:
    """Wait until a file exists, while all ranks run."""
    until = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < until, f"{path} never came"
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.05)


def named(number: int, ranks: list[subprocess.Popen[str]]) -> str:
    """How messages name a rank."""
    return f"rank {number} (process {ranks[number].pid} on {socket.gethostname()})"


def lost(what: str) -> str:
    """The message of a rank that lost another one."""
    return (
        f"tandem: error: {what}, so this one cannot continue. Checkpoints saved before are intact; run the same command to "
        "resume from the newest.\n"
    )


def run_together(count: int, runs: list[list[str]], folder: Path) -> list[str]:
    """Train several runs, given by their overrides, one after another. Return what each rank printed."""
    ranks = start(count, [sys.executable, __file__, json.dumps(runs)], folder)
    printed = [rank.communicate(timeout=600) for rank in ranks]
    for rank, (out, err) in zip(ranks, printed, strict=True):
        assert rank.returncode == 0, out + err
    return [out for out, _ in printed]


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    for overrides in json.loads(sys.argv[1]):
        with with_bfloat16_products() if "policy.precision=bfloat16" in overrides else nullcontext():
            train(load_config(None, overrides), Reporter())
    leave_process_group()

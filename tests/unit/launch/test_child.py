"""The process that runs a rank: which signals reach it. Whether it ends with its parent: test_local.py."""

import signal
import subprocess
import sys

# `tandem` is replaced: it prints which signals are blocked.
CHILD = """
import runpy, signal
run = runpy.run_module
runpy.run_module = lambda *_, **__: print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
run("tandem.launch.child", run_name="__main__")
"""


def block_ctrl_c() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def test_a_rank_receives_ctrl_c_although_ray_blocks_it_in_the_worker_that_starts_the_rank():
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=block_ctrl_c,
    )
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.read() == "[]\n"
    child.stdin.close()
    child.wait(timeout=60)

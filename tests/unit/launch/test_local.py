"""Ranks as child processes: exit codes, signals, killed ranks and what is reported. The ranks are small scripts without torch."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tandem.errors import LOST_RANK_EXIT_CODE, AlreadyReportedError, StoppedError, TandemError
from tandem.isolation import LAUNCHER, STORE_FD
from tandem.launch import local
from tandem.launch.local import raise_outcome, train_on_ranks

RESUME = "Checkpoints saved before are intact; run the same command to resume from the newest."
KILLED = f"rank 1 was killed by SIGKILL (kill -9, or the system ran out of memory), so the other ranks were stopped. {RESUME}"


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """Returns a function that starts ranks, given the code of each of them."""

    def start(*codes: str) -> None:
        chosen = f"import os, signal, sys, time\nexec({list(codes)!r}[int(os.environ['RANK'])])"
        monkeypatch.setattr(local, "COMMAND", (sys.executable, "-c", chosen))
        train_on_ranks(["train", "a=b c"], len(codes))

    monkeypatch.chdir(tmp_path)
    return start


def test_ranks_get_the_arguments_and_the_variables_of_torchrun(ranks, tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", LAUNCHER)
    write = f"print(sys.argv[1:], [os.environ[n] for n in {names}], file=open(f'rank-{{os.environ[\"RANK\"]}}', 'w'))"
    ranks(write, write)
    for number in (0, 1):
        expected = [str(number), str(number), "2", "2", "127.0.0.1", "local"]
        assert (tmp_path / f"rank-{number}").read_text() == f"['train', 'a=b c'] {expected}\n"


def test_the_first_rank_gets_a_socket_that_listens_already(ranks):
    """So that no other process can take its port."""
    accept = (
        f"import socket; s = socket.socket(fileno=int(os.environ['{STORE_FD}'])); "
        "assert s.getsockname() == ('127.0.0.1', int(os.environ['MASTER_PORT'])); s.accept()"
    )
    connect = (
        f"import socket; assert '{STORE_FD}' not in os.environ; "
        "socket.create_connection(('127.0.0.1', os.environ['MASTER_PORT']))"
    )
    ranks(accept, connect)


def test_the_exit_code_is_that_of_the_ranks(ranks):
    with pytest.raises(AlreadyReportedError) as ended:
        ranks("sys.exit(3)", "sys.exit(3)")
    assert ended.value.exit_code == 3
    with pytest.raises(AlreadyReportedError) as ended:  # the second rank has no memory, the first has lost it
        ranks(f"time.sleep(0.3); sys.exit({LOST_RANK_EXIT_CODE})", "sys.exit(6)")
    assert ended.value.exit_code == 6


def test_a_killed_rank_is_named_and_the_others_end_within_seconds(ranks, monkeypatch):
    monkeypatch.setattr(local, "FAILURE_SECONDS", 0.5)
    started = time.monotonic()
    with pytest.raises(TandemError) as ended:
        ranks(
            "time.sleep(600)",
            "os.kill(os.getpid(), signal.SIGKILL)",
            f"time.sleep(0.2); sys.exit({LOST_RANK_EXIT_CODE})",
        )
    assert str(ended.value) == KILLED
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("codes", "failures", "forwarded", "expected"),
    [
        ([0, 0], {}, None, None),
        ([0, 0], {}, signal.SIGTERM, None),  # it came after the last step
        ([75, -9], {1: -9, 0: 75}, None, (TandemError, KILLED, 1)),
        ([-6, -9], {0: -6, 1: -9}, None, (TandemError, KILLED, 1)),  # gloo aborts a process that has lost another one
        ([75, 75], {0: 75, 1: 75}, None, (TandemError, f"the ranks lost each other. {RESUME}", 1)),
        ([75, -9], {0: 75}, None, (TandemError, f"rank 1 did not answer the others and was stopped. {RESUME}", 1)),
        ([143, 143], {1: 143, 0: 143}, signal.SIGTERM, (AlreadyReportedError, "another rank failed", 143)),
        ([-2, 75], {0: -2, 1: 75}, signal.SIGINT, (StoppedError, "stopped by SIGINT", 130)),  # before it could report
        ([138, 0], {0: 138}, signal.SIGUSR1, (AlreadyReportedError, "another rank failed", 138)),
        ([7, 75], {0: 7, 1: 75}, signal.SIGTERM, (AlreadyReportedError, "another rank failed", 7)),  # while it saved
        ([-9, -9], {0: -9, 1: -9}, signal.SIGINT, (StoppedError, "stopped by SIGINT", 130)),  # by a second Ctrl-C
    ],
)
def test_the_ends_of_ranks_amount_to_one_outcome(codes, failures, forwarded, expected):
    if expected is None:
        return raise_outcome(codes, failures, forwarded)
    kind, message, exit_code = expected
    with pytest.raises(kind) as ended:
        raise_outcome(codes, failures, forwarded)
    assert type(ended.value) is kind
    assert (str(ended.value), ended.value.exit_code) == (message, exit_code)
    return None


# Starts two ranks, the first of which says what it receives.
STARTING = """
import sys
from tandem.errors import TandemError
from tandem.launch import local
local.COMMAND = (sys.executable, "-c", sys.argv[1])
try:
    local.train_on_ranks([], 2)
except TandemError as error:
    print(error, error.exit_code, flush=True)
"""
STOPPABLE = """
import os, signal, sys, time
number = os.environ["RANK"]
def stop(received, _):
    open(f"stopped-{number}", "w").close()
    if STOPS: sys.exit(128 + received)
for one in (signal.SIGINT, signal.SIGTERM): signal.signal(one, stop)
open(f"ready-{number}", "w").close()
until = time.monotonic() + 60
while time.monotonic() < until:
    time.sleep(0.05)
"""


def start_stoppable(folder: Path, *, stops: bool) -> subprocess.Popen[str]:
    rank = STOPPABLE.replace("STOPS", str(stops))
    command = [sys.executable, "-c", STARTING, rank]
    # Processes in the background of a shell ignore Ctrl-C, and so would their children.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    starter = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, preexec_fn=heed)
    wait_for(folder, "ready-0", "ready-1")
    return starter


def wait_for(folder: Path, *names: str) -> None:
    until = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < until, names
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "printed"), [(signal.SIGINT, "130"), (signal.SIGTERM, "143")])
def test_a_signal_reaches_all_ranks(tmp_path, number, printed):
    starter = start_stoppable(tmp_path, stops=True)
    starter.send_signal(number)
    assert starter.communicate(timeout=60)[0] == f"another rank failed {printed}\n"
    assert (tmp_path / "stopped-0").exists() and (tmp_path / "stopped-1").exists()


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    starter = start_stoppable(tmp_path, stops=False)
    starter.send_signal(signal.SIGINT)
    wait_for(tmp_path, "stopped-0", "stopped-1")
    starter.send_signal(signal.SIGINT)
    assert starter.communicate(timeout=60)[0] == "stopped by SIGINT 130\n"


CHILD = """
import os, signal, time
from tandem.launch.child import stop_with_parent
stop_with_parent()
open(f"ready-{os.environ['RANK']}", "w").write(str(os.getpid()))
time.sleep(600)
"""


def test_ranks_stop_when_the_process_that_started_them_is_killed(tmp_path):
    starter = subprocess.Popen([sys.executable, "-c", STARTING, CHILD], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    wait_for(tmp_path, "ready-0", "ready-1")
    time.sleep(0.1)
    pids = [int((tmp_path / f"ready-{number}").read_text()) for number in (0, 1)]
    starter.kill()
    starter.communicate(timeout=60)
    until = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_port_is_free_again_if_the_first_rank_ends(ranks, monkeypatch):
    """The starting process keeps no copy of the socket: the other ranks would wait for a store that nobody serves."""
    connect = (
        "import socket, time\ntime.sleep(1)\n"
        "try:\n    socket.create_connection(('127.0.0.1', os.environ['MASTER_PORT']), 5)\n"
        "except ConnectionError:\n    sys.exit(9)"
    )
    with pytest.raises(AlreadyReportedError) as ended:
        ranks("pass", connect)
    assert ended.value.exit_code == 9

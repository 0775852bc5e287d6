"""Trains a run with Ray Train: each of its workers starts one rank as a child process, and forwards its output to the driver.

A rank is a child process, not a thread of the worker, so that signals, exit codes and output are those of `tandem train`.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import ray  # pyright: ignore[reportMissingImports]
import ray.exceptions  # pyright: ignore[reportMissingImports]
import ray.train  # pyright: ignore[reportMissingImports]
import ray.util  # pyright: ignore[reportMissingImports]
from ray.train.backend import Backend  # pyright: ignore[reportMissingImports]
from ray.train.torch import TorchConfig, TorchTrainer  # pyright: ignore[reportMissingImports]

from tandem.config.sections.cluster import Cluster
from tandem.config.sections.parallel import Parallel
from tandem.errors import LOST_RANK_EXIT_CODE, MachineError, StoppedError, TandemError
from tandem.isolation import GPU_INDEX, LAUNCHER, NO_TELEMETRY, SAFE_PATH
from tandem.launch.choose import num_ray_ranks
from tandem.launch.local import COMMAND, FAILURE_SECONDS, POLL_SECONDS, RESUME, raise_outcome
from tandem.launch.ray_cluster import connect
from tandem.model.distributed.mesh import mesh_shape
from tandem.training.run.stopping import SIGNALS

MAX_RESTARTS = 3
# How ranks begin an error, and how those after the first name themselves in it.
ERROR, OF_RANK = b"tandem: error: ", re.compile(rb"^rank \d+ on \S+: ")
REPORT_SECONDS = 5.0  # how long a rank that lost another one waits for that one's report
# Beginnings of the names of variables that ranks get from the process that starts them. Others are those of Ray's workers.
FORWARDED = ("TANDEM_", "HF_", "WANDB_", "MLFLOW_", "NCCL_", "GLOO_", "TOKENIZERS_", "OMP_", "PYTHONPATH")


@dataclass(frozen=True, slots=True)
class _State:
    """What a worker must know about the others."""

    signal: int | None  # to send to its rank
    has_failed: bool  # whether a rank has reported an error


class _Relay:
    """A Ray actor between the driver and the workers: output, signals and the ends of ranks."""

    def __init__(self, environment: dict[str, str]):
        self._environment = environment
        self._output: list[tuple[int, bytes]] = []
        self._signal: int | None = None
        self._codes: dict[int, int] = {}
        self._lost = ""
        self._errors: set[bytes] = set()  # messages, without the names of ranks
        self._num_starts = 0

    def started(self, number: int) -> dict[str, str]:
        """Called by each worker before it starts its rank. Return the variables of the driver."""
        if number == 0:
            self._num_starts += 1
            if self._num_starts > 1:
                text = f"tandem: {self._lost or 'a rank was lost'}. Ray Train starts all ranks again."
                self._output.append((2, f"{text}\n".encode()))
            self._codes, self._lost, self._errors = {}, "", set()
        return self._environment

    def write(self, stream: int, line: bytes) -> bool:
        """Called for each line that a rank prints. Return False if it is an error that another rank has reported."""
        if line.startswith(ERROR):
            message = OF_RANK.sub(b"", line.removeprefix(ERROR))
            if message in self._errors:
                return False
            self._errors.add(message)
        self._output.append((stream, line))
        return True

    def read(self) -> list[tuple[int, bytes]]:
        """Return what ranks have printed since the last call, with the number of the stream."""
        output, self._output = self._output, []
        return output

    def lost(self, text: str) -> None:
        self._lost = self._lost or text

    def ended(self, number: int, code: int) -> None:
        self._codes[number] = code

    def send(self, number: int) -> None:
        self._signal = number

    def state(self) -> _State:
        return _State(self._signal, any(code != 0 for code in self._codes.values()))

    def codes(self) -> dict[int, int]:
        """Return the exit codes of ranks, in the order of their ends."""
        return self._codes


class _Addresses(Backend):
    """Tells the workers where the first rank will listen."""

    share_cuda_visible_devices = False  # each worker sees only the GPU of its rank

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        nodes = worker_group.execute(ray.util.get_node_ip_address)
        address = "127.0.0.1" if len(set(nodes)) == 1 else nodes[0]
        port = worker_group.execute_single(0, _free_port, address)
        worker_group.execute(_set_variables, {"MASTER_ADDR": address, "MASTER_PORT": str(port)})


class _Config(TorchConfig):
    """Ray's own configuration would create a process group and use the GPU in its workers; here, the ranks do."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _Addresses

    @property
    def train_func_context(self) -> Any:
        return nullcontext


_Callback: Any = getattr(ray.train, "UserCallback", object)  # the first version of Ray Train does not have it


class _LostWorkers(_Callback):
    """Tells the relay which workers were lost: a worker that is killed, or whose machine fails, cannot report it."""

    def __init__(self, relay: Any):
        self._relay = relay

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        lost = [number for number, error in worker_exceptions.items() if _is_lost_worker(error)]
        if lost:
            self._relay.lost.remote(lost_workers(lost))


def _is_lost_worker(error: BaseException | None) -> bool:
    """Whether Ray Train reports with this error that a worker has ended, not that its function has raised an error."""
    causes = (error, getattr(error, "health_check_failure", None), error.__cause__ if error is not None else None)
    return any(isinstance(one, ray.exceptions.RayActorError) for one in causes)


def lost_workers(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"the Ray worker of rank {numbers[0]} was lost"
    return f"the Ray workers of ranks {', '.join(map(str, sorted(numbers)))} were lost"


def _set_variables(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as free:
        return free.getsockname()[1]


def train_with_ray(arguments: Sequence[str], cluster: Cluster, parallel: Parallel) -> None:
    """Run `tandem` with these arguments on the workers of Ray Train, on the running Ray cluster or on this machine.

    If a rank is lost, Ray Train starts all ranks again, and they resume from the newest checkpoint. Raises the errors of
    `tandem.launch.local.train_on_ranks`.
    """
    connect()
    folder = tempfile.mkdtemp(prefix="tandem-ray-")  # Ray Train insists on a folder; it writes nothing that a run needs
    try:
        num_workers, on_gpus = num_ray_ranks(cluster, [one["Resources"] for one in ray.nodes() if one["Alive"]])
        mesh_shape(parallel, num_workers)
        environment = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        relay = ray.remote(num_cpus=0)(_Relay).remote(environment)
        resources = {"CPU": 1.0, "GPU": 1.0} if on_gpus else {"CPU": 1.0}
        trainer = TorchTrainer(
            _train_rank,
            train_loop_config={"arguments": list(arguments), "folder": str(Path.cwd()), "relay": relay},
            torch_config=_Config(),
            scaling_config=ray.train.ScalingConfig(
                num_workers=num_workers, use_gpu=on_gpus, resources_per_worker=resources
            ),
            run_config=ray.train.RunConfig(
                storage_path=folder,
                failure_config=ray.train.FailureConfig(max_failures=MAX_RESTARTS),
                callbacks=[_LostWorkers(relay)] if hasattr(ray.train, "UserCallback") else None,
            ),
        )
        _Driver(trainer, relay, num_workers).run()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


class _Driver:
    """Waits for Ray Train in the main thread, prints what the ranks print, and sends them signals."""

    def __init__(self, trainer: TorchTrainer, relay: Any, num_workers: int):
        self._trainer, self._relay, self._num_workers = trainer, relay, num_workers
        self._signals: list[signal.Signals] = []
        self._error: Exception | None = None

    def run(self) -> None:
        # Not in the main thread: there, Ray Train would handle Ctrl-C by killing its workers.
        training = threading.Thread(target=self._fit, name="ray", daemon=True)
        handled = [one for one in SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
        before = {one: signal.signal(one, self._handle) for one in handled}
        try:
            training.start()
            sent = 0
            while training.is_alive():
                if len(self._signals) > sent:
                    if sent:
                        raise StoppedError(self._signals[0].name, SIGNALS[self._signals[0]])
                    sent = len(self._signals)
                    ray.get(self._relay.send.remote(int(self._signals[0])))
                self._print()
                time.sleep(4 * POLL_SECONDS)
            self._print()
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
        self._raise_outcome()

    def _handle(self, number: int, _: Any) -> None:
        self._signals.append(signal.Signals(number))

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except Exception as error:
            self._error = error

    def _print(self) -> None:
        for stream, text in ray.get(self._relay.read.remote()):
            place = sys.stdout if stream == 1 else sys.stderr
            place.write(text.decode("utf-8", "replace"))
            place.flush()

    def _raise_outcome(self) -> None:
        first = self._signals[0] if self._signals else None
        if self._error is not None:
            if first is not None:
                raise StoppedError(first.name, SIGNALS[first])
            lines = str(self._error).strip().splitlines() or [type(self._error).__name__]
            raise TandemError(
                f"Ray Train gave up after {MAX_RESTARTS} restarts of the ranks: {lines[-1]}. {RESUME}"
            ) from None
        ends = ray.get(self._relay.codes.remote())
        codes = [ends.get(number, LOST_RANK_EXIT_CODE) for number in range(self._num_workers)]
        raise_outcome(codes, {number: code for number, code in ends.items() if code}, first)


def _train_rank(settings: dict[str, Any]) -> None:
    """The function of each Ray worker: starts a rank, and waits for its end.

    Raises an error if the rank was killed or has lost another one, which makes Ray Train start all ranks again. An error that the
    rank has reported is not repeated.
    """
    relay, number = settings["relay"], ray.train.get_context().get_world_rank()
    given = ray.get(relay.started.remote(number))
    try:
        process = subprocess.Popen(
            [*COMMAND, *settings["arguments"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=settings["folder"],
            env={**os.environ, **given, **NO_TELEMETRY, **SAFE_PATH, "PYTHONUNBUFFERED": "1", **_variables()},
            start_new_session=True,
        )
    except OSError as error:
        text = (
            f"tandem: error: rank {number} cannot start in {settings['folder']} on {socket.gethostname()} ({error.strerror}). "
            "All machines of the run must have this folder.\n"
        )
        ray.get(relay.write.remote(2, text.encode()))
        ray.get(relay.ended.remote(number, MachineError.exit_code))
        return
    assert process.stdout is not None and process.stderr is not None
    readers = [
        threading.Thread(target=_forward, args=(pipe, stream, relay), daemon=True)
        for stream, pipe in ((1, process.stdout), (2, process.stderr))
    ]
    for reader in readers:
        reader.start()
    code = _wait(process, relay)
    for reader in readers:
        reader.join(REPORT_SECONDS)
    _report_end(number, code, relay)


def _variables() -> dict[str, str]:
    """Return the variables of the rank of this worker, as torchrun would set them."""
    context = ray.train.get_context()
    gpu = {GPU_INDEX: "0"} if ray.get_gpu_ids() else {}
    return {
        "RANK": str(context.get_world_rank()),
        "LOCAL_RANK": str(context.get_local_rank()),
        "WORLD_SIZE": str(context.get_world_size()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "GROUP_RANK": str(context.get_node_rank()),
        LAUNCHER: "ray",
        **gpu,
    }


def _forward(pipe: IO[bytes], stream: int, relay: Any) -> None:
    """Send everything that a rank prints to the driver, by lines. An error that another rank has reported ends it."""
    with suppress(Exception):  # the driver may be gone: the rank goes on, as after a closed pipe
        for line in pipe:
            if not ray.get(relay.write.remote(stream, line)):
                break  # the lines that follow are of the same message
    for _ in pipe:
        pass


def _wait(process: subprocess.Popen[bytes], relay: Any) -> int:
    """Wait for the end of a rank, and send it the signals of the driver. Return its exit code."""
    sent, kill_at = False, float("inf")
    while process.poll() is None:
        state = ray.get(relay.state.remote())
        if state.signal is not None and not sent:
            process.send_signal(state.signal)
            sent = True
        if state.has_failed and not sent:
            kill_at = min(kill_at, time.monotonic() + FAILURE_SECONDS)
        if time.monotonic() > kill_at:
            process.kill()
            process.wait()
            return LOST_RANK_EXIT_CODE
        time.sleep(4 * POLL_SECONDS)
    return process.returncode


def _report_end(number: int, code: int, relay: Any) -> None:
    """Report the end of a rank to the driver. Raise an error if Ray Train must start the ranks again."""
    state = ray.get(relay.state.remote())
    if state.signal is None and code < 0:
        why = f"rank {number} was killed by {signal.Signals(-code).name}"
        ray.get(relay.lost.remote(why))
        raise RuntimeError(why)
    until = time.monotonic() + REPORT_SECONDS
    while state.signal is None and code == LOST_RANK_EXIT_CODE and not state.has_failed:
        if time.monotonic() > until:
            raise RuntimeError(f"rank {number} lost the connection to another rank")
        time.sleep(4 * POLL_SECONDS)
        state = ray.get(relay.state.remote())
    ray.get(relay.ended.remote(number, code))

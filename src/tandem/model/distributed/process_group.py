"""The ranks of a training run: joining their process group, and collective operations. A single process is a group of one."""

import ipaddress
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tandem.config.sections.parallel import DEFAULT_PARALLEL, Parallel
from tandem.errors import AlreadyReportedError, ConfigError, MachineError, TandemError, exit_code_of, is_lost_rank
from tandem.isolation import GPU_INDEX, STORE_FD
from tandem.model.distributed import shared_gpu
from tandem.model.distributed.mesh import SINGLE_RANK_MESH, MeshShape, mesh_shape
from tandem.model.distributed.presence import end_signs, is_served_by_launcher, note_wait, start_signs
from tandem.rank_variables import check_rank_variables, is_distributed

T = TypeVar("T")

POLL_SECONDS = 0.2
LOOPBACK_INTERFACES = ("lo", "lo0")  # on Linux; on macOS


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together, and the device and number of this process.

    Values on the host are exchanged over a CPU channel (gloo), which never waits for a GPU.
    """

    weights_mesh: DeviceMesh  # the mesh that FSDP shards weights over: [shards], or [replicas, shards]
    device: torch.device
    shape: MeshShape = SINGLE_RANK_MESH
    number: int = 0
    is_first_here: bool = True  # the first rank on its machine
    host_group: dist.ProcessGroup | None = None  # None: the default group
    timeout: timedelta = timedelta(seconds=DEFAULT_PARALLEL.timeout_seconds)
    context_group: dist.ProcessGroup | None = None  # the ranks that divide rows with this rank; None: context is 1

    @property
    def count(self) -> int:
        """The number of ranks. Batches are divided into `data_parallel` parts, weights into `shape.weight_shards` parts."""
        return self.shape.num_ranks

    @property
    def data_parallel(self) -> int:
        """The number of parts that a global batch is divided into."""
        return self.shape.data_parallel

    @property
    def data_index(self) -> int:
        """The index of the part of every global batch that this rank computes."""
        return self.number // self.shape.context

    @property
    def is_in_first_replica(self) -> bool:
        """Whether this rank saves its shards. The other replicas hold the same ones."""
        return self.number < self.shape.weight_shards

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks. Every rank must call this."""
        if self.count == 1:
            return [value]
        values: list[T] = [value] * self.count
        note_wait()
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def gather_parts(self, value: T) -> list[T]:
        """Return one value for each part of a global batch, in order. Every rank must call this.

        Ranks that compute the same part have the same value, which is returned once.
        """
        return self.gather(value)[:: self.shape.context]

    def highest(self, number: int) -> int:
        """Return the maximum of `number` over all ranks. Every rank must call this."""
        if self.count == 1:
            return number
        given = torch.tensor(number)
        note_wait()
        dist.all_reduce(given, dist.ReduceOp.MAX, group=self.host_group)
        return int(given)

    def lowest(self, number: int) -> int:
        """Return the minimum of `number` over all ranks. Every rank must call this."""
        return -self.highest(-number)

    def all_true(self, flag: Tensor) -> Tensor:
        """Return whether `flag` is true on every rank, as a tensor on the device. Every rank must call this.

        The host does not wait for the result.
        """
        if self.count == 1:
            return flag
        true = flag.to(torch.int32)
        dist.all_reduce(true, dist.ReduceOp.MIN)
        return true.to(torch.bool)

    def sum_of_all(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all ranks, on the device. Every rank must call this. The host does not wait."""
        if self.count > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def concatenate_parts(self, rows: Tensor) -> tuple[Tensor, slice]:
        """Return the rows of all parts of a global batch, in order, and the slice that holds this rank's rows.

        Ranks that compute the same part have the same rows, which are returned once. Every rank must call this. The hosts wait
        for each other, but not for the devices.
        """
        counts = self.gather_parts(len(rows))
        start = sum(counts[: self.data_index])
        own = slice(start, start + len(rows))
        if self.count == 1:
            return rows, own
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        of_ranks = [torch.empty_like(padded) for _ in range(self.count)]
        dist.all_gather(of_ranks, padded)
        parts = of_ranks[:: self.shape.context]
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]), own

    def run_or_stop_all(self, do: Callable[[], T], *, on: bool) -> T | None:
        """Call `do` on the ranks where `on` is true, and wait for all ranks. Every rank must call this.

        Return the result of `do`, or None where `on` is false. If `do` fails on any rank, all ranks stop and one of them reports
        the error.
        """
        if self.count == 1:
            return do() if on else None
        done, failure = None, None
        try:
            done = do() if on else None
        except Exception as error:
            failure = error
        known = isinstance(failure, AlreadyReportedError)  # the rank that this one heard of reports it
        own = None if failure is None else (known, self.number, exit_code_of(failure))
        failed = sorted(one for one in self.gather(own) if one is not None)
        if failure is not None and failed[0][1] == self.number:
            raise failure
        if failed:
            raise AlreadyReportedError(failed[0][2])
        return done

    def from_first(self, do: Callable[[], T]) -> T:
        """Call `do` on the first rank and return its result on all ranks. Every rank must call this."""
        done = self.run_or_stop_all(do, on=self.is_first)
        return self.gather(done)[0]  # type: ignore[return-value]

    def one_then_all(self, do: Callable[[], T]) -> T:
        """Call `do` on one rank of each machine, then on all other ranks, which find the caches that the first call filled.

        Return the result of `do` on this rank. Every rank must call this.
        """
        early = self.run_or_stop_all(do, on=self.is_first_here)
        late = self.run_or_stop_all(do, on=not self.is_first_here)
        return early if self.is_first_here else late  # type: ignore[return-value]

    def with_separate_channel(self) -> "Ranks":
        """Return the same ranks with a separate host channel.

        A thread that communicates at the same time as the main thread needs its own channel.
        """
        if self.count == 1:
            return self
        return replace(self, host_group=dist.new_group(backend="gloo", timeout=self.timeout))


def make_ranks(device: torch.device, shape: MeshShape, *, is_first_here: bool = True) -> Ranks:
    """Return the ranks of the process group, arranged as a mesh of this shape."""
    sizes = {"replicate": shape.replicate, "shard": shape.weight_shards}
    sizes = sizes if shape.replicate > 1 else {"shard": shape.weight_shards}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    context_group = None
    if shape.context > 1:
        sizes = (shape.data_parallel, shape.context)
        context_group = init_device_mesh(device.type, sizes, mesh_dim_names=("data", "context"))["context"].get_group()
    given = {"shape": shape, "is_first_here": is_first_here, "context_group": context_group}
    return Ranks(weights_mesh=mesh, device=device, number=dist.get_rank(), **given)


def compute_deterministically() -> None:
    """Allow only kernels that give bitwise identical results every time. Must be called before the GPU is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def join_process_group(parallel: Parallel = DEFAULT_PARALLEL, *, uses_gpus: bool = True) -> Ranks:
    """Join the process group of the ranks that a launcher started. Without a launcher, create a group of this process alone.

    `uses_gpus`: use one GPU per rank, if this machine has any.
    """
    check_rank_variables()
    shape = mesh_shape(parallel, int(os.environ.get("WORLD_SIZE", 1)))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cpu")
    if uses_gpus and torch.cuda.is_available():
        index = 0 if shared_gpu.is_shared() else int(os.environ.get(GPU_INDEX, local))
        if index >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {local} has no GPU: this machine has {torch.cuda.device_count()}. Start at most one rank per GPU "
                "(torchrun --nproc-per-node)."
            )
        torch.cuda.set_device(index)
        device = torch.device("cuda", index)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        backend = shared_gpu.register() if uses_gpus and shared_gpu.is_shared() else backend
        stay_on_loopback()
        timeout = timedelta(seconds=parallel.timeout_seconds)
        if not _first_rank_listens(parallel.timeout_seconds):
            raise _not_started(parallel.timeout_seconds)
        try:
            _init_process_group(backend, timeout)
        except RuntimeError as error:
            if not is_lost_rank(error):
                raise
            raise _not_started(parallel.timeout_seconds) from error
        start_signs(dist.get_rank(), dist.get_world_size())
    ranks = make_ranks(device, shape, is_first_here=local == 0)
    return replace(ranks, timeout=timedelta(seconds=parallel.timeout_seconds))


def _first_rank_listens(seconds: float) -> bool:
    """Wait until the store of the first rank accepts connections. Return whether it does within this time.

    torch would wait as well, but print C++ stack traces when it gives up, and take longer for an unknown host.
    """
    if not is_distributed() or os.environ["RANK"] == "0" or is_served_by_launcher():
        return True
    place, end = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            socket.create_connection(place, timeout=left).close()
            return True
        except OSError:
            time.sleep(POLL_SECONDS)
    return False


def _init_process_group(backend: str, timeout: timedelta) -> None:
    if (store := loopback_store(timeout)) is not None:
        number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=timeout)
    elif int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def _not_started(seconds: int) -> TandemError:
    address = f"{os.environ.get('MASTER_ADDR', 'MASTER_ADDR')}:{os.environ.get('MASTER_PORT', 'MASTER_PORT')}"
    return TandemError(
        f"not all of the {os.environ['WORLD_SIZE']} ranks of this run started within policy.parallel.timeout_seconds "
        f"= {seconds}. Look at the output of the others, and check that their machines can reach {address}."
    )


def stay_on_loopback() -> None:
    """If all ranks are on this machine, make gloo listen on the loopback interface only.

    By default, gloo listens at the address of the machine's host name.
    """
    world = os.environ.get("WORLD_SIZE", "1")
    is_here = world in ("1", os.environ.get("LOCAL_WORLD_SIZE")) or _is_loopback(os.environ.get("MASTER_ADDR", ""))
    interface = next((name for _, name in socket.if_nameindex() if name in LOOPBACK_INTERFACES), None)
    if is_here and interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def loopback_store(timeout: timedelta) -> dist.Store | None:
    """Return a store that listens on a loopback address only. Ranks find each other through the store.

    Return None if torchrun provides a store, or if MASTER_ADDR is not a loopback address. The store that torch creates by default
    listens on every interface, whatever MASTER_ADDR is.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    is_complete = (
        "RANK" in os.environ and port.isdecimal() and int(port) < 2**16
    )  # if not, torch reports what is missing
    count = int(os.environ.get("WORLD_SIZE", 1))
    if count == 1 or is_served_by_launcher() or not is_complete or not _is_loopback(address):
        return None
    listening = _listen(address, int(port)) if os.environ["RANK"] == "0" else None
    return dist.TCPStore(
        host_name=address,
        port=int(port),
        world_size=count,
        is_master=listening is not None,
        timeout=timeout,
        wait_for_workers=False,  # the process group waits
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _listen(address: str, port: int) -> socket.socket:
    if (given := os.environ.get(STORE_FD)) is not None:  # bound by the process that started this rank
        return socket.socket(fileno=int(given))
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen()
    except OSError as error:
        raise MachineError(
            f"MASTER_ADDR = {address}, MASTER_PORT = {port}: the first rank cannot listen there ({error.strerror}). Choose "
            "another port."
        ) from None
    return listening


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # a host name
        return False


def leave_process_group() -> None:
    """Leave the process group. Without this, torch prints a warning when the process ends."""
    if dist.is_initialized():
        end_signs()
        dist.destroy_process_group()

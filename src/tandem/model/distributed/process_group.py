"""The processes that train together: which one this is, and how they agree. One process is a mesh of one."""

import ipaddress
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tandem.errors import AlreadyReportedError, ConfigError, MachineError, TandemError

T = TypeVar("T")

# How long workers wait for one of them, which may be tokenising; then all end.
PATIENCE = timedelta(minutes=30)
LOOPBACK_INTERFACES = ("lo", "lo0")  # on Linux; on macOS


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together, this one's device and its number among them.

    What is said on the host goes by the CPU's own channel: it never waits for a GPU.
    """

    mesh: DeviceMesh
    device: torch.device
    number: int = 0
    is_first_here: bool = True  # on its machine
    host_group: dist.ProcessGroup | None = None  # null: the group of all

    @property
    def count(self) -> int:
        return self.mesh.size()

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def gather(self, value: T) -> list[T]:
        """What each worker has, in the order of their numbers; waits for the others."""
        if self.count == 1:
            return [value]
        values: list[T] = [value] * self.count
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def highest(self, number: int) -> int:
        """The highest number that any worker gives; waits for the others."""
        if self.count == 1:
            return number
        given = torch.tensor(number)
        dist.all_reduce(given, dist.ReduceOp.MAX, group=self.host_group)
        return int(given)

    def lowest(self, number: int) -> int:
        """The lowest number that any worker gives; waits for the others."""
        return -self.highest(-number)

    def everywhere(self, flag: Tensor) -> Tensor:
        """Whether a flag is true on every worker; known on the device, where it costs no wait of the host."""
        if self.count == 1:
            return flag
        true = flag.to(torch.int32)
        dist.all_reduce(true, dist.ReduceOp.MIN, group=self.mesh.get_group())
        return true.to(torch.bool)

    def concatenated(self, rows: Tensor) -> tuple[Tensor, slice]:
        """The rows of all workers, one after another, and where this one's stand. Hosts wait, devices do not."""
        counts = self.gather(len(rows))
        start = sum(counts[: self.number])
        own = slice(start, start + len(rows))
        if self.count == 1:
            return rows, own
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self.mesh.get_group())
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]), own

    def agreed(self, do: Callable[[], T], *, by: bool) -> T | None:
        """Let the workers for which `by` is true do something. What fails on one ends all, and is told once."""
        if self.count == 1:
            return do() if by else None
        done, failure = None, None
        try:
            done = do() if by else None
        except Exception as error:
            failure = error
        code = failure.exit_code if isinstance(failure, TandemError) else 1
        failed = [
            (number, code) for number, code, fails in self.gather((self.number, code, failure is not None)) if fails
        ]
        if failure is not None and failed[0][0] == self.number:
            raise failure
        if failed:
            raise AlreadyReportedError(failed[0][1])
        return done

    def from_first(self, do: Callable[[], T]) -> T:
        """What `do` gives on the first worker, on all of them."""
        done = self.agreed(do, by=self.is_first)
        return self.gather(done)[0]  # type: ignore[return-value]

    def one_then_all(self, do: Callable[[], T]) -> T:
        """`do` on every worker; on one of each machine first, which leaves in the caches what the others find there."""
        early = self.agreed(do, by=self.is_first_here)
        late = self.agreed(do, by=not self.is_first_here)
        return early if self.is_first_here else late  # type: ignore[return-value]

    def apart(self) -> "Ranks":
        """The same workers with a channel of their own, for a thread that talks beside the run."""
        if self.count == 1:
            return self
        return replace(self, host_group=dist.new_group(backend="gloo", timeout=PATIENCE))


def compute_deterministically() -> None:
    """Only kernels that give the same bits every time; to be called before the GPU is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def join_process_group() -> Ranks:
    """This process alone, or among those that torchrun started with it."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"worker {local} of this machine has no GPU: there are {torch.cuda.device_count()}. Start no more workers "
                "than GPUs (torchrun --nproc-per-node)."
            )
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        stay_on_loopback()
        if (store := loopback_store()) is not None:
            number, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=PATIENCE)
        elif int(os.environ.get("WORLD_SIZE", 1)) > 1:
            dist.init_process_group(backend, timeout=PATIENCE)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=PATIENCE)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return Ranks(mesh, device, dist.get_rank(), is_first_here=local == 0)


def stay_on_loopback() -> None:
    """Let gloo listen where only this machine reaches it, if all ranks are here. Unless told, it listens where its name leads."""
    world = os.environ.get("WORLD_SIZE", "1")
    is_here = world in ("1", os.environ.get("LOCAL_WORLD_SIZE")) or _is_loopback(os.environ.get("MASTER_ADDR", ""))
    interface = next((name for _, name in socket.if_nameindex() if name in LOOPBACK_INTERFACES), None)
    if is_here and interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def loopback_store() -> dist.Store | None:
    """The store at which ranks find each other, at a loopback address; None where torchrun serves one, or the address is another.

    torch's own would listen on every interface, whatever MASTER_ADDR says.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_complete = "RANK" in os.environ and port.isdecimal() and int(port) < 2**16  # torch says what is missing
    count = int(os.environ.get("WORLD_SIZE", 1))
    if count == 1 or is_served or not is_complete or not _is_loopback(address):
        return None
    listening = _listening(address, int(port)) if os.environ["RANK"] == "0" else None
    return dist.TCPStore(
        host_name=address,
        port=int(port),
        world_size=count,
        is_master=listening is not None,
        timeout=PATIENCE,
        wait_for_workers=False,  # the group does
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _listening(address: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen()
    except OSError as error:
        raise MachineError(
            f"MASTER_ADDR = {address}, MASTER_PORT = {port}: the ranks cannot meet there ({error.strerror}). Choose "
            "another port."
        ) from None
    return listening


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # the name of a machine
        return False


def leave_process_group() -> None:
    """Leave the group; a process that ends without it is warned about."""
    if dist.is_initialized():
        dist.destroy_process_group()

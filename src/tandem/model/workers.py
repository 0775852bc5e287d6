"""The processes that train together: which one this is, and how they agree. One process is a mesh of one."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tandem.errors import ConfigError, TandemError, ToldError

T = TypeVar("T")

# How long workers wait for one of them, which may be tokenising; then all end.
PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True, slots=True)
class Workers:
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
            raise ToldError(failed[0][1])
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

    def apart(self) -> "Workers":
        """The same workers with a channel of their own, for a thread that talks beside the run."""
        if self.count == 1:
            return self
        return replace(self, host_group=dist.new_group(backend="gloo", timeout=PATIENCE))


def compute_deterministically() -> None:
    """Only kernels that give the same bits every time; to be called before the GPU is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def start_workers() -> Workers:
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
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            dist.init_process_group(backend, timeout=PATIENCE)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=PATIENCE)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return Workers(mesh, device, dist.get_rank(), is_first_here=local == 0)


def stop_workers() -> None:
    """Leave the group; a process that ends without it is warned about."""
    if dist.is_initialized():
        dist.destroy_process_group()

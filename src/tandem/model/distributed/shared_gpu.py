"""A process group for several ranks on one GPU, for tests: NCCL allows one rank per GPU only.

Every collective operation copies its tensors to the host, runs over gloo and copies the result back, so it is slow. FSDP,
context parallelism and compiled layers run over it as they do over NCCL.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

VARIABLE = "TANDEM_SHARE_GPU"
BACKEND = "tandem_shared_gpu"


def is_shared() -> bool:
    """Return whether all ranks of a machine use the same GPU, as TANDEM_SHARE_GPU=1 asks for."""
    return os.environ.get(VARIABLE) == "1"


def register() -> str:
    """Make the process group known to torch, and return the name of its backend."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, SharedGpuGroup, devices=["cpu", "cuda"])
    return BACKEND


_c10d: Any = torch._C._distributed_c10d  # type: ignore[attr-defined]
_Group: Any = dist.ProcessGroup  # names its arguments differently from version to version


class SharedGpuGroup(_Group):
    """Runs each collective operation over gloo, on copies in host memory. The caller waits until it is done."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._count, self._number, self._name = size, rank, ""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            host = _on_host(tensor)
            self._gloo.allreduce([host], _with_operation(opts)).wait()
            tensor.detach().copy_(host)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            host = _bytes(_on_host(tensor))
            self._gloo.broadcast([host], opts or dist.BroadcastOptions()).wait()
            _copy_bytes(host, tensor)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            for one, part in zip(output, self._gather(given), strict=True):
                _copy_bytes(part, one)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        _copy_bytes(torch.cat(self._gather(given)), output)
        return _done(output)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, given)
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        host = _on_host(given)
        self._gloo.allreduce([host], _with_operation(opts)).wait()
        output.detach().copy_(host.flatten().chunk(self._count)[self._number].view(output.shape))
        return _done(output)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, given, opts)
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> Any:
        assert not output_sizes and not input_sizes, "parts of different sizes are not used"
        host = _bytes(_on_host(given))
        received = torch.empty_like(host)
        self._gloo.alltoall_base(received, host, [], [], dist.AllToAllOptions()).wait()
        _copy_bytes(received, output)
        return _done(output)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    # The names of these methods up to torch 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # What torch asks of a group.
    def size(self) -> int:
        return self._count

    def getBackendName(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _gather(self, given: Tensor) -> list[Tensor]:
        """Return the bytes of the tensors of all ranks."""
        host = _bytes(_on_host(given))
        parts = [torch.empty_like(host) for _ in range(self._count)]
        self._gloo.allgather([parts], [host]).wait()
        return parts


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory. Waits until earlier operations on the tensor are done."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _bytes(host: Tensor) -> Tensor:
    """Return a view as bytes, because gloo does not know every dtype."""
    return host.flatten().view(torch.uint8)


def _copy_bytes(host: Tensor, tensor: Tensor) -> None:
    tensor.detach().copy_(host.view(tensor.dtype).view(tensor.shape))


def _with_operation(opts: Any) -> Any:
    """Return the options of an all-reduce with the operation of `opts`, such as a sum."""
    options = dist.AllreduceOptions()
    if opts is not None:
        options.reduceOp = opts.reduceOp
    return options


def _done(result: Any) -> Any:
    """Return the handle of an operation that is done."""
    future: Future[Any] = Future()
    future.set_result(result)
    return _c10d._create_work_from_future(future)

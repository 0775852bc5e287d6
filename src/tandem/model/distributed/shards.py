"""Where the rows of a sharded tensor lie, and how one rank gets all of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def own_rows(tensor: DTensor) -> range:
    """Return the rows of a tensor that this rank has."""
    return _rows_of(tensor, tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1))


def _rows_of(tensor: DTensor, shard: int) -> range:
    """Return the rows of a tensor in a shard.

    fully_shard divides rows evenly over the last dimension of the mesh: the last ranks have fewer rows, or none. An earlier
    dimension of the mesh has replicas.
    """
    (*replicas, placement), num_rows = tensor.placements, tensor.shape[0]
    assert placement.is_shard(0) and all(one.is_replicate() for one in replicas), tensor.placements
    each = -(-num_rows // tensor.device_mesh.size(len(replicas)))
    first = min(num_rows, each * shard)
    return range(first, min(num_rows, first + each))


def whole_on_host(tensor: Tensor, *, keeps: bool) -> Tensor:
    """Gather a tensor, shard by shard, in the host memory of the ranks that keep it. All ranks must call this.

    The others hold one more shard at a time, and get a tensor without numbers. No device holds the whole tensor.
    """
    tensor = tensor.detach()
    whole = torch.empty(tensor.shape if keeps else 0, dtype=tensor.dtype)
    if not isinstance(tensor, DTensor):
        return whole.copy_(tensor) if keeps else whole
    own, group = tensor.to_local(), tensor.device_mesh.get_group(tensor.device_mesh.ndim - 1)
    for number in range(dist.get_world_size(group)):
        if not (rows := _rows_of(tensor, number)):
            break
        is_own = dist.get_rank(group) == number
        part = own.contiguous() if is_own else own.new_empty((len(rows), *tensor.shape[1:]))
        dist.broadcast(part, group=group, group_src=number)
        if keeps:
            whole[rows.start : rows.stop] = part
    return whole


def local_shard(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor. Any other tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

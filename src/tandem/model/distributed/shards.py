"""Where the rows of a sharded tensor lie."""

from torch.distributed.tensor import DTensor


def own_rows(tensor: DTensor) -> range:
    """Return the rows of a tensor that this rank has.

    fully_shard divides rows evenly over the last dimension of the mesh: the last ranks have fewer rows, or none. An earlier
    dimension of the mesh has replicas.
    """
    (*replicas, placement), mesh, num_rows = tensor.placements, tensor.device_mesh, tensor.shape[0]
    assert placement.is_shard(0) and all(one.is_replicate() for one in replicas), tensor.placements
    shards = len(replicas)
    each = -(-num_rows // mesh.size(shards))
    first = min(num_rows, each * mesh.get_local_rank(shards))
    return range(first, min(num_rows, first + each))

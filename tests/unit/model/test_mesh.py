"""The mesh of ranks has named dimensions; batches are divided by the data-parallel degree, not by the number of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from killing import SERVER

from tandem.model.distributed.process_group import MeshShape, make_ranks


@pytest.mark.parametrize(
    ("shape", "num_ranks", "data_parallel", "dimensions"),
    [
        (MeshShape(), 1, 1, {"shard": 1}),
        (MeshShape(shard=8), 8, 8, {"shard": 8}),
        (MeshShape(replicate=2, shard=4), 8, 8, {"replicate": 2, "shard": 4}),
        (MeshShape(shard=4, context=2), 8, 4, {"shard": 4, "context": 2}),
        (MeshShape(context=2), 2, 1, {"shard": 1, "context": 2}),
    ],
)
def test_the_data_parallel_degree_leaves_out_the_context_dimension(shape, num_ranks, data_parallel, dimensions):
    assert (shape.num_ranks, shape.data_parallel, shape.dimensions()) == (num_ranks, data_parallel, dimensions)


def _exchange(number, path, answers):
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    for shape in (MeshShape(shard=2), MeshShape(context=2)):
        ranks = make_ranks(torch.device("cpu"), shape)
        # divided by `shard`, the ranks have 1 and 2 rows; divided by `context`, both have the same 2 rows
        rows = torch.full((number + 1,), float(number)) if shape.shard == 2 else torch.tensor([5.0, 6.0])
        joined, own = ranks.concatenate_parts(rows)
        found = {
            "part": (ranks.data_index, ranks.data_parallel),
            "shards": ranks.shard_mesh.size(),
            "all": ranks.gather(number),
            "parts": ranks.gather_parts(number),
            "rows": joined.tolist(),
            "own": joined[own].tolist() == rows.tolist(),
            "all true": bool(ranks.all_true(torch.tensor(number == 0))),
        }
        answers.put((number, shape.context, found))
    dist.destroy_process_group()


def test_ranks_that_compute_the_same_packs_count_once(tmp_path):
    answers = SERVER.SimpleQueue()
    given = (str(tmp_path / "store"), answers)
    processes.start_processes(_exchange, given, nprocs=2, start_method=SERVER.get_start_method())
    of_ranks = {(number, context): found for number, context, found in (answers.get() for _ in range(4))}
    for number in (0, 1):
        shared = {"all": [0, 1], "own": True, "all true": False}
        sharded = {"part": (number, 2), "shards": 2, "parts": [0, 1], "rows": [0.0, 1.0, 1.0]}
        same_packs = {"part": (0, 1), "shards": 1, "parts": [0], "rows": [5.0, 6.0]}
        assert of_ranks[number, 1] == shared | sharded
        assert of_ranks[number, 2] == shared | same_packs

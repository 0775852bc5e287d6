"""The mesh of ranks has named dimensions; batches are divided by the data-parallel degree, not by the number of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from killing import SERVER

from tandem.config.load import load_config
from tandem.config.sections.parallel import Parallel
from tandem.errors import ConfigError
from tandem.model.distributed.context import check_heads
from tandem.model.distributed.mesh import MeshShape, mesh_shape
from tandem.model.distributed.process_group import make_ranks


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "shape", "weight_shards", "words"),
    [
        ({}, 1, MeshShape(), 1, "1 shard"),
        ({}, 8, MeshShape(shard=8), 8, "8 shards"),
        ({"replicate": 2}, 8, MeshShape(replicate=2, shard=4), 4, "2 replicas of 4 shards"),
        ({"replicate": -1, "shard": 2}, 8, MeshShape(replicate=4, shard=2), 2, "4 replicas of 2 shards"),
        ({"context": 2}, 8, MeshShape(shard=4, context=2), 8, "8 shards, context 2"),
        ({"shard": 1, "context": 2}, 2, MeshShape(context=2), 2, "2 shards, context 2"),
        ({"replicate": 2, "context": 2}, 8, MeshShape(2, 2, 2), 4, "2 replicas of 4 shards, context 2"),
    ],
)
def test_the_ranks_that_are_left_fill_the_mesh(parallel, num_ranks, shape, weight_shards, words):
    found = mesh_shape(Parallel(**parallel), num_ranks)
    assert found == shape
    assert (found.num_ranks, found.data_parallel) == (num_ranks, num_ranks // shape.context)
    assert (found.weight_shards, str(found)) == (weight_shards, words)


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "needed"),
    [
        ({"context": 2}, 1, "replicate 1 x context 2 needs a multiple of 2 ranks, and this run has 1"),
        ({"replicate": 2, "context": 2}, 6, "replicate 2 x context 2 needs a multiple of 4 ranks, and this run has 6"),
        ({"shard": 4}, 8, "replicate 1 x shard 4 x context 1 needs 4 ranks, and this run has 8"),
        ({"replicate": 2, "shard": 8}, 8, "replicate 2 x shard 8 x context 1 needs 16 ranks, and this run has 8"),
    ],
)
def test_a_mesh_that_does_not_fit_the_ranks_is_refused(parallel, num_ranks, needed):
    with pytest.raises(ConfigError) as refused:
        mesh_shape(Parallel(**parallel), num_ranks)
    ways_out = "Change policy.parallel, or start another number of ranks."
    assert str(refused.value) == f"policy.parallel: {needed}. {ways_out}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "policy.parallel={replicate: -1, shard: -1}",
            "policy.parallel.replicate and policy.parallel.shard are both -1, which means all remaining ranks. Give a "
            "number for one of them.",
        ),
        (
            "policy.parallel.context=3",
            "policy.parallel.context = 3: must be a power of two up to 128, because rows are multiples of 128 tokens.",
        ),
        (
            "policy={parallel: {context: 2}, packing: {mode: none}}",
            "policy.parallel.context = 2 divides packed rows among ranks, which policy.packing.mode=none does not have. Set "
            "policy.packing.mode=batch, or policy.parallel.context=1.",
        ),
    ],
)
def test_impossible_sizes_are_refused(override, message):
    with pytest.raises(ConfigError) as refused:
        load_config(None, [override])
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("num_heads", "num_key_heads", "size", "divides"),
    [(32, 8, 8, True), (32, 8, 16, True), (4, 1, 4, True), (14, 2, 2, True), (14, 2, 4, False), (12, 4, 8, False)],
)
def test_heads_must_be_divisible(num_heads, num_key_heads, size, divides):
    if divides:
        check_heads(num_heads, num_key_heads, size, "it")
        return
    with pytest.raises(ConfigError) as refused:
        check_heads(num_heads, num_key_heads, size, "it")
    assert str(refused.value) == (
        f"policy.parallel.context = {size}: it has {num_heads} attention heads with {num_key_heads} key heads, which cannot be "
        f"divided among {size} ranks. Use a size that divides {num_heads}."
    )


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
            "shards": ranks.weights_mesh.size(),
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
        same_packs = {"part": (0, 1), "shards": 2, "parts": [0], "rows": [5.0, 6.0]}
        assert of_ranks[number, 1] == shared | sharded
        assert of_ranks[number, 2] == shared | same_packs

"""The bytes that ranks exchange are those that the page on scaling computes."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from killing import SERVER
from models import as_policy, random_preference, tiny_model

from tandem.model.distributed.layers import shard
from tandem.model.distributed.mesh import MeshShape
from tandem.model.distributed.process_group import make_ranks
from tandem.model.distributed.shared_gpu import SharedGpuGroup
from tandem.packing.layout import lay_out
from tandem.planning.traffic import Layers, efficiency, traffic

CPU = torch.device("cpu")
LENGTH = 128
# Even numbers of rows everywhere, so that no shard is padded.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
}
PACKS = 2
# name: (mesh, for how many packs gathered weights are kept)
MESHES = {
    "shards": (MeshShape(shard=4), None),
    "kept": (MeshShape(shard=4), PACKS),
    "replicas": (MeshShape(replicate=2, shard=2), None),
    "context": (MeshShape(shard=2, context=2), None),
    "context of four": (MeshShape(context=4), None),  # twice as many ranks as key heads
}


class Counting(SharedGpuGroup):
    """Counts the bytes that a rank exchanges with others, of collective operations on large tensors."""

    sent = {"gathered": 0.0, "reduced": 0.0, "exchanged": 0.0}

    def _all_gather(self, output, given, opts=None):
        self.sent["gathered"] += output.nbytes * (self._count - 1) / self._count
        return SharedGpuGroup.all_gather_single(self, output, given, opts)

    def _reduce_scatter(self, output, given, opts=None):
        self.sent["reduced"] += given.nbytes * (self._count - 1) / self._count
        return SharedGpuGroup.reduce_scatter_single(self, output, given, opts)

    def _all_to_all(self, output, given, *sizes):
        self.sent["exchanged"] += given.nbytes * (self._count - 1) / self._count
        return SharedGpuGroup.all_to_all_single(self, output, given, *sizes)

    def allreduce(self, tensors, opts=None):
        if tensors[0].numel() > 2 * LENGTH:  # not the log-probabilities
            self.sent["reduced"] += 2 * sum(tensor.nbytes for tensor in tensors) * (self._count - 1) / self._count
        return super().allreduce(tensors, opts)

    all_gather_single = _allgather_base = _all_gather
    reduce_scatter_single = _reduce_scatter_base = _reduce_scatter
    all_to_all_single = alltoall_base = _all_to_all


def _rank(number, path, answers):
    torch.set_num_threads(1)
    dist.Backend.register_backend("counting", Counting, devices=["cpu"])
    dist.init_process_group("counting", store=dist.FileStore(path, 4), rank=number, world_size=4)
    pack = lay_out([0], [random_preference(np.random.default_rng(0))], length=LENGTH)
    for name, (shape, kept_for) in MESHES.items():
        policy = as_policy(tiny_model("llama", **SIZES))
        layer = policy.model.model.layers[0]
        in_layer = sum(p.numel() for p in layer.parameters())
        total = sum(p.numel() for p in policy.parameters())
        shard(policy, make_ranks(CPU, shape), bfloat16=False, reshard_after_forward=kept_for is None)
        Counting.sent.update(gathered=0.0, reduced=0.0, exchanged=0.0)
        inputs = policy.inputs(pack, CPU)
        with policy.computing():
            for _ in range(PACKS):
                policy(inputs)[: inputs.num_scored].sum().backward()
        answers.put((name, number, in_layer, total, {kind: sent / PACKS for kind, sent in Counting.sent.items()}))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    answers = SERVER.SimpleQueue()
    path = str(tmp_path_factory.mktemp("traffic") / "store")
    processes.start_processes(_rank, (path, answers), nprocs=4, start_method=SERVER.get_start_method())
    return [answers.get() for _ in range(4 * len(MESHES))]


@pytest.mark.parametrize("name", MESHES)
def test_the_bytes_of_a_pack_are_those_of_the_calls(counted, name):
    mesh, kept_for = MESHES[name]
    of_ranks = [one for one in counted if one[0] == name]
    assert len(of_ranks) == 4
    for _, _, in_layer, total, sent in of_ranks:
        layers = Layers(3, in_layer, total - 3 * in_layer, num_heads=4, num_key_heads=2, head_dim=8)
        sizes = {"weight_bytes": 4, "gradient_bytes": 4, "number_bytes": 4}
        found = traffic(layers, mesh, row_tokens=LENGTH, kept_for=kept_for, **sizes)
        assert sent["gathered"] == pytest.approx(found.gathered)
        assert sent["reduced"] == pytest.approx(found.reduced)
        assert sent["exchanged"] == pytest.approx(found.exchanged)


def test_hidden_traffic_costs_nothing():
    assert efficiency(1.0, 0.5, overlapped=1.0) == 1.0
    assert efficiency(1.0, 0.5, overlapped=0.0) == pytest.approx(2 / 3)
    assert efficiency(1.0, 2.0, overlapped=1.0) == pytest.approx(0.5)

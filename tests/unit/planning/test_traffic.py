"""The bytes that ranks exchange are those that the page on scaling computes."""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from bfloat16_products import with_bfloat16_products
from killing import SERVER
from models import as_policy, random_preference, tiny_model
from peft import LoraConfig, inject_adapter_in_model

from tandem.model.distributed.layers import recompute, shard
from tandem.model.distributed.mesh import MeshShape
from tandem.model.distributed.process_group import make_ranks
from tandem.model.distributed.shared_gpu import SharedGpuGroup
from tandem.packing.layout import Pack, lay_out
from tandem.planning.traffic import Layers, efficiency, of_forward_pass, traffic
from tandem.training.step import grad_norm

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


@dataclass(frozen=True)
class Case:
    """A mesh of four ranks, and settings that change what they exchange."""

    mesh: MeshShape
    keeps: bool = False  # policy.parallel.reshard_after_forward=false
    once: bool = False  # policy.parallel.reduce_once_per_step
    recomputes: bool = False
    bfloat16: bool = False
    adapters: bool = False
    only_forward: bool = False


CASES = {
    "shards": Case(MeshShape(shard=4)),
    "kept": Case(MeshShape(shard=4), keeps=True),
    "replicas": Case(MeshShape(replicate=2, shard=2)),
    "context": Case(MeshShape(shard=2, context=2)),
    "context of four": Case(MeshShape(context=4)),  # twice as many ranks as key heads
    "reduced once": Case(MeshShape(shard=4), once=True),
}
MORE_CASES = {
    "replicas, reduced once": Case(MeshShape(replicate=2, shard=2), once=True),
    "full replicas, reduced once": Case(MeshShape(replicate=4), once=True),
    "bfloat16": Case(MeshShape(shard=4), bfloat16=True),
    "bfloat16, reduced once": Case(MeshShape(shard=2, context=2), bfloat16=True, once=True),
    "recomputation": Case(MeshShape(shard=2, context=2), recomputes=True),
    "adapters": Case(MeshShape(replicate=2, shard=2), adapters=True),
    "adapters, kept, reduced once": Case(MeshShape(shard=4), adapters=True, keeps=True, once=True),
    "forward": Case(MeshShape(shard=4), only_forward=True),
    "forward, kept": Case(MeshShape(shard=4), only_forward=True, keeps=True),
    "forward, context and recomputation": Case(MeshShape(shard=2, context=2), only_forward=True, recomputes=True),
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


@dataclass(frozen=True)
class Counted:
    """What a rank sent for a pack, and the sizes of its model."""

    sent: dict[str, float]
    in_layer: int
    total: int
    trained: int
    norm: float  # of all gradients


def _count(case: Case, pack: Pack) -> Counted:
    """Run packs as a step does."""
    model = tiny_model("llama", **SIZES)
    if case.adapters:
        inject_adapter_in_model(LoraConfig(r=8, init_lora_weights=False, target_modules=["q_proj", "v_proj"]), model)
    policy = as_policy(model)
    if case.recomputes:
        recompute(policy, "full")
    in_layer = sum(p.numel() for p in policy.model.model.layers[0].parameters())
    total, trained = (sum(p.numel() for p in given) for given in (policy.parameters(), dict(policy.trained()).values()))
    settings = {"reshard_after_forward": not case.keeps, "reduce_once": case.once}
    shard(policy, make_ranks(CPU, case.mesh), bfloat16=case.bfloat16, **settings)
    Counting.sent.update(gathered=0.0, reduced=0.0, exchanged=0.0)
    inputs = policy.inputs(pack, CPU)
    with policy.computing(), torch.set_grad_enabled(not case.only_forward):
        for number in range(PACKS):
            logps = policy(inputs)[: inputs.num_scored].sum()
            if not case.only_forward:
                policy.reduce_gradients(is_last=number == PACKS - 1)
                logps.backward()
    sent = {kind: amount / PACKS for kind, amount in Counting.sent.items()}
    return Counted(sent, in_layer, total, trained, 0.0 if case.only_forward else grad_norm(policy).item())


def _rank(number, path, cases, answers):
    torch.set_num_threads(1)
    dist.Backend.register_backend("counting", Counting, devices=["cpu"])
    dist.init_process_group("counting", store=dist.FileStore(path, 4), rank=number, world_size=4)
    pack = lay_out([0], [random_preference(np.random.default_rng(0))], length=LENGTH)
    for name, case in cases.items():
        with with_bfloat16_products() if case.bfloat16 else nullcontext():
            answers.put((name, _count(case, pack)))
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["usual", pytest.param("more", marks=pytest.mark.slow)])
def counted(request, tmp_path_factory) -> dict[str, list[Counted]]:
    """What each rank counted, by case."""
    cases = {"usual": CASES, "more": MORE_CASES}[request.param]
    answers = SERVER.SimpleQueue()
    path = str(tmp_path_factory.mktemp("traffic") / "store")
    processes.start_processes(_rank, (path, cases, answers), nprocs=4, start_method=SERVER.get_start_method())
    found: dict[str, list[Counted]] = {name: [] for name in cases}
    for _ in range(4 * len(cases)):
        name, one = answers.get()
        found[name].append(one)
    return found


def computed(case: Case, one: Counted) -> dict[str, float]:
    """What the formula gives."""
    itemsize = 2 if case.bfloat16 else 4
    found = traffic(
        Layers(3, one.in_layer, one.total - 3 * one.in_layer, num_heads=4, num_key_heads=2, head_dim=8),
        case.mesh,
        row_tokens=LENGTH,
        weight_bytes=itemsize,
        gradient_bytes=4,
        number_bytes=itemsize,
        kept_for=PACKS if case.keeps else None,
        summed_over=PACKS if case.once else 1,
        recomputes=case.recomputes,
        num_trained=one.trained,
    )
    if case.only_forward:
        found = of_forward_pass(found, kept=case.keeps, recomputes=case.recomputes)
    return {"gathered": found.gathered, "reduced": found.reduced, "exchanged": found.exchanged}


def test_the_bytes_of_a_pack_are_those_of_the_calls(counted):
    for name, ranks in counted.items():
        case = (CASES | MORE_CASES)[name]
        assert len(ranks) == 4
        for one in ranks:
            assert (name, one.sent) == (name, pytest.approx(computed(case, one)))
            assert (one.sent["reduced"] == 0) == case.only_forward
            assert (one.sent["exchanged"] == 0) == (case.mesh.context == 1)


def test_the_gradient_does_not_depend_on_when_it_is_summed(counted):
    """The same packs on every rank: the gradient is four times that of one rank, or twice with context."""
    for names in (("shards", "reduced once"), ("full replicas, reduced once", "replicas, reduced once")):
        norms = [one.norm for name in names for one in counted.get(name, [])]
        assert norms == pytest.approx(norms[:1] * len(norms), rel=1e-5)


def test_hidden_traffic_costs_nothing():
    assert efficiency(1.0, 0.5, overlapped=1.0) == 1.0
    assert efficiency(1.0, 0.5, overlapped=0.0) == pytest.approx(2 / 3)
    assert efficiency(1.0, 2.0, overlapped=1.0) == pytest.approx(0.5)

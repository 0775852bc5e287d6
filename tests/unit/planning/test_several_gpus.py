"""`tandem plan` for several GPUs: memory of a rank, what ranks exchange, and what it assumes."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shapes import model_folder

from tandem.config.keys import with_table
from tandem.config.load import load_config
from tandem.data.store.sets import no_bar
from tandem.errors import ConfigError
from tandem.model.distributed.layer_sizes import Layers
from tandem.model.distributed.mesh import MeshShape
from tandem.packing.batches import GlobalBatch
from tandem.packing.distribution import Round
from tandem.planning import suggestions
from tandem.planning.cards import TABLE, card_of_device, data_sheet_link, find_card
from tandem.planning.estimate import find_target
from tandem.planning.gpus import NO_OPTIONS, GpuCount, GpuOptions, Links
from tandem.planning.plan import _with_all_gpus, plan
from tandem.planning.records import RunEstimate
from tandem.planning.several import distribute
from tandem.planning.show import show
from tandem.planning.traffic import OVERLAPPED, Traffic, efficiency, exchange_seconds, of_forward_pass
from tandem.report.reporter import Reporter
from tandem.training.host_memory import HostNeed

GIB = 2**30
NUM_PAIRS = 512
ROWS = "policy.packing.pack_length=16384"
FULL = "policy.activation_checkpointing=full"  # with which eight H100 hold Llama 3.1 8B
EIGHT = GpuOptions(gpus=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return f"policy.model_name={model_folder('llama3.1-8b', tmp_path_factory.mktemp('shapes') / 'llama3.1-8b')}"


@pytest.fixture(scope="module", autouse=True)
def pairs(tmp_path_factory) -> None:
    """Pairs that fill more rows of 16,384 tokens than there are GPUs."""
    path, rng = tmp_path_factory.mktemp("pairs") / "pairs.jsonl", np.random.default_rng(0)

    def text(longest: int) -> str:
        return " ".join(rng.choice(["air", "sky", "sea", "red"], rng.integers(50, longest)))

    rows = [{"prompt": text(900), "chosen": text(500), "rejected": text(500)} for _ in range(NUM_PAIRS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    DATA[:] = [f"data.train={path}", f"policy.train_global_batch_size={NUM_PAIRS}"]


DATA: list[str] = []


def planned(*overrides: str, gpu: str | None = "h100-80gb", **options) -> RunEstimate:
    return plan(load_config(None, [*DATA, *overrides]), gpu=gpu, **options)


def shown(found: RunEstimate, capsys) -> str:
    show(found, Reporter("normal"))
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def on_eight(model) -> RunEstimate:
    return planned(model, ROWS, "policy.activation_checkpointing=selective", options=EIGHT, price_per_hour=2.5)


# The same recipe, planned and as in docs/scaling.md


@pytest.fixture(scope="module")
def benchmark() -> object:
    """benchmarks/scaling.py, with the modules next to it."""
    folder = str(Path(__file__).parents[3] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import scaling

        return scaling
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize("mesh", [MeshShape(shard=8), MeshShape(replicate=2, shard=8), MeshShape(shard=4, context=2)])
def test_the_page_on_scaling_and_the_plan_agree_on_a_recipe(mesh, benchmark, model):
    recipe = benchmark.Recipe("llama3.1-8b", mesh, 16384, benchmark.SELECTIVE)
    expected = benchmark.estimate(recipe, find_card("h100-80gb"))
    keys = [f"policy.parallel.{name}={getattr(mesh, name)}" for name in ("replicate", "shard", "context")]
    options = GpuOptions(gpus=8, machines=mesh.num_ranks // 8)
    found = planned(model, ROWS, *keys, "policy.activation_checkpointing=selective", options=options)
    assert found.rows.length == 16384
    assert found.memory.total == pytest.approx(expected.memory)
    several = found.several
    assert several is not None and several.mesh == mesh
    assert (several.gpus, several.links) == (recipe.gpus, GpuOptions().links(find_card("h100-80gb"), recipe.gpus))
    num_packs = several.sent.gathered / expected.traffic.gathered
    assert num_packs == pytest.approx(round(num_packs))
    full = found.num_tokens / 16384 / mesh.data_parallel  # rows of a rank, if all were full
    assert full <= num_packs < full + 2
    assert several.sent.reduced == pytest.approx(num_packs * expected.traffic.reduced)
    assert several.efficiency == pytest.approx(
        efficiency(several.compute_seconds, several.exchange_seconds, OVERLAPPED)
    )
    if mesh.context == 1:  # otherwise it depends on the lengths of rows, which are not all full
        assert several.exchange_seconds == pytest.approx(num_packs * expected.exchange_seconds)


@pytest.mark.slow
def test_the_tables_of_the_page_are_what_the_benchmark_computes(benchmark):
    """Otherwise: python benchmarks/scaling.py --write"""
    page = benchmark.PAGE.read_text(encoding="utf-8")
    for name, text in benchmark.tables(benchmark.estimates()).items():
        assert with_table(page, name, text) == page


# Gradients summed once per step


def test_gradients_summed_once_per_step_need_memory_and_less_exchange(model, on_eight):
    """Eight ranks hold all gradients in float32, instead of an eighth: 7/8 x 4 bytes per weight more."""
    key = "policy.parallel.reduce_once_per_step=true"
    once = planned(model, ROWS, "policy.activation_checkpointing=selective", key, options=EIGHT)
    more = once.memory.total - on_eight.memory.total
    assert more == pytest.approx(4 * once.num_weights * 7 / 8)
    assert once.several.sent.gathered == on_eight.several.sent.gathered
    num_packs = on_eight.several.sent.reduced / once.several.sent.reduced
    assert num_packs == pytest.approx(round(num_packs)) and num_packs > 1
    assert once.several.exchange_seconds < on_eight.several.exchange_seconds


def test_full_replicas_sum_gradients_once_per_step_without_more_memory(model):
    """They hold all gradients anyway: exchange and memory are those of the key, and without it there is more exchange."""
    keys = ["policy.parallel.replicate=8", "policy.parallel.shard=1", "policy.lora.enabled=true"]
    found = {
        value: planned(model, ROWS, FULL, *keys, f"policy.parallel.reduce_once_per_step={value}", options=EIGHT)
        for value in ("auto", "true", "false")
    }
    memory = {value: one.memory.total for value, one in found.items()}
    assert memory["auto"] == memory["true"] == memory["false"]
    sent = {value: one.several.sent.reduced for value, one in found.items()}
    assert sent["auto"] == sent["true"] < sent["false"]


# Memory


def test_ranks_divide_weights_gradients_and_states_and_gather_two_layers(on_eight):
    memory, num = on_eight.memory, on_eight.num_weights
    assert (memory.weights, memory.gradients) == (num / 2, num / 2)  # 4 bytes each, of an eighth
    assert (memory.optimizer_states, memory.bfloat16_copy) == (num, 0)
    layer, others = (num - 2 * 128_256 * 4096 - 4096) / 32, 2 * 128_256 * 4096 + 4096
    # In bfloat16: two layers, embeddings and head. In bfloat16 and float32: gradients of a layer, of embeddings and of the head.
    assert memory.gathered == pytest.approx(2 * (2 * layer + others) + (2 + 4) * (layer + others))
    assert memory.total == pytest.approx(2 * num + memory.activations + memory.head + memory.gathered)


def test_replicas_hold_all_weights_and_context_divides_activations(model):
    replicas = planned(model, ROWS, FULL, "policy.parallel.replicate=2", options=EIGHT)
    context = planned(model, ROWS, FULL, "policy.parallel.context=4", options=EIGHT)
    assert (replicas.memory.weights, context.memory.weights) == (replicas.num_weights, context.num_weights / 2)
    assert context.memory.activations == pytest.approx(replicas.memory.activations / 4)
    live = planned(model, ROWS, FULL, "policy.parallel.context=4", "reference.mode=live", options=EIGHT)
    assert live.memory.reference == 2 * live.num_weights / 8


def test_weights_that_are_kept_gathered_take_two_bytes_each(model):
    kept = planned(model, ROWS, FULL, "policy.parallel.reshard_after_forward=false", options=EIGHT)
    freed = planned(model, ROWS, FULL, options=EIGHT)
    layer = (kept.num_weights - 2 * 128_256 * 4096 - 4096) / 32
    assert kept.memory.gathered - freed.memory.gathered == pytest.approx(2 * 30 * layer)
    assert kept.several is not None and freed.several is not None
    assert kept.several.sent.gathered < freed.several.sent.gathered


def test_a_checkpoint_of_several_ranks_has_all_weights_and_states(on_eight):
    assert on_eight.disk.checkpoint == 12 * on_eight.num_weights


# Time


def test_the_cost_is_the_price_of_all_gpus(on_eight):
    assert on_eight.time is not None and on_eight.cost is not None
    assert on_eight.cost.high == pytest.approx(on_eight.time.total.high / 3600 * 2.5 * 8)


def test_eight_gpus_are_as_fast_as_their_efficiency_says(model, on_eight):
    settings = [model, ROWS, FULL, "policy.weights=bfloat16_stochastic"]  # which fit on one
    one, eight = (planned(*settings, gpu="h200-141gb", options=given) for given in (NO_OPTIONS, EIGHT))
    assert one.time is not None and eight.time is not None and eight.several is not None
    share = eight.several.efficiency * (1 - eight.several.waiting)
    # One GPU packs a batch into other rows, so that its rows are not equally full.
    same_fill = one.rows.fill / eight.rows.fill
    assert eight.time.pairs_per_second * same_fill == pytest.approx(8 * share * one.time.pairs_per_second, rel=1e-6)
    assert eight.time.training.high / eight.time.training.low == pytest.approx(1.7 / 0.75)  # computed also for an H200


def test_a_slower_link_makes_ranks_wait_longer(model, on_eight):
    given = [model, ROWS, "policy.activation_checkpointing=selective"]
    slow = planned(*given, options=replace(EIGHT, link=30))
    assert slow.several is not None and on_eight.several is not None
    assert slow.several.exchange_seconds == pytest.approx(10 * on_eight.several.exchange_seconds)
    assert slow.several.efficiency < on_eight.several.efficiency
    machines = planned(*given, options=GpuOptions(gpus=8, machines=2, network=20))
    assert machines.several is not None
    assert machines.several.exchange_seconds == pytest.approx(
        (machines.several.sent.gathered + machines.several.sent.scattered) / 20e9
    )


LAYERS = Layers(2, 3e9, 2_000_000_000, num_heads=4, num_key_heads=4, head_dim=8)
LINKS = Links(inside=100.0, between=10.0)


@pytest.mark.parametrize(
    ("sent", "mesh", "gpus", "seconds"),
    [
        (Traffic(gathered=100, scattered=200), MeshShape(shard=8), GpuCount(8), 3),  # over the link of each GPU
        (Traffic(gathered=100), MeshShape(shard=16), GpuCount(8, 2), 10),  # arrives once in each machine
        (Traffic(gathered=100, replicated=10), MeshShape(2, 8), GpuCount(8, 2), 1 + 8),  # 8 rings of 10 bytes
        (Traffic(replicated=10), MeshShape(4, 4), GpuCount(8, 2), 4),  # 4 rings, each of two ranks per machine
        (Traffic(replicated=10), MeshShape(8), GpuCount(8), 0.1),
        (Traffic(exchanged=100), MeshShape(shard=8, context=2), GpuCount(8, 2), 1),
        # Of 16 ranks that divide a row, 8 of the other 15 are in the other machine.
        (Traffic(exchanged=150), MeshShape(context=16), GpuCount(8, 2), 8 * 150 * 8 / 15 / 10),
        (Traffic(), MeshShape(), GpuCount(), 0),
    ],
)
def test_a_collective_takes_as_long_as_its_slowest_link(sent, mesh, gpus, seconds):
    assert exchange_seconds(sent, mesh, gpus, LINKS) == pytest.approx(seconds)


def test_a_forward_pass_gathers_once_and_reduces_nothing():
    both = Traffic(gathered=8, scattered=4, replicated=2, exchanged=6)
    assert of_forward_pass(both, kept=False) == Traffic(gathered=4, exchanged=3)
    assert of_forward_pass(both, kept=True, recomputes=True) == Traffic(gathered=8, exchanged=2)


def test_links_follow_the_card_unless_they_are_given():
    two = GpuCount(8, 2)
    assert EIGHT.links(find_card("h100-80gb"), two) == Links(300e9, 200e9)
    assert EIGHT.links(find_card("a100-80gb"), two) == Links(200e9, 200e9)
    assert EIGHT.links(find_card("l4-24gb"), two) == Links(pytest.approx(32e9 * 2 / 3), 6.25e9)
    assert GpuOptions(link=7, network=5).links(find_card("l4-24gb"), two) == Links(7e9, 5e9)
    assert [data_sheet_link(find_card(name))[0] for name in TABLE] == [
        *(32, 32, 32, 32, 64, 300, 32, 32, 32, 450, 64, 300, 64, 450, 900),
    ]


# Waiting


class OfRounds:
    """A packer whose rounds are given: 2 ranks, preferences of 3, 1, 2 and 2 tokens, with attention of 4, 0, 0 and 0."""

    sizes = np.array([3, 1, 2, 2])
    costs = np.array([7.0, 1.0, 2.0, 2.0])
    arrangement = "shared"

    class store:
        num_prompt_tokens, num_completion_tokens = np.array([1, 0, 1, 1]), np.array([2, 1, 1, 1])

    def rounds(self, preferences, bounds):
        return [Round(4, (np.array([0]), np.array([1]))), Round(2, (np.array([2]), np.array([3])))]

    def together(self, rounds):
        return [[one] for one in rounds]

    def num_rows(self, pack):
        return 1


def test_ranks_wait_for_the_pack_with_the_most_attention():
    found = distribute(OfRounds(), [GlobalBatch(0, np.arange(4), 4)])
    assert found.fill == 8 / 12  # 8 tokens in two rows of 4 and two of 2
    # Rows of 4 cost 4 + 4 and 4 + 0, so that one rank waits for 4 of 8; rows of 2 cost 2 each. Together 4 of 2 * (8 + 2).
    assert found.waiting == pytest.approx(4 / 20)
    assert (found.micro_batches, found.tokens) == (2, 3)


def test_the_packs_of_the_plan_are_those_that_ranks_compute(model):
    from tandem.packing.packer import RankShare, make_packer
    from tandem.training.start.setup import check_model, open_inputs

    config = load_config(None, [*DATA, model, "policy.packing.pack_length=2048"]).config
    inputs = open_inputs(config, check_model(config, needs_weights=False), needs_weights=False)
    packers = [
        make_packer(
            inputs.sets.train,
            config.policy.packing,
            usual_auto=2048,
            pairs_per_batch=NUM_PAIRS,
            share=RankShare(rank, 3),
            hidden_size=4096,
        )
        for rank in range(3)
    ]
    batch = inputs.schedule.batches.epoch(0)[0]
    found = distribute(packers[0], [batch])
    of_ranks = [list(packer.micro_batches(batch.preferences)) for packer in packers]
    assert found.micro_batches == len(of_ranks[0]) == len(of_ranks[1])
    positions = sum(pack.token_ids.size for packs in of_ranks for pack in packs)
    assert found.fill == pytest.approx(sum(pack.num_tokens for packs in of_ranks for pack in packs) / positions)


# What is printed


def test_what_is_assumed_is_printed(model, on_eight, capsys):
    said = shown(on_eight, capsys)
    assert "planned for  8 x h100-80gb, 79.1 GiB per GPU (computed, not measured)\n" in said
    assert "mesh         8 ranks: 8 shards\n" in said
    assert " GiB per GPU: fits\n" in said
    assert ", per step and rank (computed)\n" in said
    said = " ".join(said.split())
    assert "; assumed: 300 GB/s per GPU inside a machine, and 80% of the exchange overlaps with computation" in said
    assert "% of the computation, for the rank whose packs have the most attention" in said
    assert "% of the time is computation (computed)" in said  # one GPU cannot hold the model
    assert ", at 2.5 per hour for each of 8 GPUs" in said
    machines = planned(model, "policy.parallel.replicate=2", options=GpuOptions(gpus=8, machines=2))
    said = " ".join(shown(machines, capsys).split())
    assert "planned for 2 machines with 8 x h100-80gb each, 79.1 GiB per GPU (computed, not measured)" in said
    assert "mesh 16 ranks: 2 replicas of 8 shards" in said
    assert "all-reduce between replicas " in said
    assert "200 GB/s per machine between machines" in said
    read = json.loads(json.dumps(machines.as_dict()))["several"]
    assert (read["gpus"], read["links"]["between"]) == ({"per_machine": 8, "machines": 2}, 200e9)


def test_the_speed_is_compared_with_one_gpu_where_the_run_fits_on_one(capsys):
    size = "policy.train_global_batch_size=16"
    one, eight = planned(size), planned(size, "policy.parallel.replicate=2", options=EIGHT)
    assert one.time is not None and eight.time is not None and eight.several is not None
    assert eight.several.one_gpu_speed == one.time.pairs_per_second
    times = eight.time.pairs_per_second / one.time.pairs_per_second
    assert f"pairs per second in training, {times:.2g} times one GPU (computed)" in " ".join(
        shown(eight, capsys).split()
    )


def test_batches_that_are_too_small_for_the_gpus_are_reported(capsys):
    advice = "batches are too small for 8 GPUs: use fewer, or larger batches"
    assert advice in shown(
        planned("policy.train_global_batch_size=4", options=EIGHT), capsys
    )  # four ranks have no pair
    assert advice not in shown(planned(options=EIGHT), capsys)
    assert advice not in shown(planned("policy.train_global_batch_size=4"), capsys)


def test_keys_of_the_configuration_say_how_many_gpus_there_are():
    found = planned("cluster.gpus_per_node=4", "cluster.num_nodes=2")
    assert found.several is not None and found.several.gpus == GpuCount(4, 2)
    option = planned("cluster.gpus_per_node=4", options=GpuOptions(gpus=2))
    assert option.several is not None and option.several.gpus == GpuCount(2)
    assert planned().several is None


def test_ranks_on_a_cpu_share_the_memory_of_the_machine(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    one, two = (planned(f"cluster.gpus_per_node={num}", "dpo.max_num_steps=1", gpu=None) for num in (1, 2))
    assert two.memory.available == one.memory.available // 2
    assert one.several is None and two.several is not None and two.several.efficiency is None
    said = shown(two, capsys)
    assert "planned for  2 ranks on the CPU of this machine, " in said
    assert " GiB per rank; to plan for GPUs, name a card with --gpu\n" in said
    assert " GiB per rank: fits\n" in said
    machines = planned("dpo.max_num_steps=1", gpu=None, options=GpuOptions(gpus=2, machines=2))
    assert "planned for 2 machines with 2 ranks each on their CPUs, " in " ".join(shown(machines, capsys).split())


# Suggestions


@pytest.mark.slow
def test_suggestions_for_several_gpus_give_the_same_numbers_again(model):
    found = planned(model, gpu="a100-40gb", options=GpuOptions(gpus=2), price_per_hour=1.0)
    assert found.memory.verdict == "does not fit"
    changes = [one.change for one in found.suggestions]
    assert "8 GPUs" in changes
    assert any("adapters only" in one for one in changes)
    for one in found.suggestions:
        words = shlex.split(one.command)
        command = "plan" if "plan" in words else "train"
        given = words[words.index(command) + 1 :]
        options = {name: given[given.index(name) + 1] for name in ("--gpu", "--gpus") if name in given}
        count = None if "--gpus" not in options else GpuOptions(gpus=int(options["--gpus"]))
        assert command == "plan" or "cluster.gpus_per_node=2" in given
        overrides = [word for word in given if "=" in word]
        again = plan(
            load_config(None, overrides), gpu=options.get("--gpu", "a100-40gb"), **({"options": count} if count else {})
        )
        assert (again.memory, again.time, again.memory.verdict) == (one.memory, one.time, "fits")


def test_replicas_that_do_not_fit_are_divided_and_the_command_plans_for_the_same_machines(model, monkeypatch):
    monkeypatch.setattr(suggestions, "CHANGES", ())
    monkeypatch.setattr(suggestions, "CHANGES_OF_SEVERAL", suggestions.CHANGES_OF_SEVERAL[:1])
    given = GpuOptions(gpus=8, machines=2, link=200, network=100)
    found = planned(model, "policy.parallel.replicate=16", "dpo.max_num_steps=1", options=given)
    first = found.suggestions[0]
    assert first.change == "weights divided among all GPUs"
    end = "policy.parallel.replicate=1 policy.parallel.shard=-1 --gpu h100-80gb --gpus 8 --machines 2 --link 200 --network 100"
    assert first.command.endswith(end)


# Bad input


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ([], {"gpus": 0}, "--gpus 0: not a number of GPUs. Give the GPUs of one machine, 1 or more."),
        ([], {"gpus": 8, "machines": -1}, "--machines -1: not a number of machines. Give 1 or more."),
        ([], {"gpus": 8, "link": 0.0}, "--link 0: not a bandwidth. Give GB/s above 0, such as 300."),
        (
            [],
            {"gpus": 8, "machines": 2, "network": float("nan")},
            "--network nan: not a bandwidth. Give GB/s above 0, such as 300.",
        ),
        ([], {"link": 300.0}, "--link 300: a single GPU exchanges nothing with others. Add --gpus N, or leave it out."),
        (
            [],
            {"gpus": 8, "network": 200.0},
            "--network 200: a single machine exchanges nothing with others. Add --machines N, or leave it out.",
        ),
        (
            [],
            {"machines": 2},
            "--machines 2: how many GPUs each machine has is not known. Add --gpus N or cluster.gpus_per_node=N.",
        ),
        (
            ["cluster.num_nodes=2"],
            {},
            "cluster.num_nodes = 2: how many GPUs each machine has is not known. Add --gpus N or cluster.gpus_per_node=N.",
        ),
        (
            ["policy.parallel.replicate=3"],
            {"gpus": 8},
            "policy.parallel: replicate 3 x context 1 needs a multiple of 3 ranks, and this run has 8. Change "
            "policy.parallel, or plan for another number of GPUs (--gpus N, --machines N).",
        ),
        (
            ["policy.parallel.context=2"],
            {},
            "policy.parallel: replicate 1 x context 2 needs a multiple of 2 ranks, and this run has 1. Change "
            "policy.parallel, or plan for another number of GPUs (--gpus N, --machines N).",
        ),
        (
            [],
            {"gpus": 100000, "machines": 1000},
            "100,000 GPUs in each of 1,000 machines: a plan is made for at most 16,384 GPUs. Lower --gpus "
            "(cluster.gpus_per_node) or --machines (cluster.num_nodes).",
        ),
        (
            ["cluster.gpus_per_node=16385"],
            {},
            "16,385 GPUs: a plan is made for at most 16,384 GPUs. Lower --gpus (cluster.gpus_per_node) or --machines "
            "(cluster.num_nodes).",
        ),
    ],
)
def test_bad_numbers_of_gpus_are_refused(overrides, options, message):
    with pytest.raises(ConfigError) as refused:
        planned(*overrides, options=GpuOptions(**options))
    assert str(refused.value) == message


def test_without_a_gpu_the_option_and_the_key_plan_for_ranks_on_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    short = "dpo.max_num_steps=1"
    key = planned("cluster.gpus_per_node=2", short, gpu=None)
    for option in (
        planned(short, gpu=None, options=GpuOptions(gpus=2)),
        planned(short, gpu=None, options=GpuOptions(2, 1)),
    ):
        assert option.several is not None and key.several is not None
        assert option.several.gpus == key.several.gpus == GpuCount(2)
        assert option.memory.available == key.memory.available


def test_more_ranks_on_cpus_are_not_suggested_as_gpus(monkeypatch):
    """They would share the memory of the machine."""
    cpu = replace(find_target("l4-24gb"), device=torch.device("cpu"), card=None, is_here=True, gpus=GpuCount(2))
    tried = []
    monkeypatch.setattr(suggestions, "_more_gpus", lambda planner, target: tried.append(target.device.type) or [])
    monkeypatch.setattr(suggestions, "_larger_cards", lambda *_: [])
    monkeypatch.setattr(suggestions, "_shorter_rows", lambda *_: [])
    monkeypatch.setattr(suggestions, "_fitting", lambda *_: None)
    planner = SimpleNamespace(inputs=SimpleNamespace(config=load_config(None, DATA).config))
    for target in (cpu, replace(cpu, device=torch.device("cuda"))):
        assert suggestions.suggest(planner, target, no_bar) == ()
    assert tried == ["cuda"]


def test_context_that_the_heads_do_not_allow_is_refused_as_in_training(model):
    with pytest.raises(ConfigError, match=r"policy\.parallel\.context = 64: "):
        planned(model, "policy.parallel.context=64", options=GpuOptions(gpus=64))


def test_the_command_refuses_a_mesh_before_heavy_imports(tmp_path):
    code = "import sys\nfrom tandem.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    arguments = ["plan", "data.train=embedded", "--gpu", "l4-24gb", "--gpus", "3", "policy.parallel.context=2"]
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ), timeout=120)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "tandem: error: policy.parallel: replicate 1 x context 2 needs a multiple of 2 ranks, and this run has 3. Change "
        "policy.parallel, or plan for another number of GPUs (--gpus N, --machines N).\nFalse\n"
    )


# Optimizer states in host memory


def test_states_in_host_memory_are_copied_in_every_step(capsys):
    given = ["policy.weights=bfloat16_stochastic", FULL]
    on_gpu, on_host = (planned(*given, *more) for more in ([], ["policy.optimizer.offload=true"]))
    assert on_gpu.host is None and on_gpu.time is not None and on_host.time is not None and on_host.host is not None
    assert on_host.host.states == 8 * on_host.num_weights
    assert on_host.host.copies == 10 * on_host.num_weights  # 2 for the weights
    # Two thirds of the 64 GB/s of an H100's PCI Express.
    assert on_host.time.copying == pytest.approx(8 * on_host.num_weights / (64e9 * 2 / 3))
    each = on_host.time.training.high - on_gpu.time.training.high
    assert each == pytest.approx(1.7 * on_host.num_steps * on_host.time.copying)
    said = " ".join(shown(on_host, capsys).split())
    assert f"host memory {on_host.host} per machine for optimizer states; " in said
    assert "host memory" not in shown(on_gpu, capsys)


def test_each_machine_holds_the_states_of_its_ranks(model):
    found = planned(model, FULL, "policy.optimizer.offload=true", options=GpuOptions(gpus=4, machines=2))
    assert found.host is not None
    assert found.host.states == pytest.approx(8 * found.num_weights / 2)  # half of the shards
    assert found.memory.optimizer_states < GIB


def test_this_machine_gets_no_suggestion_of_host_memory_that_it_does_not_have(monkeypatch):
    monkeypatch.setattr(suggestions, "CHANGES", [one for one in suggestions.CHANGES if "offload" in str(one.keys)][:1])
    here = replace(find_target("l4-24gb"), is_here=True)
    fits = SimpleNamespace(memory=SimpleNamespace(verdict="fits"), host=HostNeed(8 * GIB, 0))
    planner = SimpleNamespace(plan=lambda keys, target: fits, suggestion=lambda words, *_: words)
    for gib, found in ((7, None), (9, "optimizer states in host memory; needs 8.0 GiB of host memory")):
        monkeypatch.setattr(suggestions, "host_memory", lambda gib=gib: gib * GIB)
        assert suggestions._fitting(planner, suggestions.CHANGES[0], here) == found
    monkeypatch.setattr(suggestions, "host_memory", lambda: 0)  # that of another machine is not known
    assert suggestions._fitting(planner, suggestions.CHANGES[0], replace(here, is_here=False)) is not None


def test_all_gpus_of_this_machine_are_planned_for_as_training_uses_them(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    here = replace(find_target("a100-80gb"), card=card_of_device("NVIDIA A100-SXM4-80GB", 79 * GIB), is_here=True)
    found = _with_all_gpus(here, load_config(None, DATA), NO_OPTIONS)
    assert (found.gpus, found.memory) == (GpuCount(4), here.memory)
    assert found.options.links(found.card, found.gpus).inside == 200e9
    for asked in (1, 8):  # a number that is given counts, also if this machine has another one
        loaded = load_config(None, [*DATA, f"cluster.gpus_per_node={asked}"])
        assert _with_all_gpus(here, loaded, NO_OPTIONS).gpus == GpuCount(asked)


@pytest.mark.parametrize(
    ("cluster", "options", "count"),
    [
        ([], {}, {}),
        ([], {"gpus": 2}, {"cluster.gpus_per_node": 2}),
        (["cluster.gpus_per_node=2"], {}, {}),
        (["cluster.gpus_per_node=8"], {"gpus": 1}, {"cluster.gpus_per_node": 1}),
        (["cluster.num_nodes=2"], {"gpus": 4, "machines": 1}, {"cluster.gpus_per_node": 4, "cluster.num_nodes": 1}),
    ],
)
def test_a_suggested_command_starts_as_many_ranks_as_were_planned_for(cluster, options, count):
    given, loaded = GpuOptions(**options), load_config(None, [*DATA, *cluster])
    gpus = given.count(loaded, None)
    target = replace(find_target("l4-24gb"), gpus=gpus, options=given)
    planner = suggestions.Planner(loaded, None, None, None)
    fits = SimpleNamespace(time=None, memory=None)
    command = planner.suggestion("", {"run.seed": 1}, fits, target).command
    overrides = dict(word.split("=") for word in shlex.split(command) if "=" in word)
    assert {key: int(value) for key, value in overrides.items() if key.startswith("cluster.")} == {
        **{key: int(value) for key, value in (one.split("=") for one in cluster)},
        **count,
    }

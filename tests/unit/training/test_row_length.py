"""Rows of an `auto` length: as long as fits the GPU, with the reason."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hybrids import hybrid_settings
from models import model_folder
from transformers import AutoConfig

from tandem.config.load import load_config
from tandem.config.sections.parallel import Parallel
from tandem.config.sections.policy import Lora, Optimizer, Packing, Policy
from tandem.data.store.sets import no_bar
from tandem.errors import ConfigError, OutOfMemoryError
from tandem.model.distributed.mesh import MeshShape
from tandem.model.files.source import ModelSource
from tandem.model.lora.layers import plan_lora
from tandem.model.lora.saved import SavedModules
from tandem.model.lora.tokens import TrainedTokens
from tandem.prepare import prepare_data
from tandem.report.choices import describe_choices, describe_computation
from tandem.training import memory as row_length
from tandem.training.memory import (
    GIB,
    auto_row_length,
    estimate_memory,
    filler_warning,
    refuse_certain_overflow,
    refuse_large_masks,
)
from tandem.training.start.setup import set_up

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES = {
    "135M": ("llama", (576, 1536, 30, 9, 3), 49_152, True),
    "0.5B": ("qwen2", (896, 4864, 24, 14, 2), 151_936, True),
    "1.5B": ("qwen2", (1536, 8960, 28, 12, 2), 151_936, True),
    "8B": ("llama", (4096, 14336, 32, 32, 8), 128_256, False),
}
FEW_BITS = {"weights": "bfloat16_stochastic", "optimizer": Optimizer(state_dtype="bfloat16")}


def source_of(shape):
    family, sizes, vocabulary, tied = SHAPES[shape]
    config = AutoConfig.for_model(
        family, **dict(zip(NAMES, sizes, strict=True)), vocab_size=vocabulary, tie_word_embeddings=tied
    )
    return ModelSource(shape, Path(), config)


def need_of(shape, policy, num_ranks=1, lora=None, device="cuda"):
    return estimate_memory(
        source_of(shape),
        policy,
        torch.device(device),
        lora=lora,
        precision="bfloat16",
        mesh=MeshShape(shard=num_ranks),
    )


def test_a_size_per_layer_counts_as_their_mean():
    sizes = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    gemma = {**sizes, "activation_sparsity_pattern": None, "vocab_size": 64, "vocab_size_per_layer_input": 64}

    def per_token(intermediate):
        config = AutoConfig.for_model("gemma3n_text", **gemma, intermediate_size=intermediate)
        source = ModelSource("it", Path(), config)
        return estimate_memory(source, Policy(), torch.device("cpu"), lora=None, precision="float32").per_token

    assert per_token([4096, 8192]) == per_token(6144)


def with_card(gib, monkeypatch):
    memory = SimpleNamespace(total_memory=int(gib * GIB))
    monkeypatch.setattr(row_length.torch.cuda, "get_device_properties", lambda device: memory)
    return torch.device("cuda")


def row(shape, monkeypatch, *, card=139, num_ranks=1, **settings):
    policy = Policy(**settings)
    return auto_row_length(need_of(shape, policy, num_ranks), policy, with_card(card, monkeypatch))


@pytest.mark.parametrize(
    ("shape", "card", "settings", "tokens"),
    [
        ("1.5B", 139, {}, 16384),
        ("1.5B", 80, {}, 16384),
        ("1.5B", 60, {}, 8192),
        ("1.5B", 24, {}, 2048),  # it will not fit either, and is refused
        ("1.5B", 60, {"activation_checkpointing": "selective"}, 16384),
        ("1.5B", 80, {"packing": Packing(packs_per_micro_batch=2)}, 8192),
        ("8B", 139, FEW_BITS, 8192),
        ("8B", 139, {}, 2048),
        # smaller ones take longer rows, to keep the GPU busy
        ("0.5B", 139, {}, 32768),
        ("135M", 139, {}, 65536),
        ("135M", 24, {}, 32768),
    ],
)
def test_the_longest_row_that_fits_is_taken(shape, card, settings, tokens, monkeypatch):
    assert row(shape, monkeypatch, card=card, **settings).tokens == tokens


# What benchmarks/train.py and benchmarks/memory.py measured on an H200 (benchmarks/LAB_NOTES.md).
@pytest.mark.parametrize(
    ("shape", "card", "settings", "tokens", "measured"),
    [
        ("1.5B", 139, {}, 16384, 61.3),
        ("1.5B", 139, FEW_BITS, 16384, 49.8),
        ("8B", 139, FEW_BITS, 8192, 115.6),
        ("0.5B", 24, {"activation_checkpointing": "selective"}, 16384, 16.5),
    ],
)
def test_the_estimate_is_near_what_was_measured(shape, card, settings, tokens, measured, monkeypatch):
    found = row(shape, monkeypatch, card=card, **settings)
    assert found.tokens == tokens
    expected = float(found.reason.split()[3])
    assert expected == pytest.approx(measured, rel=0.06)


def test_the_reason_for_a_row_length_is_given(monkeypatch):
    assert row("0.5B", monkeypatch).reason == "expected to need 41 of 139 GiB; longer rows gain little"
    assert row("1.5B", monkeypatch).reason == "expected to need 60 of 139 GiB; longer rows gain little"
    assert row("8B", monkeypatch, **FEW_BITS).reason == "expected to need 113 of 139 GiB; longer rows would not fit"


def test_rows_of_a_batch_are_not_so_short_that_the_gpu_would_wait(monkeypatch):
    assert row("1.5B", monkeypatch).shortest == 7_773
    assert row("8B", monkeypatch, **FEW_BITS).shortest == 1_494
    assert row("135M", monkeypatch).shortest == 65_536


def test_ranks_that_share_weights_take_longer_rows_because_they_gather_weights_for_each(monkeypatch):
    assert row("8B", monkeypatch, num_ranks=8, **FEW_BITS).shortest == 8_192
    assert row("8B", monkeypatch, num_ranks=8, card=48, **FEW_BITS).shortest == 4_096  # no longer row fits
    assert row("135M", monkeypatch, num_ranks=8).shortest == 65_536
    assert row("135M", monkeypatch, card=24).shortest == 32_768


def test_a_set_packed_once_is_packed_the_same_on_every_gpu(monkeypatch):
    for card in (24, 139):
        assert row("1.5B", monkeypatch, card=card, packing=Packing(mode="dataset")).tokens == 8192


@pytest.mark.parametrize(
    ("overrides", "printed"),
    [
        ([], "1,024 tokens (auto: the default on a CPU)"),
        (["policy.packing.pack_length=1024"], "1,024 tokens"),
        (["policy.packing.pack_length=1000"], "1,024 tokens (1,000 rounded up to a multiple of 128)"),
        (["policy.packing.mode=none"], "one sequence each, padded to at most 256 tokens"),
        (["policy.train_global_batch_size=12"], "384 tokens (auto: batches of 12 pairs fill rows of this length)"),
        (
            ["policy.train_global_batch_size=4"],
            "256 tokens (auto: the longest preference, with all its completions, has 185)",
        ),
    ],
)
def test_the_row_length_is_described_with_its_reason(overrides, printed):
    setup = set_up(load_config(None, overrides).config, torch.device("cpu"))
    assert setup.plan.rows == printed


def test_a_row_length_that_batches_fill_less_than_half_is_warned_of():
    def reported(*overrides):
        config = load_config(None, list(overrides)).config
        return filler_warning(set_up(config, torch.device("cpu")).plan.train, config.policy)

    assert reported() is reported("policy.packing.pack_length=30000") is None
    assert reported("policy.packing.pack_length=60000") == (
        "policy.packing.pack_length = 60000: a batch has about 3,989 tokens, and the shortest rows at that setting have "
        "14,976, so 73% of the computation is filler. Set it to auto for shorter rows."
    )


@pytest.mark.parametrize(
    ("overrides", "printed"),
    [
        ([], "on the CPU; attention: a preference at a time; layers: not compiled"),
        (
            ["policy.compile=true", "policy.precision=bfloat16"],
            "on the CPU; attention: with dense masks; layers: compiled, which takes a while the first time",
        ),
        (["policy.packing.mode=none"], "on the CPU; attention: the model's own; layers: not compiled"),
        (
            [
                "policy.attention=varlen",
                "policy.packing.share_prompts=false",
                "policy.activation_checkpointing=selective",
            ],
            "on the CPU; attention: a sequence at a time; layers: not compiled; half of their matrix products "
            "recomputed in the backward pass",
        ),
    ],
)
def test_the_computation_is_described(overrides, printed):
    assert describe_computation(set_up(load_config(None, overrides).config, torch.device("cpu"))) == printed


def test_a_rate_that_the_schedule_does_not_reach_is_described():
    def reported(*overrides):
        setup = set_up(load_config(None, ["policy.optimizer.kwargs.lr=1e-3", *overrides]).config, torch.device("cpu"))
        return dict(describe_choices(setup))["optimizer"]

    assert reported().startswith("AdamW, learning rate 0.001, weight decay")
    assert reported("dpo.max_num_steps=1").startswith(
        "AdamW, learning rate 0.001 (at most 0.0001 is reached), weight decay"
    )
    of_lora_b = ["policy.lora.enabled=true", "policy.lora.loraplus_lr_ratio=16"]
    assert reported("dpo.max_num_steps=1", *of_lora_b).startswith(
        "AdamW, learning rate 0.001 (at most 0.0001 is reached; 16 times the rate for lora_B), weight decay"
    )


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ([], "each prompt once, its state copied for every completion"),
        (["policy.packing.share_prompts=false"], "each prompt again for every completion"),
    ],
)
def test_it_is_described_whether_recurrent_layers_share_prompts(given, printed, tmp_path):
    hybrid = model_folder(tmp_path / "hybrid", "granitemoehybrid", **hybrid_settings("granitemoehybrid"))
    setup = set_up(load_config(None, [f"policy.model_name={hybrid}", *given]).config, torch.device("cpu"))
    assert f"; recurrent layers: {printed}, by torch operations; " in describe_computation(setup)


def test_the_weight_of_the_load_balancing_loss_is_described(tmp_path):
    experts = model_folder(tmp_path / "experts", "qwen3_moe")

    def reported(*overrides):
        config = load_config(None, [f"policy.model_name={experts}", *overrides]).config
        return dict(describe_choices(set_up(config, torch.device("cpu"))))["loss"]

    assert reported() == "(dpo) x 1 + sft x 0"
    assert reported("dpo.router_aux_loss_coef=0.001") == "(dpo) x 1 + sft x 0, router_aux_loss_coef 0.001"


def test_prepared_rows_are_described_as_such(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    prepare_data(load_config(None, []).config, no_bar, [384, 640], tmp_path / "out")
    limit = "policy.max_total_sequence_length=512"
    given = [f"data.train={tmp_path}/out/train", "policy.packing.mode=dataset", limit]
    setup = set_up(load_config(None, given).config, torch.device("cpu"))
    assert setup.plan.rows == "640 tokens (auto: the longest prepared packs)"


@pytest.mark.parametrize("pairs", [4, 12, 128])
def test_packs_of_an_auto_length_are_prepared_as_training_looks_for_them(pairs, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    config = load_config(None, ["policy.packing.mode=dataset", f"policy.train_global_batch_size={pairs}"]).config
    prepared = prepare_data(config, no_bar).packs["train"]
    assert [outlook.pack_length for outlook in prepared] == [set_up(config, torch.device("cpu")).plan.train.length]


def test_ranks_share_fixed_memory_but_not_temporary_memory(monkeypatch):
    assert row("8B", monkeypatch, num_ranks=8).tokens == 16384
    policy, num = Policy(), need_of("8B", Policy()).num_weights
    assert need_of("8B", policy).fixed == 18 * num  # with the copy that is computed with
    assert need_of("8B", policy, num_ranks=2).fixed == 8 * num


def test_ranks_need_memory_for_what_they_gather_whatever_the_length_of_rows():
    one, two = (need_of("8B", Policy(), num_ranks) for num_ranks in (1, 2))
    layer = (two.num_weights - 2 * 128_256 * 4096 - 4096) / 32
    others = 2 * 128_256 * 4096 + 4096
    # bfloat16: two layers and all else; bfloat16 and float32: gradients of a layer and of all else.
    assert two.gathered == pytest.approx(2 * (2 * layer + others) + 6 * layer + 6 * others)
    head = 2 * GIB + 4 * 128_256 * 4096  # a chunk of logits, and the head's gradient before it is added
    assert (one.gathered, one.temporary(0)) == (0, head)
    assert two.temporary(100) - 100 * two.per_token == pytest.approx(head + two.gathered)


@pytest.mark.parametrize("keeps_gathered", [False, True])
def test_sharded_weights_need_the_memory_that_was_measured(keeps_gathered):
    """On one rank that gathers from itself, which is a replica with all weights."""
    results = Path(__file__).parents[3] / "benchmarks/results/sharded.jsonl"
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    peaks = {one["peak_gib"] for one in lines if one["sharded"] and one["keep_gathered"] == keeps_gathered}
    policy = Policy(parallel=Parallel(reshard_after_forward=not keeps_gathered))
    source = source_of("1.5B")
    need = estimate_memory(
        source, policy, torch.device("cuda"), lora=None, precision="bfloat16", mesh=MeshShape(replicate=2)
    )
    for peak in peaks:
        assert (need.fixed + need.temporary(16384)) / GIB == pytest.approx(peak, rel=0.035)
    assert peaks


@pytest.mark.parametrize(("shape", "saved"), [("8B", ["lm_head"]), ("1.5B", ["lm_head", "embed_tokens"])])
def test_a_head_that_is_trained_beside_adapters_needs_memory_for_its_gradient(shape, saved):
    def head(modules):
        policy = Policy(lora=Lora(enabled=True, modules_to_save=modules))
        lora = plan_lora(source_of(shape), policy.lora, torch.device("cuda"), "bfloat16")
        return need_of(shape, policy, lora=lora).head

    config = source_of(shape).config
    assert head(saved) - head([]) == 4 * config.vocab_size * config.hidden_size
    assert head(["norm"]) == head([])


@pytest.mark.parametrize(("quantization", "shared"), [(None, 2.0), ("nf4", 0.0)])
def test_quantised_weights_are_not_sharded(quantization, shared):
    sizes = {
        "num_frozen": 10**9,
        "num_quantisable": 10**9,
        "num_trained": 10**6,
        "num_magnitudes": 0,
        "num_in_experts": 0,
    }
    lora = SimpleNamespace(
        **sizes, quantization=quantization, dtype=torch.bfloat16, tokens=TrainedTokens(), saved=SavedModules()
    )
    one, two = (need_of("1.5B", Policy(), num_ranks, lora).fixed for num_ranks in (1, 2))
    adapters = 10**6 * (18 - 16 / 2)  # of two ranks each keeps half, and no copy
    assert one - two == pytest.approx(10**9 * shared / 2 + adapters)


def of_rows(length, num=1, together=1):
    """A packer and a batch of so many rows."""
    packer = SimpleNamespace(
        bins=lambda preferences, bounds: range(num),
        longest_row=lambda bins: length,
        packs_per_micro_batch=together,
        share=SimpleNamespace(num_ranks=1),
    )
    return packer, SimpleNamespace(preferences=None, bounds=None)


def test_a_run_that_cannot_fit_is_refused_before_weights_load(monkeypatch):
    card, policy = with_card(139.8, monkeypatch), Policy()
    with pytest.raises(OutOfMemoryError) as refused:
        refuse_certain_overflow(need_of("8B", policy), *of_rows(2048), policy, card)
    assert str(refused.value) == (
        "the run needs about 147 GiB and the GPU has 140: weights, gradients and optimizer states 135, activations in rows "
        "of 2,048 tokens 13. To use less memory, try policy.optimizer.state_dtype=int8; then policy.weights=bfloat16_stochastic, "
        "policy.lora.enabled=true, more GPUs, policy.packing.pack_length below 2048 (rows may be as short as the longest "
        "preference), policy.activation_checkpointing=selective."
    )
    with pytest.raises(OutOfMemoryError, match=r"To use less memory, try policy\.packing\.pack_length below 131072"):
        refuse_certain_overflow(need_of("1.5B", policy), *of_rows(131_072), policy, card)
    with pytest.raises(OutOfMemoryError, match=r"To use less memory, try a lower policy\.max_total_sequence_length;"):
        unpacked = Policy(packing=Packing(mode="none"))
        refuse_certain_overflow(need_of("1.5B", unpacked), *of_rows(131_072), unpacked, card)


def test_rows_that_go_together_count_together_if_there_are_as_many(monkeypatch):
    card, policy = with_card(139.8, monkeypatch), Policy()
    need = need_of("1.5B", policy)
    refuse_certain_overflow(need, *of_rows(4096, num=8, together=32), policy, card)
    with pytest.raises(OutOfMemoryError):
        refuse_certain_overflow(need, *of_rows(4096, num=32, together=32), policy, card)


def test_a_run_that_may_fit_is_not_refused_before_weights_load(monkeypatch):
    card, few, full = with_card(139.8, monkeypatch), Policy(**FEW_BITS), Policy(activation_checkpointing="full")
    refuse_certain_overflow(need_of("8B", few), *of_rows(8192), few, card)
    refuse_certain_overflow(need_of("8B", full), *of_rows(2048), full, card)  # 138 of 140 are expected
    refuse_certain_overflow(need_of("8B", Policy(), num_ranks=2), *of_rows(8192), Policy(), card)


def test_memory_is_checked_without_a_gpu_too(monkeypatch):
    monkeypatch.setattr(row_length.os, "sysconf", {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 4096}.__getitem__)
    cpu, policy = torch.device("cpu"), Policy()
    refuse_certain_overflow(need_of("135M", policy, device="cpu"), *of_rows(1024), policy, cpu)
    with pytest.raises(OutOfMemoryError) as refused:
        refuse_certain_overflow(need_of("135M", policy, device="cpu"), *of_rows(65_536), policy, cpu)
    assert str(refused.value).startswith("the run needs about 34 GiB and this machine has 4: weights, gradients and ")


def test_masks_larger_than_the_memory_are_refused_before_weights_load(monkeypatch):
    monkeypatch.setattr(row_length.os, "sysconf", {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 4096}.__getitem__)
    cpu, packed = torch.device("cpu"), Policy(packing=Packing(pack_length=1_000_000))
    with pytest.raises(ConfigError) as refused:
        refuse_large_masks(1_000_064, 1_000_064, packed, cpu, None)
    assert str(refused.value) == (
        "policy.packing.pack_length = 1000000: rows of 1,000,064 tokens need a mask of 4657.2 GiB for preferences of up "
        "to 1,000,064 tokens, and this device has 4.0 GiB. Lower policy.packing.pack_length, or "
        "policy.max_total_sequence_length if a single preference is that long."
    )
    refuse_large_masks(29_184, 29_184, packed, cpu, None)  # 4.0 GiB
    refuse_large_masks(1_000_064, 2_048, packed, cpu, None)  # 1.9
    refuse_large_masks(1_000_064, 1_000_064, Policy(packing=Packing(mode="none")), cpu, None)
    with pytest.raises(ConfigError, match="need a mask"):
        refuse_large_masks(29_184, 29_184, Policy(packing=Packing(packs_per_micro_batch=2)), cpu, None)


def test_compiled_on_a_cpu_a_mask_is_over_whole_rows(monkeypatch):
    monkeypatch.setattr(row_length.os, "sysconf", {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 4096}.__getitem__)
    with pytest.raises(
        ConfigError, match=r"need a mask of 4.7 GiB where attention is dense \(policy.compile=true on a CPU\)"
    ):
        refuse_large_masks(31_744, 2_048, Policy(compile=True), torch.device("cpu"), None)


def test_on_a_gpu_only_what_was_asked_to_be_dense_is_refused(monkeypatch):
    monkeypatch.setattr(
        row_length.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=GIB)
    )
    refuse_large_masks(65_536, 2_048, Policy(), torch.device("cuda"), None)
    with pytest.raises(
        ConfigError, match=r"20.0 GiB where attention is dense \(policy.attention=sdpa\), and this device has 1.0 GiB"
    ):
        refuse_large_masks(65_536, 2_048, Policy(attention="sdpa"), torch.device("cuda"), None)


def test_memory_is_checked_before_weights_load(monkeypatch):
    with pytest.raises(OutOfMemoryError, match="the run needs about 2 GiB and the GPU has 1: "):
        set_up(load_config(None, []).config, with_card(1, monkeypatch))


def test_rows_fit_the_smallest_card_of_all_ranks(monkeypatch):
    policy, card = Policy(), with_card(139, monkeypatch)
    need = need_of("1.5B", policy)
    assert auto_row_length(need, policy, card).tokens == 16384
    assert auto_row_length(need, policy, card, memory=60 * GIB).tokens == 8192
    with pytest.raises(OutOfMemoryError, match="and the GPU has 24:"):
        refuse_certain_overflow(need, *of_rows(2048), policy, card, memory=24 * GIB)
    with pytest.raises(ConfigError, match=r"and this device has 1\.0 GiB"):
        refuse_large_masks(65_536, 2_048, Policy(attention="sdpa"), card, None, memory=GIB)

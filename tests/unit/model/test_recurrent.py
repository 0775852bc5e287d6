"""Recurrent layers in packs: where segments are, which kernels are used, what is refused, what the audit finds."""

import sys
from functools import partial, wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hybrids import CURRENT, HYBRIDS, INSTALLED, SETTINGS, convolution_by_torch, hybrid_settings, tiny_hybrid
from models import VOCABULARY, as_policy, tiny_config
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from tandem.config.schema import Config
from tandem.config.sections.policy import Packing, Policy
from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import AuditError, ConfigError
from tandem.model import architecture
from tandem.model.architecture import architecture_of, check_packable
from tandem.model.checks.audit import _check_calls
from tandem.model.checks.state_gradients import check_state_gradients
from tandem.model.files.source import ModelSource
from tandem.model.recurrent import kernels as kernel_module
from tandem.model.recurrent import layers, outlook, scans
from tandem.model.recurrent.families import FAMILIES, StateSizes, state_sizes
from tandem.model.recurrent.kernels import (
    Kernels,
    check_scan,
    first_correct,
    missing_package,
    scan_by_token,
    usable_kernels,
)
from tandem.model.recurrent.segments import PackSegments
from tandem.packing.layout import lay_out
from tandem.training.memory import estimate_memory
from tandem.training.start.machine import _compiles

CPU = torch.device("cpu")
SIZES = StateSizes(heads=4, key_heads=2, key_size=8, value_size=4)


def ids(*lengths):
    return [np.full(length, 5, np.int32) for length in lengths]


def pack_of(*preferences, length=16):
    made = [
        TokenizedPreference(*ids(prompt), tuple(ids(*answers)), ((0, 1),), "it") for prompt, *answers in preferences
    ]
    return lay_out(range(len(made)), made, length=length)


def test_prompts_come_before_completions_and_longer_before_shorter():
    # columns: prompt 0 1 | 2 | 3 4 5; prompt 6 7 8 | 9 10 | 11; filler
    segments = PackSegments(pack_of((2, 1, 3), (3, 2, 1)), CPU)
    assert segments.order.tolist() == [6, 7, 8, 0, 1, 3, 4, 5, 9, 10, 2, 11]
    assert segments.prompts.bounds.tolist() == [0, 3, 5]
    assert segments.completions.bounds.tolist() == [0, 3, 5, 6, 7]
    assert segments.prompt_of.tolist() == [1, 0, 1, 0]  # the longer prompt is the first


def test_the_first_tokens_of_a_completion_are_convolved_with_the_last_of_its_prompt():
    # prompt 0 1 2 3 | 4 5 | 6
    starts = PackSegments(pack_of((4, 2, 1)), CPU).starts(3)
    inputs = [
        [position if real else None for position, real in zip(*row, strict=True)]
        for row in zip(starts.inputs.tolist(), starts.is_real.tolist(), strict=True)
    ]
    assert dict(zip(starts.positions.tolist(), inputs, strict=True)) == {
        0: [None, None, 0],
        1: [None, 0, 1],
        4: [2, 3, 4],
        5: [3, 4, 5],
        6: [2, 3, 6],
    }


def test_a_prompt_shorter_than_the_convolution_is_preceded_by_nothing():
    # prompt 0 | 1 | 2 3; prompt 4 | 5 | 6
    starts = PackSegments(pack_of((1, 1, 2), (1, 1, 1)), CPU).starts(4)
    real = dict(zip(starts.positions.tolist(), starts.is_real.sum(1).tolist(), strict=True))
    assert real == {0: 1, 1: 2, 2: 2, 3: 3, 4: 1, 5: 2, 6: 2}


def test_a_rectangle_holds_sequences_of_similar_length_or_short_ones():
    segments = PackSegments(pack_of((200, 190, 90), (150, 40, 3), length=1024), CPU)
    assert [(one.num_sequences, one.longest) for one in segments.prompts.rectangles] == [(2, 200)]
    assert [(one.num_sequences, one.longest) for one in segments.completions.rectangles] == [(1, 190), (1, 90), (2, 40)]
    (_, _, short) = segments.completions.rectangles
    values = torch.arange(43.0)[:, None]
    assert torch.equal(short.take(short.fill(values)), values)
    assert short.fill(values)[1].flatten().tolist() == [40.0, 41.0, 42.0, *[0.0] * 37]


def test_a_row_of_filler_is_one_token():
    segments = PackSegments(lay_out([], [], length=8), CPU)
    assert segments.order.tolist() == [0]
    assert segments.completions.num_tokens == 0


@pytest.mark.skipif(INSTALLED < CURRENT, reason="this transformers is older than some of the types")
def test_every_family_is_tested():
    """A type that transformers renames is not left out of the tests unnoticed."""
    assert HYBRIDS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_family_is_packable_and_its_state_is_found(name):
    config = tiny_config(name, **hybrid_settings(name))
    found = architecture_of(config)
    assert found.scan == FAMILIES[name]
    heads = 4 if "delta" in FAMILIES[name] else 8
    expected = None if found.scan == "convolution" else (heads, 8, 8)
    sizes = state_sizes(config)
    assert expected == (None if sizes is None else (sizes.heads, sizes.key_size, sizes.value_size))
    check_packable(ModelSource("it", Path(), config), Policy())


def test_layers_with_attention_and_a_state_count_as_both_and_feed_forward_layers_as_neither():
    falcon, nemotron = (
        architecture_of(tiny_config(name, **hybrid_settings(name))) for name in ("falcon_h1", "nemotron_h")
    )
    assert falcon.layers == ("both", "both")
    assert falcon.num_attention_layers == 2
    assert nemotron.layers == ("recurrent", "full", "none", "recurrent")
    assert nemotron.num_attention_layers == 1
    assert nemotron.recurrent == ("mamba",)


def test_other_recurrent_layers_are_refused_in_packs():
    source = ModelSource("it", Path(), AutoConfig.for_model("jamba", num_hidden_layers=2))
    with pytest.raises(ConfigError) as refused:
        check_packable(source, Policy())
    assert str(refused.value) == (
        "policy.model_name = it: its recurrent layers (mamba) carry state along a row, so packed sequences would leak into "
        "each other. Train it unpacked: policy.packing.mode=none."
    )
    check_packable(source, Policy(packing=Packing(mode="none")))


def test_layers_that_need_a_later_transformers_are_refused_in_packs(monkeypatch):
    monkeypatch.setattr(architecture, "transformers_version", "5.21.1")
    source = ModelSource("it", Path(), tiny_config("lfm2", **SETTINGS["lfm2"]))
    with pytest.raises(ConfigError) as refused:
        check_packable(source, Policy())
    assert str(refused.value) == (
        "policy.model_name = it: its recurrent layers (conv) can be packed with transformers 5.22 or later, and 5.21.1 is "
        "installed. Upgrade it, or train unpacked: policy.packing.mode=none."
    )


# -- the audit


class OneRank:
    device = CPU

    def highest(self, value):
        return float(value)


def audited(policy):
    rng = np.random.default_rng(0)
    prompt, chosen, rejected = (rng.integers(3, VOCABULARY, length).astype(np.int32) for length in (20, 5, 8))
    made = TokenizedPreference(prompt, (chosen, rejected), ((0, 1),), "pairs.jsonl:7")

    return check_state_gradients(policy, made, OneRank(), precision="float32", model="policy.model_name = it")


def supported(*names):
    return [name for name in names if name in HYBRIDS]


@pytest.mark.parametrize("name", supported("qwen3_5_text", "granitemoehybrid", "lfm2"))
def test_the_audit_compares_gradients_of_recurrent_layers(name):
    policy = as_policy(tiny_hybrid(name))
    assert audited(policy) < 1e-4
    assert policy.attention == "trees"
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_the_audit_finds_a_state_without_gradients(monkeypatch):
    monkeypatch.setattr(scans, "copies", lambda states, segments: states.detach().index_select(0, segments.prompt_of))
    with pytest.raises(AuditError) as refused:
        audited(as_policy(tiny_hybrid("granitemoehybrid")))
    start, _, end = str(refused.value).partition(" differ by ")
    assert start == "audit: policy.model_name = it: pairs.jsonl:7: in a pack the gradients of its prompt"
    assert end.partition("% ")[2] == (
        "from those of each sequence alone (rounding explains 0.1%), so its recurrent layers would be trained wrongly. Nothing "
        "was trained. Train this model with policy.packing.mode=none, and report it."
    )


@pytest.mark.parametrize("name", supported("qwen3_5_text", "lfm2"))
def test_the_audit_finds_wrong_gradients_of_a_function_that_computes_every_pack(name, monkeypatch):
    """Both a prompt that is shared and a sequence alone are wrong if they are computed in packs."""
    convolve = scans.convolve

    def with_half_the_gradient(own, segments, x, *given):
        return convolve(own, segments, x / 2 + x.detach() / 2, *given)

    monkeypatch.setattr(scans, "convolve", with_half_the_gradient)
    with pytest.raises(AuditError, match="in a pack the gradients of its prompt differ by"):
        audited(as_policy(tiny_hybrid(name)))


@pytest.mark.parametrize("name", supported("qwen3_next", "kimi_linear", "granitemoehybrid"))
def test_scans_of_single_sequences_are_recomputed_in_the_audit_as_those_of_packs_are(name, monkeypatch):
    """They are on a GPU, where every layer would otherwise keep what it computed."""
    policy, recomputed = as_policy(tiny_hybrid(name)), []

    def counted(function, *given, **named):
        recomputed.append(function)
        return checkpoint(function, *given, **named)

    wanted = audited(policy)
    monkeypatch.setattr(layers, "checkpoint", counted)
    monkeypatch.setattr(scans, "RECOMPUTING_DEVICES", ("cpu",))
    assert audited(policy) == pytest.approx(wanted, abs=1e-5)
    assert len(recomputed) == 2  # layers with a state


def test_the_audit_counts_recurrent_layers():
    policy = as_policy(tiny_hybrid("falcon_h1"))
    pack = pack_of((4, 2, 1), length=128)
    _check_calls(policy, pack, CPU, "it")
    assert policy.recurrent is not None
    policy.recurrent.num_layers = 3
    with pytest.raises(AuditError) as refused:
        _check_calls(policy, pack, CPU, "policy.model_name = it")
    assert str(refused.value) == (
        "audit: policy.model_name = it: only 2 of 3 recurrent layers separate the sequences of a pack, so their states would "
        "leak. Nothing was trained. Train this model with policy.packing.mode=none."
    )


# -- kernels


@pytest.mark.parametrize("scan", ["gated_delta", "kimi_delta", "mamba2"])
def test_a_kernel_is_used_if_it_computes_the_same(scan):
    assert check_scan(scan_by_token, scan, SIZES, CPU, torch.float32) == ""


def without_state_gradients(*given, initial_state, **named):
    return scan_by_token(*given, initial_state=0 * initial_state + initial_state.detach(), **named)


def unsupported(*given, **named):
    raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results")


def test_a_kernel_with_wrong_gradients_is_not_used():
    kernel, reason = first_correct([without_state_gradients], "mamba2", SIZES, CPU, torch.float32)
    assert kernel is None
    assert reason == "the gradient of initial_state of flash-linear-attention's kernel is off by 100% here"


def test_the_first_kernel_that_works_is_used():
    kernel, reason = first_correct([unsupported, scan_by_token], "mamba2", SIZES, CPU, torch.float32)
    assert (kernel, reason) == (scan_by_token, "")
    kernel, reason = first_correct([unsupported], "gated_delta", SIZES, CPU, torch.float32)
    assert kernel is None
    assert reason == (
        "flash-linear-attention cannot compute it here (Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results)"
    )


def chunk_simple_gla(*given, **named):
    raise AssertionError("a kernel that is refused must not be run")


@pytest.mark.parametrize(
    ("flags", "tilelang", "is_refused"),
    [
        ((True, True, False), None, True),
        ((True, True, False), "installed", False),
        ((False, True, False), None, False),
        ((True, False, False), None, False),
        ((True, True, True), None, False),
        ((), None, False),  # another version of flash-linear-attention
    ],
)
def test_a_kernel_that_will_be_refused_is_not_run(monkeypatch, flags, tilelang, is_refused):
    names = ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1")
    fla = ModuleType("fla")
    fla.utils = SimpleNamespace(**dict(zip(names, flags, strict=False)))
    monkeypatch.setitem(sys.modules, "fla", fla)
    monkeypatch.setattr(kernel_module, "find_spec", lambda name: tilelang)
    said = "flash-linear-attention refuses its backward pass on this GPU with Triton before 3.7.1 and without tilelang"
    assert kernel_module.refusal(chunk_simple_gla) == (said if is_refused else "")
    assert kernel_module.refusal(scan_by_token) == ""
    if is_refused:
        assert first_correct([chunk_simple_gla], "mamba2", SIZES, CPU, torch.float32) == (None, said)
        kernel, reason = first_correct([chunk_simple_gla, scan_by_token], "mamba2", SIZES, CPU, torch.float32)
        assert (kernel, reason) == (scan_by_token, "")


@pytest.mark.parametrize(
    "architecture", supported("granitemoehybrid", "nemotron_h", "falcon_h1", "qwen3_5_text", "qwen3_next")
)
def test_the_convolution_is_checked_with_the_channels_of_the_model(architecture):
    model = tiny_hybrid(architecture)
    sizes = state_sizes(model.config.get_text_config())
    channels = {one.in_channels for one in model.modules() if isinstance(one, torch.nn.Conv1d)}
    assert channels == {sizes.channels}


def test_a_convolution_that_computes_something_else_is_not_used(monkeypatch):
    monkeypatch.setattr(kernel_module, "_scans", lambda scan: [scan_by_token])
    for kernel, expected in ((convolution_by_torch, convolution_by_torch), (scan_by_token, None)):
        monkeypatch.setattr(kernel_module, "_convolution", lambda kernel=kernel: kernel)
        found = kernel_module._checked_kernels("mamba2", SIZES, CPU, torch.bfloat16)
        assert found == Kernels(scan_by_token, expected)


def test_flash_linear_attention_must_be_installed_and_recent(monkeypatch):
    def absent(name):
        raise kernel_module.PackageNotFoundError

    monkeypatch.setattr(kernel_module, "version", absent)
    assert (
        missing_package()
        == "flash-linear-attention is not installed (in the tandem checkout, run pip install '.[hybrids]')"
    )
    monkeypatch.setattr(kernel_module, "version", lambda name: "0.5.2")
    assert missing_package() == (
        "flash-linear-attention 0.5.2 is older than 0.6.0, the first with correct gradients of states "
        "(in the tandem checkout, run pip install '.[hybrids]')"
    )
    monkeypatch.setattr(kernel_module, "version", lambda name: "0.6.1.dev0")
    assert missing_package() == ""


def test_neither_a_cpu_nor_float32_uses_kernels():
    assert usable_kernels("mamba2", SIZES, CPU, torch.bfloat16).scan is None
    cuda = usable_kernels("mamba2", SIZES, torch.device("cuda", 0), torch.float32)
    assert (cuda.scan, cuda.reason) == (None, "kernels would round float32")


# -- what a run prints, and the memory it expects


def granite():
    return tiny_config("granitemoehybrid", **hybrid_settings("granitemoehybrid"))


@pytest.mark.parametrize("correct", [True, False])
def test_outside_packs_the_kernel_of_the_delta_rule_is_used_only_if_it_is_correct(correct, monkeypatch):
    def by_torch(query, key, value, **named):
        return "torch"

    @wraps(by_torch)
    def kernel(query, key, value, **named):
        return "kernel"

    asked = []

    def usable(*given):
        asked.append(given)
        return Kernels(kernel if correct else None, None)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(layers, "usable_kernels", usable)
    query, value = torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 4, 16)
    used = layers._delta_rule(kernel)(query, query, value, g=torch.zeros(1, 3, 4), beta=torch.zeros(1, 3, 4))
    assert used == ("kernel" if correct else "torch")
    assert asked == [("gated_delta", StateSizes(4, 2, 8, 16), torch.device("cpu"), torch.float32)]


def test_a_run_prints_how_recurrent_layers_are_computed(monkeypatch):
    described = partial(outlook.describe_recurrent_layers, shares_prompts=True)
    lfm2 = tiny_config("lfm2", **SETTINGS["lfm2"])
    assert described(lfm2, CPU, "float32") == "convolutions within each sequence"
    once = "each prompt once, its state copied for every completion, by "
    assert described(granite(), CPU, "float32") == f"{once}torch operations"
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(outlook, "usable_kernels", lambda *_: Kernels(None, None, "it is not installed"))
    assert described(granite(), gpu, "bfloat16") == (f"{once}torch operations, because it is not installed")
    monkeypatch.setattr(outlook, "usable_kernels", lambda *_: Kernels(scan_by_token, None))
    assert described(granite(), gpu, "bfloat16") == f"{once}flash-linear-attention"


def test_a_run_does_not_print_that_states_are_copied_if_prompts_are_repeated():
    how = outlook.describe_recurrent_layers(granite(), CPU, "float32", shares_prompts=False)
    assert how == "each prompt again for every completion, by torch operations"


def test_the_memory_estimate_counts_states_in_packs():
    """32 heads with states of 128 x 128 numbers: 2 MiB a completion and layer, kept for one completion in 180 tokens."""
    shape = {"mamba_n_heads": 32, "mamba_d_head": 128, "mamba_d_state": 128, "hidden_size": 2048, "mamba_n_groups": 1}
    config = tiny_config("granitemoehybrid", **{**hybrid_settings("granitemoehybrid"), **shape})
    state, copies = 2 * 2**20 / 180, 2.2 * 32 * 3 * 128 * 2

    def per_token(mode, checkpointing="none"):
        policy = Policy(packing=Packing(mode=mode), activation_checkpointing=checkpointing)
        source = ModelSource("it", Path(), config)
        return estimate_memory(source, policy, torch.device("cuda"), lora=None, precision="bfloat16").per_token

    assert per_token("batch") - per_token("none") == pytest.approx(
        2 * (state + copies)
    )  # two of three layers are recurrent
    full = per_token("batch", "full") - per_token("none", "full")
    assert full == pytest.approx(0.11 * 2 * (state + copies))


def test_torch_operations_need_more_memory_on_a_gpu_in_one_layer_at_a_time(monkeypatch):
    monkeypatch.setattr(outlook, "usable_kernels", lambda *_: Kernels(None, None, "it is not installed"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = torch.device("cuda")
    two, three = (outlook.bytes_per_token(granite(), gpu, "bfloat16", num_layers=num) for num in (2, 3))
    by_torch = 4 * (6 * 8 * 64 + 8 * 8 * 3 * 8)  # 8 heads of 8 x 8
    assert two - 2 * (three - two) == pytest.approx(by_torch)
    on_cpu = outlook.bytes_per_token(granite(), CPU, "float32", num_layers=1)
    assert on_cpu == pytest.approx(4 * 8 * 8 * 8 / 180 + by_torch)


def test_recurrent_layers_are_not_compiled_if_activations_are_recomputed():
    source, cuda = ModelSource("it", Path(), granite()), torch.device("cuda")

    def compiles(**settings):
        return _compiles(Config(policy=Policy(**settings)), cuda, "bfloat16", source)

    assert compiles()
    assert compiles(compile=True)
    assert not compiles(activation_checkpointing="full")
    with pytest.raises(ConfigError) as refused:
        compiles(compile=True, activation_checkpointing="selective")
    assert str(refused.value) == (
        "policy.compile = true: the recurrent layers of it cannot be compiled if activations are recomputed. Use "
        "policy.compile=auto, or policy.activation_checkpointing=none."
    )

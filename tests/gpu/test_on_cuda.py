"""Tests that need a GPU: FlexAttention with tandem's block lists, compiled layers, and steps that do not wait for the device."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import ARCHITECTURES, as_policy, plain_token_logps, random_preference, tiny_model
from running import SHORT, killed_after, largest_difference, metrics_of, short_run, weights_of

from tandem.model.architecture import architecture_of, decoder_layers
from tandem.model.distributed.layers import compile_layers, recompute
from tandem.model.lora.joined import join_adapters
from tandem.packing.layout import lay_out

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# FlexAttention needs a head dimension of at least 16.
HEADS = {"head_dim": 16, "hidden_size": 64}


def preferences(seed=7):
    rng = np.random.default_rng(seed)
    few = [random_preference(rng, num_completions=n) for n in (2, 3, 4)]
    return [*few, random_preference(rng, num_completions=3, max_prompt=200, max_completion=150)]


def adapt(model):
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    # Both matrices are random: if one is zero, the other has no gradient.
    inject_adapter_in_model(LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    join_adapters(model)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_flex_attention_equals_each_sequence_alone(architecture, compiled):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    chosen = preferences()
    model = tiny_model(architecture, **HEADS).to(CUDA)
    want = torch.cat([logp for preference in chosen for logp in plain_token_logps(model, preference)])
    weights = torch.randn(len(want), generator=torch.Generator().manual_seed(1)).to(CUDA)
    (want * weights).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    policy = as_policy(model, head_chunk=64)
    policy.attention = "flex"
    if compiled and architecture_of(model.config).has_experts:
        pytest.skip("float32 experts are not compiled")
    if compiled:
        compile_layers(policy)
    inputs = policy.inputs(lay_out(range(4), chosen, length=1024), CUDA)
    got = policy(inputs)[: inputs.num_scored]
    (got * weights).sum().backward()
    assert (got - want).abs().max().item() < 2e-3
    for name, gradient in expected.items():
        difference = (gradients(model)[name] - gradient).abs().max() / gradient.abs().max()
        assert difference.item() < 5e-3, name


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3_text"])
def test_varlen_attention_equals_dense_attention_up_to_rounding(architecture, compiled):
    torch._dynamo.reset()
    model = tiny_model(architecture, **HEADS).to(CUDA, torch.bfloat16)
    pack = lay_out(range(4), preferences(), length=2048, arrangement="repeated")

    def run(attention, compiling):
        model.zero_grad()
        policy = as_policy(model, head_chunk=64, attention=attention)
        if compiling:
            compile_layers(policy)
        inputs = policy.inputs(pack, CUDA)
        logps = policy(inputs)[: inputs.num_scored]
        logps.sum().backward()
        return logps.detach(), gradients(model)

    want, got = run("sdpa", False), run("varlen", compiled)
    assert ((got[0] - want[0]).norm() / want[0].norm()).item() < 0.01
    for name, gradient in want[1].items():
        assert ((got[1][name] - gradient).norm() / gradient.norm()).item() < 0.05, name


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_a_preference_split_over_rows_with_tool_turns_equals_each_sequence_alone(architecture):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.reset()
    rng = np.random.default_rng(3)
    long = random_preference(rng, num_completions=5, max_prompt=60, max_completion=70)
    unscored = tuple(np.arange(len(c) // 3, len(c) // 2, dtype=np.int32) for c in long.completions)
    long = replace(long, unscored=unscored)
    model = tiny_model(architecture, **HEADS).to(CUDA)
    plain = plain_token_logps(model, long)
    want = torch.cat([logps[torch.from_numpy(long.scored(i)).long()] for i, logps in enumerate(plain)])
    policy = as_policy(model, head_chunk=64)
    policy.attention = "flex"
    compile_layers(policy)
    pack = lay_out([0], [long], length=128)
    assert pack.token_ids.shape[0] > 1
    inputs = policy.inputs(pack, CUDA)
    got = policy(inputs)[: inputs.num_scored]
    got.sum().backward()
    assert (got - want).abs().max().item() < 2e-3


@pytest.mark.parametrize("mode", ["batch", "dataset"])
def test_runs_in_every_packing_mode_agree_with_the_unpacked_run(tmp_path, mode):
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = ["policy.precision=float32", "dpo.max_num_steps=3", "policy.train_global_batch_size=24"]
    if mode == "batch":  # the same preferences in each step, so the same losses
        packed = metrics_of(short_run(tmp_path / "packed", *settings, "policy.packing.pack_length=1024"))
        plain = metrics_of(short_run(tmp_path / "plain", *settings, "policy.packing.mode=none"))
        np.testing.assert_allclose([m["loss"] for m in packed], [m["loss"] for m in plain], rtol=1e-3)
    else:
        found = metrics_of(
            short_run(tmp_path / "whole", *settings, "policy.packing.mode=dataset", "policy.packing.pack_length=1024")
        )
        assert found[0]["loss"] == pytest.approx(0.693147, abs=1e-4)
        assert all(m["num_pairs"] <= 24 for m in found)


@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_compiled_bfloat16_experts_equal_uncompiled_ones(architecture):
    torch._dynamo.reset()
    changes = {**HEADS, "intermediate_size": 64, "moe_intermediate_size": 64}
    policy = as_policy(tiny_model(architecture, **changes).to(CUDA, torch.bfloat16), head_chunk=64)
    policy.attention = "flex"
    inputs = policy.inputs(lay_out(range(4), preferences(), length=1024), CUDA)
    plain = policy(inputs)[: inputs.num_scored]
    plain.sum().backward()
    compile_layers(policy)
    compiled = policy(inputs)[: inputs.num_scored]
    compiled.sum().backward()
    assert (compiled - plain).abs().mean().item() < 0.05


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_all_layers_of_a_kind_share_one_graph(architecture):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = {"num_hidden_layers": 6}
    if architecture == "gemma3_text":
        layers["layer_types"] = ["sliding_attention", "full_attention"] * 3
    policy = as_policy(tiny_model(architecture, **HEADS, **layers).to(CUDA), head_chunk=64)
    policy.attention = "flex"
    compile_layers(policy)
    assert len(decoder_layers(policy.model)) == 6
    for seed in range(3):  # other preferences of the same shapes: nothing is compiled again
        inputs = policy.inputs(lay_out(range(4), preferences(seed), length=1024), CUDA)
        policy(inputs).sum().backward()
    kinds = 1 if architecture == "llama" else 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == kinds


LOSSES = {
    "of pairs": [],
    "over the batch": ["dpo.preference_loss=aot"],
    "weighted": ["dpo.wpo=true", "dpo.ld_alpha=0.5", "dpo.f_divergence=js"],
    "without reference": ["dpo.preference_loss=simpo"],
}


@pytest.mark.parametrize("changes", LOSSES.values(), ids=LOSSES)
def test_a_step_never_waits_for_the_device_and_its_report_waits_for_no_later_step(tmp_path, monkeypatch, changes):
    from tandem.training import trainer

    step, read = trainer.train_step, trainer.PendingStep.read
    calls, waits = [], []

    def watched_step(*arguments, **options):
        calls.append(1)
        # The first steps wait for the device while they compile and load kernels.
        torch.cuda.set_sync_debug_mode("error" if len(calls) > 2 else "default")
        try:
            return step(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def watched_read(*arguments):
        later = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)  # a second of work, queued after the step
        later.record()
        report = read(*arguments)
        waits.append(later.query())
        return report

    monkeypatch.setattr(trainer, "train_step", watched_step)
    monkeypatch.setattr(trainer.PendingStep, "read", watched_read)
    run = short_run(tmp_path / "run", "dpo.max_num_steps=5", "policy.packing.pack_length=1024", *changes)
    assert len(metrics_of(run)) == 5
    assert waits == [False] * 5


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_default_learns_on_the_gpu_as_on_the_cpu(tmp_path, precision):
    run = short_run(
        tmp_path / "run",
        f"policy.precision={precision}",
        "dpo.max_num_steps=12",
        "policy.train_global_batch_size=32",
        "dpo.val_at_start=true",
        "dpo.val_at_end=true",
    )
    first, last = metrics_of(run, "validation-default")
    assert first["loss"] == pytest.approx(0.693147, abs=1e-3 if precision == "bfloat16" else 1e-5)
    assert first["accuracy"] == 0.5
    assert last["accuracy"] > 0.9
    exported = metrics_of(run, "exported-default")[-1]
    assert exported["loss"] == pytest.approx(last["loss"], abs=2e-3)


def test_a_run_resumed_on_the_gpu_has_the_losses_of_the_uninterrupted_run(tmp_path):
    saving = ["checkpointing.save_period=2", "dpo.max_num_steps=6"]
    whole = metrics_of(short_run(tmp_path / "whole", *saving))
    with killed_after(3):
        short_run(tmp_path / "cut", *saving)
    cut = metrics_of(short_run(tmp_path / "cut", *saving))
    np.testing.assert_allclose([m["loss"] for m in cut], [m["loss"] for m in whole], rtol=1e-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_a_rank_without_preferences_has_zero_gradients(architecture, compiled):
    torch._dynamo.reset()
    policy = as_policy(tiny_model(architecture, **HEADS).to(CUDA), head_chunk=64)
    policy.attention = "flex"
    if compiled and policy.architecture.has_experts:
        pytest.skip("float32 experts are not compiled")
    if compiled:
        compile_layers(policy)
    inputs = policy.inputs(lay_out([], [], length=256), CUDA)
    policy(inputs)[: inputs.num_scored].sum().backward()
    for name, gradient in gradients(policy).items():
        assert not gradient.any(), name
    assert len(gradients(policy)) == len(list(policy.parameters()))


def test_sdpa_and_flex_train_with_the_same_losses(tmp_path):
    runs = {
        how: short_run(tmp_path / how, f"policy.attention={how}", "policy.precision=float32")
        for how in ("flex", "sdpa")
    }
    for one, other in zip(*(metrics_of(run) for run in runs.values()), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)


@pytest.mark.parametrize("adapted", [False, True])
def test_recomputation_keeps_less_memory_and_gives_the_same_gradients(adapted):
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_hidden_layers": 4}
    rng = np.random.default_rng(0)
    pack = lay_out([0], [random_preference(rng, max_prompt=200, max_completion=150)], length=4096)
    kept, found = {}, {}
    for how in ("none", "selective", "full"):
        torch._dynamo.reset()
        policy = as_policy(tiny_model("llama", **shape).to(CUDA), head_chunk=64)
        if adapted:
            adapt(policy.model)
        policy.attention = "flex"
        if how != "none":
            recompute(policy, how)
        compile_layers(policy)
        inputs = policy.inputs(pack, CUDA)
        policy(inputs)[: inputs.num_scored].sum().backward()  # compiles
        policy.zero_grad()
        before = torch.cuda.memory_allocated()
        loss = policy(inputs)[: inputs.num_scored].sum()
        kept[how] = torch.cuda.memory_allocated() - before
        loss.backward()
        found[how] = gradients(policy)
    assert kept["none"] > 1.2 * kept["selective"] > 1.2 * 1.5 * kept["full"], kept
    for how in ("selective", "full"):
        for name, gradient in found["none"].items():
            difference = (found[how][name] - gradient).abs().max() / gradient.abs().max()
            assert difference.item() < 1e-4, (how, name)


def test_a_deterministic_run_that_was_killed_resumes_bit_for_bit(tmp_path):
    """Runs in separate processes: the setting that makes cuBLAS deterministic must be made before its first use."""
    settings = [*SHORT, "dpo.max_num_steps=6", "checkpointing.save_period=2", "run.deterministic=true"]

    def run(name, **environment):
        command = [sys.executable, "-m", "tandem", "train", "-q", *settings, f"run.dir={tmp_path / name}"]
        return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)

    whole = run("whole")
    assert whole.returncode == 0, whole.stderr
    assert run("cut", TANDEM_FAIL_AT="step.done:5").returncode == -signal.SIGKILL
    cut = run("cut")
    assert cut.returncode == 0, cut.stderr
    assert metrics_of(tmp_path / "cut") == metrics_of(tmp_path / "whole")
    assert largest_difference(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole")) == 0.0


def test_a_run_records_its_gpu_memory_and_writes_its_page(tmp_path):
    run = short_run(tmp_path / "run", "dpo.val_at_end=true")
    used = [record["memory_gib"] for record in metrics_of_everything(run)]
    assert all(0 < gib < 200 for gib in used)
    assert used == sorted(used)  # the peak so far
    page = (run / "report.html").read_text()
    assert torch.cuda.get_device_name() in (run / "setup.json").read_text() and ">finished<" in page


def metrics_of_everything(run):
    return [
        record
        for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if record["split"] == "train"
    ]

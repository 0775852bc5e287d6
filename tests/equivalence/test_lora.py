"""Adapters: new adapters do not change the model, packing does not change the result, and merging keeps the model."""

import json
import math
import os
import shutil
from pathlib import Path

import adapters
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from adapters import plain_losses, plain_model, trained_adapter, with_adapter
from models import MODEL, as_policy, plain_token_logps, random_preference, tiny_model
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from running import killed_after, largest_difference, metrics_of, short_run, weights_of
from safetensors.torch import load_file

from tandem.embedded.files import TRAIN, VALIDATION
from tandem.errors import CheckpointError, ConfigError
from tandem.model.architecture import decoder_layers, head_of
from tandem.model.distributed.layers import shard
from tandem.model.distributed.process_group import join_process_group
from tandem.model.files.tiny import tiny_model as embedded_model
from tandem.model.lora.adapters import load_adapted
from tandem.model.reference import CachedReference
from tandem.packing.layout import lay_out
from tandem.storage.cache import read_manifest
from tandem.training.checkpoint.parts import names_in

CPU = torch.device("cpu")
LORA = ["policy.lora.enabled=true", "policy.lora.dim=4"]
SMALL = [*LORA, "policy.lora.target_modules=[q_proj,v_proj]"]
FEW = Path(os.environ["TANDEM_CACHE"])
# A reference of few rows is quickly computed; the settings are those of the embedded default.
DATA = [
    f"data.train.data_path={FEW}/few-train.jsonl",
    f"data.validation.data_path={FEW}/few-validation.jsonl",
    "policy.max_total_sequence_length=512",
    "policy.optimizer.kwargs.lr=1e-3",
    "policy.optimizer.kwargs.weight_decay=0.01",
]
for file, num in ((TRAIN, 48), (VALIDATION, 24)):
    rows = file.read_text(encoding="utf-8").splitlines(keepends=True)[:num]
    (FEW / f"few-{file.name}").write_text("".join(rows), encoding="utf-8")


def run_few(folder, *overrides):
    return short_run(folder, *DATA, *overrides)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter as after an SFT run: both matrices of each layer are far from 0."""
    return trained_adapter(MODEL, tmp_path_factory.mktemp("sft") / "adapter")


def set_up_with(*overrides):
    return adapters.set_up_with(*DATA, *overrides)


def cached_values(cache, setup, besides):
    """The cached reference values of the training set, from the only new cache folder."""
    places = [path for path in cache.iterdir() if path.name not in besides]
    (place,) = [path for path in places if read_manifest(path)["tokens"] == setup.plan.train.store.fingerprint]
    values = np.fromfile(place / "logps.f32", np.float32)
    return CachedReference(values, np.cumsum(setup.plan.train.store.num_scored_tokens))


def assert_cached_is(model, cache, setup, *, besides=(), indices=(0, 7, 40)):
    """Check that the cached values equal the plain forward pass of the model, one sequence at a time."""
    cached = cached_values(cache, setup, besides)
    with torch.no_grad():
        for index in indices:
            want = torch.cat(plain_token_logps(model, setup.plan.train.store[index]))
            torch.testing.assert_close(torch.from_numpy(cached.of_preference(index)), want, atol=2e-5, rtol=0)


# In the model


def adapted_model(architecture, **settings):
    """A model with random adapters, so that they have an effect."""
    model = tiny_model(architecture)
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=5, target_modules=linear, **settings), model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2", "qwen3_moe"])
def test_packed_logps_and_gradients_equal_each_sequence_alone_with_adapters(architecture):
    rng = np.random.default_rng(7)
    preferences = [random_preference(rng, num_completions=n) for n in (2, 3, 4)]
    model = adapted_model(architecture)
    outer = torch.randn(1000, generator=torch.Generator().manual_seed(1))

    def gradients(logps):
        model.zero_grad()
        (logps * outer[: len(logps)]).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = torch.cat([logps for preference in preferences for logps in plain_token_logps(model, preference)])
    want = gradients(plain)
    policy = as_policy(model)
    inputs = policy.inputs(lay_out(range(3), preferences, length=256), CPU)
    packed = policy(inputs)[: inputs.num_scored]
    got = gradients(packed)
    torch.testing.assert_close(packed, plain, atol=2e-5, rtol=0)
    assert got.keys() == want.keys() == {name for name, _ in model.named_parameters() if ".lora_" in name}
    for name, gradient in want.items():
        assert (got[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max() + 1e-9, name


@pytest.mark.parametrize(("dropout", "tolerance"), [(0.3, 0.0), (0.0, 1e-5)])
def test_new_adapters_change_nothing(dropout, tolerance):
    """With dropout, adapters are separate products and change no bit. Without, they are joined to the product of their layer,
    which changes the order of sums.
    """
    overrides = [*LORA, f"policy.lora.dropout={dropout}"]
    setup, ranks = set_up_with(*overrides), join_process_group()
    base = as_policy(plain_model(MODEL), head_chunk=8192)
    adapted = load_adapted(setup.source, setup.config.policy, CPU, setup.lora)
    adapted.head = head_of(adapted.model, chunk=8192)
    pack = next(setup.plan.train.micro_batches(np.arange(4)))
    shard(adapted, ranks, bfloat16=False)
    with torch.no_grad():
        ours, plain = adapted(adapted.inputs(pack, CPU)), base(base.inputs(pack, CPU))
    torch.testing.assert_close(ours, plain, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_layers_with_adapters_compile_without_graph_breaks(dropout):
    """In bfloat16 over frozen weights. The results are the same without gradients."""
    torch._dynamo.reset()
    setup = set_up_with(*LORA, f"policy.lora.dropout={dropout}", "policy.precision=bfloat16")
    policy = shard(
        load_adapted(setup.source, setup.config.policy, CPU, setup.lora), join_process_group(), bfloat16=True
    )
    inputs = policy.inputs(next(setup.plan.train.micro_batches(np.arange(2))), CPU)
    with torch.no_grad():
        want = policy(inputs)
    for layer in decoder_layers(policy.model):
        layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(policy(inputs), want)
    with policy.computing():
        policy(inputs).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for _, p in policy.trained())
    torch._dynamo.reset()


# In a run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that saves checkpoints and exports only adapters, with a cache filled by an earlier run of all weights."""
    folder = tmp_path_factory.mktemp("lora")
    cache = f"reference.cache_dir={folder}/cache"
    full = run_few(folder / "full", cache, "dpo.max_num_steps=1")
    kept = {path.name for path in (folder / "cache").iterdir()}
    run = run_few(folder / "run", cache, *SMALL, "export.merge_lora=false", "dpo.val_at_end=true")
    assert {path.name for path in (folder / "cache").iterdir()} == kept
    return folder, full, run


def test_adapters_start_as_the_base_model_and_share_its_cached_reference(trained):
    folder, full, run = trained
    first, theirs = metrics_of(run)[0], metrics_of(full)[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["accuracy"] == 0.5
    assert first["logps_chosen_mean"] == pytest.approx(theirs["logps_chosen_mean"], abs=1e-6)
    assert_cached_is(plain_model(MODEL), folder / "cache", set_up_with())


def test_a_run_trains_the_same_adapters_as_peft_in_a_plain_loop(trained):
    """The plain loop uses the peft model, one sequence at a time, full logits, and peft without adapters as the reference."""
    _, _, run = trained
    setup = set_up_with(*SMALL)
    torch.manual_seed(42)
    settings = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(plain_model(MODEL), settings)
    base = plain_model(MODEL)
    own = load_adapted_start(setup)
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(own[name.removeprefix("base_model.model.")])
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98), eps=1e-5)
    losses = plain_losses(model, base, setup, optimizer)
    np.testing.assert_allclose([line["loss"] for line in metrics_of(run)], losses, rtol=2e-5)
    want = {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if p.requires_grad}
    assert largest_difference(load_file(run / "model" / "adapter_model.safetensors"), want) < 2e-4


def load_adapted_start(setup):
    """The model with the same initial adapters as the run: sets the seed, then loads the model."""
    torch.manual_seed(setup.config.run.seed)
    policy = load_adapted(setup.source, setup.config.policy, CPU, setup.lora)
    return {name.removeprefix("model."): parameter.detach() for name, parameter in policy.trained()}


def test_checkpoints_hold_adapters_and_nothing_frozen(trained):
    _, _, run = trained
    tensors = run / "checkpoints" / "step_4" / "tensors"
    names = names_in(tensors)
    weights = {name for name in names if name.startswith("policy.")}
    assert len(weights) == 2 * 2 * 2  # layers, targets, A and B
    assert all(".lora_" in name for name in names if not name.startswith("random."))
    # 1,792 numbers three times; the whole model would be 1 MB.
    assert sum(file.stat().st_size for file in tensors.iterdir()) < 100_000


def test_exported_adapters_load_in_peft_with_the_same_logps(trained):
    folder, _, run = trained
    setup = set_up_with()
    model = AutoPeftModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32, attn_implementation="eager")
    by_hand = PeftModel.from_pretrained(plain_model(MODEL), run / "model")
    merged_run = run_few(folder / "merged", f"reference.cache_dir={folder}/cache", *SMALL, "dpo.val_at_end=true")
    merged = plain_model(merged_run / "model")
    base = plain_model(MODEL)
    with torch.no_grad():
        for index in (0, 7, 40):
            preference = setup.plan.train.store[index]
            adapted = torch.cat(plain_token_logps(model, preference))
            torch.testing.assert_close(torch.cat(plain_token_logps(by_hand, preference)), adapted, atol=0, rtol=0)
            torch.testing.assert_close(torch.cat(plain_token_logps(merged, preference)), adapted, atol=1e-5, rtol=0)
            assert (torch.cat(plain_token_logps(base, preference)) - adapted).abs().max() > 1e-3
    # What was exported is measured, either way, and is what is in memory.
    for one in (run, merged_run):
        memory, exported = (metrics_of(one, f"{split}-default")[-1] for split in ("validation", "exported"))
        assert exported["rewards_margin_mean"] == pytest.approx(memory["rewards_margin_mean"], abs=1e-5)
        assert exported["loss"] == pytest.approx(memory["loss"], abs=1e-5)
    # A merged model differs from the base where the adapters are and nowhere else.
    start, end = load_file(MODEL / "model.safetensors"), weights_of(merged_run)
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved == {f"model.layers.{i}.self_attn.{one}.weight" for i in range(2) for one in ("q_proj", "v_proj")}


@pytest.mark.bfloat16
def test_a_float16_model_is_frozen_in_bfloat16_if_computation_is_in_bfloat16(tmp_path):
    start = shutil.copytree(MODEL, tmp_path / "float16")
    plain_model(start).to(torch.float16).save_pretrained(start)
    settings = [*SMALL, f"policy.model_name={start}", "policy.precision=bfloat16", "dpo.max_num_steps=1"]
    setup = set_up_with(*settings)
    assert setup.source.dtype == torch.float16 and setup.lora.dtype == torch.bfloat16
    run = run_few(tmp_path / "run", *settings)
    assert metrics_of(run)[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert {tensor.dtype for tensor in weights_of(run).values()} == {torch.float16}


@pytest.mark.bfloat16
def test_float32_and_frozen_bfloat16_weights_do_not_share_a_cached_reference(tmp_path):
    # Where config.json names bfloat16 and the files hold float32, whole weights load as they are, frozen ones rounded.
    start = shutil.copytree(MODEL, tmp_path / "float32")
    described = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(described | {"dtype": "bfloat16"}))
    settings = [f"policy.model_name={start}", f"reference.cache_dir={tmp_path}/cache", "dpo.max_num_steps=1"]
    for run, lora in (("whole", []), ("adapters", SMALL)):
        lines = metrics_of(run_few(tmp_path / run, *settings, *lora, "policy.precision=bfloat16"))
        assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-4), run


def test_merging_into_bfloat16_keeps_the_training_result(tmp_path):
    start = shutil.copytree(
        embedded_model(), tmp_path / "start"
    )  # with enough weights that random rounding averages out
    plain_model(start).to(torch.bfloat16).save_pretrained(start)
    gentle = ["policy.optimizer.kwargs.lr=5e-6", "policy.optimizer.kwargs.weight_decay=0", "dpo.max_num_steps=6"]
    common = [*LORA, *gentle, "dpo.val_at_end=true", "checkpointing.enabled=false", f"policy.model_name={start}"]
    kept, lost = (run_few(tmp_path / one, *common, f"export.rounding={one}") for one in ("stochastic", "nearest"))

    def margin(run, split):
        return metrics_of(run, split)[-1]["rewards_margin_mean"]

    learned = margin(kept, "validation-default")
    assert weights_of(kept)["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert margin(lost, "validation-default") == learned > 0
    assert margin(kept, "exported-default") == pytest.approx(learned, rel=0.25)
    assert margin(lost, "exported-default") < 0.5 * learned


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit_dropout_included(tmp_path):
    settings = [*SMALL, "policy.lora.dropout=0.2", "checkpointing.save_period=2", "export.merge_lora=false"]
    whole = run_few(tmp_path / "whole", *settings)
    with killed_after(3):
        run_few(tmp_path / "cut", *settings)
    cut = run_few(tmp_path / "cut", *settings)
    assert metrics_of(cut) == metrics_of(whole)
    files = [load_file(run / "model" / "adapter_model.safetensors") for run in (cut, whole)]
    assert largest_difference(*files) == 0.0


def test_recomputed_layers_use_the_same_dropout(tmp_path):
    settings = [*SMALL, "policy.lora.dropout=0.2", "dpo.max_num_steps=2", "checkpointing.enabled=false"]
    kept, again = (
        metrics_of(run_few(tmp_path / how, *settings, f"policy.activation_checkpointing={how}"))
        for how in ("none", "full")
    )
    assert [line["loss"] for line in again] == pytest.approx([line["loss"] for line in kept], rel=1e-6)
    assert [line["grad_norm"] for line in again] == pytest.approx([line["grad_norm"] for line in kept], rel=1e-5)


# A trained adapter as the start, and as the reference


@pytest.mark.parametrize("mode", ["cached", "live"])
def test_a_trained_adapter_is_the_start_and_the_reference(adapter, tmp_path, mode):
    settings = ["policy.lora.enabled=true", f"policy.lora.adapter={adapter}", f"reference.mode={mode}"]
    cache = tmp_path / "cache"
    run = run_few(tmp_path / "run", *settings, f"reference.cache_dir={cache}", "dpo.max_num_steps=2")
    first, second = metrics_of(run)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["accuracy"] == 0.5
    assert abs(second["loss"] - first["loss"]) > 1e-5  # the start moved, the reference did not
    setup = set_up_with(*settings)
    by_peft = with_adapter(MODEL, adapter)
    if mode == "cached":
        assert_cached_is(by_peft, cache, setup)
    chosen = [setup.plan.train.store[int(i)] for i in setup.plan.batches.epoch(0)[0].preferences]
    with torch.no_grad():
        sums = [plain_token_logps(by_peft, preference)[0].sum().item() for preference in chosen]
    assert first["logps_chosen_mean"] == pytest.approx(np.mean(sums), rel=1e-6)


def test_dropout_affects_neither_the_reference_nor_the_audit(adapter, tmp_path):
    """With a trained adapter, dropout would change the result. The reference equals peft in evaluation mode."""
    settings = ["policy.lora.enabled=true", f"policy.lora.adapter={adapter}", "policy.lora.dropout=0.5"]
    cache = tmp_path / "cache"
    run = run_few(tmp_path / "run", *settings, f"reference.cache_dir={cache}", "dpo.max_num_steps=1")
    assert_cached_is(with_adapter(MODEL, adapter).eval(), cache, set_up_with(*settings))
    assert abs(metrics_of(run)[0]["loss"] - math.log(2)) > 1e-4  # the training step itself draws it


# Another model as the reference


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model from an earlier round: the embedded model with changed weights."""
    folder = shutil.copytree(MODEL, tmp_path_factory.mktemp("other") / "model")
    model = plain_model(folder)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def test_another_model_is_the_reference(other, tmp_path):
    cache = tmp_path / "cache"
    run_few(tmp_path / "own", f"reference.cache_dir={cache}", "dpo.max_num_steps=1")
    own = {path.name for path in cache.iterdir()}
    settings = [f"reference.model={other}", f"reference.cache_dir={cache}", "dpo.max_num_steps=2"]
    cached = run_few(tmp_path / "cached", *settings)
    live = run_few(tmp_path / "live", *settings, "reference.mode=live")
    setup = set_up_with(f"reference.model={other}")
    assert_cached_is(plain_model(other), cache, setup, besides=own)
    for a, b in zip(metrics_of(cached), metrics_of(live), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    base, frozen = plain_model(MODEL), plain_model(other)
    losses = []
    with torch.no_grad():
        for index in setup.plan.batches.epoch(0)[0].preferences:
            preference = setup.plan.train.store[int(index)]
            (chosen, rejected), (ref_chosen, ref_rejected) = (
                [logps.sum() for logps in plain_token_logps(model, preference)] for model in (base, frozen)
            )
            losses.append(-F.logsigmoid(0.1 * ((chosen - ref_chosen) - (rejected - ref_rejected))))
    assert metrics_of(cached)[0]["loss"] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)


def test_the_base_model_can_be_the_reference_of_a_trained_adapter(adapter, tmp_path):
    settings = ["policy.lora.enabled=true", f"policy.lora.adapter={adapter}", f"reference.model={MODEL}"]
    cache = tmp_path / "cache"
    run_few(tmp_path / "run", *settings, f"reference.cache_dir={cache}", "dpo.max_num_steps=1")
    assert_cached_is(plain_model(MODEL), cache, set_up_with(*settings))


def test_a_cached_reference_needs_no_second_model_in_memory(other, tmp_path, monkeypatch):
    settings = [f"reference.model={other}", f"reference.cache_dir={tmp_path}/cache", "dpo.max_num_steps=1"]
    run_few(tmp_path / "one", *settings, "checkpointing.enabled=false")
    from tandem.training.start import references

    loaded, load = [], references.load_policy
    monkeypatch.setattr(
        references, "load_policy", lambda *given, **how: loaded.append(given[0].folder) or load(*given, **how)
    )
    run_few(tmp_path / "two", *settings, "checkpointing.enabled=false")
    assert loaded == [MODEL]


def test_a_reference_that_changed_since_is_refused_on_resume(other, tmp_path):
    mine = shutil.copytree(other, tmp_path / "mine")
    settings = [f"reference.model={mine}", "checkpointing.save_period=1"]
    with killed_after(2):
        run_few(tmp_path / "run", *settings)
    weights = mine / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="the reference model changed since this checkpoint was saved"):
        run_few(tmp_path / "run", *settings)


def test_a_reference_with_another_vocabulary_is_refused(tmp_path):
    from models import tiny_config
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError) as refused:
        set_up_with(f"reference.model={tmp_path}/small")
    assert str(refused.value) == (
        f"reference.model = {tmp_path}/small: its vocabulary has 96 tokens and that of {MODEL} has 2048, but policy and "
        "reference must read the same tokens. Choose a reference with the same vocabulary."
    )
    with pytest.raises(ConfigError) as refused:
        set_up_with("reference.model=./nowhere")
    assert str(refused.value) == "reference.model = ./nowhere: no such directory. Check the path."


def test_a_reference_with_a_different_tokenizer_is_refused(other, tmp_path):
    mine = shutil.copytree(other, tmp_path / "mine")
    text = (mine / "tokenizer.json").read_text(encoding="utf-8")
    (mine / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|sm_trait|>"), encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        set_up_with(f"reference.model={mine}")
    assert str(refused.value) == (
        f"reference.model = {mine}: token 1 is '<|sm_trait|>' in its tokenizer and '<|im_start|>' in the policy's, but "
        "policy and reference must read the same tokens. Choose a reference with the same vocabulary."
    )

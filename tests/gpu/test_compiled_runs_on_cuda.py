"""Runs with compiled layers: nothing compiles after the first step, and what models of several kinds train and export."""

import gc
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import graphs_during_a_run
from models import model_folder
from multimodal import multimodal_folder, stored_tensors
from running import SHORT, few_pairs, metrics_of, short_run
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tandem.config.load import load_config
from tandem.model.files.tiny import tiny_model
from tandem.planning.plan import plan

pytestmark = pytest.mark.gpu
# FlexAttention needs a head dimension of at least 16.
HEADS: Any = {"head_dim": 16, "hidden_size": 64}
LORA = "policy.lora.enabled=true"
BALANCED = "dpo.router_aux_loss_coef=0.01"
SELECTIVE = "policy.activation_checkpointing=selective"
RUNS = {
    "all weights": ("llama", []),
    "windows": ("gemma3_text", []),
    "two rows at a time": ("llama", ["policy.packing.packs_per_micro_batch=2", "policy.packing.pack_length=256"]),
    "adapters, reference in memory": ("llama", [LORA, "reference.mode=live"]),
    "recomputed": ("llama", [SELECTIVE]),
    "over the batch": ("llama", ["dpo.preference_loss=aot"]),
    "experts": ("gpt_oss", []),
    "balanced experts": ("qwen3_moe", [BALANCED]),
    "balanced and recomputed experts": ("qwen3_moe", [BALANCED, SELECTIVE]),
    "only attention is compiled": ("llama", ["policy.compile=false"]),
}


@pytest.mark.parametrize(("architecture", "settings"), RUNS.values(), ids=RUNS)
def test_nothing_is_compiled_after_the_first_step(architecture, settings, tmp_path):
    model = model_folder(tmp_path / "model", architecture, **HEADS)
    seen = graphs_during_a_run(tmp_path, f"policy.model_name={model}", *settings)
    assert len(seen) > 4
    assert min(seen) == max(seen) > 0


def test_the_loss_of_routers_is_the_same_with_and_without_compiled_and_recomputed_layers(tmp_path):
    model = model_folder(tmp_path / "model", "qwen3_moe", initializer_range=0.05, **HEADS)
    common = [f"policy.model_name={model}", few_pairs(tmp_path), "dpo.router_aux_loss_coef=0.5"]
    lines = {
        name: metrics_of(short_run(tmp_path / name, *common, *settings))
        for name, settings in {
            "plain": ["policy.compile=false"],
            "compiled": ["policy.compile=true"],
            "recomputed": ["policy.compile=true", SELECTIVE],
        }.items()
    }
    for name in ("compiled", "recomputed"):
        for this, that in zip(lines[name], lines["plain"], strict=True):
            assert this["router_aux_loss"] == pytest.approx(that["router_aux_loss"], rel=0.01)
            assert this["loss"] == pytest.approx(that["loss"], rel=0.02)


@pytest.mark.parametrize(
    "settings",
    [
        ["policy.lora.modules_to_save=[lm_head,embed_tokens]"],
        ["policy.lora.modules_to_save=[lm_head]", "policy.lora.quantization=nf4"],
    ],
    ids=["bfloat16", "nf4"],
)
def test_modules_that_adapters_train_in_full_start_at_the_base_model_within_the_expected_memory(settings, tmp_path):
    if "nf4" in settings[-1]:
        pytest.importorskip("bitsandbytes")
    folder = model_folder(tmp_path / "start", "llama", hidden_size=256, intermediate_size=512, head_dim=64)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    given = [f"policy.model_name={folder}", few_pairs(tmp_path), LORA, "policy.optimizer.kwargs.lr=1e-3"]
    given += [*settings, "dpo.val_at_end=true", "data.validation_share=0.2"]
    expected = plan(load_config(None, [*SHORT, f"run.dir={tmp_path}/run", *given])).memory
    gc.collect()  # what the tests before have left
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run = short_run(tmp_path / "run", *given)
    peak = torch.cuda.max_memory_allocated() - held
    # The estimate of logits is for large vocabularies. What stays, such as weights and states, is there in any case.
    assert expected.total - expected.head - expected.activations < 1.1 * peak < 1.1 * expected.total
    lines = metrics_of(run)
    assert abs(lines[0]["loss"] - math.log(2)) < 2e-3
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl", "qwen3_5", "mistral3"])
def test_the_text_model_of_a_multimodal_checkpoint_trains_compiled_and_is_exported_complete(family, tmp_path):
    base = multimodal_folder(tmp_path / "base", family, **HEADS)
    given = [f"policy.model_name={base}", few_pairs(tmp_path), "policy.optimizer.kwargs.lr=1e-2"]
    run = short_run(tmp_path / "run", *given, "data.validation_share=0.2", "dpo.val_at_end=true")
    before, after = stored_tensors(base), stored_tensors(run / "model")
    assert after.keys() == before.keys()
    changed = [name for name in before if not torch.equal(after[name], before[name])]
    assert changed
    assert not any(part in name for name in changed for part in ("vision", "visual", "projector"))
    multimodal: Any = AutoModelForImageTextToText
    _, found = multimodal.from_pretrained(run / "model", output_loading_info=True)
    assert not any(found.values()), found
    assert abs(metrics_of(run)[0]["loss"] - math.log(2)) < 5e-3


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_states_in_host_memory_give_the_same_weights_bit_for_bit(state_dtype, tmp_path):
    common = ["run.deterministic=true", f"policy.optimizer.state_dtype={state_dtype}", few_pairs(tmp_path)]
    common += [f"policy.model_name={tiny_model()}", "policy.compile=false", "checkpointing.save_period=2"]
    runs = [
        short_run(tmp_path / offload, *common, f"policy.optimizer.offload={offload}") for offload in ("true", "false")
    ]
    files = [Path(run) / "model/model.safetensors" for run in runs]
    assert files[0].read_bytes() == files[1].read_bytes()
    again = tmp_path / "again"
    shutil.copytree(runs[0], again, symlinks=True)
    shutil.rmtree(again / "model")
    shutil.rmtree(again / "checkpoints/step_4")
    for link in ("latest", "best"):
        (again / "checkpoints" / link).unlink(missing_ok=True)
    (again / "checkpoints/latest").symlink_to("step_2")
    short_run(again, *common, "policy.optimizer.offload=true")
    assert (again / "model/model.safetensors").read_bytes() == files[1].read_bytes()

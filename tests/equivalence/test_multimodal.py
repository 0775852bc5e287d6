"""Of a multimodal checkpoint the text model is trained as if it were alone, and all other parts are exported byte for byte."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import table
from models import as_policy, plain_token_logps, random_preference
from multimodal import FAMILIES, OTHER_TYPES, PROCESSOR, multimodal_folder, stored_tensors
from peft import PeftModel
from running import SHORT, few_pairs, metrics_of, short_run
from safetensors.torch import load_file
from together import run_together
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tandem.config.load import load_config
from tandem.evaluation.evaluate import evaluate
from tandem.exporting.checkpoint import export
from tandem.generation.generate import generate
from tandem.generation.records import make_sampling
from tandem.model.architecture import auto_class, has_layer_list
from tandem.model.files.source import find_source
from tandem.packing.layout import lay_out
from tandem.training.memory import estimate_memory

CPU = torch.device("cpu")
OTHER_PARTS = (
    *("vision", "visual", "vit.", "audio", "tower", "projector", "connector", "aligner", "merger", "image_newline"),
    *("patch_merge_mlp", "mlp_AR", "mlp1."),  # as weight files name them
)
TWO_STEPS = ["policy.max_total_sequence_length=256", "policy.optimizer.kwargs.lr=1e-2", "dpo.max_num_steps=2"]
UNPACKED = [name for name in (*FAMILIES, *OTHER_TYPES) if table()[name][0] != "exact"]
# Types in which peft takes the linear layers of a dense network for parts of experts: they are refused as adapted layers.
MIXED_EXPERTS = ("glm4v_moe",)
slow = pytest.mark.slow
# One whose files name the weights differently; the others take minutes.
SOME = [family if family == "gemma3" else pytest.param(family, marks=slow) for family in (*FAMILIES, *OTHER_TYPES)]


def is_text(name: str) -> bool:
    return not any(part in name for part in OTHER_PARTS)


def settings(folder: Path, base: Path) -> list[str]:
    model_type = json.loads((base / "config.json").read_text())["model_type"] if base.name == "base" else None
    unpacked = ["policy.packing.mode=none"] if model_type in UNPACKED else []
    return [f"policy.model_name={base}", *TWO_STEPS, few_pairs(folder, 20), *unpacked]


def complete_model(folder: Path):
    """The checkpoint in its own class. Fails if a weight is missing or unexpected."""
    model, found = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(found.values()), found
    return model


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("arrangement", ["shared", "separate"])
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=slow) for name in OTHER_TYPES)])
def test_packs_equal_the_complete_model_on_each_sequence_alone(family, arrangement, tmp_path):
    rng = np.random.default_rng(7)
    preferences = [random_preference(rng, num_completions=n, max_prompt=30, max_completion=20) for n in (2, 3)]
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    base = multimodal_folder(tmp_path, family, tied=arrangement == "shared")
    complete = complete_model(base)
    want = torch.cat([logps for preference in preferences for logps in plain_token_logps(complete, preference)])
    (want * weights[: len(want)]).sum().backward()
    text = auto_class(complete.config).from_pretrained(base, dtype=torch.float32)
    packed = family not in UNPACKED
    policy = as_policy(text, packed=packed)
    pack = lay_out(range(2), preferences, length=256, arrangement=arrangement if packed else "separate")
    inputs = policy.inputs(pack, CPU)
    got = policy(inputs)[: inputs.num_scored]
    (got * weights[: len(got)]).sum().backward()
    torch.testing.assert_close(got, want, atol=3e-5, rtol=0)
    assert has_layer_list(text)
    assert {name for name, _ in text.named_parameters()} == {n for n, _ in complete.named_parameters() if is_text(n)}
    assert gradients(text).keys() == gradients(complete).keys()
    for name, gradient in gradients(complete).items():
        assert (gradients(text)[name] - gradient).abs().max() <= 2e-4 * gradient.abs().max() + 1e-9, name


def assert_exported(base: Path, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Check that an export loads in its own class, and that only the text model differs from the start model."""
    before, after = stored_tensors(base), stored_tensors(folder)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        if is_text(name):
            assert after[name].dtype == dtype, name
        else:
            assert after[name].dtype == tensor.dtype, name
            assert torch.equal(after[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert any(not torch.equal(after[name].float(), before[name].float()) for name in before if is_text(name))
    configs = [json.loads((place / "config.json").read_text()) for place in (base, folder)]
    assert configs[1]["architectures"] == configs[0]["architectures"]
    assert configs[1].get("vision_config") == configs[0].get("vision_config")
    for name, text in PROCESSOR.items():
        assert (folder / name).read_text() == text
    complete_model(folder)


def assert_run_exports(family: str, tmp_path: Path, *, as_in_model: bool) -> None:
    base = multimodal_folder(tmp_path / "base", family, tied=not as_in_model, as_in_model=as_in_model)
    dtype = "float32" if as_in_model else "auto"
    more = [f"export.dtype={dtype}", "data.validation_share=0.2", "dpo.val_at_end=true", "export.max_shard_size=100KB"]
    run = short_run(tmp_path / "run", *settings(tmp_path, base), *more)
    assert_exported(base, run / "model", dtype=torch.float32 if as_in_model else torch.bfloat16)
    memory, exported = (metrics_of(run, f"{split}-default")[-1] for split in ("validation", "exported"))
    assert exported["loss"] == pytest.approx(memory["loss"], abs=1e-5 if as_in_model else 0.05)
    files = list((run / "model").glob("*.safetensors"))
    # A tensor is not divided, however large it is.
    assert len(files) > 2 and all(file.stat().st_size < 150_000 or len(load_file(file)) == 1 for file in files)
    card = (run / "model" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    assert 'AutoModelForImageTextToText.from_pretrained("FOLDER_OR_REPO")' in card


@pytest.mark.parametrize("family", SOME)
def test_a_run_exports_the_complete_checkpoint(family, tmp_path):
    assert_run_exports(family, tmp_path, as_in_model=False)


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_that_names_weights_as_the_model_does_is_exported_with_these_names(family, tmp_path):
    assert_run_exports(family, tmp_path, as_in_model=True)


def test_the_memory_of_the_text_model_alone_is_counted(tmp_path):
    base = multimodal_folder(tmp_path, "gemma3")
    source = find_source("policy.model_name", str(base), None)
    policy = load_config(None, [f"policy.model_name={base}", "data.train.data_path=embedded"]).config.policy
    need = estimate_memory(source, policy, CPU, lora=None, precision="float32")
    assert need.num_weights == sum(p.numel() for n, p in complete_model(base).named_parameters() if is_text(n))


@pytest.mark.parametrize("family", SOME)
def test_adapters_are_in_the_text_model_and_load_on_the_complete_model(family, tmp_path):
    base = multimodal_folder(tmp_path / "base", family)
    lora = [*settings(tmp_path, base), "policy.lora.enabled=true", "policy.lora.dim=4", "run.seed=3"]
    if family in MIXED_EXPERTS:
        lora.append("policy.lora.exclude_modules=[down_proj,gate_proj,up_proj]")
    runs = {
        merged: short_run(tmp_path / f"merged-{merged}", *lora, f"export.merge_lora={merged}", "export.dtype=float32")
        for merged in ("true", "false")
    }
    assert_exported(base, runs["true"] / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(complete_model(base), runs["false"] / "model")
    names = {name for name, _ in adapted.named_parameters() if "lora_" in name}
    assert names
    assert all(is_text(name) for name in names)
    stored = stored_adapter(runs["false"] / "model")
    assert {name.replace(".default", "") for name in names} == stored.keys()
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            assert torch.equal(weight, stored[name.replace(".default", "")])
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        want = complete_model(runs["true"] / "model")(input_ids=ids).logits
        torch.testing.assert_close(adapted(input_ids=ids).logits, want, atol=1e-4, rtol=0)
        assert (complete_model(base)(input_ids=ids).logits - want).abs().max() > 1e-3


@slow
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen2_5_vl", "mistral3"])
def test_embeddings_of_tokens_are_trained_and_load_on_the_complete_model(family, tmp_path):
    """gemma4 has further embeddings in every layer, which are not trained."""
    base = multimodal_folder(tmp_path / "base", family)
    lora = [*settings(tmp_path, base), "policy.lora.enabled=true", "policy.lora.dim=4", "run.seed=3"]
    lora += ["policy.lora.trainable_token_indices=[1,2]", "export.dtype=float32"]
    runs = [short_run(tmp_path / one, *lora, f"export.merge_lora={one}") for one in ("true", "false")]
    merged, adapter = (run / "model" for run in runs)
    assert_exported(base, merged, dtype=torch.float32)
    adapted, start, end = (
        PeftModel.from_pretrained(complete_model(base), adapter),
        complete_model(base),
        complete_model(merged),
    )
    (rows,) = (tensor for name, tensor in stored_adapter(adapter).items() if "trainable_tokens" in name)
    before, after = (one.get_input_embeddings().weight for one in (start, end))
    assert torch.equal(after[[1, 2]], rows)
    assert (after != before).any(1).nonzero()[:, 0].tolist() == [1, 2]
    ids = torch.tensor([[1, 5, 9, 2, 30, 1]])
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=ids).logits, end(input_ids=ids).logits, atol=1e-4, rtol=0)
        assert (start(input_ids=ids).logits - end(input_ids=ids).logits).abs().max() > 1e-3


def stored_adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_two_ranks_and_recomputed_layers_train_the_same_model_as_one_rank(family, tmp_path):
    """The files of Qwen name weights as the model does, so each rank reads only its own rows."""
    base = multimodal_folder(tmp_path / "base", family)
    # With this eps, weights whose gradients are almost zero do not change by the sign of their rounding errors.
    eps = ["policy.optimizer.kwargs.lr=1e-3", "policy.optimizer.kwargs.eps=0.01"]
    more = [*SHORT, *settings(tmp_path, base), "export.dtype=float32", *eps]
    alone = short_run(tmp_path / "alone", *more)
    full = ["policy.activation_checkpointing=full", f"run.dir={tmp_path / 'together'}"]
    run_together(2, [[*more, *full]], tmp_path)
    for this, that in zip(metrics_of(tmp_path / "together"), metrics_of(alone), strict=True):
        assert this["loss"] == pytest.approx(that["loss"], rel=1e-5)
        assert this["grad_norm"] == pytest.approx(that["grad_norm"], rel=1e-4)
    one, two = stored_tensors(alone / "model"), stored_tensors(tmp_path / "together" / "model")
    assert max(float((one[name].float() - two[name].float()).abs().max()) for name in one) < 1e-5
    assert_exported(base, tmp_path / "together" / "model", dtype=torch.float32)


@slow
@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_an_exported_checkpoint_is_a_start_model_and_a_reference_and_is_evaluated_and_generates(family, tmp_path):
    base = multimodal_folder(tmp_path / "base", family)
    run = short_run(
        tmp_path / "run", *settings(tmp_path, base), "checkpointing.save_period=1", "data.validation_share=0.2"
    )
    done = export(run, checkpoint="step_1", out=tmp_path / "out")
    assert_exported(base, done.folder)
    shutil.copytree(run, tmp_path / "first", symlinks=True)
    again = short_run(tmp_path / "again", *settings(tmp_path, run), f"reference.model={tmp_path / 'first'}")
    assert_exported(base, again / "model")
    assert metrics_of(again)[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    pairs = f"{tmp_path}/few.jsonl"
    measured = [evaluate(str(run), [pairs], reference=str(one)).total for one in (base, run)]
    assert measured[0] is not None and measured[1] is not None
    assert measured[0].rewards_margin != measured[1].rewards_margin
    # Prompts of different lengths are padded to one batch.
    prompts, sampling = ["Hi", "How far is the moon from here, and why?"], make_sampling(max_new_tokens=8)
    found = generate(str(run), prompts, sampling=sampling)
    model = complete_model(run / "model")
    for one in found.records:
        text = f"<|im_start|>user\n{one['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        ids = torch.tensor([AutoTokenizer.from_pretrained(run / "model").encode(text, add_special_tokens=False)])
        alone = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, eos_token_id=2
        )
        assert [completion["completion_ids"] for completion in one["completions"]] == [
            alone[0, ids.shape[1] :].tolist()
        ]

"""Adapters on quantised weights, on a CPU: bitsandbytes computes nf4 there since 0.50, but tandem refuses it for runs."""

import math

import pytest
import torch
from models import model_folder
from running import few_pairs, metrics_of, short_run, weights_of
from safetensors.torch import load_file

from tandem.model.lora import layers

pytest.importorskip("bitsandbytes", minversion="0.50")

EMBEDDINGS = "model.embed_tokens.weight"


@pytest.mark.slow
@pytest.mark.parametrize("merged", ["true", "false"])
def test_a_run_on_nf4_weights_exports_the_trained_model(merged, tmp_path, monkeypatch):
    """The audit of each run compares packs with the plain model. Embeddings, with two trained rows, are not quantised."""
    monkeypatch.setattr(layers, "_check_quantization", lambda *_: None)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    base = model_folder(tmp_path / "base", "llama", initializer_range=0.05, tie_word_embeddings=True, **sizes)
    given = [few_pairs(tmp_path, 20), f"data.validation={tmp_path}/few.jsonl", f"policy.model_name={base}"]
    given += ["policy.lora.enabled=true", "policy.lora.quantization=nf4", "policy.lora.trainable_token_indices=[1,2]"]
    run = short_run(tmp_path / "run", *given, f"export.merge_lora={merged}", "dpo.val_at_end=true")
    assert metrics_of(run)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    memory, exported = (metrics_of(run, f"{split}-default")[-1] for split in ("validation", "exported"))
    # A product with quantised weights is rounded differently from one with the merged, dequantised weights.
    assert exported["loss"] == pytest.approx(memory["loss"], abs=1e-3 if merged == "true" else 1e-5)
    assert abs(memory["loss"] - math.log(2)) > 0.02
    if merged == "true":
        start, end = load_file(base / "model.safetensors"), weights_of(run)
        assert (start[EMBEDDINGS] != end[EMBEDDINGS]).any(1).nonzero()[:, 0].tolist() == [1, 2]
        assert torch.equal(start["model.norm.weight"], end["model.norm.weight"])

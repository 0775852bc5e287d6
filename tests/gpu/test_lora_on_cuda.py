"""Training adapters with compiled layers, on weights that are frozen in bfloat16 or quantised."""

import math
import shutil

import pytest
import torch
from models import model_folder
from running import metrics_of, short_run
from transformers import AutoModelForCausalLM

from tandem.model.files.tiny import tiny_model

pytestmark = pytest.mark.gpu
LORA = ["policy.lora.enabled=true", "dpo.val_at_end=true", "policy.max_total_sequence_length=512"]


@pytest.fixture
def published(tmp_path):
    """The embedded model in bfloat16, as models are usually published."""
    folder = shutil.copytree(tiny_model(), tmp_path / "start")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return [f"policy.model_name={folder}", "data.train.data_path=embedded", "policy.optimizer.kwargs.lr=1e-3"]


def margins(run):
    return [metrics_of(run, f"{split}-default")[-1]["rewards_margin_mean"] for split in ("validation", "exported")]


@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize(("merged", "dropout"), [("true", 0), ("false", 0.05)])
def test_a_run_starts_at_the_base_model_learns_and_exports_the_trained_model(
    published, tmp_path, compiled, merged, dropout
):
    settings = [f"policy.compile={compiled}", f"export.merge_lora={merged}", f"policy.lora.dropout={dropout}"]
    run = short_run(tmp_path / "run", *LORA, *published, *settings)
    assert abs(metrics_of(run)[0]["loss"] - math.log(2)) < 2e-3
    learned, exported = margins(run)
    assert learned > 0.02
    assert exported == pytest.approx(learned, rel=0.25)


@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize(("merged", "dropout"), [("true", 0), ("false", 0.05)])
def test_dora_starts_at_the_base_model_learns_and_exports_the_trained_model(
    published, tmp_path, compiled, merged, dropout
):
    settings = [f"policy.compile={compiled}", f"export.merge_lora={merged}", f"policy.lora.dropout={dropout}"]
    run = short_run(tmp_path / "run", *LORA, "policy.lora.use_dora=true", *published, *settings)
    assert abs(metrics_of(run)[0]["loss"] - math.log(2)) < 2e-3
    learned, exported = margins(run)
    assert learned > 0.02
    assert exported == pytest.approx(learned, rel=0.25)


def test_compiled_dora_layers_train_the_same_weights(published, tmp_path):
    """In float32; row lengths change from step to step, and compiled layers must read the new ones."""
    exact = [*LORA, "policy.lora.use_dora=true", *published, "policy.precision=float32", "dpo.max_num_steps=4"]
    plain, compiled = (
        metrics_of(short_run(tmp_path / one, *exact, f"policy.compile={one}")) for one in ("false", "true")
    )
    assert [line["loss"] for line in compiled] == pytest.approx([line["loss"] for line in plain], rel=1e-4)


@pytest.mark.parametrize("compiled", ["true", "false"])
def test_adapters_of_experts_learn_and_are_exported(tmp_path, compiled):
    folder = model_folder(tmp_path / "experts", "qwen3_moe", initializer_range=0.05, head_dim=16)
    settings = [*LORA, "policy.lora.target_parameters=[gate_up_proj,down_proj]", "policy.lora.target_modules=[]"]
    settings += [f"policy.model_name={folder}", "data.train.data_path=embedded", "policy.optimizer.kwargs.lr=1e-3"]
    run = short_run(tmp_path / "run", *settings, f"policy.compile={compiled}")
    assert abs(metrics_of(run)[0]["loss"] - math.log(2)) < 2e-3
    learned, exported = margins(run)
    assert learned > 0
    assert exported == pytest.approx(learned, rel=0.25, abs=5e-3)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_run_with_quantised_weights_learns_and_exports_the_trained_model(published, tmp_path, quantization):
    pytest.importorskip("bitsandbytes")
    run = short_run(tmp_path / "run", *LORA, *published, f"policy.lora.quantization={quantization}")
    assert abs(metrics_of(run)[0]["loss"] - math.log(2)) < 2e-3
    learned, exported = margins(run)
    assert learned > 0.02
    # int8 layers also round their inputs; a merged model does not.
    assert exported == pytest.approx(learned, rel=0.5)

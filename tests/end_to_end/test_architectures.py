"""Every tested architecture trains for a step and exports a model that loads. Hybrids train in packs, too."""

import pytest
import torch
from hybrids import hybrid_settings
from models import ARCHITECTURES, model_folder
from running import SHORT, few_pairs, metrics_of, short_run
from transformers import AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.errors import ConfigError
from tandem.report.reporter import Reporter
from tandem.training.trainer import train

OVERRIDES = [
    "dpo.max_num_steps=1",
    "policy.max_total_sequence_length=512",
    "policy.train_global_batch_size=4",
    "checkpointing.enabled=false",
]


# Their decoders are that of llama, except for biases, norms and windows; tests/equivalence has them all, packed and plain.
LIKE_LLAMA = ("qwen2", "qwen3", "mistral")


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LIKE_LLAMA else ())
        for name in ARCHITECTURES
        if name not in ("granite", "cohere")
    ],
)
def test_a_model_trains_for_a_step_and_its_export_loads(architecture, tmp_path):
    model = model_folder(tmp_path / "model", architecture)
    run = short_run(tmp_path / "run", *OVERRIDES, few_pairs(tmp_path), f"policy.model_name={model}")
    (line,) = metrics_of(run)
    assert line["loss"] == pytest.approx(0.693147, abs=1e-5)
    start = AutoModelForCausalLM.from_pretrained(model)
    trained = AutoModelForCausalLM.from_pretrained(run / "model")
    assert type(trained) is type(start)
    before, after = dict(start.named_parameters()), dict(trained.named_parameters())
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("embed" in name for name in changed)
    assert any("layers.0" in name for name in changed)


def test_the_export_keeps_the_dropout_that_training_disabled(tmp_path):
    model = model_folder(tmp_path / "model", "llama", attention_dropout=0.25)
    run = short_run(tmp_path / "run", *OVERRIDES, few_pairs(tmp_path), f"policy.model_name={model}")
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.attention_dropout == 0.25


def test_packing_an_unsupported_recurrent_model_is_refused_before_weights_load(tmp_path):
    model = model_folder(tmp_path / "model", "mamba2", num_heads=8, head_dim=8, n_groups=1, state_size=8)
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "run", *OVERRIDES, few_pairs(tmp_path), f"policy.model_name={model}")
    assert str(refused.value) == (
        f"policy.model_name = {model}: its recurrent layers (mamba) carry state along a row, so packed "
        "sequences would leak into each other. Train it unpacked: policy.packing.mode=none."
    )


COPIED = "each prompt once, its state copied for every completion, by torch operations"


@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        ("granitemoehybrid", COPIED),
        pytest.param("qwen3_5_text", COPIED, marks=pytest.mark.slow),
        pytest.param("kimi_linear", COPIED, marks=pytest.mark.slow),
        pytest.param("lfm2", "convolutions within each sequence", marks=pytest.mark.slow),
    ],
)
def test_a_hybrid_trains_packed_as_it_does_unpacked(architecture, how, tmp_path, capsys):
    # With the small weights of other tests, recurrent layers hardly change the output.
    model = model_folder(tmp_path / "model", architecture, initializer_range=0.2, **hybrid_settings(architecture))
    settings = [*OVERRIDES, few_pairs(tmp_path), f"policy.model_name={model}", "dpo.max_num_steps=2"]
    settings += ["policy.optimizer.kwargs.lr=1e-3", "policy.scheduler=null"]
    loaded = load_config(None, [*SHORT, *settings, f"run.dir={tmp_path / 'packed'}"])
    packed = train(loaded, Reporter("normal"))
    printed = " ".join(capsys.readouterr().out.split())
    assert f"recurrent layers: {how}" in printed
    assert "; gradients of recurrent layers to " in printed
    unpacked = short_run(tmp_path / "unpacked", *settings, "policy.packing.mode=none")
    losses = [[line["loss"] for line in metrics_of(run)] for run in (packed, unpacked)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] == pytest.approx(0.693147, abs=1e-5)
    assert losses[0][1] != pytest.approx(0.693147, abs=1e-5)
    assert AutoModelForCausalLM.from_pretrained(packed / "model").config.model_type == architecture

"""Mistakes that show only when a run starts: each is one message, before weights load, and nothing is left behind."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from running import few_pairs, short_run

from tandem.config.load import load_config
from tandem.embedded.files import TRAIN
from tandem.errors import ConfigError
from tandem.model.files.tiny import tiny_model
from tandem.paths import check_models
from tandem.report import setup_warnings
from tandem.report.choices import describe_choices
from tandem.training import trainer


def test_a_run_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "taken")
    assert str(refused.value) == f"run.dir = {tmp_path}/taken: a file, not a directory. Choose another run.dir."


def test_a_run_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "file" / "run")
    assert str(refused.value) == (
        f"run.dir = {tmp_path}/file/run: cannot be written (Not a directory). Choose another run.dir."
    )


def test_a_directory_of_other_things_is_refused(tmp_path):
    (tmp_path / "photo").write_text("")
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path)
    assert str(refused.value) == (
        f"run.dir = {tmp_path}: not empty, and it has no config.yaml, so it is not a run. Choose another directory."
    )


def test_a_run_without_its_configuration_names_a_copy(tmp_path):
    copy = tmp_path / "checkpoints/step_2/config.yaml"
    copy.parent.mkdir(parents=True)
    copy.touch()
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path)
    assert str(refused.value) == (
        f"run.dir = {tmp_path}: not empty, and its config.yaml is missing; {copy} is a copy. Choose another directory."
    )


def test_a_cache_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "run")
    assert str(refused.value) == (
        f"the cache directory {tmp_path}/file/cache cannot be written (Not a directory). "
        "Set TANDEM_CACHE to a writable directory."
    )
    assert not (tmp_path / "run").exists()


def test_truncated_weights_are_named(tmp_path):
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "run", f"policy.model_name={folder}", "policy.train_global_batch_size=8")
    message = str(refused.value)
    assert message.startswith(f"policy.model_name = {folder}: its weights are not readable as safetensors (")
    assert message.endswith("Is the download complete?")


def test_a_run_shorter_than_its_warm_up_is_warned_of(tmp_path):
    loaded = load_config(None, ["dpo.max_num_steps=3", f"run.dir={tmp_path}/run"])
    setup = trainer.set_up(loaded.config, trainer.join_process_group().device)
    assert list(setup_warnings.short_run(setup)) == [
        "in 3 steps the learning rate never rises above 0.00019, although it is set to 0.001. "
        "Use a higher dpo.max_num_steps, a smaller batch, or another policy.scheduler (null: no warm-up)."
    ]


def test_a_run_as_long_as_its_warm_up_is_not_warned_of(tmp_path):
    setup = trainer.set_up(load_config(None, []).config, trainer.join_process_group().device)
    assert setup.plan.highest_rate == 1e-3
    assert list(setup_warnings.short_run(setup)) == []


@pytest.mark.parametrize(
    ("lora", "rate", "warned"), [("true", "5e-6", True), ("true", "1e-4", False), ("false", "5e-6", False)]
)
def test_adapters_with_the_learning_rate_for_all_weights_are_warned_of(lora, rate, warned):
    given = [f"policy.lora.enabled={lora}", f"policy.optimizer.kwargs.lr={rate}"]
    setup = trainer.set_up(load_config(None, given).config, torch.device("cpu"))
    low = (
        "policy.optimizer.kwargs.lr = 5e-06 is the default, which is meant for training all weights. Adapters usually take 10 to "
        "100 times as much (docs/lora.md)."
    )
    assert (low in list(setup_warnings.setup_warnings(setup))) == warned


@pytest.mark.parametrize("weights", ["bfloat16_stochastic", "bfloat16_nearest"])
def test_bfloat16_weights_with_float32_computation_are_refused(weights):
    with pytest.raises(ConfigError) as refused:
        trainer.set_up(load_config(None, [f"policy.weights={weights}"]).config, torch.device("cpu"))
    assert str(refused.value) == (
        f"policy.weights = {weights}: bfloat16 weights need bfloat16 computation, not float32. Set "
        "policy.precision=bfloat16, or leave policy.weights out."
    )


def test_bfloat16_weights_with_adapters_are_refused():
    few = ["policy.weights=bfloat16_stochastic", "policy.precision=bfloat16", "policy.lora.enabled=true"]
    with pytest.raises(ConfigError) as refused:
        trainer.set_up(load_config(None, few).config, torch.device("cpu"))
    assert str(refused.value) == (
        "policy.weights = bfloat16_stochastic: with adapters the model's weights are frozen, and the adapters are trained "
        "in float32. Leave policy.weights out."
    )


@pytest.mark.bfloat16
def test_weights_rounded_to_the_nearest_are_warned_of(tmp_path, capsys):
    few = ["policy.weights=bfloat16_nearest", "policy.precision=bfloat16", "dpo.max_num_steps=1"]
    short_run(tmp_path / "run", *few, few_pairs(tmp_path))
    assert (
        "warning: policy.weights = bfloat16_nearest: at the learning rates of preference training most updates are lost to "
        "rounding. policy.weights=bfloat16_stochastic keeps them in the same memory."
    ) in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("known", [False, True])
def test_a_cpu_without_bfloat16_is_warned_of(precision, known, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: known, raising=False)
    setup = SimpleNamespace(device=torch.device("cpu"), precision=precision)
    slow = (
        "policy.precision = bfloat16: this CPU has no bfloat16 arithmetic, so torch takes many times as long as in float32. "
        "policy.precision=float32 is faster here."
    )
    assert list(setup_warnings.slow_arithmetic(setup)) == ([slow] if precision == "bfloat16" and not known else [])


@pytest.mark.parametrize(
    ("overrides", "printed"),
    [
        ([], "float32 computation over float32 weights, float32 optimizer states, 16 bytes per parameter"),
        (
            ["policy.weights=bfloat16_stochastic", "policy.precision=bfloat16", "policy.optimizer.state_dtype=int8"],
            "bfloat16 computation over bfloat16 weights, rounded stochastic, int8 optimizer states, 8 bytes per parameter",
        ),
        (
            ["policy.optimizer.state_dtype=bfloat16"],
            "float32 computation over float32 weights, bfloat16 optimizer states, 12 bytes per parameter",
        ),
    ],
)
def test_the_choices_show_the_precision(overrides, printed):
    setup = trainer.set_up(load_config(None, overrides).config, torch.device("cpu"))
    assert dict(describe_choices(setup))["precision"] == printed


@pytest.mark.parametrize(
    ("overrides", "printed"),
    [
        ([], None),
        (
            ["dpo.sft_loss_weight=0.1"],
            "a sum over the tokens of the chosen completion (dpo.sft_average_log_probs=true: an average)",
        ),
        (
            ["dpo.sft_loss_weight=0.1", "dpo.sft_average_log_probs=true"],
            "an average over the tokens of the chosen completion",
        ),
    ],
)
def test_the_choices_say_whether_the_sft_term_is_a_sum(overrides, printed):
    setup = trainer.set_up(load_config(None, overrides).config, torch.device("cpu"))
    assert dict(describe_choices(setup)).get("SFT term") == printed


def test_a_schedule_that_raises_the_rate_above_the_one_that_is_set_is_warned_of(tmp_path, capsys):
    schedule = "policy.scheduler={name:torch.optim.lr_scheduler.CosineAnnealingLR,kwargs:{T_max:3,eta_min:0.1}}"
    short_run(tmp_path / "run", schedule, few_pairs(tmp_path))
    assert " ".join(capsys.readouterr().out.split()).startswith(
        "warning: policy.scheduler raises the learning rate to 0.1, above policy.optimizer.kwargs.lr = 0.001. In torch's "
        "schedulers, eta_min is a learning rate, not a fraction of lr."
    )


@pytest.mark.parametrize("name", ["embedded", "folder"])
def test_a_model_that_has_no_revisions_is_not_asked_for_one(tmp_path, name):
    given = name if name == "embedded" else str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    asked = ["data.train=embedded", f"policy.model_name={given}", "policy.revision=v2"]
    what = "the embedded model" if name == "embedded" else "a folder"
    with pytest.raises(ConfigError) as refused:
        check_models(load_config(None, asked).config)
    assert str(refused.value) == (
        f"policy.revision = v2: policy.model_name = {given} is {what}, which has no revisions. Leave out policy.revision."
    )


@pytest.mark.parametrize("key", ["reference.cache_dir", "checkpointing.checkpoint_dir", "run.dir"])
def test_links_in_a_circle_are_not_a_directory(tmp_path, key):
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "run", f"{key}={tmp_path}/circle")
    assert str(refused.value) == f"{key} = {tmp_path}/circle: cannot be written (File exists). Choose another {key}."


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("data.default.prompt_file", f"{TRAIN}: prompt_file"),
        ("policy.tokenizer.chat_template", "policy.tokenizer.chat_template"),
    ],
)
def test_a_pipe_in_the_place_of_a_text_is_not_waited_for(tmp_path, key, place):
    os.mkfifo(tmp_path / "pipe.jinja")
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "run", f"{key}={tmp_path}/pipe.jinja")
    assert str(refused.value) == f"{place} = {tmp_path}/pipe.jinja: cannot be read (Not a file). Check the path."

"""Configurations of TRL, built from its documented fields, current and earlier spellings, translated key by key."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.compat.records import Translation, nested
from tandem.config.compat.rules.registry import RULES
from tandem.config.compat.rules.trl_data import fields_of
from tandem.config.compat.table import load_table
from tandem.config.compat.translate import is_own_key, recognise, translate
from tandem.config.load import load_config
from tandem.config.validation import flatten
from tandem.errors import ConfigError

DATA = {"model_name_or_path": "org/model", "dataset_name": "org/pairs"}
CURRENT: dict[str, Any] = {
    **DATA,
    "model_revision": "main",
    "dataset_config": "small",
    "dataset_train_split": "train_prefs",
    "dataset_test_split": "test_prefs",
    "dataset_num_proc": 4,
    "dtype": "float32",
    "attn_implementation": "sdpa",
    "output_dir": "results/mine",
    "beta": 0.2,
    "loss_type": ["sigmoid", "bco_pair", "sft"],
    "loss_weights": [0.8, 0.2, 1.0],
    "ld_alpha": 0.5,
    "label_smoothing": 0.0,
    "discopop_tau": 0.05,
    "f_divergence_type": "js_divergence",
    "f_alpha_divergence_coef": 0.5,
    "use_weighting": False,
    "max_length": 2048,
    "truncation_mode": "keep_start",
    "precompute_ref_log_probs": True,
    "precompute_ref_batch_size": 16,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "padding_free": True,
    "learning_rate": 5e-7,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
    "adam_epsilon": 1e-6,
    "max_grad_norm": 0,
    "optim": "adamw_torch_fused",
    "num_train_epochs": 2.0,
    "max_steps": -1,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "bf16": True,
    "fp16": False,
    "torch_compile": False,
    "eval_strategy": "steps",
    "eval_steps": 50,
    "eval_on_start": True,
    "per_device_eval_batch_size": 4,
    "save_strategy": "epoch",
    "save_steps": 100,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_rewards/accuracies",
    "logging_steps": 5,
    "report_to": ["wandb"],
    "run_name": "first",
    "seed": 7,
    "dataloader_drop_last": True,
    "dataloader_num_workers": 4,
    "remove_unused_columns": False,
    "push_to_hub": False,
    "hub_model_id": "org/result",
    "ddp_timeout": 1800,
    "env": {"WANDB_PROJECT": "mine", "HF_TOKEN": "secret-canary"},
}
ADAPTERS = {
    "use_peft": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "lora_target_modules": ["q_proj", "k_proj"],
    "lora_task_type": "CAUSAL_LM",
    "use_rslora": False,
    "use_dora": False,
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": True,
    "dtype": "auto",
    "weight_decay": 0.1,
}


@pytest.fixture
def load(tmp_path):
    def loaded(tree: dict[str, Any], *overrides: str, **given: Any):
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump(tree))
        return load_config(path, list(overrides), **given)

    return loaded


def outcomes(translation: Translation | None) -> dict[str, tuple[str, dict[str, Any]]]:
    assert translation is not None
    return {row.key: (row.kind, dict(row.outcome.settings)) for row in translation.rows}


def note_of(translation: Translation | None, key: str) -> str | None:
    assert translation is not None
    return next(row.outcome.note for row in translation.rows if row.key == key)


EXPECTED: dict[str, dict[str, Any] | None] = {  # None: without effect
    "model_name_or_path": {"policy.model_name": "org/model"},
    "dataset_name": {
        "data.train.data_path": "org/pairs",
        "data.validation.data_path": "org/pairs",
        "data.validation.split": "test_prefs",
    },
    "model_revision": {"policy.revision": "main"},
    "dataset_config": {"data.train.subset": "small", "data.validation.subset": "small"},
    "dataset_train_split": {"data.train.split": "train_prefs"},
    "dataset_test_split": {"data.validation.split": "test_prefs"},
    "dataset_num_proc": {"data.num_workers": 4},
    "dtype": {"policy.weights": "float32"},
    "attn_implementation": None,
    "output_dir": {"run.dir": "results/mine"},
    "beta": {"dpo.reference_policy_kl_penalty": 0.2},
    "loss_type": {
        "dpo.preference_loss": {"sigmoid": 0.8, "bco_pair": 0.2},
        "dpo.sft_loss_weight": 1.0,
        "dpo.sft_average_log_probs": True,
    },
    "ld_alpha": {"dpo.ld_alpha": 0.5},
    "label_smoothing": None,
    "discopop_tau": None,
    "f_divergence_type": {"dpo.f_divergence": "js"},
    "f_alpha_divergence_coef": None,
    "use_weighting": {"dpo.wpo": False},
    "max_length": {"policy.max_total_sequence_length": 2048},
    "truncation_mode": {"data.overlong": "truncate_completion"},
    "precompute_ref_log_probs": {"reference.mode": "cached"},
    "precompute_ref_batch_size": None,
    "sync_ref_model": None,
    "ref_model_mixup_alpha": None,
    "padding_free": None,
    "learning_rate": {"policy.optimizer.kwargs.lr": 5e-7},
    "lr_scheduler_type": {"policy.scheduler": {"name": "cosine", "warmup_steps": 20}},
    "warmup_steps": {"policy.scheduler": {"name": "cosine", "warmup_steps": 20}},
    "weight_decay": {"policy.optimizer.kwargs.weight_decay": 0.1},
    "adam_beta2": {"policy.optimizer.kwargs.betas": [0.9, 0.98]},
    "adam_epsilon": {"policy.optimizer.kwargs.eps": 1e-6},
    "max_grad_norm": {"policy.max_grad_norm": None},
    "optim": None,
    "num_train_epochs": {"dpo.max_num_epochs": 2},
    "max_steps": {"dpo.max_num_steps": None},
    "per_device_train_batch_size": {"policy.train_global_batch_size": 16},
    "gradient_accumulation_steps": {"policy.train_global_batch_size": 16},
    "gradient_checkpointing": {"policy.activation_checkpointing": "full"},
    "gradient_checkpointing_kwargs.use_reentrant": None,
    "bf16": {"policy.precision": "bfloat16"},
    "fp16": None,
    "torch_compile": {"policy.compile": False},
    "eval_strategy": {"dpo.val_period": 50, "dpo.val_at_end": True},
    "eval_steps": {"dpo.val_period": 50, "dpo.val_at_end": True},
    "eval_on_start": {"dpo.val_at_start": True},
    "per_device_eval_batch_size": None,
    "save_strategy": {"checkpointing.save_period": 1.0},
    "save_steps": None,
    "save_total_limit": {"checkpointing.keep_top_k": 2},
    "load_best_model_at_end": {"export.checkpoint": "best"},
    "metric_for_best_model": {
        "checkpointing.metric_name": "val_accuracy",
        "checkpointing.higher_is_better": True,
    },
    "logging_steps": None,
    "report_to": {
        "logger.wandb_enabled": True,
        "logger.tensorboard_enabled": False,
        "logger.mlflow_enabled": False,
    },
    "run_name": {"logger.wandb.name": "first"},
    "seed": {"run.seed": 7},
    "dataloader_drop_last": {"data.drop_last": True},
    "dataloader_num_workers": None,
    "remove_unused_columns": None,
    "push_to_hub": None,
    "hub_model_id": None,
    "ddp_timeout": None,
    "env.WANDB_PROJECT": {"logger.wandb.project": "mine"},
    "env.HF_TOKEN": None,
}


def test_every_key_is_translated_as_documented(load, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    found = outcomes(load(CURRENT).translation)
    given = {key: settings for key, (kind, settings) in found.items() if kind != "default"}
    expected = {**EXPECTED, "loss_weights": EXPECTED["loss_type"]}
    assert given == {key: settings or {} for key, settings in expected.items()}
    assert all(found[key][0] == "no effect" for key, settings in expected.items() if settings is None)


def test_defaults_that_are_not_set_are_those_of_trl(load, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = load(DATA).config
    policy, dpo = config.policy, config.dpo
    kwargs = policy.optimizer.kwargs
    assert (kwargs.lr, kwargs.betas, kwargs.eps, kwargs.weight_decay) == (1e-6, [0.9, 0.999], 1e-8, 0.0)
    assert policy.scheduler.model_dump(include={"name", "warmup_ratio", "min_lr_ratio"}) == {
        "name": "linear",
        "warmup_ratio": 0.0,
        "min_lr_ratio": 0.0,
    }
    assert (policy.train_global_batch_size, policy.max_total_sequence_length, policy.precision) == (8, 1024, "bfloat16")
    assert (policy.max_grad_norm, policy.weights, config.run.seed) == (1.0, "float32", 42)
    assert (dpo.preference_loss, dpo.reference_policy_kl_penalty, dpo.max_num_epochs) == ("dpo", 0.1, 3)
    assert (dpo.val_period, dpo.val_at_start, dpo.val_at_end, config.data.validation) == (0, False, False, None)
    assert (config.data.overlong, config.data.drop_last) == ("truncate_completion", False)
    assert (config.checkpointing.save_period, config.checkpointing.keep_top_k) == (500, 1_000_000)


def test_the_batch_counts_devices_accumulation_and_ranks(load, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    tree = {**DATA, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}
    translation = load(tree).translation
    assert outcomes(translation)["per_device_train_batch_size"][1] == {"policy.train_global_batch_size": 64}
    assert note_of(translation, "per_device_train_batch_size") == "2 per device x 8 of accumulation x 4 ranks"
    launched = load({**tree, "num_processes": 2, "accelerate_config": "zero3"}).translation  # accelerate's launcher
    assert note_of(launched, "num_processes") == "2 per device x 8 of accumulation x 2 ranks"
    assert outcomes(launched)["num_processes"][1] == {
        "policy.train_global_batch_size": 32,
        "cluster.gpus_per_node": 2,
    }
    machines = load({**tree, "num_processes": 8, "num_machines": 2}).config.cluster
    assert (machines.num_nodes, machines.gpus_per_node) == (2, 4)
    with pytest.raises(ConfigError, match="3 processes on 2 machines: tandem starts as many ranks on each machine"):
        load({**tree, "num_processes": 3, "num_machines": 2})
    by_default = load(DATA).translation
    assert outcomes(by_default)["policy.train_global_batch_size"] == ("default", {"policy.train_global_batch_size": 32})
    assert note_of(by_default, "policy.train_global_batch_size") == "8 per device x 1 of accumulation x 4 ranks"


def test_weight_decay_says_what_differs(load):
    assert note_of(load({**DATA, "weight_decay": 0.1}).translation, "weight_decay") == (
        "TRL leaves norms and biases out; here they decay too"
    )
    assert note_of(load({**DATA, "weight_decay": 0.0}).translation, "weight_decay") is None
    assert note_of(load({**DATA, **ADAPTERS}).translation, "weight_decay") is None  # adapters have neither


def test_adapters(load):
    loaded = load({**DATA, **ADAPTERS})
    lora = loaded.config.policy.lora
    assert (lora.enabled, lora.dim, lora.alpha, lora.dropout) == (True, 32, 16, 0.1)
    assert (lora.target_modules, lora.quantization) == (["q_proj", "k_proj"], "nf4")
    by_default = load({**DATA, "use_peft": True}).config.policy.lora
    assert (by_default.dim, by_default.alpha, by_default.dropout) == (16, 32, 0.05)
    assert by_default.target_modules == ["q_proj", "v_proj"]
    options = {
        "use_rslora": True,
        "use_dora": True,
        "lora_alpha": 16,
        "lora_modules_to_save": ["lm_head", "embed_tokens"],
    }
    more = load({**DATA, "use_peft": True, **options}).config.policy.lora
    assert (more.use_rslora, more.use_dora, more.alpha, more.modules_to_save) == (
        True,
        True,
        16,
        ["lm_head", "embed_tokens"],
    )
    experts = load({**DATA, "use_peft": True, "lora_dropout": 0.0, "lora_target_parameters": ["experts.down_proj"]})
    assert experts.config.policy.lora.target_parameters == ["experts.down_proj"]
    one_item = load({**DATA, "use_peft": True, "lora_target_modules": ["all-linear"]}).config.policy.lora
    assert one_item.target_modules == "all-linear"
    defaults = {row.key: row.value for row in loaded.translation.of_kind("default")}
    assert defaults["export.merge_lora"] is loaded.config.export.merge_lora is False  # as save_model
    assert load({**DATA, **ADAPTERS, "export": {"merge_lora": True}}).config.export.merge_lora
    assert load(DATA).config.export.merge_lora
    unused = outcomes(load({**DATA, "lora_r": 4, "use_dora": True}).translation)
    assert (unused["lora_r"][0], unused["use_dora"][0]) == ("no effect", "no effect")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_type": "sigmoid"}, {"preference_loss": "sigmoid", "preference_average_log_probs": False}),
        ({"loss_type": "ipo"}, {"preference_loss": "ipo", "preference_average_log_probs": True}),
        ({"loss_type": ["ipo"], "beta": 1.0}, {"preference_average_log_probs": True}),
        ({"loss_type": "aot_pair"}, {"preference_loss": "aot_unpaired"}),
        ({"loss_type": "sigmoid_norm", "beta": 2.0}, {"preference_loss": "sigmoid_norm"}),
        ({"loss_type": ["hinge"], "loss_weights": [0.5]}, {"preference_loss": {"hinge": 0.5}}),
        ({"loss_type": "robust", "label_smoothing": 0.1}, {"label_smoothing": 0.1}),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, {"label_smoothing": 0.0}),
        ({"loss_type": "discopop", "discopop_tau": 0.1}, {"discopop_tau": 0.1}),
        ({"f_divergence_type": "alpha_divergence"}, {"f_divergence": "alpha", "f_alpha": 0.5}),
        (
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7},
            {"f_divergence": "alpha", "f_alpha": 0.7},
        ),
        (
            {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
            {"f_divergence": "reverse_kl", "f_alpha": 1.0},
        ),
        ({"rpo_alpha": 0.5}, {"sft_loss_weight": 0.5, "sft_average_log_probs": True}),
        ({"rpo_alpha": None}, {"sft_loss_weight": 0.0}),
    ],
)
def test_losses_and_their_settings(load, given, expected):
    dpo = load({**DATA, **given}).config.dpo
    assert {name: getattr(dpo, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"warmup_ratio": 0.1}, {"name": "linear", "warmup_ratio": 0.1}),
        ({"warmup_steps": 0.1}, {"name": "linear", "warmup_ratio": 0.1}),
        ({"warmup_steps": 10, "warmup_ratio": 0.1}, {"name": "linear", "warmup_steps": 10}),
        ({"lr_scheduler_type": "constant", "warmup_ratio": 0.1}, {"name": "constant"}),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1},
            {"name": "constant", "warmup_ratio": 0.1},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            {"name": "cosine", "min_lr_ratio": 0.1},
        ),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": '{"min_lr": 1e-7}',
                "learning_rate": 1e-6,
            },
            {"name": "cosine", "min_lr_ratio": 1e-7 / 1e-6},
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 20, "decay_type": "linear"},
                "max_steps": 100,
            },
            {"name": "wsd", "decay_ratio": 0.2, "min_lr_ratio": 0.0},
        ),
    ],
)
def test_schedules(load, given, expected):
    assert load({**DATA, **given}).translation.tree["policy"]["scheduler"] == expected


def test_the_length_of_a_run_and_its_periods(load):
    by_steps = load({**DATA, "max_steps": 30, "num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 0.25})
    assert (by_steps.config.dpo.max_num_steps, by_steps.config.dpo.max_num_epochs) == (30, 30)
    assert (by_steps.config.dpo.val_period, by_steps.config.dpo.val_at_end) == (8, False)
    assert outcomes(by_steps.translation)["num_train_epochs"] == ("no effect", {})
    by_logging = load({**DATA, "evaluation_strategy": "steps", "logging_steps": 7}).config.dpo
    assert (by_logging.val_period, by_logging.val_at_end) == (7, True)
    by_epochs = load({**DATA, "eval_strategy": "epoch", "save_strategy": "epoch"}).config
    assert (by_epochs.dpo.val_period, by_epochs.dpo.val_at_end, by_epochs.checkpointing.save_period) == (1.0, True, 1.0)
    none = load({**DATA, "eval_strategy": False, "save_strategy": "no", "dataset_test_split": "test"})  # YAML's no
    assert (none.config.dpo.val_period, none.config.data.validation) == (0, None)
    assert not none.config.checkpointing.enabled


def test_a_file_has_no_split_to_validate_on(load):
    given = {"model_name_or_path": "org/model", "dataset_name": "pairs.jsonl", "dataset_train_split": "train"}
    translated = load({**given, "eval_strategy": "steps", "eval_steps": 5}).translation
    assert translated.tree["data"]["train"] == {"data_path": "pairs.jsonl"}
    assert "validation" not in translated.tree["data"]
    (name,) = (row for row in translated.rows if row.key == "dataset_name")
    assert "set data.validation.data_path or data.validation_share" in name.outcome.note
    assert outcomes(translated)["dataset_train_split"] == ("no effect", {})


def test_mixtures_of_datasets(load):
    tree = {
        "model_name_or_path": "org/model",
        "datasets": [
            {"path": "org/one", "name": "small", "split": "train", "columns": ["chosen", "rejected"]},
            {"path": "json", "data_files": "more/*.jsonl"},
        ],
        "test_split_size": 0.1,
        "eval_strategy": "epoch",
        "streaming": False,
    }
    data = load(tree).config.data
    assert [(one.data_path, one.subset, one.split) for one in data.training_sets] == [
        ("org/one", "small", "train"),
        ("more/*.jsonl", None, None),
    ]
    assert data.validation_share == 0.1


def test_data_types_of_weights(load):
    loaded = load({**DATA, "torch_dtype": "bfloat16"})
    assert loaded.config.policy.weights == "bfloat16_nearest"
    assert note_of(loaded.translation, "torch_dtype") == (
        "small updates are lost, as in TRL; bfloat16_stochastic keeps them, and float32 is exact"
    )
    assert load({**DATA, "dtype": "auto"}).config.policy.weights == "float32"
    with_adapters = load({**DATA, "use_peft": True, "dtype": "bfloat16"})
    assert outcomes(with_adapters.translation)["dtype"] == ("no effect", {})


def test_names_of_earlier_releases(load):
    old = {
        **DATA,
        "evaluation_strategy": "no",
        "torch_dtype": "float32",
        "label_pad_token_id": -100,
        "padding_value": 0,
        "is_encoder_decoder": False,
        "generate_during_eval": False,
        "reference_free": False,
        "force_use_ref_model": False,
        "use_liger_loss": True,
        "use_num_logits_to_keep": False,
        "use_logits_to_keep": True,
        "base_model_attribute_name": "model",
        "gradient_checkpointing_use_reentrant": False,
        "max_prompt_length": 1024,
        "max_completion_length": None,
        "sanity_check": False,
        "save_safetensors": True,
        "overwrite_output_dir": True,
        "no_cuda": False,
        "fp16_opt_level": "O1",
        "tpu_num_cores": None,
    }
    found = outcomes(load(old).translation)
    translated = {"model_name_or_path", "dataset_name", "evaluation_strategy", "torch_dtype"}
    assert {key for key in old if found[key][0] == "no effect"} == set(old) - translated
    shown = load({**DATA, "generate_during_eval": True, "eval_strategy": "epoch"})
    assert shown.config.logger.num_val_samples_to_print == 8
    quantised = load({**DATA, "optim": "paged_adamw_8bit"}).config
    assert quantised.policy.optimizer.state_dtype == "int8"


REFUSED = [
    ({"fp16": True}, "fp16 = true: tandem computes in bfloat16 or float32. Set fp16=false and bf16=true."),
    ({"dtype": "float16"}, 'dtype = "float16": tandem trains weights in float32 or bfloat16. Set it to one of them.'),
    (
        {"max_length": None},
        "max_length = null: tandem needs a limit. Set max_length to the longest prompt plus completion, in tokens.",
    ),
    (
        {"max_prompt_length": 512},
        "max_prompt_length = 512: tandem limits prompt and completion together with max_length, as TRL does since 0.29. "
        "Remove it; over-long completions are cut, or with data.overlong=truncate_prompt the prompts.",
    ),
    (
        {"truncation_mode": "keep_end"},
        'truncation_mode = "keep_end": TRL cuts the start of each sequence, and tandem cuts prompts for both completions '
        "alike. Set truncation_mode=keep_start, or remove it and set data.overlong=truncate_prompt.",
    ),
    (
        {"label_smoothing": 0.1},
        "label_smoothing = 0.1: With sigmoid, TRL ignores it since 0.29, and read it as conservative DPO before. Remove it; "
        "for conservative DPO, add dpo.label_smoothing=0.1; loss_type=robust reads it too.",
    ),
    (
        {"loss_type": "kto_pair"},
        'loss_type = "kto_pair": tandem does not have kto_pair. It has sigmoid, hinge, ipo, exo_pair, nca_pair, robust, '
        "bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop and sigmoid_norm.",
    ),
    (
        {"loss_type": ["sft"]},
        'loss_type = ["sft"]: tandem trains on preferences: sft alone is supervised training. Add sigmoid, for example.',
    ),
    (
        {"loss_type": ["ipo", "hinge"]},
        'loss_type = ["ipo", "hinge"]: ipo averages over tokens, and tandem averages for all losses or for none. Give ipo '
        "alone.",
    ),
    (
        {"loss_type": "ipo", "f_divergence_type": "js_divergence"},
        'f_divergence_type = "js_divergence": tandem and TRL apply it to ipo differently. Set reverse_kl.',
    ),
    (
        {"reference_free": True},
        "reference_free = true: Set dpo.preference_loss=cpo and dpo.cpo_alpha=0, which is DPO without a reference, and "
        "remove reference_free and loss_type.",
    ),
    (
        {"sync_ref_model": True},
        "sync_ref_model = true: The reference does not change in training. Set sync_ref_model=false.",
    ),
    (
        {"num_train_epochs": 0.5},
        "num_train_epochs = 0.5: tandem trains for whole epochs. Set max_steps to the number of steps.",
    ),
    (
        {"eval_strategy": "steps", "eval_steps": 0.1},
        'eval_steps = 0.1, eval_strategy = "steps": eval_steps is a share of the run, whose length is not known. Set a number '
        "of steps, or set max_steps too.",
    ),
    (
        {"lr_scheduler_type": "polynomial"},
        'lr_scheduler_type = "polynomial": tandem has no schedule for polynomial. It translates linear, cosine, '
        "cosine_with_min_lr, constant, constant_with_warmup, and warmup_stable_decay with decay_type linear and max_steps.",
    ),
    ({"optim": "adafactor"}, 'optim = "adafactor": tandem trains with AdamW. Set optim=adamw_torch.'),
    (
        {"report_to": ["wandb", "trackio"]},
        'report_to = ["wandb", "trackio"]: tandem logs to wandb, tensorboard and mlflow, not to trackio. Set report_to to '
        "these.",
    ),
    (
        {"push_to_hub": True},
        "push_to_hub = true: tandem uploads nothing at the end of a run. Set push_to_hub=false, and upload the folder model of "
        "the run directory, or use `tandem export --push-to-hub`.",
    ),
    (
        {"per_device_train_batch_size": 0},
        "per_device_train_batch_size = 0: per_device_train_batch_size, gradient_accumulation_steps and num_processes must be "
        "whole numbers above 0.",
    ),
    (
        {"datasets": [{"fraction": 0.5, "path": "org/a"}]},
        'datasets = [{"fraction": 0.5, "path": "org/a"}]: tandem cannot translate fraction of a dataset. data.train takes a '
        "weight for each set. Remove it.",
    ),
    (
        {"datasets": [{"path": "org/a", "split": "train[:10%]"}]},
        'datasets = [{"path": "org/a", "split": "train[:10%]"}]: split: tandem reads a split, or its first rows, such as '
        "train[:1000], not train[:10%]. Write the rows to a file, and name the file.",
    ),
    (
        {"max_steps": "many"},
        'max_steps = "many": It, or a key that belongs to it, has a value of another type than expected. Correct it.',
    ),
    (
        {"learning_rat": 1e-6},
        "learning_rat = 1e-06: tandem does not know this key of TRL. Did you mean learning_rate? Otherwise remove it.",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[next(iter(changes)) for changes, _ in REFUSED])
def test_what_cannot_be_done_is_refused_with_the_nearest_way(load, tmp_path, changes, message):
    with pytest.raises(ConfigError) as error:
        load({**DATA, **changes})
    path = str(tmp_path / "theirs.yaml")
    first, *lines = str(error.value).split("\n", 1)
    assert first in (
        "TRL configuration: a key cannot be translated.",
        "TRL configuration: 2 keys cannot be translated.",
    )
    assert lines == [f"  {path}: {message}".replace("PATH", path)]


def test_a_model_is_needed(load, tmp_path):
    with pytest.raises(ConfigError) as error:
        load({"dataset_name": "org/pairs", "beta": 0.1})
    assert str(error.value) == (
        "TRL configuration: a key cannot be translated.\n"
        f"  {tmp_path / 'theirs.yaml'}: model_name_or_path = null: Name the model to train."
    )


def test_no_key_of_the_input_is_missing_from_the_table(load):
    for tree in (CURRENT, {**DATA, **ADAPTERS}):
        rows = load(tree).translation.rows
        assert sorted(row.key for row in rows if row.kind != "default") == sorted(flatten(tree))


# Fields of DPOConfig with its TrainingArguments, ModelConfig, ScriptArguments and DatasetMixtureConfig, in 1.16.
FIELDS = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs activation_offloading adam_beta1 adam_beta2
adam_epsilon attn_implementation auto_find_batch_size average_tokens_across_devices batch_eval_metrics beta bf16 bf16_full_eval
bnb_4bit_quant_storage bnb_4bit_quant_type data_seed dataloader_drop_last dataloader_in_order
dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
dataloader_prefetch_factor dataset_config dataset_name dataset_num_proc dataset_streaming dataset_test_split
dataset_train_split datasets ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph
ddp_timeout debug deepspeed disable_dropout disable_tqdm discopop_tau do_eval do_predict do_train dtype enable_jit_checkpoint
eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object
f_alpha_divergence_coef f_divergence_type fp16 fp16_full_eval fsdp fsdp_config full_determinism gradient_accumulation_steps
gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo
hub_revision hub_strategy hub_token ignore_bias_buffers ignore_data_skip include_for_metrics include_num_input_tokens_seen
label_names label_smoothing label_smoothing_factor ld_alpha learning_rate length_column_name liger_kernel_config
load_best_model_at_end load_in_4bit load_in_8bit local_rank log_level log_level_replica log_on_each_node logging_first_step
logging_nan_inf_filter logging_steps logging_strategy lora_alpha lora_dropout lora_modules_to_save lora_r
lora_target_modules lora_target_parameters lora_task_type loss_type loss_weights lr_scheduler_kwargs lr_scheduler_type
max_grad_norm max_length max_steps metric_for_best_model model_init_kwargs model_name_or_path model_revision
neftune_noise_alpha num_train_epochs optim optim_args optim_target_modules output_dir pad_to_multiple_of pad_token
padding_free parallelism_config per_device_eval_batch_size per_device_train_batch_size precompute_ref_batch_size
precompute_ref_log_probs prediction_loss_only project push_to_hub ref_model_mixup_alpha ref_model_sync_steps
remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint router_aux_loss_coef run_name
save_on_each_node save_only_model save_steps save_strategy save_total_limit seed skip_memory_metrics streaming
sync_ref_model test_split_size tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy truncation_mode trust_remote_code
use_bnb_nested_quant use_cache use_cpu use_dora use_liger_kernel use_peft use_rslora use_weighting warmup_steps weight_decay
""".split()  # noqa: SIM905


def test_every_field_of_trl_is_in_the_table():
    table = load_table("trl")
    assert [name for name in FIELDS if not table.cases(name)] == []
    for cases in table.keys.values():
        for case in cases:
            assert case.action != "to" or is_own_key(case.argument)
            assert case.action != "rule" or case.argument in RULES
    assert all(map(is_own_key, table.defaults))


@pytest.mark.parametrize("value", [None, True, 0, 1, 0.5, "x", ["a"], {"a": 1}], ids=repr)
def test_each_key_of_the_table_is_in_the_result_or_in_the_message(value):
    for written in load_table("trl").keys:
        tree = {"model_name_or_path": "m"} | nested({written.replace(".**", ".inner").replace("*", "name"): value})
        try:
            rows = translate("trl", tree, dict.fromkeys(flatten(tree), "theirs.yaml")).rows
        except ConfigError as error:
            assert all(f"theirs.yaml: {key} = " in str(error) for key in flatten(tree) if key != "model_name_or_path")
        else:
            assert [row.key for row in rows if row.kind != "default"] == list(flatten(tree))


def test_files_are_recognised_and_others_are_left_alone(load):
    assert recognise(DATA) == "trl"
    assert recognise({"model_name_or_path": "m", "datasets": [{"path": "a"}]}) == "trl"
    assert recognise({"dataset_name": "a", "beta": 0.1}) == "trl"
    assert recognise({"model_name_or_path": "m", "stage": "dpo", "dataset": "a", "pref_beta": 0.1}) != "trl"
    assert recognise({"base_model": "m", "rl": "dpo", "datasets": [{"path": "a"}]}) != "trl"
    assert load({"policy": {"model_name": "org/model"}, "data": {"train": "a.jsonl"}}).translation is None


def test_values_that_may_be_secrets_are_not_shown(load):
    from tandem.config.compat.show import full_table

    loaded = load({**CURRENT, "hub_token": "hf-secret-canary"})
    assert "secret-canary" not in full_table(loaded.translation, None)
    assert "  env.HF_TOKEN = (not shown)  (tandem sets no variables" in full_table(loaded.translation, None)
    with pytest.raises(ConfigError) as error:
        load({**DATA, "env": {"HF_TOKEN": "secret-canary"}, "fp16": True})
    assert "secret-canary" not in str(error.value)


@pytest.mark.slow
def test_one_step_from_a_file(tmp_path, capsys):
    from tandem.cli.main import app

    tree = {
        "model_name_or_path": "embedded",
        "dataset_name": "embedded",
        "per_device_train_batch_size": 4,
        "max_steps": 1,
        "bf16": False,
        "output_dir": str(tmp_path / "run"),
    }
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(tree))
    app(["train", "--config", str(path)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert f"{path} is a configuration of TRL. Keys translated: 6;" in " ".join(shown.split())
    (line,) = [json.loads(line) for line in Path(tmp_path, "run/metrics.jsonl").read_text().splitlines()]
    assert (line["split"], line["step"], round(line["loss"], 4)) == ("train", 1, 0.6931)
    kept = Path(tmp_path, "run/translation.txt").read_text()
    assert "4 per device x 1 of accumulation x 1 rank" in kept


@pytest.mark.parametrize(
    ("entry", "fields"),
    [
        ({"path": "org/a", "split": "train[:10]"}, {"data_path": "org/a", "split": "train", "max_rows": 10}),
        ({"path": "org/a", "split": "test[:10]"}, {"data_path": "org/a", "split": "test", "max_rows": 10}),
        ({"path": "org/a", "data_dir": "en"}, {"data_path": "org/a", "subset": "en"}),
        (
            {"path": "json", "data_files": {"dev": "a.jsonl"}, "split": "dev[:7]"},
            {"data_path": "a.jsonl", "max_rows": 7},
        ),
        (
            {"path": "org/a", "name": "small", "data_dir": "en"},
            "tandem reads data_dir of a hub dataset, without name and data_files. Give the folder as path.",
        ),
    ],
)
def test_a_dataset_is_read_as_fields_or_refused_with_its_reason(entry, fields):
    assert fields_of(entry) == fields

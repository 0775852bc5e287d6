"""Configurations of NeMo Aligner, built from its documented keys, translated key by key."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.compat.records import Translation
from tandem.config.load import LoadedConfig, load_config
from tandem.config.validation import flatten
from tandem.errors import ConfigError

pytestmark = pytest.mark.usefixtures("of_a_command")

FULL: dict[str, Any] = {
    "defaults": [{"optional tp_overlap@model.ub_tp_comm_overlap_cfg": None}],
    "trainer": {
        "num_nodes": 2,
        "devices": 8,
        "accelerator": "gpu",
        "precision": "bf16",
        "dpo": {
            "max_epochs": 1,
            "max_steps": -1,
            "val_check_interval": 0.1,
            "save_interval": 100,
            "limit_train_batches": 1.0,
            "limit_val_batches": 1.0,
            "gradient_clip_val": 2.0,
        },
        "logger": False,
        "enable_checkpointing": False,
        "max_time": None,
        "max_epochs": "${.dpo.max_epochs}",
        "max_steps": "${.dpo.max_steps}",
    },
    "exp_manager": {
        "explicit_log_dir": "results",
        "exp_dir": None,
        "name": "mine",
        "max_time_per_run": "${trainer.max_time}",
        "create_wandb_logger": False,
        "wandb_logger_kwargs": {"project": "p", "name": "n"},
        "resume_if_exists": True,
        "create_checkpoint_callback": True,
        "checkpoint_callback_params": {
            "monitor": "val_loss",
            "save_top_k": 3,
            "mode": "min",
            "filename": "mine--{${.monitor}:.3f}",
            "model_parallel_size": "${multiply:${model.tensor_model_parallel_size},${model.pipeline_model_parallel_size}}",
        },
    },
    "pretrained_checkpoint": {"restore_from_path": "org/model"},
    "model": {
        "mcore_gpt": True,
        "micro_batch_size": 1,
        "global_batch_size": 64,
        "dpo": {
            "log_prob_forward_micro_batch_size": "${model.micro_batch_size}",
            "ref_policy_kl_penalty": 0.3,
            "preference_average_log_probs": True,
            "sft_average_log_probs": "${.preference_average_log_probs}",
            "gt_reward_scale": 2.0,
            "preference_loss": "rpo_bwd_kl",
            "preference_loss_weight": 1,
            "sft_loss_weight": 0.1,
        },
        "seed": 1234,
        "peft": {
            "peft_scheme": "none",
            "restore_from_path": None,
            "restore_from_ckpt": {"checkpoint_dir": None},
            "lora_tuning": {
                "target_modules": ["attention_qkv"],
                "adapter_dim": 32,
                "adapter_dropout": 0.0,
                "column_init_method": "xavier",
                "row_init_method": "zero",
                "layer_selection": None,
                "weight_tying": False,
            },
        },
        "optim": {
            "name": "distributed_fused_adam",
            "bucket_cap_mb": 200,
            "lr": 4e-6,
            "weight_decay": 0.05,
            "betas": [0.9, 0.95],
            "sched": {"name": "CosineAnnealing", "warmup_steps": 10, "constant_steps": 1000, "min_lr": 1e-6},
        },
        "data": {
            "data_impl": "jsonl",
            "splits_string": None,
            "seq_length": "${model.encoder_seq_length}",
            "num_workers": 0,
            "reset_position_ids": False,
            "data_prefix": {"train": ["a.jsonl"], "validation": ["b.jsonl"], "test": ["c.jsonl"]},
            "default_chosen_reward": 3.0,
            "default_rejected_reward": 1.0,
        },
        "overwrite_base_config": {"data": {"data_prefix": True}},
    },
    "precision": "${trainer.precision}",
}


def with_changes(**changes: Any) -> dict[str, Any]:
    """FULL with keys changed, given with __ for the dots: model__seed=1."""
    tree = copy.deepcopy(FULL)
    for name, value in changes.items():
        *above, last = name.split("__")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


@pytest.fixture
def load(tmp_path):
    def loaded(*overrides: str, **changes: Any) -> LoadedConfig:
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump(with_changes(**changes)))
        return load_config(path, list(overrides))

    return loaded


def translation_of(loaded: LoadedConfig) -> Translation:
    assert loaded.translation is not None
    return loaded.translation


def outcomes(loaded: LoadedConfig) -> dict[str, tuple[str, dict[str, Any]]]:
    return {row.key: (row.kind, dict(row.outcome.settings)) for row in translation_of(loaded).rows}


def test_every_key_is_translated_as_documented(load):
    loaded = load()
    config, found = loaded.config, outcomes(loaded)
    assert (config.dpo.max_num_epochs, config.dpo.max_num_steps, config.dpo.val_period) == (1, None, 0.1)
    assert (config.dpo.val_at_start, config.dpo.val_at_end, config.dpo.val_batches) == (False, True, None)
    assert (config.dpo.reference_policy_kl_penalty, config.dpo.gt_reward_scale) == (0.3, 2.0)
    assert (config.dpo.preference_average_log_probs, config.dpo.sft_average_log_probs) == (True, True)
    assert (config.dpo.preference_loss_weight, config.dpo.sft_loss_weight) == (1, 0.1)
    assert (config.data.default_chosen_reward, config.data.default_rejected_reward) == (3.0, 1.0)
    assert (config.policy.model_name, config.policy.precision) == ("org/model", "bfloat16")
    assert (config.policy.train_global_batch_size, config.policy.max_grad_norm, config.run.seed) == (64, 2.0, 1234)
    kwargs = config.policy.optimizer.kwargs
    assert (kwargs.lr, kwargs.weight_decay, kwargs.betas, kwargs.eps) == (4e-6, 0.05, [0.9, 0.95], 1e-8)
    assert config.policy.scheduler.model_dump() == {
        "name": "cosine",
        "warmup_ratio": 0.0,
        "warmup_steps": 10,
        "min_lr_ratio": 0.25,
        "constant_steps": 1000,
    }
    assert (config.checkpointing.save_period, config.checkpointing.keep_top_k) == (100, 3)
    assert (config.checkpointing.metric_name, config.run.dir, config.run.name) == ("val_loss", "results", "mine")
    assert config.data.training_sets[0].data_path == "a.jsonl"
    assert config.data.validation.data_path == "b.jsonl"
    assert config.policy.tokenizer.chat_template is None  # texts are trained on as they are
    assert found["model.data.data_prefix.test"] == ("no effect", {})
    assert found["model.peft.lora_tuning.adapter_dim"] == ("no effect", {})
    assert found["defaults"] == ("no effect", {})
    assert found["model.data.seq_length"] == ("no effect", {})  # it refers to a key of the checkpoint


def test_no_key_of_the_input_is_missing_from_the_table(load):
    rows = translation_of(load()).rows
    assert sorted(row.key for row in rows if row.kind != "default") == sorted(flatten(FULL))


@pytest.mark.parametrize("loss", ["dpo", "ipo", "rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl"])
def test_all_five_losses_have_the_same_name(load, loss):
    assert load(f"model.dpo.preference_loss={loss}").config.dpo.preference_loss == loss


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.dpo.val_check_interval=20"], {"val_period": 20}),
        (["trainer.dpo.val_check_interval=0.25"], {"val_period": 0.25}),
        (["trainer.dpo.val_check_interval=1.0"], {"val_period": 0, "val_at_end": True}),
        (["trainer.dpo.val_check_interval=0"], {"val_period": 0, "val_at_end": False}),
        (["trainer.dpo.limit_val_batches=8"], {"val_batches": 8, "val_period": 0.1}),
        (["trainer.dpo.limit_val_batches=0"], {"val_period": 0, "val_at_end": False, "val_at_start": False}),
        (["trainer.dpo.limit_train_batches=40"], {"max_num_steps": 40, "val_period": 4}),
        (["trainer.dpo.limit_train_batches=40", "trainer.dpo.max_steps=30"], {"max_num_steps": 30}),
        (["trainer.dpo.max_steps=30", "trainer.dpo.max_epochs=3"], {"max_num_steps": 30, "max_num_epochs": 3}),
    ],
)
def test_intervals_and_limits_as_numbers_and_fractions(load, overrides, expected):
    dpo = load(*overrides).config.dpo
    assert {name: getattr(dpo, name) for name in expected} == expected


def test_a_share_of_the_training_batches_is_a_share_of_the_pairs_of_each_epoch(load):
    half = "trainer.dpo.limit_train_batches=0.5"
    assert [one.weight for one in load(half).config.data.training_sets] == [0.5]
    several = load(half, "model.data.data_prefix.train=[a.jsonl,b.jsonl]").config.data.training_sets
    assert [(one.data_path, one.weight) for one in several] == [("a.jsonl", 0.5), ("b.jsonl", 0.5)]


@pytest.mark.parametrize(
    ("overrides", "enabled"),
    [
        ([], True),
        (["trainer.dpo.save_interval=0"], False),
        (["exp_manager.create_checkpoint_callback=False"], False),
    ],
)
def test_checkpoints_are_saved_with_the_callback_and_an_interval(load, overrides, enabled):
    assert load(*overrides).config.checkpointing.enabled is enabled


def test_data_may_be_a_mapping_a_list_or_a_path(load, tmp_path):
    def sets_of(prefix: Any, **changes: Any):
        tree = with_changes(model__data__data_prefix=prefix, **changes)
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump(tree))
        return load_config(path).config.data

    for prefix in ("a.jsonl", ["a.jsonl"], {"train": "a.jsonl"}):
        assert [one.data_path for one in sets_of(prefix).training_sets] == ["a.jsonl"]
    several = sets_of({"train": ["a.jsonl", "b.jsonl"], "validation": "c.jsonl", "validation_easy": ["d.jsonl"]})
    assert [one.data_path for one in several.training_sets] == ["a.jsonl", "b.jsonl"]
    assert several.val_data_paths["validation_easy"].data_path == "d.jsonl"
    assert sets_of(["a.jsonl"], model__data__splits_string="90,10,0").validation_share == 0.1


def test_a_list_of_files_and_a_field_of_one_of_them_are_refused_together(load, tmp_path):
    with pytest.raises(ConfigError) as error:
        load("data.train.split=part", "model.data.data_prefix.train=[a.jsonl,b.jsonl]")
    assert str(error.value) == (
        "command line: data.train.split cannot be set, because model.data.data_prefix.train of NeMo Aligner is translated to "
        'data.train = ["a.jsonl", "b.jsonl"]. Set data.train instead.'
    )


def test_the_checkpoint_metric_needs_a_validation_set(load):
    assert load("model.data.data_prefix=a.jsonl").config.checkpointing.metric_name is None
    found = load(
        "exp_manager.checkpoint_callback_params.monitor=val_acc", "exp_manager.checkpoint_callback_params.mode=max"
    )
    checkpointing = found.config.checkpointing
    assert (checkpointing.metric_name, checkpointing.higher_is_better) == ("validation-default_accuracy", True)


def test_the_length_is_that_of_the_data_or_of_the_model(load):
    assert load("+model.encoder_seq_length=512").config.policy.max_total_sequence_length == 512
    both = load("+model.encoder_seq_length=4096", "model.data.seq_length=512")
    assert both.config.policy.max_total_sequence_length == 512


def test_lora_layers_are_those_that_megatrons_names_stand_for(load):
    lora = load("model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[attention]").config.policy.lora
    assert (lora.enabled, lora.dim, lora.alpha) == (True, 32, 32)  # a scale of 1, as there
    import re

    pattern = re.compile(lora.target_modules)
    layers = {name: bool(pattern.fullmatch(f"model.layers.0.{name}")) for name in ("self_attn.q_proj", "mlp.up_proj")}
    assert layers == {"self_attn.q_proj": True, "mlp.up_proj": False}
    everywhere = load("model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all]").config.policy.lora
    assert everywhere.target_modules == "all-linear"
    scaled = load("model.peft.peft_scheme=lora", "+model.peft.lora_tuning.alpha=64").config.policy.lora
    assert (scaled.dim, scaled.alpha) == (32, 64)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (None, None),
        ({"name": "WarmupPolicy", "warmup_steps": 4}, {"start_factor": 0.2, "end_factor": 1.0, "total_iters": 4}),
        ({"name": "CosineAnnealing", "warmup_ratio": 0.1}, {"warmup_ratio": 0.1, "constant_steps": 0}),
    ],
)
def test_other_schedules(load, schedule, expected):
    found = load(model__optim__sched=schedule).config.policy.scheduler
    given = found if found is None else {**found.model_dump(), **found.model_dump().get("kwargs", {})}
    assert given is expected or {name: given[name] for name in expected} == expected


def test_the_name_of_the_average_before_release_0_4(load):
    tree = copy.deepcopy(FULL["model"]["dpo"])
    del tree["preference_average_log_probs"], tree["sft_average_log_probs"]
    assert load(model__dpo={**tree, "average_log_probs": True}).config.dpo.preference_average_log_probs
    both = load(model__dpo={**FULL["model"]["dpo"], "average_log_probs": False})
    assert both.config.dpo.preference_average_log_probs  # later releases ignore the old name


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "pretrained_checkpoint.restore_from_path",
            "sft.nemo",
            "tandem cannot read .nemo files. Set policy.model_name to the Hugging Face model that it was made from, or convert "
            "it with NeMo's scripts/checkpoint_converters/convert_*_nemo_to_hf.py.",
        ),
        (
            "pretrained_checkpoint.restore_from_path",
            None,
            "No model is given. Set policy.model_name to a Hugging Face folder or hub name.",
        ),
        (
            "trainer.dpo.limit_val_batches",
            0.5,
            "How many batches it means depends on the data. Set trainer.dpo.limit_val_batches to a number of batches of "
            "model.global_batch_size pairs, or to 1.0 for all.",
        ),
        (
            "trainer.dpo.limit_train_batches",
            0,
            "With several epochs, or for no step, tandem has no such limit. Set trainer.dpo.max_steps instead.",
        ),
        (
            "trainer.dpo.val_check_interval",
            1.5,
            "tandem takes a share of an epoch below 1, or a number of steps. Set trainer.dpo.val_check_interval to the steps "
            "of an epoch.",
        ),
        (
            "trainer.precision",
            16,
            'tandem knows "bf16", "bf16-mixed", "bf16-true", 32, "32" or "32-true".',
        ),
        (
            "model.data.data_impl",
            "packed_jsonl",
            "There a batch is a number of packs, here of pairs, and tandem packs the pairs itself. Set "
            "model.data.data_impl=jsonl, the JSONL files in model.data.data_prefix, and model.global_batch_size to a number of "
            "pairs.",
        ),
        (
            "model.data.data_prefix.train",
            [0.3, "a.jsonl", 0.7, "b.jsonl"],
            "A blend with weights draws pairs until a number of samples is reached. Here a weight is a number of passes over a "
            "set: set data.train=[{data_path: FILE, weight: 2}, ...].",
        ),
        (
            "model.data.data_prefix.train",
            ["packed_4096_seed0.npy"],
            "These are packed files. Name the JSONL files that they were made of, or convert each with tandem prepare "
            "--from-nemo FILE --output-dir DIR.",
        ),
        (
            "model.data.data_prefix.validation",
            ["a.jsonl", "b.jsonl"],
            "A validation set has one file here. Name each with data.val_data_paths.NAME=FILE.",
        ),
        ("model.dpo.preference_loss", "kto", 'tandem knows "dpo", "ipo", "rpo_sq", "rpo_bwd_kl" or "rpo_fwd_kl".'),
        ("model.dpo.beta", 0.1, "tandem does not know this key of NeMo Aligner. Remove it."),
        (
            "model.optim.sched.max_steps",
            500,
            "The schedule spans the run here. Set trainer.dpo.max_steps=500, or remove model.optim.sched.max_steps.",
        ),
        ("model.hidden_dropout", 0.1, "tandem trains without dropout in the model. Set it to 0."),
        (
            "exp_manager.checkpoint_callback_params.monitor",
            "val_reward",
            "tandem ranks checkpoints by val_loss, train_loss or val_acc, or by the metric that checkpointing.metric_name names "
            "(docs/metrics.md).",
        ),
        (
            "trainer.dpo.gradient_clip_val",
            "high",
            None,  # left to the schema
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_nearest_way(load, tmp_path, key, value, message):
    with pytest.raises(ConfigError) as error:
        load(**{key.replace(".", "__"): value})
    if message is None:
        assert "policy.max_grad_norm" in str(error.value)
        return
    lines = str(error.value).splitlines()
    (line,) = [line for line in lines if line.endswith(f": {message}")]  # with the keys that belong to it
    place, keys = line.removesuffix(f": {message}").split(": ", 1)
    assert place == f"  {tmp_path / 'theirs.yaml'}" and f"{key} = {json.dumps(value)}" in keys


def test_a_model_named_in_tandems_keys_replaces_a_nemo_file(load):
    found = load("policy.model_name=org/other", pretrained_checkpoint__restore_from_path="sft.nemo")
    assert found.config.policy.model_name == "org/other"


def test_lora_dropout_after_the_adapters_is_refused(load):
    lora = ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dropout=0.1")
    with pytest.raises(ConfigError) as error:
        load(*lora)
    assert str(error.value).endswith(
        "tandem applies dropout to the adapters' inputs. Set model.peft.lora_tuning.dropout_position=pre, or "
        "model.peft.lora_tuning.adapter_dropout=0."
    )
    assert load(*lora, "+model.peft.lora_tuning.dropout_position=pre").config.policy.lora.dropout == 0.1


def test_hydras_groups_are_for_files_of_other_trainers(tmp_path):
    own = {"defaults": [{"optional a": None}], "run": {"seed": 1}}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(own))
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == (
        f'{path}: `defaults:` must be a file name or a list of file names, not [{{"optional a": null}}].'
    )


@pytest.mark.parametrize(("devices", "expected"), [(8, 8), (-1, "all"), ("auto", "all"), ("4", 4)])
def test_devices_and_nodes(tmp_path, devices, expected):
    (tmp_path / "gpt_dpo.yaml").write_text(yaml.safe_dump({**FULL, "trainer": {**FULL["trainer"], "devices": devices}}))
    cluster = load_config(tmp_path / "gpt_dpo.yaml").config.cluster
    assert (cluster.gpus_per_node, cluster.num_nodes) == (expected, 2)


def test_hydras_lists_name_files_without_their_ending_and_end_in_the_file_itself(tmp_path):
    (tmp_path / "gpt_dpo.yaml").write_text(yaml.safe_dump(FULL))
    child = {"defaults": ["gpt_dpo", "_self_"], "model": {"seed": 7}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(child))
    loaded = load_config(tmp_path / "mine.yaml")
    assert (loaded.config.run.seed, loaded.config.policy.model_name) == (7, "org/model")


def test_the_command_of_the_guide_works_without_a_file():
    """Their script then reads its own configuration, so its values apply."""
    loaded = load_config(
        None,
        [
            *(
                "trainer.num_nodes=1",
                "trainer.devices=8",
                "++model.micro_batch_size=1",
                "++model.global_batch_size=512",
            ),
            "pretrained_checkpoint.restore_from_path=org/model",
            "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [b.jsonl]}",
            *("exp_manager.create_wandb_logger=false", "exp_manager.wandb_logger_kwargs.project=dpo_training"),
            *("exp_manager.explicit_log_dir=results", "++trainer.dpo.max_epochs=1"),
            "++model.dpo.ref_policy_kl_penalty=0.1",
        ],
        from_format="nemo-aligner",
    )
    config = loaded.config
    assert (config.policy.train_global_batch_size, config.dpo.reference_policy_kl_penalty) == (512, 0.1)
    assert (config.policy.optimizer.kwargs.lr, config.run.seed, config.dpo.val_period) == (9e-6, 1234, 0.1)
    assert loaded.file_arguments == ["--from-format", "nemo-aligner"]


def test_one_step_of_training(tmp_path, capsys):
    from tandem.report.reporter import Reporter
    from tandem.training.trainer import train

    texts = [(f"<extra_id_1>User\n{i}*10=?\n<extra_id_1>Assistant\n", f"{10 * i}\n<extra_id_1>") for i in range(4)]
    rows = [
        {"prompt": asked, "chosen_response": said, "rejected_response": "No.\n<extra_id_1>"} for asked, said in texts
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = with_changes(
        pretrained_checkpoint__restore_from_path="embedded",
        trainer__precision=32,
        model__global_batch_size=2,
        model__data__data_prefix={"train": [str(tmp_path / "a.jsonl")], "validation": [str(tmp_path / "a.jsonl")]},
        exp_manager__explicit_log_dir=str(tmp_path / "run"),
    )
    path = tmp_path / "gpt_dpo.yaml"
    path.write_text(yaml.safe_dump(tree))
    train(load_config(path, ["trainer.dpo.max_steps=1"]), Reporter("normal"))
    shown = capsys.readouterr().out
    assert f"{path} is a configuration of NeMo Aligner. Keys translated: " in shown
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["split"] == "train"]
    assert [record["step"] for record in trained] == [1]
    # Policy and reference agree before the first step. Scores of 3 and 1, scaled by 2, ask for a margin of 4:
    # p log(p / 0.5) + (1 - p) log((1 - p) / 0.5) with p = sigmoid(4).
    assert trained[0]["preference_loss"] == pytest.approx(0.60305, abs=1e-4)
    assert "  model.micro_batch_size = 1  (tandem fills rows" in Path(tmp_path / "run/translation.txt").read_text()

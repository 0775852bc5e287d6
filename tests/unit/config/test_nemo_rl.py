"""Configurations of NeMo RL, built from its documented keys, old and new spellings, translated key by key."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from patience import within

from tandem.config.compat.records import Translation
from tandem.config.compat.table import load_table
from tandem.config.compat.translate import is_own_key, recognise, translate
from tandem.config.load import load_config
from tandem.config.validation import flatten
from tandem.errors import ConfigError

pytestmark = pytest.mark.usefixtures("of_a_command")

TORCH = "torch.optim.lr_scheduler."
NEW: dict[str, Any] = {
    "dpo": {
        "max_num_epochs": 2,
        "max_num_steps": 40,
        "val_period": 5,
        "val_batches": 3,
        "val_global_batch_size": 4,
        "val_micro_batch_size": 1,
        "val_at_start": False,
        "seed": 7,
        "reference_policy_kl_penalty": 0.2,
        "preference_average_log_probs": True,
        "sft_average_log_probs": "${.preference_average_log_probs}",
        "preference_loss_weight": 1,
        "sft_loss_weight": 0.1,
    },
    "checkpointing": {
        "enabled": True,
        "checkpoint_dir": "results/mine",
        "metric_name": "val:validation-default_loss",
        "keep_top_k": None,
        "save_period": 10,
        "model_save_format": "safetensors",
    },
    "policy": {
        "model_name": "org/model",
        "tokenizer": {"name": "${policy.model_name}", "chat_template_kwargs": None},
        "train_global_batch_size": 16,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 512,
        "precision": "bfloat16",
        "dtensor_cfg": {
            "enabled": True,
            "tensor_parallel_size": 4,
            "activation_checkpointing": True,
            "env_vars": {"A": "b"},
            "lora_cfg": {
                "enabled": True,
                "target_modules": ["*_proj"],
                "match_all_linear": False,
                "dim": 8,
                "alpha": 32,
                "dropout": 0.0,
                "dropout_position": "post",
                "lora_A_init": "xavier",
            },
        },
        "dynamic_batching": {"enabled": False},
        "sequence_packing": {"enabled": True, "train_mb_tokens": "${mul:${policy.max_total_sequence_length},2}"},
        "make_sequence_length_divisible_by": "${policy.dtensor_cfg.tensor_parallel_size}",
        "max_grad_norm": 1.0,
        "optimizer": {
            "name": "torch.optim.AdamW",
            "kwargs": {
                "lr": 1e-6,
                "weight_decay": 0.1,
                "betas": [0.9, 0.98],
                "eps": 1e-5,
                "foreach": False,
                "fused": False,
            },
        },
        "scheduler": [
            {"name": f"{TORCH}LinearLR", "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 3}},
            {"name": f"{TORCH}ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10000000000}},
            {"milestones": [3]},
        ],
        "megatron_cfg": {
            "enabled": False,
            "use_fused_linear_logprobs": False,
            "tensor_model_parallel_size": 2,
            "activation_checkpointing": True,
            "recompute_granularity": "selective",
            "peft": {"enabled": False, "dim": 8},
            "optimizer": {
                "optimizer": "adam",
                "lr": 2e-6,
                "min_lr": 2e-7,
                "weight_decay": 0.01,
                "bf16": True,
                "fp16": False,
                "adam_beta1": 0.9,
                "adam_beta2": 0.95,
                "adam_eps": 1e-8,
                "clip_grad": "${policy.max_grad_norm}",
            },
            "scheduler": {
                "lr_decay_style": "cosine",
                "lr_warmup_iters": 4,
                "lr_warmup_init": 1e-9,
                "lr_decay_iters": 24,
                "weight_decay_incr_style": "constant",
            },
            "fp8_cfg": {"enabled": False, "fp8": "e4m3"},
        },
    },
    "data": {
        "max_input_seq_length": "${policy.max_total_sequence_length}",
        "shuffle": True,
        "num_workers": 8,
        "train": {"dataset_name": "HelpSteer3", "split": "train"},
        "validation": {"dataset_name": "HelpSteer3", "split": "validation"},
        "default": None,
    },
    "logger": {
        "log_dir": "logs",
        "wandb_enabled": False,
        "tensorboard_enabled": False,
        "mlflow_enabled": False,
        "swanlab_enabled": False,
        "monitor_gpus": True,
        "wandb": {"project": "mine", "name": "first", "tags": ["a"]},
        "swanlab": {"project": "mine"},
    },
    "cluster": {"gpus_per_node": 8, "num_nodes": 2},
}


def with_changes(**changes: Any) -> dict[str, Any]:
    """NEW with keys changed, given with __ for the dots: policy__optimizer=None."""
    tree = copy.deepcopy(NEW)
    for name, value in changes.items():
        *above, last = name.split("__")
        node = tree
        for part in above:
            node = node[part]
        node[last] = value
    return tree


@pytest.fixture
def load(tmp_path):
    def loaded(tree: dict[str, Any], *overrides: str, **given: Any):
        path = tmp_path / "theirs.yaml"
        path.write_text(yaml.safe_dump(tree))
        return load_config(path, list(overrides), **given)

    return loaded


def outcomes(translation: Translation) -> dict[str, tuple[str, dict[str, Any]]]:
    return {row.key: (row.kind, dict(row.outcome.settings)) for row in translation.rows}


def test_every_key_is_translated_as_documented(load):
    loaded = load(NEW)
    found = outcomes(loaded.translation)
    assert found["dpo.seed"] == ("translated", {"run.seed": 7})
    assert found["dpo.reference_policy_kl_penalty"] == ("same", {"dpo.reference_policy_kl_penalty": 0.2})
    assert found["policy.train_micro_batch_size"] == ("no effect", {})
    assert found["policy.dtensor_cfg.activation_checkpointing"] == (
        "translated",
        {"policy.activation_checkpointing": "full"},
    )
    assert found["dpo.val_at_end"] == ("default", {"dpo.val_at_end": False})
    config = loaded.config
    assert (config.run.seed, config.dpo.val_at_end, config.dpo.sft_average_log_probs) == (7, False, True)
    assert config.policy.tokenizer.name == "org/model"
    assert config.policy.lora.target_modules == r"(.*\.)?(.*_proj)"
    assert (config.policy.lora.dim, config.policy.lora.alpha) == (8, 32)
    assert config.checkpointing.keep_top_k == 1_000_000
    assert config.data.validation is not None
    assert config.data.validation.split == "validation"
    assert config.logger.wandb.project == "mine"
    assert found["cluster.gpus_per_node"] == ("same", {"cluster.gpus_per_node": 8})
    assert (config.cluster.gpus_per_node, config.cluster.num_nodes) == (8, 2)


def test_a_megatron_configuration_uses_its_own_optimizer_and_schedule(load):
    loaded = load(with_changes(policy__optimizer=None, policy__megatron_cfg__enabled=True))
    policy = loaded.config.policy
    kwargs = policy.optimizer.kwargs
    assert (kwargs.lr, kwargs.weight_decay, kwargs.betas, kwargs.eps) == (2e-6, 0.01, [0.9, 0.95], 1e-8)
    assert policy.activation_checkpointing == "selective"
    assert not policy.lora.enabled
    rise, decay, steps = (one.model_dump() for one in policy.scheduler)
    assert rise["kwargs"] == {"start_factor": 1e-9 / 2e-6, "end_factor": 1.0, "total_iters": 4}
    assert decay == {"name": f"{TORCH}CosineAnnealingLR", "kwargs": {"T_max": 20, "eta_min": 2e-7}}
    assert steps == {"milestones": [4]}
    found = outcomes(loaded.translation)
    assert found["policy.dtensor_cfg.lora_cfg.dim"] == ("no effect", {})
    assert found["policy.scheduler"] == ("no effect", {})


def test_data_keys_of_releases_before_0_6(load):
    old = {key: NEW["data"][key] for key in ("shuffle",)}
    named = load(with_changes(data={**old, "dataset_name": "HelpSteer3"})).config.data
    assert [one.dataset_name for one in named.training_sets] == ["HelpSteer3"]
    assert (named.validation.dataset_name, named.validation.split) == ("HelpSteer3", "validation")
    paths = {"dataset_name": "BinaryPreferenceDataset", "train_data_path": "a.jsonl", "val_data_path": "b.jsonl"}
    own = load(with_changes(data={**old, **paths, "prompt_key": "q", "train_split": "part"})).config.data
    assert own.training_sets[0].model_dump(include={"data_path", "prompt_key", "split", "dataset_name"}) == {
        "data_path": "a.jsonl",
        "dataset_name": "BinaryPreferenceDataset",
        "prompt_key": "q",
        "split": "part",
    }
    assert (own.validation.data_path, own.validation.prompt_key) == ("b.jsonl", "q")


def test_fused_heads_have_no_effect_in_either_spelling(load):
    new = ("use_fused_linear_logprobs", "fused_linear_logprobs_chunk_size")
    old = ("use_linear_ce_fusion_loss", "linear_ce_fusion_chunk_size")
    megatron = {**NEW["policy"]["megatron_cfg"], **dict.fromkeys((*new, *old), 128), "enabled": True}
    found = outcomes(load(with_changes(policy__optimizer=None, policy__megatron_cfg=megatron)).translation)
    assert all(found[f"policy.megatron_cfg.{name}"] == ("no effect", {}) for name in (*new, *old))


@pytest.mark.parametrize(("kind", "coefficient"), [("none", 0.0), ("global_aux_loss", 0.01), ("aux_loss", 0.01)])
def test_megatrons_load_balancing_loss_counts_only_where_it_is_switched_on(load, kind, coefficient):
    given = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.01, "enabled": True}
    tree = with_changes(policy__optimizer=None, policy__megatron_cfg={**NEW["policy"]["megatron_cfg"], **given})
    assert load(tree).config.dpo.router_aux_loss_coef == coefficient


def test_overrides_may_be_in_their_names_and_in_tandems(load):
    loaded = load(NEW, "dpo.seed=3", "policy.dtensor_cfg.tensor_parallel_size=1", "run.name=mine", "~policy.scheduler")
    assert (loaded.config.run.seed, loaded.config.run.name, loaded.config.policy.scheduler) == (3, "mine", None)
    both = load(NEW, "run.seed=5")
    assert both.config.run.seed == 5


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["dpo.sft_loss_weight=0.1"], "dpo.sft_loss_weight", 0.1),
        (["dpo.preference_average_log_probs=True"], "dpo.sft_average_log_probs", True),  # the file refers to it
        (['logger.wandb.name="dpo-dev-8-gpu"'], "logger.wandb.name", "dpo-dev-8-gpu"),
        (["cluster.gpus_per_node=4"], "cluster.gpus_per_node", 4),
        (["policy.dtensor_cfg.lora_cfg.enabled=false"], "policy.lora.enabled", False),
        (["++policy.dtensor_cfg.lora_cfg.dim=4"], "policy.lora.dim", 4),
        (["++policy.megatron_cfg.use_fused_linear_logprobs=true"], "policy.model_name", "org/model"),
        (
            ["+policy.tokenizer.chat_template_kwargs.enable_thinking=true"],
            "policy.tokenizer.chat_template_kwargs",
            {"enable_thinking": True},
        ),
        (["~data.validation"], "data.validation", None),
        (["~policy.megatron_cfg", "~cluster"], "policy.model_name", "org/model"),
        (["++checkpointing.save_optimizer=false"], "checkpointing.save_optimizer", False),
        (["checkpointing.metric_name=validation-default_loss"], "checkpointing.metric_name", "validation-default_loss"),
        (["+data.val_data_paths={one: a.jsonl}"], "data.val_data_paths.one.data_path", "a.jsonl"),
        (["data.train={data_path: a.jsonl, prompt_key: context}"], "data.train.prompt_key", "context"),
    ],
)
def test_the_overrides_of_the_guide_work_in_hydras_forms(load, overrides, key, expected):
    found: Any = load(NEW, *overrides).config
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == expected


def test_without_a_file_the_values_of_their_own_apply():
    """`uv run examples/run_dpo.py OVERRIDES` reads examples/configs/dpo.yaml."""
    loaded = load_config(None, ["cluster.gpus_per_node=8", "dpo.sft_loss_weight=0.1"], from_format="nemo-rl")
    policy = loaded.config.policy
    assert (policy.model_name, policy.train_global_batch_size) == ("meta-llama/Llama-3.2-1B-Instruct", 128)
    assert (loaded.config.dpo.max_num_steps, loaded.config.dpo.sft_loss_weight) == (150, 0.1)
    assert loaded.config.data.validation.split == "validation"


def test_the_section_cluster_alone_does_not_make_a_file_theirs(tmp_path):
    """Both have these keys. Keys that tandem does not have are unknown, not without effect."""
    (tmp_path / "own.yaml").write_text("cluster: {gpus_per_node: 2, num_nodes: 1}\nrun: {seeed: 3}\n")
    with pytest.raises(ConfigError, match=r"Did you mean run\.seed\?"):
        load_config(tmp_path / "own.yaml")


def test_inheritance_and_deletion_work_across_files(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(NEW))
    child = {"defaults": "base.yaml", "policy": {"optimizer": {"kwargs": {"lr": 3e-6}}}, "cluster": {"num_nodes": 4}}
    (tmp_path / "child.yaml").write_text(yaml.safe_dump(child))
    loaded = load_config(tmp_path / "child.yaml")
    assert loaded.config.policy.optimizer.kwargs.lr == 3e-6
    assert loaded.origins["policy.optimizer.kwargs.lr"].endswith("child.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"policy__precision": "fp8"},
            'policy.precision = "fp8": tandem computes in bfloat16 or float32.',
        ),
        (
            {"policy__optimizer": None},
            "policy.optimizer = null: The run needs an optimizer. Set policy.optimizer, or policy.megatron_cfg.enabled=true.",
        ),
        (
            {"policy__optimizer__name": "torch.optim.SGD"},
            'policy.optimizer.name = "torch.optim.SGD": tandem trains with torch.optim.AdamW.',
        ),
        (
            {"logger__swanlab_enabled": True},
            "logger.swanlab_enabled = true: tandem logs to Weights & Biases, TensorBoard and MLflow. Set "
            "logger.swanlab_enabled=false.",
        ),
        (
            {"data__max_input_seq_length": 100},
            "data.max_input_seq_length = 100: It is below policy.max_total_sequence_length = 512, and tandem has one limit. "
            "Set policy.max_total_sequence_length=100.",
        ),
        (
            {"policy__dtensor_cfg__lora_cfg__dropout": 0.1},
            'policy.dtensor_cfg.lora_cfg.dropout_position = "post": tandem applies dropout to the adapters\' inputs. Set '
            "policy.dtensor_cfg.lora_cfg.dropout_position=pre, or a dropout of 0.",
        ),
        (
            {"grpo": {"num_prompts_per_step": 8}},
            "grpo.num_prompts_per_step = 8: tandem does not know this key of NeMo RL. Remove it.",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_nearest_way(load, tmp_path, changes, message):
    with pytest.raises(ConfigError) as error:
        load(with_changes(**changes))
    path = tmp_path / "theirs.yaml"
    assert str(error.value) == f"NeMo RL configuration: a key cannot be translated.\n  {path}: {message}"


def test_all_refused_keys_are_in_one_message(load):
    with pytest.raises(ConfigError, match=r"^NeMo RL configuration: 2 keys cannot be translated\.\n") as error:
        load(with_changes(policy__precision="fp8", logger__swanlab_enabled=True))
    assert len(str(error.value).splitlines()) == 3


def test_many_unknown_keys_are_refused_at_once(load):
    with within(60), pytest.raises(ConfigError, match=r"2,000 keys cannot be translated") as error:
        load(with_changes(policy__junk={f"key{i}": i for i in range(2_000)}))
    assert len(str(error.value).splitlines()) == 22
    assert str(error.value).splitlines()[-1] == "  and 1,980 more"


def test_no_key_of_the_input_is_missing_from_the_table(load):
    for tree in (NEW, with_changes(policy__optimizer=None, policy__megatron_cfg__enabled=True)):
        given = flatten(tree)
        rows = load(tree).translation.rows
        assert sorted(row.key for row in rows if row.kind != "default") == sorted(given)


def test_files_of_tandem_are_left_alone(load):
    assert load({"policy": {"model_name": "org/model"}, "data": {"train": "a.jsonl"}}).translation is None
    assert recognise(load_config(None).config.model_dump()) is None
    # One wrong key does not make a file another trainer's.
    with pytest.raises(ConfigError, match=r"unknown key policy\.train_micro_batch_size"):
        load({"policy": {"train_micro_batch_size": 2}})


def test_an_unknown_format_is_refused(load):
    with pytest.raises(ConfigError) as error:
        load(NEW, from_format="nemo")
    assert str(error.value).startswith("--from-format nemo: not a known format. Give tandem")


def test_a_value_from_the_environment_stays_an_interpolation(load, monkeypatch):
    monkeypatch.setenv("PROJECT", "secret-canary")
    loaded = load(with_changes(logger__wandb__project="${oc.env:PROJECT}"))
    assert loaded.config.logger.wandb.project == "secret-canary"
    assert "secret-canary" not in loaded.as_yaml()
    assert "secret-canary" not in json.dumps([row.value for row in loaded.translation.rows])
    with pytest.raises(ConfigError) as error:
        load(with_changes(logger__wandb__project="${oc.env:PROJECT}-${dpo.seed}"))
    assert str(error.value) == (
        "logger.wandb.project: it combines the environment with other keys, which cannot be translated. Write its value, or "
        "${oc.env:NAME} alone."
    )


def test_two_keys_that_disagree_are_refused(tmp_path):
    tree = with_changes(policy__optimizer=None, policy__megatron_cfg__enabled=True)
    tree["policy"]["megatron_cfg"]["optimizer"]["clip_grad"] = 2.0
    tree["data"]["max_input_seq_length"] = 512
    with pytest.raises(ConfigError) as error:
        translate("nemo-rl", tree, dict.fromkeys(flatten(tree), "theirs.yaml"))
    assert str(error.value) == (
        "theirs.yaml: policy.megatron_cfg.optimizer.clip_grad and policy.max_grad_norm of NeMo RL both set "
        "policy.max_grad_norm here, to 2.0 and 1.0. Remove one of them."
    )


def test_every_key_that_the_table_sets_exists():
    table = load_table("nemo-rl")
    for cases in table.keys.values():
        for case in cases:
            assert case.action != "to" or is_own_key(case.argument)
    assert all(map(is_own_key, table.defaults))


def test_the_run_says_what_became_of_the_keys_and_keeps_the_table(tmp_path, capsys):
    from tandem.report.reporter import Reporter
    from tandem.training.trainer import train

    tree = with_changes(policy__model_name="embedded", policy__tokenizer={"chat_template_kwargs": None})
    tree["data"] = {"train": {"data_path": "embedded"}, "max_input_seq_length": 512}
    tree["policy"]["dtensor_cfg"]["lora_cfg"] = {"enabled": False}
    tree["policy"]["precision"] = "float32"
    tree["checkpointing"]["checkpoint_dir"] = str(tmp_path / "run")
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(tree))
    train(load_config(path, ["dpo.max_num_steps=1"]), Reporter("normal"))
    shown = capsys.readouterr().out
    assert f"{path} is a configuration of NeMo RL. Keys translated: " in shown
    assert "\n  dpo.seed = 7 -> run.seed = 7\n" in shown
    kept = (Path(tmp_path) / "run" / "translation.txt").read_text()
    assert "\nWithout effect here\n" in kept
    assert "  policy.train_micro_batch_size = 2  (tandem fills rows of packed preferences" in kept

"""Configurations of Axolotl, as its documentation describes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.compat.show import full_table
from tandem.config.compat.table import load_table
from tandem.config.compat.translate import is_own_key, recognise
from tandem.config.load import load_config
from tandem.config.validation import flatten
from tandem.errors import ConfigError

FILE: dict[str, Any] = {
    "base_model": "org/model",
    "model_type": "LlamaForCausalLM",
    "special_tokens": {"pad_token": "<pad>", "eos_token": "<|eot_id|>"},
    "load_in_8bit": False,
    "load_in_4bit": True,
    "chat_template": "llama3",
    "rl": "dpo",
    "rl_beta": 0.2,
    "datasets": [{"path": "pairs.jsonl", "split": "train", "type": "chatml.intel"}],
    "dataset_prepared_path": None,
    "val_set_size": 0.05,
    "output_dir": "./outputs/mine",
    "sequence_len": 1024,
    "sample_packing": False,
    "adapter": "qlora",
    "lora_model_dir": None,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "wandb_project": None,
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 4,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": 0.0002,
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "flash_attention": True,
    "warmup_ratio": 0.1,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "weight_decay": 0.0,
    "fsdp_config": {"offload_params": False},
}
FULL = {key: value for key, value in FILE.items() if not key.startswith(("lora_", "adapter", "load_in"))}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return tmp_path


def load(tree: dict[str, Any], *overrides: str, **given: Any) -> Any:
    Path("theirs.yml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return load_config("theirs.yml", list(overrides), **given)


def became(changes: dict[str, Any], key: str, tree: dict[str, Any] = FILE) -> tuple[str, dict[str, Any], str | None]:
    """What became of a key of a file with changes."""
    (row,) = [row for row in load({**tree, **changes}).translation.rows if row.key == key]
    return row.kind, dict(row.outcome.settings), row.outcome.note


def refusal(changes: dict[str, Any]) -> str:
    """The message about the only key that is refused, without the file."""
    with pytest.raises(ConfigError) as error:
        load({**FILE, **changes})
    first, *lines = str(error.value).splitlines()
    assert first == "Axolotl configuration: a key cannot be translated."
    assert len(lines) == 1
    return lines[0].removeprefix(f"  {Path.cwd()}/theirs.yml: ")


def test_a_file_is_translated_key_by_key():
    config = load(FILE).config
    assert config.policy.lora.model_dump(exclude={"exclude_modules", "adapter"}) == {
        "enabled": True,
        "dim": 8,
        "alpha": 16.0,
        "dropout": 0.05,
        "target_modules": "all-linear",
        "quantization": "nf4",
        "use_rslora": False,
        "use_dora": False,
        "target_parameters": [],
        "modules_to_save": [],
        "trainable_token_indices": [],
        "loraplus_lr_ratio": 1.0,
    }
    (train,) = config.data.training_sets
    assert (train.data_path, train.prompt_key, train.split) == ("pairs.jsonl", "question", None)
    assert (config.dpo.preference_loss, config.dpo.reference_policy_kl_penalty) == ("dpo", 0.2)
    assert (config.policy.train_global_batch_size, config.policy.max_total_sequence_length) == (8, 1024)
    assert (config.policy.optimizer.state_dtype, config.policy.optimizer.kwargs.lr) == ("int8", 0.0002)
    assert (config.policy.activation_checkpointing, config.policy.precision) == ("full", "auto")
    # Four validations and one checkpoint per epoch.
    assert (config.dpo.val_period, config.checkpointing.save_period, config.dpo.max_num_epochs) == (0.25, 1.0, 4)
    assert (config.dpo.val_at_start, config.data.validation_share) == (True, 0.05)
    assert (config.run.dir, config.policy.scheduler.name) == ("./outputs/mine", "cosine")


def test_no_key_of_the_input_is_missing_from_the_table():
    found = [row for row in load(FILE).translation.rows if row.kind != "default"]
    assert sorted(row.key for row in found) == sorted(flatten(FILE))


def test_each_key_of_a_set_has_a_line_of_its_own():
    entry = {
        "path": "pairs.jsonl",
        "ds_type": "json",
        "split": "train",
        "type": "chat_template.default",
        "field_chosen": "good",
        "message_property_mappings": {"role": "role", "content": "content"},
        "roles": {"user": ["user"]},
    }
    table = full_table(load({**FILE, "datasets": [entry]}).translation, None)
    for line in (
        "  datasets[0].path = pairs.jsonl -> data.train.data_path = pairs.jsonl",
        "  datasets[0].ds_type = json  (Which rows are read, and what is scored, does not depend on it here.)",
        "  datasets[0].split = train  (It is the split that is read anyway.)",
        "  datasets[0].message_property_mappings.role = role  (These names are known without it; others are refused.)",
        '  datasets[0].roles.user = ["user"]  (These names are known without it; others are refused.)',
    ):
        assert f"{line}\n" in table
    assert "  datasets[0].type = chat_template.default -> data.train.dataset_name = BinaryPreferenceDataset" in table
    assert "  datasets[0].field_chosen = good -> data.train.dataset_name" in table
    assert "  datasets = " not in table


def test_defaults_are_those_of_axolotl():
    tree = {"base_model": "m", "rl": "dpo", "learning_rate": 1e-5, "datasets": FILE["datasets"]}
    loaded = load(tree)
    assert {row.key: row.value for row in loaded.translation.of_kind("default")} == {
        "policy.train_global_batch_size": 1,
        "policy.max_total_sequence_length": 512,
        "policy.optimizer.kwargs.weight_decay": 0.0,
        "policy.optimizer.kwargs.betas": [0.9, 0.999],
        "policy.optimizer.kwargs.eps": 1e-8,
        "policy.scheduler": {"name": "cosine", "warmup_ratio": 0.03},
        "data.drop_last": False,
        "checkpointing.save_period": 1.0,
        "checkpointing.keep_top_k": 4,
    }
    assert not load({**tree, "adapter": "lora", "lora_r": 8, "lora_alpha": 16}).config.export.merge_lora
    orpo = {row.key: row.value for row in load({**tree, "rl": "orpo"}).translation.of_kind("default")}
    assert orpo["dpo.orpo_lambda"] == 0.1
    simpo = load({**tree, "rl": "simpo", "simpo_gamma": 0.3}).config.dpo
    assert (simpo.sft_loss_weight, simpo.sft_average_log_probs, simpo.simpo_gamma) == (1.0, True, 0.3)


def test_a_number_of_steps_takes_enough_epochs_as_with_trl():
    kind, settings, note = became({"max_steps": 4, "num_epochs": 1}, "max_steps")
    assert (kind, settings) == ("translated", {"dpo.max_num_steps": 4, "dpo.max_num_epochs": 4})
    assert note == "enough epochs for these steps"
    kind, _, note = became({"max_steps": 4, "num_epochs": 1}, "num_epochs")
    assert (kind, note) == ("no effect", "max_steps is the length of the run.")


@pytest.mark.parametrize(
    ("changes", "key", "settings"),
    [
        ({"rl": "ipo"}, "rl", {"dpo.preference_loss": "ipo", "dpo.preference_average_log_probs": True}),
        ({"dpo_loss_type": ["apo_zero"]}, "rl", {"dpo.preference_loss": "apo_zero"}),
        (
            {"dpo_loss_type": ["sigmoid", "bco_pair", "sft"], "dpo_loss_weights": [0.8, 0.2, 1.0]},
            "dpo_loss_type",
            {
                "dpo.preference_loss": {"dpo": 0.8, "bco_pair": 0.2},
                "dpo.sft_loss_weight": 1.0,
                "dpo.sft_average_log_probs": True,
            },
        ),
        ({"rl": "orpo", "rl_beta": None, "orpo_alpha": 0.3}, "orpo_alpha", {"dpo.orpo_lambda": 0.3}),
        (
            {"rl": "simpo", "cpo_alpha": 0.0},
            "cpo_alpha",
            {"dpo.sft_loss_weight": 0.0, "dpo.sft_average_log_probs": True},
        ),
        ({"dpo_label_smoothing": 0.1}, "dpo_label_smoothing", {"dpo.label_smoothing": 0.1}),
        ({"dpo_use_weighting": True}, "dpo_use_weighting", {"dpo.wpo": True}),
        # The names of earlier releases.
        ({"rl_beta": None, "dpo_beta": 0.3}, "dpo_beta", {"dpo.reference_policy_kl_penalty": 0.3}),
        ({"rpo_alpha": 0.5}, "rpo_alpha", {"dpo.sft_loss_weight": 0.5, "dpo.sft_average_log_probs": True}),
        ({"gradient_accumulation_steps": None, "batch_size": 8}, "batch_size", {"policy.train_global_batch_size": 8}),
        (
            {"evals_per_epoch": None, "evaluation_strategy": "epoch"},
            "evaluation_strategy",
            {"dpo.val_period": 1.0, "dpo.val_at_start": True, "dpo.val_at_end": True},
        ),
        (
            {"evals_per_epoch": None, "eval_steps": 50},
            "eval_steps",
            {"dpo.val_period": 50, "dpo.val_at_start": True, "dpo.val_at_end": True},
        ),
        # A share of the run of 4 epochs.
        ({"saves_per_epoch": None, "save_steps": 0.125}, "save_steps", {"checkpointing.save_period": 0.5}),
        ({"saves_per_epoch": None, "save_strategy": "no"}, "save_strategy", {"checkpointing.enabled": False}),
        ({"load_in_4bit": False, "load_in_8bit": True}, "load_in_8bit", {"policy.lora.quantization": "int8"}),
        ({"lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save", {"policy.lora.modules_to_save": ["lm_head"]}),
        (
            {"peft_trainable_token_indices": [5, 7]},
            "peft_trainable_token_indices",
            {"policy.lora.trainable_token_indices": [5, 7]},
        ),
        (
            {"peft_trainable_token_indices": {"embed_tokens": [5, 7]}},
            "peft_trainable_token_indices.embed_tokens",
            {"policy.lora.trainable_token_indices": [5, 7]},
        ),
        ({"peft_use_rslora": True}, "peft_use_rslora", {"policy.lora.use_rslora": True}),
        (
            {
                **dict.fromkeys(("lora_target_linear", "load_in_4bit"), False),
                "lora_target_parameters": ["experts.down_proj"],
                "lora_dropout": 0.0,
            },
            "lora_target_parameters",
            {"policy.lora.target_parameters": ["experts.down_proj"], "policy.lora.target_modules": []},
        ),
        ({"peft_use_dora": True, "load_in_4bit": False}, "peft_use_dora", {"policy.lora.use_dora": True}),
        ({"loraplus_lr_ratio": 16}, "loraplus_lr_ratio", {"policy.lora.loraplus_lr_ratio": 16}),
        (
            {"lora_target_linear": False, "lora_target_modules": ["q_proj"]},
            "lora_target_modules",
            {"policy.lora.target_modules": ["q_proj"]},
        ),
        (
            {"warmup_ratio": None, "warmup_steps": 10, "cosine_min_lr_ratio": 0.1},
            "warmup_steps",
            {"policy.scheduler": {"name": "cosine", "min_lr_ratio": 0.1, "warmup_steps": 10}},
        ),
        ({"bf16": True}, "bf16", {"policy.precision": "bfloat16"}),
        ({"excess_length_strategy": "truncate"}, "excess_length_strategy", {"data.overlong": "truncate_completion"}),
        ({"dataset_exact_deduplication": True}, "dataset_exact_deduplication", {"data.duplicates": "drop"}),
        (
            {"wandb_project": "mine"},
            "wandb_project",
            {"logger.wandb_enabled": True, "logger.wandb.project": "mine"},
        ),
        (
            {"mlflow_experiment_name": "mine"},
            "mlflow_experiment_name",
            {"logger.mlflow_enabled": True, "logger.mlflow.experiment_name": "mine"},
        ),
        ({"chat_template": "tokenizer_default"}, "chat_template", {"policy.tokenizer.chat_template": "default"}),
        (
            {"chat_template": "jinja", "chat_template_jinja": "mine.jinja"},
            "chat_template_jinja",
            {"policy.tokenizer.chat_template": "mine.jinja"},
        ),
        (
            {"val_set_size": 0, "test_datasets": [{"path": "test.jsonl", "type": "chatml.prompt_pairs"}]},
            "test_datasets",
            {"data.validation.data_path": "test.jsonl", "data.validation.dataset_name": "BinaryPreferenceDataset"},
        ),
    ],
)
def test_a_key_is_translated(changes, key, settings):
    kind, found, _ = became(changes, key)
    assert (kind, found) == ("translated", settings)


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"rl": "ipo", "dpo_label_smoothing": 0.1}, "dpo_label_smoothing", "Only rl=dpo reads it."),
        ({"adapter": None, "load_in_4bit": False}, "lora_r", "adapter is not set."),
        ({"val_set_size": 0}, "evals_per_epoch", "There is no validation set."),
        ({"trl": {"beta": 0.3}}, "rl_beta", "trl.beta counts."),
        ({"wandb_project": "p", "wandb_mode": "disabled"}, "wandb_project", "Weights & Biases is off."),
        (
            {"plugins": ["axolotl.integrations.liger.LigerPlugin"]},
            "plugins",
            "They are about how the model is computed, not about what is computed.",
        ),
    ],
)
def test_a_key_without_effect_has_its_reason(changes, key, reason):
    assert became(changes, key) == ("no effect", {}, reason)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rl": "kto"},
            'rl = "kto": kto trains on single completions with a label, and tandem on pairs. Set rl=dpo with a set of pairs.',
        ),
        ({"rl": "grpo"}, 'rl = "grpo": tandem trains on pairs: rl is dpo, ipo, orpo or simpo.'),
        ({"rl": None}, "rl = null: Without it, Axolotl trains on single texts. Add rl: dpo, and sets of pairs."),
        ({"learning_rate": None}, "learning_rate = null: Axolotl has no default. Set it."),
        (
            {"peft_trainable_token_indices": {"embed_tokens": [5], "lm_head": [5]}},
            "peft_trainable_token_indices.lm_head = [5]: tandem trains rows of the embeddings, and of a head tied to them. Give "
            "a list of ids.",
        ),
        (
            {"lora_rank_pattern": {"q_proj": 8}},
            "lora_rank_pattern.q_proj = 8: tandem trains plain LoRA adapters. Leave it out.",
        ),
        (
            {"optimizer": "muon"},
            'optimizer = "muon": tandem trains with AdamW, with float32 or 8-bit moments. Leave it out.',
        ),
        ({"fp16": True}, "fp16 = true: tandem computes in bfloat16 or float32. Set bf16=true fp16=false."),
        (
            {"lora_model_dir": "sft"},
            'lora_model_dir = "sft": With rl=dpo, Axolotl makes a new adapter. To train it further: lora_model_dir=null '
            "policy.lora.adapter=DIR.",
        ),
        (
            {"plugins": ["my.plugin.Own"]},
            'plugins = ["my.plugin.Own"]: tandem runs no plugins of Axolotl. Leave out my.plugin.Own.',
        ),
        (
            {"lr_scheduler": "rex"},
            'lr_scheduler = "rex", warmup_ratio = 0.1: tandem has the schedules linear, cosine and constant, each with a '
            "warm-up, and torch's. Set one of them, or policy.scheduler.",
        ),
        (
            {"dpo_loss_type": ["ipo", "hinge"]},
            'rl = "dpo", dpo_loss_type = ["ipo", "hinge"]: ipo is averaged over tokens, which applies to all losses '
            "here. Give ipo alone.",
        ),
        (
            {"hub_model_id": "org/name"},
            'hub_model_id = "org/name": tandem uploads after the run: tandem export RUN --push-to-hub ORG/NAME. Leave it out.',
        ),
        (
            {"val_set_size": 100},
            "val_set_size = 100: tandem holds out a share of the pairs. Set val_set_size to a share, such as 0.05.",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_nearest_way(changes, message):
    with pytest.raises(ConfigError) as error:
        load({**FILE, **changes})
    path = f"{Path.cwd()}/theirs.yml"
    assert f"  {path}: {message}" in str(error.value).splitlines()


BINARY = "BinaryPreferenceDataset"
TURNS = {"message_property_mappings": {"role": "from", "content": "value"}}


@pytest.mark.parametrize(
    ("entry", "fields", "note"),
    [
        (
            {"type": "chatml.argilla"},
            {
                "dataset_name": BINARY,
                "prompt_key": "instruction",
                "chosen_key": "chosen_response",
                "rejected_key": "rejected_response",
            },
            "chatml.argilla: in the tokenizer's own template; in Axolotl, in ChatML",
        ),
        (
            {"type": "llama3.ultra"},
            {"dataset_name": "implicit_prompt"},
            "llama3.ultra: in the tokenizer's own template; in Axolotl, in that of Llama 3",
        ),
        ({"type": "chatml"}, {}, "chatml: in the tokenizer's own template; in Axolotl, in ChatML"),
        (
            {"type": "llama3.icr"},
            {"dataset_name": BINARY, "prompt_key": "input"},
            "llama3.icr: in the tokenizer's own template; in Axolotl, in that of Llama 3",
        ),
        ({"type": "chat_template.argilla_chat"}, {"dataset_name": "implicit_prompt"}, None),
        (
            {"type": "chat_template.argilla_chat", "split": "train[:9]"},
            {"dataset_name": "implicit_prompt", "max_rows": 9},
            None,
        ),
        (
            {"type": "chat_template.default", "field_messages": "conversation", "field_chosen": "better"},
            {"dataset_name": BINARY, "prompt_key": "conversation", "chosen_key": "better"},
            None,
        ),
        (
            {
                "type": "chat_template.default",
                "field_messages": "conversations",
                **TURNS,
                "roles": {"user": ["human"], "assistant": ["gpt"]},
                "ds_type": "json",
            },
            {"dataset_name": "sharegpt"},
            None,
        ),
        # The names of earlier releases.
        (
            {
                "type": "chat_template.default",
                "field_messages": "conversations",
                "message_field_role": "from",
                "message_field_content": "value",
            },
            {"dataset_name": "sharegpt"},
            None,
        ),
    ],
)
def test_a_type_says_how_rows_are_read(entry, fields, note):
    kind, found, why = became({"datasets": [{"path": "a.jsonl", **entry}]}, "datasets")
    wanted = {"data_path": "a.jsonl", **fields}
    assert (kind, found, why) == ("translated", {f"data.train.{name}": one for name, one in wanted.items()}, note)


def test_passthrough_leaves_plain_text_as_it_is_and_renders_messages():
    config = load({**FILE, "datasets": [{"path": "a.jsonl", "type": "passthrough"}]}).config
    assert (config.policy.tokenizer.plain_text, config.policy.tokenizer.chat_template) == ("as_is", "default")


def test_a_type_of_the_users_is_raw_text():
    own = {"path": "a.jsonl", "type": {"field_prompt": "question", "prompt_format": "{prompt}"}}
    config = load({**FILE, "datasets": [own]}).config
    assert config.policy.tokenizer.chat_template is None
    assert config.data.training_sets[0].prompt_key == "question"


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        (
            {"path": "org/pairs", "name": "en", "split": "test", "revision": "v1"},
            {"data_path": "org/pairs", "subset": "en", "split": "test", "revision": "v1"},
        ),
        ({"path": "json", "data_files": ["a.jsonl"], "split": "train"}, {"data_path": "a.jsonl"}),
        ({"path": "./data", "data_files": "a.jsonl"}, {"data_path": "data/a.jsonl"}),
    ],
)
def test_a_path_says_where_rows_are(source, fields):
    (train,) = load({**FILE, "datasets": [{**source, "type": "chatml.intel"}]}).config.data.training_sets
    found = train.model_dump(include={"data_path", "subset", "split", "revision"})
    assert found == {"subset": None, "split": None, "revision": None, **fields}


def test_several_sets_are_one_training_set():
    sets = [
        {"path": "a.jsonl", "type": "chatml.intel"},
        {"path": "json", "data_files": ["b.jsonl", "c.jsonl"], "type": "chatml"},
    ]
    data = load({**FILE, "datasets": sets}).config.data
    assert [one.data_path for one in data.training_sets] == ["a.jsonl", "b.jsonl", "c.jsonl"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "a.jsonl"}, "datasets[0] has no type. Name one, such as chat_template.default."),
        (
            {"path": "a.jsonl", "type": "zephyr.mine"},
            "datasets[0]: the type zephyr.mine is not known here. Set data.train.data_path and, if needed, prompt_key, "
            "chosen_key and rejected_key.",
        ),
        (
            {"path": "a.jsonl", "type": "chatml.intel", "shards": 4},
            "datasets[0].shards is not known here. Leave it out, or set data.train instead.",
        ),
        (
            {"path": "s3://bucket/a.jsonl", "type": "chatml.intel"},
            "datasets[0]: tandem reads files and hub sets. Download s3://bucket/a.jsonl, and set its path.",
        ),
        (
            {"path": "org/pairs", "type": "chatml.intel", "split": "train[:5%]"},
            "datasets[0]: tandem reads a split, or its first rows, such as train[:1000], not train[:5%]. Write the rows to a "
            "file, and name the file.",
        ),
        (
            {"path": "org/nectar", "type": "zephyr.nectar"},
            "datasets[0]: zephyr.nectar prefers the answers of the last rank, the worst ones. To prefer the best: "
            "datasets=null data.train.data_path=PATH data.train.dataset_name=nectar.",
        ),
        (
            {"path": "a.jsonl", "type": {"prompt_format": "Q: {prompt}"}},
            "datasets[0]: tandem has no prompt_format. Write it as a chat template, and set "
            "policy.tokenizer.chat_template=FILE.jinja and data.train.",
        ),
        (
            {"path": "a.jsonl", "type": "chat_template.default", "roles": {"user": ["me"]}},
            "datasets[0]: tandem reads messages of role and content (user, assistant), or conversations of from and value "
            "(human, gpt). Rename its fields and roles.",
        ),
        ("a.jsonl", "It must be a list of sets, each with path and type."),
        ({"path": ["a"], "type": "chatml"}, "datasets[0]: path, split, name and data_files must be texts."),
    ],
)
def test_a_set_that_cannot_be_used_is_refused_with_one_message(entry, message):
    assert refusal({"datasets": [entry]}) == f"datasets = {json.dumps([entry])}: {message}"


def test_ranks_that_share_a_batch_count_once(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    kind, settings, note = became({"tensor_parallel_size": 2}, "micro_batch_size")
    assert (kind, settings) == ("translated", {"policy.train_global_batch_size": 32})
    assert note == "2 per device x 4 accumulated x 4 ranks"


def test_only_files_of_axolotl_are_recognised():
    assert recognise(FILE) == "axolotl"
    others: list[dict[str, Any]] = [
        {"model_name_or_path": "m", "dataset_name": "d", "beta": 0.1, "output_dir": "o"},  # TRL
        {"model_name_or_path": "m", "stage": "dpo", "dataset": "d"},  # LLaMA-Factory
        {"policy": {"dtensor_cfg": {"enabled": True}}, "dpo": {"seed": 1}},  # NeMo RL
        {"policy": {"model_name": "m"}, "data": {"train": "a.jsonl"}},  # tandem
    ]
    assert all(recognise(tree) != "axolotl" for tree in others)


def test_every_key_that_the_table_sets_exists():
    table = load_table("axolotl")
    assert all(is_own_key(case.argument) for cases in table.keys.values() for case in cases if case.action == "to")
    assert all(map(is_own_key, table.defaults))


def test_a_step_is_trained_from_a_file_of_axolotl(folder, capsys):
    from tandem.report.reporter import Reporter
    from tandem.training.trainer import train

    rows = [
        {
            "system": "Be brief.",
            "question": f"What is {i} plus {i}?",
            "chosen": f"It is {2 * i}.",
            "rejected": "No idea.",
        }
        for i in range(20)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {**FULL, "base_model": "embedded", "chat_template": None, "max_steps": 1, "lr_scheduler": "constant"}
    train(load({**tree, "val_set_size": 0.2, "gradient_accumulation_steps": 2}), Reporter("normal"))
    shown = capsys.readouterr().out
    assert "is a configuration of Axolotl. Keys translated: " in shown
    assert "data.train.prompt_key = question" in shown
    metrics = [json.loads(line) for line in (folder / "outputs" / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert [one["num_pairs"] for one in metrics if "num_pairs" in one and "data" not in one] == [4]

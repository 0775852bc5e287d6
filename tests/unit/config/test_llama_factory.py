"""Configurations of LLaMA-Factory, as its documentation describes them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.compat.table import load_table
from tandem.config.compat.translate import is_own_key, recognise
from tandem.config.load import load_config
from tandem.config.validation import flatten
from tandem.errors import ConfigError

pytestmark = pytest.mark.usefixtures("of_a_command")

FILE: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "stage": "dpo",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "q_proj,v_proj",
    "pref_beta": 0.2,
    "pref_loss": "sigmoid",
    "dataset": "mine",
    "template": "qwen3_nothink",
    "cutoff_len": 512,
    "preprocessing_num_workers": 2,
    "output_dir": "saves/mine",
    "logging_steps": 10,
    "save_steps": 100,
    "overwrite_output_dir": True,
    "report_to": "none",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-5,
    "num_train_epochs": 2.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": False,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
    "val_size": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 5,
}
SHAREGPT = {
    "file_name": "mine.json",
    "ranking": True,
    "formatting": "sharegpt",
    "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
}


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "conversations": [{"from": "human", "value": f"What is {i} plus {i}?"}],
            "chosen": {"from": "gpt", "value": f"It is {2 * i}."},
            "rejected": {"from": "gpt", "value": "I do not know."},
        }
        for i in range(count)
    ]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "data").mkdir()
    info({"mine": SHAREGPT})
    (tmp_path / "data" / "mine.json").write_text(json.dumps(rows(12)))
    return tmp_path


def info(sets: Any) -> None:
    Path("data/dataset_info.json").write_text(json.dumps(sets))


def load(tree: dict[str, Any], *overrides: str, **given: Any) -> Any:
    Path("theirs.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return load_config("theirs.yaml", list(overrides), **given)


def became(changes: dict[str, Any], key: str) -> tuple[str, dict[str, Any], str | None]:
    """What became of a key of FILE with changes."""
    (row,) = [row for row in load({**FILE, **changes}).translation.rows if row.key == key]
    return row.kind, dict(row.outcome.settings), row.outcome.note


def refusal(changes: dict[str, Any]) -> str:
    """The message about the only key that is refused, without the file."""
    with pytest.raises(ConfigError) as error:
        load({**FILE, **changes})
    first, *lines = str(error.value).splitlines()
    assert first == "LLaMA-Factory configuration: a key cannot be translated."
    assert len(lines) == 1
    return lines[0].removeprefix(f"  {Path.cwd()}/theirs.yaml: ")


def test_a_file_is_translated_key_by_key():
    loaded = load(FILE)
    config = loaded.config
    assert config.policy.model_name == "org/model"
    assert config.policy.lora.model_dump(include={"enabled", "dim", "alpha", "target_modules"}) == {
        "enabled": True,
        "dim": 4,
        "alpha": 8,  # twice the rank
        "target_modules": ["q_proj", "v_proj"],
    }
    assert (config.dpo.preference_loss, config.dpo.reference_policy_kl_penalty) == ("dpo", 0.2)
    (train,) = config.data.training_sets
    assert (train.data_path, train.dataset_name) == ("data/mine.json", "sharegpt")
    assert (config.data.num_workers, config.data.validation_share, config.data.drop_last) == (2, 0.1, False)
    assert (config.policy.max_total_sequence_length, config.policy.train_global_batch_size) == (512, 8)
    assert (config.run.dir, config.policy.precision, config.dpo.max_num_epochs) == ("saves/mine", "float32", 2)
    assert config.policy.scheduler.model_dump(include={"name", "warmup_ratio"}) == {
        "name": "cosine",
        "warmup_ratio": 0.1,
    }
    assert (config.dpo.val_period, config.dpo.val_at_start, config.dpo.val_at_end) == (5, False, True)
    assert (config.checkpointing.save_period, config.checkpointing.keep_top_k) == (100, 1_000_000)


def test_no_key_of_the_input_is_missing_from_the_table():
    tree = {**FILE, "deepspeed": {"zero": {"stage": 3}}, "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "unused": None}
    found = [row for row in load(tree).translation.rows if row.kind != "default"]
    assert sorted(row.key for row in found) == sorted(flatten(tree))
    assert {row.key: row.kind for row in found}["deepspeed.zero.stage"] == "no effect"


def test_defaults_are_those_of_llama_factory():
    loaded = load({"model_name_or_path": "org/model", "stage": "dpo", "dataset": "mine"})
    assert {row.key: row.value for row in loaded.translation.of_kind("default")} == {
        "policy.lora.enabled": True,
        "export.merge_lora": False,
        "policy.lora.dim": 8,
        "policy.lora.alpha": 16,
        "policy.train_global_batch_size": 8,
        "dpo.max_num_epochs": 3,
        "policy.optimizer.kwargs.lr": 5e-5,
        "policy.optimizer.kwargs.weight_decay": 0.0,
        "policy.optimizer.kwargs.betas": [0.9, 0.999],
        "policy.optimizer.kwargs.eps": 1e-8,
        "policy.scheduler": {"name": "linear"},
        "data.drop_last": False,
        "dpo.val_period": 0,
        "dpo.val_at_start": False,
        "dpo.val_at_end": False,
        "checkpointing.save_period": 500,
        "checkpointing.keep_top_k": 1_000_000,
    }
    full = load({"model_name_or_path": "org/model", "stage": "dpo", "dataset": "mine", "finetuning_type": "full"})
    assert not full.config.policy.lora.enabled


@pytest.mark.parametrize(
    ("changes", "key", "settings"),
    [
        ({"pref_loss": "hinge"}, "pref_loss", {"dpo.preference_loss": "hinge"}),
        (
            {"pref_loss": "ipo"},
            "pref_loss",
            {"dpo.preference_loss": "ipo", "dpo.preference_average_log_probs": True},
        ),
        ({"pref_loss": "orpo"}, "pref_beta", {"dpo.orpo_lambda": 0.2}),
        ({"pref_loss": "simpo"}, "pref_beta", {"dpo.reference_policy_kl_penalty": 0.2}),
        ({"pref_loss": "simpo", "simpo_gamma": 1.5}, "simpo_gamma", {"dpo.simpo_gamma": 1.5}),
        ({"pref_ftx": 0.5}, "pref_ftx", {"dpo.sft_loss_weight": 0.5, "dpo.sft_average_log_probs": True}),
        ({"dpo_label_smoothing": 0.1}, "dpo_label_smoothing", {"dpo.label_smoothing": 0.1}),
        # The names of releases before 0.8.
        ({"pref_loss": None, "dpo_loss": "hinge"}, "dpo_loss", {"dpo.preference_loss": "hinge"}),
        ({"pref_beta": None, "dpo_beta": 0.3}, "dpo_beta", {"dpo.reference_policy_kl_penalty": 0.3}),
        ({"dpo_ftx": 1.0}, "dpo_ftx", {"dpo.sft_loss_weight": 1.0, "dpo.sft_average_log_probs": True}),
        (
            {"eval_strategy": None, "evaluation_strategy": "epoch"},
            "evaluation_strategy",
            {"dpo.val_period": 1.0, "dpo.val_at_start": False, "dpo.val_at_end": True},
        ),
        ({"lora_target": "all"}, "lora_target", {"policy.lora.target_modules": "all-linear"}),
        (
            {"additional_target": "lm_head, embed_tokens"},
            "additional_target",
            {"policy.lora.modules_to_save": ["lm_head", "embed_tokens"]},
        ),
        ({"moe_aux_loss_coef": 0.01}, "moe_aux_loss_coef", {"dpo.router_aux_loss_coef": 0.01}),
        ({"use_rslora": True}, "use_rslora", {"policy.lora.use_rslora": True}),
        ({"use_dora": True}, "use_dora", {"policy.lora.use_dora": True}),
        ({"loraplus_lr_ratio": 16}, "loraplus_lr_ratio", {"policy.lora.loraplus_lr_ratio": 16}),
        ({"lora_alpha": 5}, "lora_alpha", {"policy.lora.alpha": 5}),
        ({"quantization_bit": 4}, "quantization_bit", {"policy.lora.quantization": "nf4"}),
        ({"quantization_bit": 8}, "quantization_bit", {"policy.lora.quantization": "int8"}),
        (
            {"adapter_name_or_path": "sft", "lora_target": None, "lora_rank": None},
            "adapter_name_or_path",
            {"policy.lora.adapter": "sft", "reference.model": "org/model"},
        ),
        ({"ref_model": "org/ref"}, "ref_model", {"reference.model": "org/ref"}),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": None, "warmup_steps": 7},
            "warmup_steps",
            {"policy.scheduler": {"name": "constant", "warmup_steps": 7}},
        ),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
            "lr_scheduler_type",
            {"policy.scheduler": {"name": "cosine", "min_lr_ratio": 0.1, "warmup_ratio": 0.1}},
        ),
        ({"max_steps": 20}, "max_steps", {"dpo.max_num_steps": 20, "dpo.max_num_epochs": 20}),
        ({"save_strategy": "epoch"}, "save_strategy", {"checkpointing.save_period": 1.0}),
        ({"save_strategy": "no", "save_steps": None}, "save_strategy", {"checkpointing.enabled": False}),
        (
            {"report_to": ["wandb", "tensorboard"]},
            "report_to",
            {"logger.wandb_enabled": True, "logger.tensorboard_enabled": True},
        ),
        ({"optim": "adamw_torch"}, "optim", {"policy.optimizer.name": "torch.optim.AdamW"}),
        ({"optim": "paged_adamw_8bit"}, "optim", {"policy.optimizer.state_dtype": "int8"}),
        ({"adam_beta2": 0.95}, "adam_beta2", {"policy.optimizer.kwargs.betas": [0.9, 0.95]}),
        ({"max_samples": 5}, "max_samples", {"data.default.max_rows": 5}),
        ({"template": "empty"}, "template", {"policy.tokenizer.chat_template": None}),
        ({"load_best_model_at_end": True}, "load_best_model_at_end", {"export.checkpoint": "best"}),
        ({"disable_shuffling": True}, "disable_shuffling", {"data.shuffle": False}),
    ],
)
def test_a_key_is_translated(changes, key, settings):
    kind, found, _ = became(changes, key)
    assert (kind, found) == ("translated", settings)


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"flash_attn": "fa2"}, "flash_attn", load_table("llama-factory").cases("flash_attn")[0].argument),
        ({"simpo_gamma": 1.0}, "simpo_gamma", "Only pref_loss=simpo reads it."),
        ({"trust_remote_code": True}, "trust_remote_code", "Code from model repositories is never run."),
        ({"galore_rank": 8}, "galore_rank", "It belongs to an optimizer that is off."),
        ({"finetuning_type": "full"}, "lora_rank", "Only LoRA reads it."),
        ({"save_total_limit": None}, "save_total_limit", "It is not set."),
    ],
)
def test_a_key_without_effect_has_its_reason(changes, key, reason):
    assert became(changes, key) == ("no effect", {}, reason)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stage": "sft"}, 'stage = "sft": tandem trains on pairs: stage=dpo. It does not have this stage.'),
        (
            {"stage": "kto"},
            'stage = "kto": kto trains on single completions with a label, and tandem on pairs. Set stage=dpo with a set of '
            "pairs.",
        ),
        ({"stage": None}, "stage = null: Without it, LLaMA-Factory trains on single texts (sft). Add stage: dpo."),
        (
            {"pref_loss": "kto_pair"},
            'pref_loss = "kto_pair": tandem does not have it. bco_pair also treats chosen and rejected separately: set '
            "pref_loss=sigmoid dpo.preference_loss=bco_pair.",
        ),
        (
            {"finetuning_type": "freeze"},
            'finetuning_type = "freeze": tandem trains all weights, or LoRA adapters. Set finetuning_type=lora or full.',
        ),
        (
            {"pref_loss": "hinge", "dpo_label_smoothing": 0.1},
            "dpo_label_smoothing = 0.1: Only pref_loss=sigmoid has it, in LLaMA-Factory too. Leave it out.",
        ),
        (
            {"ld_alpha": 0.5},
            "ld_alpha = 0.5: LLaMA-Factory applies it to the policy alone, and tandem to policy and reference. Leave it out, "
            "or set dpo.ld_alpha.",
        ),
        (
            {"template": "default"},
            'template = "default": It is LLaMA-Factory\'s own. Write it as a Jinja file: template=null '
            "policy.tokenizer.chat_template=FILE.jinja.",
        ),
        (
            {"val_size": 100},
            "val_size = 100: tandem holds out a share of the pairs. Set val_size to a share, such as 0.05.",
        ),
        (
            {"num_train_epochs": 0.5},
            "num_train_epochs = 0.5: tandem trains complete epochs. Set a whole number of them, or max_steps.",
        ),
        (
            {"report_to": "swanlab"},
            'report_to = "swanlab": tandem logs to Weights & Biases, TensorBoard and MLflow, not to swanlab. Leave it out.',
        ),
        (
            {"warmup_ratio": None, "lr_scheduler_type": None, "lr_scheduler_kwargs": {"num_cycles": 2}},
            "lr_scheduler_kwargs.num_cycles = 2: lr_scheduler_kwargs (num_cycles): the schedule linear has no such setting "
            "here. Leave it out, or set policy.scheduler.",
        ),
        (
            {"max_samples": "all"},
            'max_samples = "all": It, or a key that belongs to it, has a value of another type than expected. Correct it.',
        ),
        (
            {"per_device_train_batch_size": "two", "gradient_accumulation_steps": None},
            'per_device_train_batch_size = "two": It, or a key that belongs to it, has a value of another type than expected. '
            "Correct it.",
        ),
        (
            {"pref_betta": 0.1},
            "pref_betta = 0.1: tandem does not know this key of LLaMA-Factory. Did you mean pref_beta? Otherwise remove it.",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_nearest_way(changes, message):
    assert refusal(changes) == message


@pytest.mark.parametrize(
    ("entry", "fields", "note"),
    [
        (SHAREGPT, {"data_path": "data/mine.json", "dataset_name": "sharegpt"}, None),
        (
            {**SHAREGPT, "columns": {"messages": "conversations", "chosen": "better", "rejected": "worse"}},
            {
                "data_path": "data/mine.json",
                "dataset_name": "sharegpt",
                "chosen_key": "better",
                "rejected_key": "worse",
            },
            None,
        ),
        (
            {
                "hf_hub_url": "org/pairs",
                "subset": "en",
                "split": "test",
                "ranking": True,
                "formatting": "sharegpt",
                "columns": {"messages": "messages", "chosen": "chosen", "rejected": "rejected"},
                "tags": {
                    "role_tag": "role",
                    "content_tag": "content",
                    "user_tag": "user",
                    "assistant_tag": "assistant",
                },
            },
            {
                "data_path": "org/pairs",
                "subset": "en",
                "split": "test",
                "dataset_name": "BinaryPreferenceDataset",
                "prompt_key": "messages",
            },
            None,
        ),
        (
            {
                "hf_hub_url": "org/pairs",
                "folder": "harmless-base",
                "split": "train[:50]",
                "ranking": True,
                "columns": {"prompt": "question", "chosen": "chosen", "rejected": "rejected"},
            },
            {
                "data_path": "org/pairs",
                "subset": "harmless-base",
                "max_rows": 50,
                "dataset_name": "BinaryPreferenceDataset",
                "prompt_key": "question",
            },
            None,
        ),
        (
            {
                "file_name": "a.jsonl",
                "ranking": True,
                "columns": {"prompt": "question", "chosen": "chosen", "rejected": "rejected", "system": "system"},
            },
            {"data_path": "data/a.jsonl", "dataset_name": "BinaryPreferenceDataset", "prompt_key": "question"},
            None,
        ),
        (
            {
                "file_name": "a.jsonl",
                "ranking": True,
                "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
            },
            {"data_path": "data/a.jsonl", "dataset_name": "alpaca"},
            "instruction and input are separated by an empty line; in LLaMA-Factory, by a line break",
        ),
        # Of releases before 0.8: output is a list of the better and the worse answer.
        (
            {"file_name": "a.json", "ranking": True},
            {"data_path": "data/a.json", "dataset_name": "alpaca_pair"},
            "instruction and input are separated by an empty line; in LLaMA-Factory, by a line break",
        ),
    ],
)
def test_a_set_of_dataset_info_is_read(entry, fields, note):
    info({"mine": entry, "other": {"file_name": "x.json"}})
    kind, found, why = became({}, "dataset")
    assert (kind, found, why) == ("translated", {f"data.train.{name}": value for name, value in fields.items()}, note)


def test_several_sets_and_a_validation_set():
    info({"one": SHAREGPT, "two": {**SHAREGPT, "file_name": "two.json"}})
    data = load({**FILE, "dataset": "one, two", "eval_dataset": "two", "val_size": None}).config.data
    assert [one.data_path for one in data.training_sets] == ["data/mine.json", "data/two.json"]
    assert data.validation.data_path == "data/two.json"


WHERE = 'dataset = "mine": data/dataset_info.json'


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"yours": SHAREGPT}, f"{WHERE} has no set of this name. It has yours."),
        ([1], f"{WHERE}: not a JSON object of named sets."),
        ({"mine": 3}, f"{WHERE}: mine: not a JSON object with columns and tags."),
        ({"mine": {**SHAREGPT, "columns": []}}, None),
        ({"mine": {**SHAREGPT, "columns": "x"}}, f"{WHERE}: mine: not a JSON object with columns and tags."),
        ({"mine": {**SHAREGPT, "columns": {"chosen": 3}}}, f"{WHERE}: mine: columns and tags must be texts."),
        ({"mine": {**SHAREGPT, "file_name": ["a"]}}, f"{WHERE}: mine: file_name must be a text."),
        (
            {"mine": {**SHAREGPT, "file_name": "${oc.env:HOME}"}},
            f"{WHERE}: mine: a value contains ${{, which tandem would replace. Remove it.",
        ),
        (
            {"mine": {**SHAREGPT, "ranking": False}},
            f"{WHERE}: mine: ranking is not true, so it has no pairs. Name a set of pairs.",
        ),
        (
            {"mine": {**SHAREGPT, "columns": {"chosen": "a", "images": "b"}}},
            f"{WHERE}: mine: only text is trained, and its rows have images.",
        ),
        (
            {"mine": {**SHAREGPT, "columns": {"kto_tag": "label"}}},
            f"{WHERE}: mine: its rows are unpaired (kto_tag), and tandem trains on pairs.",
        ),
        ({"mine": {"hf_hub_url": "../x", "ranking": True}}, f"{WHERE}: mine: hf_hub_url must be ORG/NAME."),
        (
            {"mine": {"script_url": "x", "ranking": True}},
            f"{WHERE}: mine: tandem does not read script_url. Download the set, and set data.train.data_path.",
        ),
        (
            {"mine": {**SHAREGPT, "num_samples": 10}},
            f"{WHERE}: mine: tandem draws no random rows (num_samples). Set data.train.max_rows for the first rows.",
        ),
        (
            {"mine": {**SHAREGPT, "tags": {"user_tag": "me"}}},
            f"{WHERE}: mine: tandem reads conversations of from and value (human, gpt), or messages of role and content (user, "
            "assistant). Rename its columns and tags.",
        ),
        (
            {"mine": {**SHAREGPT, "formatting": "openai"}},
            f"{WHERE}: mine: tandem reads the formatting alpaca and sharegpt, not openai.",
        ),
    ],
)
def test_a_set_that_cannot_be_used_is_refused_with_one_message(sets, message):
    info(sets)
    if message is None:
        assert became({}, "dataset")[0] == "translated"
    else:
        assert refusal({}) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not readable as JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"\xff", "not readable as JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[" * 100_000, "not readable as JSON: maximum recursion depth exceeded"),
        (b" " * (4 * 1024 * 1024 + 1), "over 4 MiB, too large for a list of sets."),
        (None, "no such file. Set dataset_dir to its folder, or set data.train.data_path instead of dataset."),
    ],
)
def test_a_damaged_dataset_info_ends_in_one_message(folder, content, message):
    path = folder / "data" / "dataset_info.json"
    path.unlink()
    if content is None:
        os.mkfifo(path)  # reading it would wait forever
    else:
        path.write_bytes(content)
    assert refusal({}).startswith(f'dataset = "mine": data/dataset_info.json: {message}')


def test_tandems_own_data_counts_instead():
    loaded = load({**FILE, "dataset": "nothing", "max_samples": 1}, "data.train.data_path=own.jsonl")
    assert loaded.config.data.training_sets[0].data_path == "own.jsonl"


def test_the_batch_counts_all_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    kind, settings, note = became({}, "per_device_train_batch_size")
    assert (kind, settings) == ("translated", {"policy.train_global_batch_size": 32})
    assert note == "2 per device x 4 accumulated x 4 ranks"


def test_overrides_may_be_in_their_names_and_in_tandems():
    config = load(
        FILE, "pref_beta=0.3", "learning_rate=1e-4", "policy.scheduler.warmup_ratio=0.2", "run.name=mine"
    ).config
    assert (config.dpo.reference_policy_kl_penalty, config.policy.optimizer.kwargs.lr) == (0.3, 1e-4)
    assert (config.policy.scheduler.name, config.policy.scheduler.warmup_ratio) == ("cosine", 0.2)


def test_an_override_applies_to_one_set_and_is_refused_for_several():
    assert load(FILE, "data.train.split=test").config.data.training_sets[0].model_dump(
        include={"split", "data_path"}
    ) == {
        "split": "test",
        "data_path": "data/mine.json",
    }
    info({"one": SHAREGPT, "two": SHAREGPT})
    with pytest.raises(ConfigError) as error:
        load({**FILE, "dataset": "one,two"}, "data.train.split=test")
    one = '{"data_path": "data/mine.json", "dataset_name": "sharegpt"}'
    assert str(error.value) == (
        "command line: data.train.split cannot be set, because dataset of LLaMA-Factory is translated to data.train = "
        f"[{one}, {one}]. Set data.train instead."
    )


def test_tokens_are_not_shown():
    rows = load({**FILE, "hf_hub_token": "secret-canary"}).translation.rows
    assert "secret-canary" not in json.dumps([row.value for row in rows])


def test_only_files_of_llama_factory_are_recognised():
    assert recognise(FILE) == "llama-factory"
    assert recognise({"stage": "sft", "model_name_or_path": "m", "dataset": "d"}) == "llama-factory"
    others: list[dict[str, Any]] = [
        {"model_name_or_path": "m", "dataset_name": "d", "beta": 0.1, "output_dir": "o"},  # TRL
        {"base_model": "m", "rl": "dpo", "datasets": []},  # Axolotl
        {"policy": {"dtensor_cfg": {"enabled": True}}, "dpo": {"seed": 1}},  # NeMo RL
        {"policy": {"model_name": "m"}, "data": {"train": "a.jsonl"}},  # tandem
    ]
    assert all(recognise(tree) != "llama-factory" for tree in others)


def test_every_key_that_the_table_sets_exists():
    table = load_table("llama-factory")
    assert all(is_own_key(case.argument) for cases in table.keys.values() for case in cases if case.action == "to")
    assert all(map(is_own_key, table.defaults))


@pytest.mark.parametrize(("method", "exported"), [("lora", "adapter_model"), ("full", "model")])
def test_a_step_is_trained_from_a_file_of_llama_factory(capsys, method, exported):
    from tandem.report.reporter import Reporter
    from tandem.training.trainer import train

    tree = {**FILE, "model_name_or_path": "embedded", "max_steps": 1, "lora_target": "all", "val_size": 0}
    tree |= {"finetuning_type": method, "max_samples": 9}
    tree |= {"template": None, "preprocessing_num_workers": 1, "lr_scheduler_type": "constant"}
    train(load(tree), Reporter("normal"))
    shown = capsys.readouterr().out
    assert "is a configuration of LLaMA-Factory. Keys translated: " in shown
    assert "\n  dataset = mine -> data.train.data_path = data/mine.json, data.train.dataset_name = sharegpt\n" in shown
    kept = Path("saves/mine/translation.txt").read_text()
    assert "  ddp_timeout = 180000000  (The launcher decides: torchrun" in kept
    first = json.loads(Path("saves/mine/metrics.jsonl").read_text().splitlines()[0])
    assert first["num_pairs"] == 8
    assert Path(f"saves/mine/model/{exported}.safetensors").is_file()
    assert "pairs used: 8 of 9" in shown

"""Suggestions for unknown keys: names from other trainers, and similar spellings."""

import re

import pytest

from tandem.config.compat.suggest import describe_unknown_key, edits, other_names, suggestion
from tandem.config.keys import key_names
from tandem.config.load import load_config
from tandem.errors import ConfigError

pytestmark = pytest.mark.usefixtures("of_a_command")

SECTIONS = "run|dpo|policy|reference|data|checkpointing|export|logger"
# Written in a note: a key, or a key with a value.
NAMED = re.compile(rf"\b(?:{SECTIONS})\.[\w.]*\w(?:=(?:\{{[^}}]*\}}|\w+))?")


@pytest.mark.parametrize("name", sorted(other_names()))
def test_every_suggested_key_is_in_the_schema(name):
    meaning = other_names()[name]
    assert name not in key_names(), "the schema knows it"
    assert name == name.lower()
    assert meaning.key is None or meaning.key in key_names()
    assert meaning.note is None or meaning.note.endswith(".")
    for written in NAMED.findall(meaning.note or ""):
        key, _, value = written.partition("=")
        if key != "data.validation.split":  # of a set that is null by default
            assert key in key_names()
        if value:
            load_config(None, [written, *(["policy.lora.enabled=true"] if ".lora." in key else [])])


# Names that users of TRL and NeMo RL have tried.
TRIED = {
    "beta": "Did you mean dpo.reference_policy_kl_penalty?",
    "learning_rate": "Did you mean policy.optimizer.kwargs.lr?",
    "num_train_epochs": "Did you mean dpo.max_num_epochs?",
    "eval_steps": "Did you mean dpo.val_period?",
    "eval_strategy": "Did you mean dpo.val_period? Steps between validations; 0 turns them off.",
    "save_steps": "Did you mean checkpointing.save_period?",
    "save_total_limit": "Did you mean checkpointing.keep_top_k?",
    "gradient_checkpointing": "Did you mean policy.activation_checkpointing? It is none, selective or full.",
    "precompute_ref_log_probs": "Did you mean reference.mode? reference.mode=cached is the default and computes the "
    "log-probabilities once.",
    "per_device_train_batch_size": "Did you mean policy.train_global_batch_size? It counts the pairs of an optimizer step over "
    "all devices; row lengths are chosen to fit each device.",
    "gradient_accumulation_steps": "Did you mean policy.train_global_batch_size? It counts the pairs of an optimizer step, "
    "however many packs they take; accumulation follows from it.",
    "policy.context_parallel_size": "Did you mean policy.parallel.context? It divides every pack among as many ranks, for packs "
    "that do not fit on one GPU.",
    "tensor_parallel_size": "Not supported; several GPUs share the weights (docs/workers.md).",
    "max_prompt_length": "Did you mean policy.max_total_sequence_length? It limits prompt and completion together; "
    "data.overlong=truncate_prompt cuts prompts to fit.",
    "warmup_ratio": "Did you mean policy.scheduler.warmup_ratio? It needs policy.scheduler.name.",
    "lr_scheduler_type": "Did you mean policy.scheduler? policy.scheduler.name is linear, cosine, constant or wsd.",
    "bf16": "Did you mean policy.precision? policy.precision=bfloat16 is the default on a GPU.",
    "fp16": "Training in float16 is not supported; policy.precision is bfloat16 or float32.",
    "validation_split": "Did you mean data.validation_share? data.validation.split names the split of a separate set.",
    "report_to": "Each tracker has its own key, logger.wandb_enabled, logger.tensorboard_enabled and logger.mlflow_enabled.",
    "logging_steps": "Not needed; every step is written to metrics.jsonl.",
    "use_liger_kernel": "Not needed; the head computes log-probabilities in chunks, without a logits tensor "
    "(policy.head_chunk_tokens).",
    "padding_free": "Not needed; rows are packed, so there is almost no padding (policy.packing.mode).",
    "ref_model": "Did you mean reference.model?",
    "model_name_or_path": "Did you mean policy.model_name?",
    "dataset_name": "Did you mean data.train.data_path? data.train.dataset_name is the format of the rows.",
    "data.dataset_name": "Did you mean data.train.dataset_name?",
    "load_in_4bit": "Did you mean policy.lora.quantization? policy.lora.quantization=nf4.",
    "rpo_alpha": "Did you mean dpo.sft_loss_weight? The SFT loss is a sum over tokens; "
    "dpo.sft_average_log_probs=true averages it.",
    "resume_from_checkpoint": "The same command resumes an unfinished run; tandem train --resume DIR resumes the run "
    "in DIR.",
    "policy.train_micro_batch_size": "Did you mean policy.packing.packs_per_micro_batch? It counts the rows of a forward "
    "pass; policy.train_global_batch_size counts the pairs of a step.",
}


@pytest.mark.parametrize("name", TRIED)
def test_a_name_from_another_trainer_gets_its_suggestion(name):
    assert suggestion(name) == TRIED[name]


# Fields of transformers' TrainingArguments and of TRL's configurations that decide something here.
COMMON = re.findall(
    r"\w+",
    """
    beta learning_rate per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps num_train_epochs
    max_steps eval_steps eval_strategy evaluation_strategy save_steps save_strategy save_total_limit gradient_checkpointing
    precompute_ref_log_probs max_length max_prompt_length max_completion_length truncation_mode loss_type loss_weights
    label_smoothing warmup_ratio warmup_steps lr_scheduler_type lr_scheduler_kwargs bf16 fp16 report_to logging_steps
    output_dir overwrite_output_dir seed data_seed use_liger_kernel padding_free ref_model model_name_or_path model_revision
    dataset_name dataset_config dataset_train_split dataset_test_split lora_r lora_alpha lora_dropout lora_target_modules
    use_peft use_dora load_in_4bit load_in_8bit attn_implementation torch_dtype dtype weight_decay adam_beta1 adam_beta2
    adam_epsilon max_grad_norm optim metric_for_best_model greater_is_better load_best_model_at_end resume_from_checkpoint
    rpo_alpha ld_alpha simpo_gamma cpo_alpha discopop_tau use_weighting f_divergence_type f_alpha_divergence_coef
    reference_free sync_ref_model disable_dropout generate_during_eval dataset_num_proc dataloader_num_workers
    dataloader_drop_last group_by_length torch_compile deepspeed fsdp fsdp_config push_to_hub run_name trust_remote_code
    full_determinism eval_on_start remove_unused_columns neftune_noise_alpha logging_dir save_only_model
    """,
)


@pytest.mark.parametrize("name", COMMON)
def test_common_training_arguments_get_a_suggestion(name):
    assert suggestion(name)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("dpo.val_perod", "dpo.val_period"),
        ("dpo.Val-Period", "dpo.val_period"),
        ("val_perod", "dpo.val_period"),
        ("data.train.0.promt_key", "data.train.0.prompt_key"),
        ("polcy", "policy"),
        ("learning_rat", "policy.optimizer.kwargs.lr"),
        ("policy.scheduler.warmup_rato", "policy.scheduler.warmup_ratio"),
        ("model_name", "policy.model_name"),
        ("checkpoint", "export.checkpoint"),
        ("prompt_key", "data.train.prompt_key"),
    ],
)
def test_a_similar_spelling_is_suggested(key, meant):
    assert suggestion(key) == f"Did you mean {meant}?"


@pytest.mark.parametrize("key", ["zzqq", "steps", "mode", "max_foo", "name", "policy.nme2", "eval", "dpo.temperature"])
def test_nothing_is_suggested_for_a_distant_spelling(key):
    assert suggestion(key) is None
    assert describe_unknown_key(key) == f"unknown key {key}. `tandem config` lists all keys."


@pytest.mark.parametrize(
    ("one", "other", "num"),
    [
        ("weight", "weight", 0),
        ("wieght", "weight", 1),
        ("polcy", "policy", 1),
        ("", "abc", 3),
        ("kitten", "sitting", 3),
    ],
)
def test_edit_distances_match_hand_counted_ones(one, other, num):
    assert edits(one, other) == edits(other, one) == num


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(None, list(overrides))
    return str(error.value)


def test_keys_in_an_unknown_section_get_one_suggestion_each():
    message = refusal(
        "policy.dtensor_cfg={enabled: true, activation_checkpointing: true}", "training_args.learning_rate=1e-5"
    )
    assert message.splitlines() == [
        "command line: unknown key policy.dtensor_cfg.activation_checkpointing. Did you mean policy.activation_checkpointing? "
        "`tandem config` lists all keys.",
        "command line: unknown key training_args.learning_rate. Did you mean policy.optimizer.kwargs.lr? `tandem config` lists "
        "all keys.",
    ]


def test_an_unknown_section_without_known_names_is_reported_once():
    assert refusal("megatron_cfg={a: 1, b: {c: 2}}") == (
        "command line: unknown key megatron_cfg. Not needed; tandem train uses every GPU of the machine, and the GPUs share "
        "the model (docs/cluster.md). `tandem config` lists all keys."
    )


def test_keys_of_other_trainers_that_no_trainer_is_recognised_by(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text("model_name_or_path: org/model\nlearning_rate: 1.0e-6\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).splitlines()[-1] == (
        "These are keys of LLaMA-Factory and TRL: `--from-format llama-factory` or `--from-format trl` reads them."
    )
    path.write_text("learning_rate: 1.0e-6\ndpo: {beta: 0.1}\n")  # one key may be a slip
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert "--from-format" not in str(error.value)

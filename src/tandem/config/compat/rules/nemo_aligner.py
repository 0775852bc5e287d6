"""Rules for NeMo Aligner's configurations."""

from typing import Any

from tandem.config.compat.records import Given, Outcome, no_effect, refused, translated
from tandem.config.sections.policy import ALL_LINEAR

DPO = "trainer.dpo"
PREFIX = "model.data.data_prefix"
SCHEDULE = "model.optim.sched"
LORA = "model.peft.lora_tuning"
CHECKPOINTS = "exp_manager.checkpoint_callback_params"
# The matrices of a Hugging Face model that Megatron's names stand for, separate or in one.
LAYERS = {
    "attention_qkv": ["q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn"],
    "attention_dense": ["o_proj", "out_proj", r"self_attn\.dense", r"attention\.dense", r"attn\.c_proj"],
    "mlp_fc1": ["gate_proj", "up_proj", "gate_up_proj", "fc1", "dense_h_to_4h", "c_fc"],
    "mlp_fc2": ["down_proj", "fc2", "dense_4h_to_h", r"mlp\.c_proj"],
}
GROUPS = {"attention": ["attention_qkv", "attention_dense"], "mlp": ["mlp_fc1", "mlp_fc2"]}
METRICS = {"val_loss": "val_loss", "train_loss": "train:loss", "val_acc": "validation-default_accuracy"}


def model_folder(key: str, value: Any, given: Given) -> Outcome:
    """The model to start from. A .nemo file is an archive of Megatron's weights, which only NeMo can read."""
    if given.get("policy.model_name") is not None:
        return no_effect("policy.model_name names the model.")
    if value is None and given.get("tokenizer_path") is not None:
        return no_effect("Packing data needs only the tokenizer.")
    if value is None:
        return refused("No model is given. Set policy.model_name to a Hugging Face folder or hub name.")
    if str(value).rstrip("/").endswith(".nemo"):
        return refused(
            "tandem cannot read .nemo files. Set policy.model_name to the Hugging Face model that it was made from, or "
            "convert it with NeMo's scripts/checkpoint_converters/convert_*_nemo_to_hf.py."
        )
    return translated({"policy.model_name": value})


def max_steps(key: str, value: Any, given: Given) -> Outcome:
    """The number of steps. A number below 0 means all steps of the epochs."""
    limit = given.get(f"{DPO}.limit_train_batches")
    if _is_number_of_batches(limit) and limit > 0:
        value = limit if value is None or value < 0 else min(value, limit)
    if value is None or value < 0:
        return translated({"dpo.max_num_steps": None}, "all steps of max_epochs")
    return translated({"dpo.max_num_steps": value})


def train_batches(key: str, value: Any, given: Given) -> Outcome:
    """The number of batches of an epoch, or the share of them, to train on."""
    if value is None or value < 0 or (isinstance(value, float) and value >= 1):
        return no_effect("All batches of an epoch are trained on.")
    if isinstance(value, float):
        given_files = given.get(f"{PREFIX}.train", given.get(PREFIX))
        files = [given_files] if isinstance(given_files, str) else given_files or []
        weight = {"data.train.weight": value} if len(files) < 2 else _training_sets(files, value)
        return translated(weight, "a different share of the pairs in each epoch")
    if value > 0 and given.get(f"{DPO}.max_epochs", 1) == 1:
        return max_steps(f"{DPO}.max_steps", given.get(f"{DPO}.max_steps"), given)
    return refused(f"With several epochs, or for no step, tandem has no such limit. Set {DPO}.max_steps instead.")


def val_batches(key: str, value: Any, given: Given) -> Outcome:
    """The number of validation batches, or the share of them. With 0, there is no validation."""
    if value is None or (isinstance(value, float) and value == 1):
        return translated({"dpo.val_batches": None}, "all")
    if isinstance(value, float):
        return refused(
            f"How many batches it means depends on the data. Set {key} to a number of batches of "
            "model.global_batch_size pairs, or to 1.0 for all."
        )
    if value == 0:
        return translated({"dpo.val_period": 0, "dpo.val_at_end": False}, "no validation")
    return translated({"dpo.val_batches": value})


def val_period(key: str, value: Any, given: Given) -> Outcome:
    """The number of steps between validations, or the share of an epoch."""
    if given.get(f"{DPO}.limit_val_batches") == 0:
        return no_effect(f"{DPO}.limit_val_batches is 0: there is no validation.")
    if isinstance(value, int):
        if value > 0:
            return translated({"dpo.val_period": value})
        return translated({"dpo.val_period": 0, "dpo.val_at_end": False}, "no validation")
    limit = given.get(f"{DPO}.limit_train_batches")
    if _is_number_of_batches(limit) and limit > 0:
        return translated({"dpo.val_period": int(value * limit)})
    if 0 < value < 1:
        return translated({"dpo.val_period": value}, "share of an epoch")
    if value == 1 and given.get(f"{DPO}.max_epochs", 1) == 1:
        return translated({"dpo.val_period": 0}, "only after the last step")
    return refused(
        f"tandem takes a share of an epoch below 1, or a number of steps. Set {key} to the steps of an epoch."
    )


def _is_number_of_batches(limit: Any) -> bool:
    return isinstance(limit, int) and not isinstance(limit, bool)


def gradient_clipping(key: str, value: Any, given: Given) -> Outcome:
    return translated({"policy.max_grad_norm": value or None}, None if value else "no clipping")


def saving(key: str, value: Any, given: Given) -> Outcome:
    """Whether checkpoints are saved: with the callback, and an interval above 0."""
    interval = given.get(f"{DPO}.save_interval", 1)
    enabled = given.get("exp_manager.create_checkpoint_callback", True) is not False and interval > 0
    period = {"checkpointing.save_period": value} if key == f"{DPO}.save_interval" and interval > 0 else {}
    return translated({"checkpointing.enabled": enabled, **period})


def tracked_metric(key: str, value: Any, given: Given) -> Outcome:
    if value is None or (str(value).startswith("val_") and not _has_validation(given)):
        return no_effect("No metric is measured that ranks checkpoints: the latest are kept.")
    if value not in METRICS:
        return refused(
            "tandem ranks checkpoints by val_loss, train_loss or val_acc, or by the metric that checkpointing.metric_name "
            "names (docs/metrics.md)."
        )
    return translated({"checkpointing.metric_name": METRICS[value]})


def metric_direction(key: str, value: Any, given: Given) -> Outcome:
    if value not in ("min", "max"):
        return refused('tandem knows "min" or "max".')
    return translated({"checkpointing.higher_is_better": value == "max"})


def _has_validation(given: Given) -> bool:
    has_set = any(name.startswith(f"{PREFIX}.validation") for name in given.values)
    return (has_set or "data.validation" in given) and given.get(f"{DPO}.limit_val_batches") != 0


def data_files(key: str, value: Any, given: Given) -> Outcome:
    """The data: one file, a list of files, or a mapping with such lists for train, validation and test."""
    name = key.removeprefix(PREFIX).removeprefix(".") or "train"
    if name == "test":
        return no_effect("Training reads no test set.")
    if value is None:
        return no_effect("It is not set.")
    files = [value] if isinstance(value, str) else [str(one) for one in value]
    if any(_is_number(one) for one in files):
        return refused(
            "A blend with weights draws pairs until a number of samples is reached. Here a weight is a number of passes over a "
            "set: set data.train=[{data_path: FILE, weight: 2}, ...]."
        )
    if not files:
        return refused("No file is given. Name one.")
    if any(one.endswith(".npy") for one in files):
        return refused(
            "These are packed files. Name the JSONL files that they were made of, or convert each with tandem prepare "
            "--from-nemo FILE --output-dir DIR."
        )
    if name == "train":
        share = given.get(f"{DPO}.limit_train_batches")
        return translated(_training_sets(files, share if isinstance(share, float) and 0 < share < 1 else None))
    if len(files) > 1:
        return refused("A validation set has one file here. Name each with data.val_data_paths.NAME=FILE.")
    return translated(
        {"data.validation.data_path" if name == "validation" else f"data.val_data_paths.{name}": files[0]}
    )


def _training_sets(files: list[str], share: float | None) -> dict[str, Any]:
    """The settings for training files, of each of which an epoch has a share."""
    if len(files) == 1:
        return {"data.train.data_path": files[0]}
    return {"data.train": files if share is None else [{"data_path": file, "weight": share} for file in files]}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def splits(key: str, value: Any, given: Given) -> Outcome:
    """Parts of one file for training, validation and tests, such as 980,20,0."""
    if value is None or PREFIX not in given.values:
        return no_effect("It is not set." if value is None else f"{PREFIX} names a file for each set.")
    train, validation, test = ([float(part) for part in str(value).replace("/", ",").split(",")] + [0, 0])[:3]
    if test:
        return refused("tandem sets no part aside for tests. Split the file, or make the third number 0.")
    return translated({"data.validation_share": validation / (train + validation)}, "drawn at random")


def length_limit(key: str, value: Any, given: Given) -> Outcome:
    """The longest sequence. `model.data.seq_length` counts if both are given; the checkpoint's length if none is."""
    if value is None:
        return no_effect(
            "NeMo Aligner reads it from the checkpoint. Here, policy.max_total_sequence_length is the limit."
        )
    if key != "model.data.seq_length" and given.get("model.data.seq_length") is not None:
        return no_effect("model.data.seq_length is the limit.")
    return translated({"policy.max_total_sequence_length": value})


def old_average(key: str, value: Any, given: Given) -> Outcome:
    """`average_log_probs` of releases before 0.4, which later ones ignore."""
    if "model.dpo.preference_average_log_probs" in given:
        return no_effect("model.dpo.preference_average_log_probs counts.")
    return translated({"dpo.preference_average_log_probs": value})


def schedule(key: str, value: Any, given: Given) -> Outcome:
    """NeMo's CosineAnnealing and WarmupPolicy. Every key of the section gives the same result."""
    if key == SCHEDULE:  # null
        return translated({"policy.scheduler": None}, "constant")
    found: dict[str, Any] = given.get(SCHEDULE)
    name, peak = found.get("name"), given.get("model.optim.lr")
    if name not in ("CosineAnnealing", "WarmupPolicy"):
        return refused(
            f"tandem translates CosineAnnealing and WarmupPolicy, not {name}. Set policy.scheduler (docs/keys.md)."
        )
    length = found.get("max_steps")
    if length is not None and length != given.get(f"{DPO}.max_steps"):
        return refused(
            f"The schedule spans the run here. Set {DPO}.max_steps={length}, or remove {SCHEDULE}.max_steps."
        )
    if found.get("constant_ratio"):
        return refused(f"Set {SCHEDULE}.constant_steps instead.")
    if name == "WarmupPolicy":
        return _warmup(found)
    if not isinstance(peak, int | float) or peak <= 0:
        return refused("model.optim.lr is not set.")
    steps = {name: found[name] for name in ("warmup_ratio", "warmup_steps", "constant_steps") if found.get(name)}
    lowest = {"min_lr_ratio": round(found["min_lr"] / peak, 12)} if found.get("min_lr") else {}
    starts_at_zero = found.get("constant_steps") or not found.get("warmup_steps")
    return translated(
        {"policy.scheduler": {"name": "cosine", **steps, **lowest}},
        None if starts_at_zero else "the warm-up starts at 0; in NeMo Aligner, one step above 0",
    )


def _warmup(found: dict[str, Any]) -> Outcome:
    if not (steps := found.get("warmup_steps")):
        return translated({"policy.scheduler": {"name": "constant", "warmup_ratio": found.get("warmup_ratio") or 0.0}})
    torch_name = "torch.optim.lr_scheduler.LinearLR"
    rise = {"start_factor": 1 / (steps + 1), "end_factor": 1.0, "total_iters": steps}
    return translated({"policy.scheduler": {"name": torch_name, "kwargs": rise}})


def lora_size(key: str, value: Any, given: Given) -> Outcome:
    """The rank. The scale is alpha / rank, and alpha is the rank unless it is given."""
    alpha = given.get(f"{LORA}.alpha")
    return translated({"policy.lora.dim": value, "policy.lora.alpha": value if alpha is None else alpha})


def lora_dropout(key: str, value: Any, given: Given) -> Outcome:
    if value and given.get(f"{LORA}.dropout_position", "post") != "pre":
        return refused(f"tandem applies dropout to the adapters' inputs. Set {LORA}.dropout_position=pre, or {key}=0.")
    return translated({"policy.lora.dropout": value or 0.0})


def lora_layers(key: str, value: Any, given: Given) -> Outcome:
    """The layers that get adapters, by Megatron's names."""
    names = [value] if isinstance(value, str) else list(value)
    if "all" in names:
        return translated({"policy.lora.target_modules": ALL_LINEAR})
    parts = [part for name in names for part in GROUPS.get(name, [name])]
    if not parts or any(part not in LAYERS for part in parts):
        return refused(f"tandem knows {', '.join([*LAYERS, *GROUPS])} and all. Set policy.lora.target_modules.")
    layers = dict.fromkeys(layer for part in parts for layer in LAYERS[part])
    return translated({"policy.lora.target_modules": rf"(.*\.)?({'|'.join(layers)})"}, "one adapter per matrix")


def run_folder(key: str, value: Any, given: Given) -> Outcome:
    """`explicit_log_dir`, or a folder for the run in `exp_dir`."""
    if value is None:
        return no_effect("It is not set.")
    if key == "exp_manager.explicit_log_dir":
        return translated({"run.dir": value})
    if given.get("exp_manager.explicit_log_dir") is not None:
        return no_effect("exp_manager.explicit_log_dir is the folder.")
    return translated({"run.dir": f"{str(value).rstrip('/')}/{given.get('exp_manager.name', 'default')}"})


def devices(key: str, value: Any, given: Given) -> Outcome:
    """Lightning's devices: a number, -1 or auto for all, or a list of their numbers."""
    if value in (-1, "-1", "auto"):
        return translated({"cluster.gpus_per_node": "all"})
    if isinstance(value, list):
        return refused("Set trainer.devices to their number, and choose them with CUDA_VISIBLE_DEVICES.")
    return translated({"cluster.gpus_per_node": int(value) if isinstance(value, str) else value})


RULES = {
    f"aligner_{rule.__name__}": rule
    for rule in (
        *(model_folder, max_steps, train_batches, val_batches, val_period, gradient_clipping),
        *(saving, tracked_metric, metric_direction, run_folder, devices),
        *(data_files, splits, length_limit, old_average, schedule, lora_size, lora_dropout, lora_layers),
    )
}

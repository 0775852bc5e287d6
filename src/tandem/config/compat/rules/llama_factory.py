"""Rules for LLaMA-Factory's configurations."""

from typing import Any

from tandem.config.compat.records import Given, Outcome, no_effect, refused, translated
from tandem.config.compat.rules import hugging_face as shared
from tandem.config.compat.rules.dataset_info import named_sets
from tandem.config.compat.rules.hugging_face import SetError
from tandem.config.sections.policy import ALL_LINEAR

LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
GIVEN_INSTEAD = "data.train is given instead."
OWN_TEMPLATE = "the tokenizer's own template is used; compare them with tandem inspect"


def _loss_of(given: Given) -> str:
    return given.get("pref_loss") or given.get("dpo_loss") or "sigmoid"


def _uses_lora(given: Given) -> bool:
    return (given.get("finetuning_type") or "lora") == "lora" and given.get("policy.lora.enabled") is not False


def loss(key: str, value: Any, given: Given) -> Outcome:
    """The preference loss. IPO is computed from averages there."""
    if value == "kto_pair":
        return refused(
            "tandem does not have it. bco_pair also treats chosen and rejected separately: set pref_loss=sigmoid "
            "dpo.preference_loss=bco_pair."
        )
    if value not in LOSSES:
        return refused(f"LLaMA-Factory has {', '.join(LOSSES)} and kto_pair.")
    settings: dict[str, Any] = {"dpo.preference_loss": LOSSES[value]}
    if value == "ipo":
        return translated(
            {**settings, "dpo.preference_average_log_probs": True}, "averaged over tokens, as in LLaMA-Factory"
        )
    return translated(settings)


def beta(key: str, value: Any, given: Given) -> Outcome:
    name = "dpo.orpo_lambda" if _loss_of(given) == "orpo" else "dpo.reference_policy_kl_penalty"
    return translated({name: value})


def orpo_default(key: str, value: Any, given: Given) -> Outcome:
    """The weight of ORPO's odds-ratio term, which is pref_beta there, with its default."""
    if _loss_of(given) != "orpo":
        return no_effect("")
    return translated({"dpo.orpo_lambda": 0.1})


def sft_term(key: str, value: Any, given: Given) -> Outcome:
    if not value:
        return translated({"dpo.sft_loss_weight": value})
    return translated(
        {"dpo.sft_loss_weight": value, "dpo.sft_average_log_probs": True}, "averaged over tokens, as in LLaMA-Factory"
    )


def smoothing(key: str, value: Any, given: Given) -> Outcome:
    if not value or _loss_of(given) == "sigmoid":
        return translated({"dpo.label_smoothing": value}) if value else no_effect("It is 0.")
    return refused("Only pref_loss=sigmoid has it, in LLaMA-Factory too. Leave it out.")


def simpo_gamma(key: str, value: Any, given: Given) -> Outcome:
    if _loss_of(given) != "simpo":
        return no_effect("Only pref_loss=simpo reads it.")
    return translated({"dpo.simpo_gamma": value})


def lora(key: str, value: Any, given: Given) -> Outcome:
    """Settings of new adapters. An adapter to start from has its own."""
    if given.get("adapter_name_or_path"):
        return no_effect("Taken from the adapter.")
    if key == "lora_rank":
        return translated({"policy.lora.dim": value})
    if key == "lora_alpha":
        return translated({"policy.lora.alpha": value or 2 * (given.get("lora_rank") or 8)})
    if key in ("use_rslora", "use_dora"):
        return translated({f"policy.lora.{key}": value})
    names = [one.strip() for one in value.split(",")] if isinstance(value, str) else list(value)
    if key == "additional_target":
        return translated({"policy.lora.modules_to_save": names})
    return translated({"policy.lora.target_modules": ALL_LINEAR if names == ["all"] else names})


def lora_defaults(key: str, value: Any, given: Given) -> Outcome:
    if not _uses_lora(given):
        return no_effect("")
    enabled = {"policy.lora.enabled": True, "export.merge_lora": False}
    if given.get("adapter_name_or_path") or given.get("policy.lora.adapter"):
        return translated(enabled)
    return translated({**enabled, "policy.lora.dim": 8, "policy.lora.alpha": 2 * (given.get("lora_rank") or 8)})


def adapter(key: str, value: Any, given: Given) -> Outcome:
    """An adapter to train further. The reference is the model without it there, and the start of training here."""
    names = [one.strip() for one in value.split(",")] if isinstance(value, str) else list(value)
    if len(names) != 1 or given.get("create_new_adapter"):
        return refused(
            "tandem trains one adapter on a model. Merge it into the model first: llamafactory-cli export, or "
            "tandem export."
        )
    settings = {"policy.lora.adapter": names[0]}
    if given.get("ref_model") or given.get("reference.model") or _loss_of(given) in ("orpo", "simpo"):
        return translated(settings)
    base = given.get("model_name_or_path")
    return translated(
        {**settings, "reference.model": base}, "the reference is the model without the adapter, as in LLaMA-Factory"
    )


def reference(key: str, value: Any, given: Given) -> Outcome:
    if _loss_of(given) in ("orpo", "simpo"):
        return no_effect(f"pref_loss={_loss_of(given)} has no reference.")
    return translated({"reference.model": value})


def quantization(key: str, value: Any, given: Given) -> Outcome:
    if given.get("quantization_method") not in (None, "bnb", "bitsandbytes"):
        return refused("tandem quantises with bitsandbytes. Set quantization_method=bnb.")
    if value not in (4, 8) or (value == 4 and given.get("quantization_type") == "fp4"):
        return refused(
            "tandem quantises frozen weights to nf4 or int8. Set quantization_bit to 4 or 8, with "
            "quantization_type nf4."
        )
    return translated({"policy.lora.quantization": {4: "nf4", 8: "int8"}[value]})


def template(key: str, value: Any, given: Given) -> Outcome:
    return translated({"policy.tokenizer.chat_template": "default"}, OWN_TEMPLATE)


def dataset(key: str, value: Any, given: Given) -> Outcome:
    """The training sets: names in dataset_info.json."""
    if shared.has_own_training_set(given):
        return no_effect(GIVEN_INSTEAD)
    try:
        sets = named_sets(given.get("dataset"), given.get("dataset_dir") or "data")
    except SetError as error:
        return refused(str(error)) if key == "dataset" else no_effect("dataset names the sets in it.")
    note = "; ".join(dict.fromkeys(one.note for one in sets.values() if one.note)) or None
    fields = [dict(one.fields) for one in sets.values()]
    if len(fields) > 1:
        return translated({"data.train": fields}, note)
    return translated({f"data.train.{name}": one for name, one in fields[0].items()}, note)


def eval_dataset(key: str, value: Any, given: Given) -> Outcome:
    if "data.validation" in given or "data.val_data_paths" in given:
        return no_effect("data.validation is given instead.")
    try:
        sets = named_sets(value, given.get("dataset_dir") or "data")
    except SetError as error:
        return refused(str(error))
    if len(sets) > 1:
        return translated(
            {"data.val_data_paths": {name: dict(one.fields) for name, one in sets.items()}}, "each is measured"
        )
    (only,) = sets.values()
    return translated({f"data.validation.{name}": one for name, one in only.fields.items()}, only.note)


def max_samples(key: str, value: Any, given: Given) -> Outcome:
    """The rows to read of each set, from its beginning."""
    if shared.has_own_training_set(given):
        return no_effect(GIVEN_INSTEAD)
    return translated({"data.default.max_rows": shared.whole(value)}, "the first rows of each set")


def batch(key: str, value: Any, given: Given) -> Outcome:
    one, times = given.get("per_device_train_batch_size"), given.get("gradient_accumulation_steps")
    return shared.batch(8 if one is None else one, 1 if times is None else times, shared.num_ranks())


def schedule(key: str, value: Any, given: Given) -> Outcome:
    rate = given.get("learning_rate")
    return shared.schedule(
        given.get("lr_scheduler_type") or "linear",
        warmup_steps=given.get("warmup_steps"),
        warmup_ratio=given.get("warmup_ratio"),
        settings=given.get("lr_scheduler_kwargs") or {},
        rate=5e-5 if rate is None else rate,
        max_steps=max(given.get("max_steps") or 0, 0),
    )


def length(key: str, value: Any, given: Given) -> Outcome:
    epochs = given.get("num_train_epochs")
    return shared.length(key, 3 if epochs is None else epochs, given.get("max_steps"))


def validation(key: str, value: Any, given: Given) -> Outcome:
    """When to validate. If it validates at all, LLaMA-Factory also does so after training."""
    strategy = given.get("eval_strategy") or given.get("evaluation_strategy") or "no"
    steps = given.get("eval_steps") or given.get("logging_steps") or 500
    if strategy not in ("no", "steps", "epoch"):
        return refused("It is no, steps or epoch.")
    return translated(
        {
            "dpo.val_period": {"no": 0, "steps": steps, "epoch": 1.0}[strategy],
            "dpo.val_at_start": bool(given.get("eval_on_start")),
            "dpo.val_at_end": strategy != "no" or bool(given.get("do_eval")),
        }
    )


def saving(key: str, value: Any, given: Given) -> Outcome:
    strategy = given.get("save_strategy") or "steps"
    if strategy == "no":
        return translated({"checkpointing.enabled": False}, "the model is exported at the end")
    if strategy not in ("steps", "epoch"):
        return refused("It is no, steps or epoch here. export.checkpoint=best exports the best checkpoint.")
    return translated({"checkpointing.save_period": 1.0 if strategy == "epoch" else given.get("save_steps") or 500})


def report_to(key: str, value: Any, given: Given) -> Outcome:
    return shared.trackers(value, "No tracker is used. metrics.jsonl has every step.")


RULES = {
    f"llama_factory.{rule.__name__}": rule
    for rule in (
        loss,
        beta,
        orpo_default,
        sft_term,
        smoothing,
        simpo_gamma,
        lora,
        lora_defaults,
        adapter,
        reference,
        quantization,
        template,
        dataset,
        eval_dataset,
        max_samples,
        shared.held_out,
        batch,
        shared.validation_batch,
        shared.betas,
        schedule,
        length,
        validation,
        saving,
        report_to,
    )
}

"""Rules for Axolotl's configurations."""

from dataclasses import replace
from typing import Any

from tandem.config.compat.records import Given, Outcome, no_effect, refused, translated
from tandem.config.compat.rules import hugging_face as shared
from tandem.config.compat.rules.axolotl_data import has_raw_text, parts_of, sets_of
from tandem.config.sections.policy import ALL_LINEAR

PREFERENCE = "dpo.preference_loss"
AVERAGED = {"dpo.preference_average_log_probs": True}
AVERAGED_NOTE = "averaged over tokens, as in Axolotl"
# Losses of TRL's DPO trainer that are called otherwise here. `sft` is the SFT term.
RENAMED = {"sigmoid": "dpo", "aot_pair": "aot_unpaired"}
LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("aot_pair", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft"),
)
KNOWN_PLUGINS = ("liger", "cut_cross_entropy", "kernels")
BETAS = ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha")  # the first that is set counts


def loss(key: str, value: Any, given: Given) -> Outcome:
    """rl, dpo_loss_type and dpo_loss_weights."""
    rl = given.get("rl")
    if key != "rl" and rl != "dpo":
        return no_effect("Only rl=dpo reads it.")
    match rl:
        case "ipo":
            return translated({PREFERENCE: "ipo", **AVERAGED}, AVERAGED_NOTE)
        case "orpo":
            return translated({PREFERENCE: "orpo"}, "the SFT term is over completions; in Axolotl, over prompts too")
        case "simpo":
            return translated({PREFERENCE: "simpo"})
    names = given.get("dpo_loss_type") or ["sigmoid"]
    names = [names] if isinstance(names, str) else names
    weights = given.get("dpo_loss_weights") or [1.0] * len(names)
    if len(weights) != len(names) or any(name not in LOSSES for name in names):
        return refused(f"It must be a list of {', '.join(LOSSES)}, with as many weights.")
    return _weighted(dict(zip(names, weights, strict=True)))


def _weighted(losses: dict[str, float]) -> Outcome:
    sft = losses.pop("sft", 0)
    settings: dict[str, Any] = {"dpo.sft_loss_weight": sft, "dpo.sft_average_log_probs": True} if sft else {}
    if not losses:
        return refused("tandem trains a preference loss, and sft with it. Add one, such as sigmoid.")
    if "ipo" in losses and len(losses) > 1:
        return refused("ipo is averaged over tokens, which applies to all losses here. Give ipo alone.")
    renamed = {RENAMED.get(name, name): weight for name, weight in losses.items()}
    (first, weight), *more = renamed.items()
    if more:
        return translated({**settings, PREFERENCE: renamed})
    if weight != 1:
        settings["dpo.preference_loss_weight"] = weight
    if first == "ipo":
        return translated({**settings, PREFERENCE: first, **AVERAGED}, AVERAGED_NOTE)
    return translated({**settings, PREFERENCE: first})


def beta(key: str, value: Any, given: Given) -> Outcome:
    first = next(name for name in BETAS if given.get(name) is not None)
    if key != first:
        return no_effect(f"{first} counts.")
    return translated({"dpo.orpo_lambda" if given.get("rl") == "orpo" else "dpo.reference_policy_kl_penalty": value})


def orpo_default(key: str, value: Any, given: Given) -> Outcome:
    return translated({"dpo.orpo_lambda": 0.1}) if given.get("rl") == "orpo" else no_effect("")


def sft_term(key: str, value: Any, given: Given) -> Outcome:
    """cpo_alpha, the weight of the SFT term of rl=simpo, which is 1 by default; and rpo_alpha of earlier releases."""
    if key == "rpo_alpha" or given.get("rl") == "simpo":
        weight = 1.0 if value is None else value
        note = "averaged over the tokens of a pair; in Axolotl, over those of a batch"
        return translated({"dpo.sft_loss_weight": weight, "dpo.sft_average_log_probs": True}, note if weight else None)
    return no_effect("Only rl=simpo reads it.")


def smoothing(key: str, value: Any, given: Given) -> Outcome:
    return (
        translated({"dpo.label_smoothing": value}) if given.get("rl") == "dpo" else no_effect("Only rl=dpo reads it.")
    )


def simpo_gamma(key: str, value: Any, given: Given) -> Outcome:
    return (
        translated({"dpo.simpo_gamma": value}) if given.get("rl") == "simpo" else no_effect("Only rl=simpo reads it.")
    )


def quantization(key: str, value: Any, given: Given) -> Outcome:
    if not value:
        return no_effect("It is off.")
    if not given.get("adapter"):
        return refused("tandem quantises frozen weights. Set adapter=lora, or leave it out.")
    return translated({"policy.lora.quantization": {"load_in_4bit": "nf4", "load_in_8bit": "int8"}[key]})


def lora_default(key: str, value: Any, given: Given) -> Outcome:
    """Axolotl exports the adapter alone."""
    is_on = given.get("adapter") in ("lora", "qlora") and given.get("policy.lora.enabled") is not False
    return translated({"export.merge_lora": False}) if is_on else no_effect("")


def targets(key: str, value: Any, given: Given) -> Outcome:
    """lora_target_linear, for all linear layers, and lora_target_modules."""
    names = given.get("lora_target_modules") or []
    names = [names] if isinstance(names, str) else names
    if embedding := next((name for name in names if name in ("embed_tokens", "lm_head")), None):
        return refused(f"tandem adapts the linear layers, not {embedding}. Leave it out.")
    if given.get("lora_target_linear"):
        return translated({"policy.lora.target_modules": ALL_LINEAR})
    return (
        translated({"policy.lora.target_modules": names})
        if names
        else no_effect("lora_target_modules names the layers.")
    )


def parameters(key: str, value: Any, given: Given) -> Outcome:
    """lora_target_parameters. Without names of layers, only these get adapters."""
    settings: dict[str, Any] = {"policy.lora.target_parameters": [value] if isinstance(value, str) else list(value)}
    if not given.get("lora_target_linear") and not given.get("lora_target_modules"):
        settings["policy.lora.target_modules"] = []
    return translated(settings)


def adapter_to_start_from(key: str, value: Any, given: Given) -> Outcome:
    if given.get("rl") in ("orpo", "simpo"):
        return translated({"policy.lora.adapter": value})
    return refused(
        "With rl=dpo, Axolotl makes a new adapter. To train it further: lora_model_dir=null policy.lora.adapter=DIR."
    )


TEXT_SETTINGS: dict[str, dict[str, Any]] = {
    "turn": {},
    "raw": {"policy.tokenizer.chat_template": None},
    "as_is": {"policy.tokenizer.plain_text": "as_is"},
}


def datasets(key: str, value: Any, given: Given) -> Outcome:
    if shared.has_own_training_set(given):
        return no_effect("data.train is given instead.")
    try:
        sets = sets_of(value, key)
    except shared.SetError as error:
        return refused(str(error))
    if len({one.text for one in sets}) > 1:
        return refused("Some sets are texts as they are, and some are put into a template. Train on one kind.")
    settings = TEXT_SETTINGS[sets[0].text]
    note = "; ".join(dict.fromkeys(one.note for one in sets if one.note)) or None
    if len(sets) > 1:
        found = translated({"data.train": [dict(one.fields) for one in sets], **settings}, note)
    else:
        found = translated({**{f"data.train.{name}": one for name, one in sets[0].fields.items()}, **settings}, note)
    return replace(found, parts=parts_of(value, key, found))


def test_datasets(key: str, value: Any, given: Given) -> Outcome:
    if "data.validation" in given or "data.val_data_paths" in given:
        return no_effect("data.validation is given instead.")
    try:
        sets = sets_of(value, key)
    except shared.SetError as error:
        return refused(str(error))
    if len(sets) > 1:
        named = {f"test-{i}": dict(one.fields) for i, one in enumerate(sets)}
        found = translated({"data.val_data_paths": named}, "each is measured")
    else:
        found = translated({f"data.validation.{name}": one for name, one in sets[0].fields.items()}, sets[0].note)
    return replace(found, parts=parts_of(value, key, found))


def chat_template(key: str, value: Any, given: Given) -> Outcome:
    if has_raw_text(given.get("datasets")):
        return no_effect("The type of the set gives its texts as they are.")
    if value == "jinja" and given.get("chat_template_jinja"):
        return no_effect("chat_template_jinja gives it.")
    if str(value).startswith("tokenizer_default"):
        return translated({"policy.tokenizer.chat_template": "default"})
    note = "the tokenizer's own template is used; compare them with tandem inspect"
    return translated({"policy.tokenizer.chat_template": "default"}, note)


def template_file(key: str, value: Any, given: Given) -> Outcome:
    if str(value).endswith(".jinja"):
        return translated({"policy.tokenizer.chat_template": value})
    return refused("Write it to a file, and set chat_template_jinja=FILE.jinja.")


def template_variables(key: str, value: Any, given: Given) -> Outcome:
    return translated({f"policy.tokenizer.{key}": value})


def batch(key: str, value: Any, given: Given) -> Outcome:
    """micro_batch_size x gradient_accumulation_steps x ranks. batch_size, of earlier releases, is that of one rank."""
    one, times, both = (given.get(name) for name in ("micro_batch_size", "gradient_accumulation_steps", "batch_size"))
    if times is None and both is not None:
        times = shared.whole(both) // shared.whole(one or 1)
    parallel = 1
    for name in ("tensor_parallel_size", "context_parallel_size"):
        size = given.get(name) or 1
        if not isinstance(size, int):
            return refused(f"{name} is not a whole number. Correct it.")
        parallel *= size
    return shared.batch(one or 1, times or 1, max(1, shared.num_ranks() // parallel))


def schedule(key: str, value: Any, given: Given) -> Outcome:
    """The schedule. Without a warm-up, Axolotl takes 3 % of the steps, at most 100."""
    name, steps, ratio = given.get("lr_scheduler") or "cosine", given.get("warmup_steps"), given.get("warmup_ratio")
    settings = dict(given.get("lr_scheduler_kwargs") or {})
    if (least := given.get("cosine_min_lr_ratio")) is not None:
        settings["min_lr_rate"] = least
    found = shared.schedule(
        name,
        warmup_steps=steps,
        warmup_ratio=0.03 if steps is None and ratio is None else ratio,
        settings=settings,
        rate=given.get("learning_rate"),
        max_steps=max(given.get("max_steps") or 0, 0),
    )
    if found.kind == "translated" and steps is None and ratio is None:
        return translated(found.settings, "Axolotl limits the warm-up to 100 steps")
    return found


def length(key: str, value: Any, given: Given) -> Outcome:
    return shared.length(key, given.get("num_epochs") or 1, given.get("max_steps"))


def _period(given: Given, times: str, steps: str) -> int | float | None:
    """Steps, or a share of an epoch. Axolotl's steps below 1 are a share of the run."""
    if per_epoch := given.get(times):
        return 1 / shared.whole(per_epoch)
    found = given.get(steps) or None
    return found * (given.get("num_epochs") or 1) if found is not None and found < 1 else found


def validation(key: str, value: Any, given: Given) -> Outcome:
    if not any(
        given.get(name) for name in ("val_set_size", "test_datasets", "data.validation", "data.validation_share")
    ):
        return no_effect("There is no validation set.")
    strategy = given.get("eval_strategy") or given.get("evaluation_strategy")
    period = _period(given, "evals_per_epoch", "eval_steps")
    if period is None:
        if strategy not in (None, "no", "steps", "epoch"):
            return refused("It is no, steps or epoch.")
        period = {None: 0, "no": 0, "steps": 500, "epoch": 1.0}[strategy]
    if isinstance(period, float) and period > 1:
        return refused("Its share of the run is more than an epoch. Set eval_steps to a number of steps.")
    happens = period > 0
    note = "also after the last step" if happens else None
    settings = {"dpo.val_period": period, "dpo.val_at_start": happens, "dpo.val_at_end": happens}
    return translated(settings, note)


def saving(key: str, value: Any, given: Given) -> Outcome:
    period, strategy = _period(given, "saves_per_epoch", "save_steps"), given.get("save_strategy") or "epoch"
    if period is None and strategy == "no":
        return translated({"checkpointing.enabled": False}, "the model is exported at the end")
    if period is None and strategy not in ("steps", "epoch"):
        return refused("It is no, steps or epoch here. export.checkpoint=best exports the best checkpoint.")
    period = {"steps": 500, "epoch": 1.0}[strategy] if period is None else period
    if isinstance(period, float) and period > 1:
        return refused("Its share of the run is more than an epoch. Set save_steps to a number of steps.")
    return translated({"checkpointing.save_period": period})


def wandb(key: str, value: Any, given: Given) -> Outcome:
    """wandb_project turns Weights & Biases on, unless its mode is disabled."""
    if given.get("wandb_mode") == "disabled" or value in ("", False):
        return no_effect("Weights & Biases is off.")
    project = given.get("wandb_project")
    return translated({"logger.wandb_enabled": True, **({"logger.wandb.project": project} if project else {})})


def mlflow(key: str, value: Any, given: Given) -> Outcome:
    if value in ("", False):
        return no_effect("MLflow is off.")
    name = given.get("mlflow_experiment_name")
    return translated({"logger.mlflow_enabled": True, **({"logger.mlflow.experiment_name": name} if name else {})})


def plugins(key: str, value: Any, given: Given) -> Outcome:
    names = [value] if isinstance(value, str) else list(value)
    known = [f"axolotl.integrations.{name}." for name in KNOWN_PLUGINS]
    if unknown := [str(name) for name in names if not str(name).startswith(tuple(known))]:
        return refused(f"tandem runs no plugins of Axolotl. Leave out {', '.join(unknown)}.")
    return no_effect("They are about how the model is computed, not about what is computed.")


RULES = {
    f"axolotl.{rule.__name__}": rule
    for rule in (
        loss,
        beta,
        orpo_default,
        sft_term,
        smoothing,
        simpo_gamma,
        quantization,
        lora_default,
        targets,
        parameters,
        adapter_to_start_from,
        datasets,
        test_datasets,
        chat_template,
        template_file,
        template_variables,
        shared.held_out,
        batch,
        shared.validation_batch,
        shared.betas,
        schedule,
        length,
        validation,
        saving,
        wandb,
        mlflow,
        plugins,
    )
}

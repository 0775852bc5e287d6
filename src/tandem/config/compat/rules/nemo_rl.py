"""Rules for NeMo RL's configurations."""

import re
from fnmatch import translate as glob_expression
from typing import Any

from tandem.config.compat.records import Given, Outcome, no_effect, refused, translated
from tandem.config.sections.policy import ALL_LINEAR

MEGATRON = "policy.megatron_cfg"
SPLIT_FOR_VALIDATION = {"HelpSteer3": "validation"}  # named sets that NeMo RL also validates on


def steps_or_null(key: str, value: Any, given: Given) -> Outcome:
    """A number of steps, or a number below 1 for no limit."""
    if isinstance(value, int) and value < 1:
        return translated({"dpo.max_num_steps": None}, "no limit: all steps of max_num_epochs")
    return Outcome("same", {"dpo.max_num_steps": value})


def input_length(key: str, value: Any, given: Given) -> Outcome:
    """The length beyond which a pair is left out there. The limit here is that of the whole sequence."""
    longest = given.get("policy.max_total_sequence_length")
    if value is None or longest is None or value >= longest:
        return no_effect("policy.max_total_sequence_length is the limit.")
    return refused(
        f"It is below policy.max_total_sequence_length = {longest}, and tandem has one limit. Set "
        f"policy.max_total_sequence_length={value}."
    )


def dataset_for_both(key: str, value: Any, given: Given) -> Outcome:
    """`data.dataset_name` of releases before 0.6, which names the data of training and validation."""
    settings = {"data.train.dataset_name": value}
    has_validation = "data.val_data_path" in given or "data.val_data_paths" in given
    if value in SPLIT_FOR_VALIDATION and not has_validation:
        settings |= {"data.validation.dataset_name": value, "data.validation.split": SPLIT_FOR_VALIDATION[value]}
    elif "data.val_data_path" in given:
        settings |= {"data.validation.dataset_name": value}
    return translated(settings)


def validation_split(key: str, value: Any, given: Given) -> Outcome:
    if "data.val_data_paths" in given:
        return refused("With several validation sets, set data.val_data_paths.NAME.split for each.")
    return translated({"data.validation.split": value})


def target_modules(key: str, value: Any, given: Given) -> Outcome:
    """Layers that get adapters. An empty list, or match_all_linear, means all linear layers; * stands for any letters."""
    if not value or given.get(f"{key.rpartition('.')[0]}.match_all_linear"):
        return translated({"policy.lora.target_modules": ALL_LINEAR})
    if not any("*" in name for name in value):
        return translated({"policy.lora.target_modules": value})
    patterns = [re.sub(r"^\(\?s:(.*)\)\\[zZ]$", r"\1", glob_expression(name)) for name in value]
    return translated({"policy.lora.target_modules": rf"(.*\.)?({'|'.join(patterns)})"})


def match_all_linear(key: str, value: Any, given: Given) -> Outcome:
    if value:
        return translated({"policy.lora.target_modules": ALL_LINEAR})
    return no_effect("target_modules names the layers.")


def dropout_position(key: str, value: Any, given: Given) -> Outcome:
    if value == "pre" or not given.get(f"{key.rpartition('.')[0]}.dropout"):
        return no_effect("Dropout is applied to the adapters' inputs." if value == "pre" else "There is no dropout.")
    return refused(f"tandem applies dropout to the adapters' inputs. Set {key}=pre, or a dropout of 0.")


def megatron_recomputation(key: str, value: Any, given: Given) -> Outcome:
    depth = given.get(f"{MEGATRON}.recompute_granularity") or "full"
    return translated({"policy.activation_checkpointing": depth if value else "none"})


def megatron_betas(key: str, value: Any, given: Given) -> Outcome:
    first, second = (given.get(f"{MEGATRON}.optimizer.adam_beta{i}") for i in (1, 2))
    if first is None or second is None:
        return refused("Set adam_beta1 and adam_beta2 together.")
    return translated({"policy.optimizer.kwargs.betas": [first, second]})


def megatron_schedule(key: str, value: Any, given: Given) -> Outcome:
    """Megatron's warm-up and decay as torch's schedulers. Every key of the section gives the same result."""
    section = f"{MEGATRON}.scheduler"
    peak, lowest = (given.get(f"{MEGATRON}.optimizer.{name}") for name in ("lr", "min_lr"))
    warm_up, start = given.get(f"{section}.lr_warmup_iters") or 0, given.get(f"{section}.lr_warmup_init") or 0.0
    style = given.get(f"{section}.lr_decay_style") or "constant"
    steps = given.get(f"{section}.lr_decay_iters") or given.get("dpo.max_num_steps")
    torch_name = "torch.optim.lr_scheduler."
    if not isinstance(peak, int | float) or peak <= 0:
        return refused(f"{MEGATRON}.optimizer.lr is not set.")
    least = max(start / peak, 1e-9)  # torch's LinearLR cannot start at 0
    rise = {
        "name": f"{torch_name}LinearLR",
        "kwargs": {"start_factor": least, "end_factor": 1.0, "total_iters": warm_up},
    }
    if style == "constant":
        after = {"name": f"{torch_name}ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 1}}
    elif not isinstance(steps, int) or steps <= warm_up:
        return refused(f"Set {section}.lr_decay_iters to the number of steps of the run.")
    elif style == "linear":
        share = (lowest or 0.0) / peak
        after = {
            "name": f"{torch_name}LinearLR",
            "kwargs": {"start_factor": 1.0, "end_factor": share, "total_iters": steps - warm_up},
        }
    elif style == "cosine":
        after = {
            "name": f"{torch_name}CosineAnnealingLR",
            "kwargs": {"T_max": steps - warm_up, "eta_min": lowest or 0.0},
        }
    else:
        return refused(f"{section}.lr_decay_style = {style}: tandem translates constant, linear and cosine.")
    return translated({"policy.scheduler": [rise, after, {"milestones": [warm_up]}] if warm_up else [after]})


def router_balance(key: str, value: Any, given: Given) -> Outcome:
    """Megatron's load-balancing loss: moe_aux_loss_coeff, which moe_router_load_balancing_type switches on."""
    section = key.rpartition(".")[0]
    kind = given.get(f"{section}.moe_router_load_balancing_type") or "none"
    if not key.endswith("moe_aux_loss_coeff"):
        return no_effect("dpo.router_aux_loss_coef is the weight of the load-balancing loss.")
    if not value or kind == "none":
        return no_effect("Routers are trained without a load-balancing loss.")
    if kind not in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
        return refused(
            f"tandem has no load-balancing of type {kind}. Set {section}.moe_router_load_balancing_type=none."
        )
    note = (
        "over the global batch" if kind == "global_aux_loss" else f"over the global batch; {kind} is over a part of it"
    )
    return translated({"dpo.router_aux_loss_coef": value}, note)


RULES = {
    rule.__name__: rule
    for rule in (
        steps_or_null,
        input_length,
        dataset_for_both,
        validation_split,
        target_modules,
        match_all_linear,
        dropout_position,
        megatron_recomputation,
        megatron_betas,
        megatron_schedule,
        router_balance,
    )
}

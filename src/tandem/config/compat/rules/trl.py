"""Rules for TRL's configurations: the length of training, batches, the schedule, validation, checkpoints and trackers."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

from tandem.config.compat.records import Given, Outcome, no_effect, refused, translated
from tandem.config.compat.rules import trl_data, trl_losses
from tandem.config.compat.rules.trl_data import evaluates, evaluation_strategy
from tandem.terminal.printable import counted

ADAM_BETAS = (0.9, 0.999)
PAIRS_PER_DEVICE = 8
LOGGING_STEPS = 10
BATCH_KEYS = "per_device_train_batch_size, gradient_accumulation_steps and num_processes"
TRACKERS = ("wandb", "tensorboard", "mlflow")
BEST_METRICS = {"loss": "val_loss", "rewards/accuracies": "val_accuracy", "rewards/margins": "val_rewards_margin_mean"}


def global_batch(key: str, value: Any, given: Given) -> Outcome:
    """Pairs per step: per device, times steps of accumulation, times ranks, which num_processes may give."""
    per_device = given.get("per_device_train_batch_size", given.get("per_gpu_train_batch_size"))
    per_device = PAIRS_PER_DEVICE if per_device is None else per_device
    accumulated = given.get("gradient_accumulation_steps") or 1
    processes = given.get("num_processes")  # of accelerate's launcher
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if processes is None else processes
    if not all(isinstance(one, int) and one > 0 for one in (per_device, accumulated, ranks)):
        return refused(f"{BATCH_KEYS} must be whole numbers above 0.")
    note = f"{per_device} per device x {accumulated} of accumulation x {counted(ranks, 'rank')}"
    settings = {"policy.train_global_batch_size": per_device * accumulated * ranks}
    if key == "num_processes":
        machines = given.get("num_machines") or 1
        if ranks % machines:
            return refused(f"{ranks} processes on {machines} machines: tandem starts as many ranks on each machine.")
        settings["cluster.gpus_per_node"] = ranks // machines
    return translated(settings, note)


def machines(key: str, value: Any, given: Given) -> Outcome:
    return no_effect("It is not set.") if value is None else translated({"cluster.num_nodes": value})


def max_steps(key: str, value: Any, given: Given) -> Outcome:
    """A number of steps, which counts more than the number of epochs; 0 or less: no limit."""
    if value > 0:
        return translated({"dpo.max_num_steps": value, "dpo.max_num_epochs": value}, "enough epochs for these steps")
    return translated({"dpo.max_num_steps": None}, "no limit: all steps of the epochs")


def epochs(key: str, value: Any, given: Given) -> Outcome:
    if _steps_of_run(given) is not None:
        return no_effect("max_steps is the length of the run.")
    if value != int(value) or value < 1:
        return refused("tandem trains for whole epochs. Set max_steps to the number of steps.")
    return translated({"dpo.max_num_epochs": int(value)})


def _steps_of_run(given: Given) -> int | None:
    steps = given.get("max_steps")
    return steps if steps is not None and steps > 0 else None


def betas(key: str, value: Any, given: Given) -> Outcome:
    found = [given.get(name) for name in ("adam_beta1", "adam_beta2")]
    both = [default if one is None else one for one, default in zip(found, ADAM_BETAS, strict=True)]
    return translated({"policy.optimizer.kwargs.betas": both})


def weight_decay(key: str, value: Any, given: Given) -> Outcome:
    has_norms = value and not trl_data.trains_adapters(given)
    note = "TRL leaves norms and biases out; here they decay too" if has_norms else None
    return translated({"policy.optimizer.kwargs.weight_decay": value}, note)


def gradient_norm(key: str, value: Any, given: Given) -> Outcome:
    return translated({"policy.max_grad_norm": value or None}, None if value else "no clipping")


def schedule(key: str, value: Any, given: Given) -> Outcome:
    """The schedule and its warm-up, from several keys. Each of them gives the same result."""
    kind = str(given.get("lr_scheduler_type") or "linear").lower()
    kwargs = given.get("lr_scheduler_kwargs") or {}
    kwargs = dict(json.loads(kwargs) if isinstance(kwargs, str) else kwargs)
    if kind == "constant":
        if key.startswith("warmup"):
            return no_effect("lr_scheduler_type is constant, which has no warm-up. constant_with_warmup has one.")
        return translated({"policy.scheduler": {"name": "constant"}})
    warmup = _warm_up(given)
    match kind:
        case "linear" | "cosine" | "constant_with_warmup" if not kwargs:
            return translated({"policy.scheduler": {"name": kind.removesuffix("_with_warmup"), **warmup}})
        case "cosine_with_min_lr" if (least := _least_rate(kwargs, given)) is not None:
            return translated({"policy.scheduler": {"name": "cosine", **warmup, "min_lr_ratio": least}})
        case "warmup_stable_decay" if (decay := _decay(kwargs, given)) is not None:
            return translated({"policy.scheduler": {"name": "wsd", **warmup, **decay}})
    return refused(
        f"tandem has no schedule for {kind}{f' with {json.dumps(kwargs)}' if kwargs else ''}. It translates linear, cosine, "
        "cosine_with_min_lr, constant, constant_with_warmup, and warmup_stable_decay with decay_type linear and max_steps."
    )


def _warm_up(given: Given) -> dict[str, Any]:
    """The length of the warm-up: below 1 a share of the run, otherwise a number of steps, which counts more than the ratio."""
    steps, ratio = given.get("warmup_steps") or 0, given.get("warmup_ratio") or 0
    if steps >= 1:
        return {"warmup_steps": int(steps)}
    return {"warmup_ratio": steps or ratio} if steps or ratio else {}


def _least_rate(kwargs: Mapping[str, Any], given: Given) -> float | None:
    """The final rate of cosine_with_min_lr, as a share of the peak."""
    match dict(kwargs):
        case {"min_lr_rate": share, **more} if not more:
            return share
        case {"min_lr": rate, **more} if not more:
            return rate / (given.get("learning_rate") or 1e-6)
    return None


def _decay(kwargs: dict[str, Any], given: Given) -> dict[str, Any] | None:
    """Settings of the schedule wsd, or None if they cannot be translated."""
    total, steps = _steps_of_run(given), kwargs.pop("num_decay_steps", None)
    least, shape = kwargs.pop("min_lr_ratio", 0.0), kwargs.pop("decay_type", None)
    if total is None or steps is None or shape != "linear" or kwargs:
        return None
    return {"decay_ratio": steps / total, "min_lr_ratio": least}


def validation_period(key: str, value: Any, given: Given) -> Outcome:
    strategy = evaluation_strategy(given)
    if strategy == "steps":
        period = given.get("eval_steps") or given.get("logging_steps") or LOGGING_STEPS
        found = _in_steps("eval_steps", "dpo.val_period", period, given)
        total = _steps_of_run(given)
        if found.kind == "refused" or (total is not None and total % found.settings["dpo.val_period"]):
            return found
        note = found.note if total is not None else "and after the last step"
        return translated({**found.settings, "dpo.val_at_end": True}, note)
    if key == "eval_steps":
        return no_effect(f"eval_strategy is {strategy}.")
    if strategy == "no":
        return translated({"dpo.val_period": 0})
    if strategy == "epoch":
        return translated({"dpo.val_period": 1.0, "dpo.val_at_end": True}, "1.0 is an epoch")
    return refused("Set it to no, steps or epoch.")


def save_period(key: str, value: Any, given: Given) -> Outcome:
    strategy = given.get("save_strategy", "steps")
    strategy = "no" if strategy in (None, False) else str(strategy).lower()
    if strategy == "steps":
        return _in_steps("save_steps", "checkpointing.save_period", given.get("save_steps") or 500, given)
    if key == "save_steps":
        return no_effect(f"save_strategy is {strategy}.")
    if strategy == "no":
        return translated({"checkpointing.enabled": False})
    if strategy == "epoch":
        return translated({"checkpointing.save_period": 1.0}, "1.0 is an epoch")
    return refused("tandem saves by steps or epochs. Set save_strategy=steps.")


def _in_steps(of: str, key: str, period: float, given: Given) -> Outcome:
    """The period in the key `of`: a number of steps, or below 1 a share of the run."""
    if period >= 1:
        return translated({key: int(period)})
    total = _steps_of_run(given)
    if total is None:
        return refused(
            f"{of} is a share of the run, whose length is not known. Set a number of steps, or set max_steps too."
        )
    return translated({key: math.ceil(period * total)}, f"{period:g} of {total} steps")


def kept_checkpoints(key: str, value: Any, given: Given) -> Outcome:
    best = " by the validation loss" if evaluates(given) else ""
    return translated({"checkpointing.keep_top_k": value}, f"the best{best}, and the latest" if best else None)


def best_metric(key: str, value: Any, given: Given) -> Outcome:
    name = str(value).removeprefix("eval_")
    if name not in BEST_METRICS:
        known = ", ".join(BEST_METRICS)
        return refused(f"tandem ranks checkpoints by one of {known} here. checkpointing.metric_name knows more.")
    higher = given.get("greater_is_better")
    return translated(
        {
            "checkpointing.metric_name": BEST_METRICS[name],
            "checkpointing.higher_is_better": name != "loss" if higher is None else higher,
        }
    )


def trackers(key: str, value: Any, given: Given) -> Outcome:
    names = trackers_of(given)
    if unknown := [name for name in names if name not in TRACKERS]:
        return refused(
            f"tandem logs to wandb, tensorboard and mlflow, not to {', '.join(unknown)}. Set report_to to these."
        )
    return translated({f"logger.{name}_enabled": name in names for name in TRACKERS})


def trackers_of(given: Given) -> list[str]:
    value = given.get("report_to")
    names = value if isinstance(value, list) else [value]
    return [str(name).lower() for name in names if name not in (None, "none", "None")]


def tracker_run(key: str, value: Any, given: Given) -> Outcome:
    names = {"wandb": "logger.wandb.name", "mlflow": "logger.mlflow.run_name"}
    settings = {names[one]: value for one in trackers_of(given) if one in names}
    return translated(settings) if settings else no_effect("No tracker with names of runs is on.")


def wandb_variable(key: str, value: Any, given: Given) -> Outcome:
    """WANDB_PROJECT and WANDB_ENTITY of `env:`."""
    if "wandb" not in trackers_of(given):
        return no_effect("report_to does not list wandb.")
    return translated({f"logger.wandb.{key.rpartition('_')[2].lower()}": str(value)})


def output_length(key: str, value: Any, given: Given) -> Outcome:
    """Limits of releases before 0.29 on prompts and completions alone."""
    longest = given.get("max_length", 1024)
    if value < 0 or (longest is not None and value >= longest):
        return no_effect("max_length is the limit.")
    return refused(
        "tandem limits prompt and completion together with max_length, as TRL does since 0.29. Remove it; over-long "
        "completions are cut, or with data.overlong=truncate_prompt the prompts."
    )


RULES = {
    f"trl_{rule.__name__}": rule
    for rule in (
        *(global_batch, max_steps, epochs, betas, weight_decay, gradient_norm, schedule),
        *(validation_period, save_period, kept_checkpoints, best_metric),
        *(trackers, tracker_run, wandb_variable, output_length, machines),
        *trl_losses.RULES,
        *trl_data.RULES,
    )
}

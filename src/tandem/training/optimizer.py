"""Creates the optimizer and the learning-rate scheduler.

A scheduler is one of torch's, or a named schedule that spans the run.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import AdamW, Optimizer, lr_scheduler

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.config.sections.scheduler import (
    ConstantSchedule,
    CosineSchedule,
    Milestones,
    NamedSchedule,
    Scheduler,
    WsdSchedule,
)
from tandem.errors import ConfigError
from tandem.terminal.printable import counted
from tandem.training.adamw import LocalAdamW, RoundedAdamW, Rule


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], policy: PolicyConfig, seed: int, *, ratios: Sequence[float] | None = None
) -> LocalAdamW | RoundedAdamW:
    """Return AdamW with its states already allocated.

    The optimizer clips gradients and skips non-finite steps without waiting for the device.
    `seed`: the seed of the random bits for stochastic rounding. `ratios`: for each parameter, its learning rate as a multiple
    of the configured one; None: 1.
    """
    kwargs, offload = policy.optimizer.kwargs, policy.optimizer.offload
    beta1, beta2 = kwargs.betas
    if policy.weights == "float32" and policy.optimizer.state_dtype == "float32":
        return LocalAdamW(
            parameters,
            ratios=ratios,
            lr=kwargs.lr,
            betas=(beta1, beta2),
            eps=kwargs.eps,
            weight_decay=kwargs.weight_decay,
            offload=offload,
        )
    rule = Rule(
        beta1=beta1,
        beta2=beta2,
        eps=kwargs.eps,
        weight_decay=kwargs.weight_decay,
        stochastic=policy.weights != "bfloat16_nearest",
        state_dtype=policy.optimizer.state_dtype,
    )
    return RoundedAdamW(parameters, rule, lr=kwargs.lr, seed=seed, ratios=ratios, offload=offload)


def make_scheduler(optimizer: Optimizer, policy: PolicyConfig, num_steps: int) -> Any:
    """Return the configured scheduler.

    It is one of torch's schedulers, several of them chained at milestones, a named schedule, or a constant rate.
    `num_steps`: the length of the run, which a named schedule spans.
    """
    given = policy.scheduler
    if given is None:
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    if isinstance(given, NamedSchedule):
        return lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(given, step, num_steps))
    if isinstance(given, Scheduler):
        return _torch_scheduler(optimizer, given)
    schedulers = [_torch_scheduler(optimizer, item) for item in given if isinstance(item, Scheduler)]
    milestones = [step for item in given if isinstance(item, Milestones) for step in item.milestones]
    if len(schedulers) == 1:
        return schedulers[0]
    return lr_scheduler.SequentialLR(optimizer, schedulers, milestones)


def rate_factor(schedule: NamedSchedule, steps_done: int, num_steps: int) -> float:
    """Return the learning rate after `steps_done` steps, as a fraction of the configured rate.

    This is the same as in transformers: a warm-up starts at 0, and a decay would reach its final value one step after the last
    step.
    Example: 10 steps of a linear schedule with warmup_ratio 0.2 have the fractions 0, 1/2, 8/8, 7/8, ..., 1/8.
    """
    warmup = _num_warmup_steps(schedule, num_steps)
    if steps_done < warmup:
        return steps_done / warmup
    if isinstance(schedule, ConstantSchedule):
        return 1.0
    decay_start, decay_end = warmup, num_steps
    if isinstance(schedule, CosineSchedule):
        decay_end = num_steps - schedule.constant_steps
    if isinstance(schedule, WsdSchedule):
        decay_start = max(warmup, num_steps - _num_steps_of(schedule.decay_ratio, num_steps))
    if steps_done < decay_start:
        return 1.0
    decayed = min(1.0, (steps_done - decay_start) / max(1, decay_end - decay_start))
    share = (1 + math.cos(math.pi * decayed)) / 2 if isinstance(schedule, CosineSchedule) else 1 - decayed
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * share


def _num_warmup_steps(schedule: NamedSchedule, num_steps: int) -> int:
    return schedule.warmup_steps or _num_steps_of(schedule.warmup_ratio, num_steps)


def _num_steps_of(ratio: float, num_steps: int) -> int:
    """Return `ratio` times the number of steps, rounded up.

    Floating-point error does not count: 0.07 of 100 steps are 7, although 0.07 * 100 is slightly above 7.
    """
    return math.ceil(round(ratio * num_steps, 6))


def schedule_in_words(policy: PolicyConfig, num_steps: int) -> str:
    """Describe the schedule, for example "cosine: warm-up from 0 over 1 of 10 steps, then down to 0.1 of the rate"."""
    given = policy.scheduler
    if given is None:
        return "constant"
    if isinstance(given, NamedSchedule):
        warmup = _num_warmup_steps(given, num_steps)
        parts = [f"warm-up from 0 over {warmup} of {counted(num_steps, 'step')}"] if warmup else []
        if not isinstance(given, ConstantSchedule):
            over = ""
            if isinstance(given, WsdSchedule):
                parts.append("constant")
                num_decaying = min(_num_steps_of(given.decay_ratio, num_steps), num_steps - warmup)
                over = f" over the last {counted(num_decaying, 'step')}"
            parts.append(f"down to {given.min_lr_ratio:g} of the rate{over}")
            if isinstance(given, CosineSchedule) and given.constant_steps:
                num_constant = min(given.constant_steps, max(0, num_steps - warmup - 1))
                parts.append(f"constant over the last {counted(num_constant, 'step')}")
        return f"{given.name}: {', then '.join(parts)}" if parts else given.name
    schedulers = [item for item in (given if isinstance(given, list) else [given]) if isinstance(item, Scheduler)]
    milestones = [step for item in given if isinstance(item, Milestones) for step in item.milestones]
    names = [f"{one.name.rsplit('.', 1)[-1]} {_arguments(one)}".rstrip() for one in schedulers]
    later = [f"{name} after step {step}" for name, step in zip(names[1:], milestones, strict=False)]
    return ", then ".join([names[0], *later])


def _arguments(scheduler: Scheduler) -> str:
    given = ", ".join(f"{name}={value}" for name, value in scheduler.kwargs.items())
    return f"({given})" if given else ""


def check_scheduler(policy: PolicyConfig) -> None:
    """Create the scheduler for a dummy parameter, so that a wrong argument is reported before any weights load.

    Schedulers of torch are also stepped once, because some of them check their arguments only in the first step.
    """
    rate = policy.optimizer.kwargs.lr
    make_scheduler(AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate), policy, num_steps=1)
    given = policy.scheduler if isinstance(policy.scheduler, list) else [policy.scheduler]
    for one in (one for one in given if isinstance(one, Scheduler)):
        alone = _torch_scheduler(AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate), one)
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns that no optimizer step came first
                alone.step()
        except (ArithmeticError, TypeError, ValueError) as error:
            name = one.name.rsplit(".", 1)[-1]
            raise ConfigError(
                f"policy.scheduler: {name} {_arguments(one)} fails at the first step ({error}). Change its kwargs."
            ) from None


def highest_rate(policy: PolicyConfig, num_steps: int) -> float:
    """Return the highest learning rate that a run of `num_steps` steps reaches."""
    if isinstance(policy.scheduler, NamedSchedule):
        return policy.optimizer.kwargs.lr * max(rate_factor(policy.scheduler, i, num_steps) for i in range(num_steps))
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], lr=policy.optimizer.kwargs.lr)
    scheduler = make_scheduler(optimizer, policy, num_steps)
    highest = 0.0
    with warnings.catch_warnings(action="ignore"):  # torch warns that no optimizer step came first
        for _ in range(num_steps):
            highest = max(highest, optimizer.param_groups[0]["lr"])
            scheduler.step()
    return highest


def _torch_scheduler(optimizer: Optimizer, given: Scheduler) -> Any:
    name = given.name.rsplit(".", 1)[-1]
    try:
        return getattr(lr_scheduler, name)(optimizer, **given.kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy.scheduler: {name}: {error}") from None
    except KeyError:  # torch looks for the initial rate of an earlier run
        raise ConfigError(
            f"policy.scheduler: {name} {_arguments(given)}: last_epoch is not supported, because tandem sets the step of a "
            "resumed run itself. Leave it out."
        ) from None

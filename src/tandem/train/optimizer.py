"""The configuration's optimizer and scheduler, from a table of torch's names."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import AdamW, Optimizer, lr_scheduler

from tandem.config.policy import Milestones, Scheduler
from tandem.config.policy import Policy as PolicyConfig
from tandem.errors import ConfigError
from tandem.train.adamw import LocalAdamW, RoundedAdamW, Rule


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], policy: PolicyConfig, seed: int
) -> LocalAdamW | RoundedAdamW:
    """With its states, as they are before the first step. Either clips and skips a non-finite step on the device.

    `seed`: of stochastic rounding.
    """
    kwargs = policy.optimizer.kwargs
    beta1, beta2 = kwargs.betas
    if policy.weights == "float32" and policy.optimizer.state_dtype == "float32":
        return LocalAdamW(
            parameters, lr=kwargs.lr, betas=(beta1, beta2), eps=kwargs.eps, weight_decay=kwargs.weight_decay
        )
    rule = Rule(
        beta1,
        beta2,
        kwargs.eps,
        kwargs.weight_decay,
        stochastic=policy.weights != "bfloat16_nearest",
        state_dtype=policy.optimizer.state_dtype,
    )
    return RoundedAdamW(parameters, rule, lr=kwargs.lr, seed=seed)


def make_scheduler(optimizer: Optimizer, policy: PolicyConfig) -> Any:
    """One of torch's schedulers, several in a row at their milestones, or a constant rate."""
    given = policy.scheduler
    if given is None:
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    if isinstance(given, Scheduler):
        return _one(optimizer, given)
    schedulers = [_one(optimizer, item) for item in given if isinstance(item, Scheduler)]
    milestones = [step for item in given if isinstance(item, Milestones) for step in item.milestones]
    if len(schedulers) == 1:
        return schedulers[0]
    return lr_scheduler.SequentialLR(optimizer, schedulers, milestones)


def check_scheduler(policy: PolicyConfig) -> None:
    """Build the schedule once over nothing, so that a wrong argument is told before any weights load."""
    make_scheduler(AdamW([torch.nn.Parameter(torch.zeros(1))], lr=policy.optimizer.kwargs.lr), policy)


def highest_rate(policy: PolicyConfig, num_steps: int) -> float:
    """The highest learning rate that a run of so many steps reaches."""
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))], lr=policy.optimizer.kwargs.lr)
    scheduler = make_scheduler(optimizer, policy)
    highest = 0.0
    with warnings.catch_warnings(action="ignore"):  # that no optimizer step went before
        for _ in range(min(num_steps, 10_000)):
            highest = max(highest, optimizer.param_groups[0]["lr"])
            scheduler.step()
    return highest


def _one(optimizer: Optimizer, given: Scheduler) -> Any:
    name = given.name.rsplit(".", 1)[-1]
    try:
        return getattr(lr_scheduler, name)(optimizer, **given.kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy.scheduler: {name}: {error}") from None

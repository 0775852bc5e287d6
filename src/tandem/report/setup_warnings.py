"""Returns warnings about the settings of a run: what they would do to its result or its speed, and what to set instead."""

from collections.abc import Iterator
from itertools import islice

import torch

from tandem.config.losses import far_from_published
from tandem.model.checks.positions import long_sequence_warnings
from tandem.terminal.printable import counted
from tandem.training.memory import filler_warning
from tandem.training.start.setup import Setup


def setup_warnings(setup: Setup) -> Iterator[str]:
    """Yield every warning about a run that is about to start."""
    if filler := filler_warning(setup.plan.train, setup.config.policy):
        yield filler
    yield from lost_updates(setup)
    yield from slow_arithmetic(setup)
    yield from low_rate_of_adapters(setup)
    yield from short_run(setup)
    yield from unusual_settings(setup)


def lost_updates(setup: Setup) -> Iterator[str]:
    if setup.config.policy.weights == "bfloat16_nearest":
        yield (
            "policy.weights = bfloat16_nearest: at the learning rates of preference training most updates are lost to "
            "rounding. policy.weights=bfloat16_stochastic keeps them in the same memory."
        )


def slow_arithmetic(setup: Setup) -> Iterator[str]:
    on_cpu = setup.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if on_cpu and setup.precision == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield (
            "policy.precision = bfloat16: this CPU has no bfloat16 arithmetic, so torch takes many times as long as in float32. "
            "policy.precision=float32 is faster here."
        )


def low_rate_of_adapters(setup: Setup) -> Iterator[str]:
    rate, default = (
        setup.config.policy.optimizer.kwargs.lr,
        type(setup.config.policy.optimizer.kwargs).model_fields["lr"].default,
    )
    if setup.lora is not None and rate == default:
        yield (
            f"policy.optimizer.kwargs.lr = {rate:g} is the default, which is meant for training all weights. Adapters usually "
            "take 10 to 100 times as much (docs/lora.md)."
        )


def short_run(setup: Setup) -> Iterator[str]:
    asked, epochs = setup.config.dpo.max_num_steps, setup.config.dpo.max_num_epochs
    if asked is not None and setup.plan.num_steps < asked:
        has = "1 epoch has only" if epochs == 1 else f"{epochs} epochs have only"
        yield (
            f"dpo.max_num_steps = {asked}, but {has} {counted(setup.plan.num_steps, 'step')}. Raise dpo.max_num_epochs for more."
        )
    lr = setup.config.policy.optimizer.kwargs.lr
    if setup.plan.highest_rate > 1.01 * lr:
        yield (
            f"policy.scheduler raises the learning rate to {setup.plan.highest_rate:g}, above policy.optimizer.kwargs.lr = "
            f"{lr:g}. In torch's schedulers, eta_min is a learning rate, not a fraction of lr."
        )
    if setup.plan.highest_rate < 0.99 * lr:
        steps = counted(setup.plan.num_steps, "step")
        more = "a higher dpo.max_num_steps" if setup.plan.num_steps == asked else "more epochs (dpo.max_num_epochs)"
        yield (
            f"in {steps} the learning rate never rises above {setup.plan.highest_rate:g}, although it is set to {lr:g}. "
            f"Use {more}, a smaller batch, or another policy.scheduler (null: no warm-up)."
        )


def unusual_settings(setup: Setup) -> Iterator[str]:
    """Yield warnings about loss settings far from those in the paper, and about sequences too long for the model."""
    dpo = setup.config.dpo
    yield from far_from_published(dpo.preference_loss, dpo.model_dump())
    yield from long_sequence_warnings(setup.plan.sets, setup.source, setup.reference_source)


def unreached_limit(setup: Setup) -> Iterator[str]:
    """For a finished run without steps left, yield a warning that says which limit to raise to extend the run.

    The limits are dpo.max_num_steps and dpo.max_num_epochs.
    """
    dpo = setup.config.dpo
    if setup.ends_with_epochs:
        yield (
            f"dpo.max_num_steps = {dpo.max_num_steps} is not reached: dpo.max_num_epochs = {dpo.max_num_epochs} ends the run at "
            f"step {setup.plan.num_steps}. Raise dpo.max_num_epochs to extend it."
        )
    elif setup.plan.num_steps == dpo.max_num_steps and _have_more_steps(setup):
        yield (
            f"dpo.max_num_epochs = {dpo.max_num_epochs} is not reached: dpo.max_num_steps = {dpo.max_num_steps} ends the run. "
            "Raise dpo.max_num_steps to extend it, or set it to null."
        )


def _have_more_steps(setup: Setup) -> bool:
    """Whether the epochs have more steps than the run."""
    batches = (one for epoch in range(setup.config.dpo.max_num_epochs) for one in setup.plan.batches.epoch(epoch))
    return next(islice(batches, setup.plan.num_steps, None), None) is not None

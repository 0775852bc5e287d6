"""The key `policy.scheduler`: a named schedule, or torch's schedulers.

A named schedule gives lengths as fractions of the run. torch's schedulers give lengths as numbers of steps.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from tandem.config.sections.section import Positive, Section, Share

WarmupRatio = Annotated[float, Field(ge=0, lt=1)]
WARMUP_DESCRIPTION = (
    "share of the run's steps in which the learning rate rises linearly; the first step has a rate of 0"
)
MIN_LR_DESCRIPTION = "final learning rate, as a share of the peak"
NumSteps = Annotated[int, Field(ge=0)]


class WarmUp(Section):
    """A warm-up, as a share of the run or as a number of steps."""

    name: Any  # each schedule has its own; listed here so that it comes first
    warmup_ratio: WarmupRatio = Field(default=0.0, description=WARMUP_DESCRIPTION)
    warmup_steps: NumSteps = Field(default=0, description="the warm-up as a number of steps, instead of warmup_ratio")

    @model_validator(mode="after")
    def _one_warm_up(self) -> "WarmUp":
        if self.warmup_steps > 0 and self.warmup_ratio > 0:
            raise ValueError(
                f"policy.scheduler: warmup_steps = {self.warmup_steps} and warmup_ratio = {self.warmup_ratio:g} both give the "
                "length of the warm-up. Leave out one of them"
            )
        return self


class LinearSchedule(WarmUp):
    """Warm-up, then linear decay."""

    name: Literal["linear"]
    min_lr_ratio: Share = Field(default=0.0, description=MIN_LR_DESCRIPTION)


class CosineSchedule(WarmUp):
    """Warm-up, cosine decay, and optionally a constant learning rate at the end."""

    name: Literal["cosine"]
    min_lr_ratio: Share = Field(default=0.0, description=MIN_LR_DESCRIPTION)
    constant_steps: NumSteps = Field(
        default=0, description="number of steps, at the end of the run, with the final learning rate"
    )


class ConstantSchedule(WarmUp):
    """Warm-up, then a constant learning rate."""

    name: Literal["constant"]


class WsdSchedule(WarmUp):
    """Warm-up, a constant learning rate, and linear decay at the end (warmup-stable-decay)."""

    name: Literal["wsd"]
    decay_ratio: Share = Field(
        default=0.1, description="share of the run's steps, at the end, in which the learning rate falls"
    )
    min_lr_ratio: Share = Field(default=0.0, description=MIN_LR_DESCRIPTION)

    @model_validator(mode="after")
    def _shares_fit(self) -> "WsdSchedule":
        if self.warmup_ratio + self.decay_ratio > 1 + 1e-9:
            raise ValueError(
                f"policy.scheduler: warmup_ratio = {self.warmup_ratio:g} and decay_ratio = {self.decay_ratio:g} add up to more "
                "than 1, the whole run. Lower one of them"
            )
        return self


NamedSchedule = LinearSchedule | CosineSchedule | ConstantSchedule | WsdSchedule
NAMED: dict[str, type[Section]] = {
    "linear": LinearSchedule,
    "cosine": CosineSchedule,
    "constant": ConstantSchedule,
    "wsd": WsdSchedule,
}

TorchName = Literal[
    "torch.optim.lr_scheduler.LinearLR",
    "torch.optim.lr_scheduler.ConstantLR",
    "torch.optim.lr_scheduler.CosineAnnealingLR",
    "torch.optim.lr_scheduler.PolynomialLR",
    "torch.optim.lr_scheduler.ExponentialLR",
    "torch.optim.lr_scheduler.StepLR",
    "torch.optim.lr_scheduler.MultiStepLR",
]


class Scheduler(Section):
    """One of torch's learning-rate schedulers."""

    name: TorchName = Field(description="the scheduler")
    kwargs: dict[str, int | float | bool | list[int]] = Field(default={}, description="arguments of the scheduler")


class Milestones(Section):
    """The steps at which a list of schedulers moves on to its next scheduler."""

    milestones: list[Positive]


def _name(given: Any) -> str:
    return str(given.get("name") or "") if isinstance(given, dict) else getattr(given, "name", "")


def _check_form(given: Any) -> Any:
    """Raise ValueError with one message if a value is invalid. pydantic would print a message for each type of the union."""
    if isinstance(given, str):
        shown = f"{{name: {given if given in NAMED else 'cosine'}, warmup_ratio: 0.1}}"
        raise ValueError(f"policy.scheduler = {given} is text, not a mapping. Write {shown}, for example")
    if isinstance(given, list) and any(_name(one) in NAMED for one in given):
        raise ValueError(
            "policy.scheduler is a list, which is for torch's schedulers and milestones. Write a named schedule without a "
            "list: {name: cosine, warmup_ratio: 0.1}"
        )
    if not isinstance(given, dict):
        return given
    name = _name(given)
    if not name:
        raise ValueError(f"policy.scheduler has no name. Set policy.scheduler.name to one of {', '.join(NAMED)}")
    if name in NAMED:
        known = NAMED[name].model_fields
        if unknown := [key for key in given if key not in known]:
            raise ValueError(
                f"policy.scheduler.{unknown[0]} is not a setting of the schedule {name}, which has {', '.join(known)}. "
                "For absolute steps, use torch's schedulers (docs/keys.md, Schedules)"
            )
    elif name not in get_args(TorchName):
        raise ValueError(
            f"policy.scheduler.name = {name} is not a known schedule. Use one of {', '.join(NAMED)}, or one of torch's: "
            f"{', '.join(get_args(TorchName))}"
        )
    return given


def _kind(given: Any) -> str:
    if isinstance(given, list):
        return "scheduler-list"
    name = _name(given)
    return f"scheduler-{name}" if name in NAMED else "scheduler-torch"


Schedule = Annotated[
    Annotated[list[Scheduler | Milestones], Tag("scheduler-list")]
    | Annotated[Scheduler, Tag("scheduler-torch")]
    | Annotated[LinearSchedule, Tag("scheduler-linear")]
    | Annotated[CosineSchedule, Tag("scheduler-cosine")]
    | Annotated[ConstantSchedule, Tag("scheduler-constant")]
    | Annotated[WsdSchedule, Tag("scheduler-wsd")],
    Discriminator(_kind),
    BeforeValidator(_check_form),
]

WARM_UP_THEN_CONSTANT: list[Scheduler | Milestones] = [
    Scheduler(
        name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.1, "end_factor": 1.0, "total_iters": 20}
    ),
    Scheduler(name="torch.optim.lr_scheduler.ConstantLR", kwargs={"factor": 1.0, "total_iters": 1}),
    Milestones(milestones=[20]),
]

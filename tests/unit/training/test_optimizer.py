"""Learning rates step by step, checked by hand at ten steps, and against transformers."""

import pytest
import torch
from running import few_pairs, killed_after, largest_difference, metrics_of, short_run, weights_of
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_scheduler, get_wsd_schedule

from tandem.config.load import load_config
from tandem.errors import CheckpointError, ConfigError
from tandem.training.optimizer import check_scheduler, highest_rate, make_scheduler, schedule_in_words

LR = 8e-4


def policy_of(schedule: str):
    return load_config(None, [f"policy.scheduler={schedule}", f"policy.optimizer.kwargs.lr={LR}"]).config.policy


def an_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)


def rates(optimizer, scheduler, num_steps: int) -> list[float]:
    """Of each step, as shares of the learning rate."""
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"] / LR)
        optimizer.step()
        scheduler.step()
    return found


def rates_of(schedule: str, num_steps: int) -> list[float]:
    optimizer = an_optimizer()
    return rates(optimizer, make_scheduler(optimizer, policy_of(schedule), num_steps), num_steps)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # A fifth of ten steps rises from 0; the other eight fall by an eighth each.
        ("{name: linear, warmup_ratio: 0.2}", [0, 1 / 2, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        # Down to a half: by a sixteenth each.
        (
            "{name: linear, warmup_ratio: 0.2, min_lr_ratio: 0.5}",
            [0, 1 / 2, 1, 15 / 16, 14 / 16, 13 / 16, 12 / 16, 11 / 16, 10 / 16, 9 / 16],
        ),
        # 1/2 + cos(pi * i / 8) / 2.
        (
            "{name: cosine, warmup_ratio: 0.2}",
            [0, 0.5, 1, 0.96194, 0.85355, 0.69134, 0.5, 0.30866, 0.14645, 0.03806],
        ),
        ("{name: linear, warmup_steps: 2}", [0, 0.5, *(left / 8 for left in range(8, 0, -1))]),
        ("{name: constant, warmup_steps: 4}", [0, 0.25, 0.5, 0.75, *[1] * 6]),
        # Four steps of decay, then a tenth.
        (
            "{name: cosine, warmup_steps: 2, constant_steps: 4, min_lr_ratio: 0.1}",
            [0, 0.5, 1, 0.86820, 0.55, 0.23180, 0.1, 0.1, 0.1, 0.1],
        ),
        # No step is left for the decay.
        ("{name: cosine, warmup_steps: 2, constant_steps: 1000, min_lr_ratio: 0.1}", [0, 0.5, 1, *[0.1] * 7]),
        ("{name: constant, warmup_ratio: 0.4}", [0, 1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1, 1, 1]),
        ("{name: constant}", [1] * 10),
        ("{name: wsd, warmup_ratio: 0.2, decay_ratio: 0.4}", [0, 1 / 2, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
        (
            "{name: wsd, decay_ratio: 0.5, min_lr_ratio: 0.5}",
            [1, 1, 1, 1, 1, 1, 0.9, 0.8, 0.7, 0.6],
        ),
        # Half a step is a step: three of ten.
        ("{name: constant, warmup_ratio: 0.25}", [0, 1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1]),
        # Three and eight steps are more than ten: the warm-up keeps its three.
        ("{name: wsd, warmup_ratio: 0.25, decay_ratio: 0.75}", [0, 1 / 3, 2 / 3, 1, *(i / 7 for i in range(6, 0, -1))]),
    ],
)
def test_the_rates_of_ten_steps(schedule, expected):
    assert rates_of(schedule, 10) == pytest.approx(expected, abs=1e-5)


def test_a_share_is_not_rounded_up_for_the_last_digit_of_a_product():
    assert 0.07 * 100 > 7
    assert rates_of("{name: constant, warmup_ratio: 0.07}", 100)[7] == 1


@pytest.mark.parametrize(
    ("schedule", "theirs"),
    [
        ("{name: linear, warmup_ratio: 0.1}", lambda o: get_scheduler("linear", o, 5, 50)),
        ("{name: cosine, warmup_ratio: 0.1}", lambda o: get_scheduler("cosine", o, 5, 50)),
        ("{name: constant, warmup_ratio: 0.1}", lambda o: get_scheduler("constant_with_warmup", o, 5, 50)),
        (
            "{name: cosine, warmup_ratio: 0.1, min_lr_ratio: 0.1}",
            lambda o: get_cosine_with_min_lr_schedule_with_warmup(o, 5, 50, min_lr_rate=0.1),
        ),
        (
            "{name: wsd, warmup_ratio: 0.1, decay_ratio: 0.2}",
            lambda o: get_wsd_schedule(o, 5, 10, num_training_steps=50, decay_type="linear"),
        ),
    ],
)
def test_rates_are_those_of_transformers(schedule, theirs):
    optimizer = an_optimizer()
    assert rates_of(schedule, 50) == pytest.approx(rates(optimizer, theirs(optimizer), 50), rel=1e-12)


def test_the_highest_rate_is_known_however_long_the_warm_up_is():
    assert highest_rate(policy_of("{name: linear, warmup_ratio: 0.5}"), 40_000) == LR
    assert highest_rate(policy_of("{name: linear, warmup_ratio: 0.5}"), 1) == 0
    assert highest_rate(policy_of("{name: constant}"), 1) == LR


@pytest.mark.parametrize(
    ("schedule", "printed"),
    [
        (
            "{name: cosine, warmup_ratio: 0.1, min_lr_ratio: 0.1}",
            "cosine: warm-up from 0 over 1 of 10 steps, then down to 0.1 of the rate",
        ),
        (
            "{name: cosine, warmup_steps: 2, constant_steps: 4, min_lr_ratio: 0.1}",
            "cosine: warm-up from 0 over 2 of 10 steps, then down to 0.1 of the rate, then constant over the last 4 steps",
        ),
        ("{name: linear}", "linear: down to 0 of the rate"),
        ("{name: constant}", "constant"),
        ("{name: constant, warmup_ratio: 0.25}", "constant: warm-up from 0 over 3 of 10 steps"),
        (
            "{name: wsd, warmup_ratio: 0.2, decay_ratio: 0.3}",
            "wsd: warm-up from 0 over 2 of 10 steps, then constant, then down to 0 of the rate over the last 3 steps",
        ),
        (
            "{name: wsd, warmup_ratio: 0, decay_ratio: 0.1}",
            "wsd: constant, then down to 0 of the rate over the last 1 step",
        ),
        (
            "{name: cosine, constant_steps: 1}",
            "cosine: down to 0 of the rate, then constant over the last 1 step",
        ),
        ("null", "constant"),
        (
            "{name: torch.optim.lr_scheduler.CosineAnnealingLR, kwargs: {T_max: 10}}",
            "CosineAnnealingLR (T_max=10)",
        ),
        (
            "[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {total_iters: 3}},"
            "{name: torch.optim.lr_scheduler.ConstantLR}, {milestones: [3]}]",
            "LinearLR (total_iters=3), then ConstantLR after step 3",
        ),
    ],
)
def test_the_choices_name_the_schedule(schedule, printed):
    assert schedule_in_words(policy_of(schedule), 10) == printed


def test_a_run_under_a_schedule_by_name_resumes_bit_for_bit(tmp_path):
    settings = [
        "checkpointing.save_period=2",
        "dpo.max_num_steps=6",
        "policy.scheduler={name: cosine, warmup_ratio: 0.3, min_lr_ratio: 0.1}",
        few_pairs(tmp_path),
    ]
    whole = short_run(tmp_path / "whole", *settings)
    with killed_after(5):
        short_run(tmp_path / "cut", *settings)
    # Its first steps followed a schedule of six: another length would continue another schedule.
    with pytest.raises(CheckpointError) as refused:
        short_run(tmp_path / "cut", *settings, "dpo.max_num_steps=8")
    assert str(refused.value) == (
        f"{tmp_path}/cut contains a run with another configuration:\n"
        "  dpo.max_num_steps: 6 there, 8 now\n"
        "policy.scheduler spans the run, so its length determines the learning rate of every step.\n"
        "Restore the old values, or choose another run.dir, or start a new run with fresh=True."
    )
    cut = short_run(tmp_path / "cut", *settings)
    assert metrics_of(cut) == metrics_of(whole)
    assert [line["lr"] for line in metrics_of(cut)] == pytest.approx(
        [0, 5e-4, 1e-3, 0.86819e-3, 0.55e-3, 0.23181e-3], rel=1e-4
    )
    assert largest_difference(weights_of(cut), weights_of(whole)) == 0.0


COSINE, STEPS = "torch.optim.lr_scheduler.CosineAnnealingLR", "torch.optim.lr_scheduler.StepLR"


@pytest.mark.parametrize(
    ("schedule", "reported"),
    [
        (f"{{name: {COSINE}, kwargs: {{T_max: 0}}}}", "CosineAnnealingLR (T_max=0)"),
        (
            f"[{{name: {COSINE}, kwargs: {{T_max: 9}}}}, {{name: {STEPS}, kwargs: {{step_size: 0}}}}, {{milestones: [2]}}]",
            "StepLR (step_size=0)",
        ),
    ],
)
def test_a_scheduler_that_divides_by_nothing_is_refused_before_it_is_stepped(schedule, reported):
    with pytest.raises(ConfigError) as error:
        check_scheduler(policy_of(schedule))
    assert (
        str(error.value)
        == f"policy.scheduler: {reported} fails at the first step (integer modulo by zero). Change its kwargs."
    )


def test_a_scheduler_that_is_to_start_in_the_middle_is_refused():
    with pytest.raises(ConfigError) as refused:
        check_scheduler(policy_of("{name:torch.optim.lr_scheduler.LinearLR,kwargs:{last_epoch:5}}"))
    assert str(refused.value) == (
        "policy.scheduler: LinearLR (last_epoch=5): last_epoch is not supported, because tandem sets the step of a resumed run "
        "itself. Leave it out."
    )


def test_the_highest_rate_of_torchs_schedulers_is_that_of_all_steps():
    slow = policy_of("{name:torch.optim.lr_scheduler.LinearLR,kwargs:{start_factor:0.1,total_iters:12000}}")
    assert highest_rate(slow, 12_001) == pytest.approx(slow.optimizer.kwargs.lr)

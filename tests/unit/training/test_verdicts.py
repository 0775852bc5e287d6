"""Verdicts on a run's curves: each is given exactly when its threshold is reached."""

import pytest

from tandem.config.schema import Config, Reference
from tandem.config.sections.dpo import Dpo
from tandem.report.verdicts import judge

pytestmark = pytest.mark.usefixtures("of_a_command")

SOUND = {
    "loss": 0.5,
    "accuracy": 0.8,
    "rewards_chosen_mean": 0.1,
    "rewards_margin_mean": 0.4,
    "logps_chosen_mean": -50.0,
    "tokens_chosen_mean": 20.0,
    "kl_per_token": 0.02,
    "chosen_below_reference": 0.3,
    "margin_length_correlation": 0.1,
    "accuracy_chosen_longer": 0.9,
    "accuracy_chosen_shorter": 0.7,
    "num_pairs": 100,
}


def course(*changes, split="validation-default", without=()):
    """A record every ten steps from step 0, without problems except for the changes."""
    records = [{"step": 10 * i, "split": split, **SOUND, **change} for i, change in enumerate(changes)]
    return [{name: value for name, value in record.items() if name not in without} for record in records]


def found(records, loss="dpo", **changes):
    """The texts of the verdicts by name. changes: keys of section dpo."""
    config = Config(dpo=Dpo(preference_loss=loss, **changes))
    return {verdict.name: verdict.text for verdict in judge(records, config)}


def steps_of(num: int, **changes):
    return [{**SOUND, "split": "train", "step": i + 1, "num_pairs": 10, "lr": 5e-6, **changes} for i in range(num)]


START = {"loss": 0.6931, "accuracy": 0.5, "rewards_margin_mean": 0.0}


def test_a_run_without_problems_gets_the_verdict_sound():
    texts = found(course(START, {}))
    assert texts == {"sound": "no problems found: accuracy 0.50 -> 0.80, margin 0.000 -> 0.400."}
    assert found([*steps_of(20), *course(START, {})]) == texts


def test_a_good_result_of_few_steps_is_reported_as_such():
    sound = "no problems found: accuracy 0.50 -> 0.80, margin 0.000 -> 0.400. It is the result of only "
    assert found([*steps_of(19), *course(START, {})]) == {
        "sound": f"{sound}19 steps: train for 20 or more before you rely on it."
    }
    assert found([*steps_of(1), *course(START, {})]) == {
        "sound": f"{sound}1 step: train for 20 or more before you rely on it."
    }


def test_a_learning_rate_of_zero_is_reported_as_no_training():
    zero = "nothing was trained: the learning rate was 0 in all of 3 steps. Train for more steps (a schedule with warm-up starts "
    assert found([*steps_of(3, lr=0.0), *course(START, START)]) == {
        "hardly_trained": f"{zero}at 0), or change policy.scheduler."
    }


def test_a_learning_rate_that_never_left_its_warm_up_is_reported():
    warm = (
        "in 3 steps the learning rate never left its warm-up (2.4e-06 at most, of 5e-06). Train for more steps "
        "(dpo.max_num_epochs, or a smaller batch), or shorten the warm-up (policy.scheduler)."
    )
    slow = steps_of(3, lr=2.4e-6)
    assert found([*slow, *course(START, {})]) == {
        "warm_up_only": f"accuracy 0.50 -> 0.80, margin 0.400, although {warm}"
    }
    # 100 pairs: two standard errors are 0.1
    flat = found([*slow, *course(START, {"accuracy": 0.59})])
    assert flat["hardly_trained"] == f"hardly anything was trained: {warm}"
    assert "warm_up_only" not in flat
    assert "warm_up_only" not in found([*steps_of(3, lr=2.5e-6), *course(START, {})])


def test_a_loss_that_hardly_moved_is_reported_unless_another_verdict_says_what_to_change():
    text = (
        "hardly anything was trained: in 40 steps the loss went from 0.6931 to 0.6800, and the margin from 0.000 to 0.020. Train "
        "for more steps, or with a larger policy.optimizer.kwargs.lr (now 5e-06)."
    )
    little = {"loss": 0.68, "rewards_margin_mean": 0.02}
    assert found([*steps_of(40), *course(START, little)]) == {"hardly_trained": text}
    assert set(found([*steps_of(40), *course(START, little | {"accuracy": 0.55})])) == {"accuracy_flat"}
    assert set(found([*steps_of(40), *course(START, little | {"num_pairs": 1})])) == {"accuracy_flat", "hardly_trained"}
    assert set(found([*steps_of(40), *course(START, little | {"loss": 0.679})])) == {"sound"}
    # the training set, whose first step is measured before its update
    first, *others = steps_of(40, **little)
    assert found([first | START, *(step | {"accuracy": 0.9} for step in others)]) == {"hardly_trained": text}


def test_a_run_with_steps_left_is_not_reported_as_hardly_trained():
    for records in (course(START, START | {"accuracy": 0.8}), course(START, {})):
        for lr in (0.0, 1e-6, 5e-6):
            verdicts = judge([*steps_of(3, lr=lr), *records], Config(), has_ended=False)
            assert [one.name for one in verdicts] == ["sound"]
            assert "only" not in verdicts[0].text


def test_a_single_training_step_is_reported_as_not_measured():
    assert found(steps_of(1, **START))["hardly_trained"] == (
        "the trained model was not measured: the only step is measured before its update. Train for more steps, and set "
        "data.validation_share."
    )


def test_a_validation_set_that_overlaps_with_the_training_set_is_reported():
    records = course(START, {})
    verdicts = judge(records, Config(), {"validation-default": 0.1})
    assert [(one.name, one.text) for one in verdicts] == [
        (
            "validation_overlap",
            "the result is not on new data: 10% of the prompts of this set are in the training set too. Remove them from one of "
            "the two, or hold out pairs with data.validation_share.",
        )
    ]
    assert [one.name for one in judge(records, Config(), {"validation-default": 0.09})] == ["sound"]


def test_a_rise_of_the_training_loss_is_not_judged_from_few_steps_or_from_noise():
    def rising(num: int, noise: float):
        """Steps of which the first half has a loss of 0.5 and the second half 0.6, plus or minus noise."""
        return [
            step | {"loss": (0.5 if i < num // 2 else 0.6) + noise * (-1) ** i, "accuracy": 0.8}
            for i, step in enumerate(steps_of(num))
        ]

    assert "best_long_ago" in found(rising(20, 0.01))
    assert "best_long_ago" not in found(rising(16, 0.01))
    # 0.3 / sqrt(10) is a standard error of about 0.1 in each quarter of ten steps
    assert "best_long_ago" not in found(rising(40, 0.3))
    assert "best_long_ago" in found(rising(40, 0.05))
    # nor is a smaller learning rate advised for a flat accuracy
    flat = [step | {"accuracy": 0.5} for step in rising(16, 0.01)]
    assert ". Train longer or with a larger" in found(flat)["accuracy_flat"]
    flat = [step | {"accuracy": 0.5} for step in rising(20, 0.01)]
    assert "The loss has risen: try a smaller" in found(flat)["accuracy_flat"]


def test_accuracy_within_two_standard_errors_of_guessing_is_flat():
    # of 100 pairs: 0.5 + 2 * sqrt(0.25 / 100)
    assert "accuracy_flat" not in found(course({}, {"accuracy": 0.6}))
    text = found(course({}, {"accuracy": 0.59}))["accuracy_flat"]
    assert text.startswith(
        "accuracy is flat: 0.590 on 100 pairs is not significantly different from 0.500 (0.600 would be). Train longer"
    )
    # a larger learning rate is not advised if the policy is far from the reference
    assert found(course({}, {"accuracy": 0.59, "kl_per_token": 1.5}))["accuracy_flat"].endswith(
        "The policy still moved 1.50 nats per token away from the reference: try a smaller policy.optimizer.kwargs.lr."
    )
    # more pairs, less noise
    assert "accuracy_flat" not in found(course({}, {"accuracy": 0.59, "num_pairs": 200}))


def test_too_few_pairs_to_judge_accuracy_are_reported():
    text = found(course({}, {"accuracy": 1.0, "num_pairs": 1}))["accuracy_flat"]
    assert text == (
        "too few pairs to judge accuracy: 1.000 on 1 pair is not significantly different from 0.500. Validate on more pairs."
    )
    # four of four are significant
    assert "accuracy_flat" not in found(course({}, {"accuracy": 1.0, "num_pairs": 4}))


def test_an_accuracy_worse_than_guessing_is_reversed_not_flat():
    texts = found(course({}, {"accuracy": 0.4}))
    assert "accuracy_flat" not in texts
    assert texts["accuracy_reversed"].startswith(
        "accuracy is worse than at the start: 0.400 on 100 pairs, compared with 0.500 before training. Check that chosen and"
    )
    assert "accuracy_reversed" not in found(course({}, {"accuracy": 0.41}))
    reference = ("kl_per_token", "chosen_below_reference")
    fallen = course({"accuracy": 0.7}, {"accuracy": 0.55}, without=reference)
    text = found(fallen, "simpo")["accuracy_reversed"]
    assert "0.550 on 100 pairs, compared with 0.700 before training. Check that chosen" in text


def test_advice_names_only_settings_that_the_loss_reads():
    long = course({}, {"margin_length_correlation": 0.8})
    assert (
        "To reduce this, use dpo.ld_alpha, or dpo.preference_average_log_probs=true, or a per-token loss"
        in (found(long)["length_learnt"])
    )
    assert "To reduce this, use a per-token loss" in found(long, "cpo")["length_learnt"]
    assert "dpo.ld_alpha" not in found(long, {"dpo": 1.0, "cpo": 0.5})["length_learnt"]
    reference = ("kl_per_token", "chosen_below_reference")
    alone = found(course({}, {"logps_chosen_mean": -60.0}, without=reference), "simpo")["chosen_falling"]
    assert alone.endswith("set dpo.sft_loss_weight, or lower the learning rate.")


def test_falling_chosen_completions_are_not_reported_for_losses_that_lower_them_by_design():
    down = course({}, {"chosen_below_reference": 0.9, "rewards_chosen_mean": -0.25})
    assert "chosen_falling" in found(down)
    assert "chosen_falling" not in found(down, "apo_down")


def test_a_small_fall_of_chosen_completions_is_not_reported():
    assert "chosen_falling" not in found(course({}, {"chosen_below_reference": 0.9, "rewards_chosen_mean": -0.004}))


def test_without_a_reference_accuracy_is_compared_with_its_start():
    reference = ("kl_per_token", "chosen_below_reference")
    flat = course({"accuracy": 0.7}, {"accuracy": 0.75}, without=reference)
    assert "is not significantly different from 0.700 (" in found(flat, "simpo")["accuracy_flat"]
    assert "accuracy_flat" not in found(course({"accuracy": 0.7}, {"accuracy": 0.81}, without=reference), "simpo")


def test_chosen_completions_fall_when_most_are_below_the_reference():
    down = {"chosen_below_reference": 0.51, "rewards_chosen_mean": -0.25}
    text = found(course({}, down))["chosen_falling"]
    assert text.startswith(
        "the chosen completions become less likely: 51% of them are less likely than under the reference (mean reward -0.25)."
    )
    assert "dpo.sft_loss_weight" in text
    assert "chosen_falling" not in found(course({}, down | {"chosen_below_reference": 0.5}))
    assert "chosen_falling" not in found(course({}, down | {"rewards_chosen_mean": 0.01}))


def test_without_a_reference_chosen_completions_are_compared_with_their_start():
    reference = ("kl_per_token", "chosen_below_reference")
    records = course({}, {"logps_chosen_mean": -60.0}, without=reference)
    assert "their mean log-probability was -50.0 and is -60.0." in found(records)["chosen_falling"]
    assert "chosen_falling" not in found(course({}, {"logps_chosen_mean": -49.0}, without=reference))
    # the first record is not the beginning: there is nothing to compare with
    assert "chosen_falling" not in found(records[1:])


@pytest.mark.parametrize("correlation", [0.5, -0.5])
def test_a_margin_that_correlates_with_length_is_reported(correlation):
    text = found(course({}, {"margin_length_correlation": correlation}))["length_learnt"]
    assert text.startswith(
        f"the margin follows length: its correlation with chosen minus rejected tokens is {correlation:.2f}; accuracy is "
        "0.90 if the chosen completion is the longer one, 0.70 if it is the shorter one."
    )
    assert "length_learnt" not in found(course({}, {"margin_length_correlation": 0.98 * correlation}))
    assert "length_learnt" not in found(course({}, {"margin_length_correlation": correlation, "num_pairs": 19}))


def test_a_policy_that_is_far_from_the_reference_and_moving_fast_is_reported():
    text = found(course({}, {"kl_per_token": 0.79}, {"kl_per_token": 1.2}))["kl_running_away"]
    assert text.startswith(
        "the policy is moving away from the reference fast: 1.20 nats per token now, 0.79 at step 10."
    )
    assert "kl_running_away" not in found(course({}, {"kl_per_token": 0.81}, {"kl_per_token": 1.2}))
    assert "kl_running_away" not in found(course({}, {"kl_per_token": 0.1}, {"kl_per_token": 1.0}))


def test_a_best_loss_long_before_the_end_is_reported():
    rising = [{"loss": 0.69}, {"loss": 0.4}, {"loss": 0.5}]
    text = found(course(*rising))["best_long_ago"]
    assert text.startswith("the loss has been rising: it was lowest at step 10 (0.4000) and is 0.5000 at step 20.")
    assert "best_long_ago" not in found(course({"loss": 0.69}, {"loss": 0.495}, {"loss": 0.5}))
    # a loss of 0, or below it, is no worse than itself
    for lowest in (0.0, -0.5):
        assert "best_long_ago" not in found(course({"loss": 0.69}, {"loss": lowest}, {"loss": lowest}))
    assert "best_long_ago" in found(course({"loss": 0.69}, {"loss": -0.5}, {"loss": -0.4}))


def test_a_loss_that_never_fell_below_its_start_is_reported_as_made_worse():
    texts = found(course({"loss": 0.6931}, {"loss": 0.7}, {"loss": 0.9}))
    assert texts == {
        "only_hurt": "training made the loss worse: it was 0.6931 before the first step, at best 0.7000 after that (step 10), "
        "and is 0.9000 at step 20. Try a smaller policy.optimizer.kwargs.lr; if that does not help, check that this set ranks "
        "like the training set."
    }
    assert found(course({"loss": 0.6931}, {"loss": 0.9}))["only_hurt"].startswith(
        "training made the loss worse: it was 0.6931 before the first step and is 0.9000 at step 10. Try"
    )
    # within 2 % of where it began
    assert "only_hurt" not in found(course({"loss": 0.6931}, {"loss": 0.70}))
    # without a measurement of the start nothing is said of it
    assert "only_hurt" not in found(course({"loss": 0.6931}, {"loss": 0.7}, {"loss": 0.9})[1:])


def test_advice_does_not_repeat_current_settings():
    down = course({}, {"accuracy": 0.3})
    exchanged = (
        "Check that chosen and rejected are not swapped (lower ranks and higher scores are better), and that the validation set "
        "ranks like the training set. Otherwise try a smaller policy.optimizer.kwargs.lr"
    )
    for loss in ("dpo", "sigmoid", {"sigmoid": 2.0}):
        assert found(down, loss)["accuracy_reversed"].endswith(f"{exchanged}.")
    for loss in ("discopop", {"dpo": 1.0, "hinge": 0.5}):
        assert found(down, loss)["accuracy_reversed"].endswith(f"{exchanged} or dpo.preference_loss=dpo.")
    long = course({}, {"margin_length_correlation": 0.8})
    ways = [
        ({"ld_alpha": 0.5}, "a dpo.ld_alpha below 0.5, or dpo.preference_average_log_probs=true, or a per-token loss"),
        (
            {"ld_alpha": 0.0},
            "dpo.preference_average_log_probs=true, or a per-token loss (sigmoid_norm, simpo), or pairs",
        ),
        ({"preference_average_log_probs": True}, "dpo.ld_alpha, or pairs of more similar lengths."),
        ({"loss": "sigmoid_norm"}, "dpo.ld_alpha, or pairs of more similar lengths."),
        ({"loss": "simpo"}, "pairs of more similar lengths."),
    ]
    for settings, advice in ways:
        assert f"To reduce this, use {advice}" in found(long, **settings)["length_learnt"]
    falling = course({}, {"chosen_below_reference": 0.9, "rewards_chosen_mean": -0.25})
    assert found(falling, sft_loss_weight=0.1)["chosen_falling"].endswith(
        "outside the pairs. To prevent this, raise dpo.sft_loss_weight above 0.1, lower the learning rate, or raise "
        "dpo.reference_policy_kl_penalty."
    )


def test_longer_training_is_not_advised_if_the_loss_rises():
    text = found(course({"loss": 0.69}, {"loss": 0.6, "accuracy": 0.55}, {"loss": 0.66, "accuracy": 0.55}))
    assert text["accuracy_flat"].endswith(
        "The loss has risen: try a smaller policy.optimizer.kwargs.lr; if that does not help, read the pairs that "
        "`tandem eval RUN --per-pair FILE` lists first."
    )
    assert "`tandem eval RUN DATA --per-pair FILE`" in found(steps_of(40, accuracy=0.5))["accuracy_flat"]


def test_swapped_labels_are_ruled_out_if_training_accuracy_is_no_better():
    steps = [{**SOUND, "split": "train", "step": i + 1, "num_pairs": 10} for i in range(16)]
    reversed_set = course({}, {"accuracy": 0.3})
    assert "Check that chosen and rejected are not swapped" in found([*steps, *reversed_set])["accuracy_reversed"]
    bad = [step | {"accuracy": 0.45} for step in steps]
    assert found([*bad, *reversed_set])["accuracy_reversed"].endswith(
        "On the training pairs it is 0.450, so swapped labels are not the cause: try a smaller policy.optimizer.kwargs.lr."
    )
    worse = [step | {"accuracy": 0.1} for step in steps]
    assert found(worse)["accuracy_reversed"].endswith(
        "These are the training pairs, so swapped labels are not the cause: try a smaller policy.optimizer.kwargs.lr."
    )


def test_with_another_reference_model_accuracy_is_compared_with_the_start():
    config = Config(reference=Reference(model="other"))
    begins = {"accuracy": 0.8, "kl_per_token": 1.5, "chosen_below_reference": 0.9, "rewards_chosen_mean": -0.3}
    names = {verdict.name for verdict in judge(course(begins, begins | {"accuracy": 0.82}), config)}
    assert names == {"accuracy_flat"}
    names = {verdict.name for verdict in judge(course(begins, begins | {"accuracy": 0.6}), config)}
    assert names == {"accuracy_reversed"}
    names = {
        verdict.name
        for verdict in judge(course(begins, begins | {"accuracy": 0.95, "rewards_chosen_mean": -0.4}), config)
    }
    assert names == {"chosen_falling"}


def test_the_fall_of_rewards_per_token_is_measured_per_token():
    # -0.004 a token of completions of 50 tokens: as much as -0.2 of sums
    falling = course({}, {"chosen_below_reference": 0.9, "rewards_chosen_mean": -0.004, "tokens_chosen_mean": 50.0})
    assert "chosen_falling" not in found(falling)
    for settings in ({"loss": "sigmoid_norm"}, {"preference_average_log_probs": True}):
        assert "chosen_falling" in found(falling, **settings)


def test_a_diverged_run_gets_only_that_verdict():
    absurd = {"accuracy": 0.2, "rewards_margin_p50": -3.6e6, "rewards_margin_mean": -4e6}
    absurd |= {"logps_chosen_mean": -6e7, "tokens_chosen_mean": 50.0, "loss": 3.6e6}
    steps = [{**SOUND, "split": "train", "step": i + 1, "accuracy": 0.4, "grad_norm": 0.0} for i in range(2)]
    assert found([*steps, *course({}, absurd)]) == {
        "diverged": "training diverged: half of the margins are below -3.6e+06; the chosen completions cost 1.2e+06 nats per "
        "token, while guessing costs less than 13; the gradient of the last step is 0, although its accuracy is only 0.400. "
        "The model at step 10 is unusable: try a smaller policy.optimizer.kwargs.lr (now 5e-06)."
    }


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({"loss": float("nan")}, "the loss is nan"),
        ({"rewards_margin_p50": 1001.0}, "half of the margins are above 1e+03"),
        ({"logps_chosen_mean": -1300.0, "tokens_chosen_mean": 50.0}, "the chosen completions cost 26 nats per token"),
    ],
)
def test_each_sign_of_divergence_is_enough(change, sign):
    texts = found(course({}, change))
    assert list(texts) == ["diverged"]
    assert sign in texts["diverged"]


def test_metrics_that_are_large_by_design_are_not_divergence():
    large = course({}, {"rewards_margin_p50": 5000.0})
    assert "diverged" not in found(large, "rpo_sq")  # a target of the data's scores
    assert "diverged" not in found(large, f_divergence="forward_kl")  # exponential
    # a start model that finds the text as unlikely
    nats = {"logps_chosen_mean": -1300.0, "tokens_chosen_mean": 50.0}
    assert "diverged" not in found(course(nats, nats))
    # a hinge whose pairs are all done
    done = {**SOUND, "split": "train", "step": 20, "accuracy": 1.0, "grad_norm": 0.0}
    assert "diverged" not in found([done, *course({}, {})], "hinge")
    assert "diverged" in found([done | {"accuracy": 0.9}, *course({}, {})], "hinge")


def test_without_validation_training_is_judged_by_quarters():
    steps = [
        {
            **SOUND,
            "split": "train",
            "step": i + 1,
            "num_pairs": 10,
            "accuracy": 0.5 if i < 12 else 0.9,
            "loss": 0.6 - i / 50,
        }
        for i in range(16)
    ]
    (verdict,) = judge(steps, Config())
    assert (verdict.split, verdict.name) == ("train", "sound")
    assert "accuracy 0.50 -> 0.90" in verdict.text
    # one good step among the last four is noise
    steps = [step | {"accuracy": 0.5} for step in steps[:-1]] + steps[-1:]
    assert "accuracy is flat: 0.600 on 40 pairs" in found(steps)["accuracy_flat"]


def test_every_validation_set_is_judged_and_the_export_is_not():
    records = [
        *course(START, {}, split="validation-a"),
        *course({}, {"accuracy": 0.5}, split="validation-b"),
        *course({}, {"accuracy": 0.5}, split="exported-b"),
        *course({}, {"accuracy": 0.5}, split="train"),
    ]
    assert [(verdict.split, verdict.name) for verdict in judge(records, Config())] == [
        ("validation-a", "sound"),
        ("validation-b", "accuracy_flat"),
    ]


def test_a_metric_missing_from_some_steps_is_not_judged():
    steps = course({}, {}, {}, {}, split="train")
    steps = [step | {"step": step["step"] + 1, "margin_length_correlation": 0.9} for step in steps]
    assert "length_learnt" in found(steps)
    assert "length_learnt" not in found([*steps, {**steps[-1], "step": 50, "margin_length_correlation": None}])


def test_a_single_validation_shows_no_change():
    assert "->" not in next(iter(found(course({"accuracy": 0.9, "step": 4})).values()))


@pytest.mark.parametrize("name", ["num_pairs", "loss", "accuracy", "logps_chosen_mean", "tokens_chosen_mean"])
@pytest.mark.parametrize("split", ["train", "validation-default"])
def test_damaged_records_are_not_judged(name, split):
    whole = course({"accuracy": 0.5}, {}, {"loss": 0.4}, split=split)
    (damaged,) = course({"step": 15}, split=split, without=[name])
    nothing = [{**whole[1], "step": 15, name: 0}] if name in ("num_pairs", "tokens_chosen_mean") else []
    assert found([*whole[:2], damaged, *nothing, whole[2]]) == found(whole)


def test_without_intact_records_there_is_no_verdict():
    assert found(course({}, {}, without=["accuracy"])) == {}


def test_few_pairs_are_said_to_be_few():
    """0.5 + 2 standard errors of 0.5 / sqrt(40) = 0.658: 26.3 of 40 pairs, so 27."""
    text = found(course(START, {"accuracy": 0.6, "num_pairs": 40}))["accuracy_flat"]
    assert "0.600 on 40 pairs is not significantly different from 0.500 (27 of 40 would be). With so few pairs" in text
    assert "validate on 100 or more" in text

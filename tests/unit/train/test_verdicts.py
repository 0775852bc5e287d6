"""What is said of a run's curves: each verdict where it belongs, and not one step before."""

import pytest

from tandem.config.schema import Config, Reference
from tandem.config.sections.dpo import Dpo
from tandem.report.verdicts import judge

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
    """A record every ten steps from step 0, sound but for the changes."""
    records = [{"step": 10 * i, "split": split, **SOUND, **change} for i, change in enumerate(changes)]
    return [{name: value for name, value in record.items() if name not in without} for record in records]


def found(records, loss="dpo", **changes):
    """changes: of section dpo."""
    config = Config(dpo=Dpo(preference_loss=loss, **changes))
    return {verdict.name: verdict.text for verdict in judge(records, config)}


def test_a_sound_run_is_called_so():
    texts = found(course({"accuracy": 0.5, "rewards_margin_mean": 0.0}, {}))
    assert texts == {"sound": "nothing stands out: accuracy 0.50 -> 0.80, margin 0.000 -> 0.400."}


def test_accuracy_is_flat_within_two_standard_errors_of_guessing():
    # of 100 pairs: 0.5 + 2 * sqrt(0.25 / 100)
    assert "accuracy_flat" not in found(course({}, {"accuracy": 0.6}))
    text = found(course({}, {"accuracy": 0.59}))["accuracy_flat"]
    assert text.startswith(
        "accuracy is flat: 0.590 over 100 pairs, where 0.600 would stand out from 0.500. Train longer"
    )
    # a greater rate is no advice where the policy has run away
    assert found(course({}, {"accuracy": 0.59, "kl_per_token": 1.5}))["accuracy_flat"].endswith(
        "The policy moved all the same, 1.50 nats a token from the reference: try a smaller policy.optimizer.kwargs.lr."
    )
    # more pairs, less noise
    assert "accuracy_flat" not in found(course({}, {"accuracy": 0.59, "num_pairs": 200}))


def test_too_few_pairs_to_tell_are_not_asked_for_more_than_all():
    text = found(course({}, {"accuracy": 1.0, "num_pairs": 1}))["accuracy_flat"]
    assert text == "accuracy cannot be told from 0.500 by 1 pair: it is 1.000. Validate on more of them."
    # four of four stand out
    assert "accuracy_flat" not in found(course({}, {"accuracy": 1.0, "num_pairs": 4}))


def test_an_accuracy_worse_than_guessing_is_not_called_flat():
    texts = found(course({}, {"accuracy": 0.4}))
    assert "accuracy_flat" not in texts
    assert texts["accuracy_reversed"].startswith(
        "accuracy is worse than at the start: 0.400 over 100 pairs, where knowing nothing gives 0.500. Are chosen and rejected"
    )
    assert "accuracy_reversed" not in found(course({}, {"accuracy": 0.41}))
    reference = ("kl_per_token", "chosen_below_reference")
    fallen = course({"accuracy": 0.7}, {"accuracy": 0.55}, without=reference)
    assert "0.550 over 100 pairs, where it began at 0.700. Are chosen" in found(fallen, "simpo")["accuracy_reversed"]


def test_what_is_advised_is_what_the_loss_reads():
    long = course({}, {"margin_length_correlation": 0.8})
    assert (
        "To weigh length less: dpo.ld_alpha, or dpo.preference_average_log_probs=true, or a loss per token"
        in (found(long)["length_learnt"])
    )
    assert "To weigh length less: a loss per token" in found(long, "cpo")["length_learnt"]
    assert "dpo.ld_alpha" not in found(long, {"dpo": 1.0, "cpo": 0.5})["length_learnt"]
    reference = ("kl_per_token", "chosen_below_reference")
    alone = found(course({}, {"logps_chosen_mean": -60.0}, without=reference), "simpo")["chosen_falling"]
    assert alone.endswith("dpo.sft_loss_weight, or a smaller learning rate hold them.")


def test_a_loss_that_lowers_the_chosen_on_purpose_is_not_told_so():
    down = course({}, {"chosen_below_reference": 0.9, "rewards_chosen_mean": -0.25})
    assert "chosen_falling" in found(down)
    assert "chosen_falling" not in found(down, "apo_down")


def test_a_fall_that_is_noise_is_not_told():
    assert "chosen_falling" not in found(course({}, {"chosen_below_reference": 0.9, "rewards_chosen_mean": -0.004}))


def test_without_a_reference_accuracy_is_flat_where_it_has_not_left_its_start():
    reference = ("kl_per_token", "chosen_below_reference")
    flat = course({"accuracy": 0.7}, {"accuracy": 0.75}, without=reference)
    assert "would stand out from 0.700" in found(flat, "simpo")["accuracy_flat"]
    assert "accuracy_flat" not in found(course({"accuracy": 0.7}, {"accuracy": 0.81}, without=reference), "simpo")


def test_the_chosen_are_falling_when_most_are_below_the_reference():
    down = {"chosen_below_reference": 0.51, "rewards_chosen_mean": -0.25}
    text = found(course({}, down))["chosen_falling"]
    assert text.startswith(
        "the chosen completions are falling: 51% of them are less likely than under the reference (mean reward -0.25)."
    )
    assert "dpo.sft_loss_weight" in text
    assert "chosen_falling" not in found(course({}, down | {"chosen_below_reference": 0.5}))
    assert "chosen_falling" not in found(course({}, down | {"rewards_chosen_mean": 0.01}))


def test_without_a_reference_the_chosen_fall_below_where_they_began():
    reference = ("kl_per_token", "chosen_below_reference")
    records = course({}, {"logps_chosen_mean": -60.0}, without=reference)
    assert "mean log-probability -50.0 at first, -60.0 now" in found(records)["chosen_falling"]
    assert "chosen_falling" not in found(course({}, {"logps_chosen_mean": -49.0}, without=reference))
    # the first record is not the beginning: there is nothing to compare with
    assert "chosen_falling" not in found(records[1:])


@pytest.mark.parametrize("correlation", [0.5, -0.5])
def test_the_margin_goes_by_length(correlation):
    text = found(course({}, {"margin_length_correlation": correlation}))["length_learnt"]
    assert text.startswith(
        f"the margin goes by length: its correlation with chosen minus rejected tokens is {correlation:.2f}; accuracy is "
        "0.90 where the chosen completion is the longer one, 0.70 where it is the shorter."
    )
    assert "length_learnt" not in found(course({}, {"margin_length_correlation": 0.98 * correlation}))
    assert "length_learnt" not in found(course({}, {"margin_length_correlation": correlation, "num_pairs": 19}))


def test_the_policy_runs_away_when_it_is_far_and_fast():
    text = found(course({}, {"kl_per_token": 0.79}, {"kl_per_token": 1.2}))["kl_running_away"]
    assert text.startswith("the policy is running away from the reference: 1.20 nats a token now, 0.79 at step 10.")
    assert "kl_running_away" not in found(course({}, {"kl_per_token": 0.81}, {"kl_per_token": 1.2}))
    assert "kl_running_away" not in found(course({}, {"kl_per_token": 0.1}, {"kl_per_token": 1.0}))


def test_the_best_was_long_ago():
    rising = [{"loss": 0.69}, {"loss": 0.4}, {"loss": 0.5}]
    text = found(course(*rising))["best_long_ago"]
    assert text.startswith("the best was long ago: the loss was 0.4000 at step 10 and is 0.5000 at step 20.")
    assert "best_long_ago" not in found(course({"loss": 0.69}, {"loss": 0.495}, {"loss": 0.5}))
    # a loss of 0, or below it, is no worse than itself
    for lowest in (0.0, -0.5):
        assert "best_long_ago" not in found(course({"loss": 0.69}, {"loss": lowest}, {"loss": lowest}))
    assert "best_long_ago" in found(course({"loss": 0.69}, {"loss": -0.5}, {"loss": -0.4}))


def test_a_loss_that_was_never_below_its_start_is_no_best_of_long_ago():
    texts = found(course({"loss": 0.6931}, {"loss": 0.7}, {"loss": 0.9}))
    assert texts == {
        "only_hurt": "training only hurt: the loss was 0.6931 before the first step, 0.7000 at best since (step 10), and is "
        "0.9000 at step 20. Try a smaller policy.optimizer.kwargs.lr; if it stays, does this set rank as the training set does?"
    }
    assert found(course({"loss": 0.6931}, {"loss": 0.9}))["only_hurt"].startswith(
        "training only hurt: the loss was 0.6931 before the first step and is 0.9000 at step 10. Try"
    )
    # within 2 % of where it began
    assert "only_hurt" not in found(course({"loss": 0.6931}, {"loss": 0.70}))
    # without a measurement of the start nothing is said of it
    assert "only_hurt" not in found(course({"loss": 0.6931}, {"loss": 0.7}, {"loss": 0.9})[1:])


def test_what_is_advised_is_not_already_in_force():
    down = course({}, {"accuracy": 0.3})
    exchanged = (
        "Are chosen and rejected exchanged (of ranks the lower is better, of scores the higher)? Does validation rank as "
        "training does? If so, try a smaller policy.optimizer.kwargs.lr"
    )
    for loss in ("dpo", "sigmoid", {"sigmoid": 2.0}):
        assert found(down, loss)["accuracy_reversed"].endswith(f"{exchanged}.")
    for loss in ("discopop", {"dpo": 1.0, "hinge": 0.5}):
        assert found(down, loss)["accuracy_reversed"].endswith(f"{exchanged} or dpo.preference_loss=dpo.")
    long = course({}, {"margin_length_correlation": 0.8})
    ways = [
        ({"ld_alpha": 0.5}, "a dpo.ld_alpha below 0.5, or dpo.preference_average_log_probs=true, or a loss per token"),
        (
            {"ld_alpha": 0.0},
            "dpo.preference_average_log_probs=true, or a loss per token (sigmoid_norm, simpo); or pairs",
        ),
        ({"preference_average_log_probs": True}, "dpo.ld_alpha; or pairs of more equal lengths."),
        ({"loss": "sigmoid_norm"}, "dpo.ld_alpha; or pairs of more equal lengths."),
        ({"loss": "simpo"}, "pairs of more equal lengths."),
    ]
    for settings, advice in ways:
        assert f"To weigh length less: {advice}" in found(long, **settings)["length_learnt"]
    falling = course({}, {"chosen_below_reference": 0.9, "rewards_chosen_mean": -0.25})
    assert found(falling, sft_loss_weight=0.1)["chosen_falling"].endswith(
        "in no pair. A dpo.sft_loss_weight above 0.1, a smaller learning rate or a greater dpo.reference_policy_kl_penalty "
        "hold them."
    )


def test_a_rising_loss_is_not_advised_to_train_longer():
    text = found(course({"loss": 0.69}, {"loss": 0.6, "accuracy": 0.55}, {"loss": 0.66, "accuracy": 0.55}))
    assert text["accuracy_flat"].endswith(
        "The loss has risen: try a smaller policy.optimizer.kwargs.lr; if it stays, read the pairs that --per-pair FILE writes."
    )


def test_exchanged_labels_are_not_asked_about_where_training_did_no_better():
    steps = [{**SOUND, "split": "train", "step": i + 1, "num_pairs": 10} for i in range(16)]
    reversed_set = course({}, {"accuracy": 0.3})
    assert "Are chosen and rejected exchanged" in found([*steps, *reversed_set])["accuracy_reversed"]
    bad = [step | {"accuracy": 0.45} for step in steps]
    assert found([*bad, *reversed_set])["accuracy_reversed"].endswith(
        "On the training pairs it is 0.450, so exchanged labels are not the cause: try a smaller policy.optimizer.kwargs.lr."
    )
    worse = [step | {"accuracy": 0.1} for step in steps]
    assert found(worse)["accuracy_reversed"].endswith(
        "These are the pairs it was trained on, so exchanged labels are not the cause: try a smaller "
        "policy.optimizer.kwargs.lr."
    )


def test_another_model_as_the_reference_is_compared_with_the_start():
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


def test_a_run_that_diverged_is_called_so_and_nothing_else():
    absurd = {"accuracy": 0.2, "rewards_margin_p50": -3.6e6, "rewards_margin_mean": -4e6}
    absurd |= {"logps_chosen_mean": -6e7, "tokens_chosen_mean": 50.0, "loss": 3.6e6}
    steps = [{**SOUND, "split": "train", "step": i + 1, "accuracy": 0.4, "grad_norm": 0.0} for i in range(2)]
    assert found([*steps, *course({}, absurd)]) == {
        "diverged": "training diverged: half of the margins are below -3.6e+06; the chosen completions cost 1.2e+06 nats a "
        "token, where guessing costs less than 13; the gradient of the last step is 0, with an accuracy of 0.400 on its pairs. "
        "The model of step 10 is unusable: try a smaller policy.optimizer.kwargs.lr (now 5e-06)."
    }


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        ({"loss": float("nan")}, "the loss is nan"),
        ({"rewards_margin_p50": 1001.0}, "half of the margins are above 1e+03"),
        ({"logps_chosen_mean": -1300.0, "tokens_chosen_mean": 50.0}, "the chosen completions cost 26 nats a token"),
    ],
)
def test_each_sign_of_divergence_is_enough(change, sign):
    texts = found(course({}, change))
    assert list(texts) == ["diverged"]
    assert sign in texts["diverged"]


def test_what_is_large_by_its_nature_did_not_diverge():
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


def test_training_is_judged_by_quarters_where_nothing_was_validated():
    steps = [
        {**SOUND, "split": "train", "step": i + 1, "num_pairs": 10, "accuracy": 0.5 if i < 12 else 0.9}
        for i in range(16)
    ]
    (verdict,) = judge(steps, Config())
    assert (verdict.split, verdict.name) == ("train", "sound")
    assert "accuracy 0.50 -> 0.90" in verdict.text
    # one good step among the last four is noise
    steps = [step | {"accuracy": 0.5} for step in steps[:-1]] + steps[-1:]
    assert "accuracy is flat: 0.600 over 40 pairs" in found(steps)["accuracy_flat"]


def test_every_validation_set_is_judged_and_the_export_is_not():
    records = [
        *course({}, {}, split="validation-a"),
        *course({}, {"accuracy": 0.5}, split="validation-b"),
        *course({}, {"accuracy": 0.5}, split="exported-b"),
        *course({}, {"accuracy": 0.5}, split="train"),
    ]
    assert [(verdict.split, verdict.name) for verdict in judge(records, Config())] == [
        ("validation-a", "sound"),
        ("validation-b", "accuracy_flat"),
    ]


def test_a_metric_that_some_steps_lack_is_judged_by_none():
    steps = course({}, {}, {}, {}, split="train")
    steps = [step | {"step": step["step"] + 1, "margin_length_correlation": 0.9} for step in steps]
    assert "length_learnt" in found(steps)
    assert "length_learnt" not in found([*steps, {**steps[-1], "step": 50, "margin_length_correlation": None}])


def test_one_validation_is_no_development():
    assert "->" not in next(iter(found(course({"accuracy": 0.9, "step": 4})).values()))


@pytest.mark.parametrize("name", ["num_pairs", "loss", "accuracy", "logps_chosen_mean", "tokens_chosen_mean"])
@pytest.mark.parametrize("split", ["train", "validation-default"])
def test_lines_that_were_damaged_since_are_not_judged(name, split):
    whole = course({"accuracy": 0.5}, {}, {"loss": 0.4}, split=split)
    (damaged,) = course({"step": 15}, split=split, without=[name])
    nothing = [{**whole[1], "step": 15, name: 0}] if name in ("num_pairs", "tokens_chosen_mean") else []
    assert found([*whole[:2], damaged, *nothing, whole[2]]) == found(whole)


def test_where_no_line_is_whole_there_is_no_verdict():
    assert found(course({}, {}, without=["accuracy"])) == {}

"""The names of NeMo RL and TRL in trackers, with values worked out by hand."""

import pytest

from tandem.config.sections.dpo import Dpo
from tandem.report.trackers.child import TrackerGroup
from tandem.report.trackers.nemo_trl_names import Epochs, OtherNames
from tandem.report.trackers.tracking import Tracking, tracker_metrics

# beta 0.5, four pairs, log-ratios of 3 and -1, rewards of half of them
RECORD = {
    "step": 6,
    "loss": 0.25,
    "preference_loss": 0.5,
    "sft_loss": 8.0,
    "accuracy": 0.875,
    "accuracy_strict": 0.75,
    "rewards_chosen_mean": 1.5,
    "rewards_rejected_mean": -0.5,
    "rewards_margin_mean": 2.0,
    "logps_chosen_mean": -20.0,
    "logps_rejected_mean": -30.0,
    "tokens_chosen_mean": 4.5,
    "tokens_rejected_mean": 6.0,
    "logratios_chosen_mean": 3.0,
    "logratios_rejected_mean": -1.0,
    "logratios_accuracy": 0.625,
    "num_pairs": 4,
}
TRAIN = {**RECORD, "split": "train", "grad_norm": 7.0, "lr": 1e-5, "num_tokens": 99, "step_seconds": 2.0}
VALIDATION = {**RECORD, "split": "validation-hard", "data": "0123"}
SECONDS = {"step": 6, "split": "timing/validation", "seconds": 3.5, "easy_seconds": 1.0, "hard_seconds": 2.0}

NEMO = {
    "loss": 0.25,
    "preference_loss": 0.5,
    "sft_loss": 8.0,
    "accuracy": 0.75,
    "rewards_chosen_mean": 3.0,
    "rewards_rejected_mean": -1.0,
    "num_valid_samples": 4,
    "global_valid_seqs": 8,
    "global_valid_toks": 42.0,
}
REWARDS = {"rewards/chosen": 1.5, "rewards/rejected": -0.5, "rewards/margins": 2.0, "rewards/accuracies": 0.625}
TRL = {"loss": 0.25, **REWARDS, "logps/chosen": -20.0, "logps/rejected": -30.0}


def names(*, nemo=False, trl=False, validation=("hard",), **dpo):
    settings = Dpo(reference_policy_kl_penalty=0.5, **dpo)
    return OtherNames(nemo=nemo, trl=trl, dpo=settings, validation=validation, epochs=Epochs(lambda epoch: 4))


def added(record, others):
    """The metrics that NeMo RL's names add or change."""
    ours, both = tracker_metrics(record)[1], tracker_metrics(record, others)[1]
    assert ours.keys() <= both.keys()
    return {name: value for name, value in both.items() if name not in ours or value != ours[name]}


# NeMo RL


def test_nemos_names_have_rewards_without_beta_and_counts_of_sequences_and_scored_tokens():
    shown = tracker_metrics(TRAIN, names(nemo=True))[1]
    assert {name: shown[f"train/{name}"] for name in NEMO} == NEMO
    assert (shown["train/grad_norm"], shown["train/lr"], shown["timing/train/policy_training"]) == (7.0, 1e-5, 2.0)


def test_our_metric_moves_only_where_nemos_name_has_another_meaning():
    theirs = {f"train/{name}": NEMO[name] for name in NEMO if NEMO[name] != RECORD.get(name)}
    moved = {
        f"tandem/train/{name}": RECORD[name] for name in ("accuracy", "rewards_chosen_mean", "rewards_rejected_mean")
    }
    assert added(TRAIN, names(nemo=True)) == theirs | moved | {"timing/train/policy_training": 2.0}


def test_our_metric_also_moves_at_beta_1_so_that_names_do_not_depend_on_values():
    others = OtherNames(
        nemo=True, trl=False, dpo=Dpo(reference_policy_kl_penalty=1.0), validation=(), epochs=Epochs(lambda epoch: 4)
    )
    shown = tracker_metrics(TRAIN, others)[1]
    assert shown["train/rewards_chosen_mean"] == shown["tandem/train/rewards_chosen_mean"] == 1.5


def test_validation_sets_have_nemos_names_under_their_own_prefix():
    shown = tracker_metrics(VALIDATION, names(nemo=True, validation=("easy", "hard")))[1]
    assert {name: shown[f"validation-hard/{name}"] for name in NEMO} == NEMO
    assert shown["tandem/validation-hard/accuracy"] == 0.875
    assert not any("timing" in name or "easy" in name for name in shown)


def test_durations_of_validations_have_nemos_names():
    assert added(SECONDS, names(nemo=True, validation=("easy", "hard"))) == {
        "timing/validation-easy/total_validation_time": 1.0,
        "timing/validation-hard/total_validation_time": 2.0,
        "timing/validation/total_validation_time": 3.0,
    }


# TRL


@pytest.mark.parametrize(
    ("tracker", "training", "evaluation", "axis"),
    [
        ("tensorboard", "train/", "eval/", {}),
        ("wandb", "train/", "eval/", {"train/global_step": 6}),
        ("mlflow", "", "eval_", {}),
    ],
)
def test_trls_names_have_the_prefixes_of_transformers_in_each_tracker(tracker, training, evaluation, axis):
    others, of_step = names(trl=True), {"grad_norm": 7.0, "learning_rate": 1e-5, "epoch": 1.5}
    shown = {f"{training}{name}": value for name, value in (TRL | of_step).items()}
    assert others.trl_metrics(TRAIN, tracker) == shown | axis
    assert others.trl_metrics(VALIDATION, tracker) == {f"{evaluation}{name}": TRL[name] for name in TRL} | axis
    assert others.trl_metrics(SECONDS, tracker) == {f"{evaluation}runtime": 2.0} | axis


def test_several_validation_sets_are_named_in_trls_names():
    others = names(trl=True, validation=("easy", "hard"))
    assert others.trl_metrics(VALIDATION, "tensorboard") == {f"eval/hard_{name}": TRL[name] for name in TRL}
    assert others.trl_metrics(VALIDATION, "mlflow") == {f"eval_hard_{name}": TRL[name] for name in TRL}
    assert others.trl_metrics(SECONDS, "tensorboard") == {"eval/easy_runtime": 1.0, "eval/hard_runtime": 2.0}


OURS = {"rewards/chosen": 0.1, "rewards/rejected": 0.05, "rewards/margins": 0.05, "rewards/accuracies": 0.75}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # TRL logs summed log-ratios, also for losses per token and f-divergences
        ({"preference_loss": "sigmoid_norm"}, TRL),
        ({"preference_loss": "ipo", "preference_average_log_probs": True}, TRL),
        ({"f_divergence": "js"}, TRL),
        # without a reference: our rewards, and the log-probabilities that they are made of
        ({"preference_loss": "simpo"}, {"loss": 0.25, **OURS, "logps/chosen": 0.2, "logps/rejected": 0.1}),
        ({"preference_loss": "cpo"}, {"loss": 0.25, **OURS, "logps/chosen": 0.2, "logps/rejected": 0.1}),
        # the weighted sums of LD-DPO are known only as rewards
        ({"ld_alpha": 0.5}, {"loss": 0.25, **OURS}),
        ({"ld_alpha": 0.5, "f_divergence": "js"}, {"loss": 0.25}),
        ({"ld_alpha": 0.5, "preference_average_log_probs": True}, {"loss": 0.25}),
    ],
)
def test_trls_rewards_are_those_of_its_trainer_for_the_loss(settings, expected):
    ours = {"rewards_chosen_mean": 0.1, "rewards_rejected_mean": 0.05, "rewards_margin_mean": 0.05}
    shown = names(trl=True, **settings).trl_metrics(VALIDATION | ours, "tensorboard")
    assert shown == {f"eval/{name}": value for name, value in expected.items()}


def test_trls_rewards_of_orpo_are_scaled_by_lambda_which_is_its_beta():
    settings = Dpo(preference_loss="orpo", orpo_lambda=2.0)  # our rewards have the default beta of 0.1
    others = OtherNames(nemo=False, trl=True, dpo=settings, validation=("hard",), epochs=Epochs(lambda epoch: 4))
    rewards = {"rewards/chosen": 30.0, "rewards/rejected": -10.0, "rewards/margins": 40.0, "rewards/accuracies": 0.75}
    expected = {"loss": 0.25, **rewards, "logps/chosen": 15.0, "logps/rejected": -5.0}
    shown = others.trl_metrics(VALIDATION, "tensorboard")
    assert shown == pytest.approx({f"eval/{name}": value for name, value in expected.items()})


def test_epochs_are_counted_by_their_own_numbers_of_steps():
    epochs = Epochs([4, 2, 4].__getitem__)
    assert [epochs.at(step) for step in (0, 1, 4, 5, 6, 8)] == [0.0, 0.25, 1.0, 1.5, 2.0, 2.5]
    assert epochs.at(2) == 0.5


# Both, neither, and records without all metrics


def test_names_are_off_by_default_and_do_not_change_our_own():
    off = names()
    for record in (TRAIN, VALIDATION, SECONDS):
        assert tracker_metrics(record, off) == tracker_metrics(record)
        assert off.trl_metrics(record, "wandb") == {}


def test_metrics_of_the_exported_model_have_our_names_only():
    record = RECORD | {"split": "exported-hard"}
    assert added(record, names(nemo=True, trl=True)) == {}
    assert names(nemo=True, trl=True).trl_metrics(record, "wandb") == {}


def test_a_name_is_left_out_if_the_record_does_not_have_its_metrics():
    """Such as a record of an earlier version, or a damaged one, of the step that a run resumes from."""
    record = {"step": 6, "split": "train", "loss": 0.25, "rewards_chosen_mean": None, "num_pairs": "4"}
    others = names(nemo=True, trl=True)
    assert added(record, others) == {}
    assert others.trl_metrics(record, "tensorboard") == {"train/loss": 0.25, "train/epoch": 1.5}
    empty = {"step": 6, "split": "timing/validation", "hard_seconds": "2"}
    assert others.trl_metrics(empty, "tensorboard") == {}


def test_with_both_every_tracker_gets_nemos_names_and_its_own_of_trl():
    class Put(list):
        def put(self, *record):
            self.append(record)

    put, others = Put(), names(nemo=True, trl=True)
    Tracking(put, others=others, trackers=("wandb", "mlflow")).log(TRAIN)  # type: ignore[arg-type]
    by_tracker = {name: others.trl_metrics(TRAIN, name) for name in ("wandb", "mlflow")}
    assert put == [(6, tracker_metrics(TRAIN, others)[1], by_tracker)]
    logged = {}

    class Kept:
        place = ""

        def __init__(self, name):
            self.name = name

        def log(self, step, metrics):
            logged[self.name] = (step, metrics)

        def close(self):
            pass

    group = TrackerGroup()
    group._open = {name: Kept(name) for name in ("wandb", "mlflow")}
    step, metrics, own = put[0]
    assert group.answer({"step": step, "metrics": metrics, "by_tracker": own}) == {"place": None, "failed": {}}
    assert logged == {name: (6, metrics | by_tracker[name]) for name in ("wandb", "mlflow")}
    assert logged["wandb"][1]["train/rewards_chosen_mean"] == 3.0  # NeMo RL's
    assert logged["wandb"][1]["train/rewards/chosen"] == logged["mlflow"][1]["rewards/chosen"] == 1.5

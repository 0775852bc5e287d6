"""Which metric ranks checkpoints, in every spelling."""

import pytest

from tandem.config.tracked import METRICS, TrackedMetric, check_direction, tracked_metric
from tandem.errors import ConfigError

SETS = ["default", "default-long", "code", "code_2"]


@pytest.mark.parametrize(
    ("name", "split", "metric"),
    [
        ("val_loss", "validation-default", "loss"),
        ("val:val_accuracy", "validation-default", "accuracy"),
        ("validation-default_loss", "validation-default", "loss"),
        ("val:validation-default_loss", "validation-default", "loss"),
        ("validation-default-long_rewards_margin_mean", "validation-default-long", "rewards_margin_mean"),
        ("val:validation-code_2_sft_loss", "validation-code_2", "sft_loss"),
        ("validation-code/accuracy", "validation-code", "accuracy"),
        ("train:loss", "train", "loss"),
        ("train:rewards_chosen_mean", "train", "rewards_chosen_mean"),
    ],
)
def test_every_spelling_names_a_split_and_a_metric(name, split, metric):
    assert tracked_metric(name, SETS) == TrackedMetric(split, metric)


def test_without_a_name_it_is_the_loss_of_the_first_validation_set():
    assert tracked_metric(None, ["first", "second"]) == TrackedMetric("validation-first", "loss")
    assert tracked_metric(None, []) is None
    assert tracked_metric("train:loss", []) == TrackedMetric("train", "loss")


@pytest.mark.parametrize(
    ("name", "sets", "message"),
    [
        (
            "val_loss",
            [],
            "checkpointing.metric_name = val_loss: there is no validation set. Give data.validation, or track train:loss.",
        ),
        (
            "validation-other_loss",
            ["a", "b"],
            "checkpointing.metric_name = validation-other_loss: names no split and metric, such as validation-a_loss, val_loss "
            "or train:loss. The validation sets are validation-a, validation-b.",
        ),
        (
            "val_lose",
            ["a"],
            f"checkpointing.metric_name = val_lose: there is no metric 'lose'. Known are {', '.join(METRICS)}.",
        ),
        (
            "train:speed",
            ["a"],
            f"checkpointing.metric_name = train:speed: there is no metric 'speed'. Known are {', '.join(METRICS)}.",
        ),
    ],
)
def test_what_cannot_be_tracked_is_refused(name, sets, message):
    with pytest.raises(ConfigError) as error:
        tracked_metric(name, sets)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("metric", "higher", "message"),
    [
        ("accuracy", False, "false, but of validation-a_accuracy the higher is better"),
        ("rewards_margin_p50", False, "false, but of validation-a_rewards_margin_p50 the higher is better"),
        ("loss", True, "true, but of validation-a_loss the lower is better"),
        ("sft_loss", True, "true, but of validation-a_sft_loss the lower is better"),
    ],
)
def test_the_worst_is_not_kept_where_it_is_known_which_way_is_better(metric, higher, message):
    with pytest.raises(ConfigError) as error:
        check_direction(TrackedMetric("validation-a", metric), higher_is_better=higher)
    assert str(error.value) == (
        f"checkpointing.higher_is_better = {message}: the worst checkpoints would be kept. Set "
        f"checkpointing.higher_is_better={str(not higher).lower()}."
    )
    check_direction(TrackedMetric("train", metric), higher_is_better=not higher)


@pytest.mark.parametrize("higher", [True, False])
def test_which_way_is_better_is_left_to_the_user_where_it_is_not_known(higher):
    for tracked in (TrackedMetric("train", "logps_chosen_mean"), None):
        assert check_direction(tracked, higher_is_better=higher) is None  # no error

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
def test_every_spelling_is_parsed_into_a_split_and_a_metric(name, split, metric):
    assert tracked_metric(name, SETS) == TrackedMetric(split, metric)


def test_the_default_is_the_loss_of_the_first_validation_set():
    assert tracked_metric(None, ["first", "second"]) == TrackedMetric("validation-first", "loss")
    assert tracked_metric(None, []) is None
    assert tracked_metric("train:loss", []) == TrackedMetric("train", "loss")


@pytest.mark.parametrize(
    ("name", "sets", "message"),
    [
        (
            "val_loss",
            [],
            "checkpointing.metric_name = val_loss: no validation set is given. Set data.validation, or use train:loss.",
        ),
        (
            "validation-other_loss",
            ["a", "b"],
            "checkpointing.metric_name = validation-other_loss: not a split and a metric. Write validation-a_loss, val_loss or "
            "train:loss, for example. The validation sets are validation-a, validation-b.",
        ),
        (
            "val_lose",
            ["a"],
            f"checkpointing.metric_name = val_lose: unknown metric 'lose'. Use one of {', '.join(METRICS)}.",
        ),
        (
            "train:speed",
            ["a"],
            f"checkpointing.metric_name = train:speed: unknown metric 'speed'. Use one of {', '.join(METRICS)}.",
        ),
    ],
)
def test_a_metric_that_does_not_exist_is_refused(name, sets, message):
    with pytest.raises(ConfigError) as error:
        tracked_metric(name, sets)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("metric", "higher", "message"),
    [
        ("accuracy", False, "false, but higher values of validation-a_accuracy are better"),
        ("rewards_margin_p50", False, "false, but higher values of validation-a_rewards_margin_p50 are better"),
        ("loss", True, "true, but lower values of validation-a_loss are better"),
        ("sft_loss", True, "true, but lower values of validation-a_sft_loss are better"),
    ],
)
def test_the_wrong_direction_of_a_known_metric_is_refused(metric, higher, message):
    with pytest.raises(ConfigError) as error:
        check_direction(TrackedMetric("validation-a", metric), higher_is_better=higher)
    assert str(error.value) == (
        f"checkpointing.higher_is_better = {message}: the worst checkpoints would be kept. Set "
        f"checkpointing.higher_is_better={str(not higher).lower()}."
    )
    check_direction(TrackedMetric("train", metric), higher_is_better=not higher)


@pytest.mark.parametrize("higher", [True, False])
def test_the_user_decides_the_direction_of_other_metrics(higher):
    for tracked in (TrackedMetric("train", "logps_chosen_mean"), None):
        assert check_direction(tracked, higher_is_better=higher) is None  # no error

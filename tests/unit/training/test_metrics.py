"""What the pairs of a step or a set say together, each number worked out by hand."""

from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from killing import SERVER

from tandem.config.sections.dpo import Dpo
from tandem.config.tracked import METRICS
from tandem.data.store.selection import Selection
from tandem.model.distributed.mesh import MeshShape
from tandem.model.distributed.process_group import make_ranks
from tandem.training.metrics import PairTable, summarise

NOWHERE = Selection({}, np.arange(0))


def table(num_pairs=4, slope=0.1, **columns):
    """Pairs without news: all zeros but completions of two tokens, rewards of beta times sums, and no scores."""
    values = {
        **dict.fromkeys(("tokens_chosen", "tokens_rejected"), np.full(num_pairs, 2.0)),
        **dict.fromkeys(("score_chosen", "score_rejected"), np.full(num_pairs, np.nan)),
        **dict.fromkeys(("slope_chosen", "slope_rejected"), np.full(num_pairs, slope)),
    }
    values |= {name: np.array(column, float) for name, column in columns.items()}
    return PairTable(
        sft=values.pop("sft", np.zeros(num_pairs)),
        preference=values.pop("preference", np.arange(num_pairs)),
        winner=np.zeros(num_pairs, int),
        loser=np.ones(num_pairs, int),
        columns=defaultdict(partial(np.zeros, num_pairs), values),
    )


def summary(dpo=None, precision="float32", store=NOWHERE, **columns):
    num_pairs = len(next(value for name, value in columns.items() if name != "sft"))
    return summarise(table(num_pairs, **columns), dpo or Dpo(), precision, store)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_ties_within_rounding_count_one_half(precision):
    # margins of 0, 0.0005, 5 and -5 nats at beta 0.1
    metrics = summary(precision=precision, reward_chosen=[0.0, 0.00005, 0.5, -0.5])
    assert metrics["accuracy"] == (0.5 + 0.5 + 1 + 0) / 4
    assert metrics["logps_accuracy"] == 0.5


def test_the_band_of_ties_is_scaled_as_the_rewards_are():
    # Per token at beta 0.1, lengths 10 and 40: slopes 0.01 and 0.0025, so that 0.1 nats of rounding are 0.000625.
    slopes = {"slope_chosen": [0.01] * 4, "slope_rejected": [0.0025] * 4}
    metrics = summary(
        precision="bfloat16",
        reward_chosen=[0.0006, 0.00065, -0.00065, 0.0],
        **slopes,
        tokens_chosen=[1.0, 2.0, 3.0, 5.0],
    )
    assert metrics["accuracy"] == (0.5 + 1 + 0 + 0.5) / 4
    assert (metrics["accuracy_chosen_longer"], metrics["accuracy_chosen_shorter"]) == ((0 + 0.5) / 2, 0.5)
    assert "margin_length_correlation" in metrics  # margins differ by 0.0013


def test_what_the_scores_agree_with_is_scaled_too():
    slopes = {"slope_chosen": [0.01] * 2, "slope_rejected": [0.0025] * 2}
    scores = {"score_chosen": [2.0, 2.0], "score_rejected": [1.0, 1.0]}
    assert (
        summary(precision="bfloat16", reward_chosen=[0.0006, 0.00065], **slopes, **scores)["scores_agreement"] == 0.75
    )


def test_every_pair_has_a_band_of_its_own():
    # the same margin is a tie of one-token completions and a preference of hundred-token ones
    slopes = {"slope_chosen": [0.1, 0.001], "slope_rejected": [0.1, 0.001]}
    lengths = {"tokens_chosen": [1.0, 101.0], "tokens_rejected": [1.0, 100.0]}
    assert summary(precision="bfloat16", reward_chosen=[0.005, 0.005], **slopes)["accuracy"] == (0.5 + 1) / 2
    # bands of 0.01 and 0.0001: half of each on either side meet up to a difference of 0.00505
    for difference, told in ((0.0050, False), (0.0051, True)):
        metrics = summary(precision="bfloat16", reward_chosen=[0.0, difference], **slopes, **lengths)
        assert ("margin_length_correlation" in metrics) is told


def test_sft_is_averaged_over_preferences_and_the_rest_over_pairs():
    metrics = summary(Dpo(sft_loss_weight=0.5), loss=[1.0, 2.0, 6.0], sft=[4.0])
    assert (metrics["preference_loss"], metrics["sft_loss"], metrics["loss"]) == (3.0, 4.0, 5.0)


def test_means_and_percentiles_of_the_margin():
    metrics = summary(
        reward_chosen=[1.0, 2.0, 3.0, 4.0, 5.0],
        reward_rejected=[1.0, 1.0, 1.0, 1.0, 1.0],
        logp_chosen=[-1.0, -2.0, -3.0, -4.0, -5.0],
        logp_rejected=[-2.0, -2.0, -2.0, -2.0, -2.0],
    )
    assert metrics["rewards_chosen_mean"] == 3.0
    assert metrics["rewards_rejected_mean"] == 1.0
    assert metrics["rewards_margin_mean"] == 2.0
    margins = [metrics[f"rewards_margin_p{p}"] for p in (10, 50, 90)]
    assert margins == pytest.approx([0.4, 2.0, 3.6])
    assert metrics["logps_chosen_mean"] == -3.0
    assert metrics["logps_rejected_mean"] == -2.0
    assert metrics["logps_accuracy"] == (1 + 0.5) / 5


def test_accuracy_by_length_and_whether_the_margin_goes_with_it():
    metrics = summary(
        reward_chosen=[1.0, 2.0, -1.0, 3.0], tokens_chosen=[4.0, 6.0, 1.0, 2.0], tokens_rejected=[2.0] * 4
    )
    assert metrics["tokens_chosen_mean"] == 3.25
    assert metrics["tokens_rejected_mean"] == 2.0
    assert metrics["accuracy_chosen_longer"] == 1.0
    assert metrics["accuracy_chosen_shorter"] == 0.0
    margin, longer = np.array([1, 2, -1, 3]) - 1.25, np.array([2, 4, -1, 0]) - 1.25
    by_hand = (margin * longer).sum() / np.sqrt((margin**2).sum() * (longer**2).sum())
    assert metrics["margin_length_correlation"] == pytest.approx(by_hand)


def test_margins_that_are_rounding_alone_correlate_with_nothing():
    lengths = {"tokens_chosen": [1.0, 2.0, 5.0], "tokens_rejected": [2.0] * 3}
    assert "margin_length_correlation" not in summary(reward_chosen=[0.0, 1e-5, 5e-5], **lengths)
    assert "margin_length_correlation" in summary(reward_chosen=[0.0, 1e-5, 5e-3], **lengths)


def test_what_has_no_meaning_is_left_out():
    metrics = summary(loss=[1.0, 2.0])
    absent = {"accuracy_chosen_longer", "accuracy_chosen_shorter", "margin_length_correlation", "scores_agreement"}
    assert not absent & set(metrics)
    assert not any(name.startswith("accuracy/") for name in metrics)
    without_reference = summary(Dpo(preference_loss="simpo"), loss=[1.0, 2.0])
    log_ratios = {"logratios_chosen_mean", "logratios_rejected_mean", "logratios_accuracy"}
    assert set(metrics) - set(without_reference) == {"kl_per_token", "chosen_below_reference"} | log_ratios


def test_a_metric_that_may_rank_checkpoints_is_always_there():
    assert set(METRICS) <= set(summary(Dpo(preference_loss="simpo"), loss=[1.0]))


def test_kl_is_per_token_and_displacement_counts_falls_beyond_rounding():
    metrics = summary(
        drift_chosen=[1.0, 0.0, 2.0],
        drift_rejected=[0.0, 0.5, 0.0],
        tokens_chosen=[2.0, 3.0, 5.0],
        tokens_rejected=[4.0, 4.0, 2.0],
        logp_chosen=[-4.0, -4.0005, -3.0],
        reference_chosen=[-3.0, -4.0, -4.0],
    )
    assert metrics["kl_per_token"] == 3.5 / 20
    assert metrics["chosen_below_reference"] == 1 / 3


def test_strict_accuracies_count_ties_as_wrong_and_differences_within_rounding_as_they_are():
    metrics = summary(
        reward_chosen=[0.0, 0.00001, -0.00001, 1.0],
        logp_chosen=[-4.0, -4.0, -4.0, -3.0],
        reference_chosen=[-3.0, -4.5, -4.0, -5.0],
        logp_rejected=[-6.0, -6.0, -6.0, -6.0],
        reference_rejected=[-5.0, -6.0, -6.0, -6.5],
    )
    assert metrics["accuracy"] == (0.5 + 0.5 + 0.5 + 1) / 4
    assert metrics["accuracy_strict"] == 2 / 4
    # log-ratios: -1, 0.5, 0 and 2 of the chosen completions, -1, 0, 0 and 0.5 of the rejected ones
    assert metrics["logratios_chosen_mean"] == 1.5 / 4
    assert metrics["logratios_rejected_mean"] == -0.5 / 4
    assert metrics["logratios_accuracy"] == 2 / 4


def test_scores_are_compared_where_both_completions_have_them():
    nan = np.nan
    metrics = summary(
        reward_chosen=[1.0, -1.0, 1.0, 0.0, 1.0],
        # agrees; both prefer the rejected one; lacks a score; a tie of the policy; a tie of the scores
        score_chosen=[4.0, 1.0, 9.0, 3.0, 2.0],
        score_rejected=[1.0, 3.0, nan, 1.0, 2.0],
    )
    assert metrics["scores_agreement"] == (1 + 1 + 0.5) / 3
    assert metrics["scores_chosen_mean"] == 2.5
    assert metrics["scores_rejected_mean"] == 1.75


def test_accuracy_by_source():
    class Set:
        def __init__(self, size):
            self.size = size

        def __len__(self):
            return self.size

    # the first two preferences come from one set, the third from another; a third set has none here
    store = Selection({"train-0": Set(3), "train-1": Set(2), "train-2": Set(1)}, np.array([0, 2, 3]))  # type: ignore[dict-item]
    metrics = summary(store=store, reward_chosen=[1.0, -1.0, 1.0])
    by_source = {name: value for name, value in metrics.items() if "/" in name}
    assert by_source == {"accuracy/train-0": 0.5, "accuracy/train-1": 1.0}


def _gather(rank, path, answers):
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ranks = make_ranks(torch.device("cpu"), MeshShape(shard=2))
    mine = table(rank + 1, loss=[float(rank)] * (rank + 1))
    answers.put((rank, [one["loss"].tolist() for one in ranks.gather(mine)]))
    dist.destroy_process_group()


def test_every_rank_gathers_the_pairs_of_all_ranks_in_order(tmp_path):
    answers = SERVER.SimpleQueue()
    given = (str(tmp_path / "store"), answers)
    processes.start_processes(_gather, given, nprocs=2, start_method=SERVER.get_start_method())
    assert dict(answers.get() for _ in range(2)) == {0: [[0.0], [1.0, 1.0]], 1: [[0.0], [1.0, 1.0]]}

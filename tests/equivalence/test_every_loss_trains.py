"""Every loss in a complete run: the first value follows its formula, all values are finite, and packing changes nothing.

The embedded model is both policy and reference, so every ratio is 0 before the first step; losses without a
reference are written out over the plain forward.
"""

import json
import math
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import MODEL, plain_token_logps
from running import metrics_of, short_run
from transformers import AutoModelForCausalLM

from tandem.completions import ChosenRejected
from tandem.config.load import load_config
from tandem.loss.losses import LOSSES
from tandem.loss.objective import pairs_from_sums
from tandem.loss.pairs import PairSums
from tandem.training.start.setup import set_up

BETA, EPS, SCALE, GAMMA, LAMBDA, ALPHA = 0.2, 0.1, 1.5, 0.4, 0.7, 0.6
STEPS = 2
LOG2 = math.log(2)
SETTINGS = {
    "reference_policy_kl_penalty": BETA,
    "label_smoothing": EPS,
    "gt_reward_scale": SCALE,
    "simpo_gamma": GAMMA,
    "orpo_lambda": LAMBDA,
    "cpo_alpha": ALPHA,
}
COMMON = [
    f"policy.model_name={MODEL}",
    "policy.precision=float32",
    "policy.optimizer.kwargs.lr=2e-4",
    "policy.max_total_sequence_length=128",
    "data.shuffle=false",
    "data.drop_last=false",
    "data.overlong=error",
    "checkpointing.enabled=false",
]
CUTS = {
    "packed": ["policy.packing.pack_length=128", "policy.packing.packs_per_micro_batch=2"],
    "plain": ["policy.packing.mode=none"],
}
WORDS = ["the", "sky", "looks", "blue", "because", "air", "scatters", "short", "waves", "of", "sunlight", "again"]
# Of chosen and rejected: the better by much, by little, and once the worse.
REWARDS = [(2.0, -1.0), (0.5, 0.25), (1.0, 0.0), (-0.5, 0.5), (3.0, 1.0), (0.0, -2.0)]


# Two sets: six scored pairs, and two prompts with four completions each


def text(rng):
    return " ".join(rng.choice(WORDS, rng.integers(2, 9)))


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sets")


@pytest.fixture(scope="module")
def pairs(folder):
    rng = np.random.default_rng(0)
    names = ("prompt", "chosen_response", "rejected_response")
    rows = [{name: text(rng) for name in names} for _ in REWARDS]
    for row, (chosen, rejected) in zip(rows, REWARDS, strict=True):
        row |= {"chosen_reward": chosen, "rejected_reward": rejected}
    return write(folder / "pairs.jsonl", rows)


@pytest.fixture(scope="module")
def fours(folder):
    rng = np.random.default_rng(1)
    rows = [
        {
            "context": text(rng),
            "completions": [
                {"rank": rank, "completion": text(rng), "score": score}
                for rank, score in enumerate((2.0, 1.5, -0.5, -1.0))
            ],
        }
        for _ in range(2)
    ]
    return write(folder / "fours.jsonl", rows)


def overrides(name, file, batch):
    own = [f"dpo.{key}={SETTINGS[key]}" for key in LOSSES[name].keys if key in SETTINGS]
    chosen = [f"dpo.preference_loss={name}", f"data.train.data_path={file}", f"policy.train_global_batch_size={batch}"]
    return [*COMMON, *chosen, *own, f"dpo.max_num_steps={STEPS}", f"dpo.max_num_epochs={STEPS}"]


# By hand


def g(scores):
    return [SCALE * (chosen - rejected) for chosen, rejected in scores]


def s(z):
    return 1 / (1 + math.exp(-z))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def simpo(chosen, rejected):
    return -F.logsigmoid(BETA * (chosen.mean() - rejected.mean()) - GAMMA)


def orpo(chosen, rejected):
    odds = [logp - torch.log(1 - torch.exp(logp)) for logp in (chosen.mean(), rejected.mean())]
    return -chosen.mean() - LAMBDA * F.logsigmoid(odds[0] - odds[1])


def cpo(chosen, rejected):
    return -F.logsigmoid(BETA * (chosen.sum() - rejected.sum())) - ALPHA * chosen.mean()


# Losses that start where their declaration says are not listed: tests/unit/loss checks those values.
# At policy = reference, of the scores of the batch.
OF_SCORES = {
    "rpo_sq": lambda scores: mean(z**2 for z in g(scores)),
    # KL(s(g) || 1/2) = log 2 less the entropy of s(g); KL(1/2 || s(g))
    "rpo_bwd_kl": lambda scores: LOG2 + mean(s(z) * math.log(s(z)) + s(-z) * math.log(s(-z)) for z in g(scores)),
    "rpo_fwd_kl": lambda scores: -LOG2 - 0.5 * mean(math.log(s(z) * s(-z)) for z in g(scores)),
}
WITHOUT_REFERENCE = {"simpo": simpo, "orpo": orpo, "cpo": cpo}


@cache
def token_logps(file, pairing):
    """The token log-probabilities of every pair of a set under the plain start model, and the scores of the pairs."""
    config = load_config(None, [*COMMON, f"data.train.data_path={file}", f"data.pairing={pairing}"]).config
    setup = set_up(config, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(setup.source.folder, dtype=torch.float32)
    found = []
    for preference in setup.plan.train.store:
        with torch.no_grad():
            logps = plain_token_logps(model, preference)
        found += [[(logps[i], preference.scores[i]) for i in pair] for pair in preference.pairs]
    return found


def first_loss(name, file, num_pairs, pairing="best_worst"):
    """The loss of the first batch, with rows in the order of the file."""
    batch = token_logps(str(file), pairing)[:num_pairs]
    if name in OF_SCORES:
        return OF_SCORES[name]([(chosen[1], rejected[1]) for chosen, rejected in batch])
    if name in WITHOUT_REFERENCE:
        return mean(WITHOUT_REFERENCE[name](chosen[0], rejected[0]).item() for chosen, rejected in batch)
    dpo = load_config(None, overrides(name, file, num_pairs)).config.dpo
    start = LOSSES[name].start_value(dpo)
    return declared_loss(name, batch, dpo) if start is None else start


def declared_loss(name, batch, dpo):
    """A loss computed by its function, which tests/unit/loss checks, from the plain forward pass."""
    sums, lengths, scores = (
        ChosenRejected(*torch.tensor([[of(*one) for one in pair] for pair in batch], dtype=torch.float64).unbind(1))
        for of in (lambda logps, _: logps.sum(), lambda logps, _: len(logps), lambda _, score: score)
    )
    reference = sums if LOSSES[name].needs_reference else sums.map(torch.zeros_like)
    pairs = pairs_from_sums(
        PairSums(policy=sums, reference=reference, num_tokens=lengths, columns={"score": scores}), dpo
    )
    return LOSSES[name].function(pairs, **LOSSES[name].arguments(dpo)).mean().item()


@pytest.mark.parametrize("name", [*OF_SCORES, *WITHOUT_REFERENCE])
def test_the_hand_written_loss_equals_the_declared_function(name, pairs):
    dpo = load_config(None, overrides(name, pairs, 4)).config.dpo
    by_function = declared_loss(name, token_logps(str(pairs), "best_worst")[:4], dpo)
    assert by_function == pytest.approx(first_loss(name, pairs, 4), rel=1e-6)


def assert_trains(packed, plain, start):
    """Check that all losses are finite, the first is as expected, and every step is the same without packing."""
    assert len(packed) == len(plain) == STEPS
    assert all(math.isfinite(value) for line in packed for value in line.values() if isinstance(value, float))
    assert packed[0]["loss"] == pytest.approx(start, rel=2e-5)
    assert packed[0]["loss"] == packed[0]["preference_loss"]
    # The steps learn: a loss cut off from the model would keep to its start.
    assert all(line["grad_norm"] > 1e-4 for line in packed)
    for ours, theirs in zip(packed, plain, strict=True):
        for name in ("loss", "grad_norm", "accuracy", "rewards_chosen_mean", "rewards_margin_mean", "sft_loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-5), f"{name} of step {ours['step']}"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_starts_at_its_formula_and_trains_the_same_without_packing(name, pairs, tmp_path):
    settings = overrides(name, pairs, batch=4)
    packed, plain = (metrics_of(short_run(tmp_path / name, *settings, *cut)) for name, cut in CUTS.items())
    assert [line["num_pairs"] for line in packed] == [4, 2]
    assert_trains(packed, plain, first_loss(name, pairs, 4))


@pytest.mark.parametrize("name", ["rpo_sq", "aot", "orpo", "sigmoid_norm"])
def test_all_pairs_of_four_completions_train_the_same_without_packing(name, fours, tmp_path):
    settings = [*overrides(name, fours, batch=12), "data.pairing=all"]
    packed, plain = (metrics_of(short_run(tmp_path / name, *settings, *cut)) for name, cut in CUTS.items())
    assert [line["num_pairs"] for line in packed] == [12, 12]
    assert_trains(packed, plain, first_loss(name, fours, 12, "all"))


def test_the_batch_takes_several_packs(pairs):
    settings = overrides("dpo", pairs, batch=4)
    setup = set_up(load_config(None, [*settings, *CUTS["packed"]]).config, torch.device("cpu"))
    packs = list(setup.plan.train.micro_batches(setup.plan.batches.epoch(0)[0].preferences))
    assert len(packs) > 1 or len(packs[0].token_ids) > 1

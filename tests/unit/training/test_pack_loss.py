"""The loss of a micro-batch against the same loss by hand, one sequence at a time."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import plain_token_logps
from running import SHORT
from transformers import AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.config.sections.dpo import Dpo
from tandem.data.store.selection import Selection
from tandem.data.text.tokens import TokenizedPreference
from tandem.model.distributed.layers import shard
from tandem.model.distributed.process_group import join_process_group
from tandem.model.load import load_policy
from tandem.packing.layout import lay_out
from tandem.training.metrics import PairLedger, PairTable, places_of_pairs, summarise
from tandem.training.start.setup import set_up
from tandem.training.terms import StepContext, pack_outcome

ALPHA, BETA = 0.25, 0.1


class Uniform:
    """A reference that finds everything equally likely, so that ratios are the policy's log-probabilities."""

    def token_logps(self, pack, inputs):
        return torch.zeros(len(inputs.target_ids), device=inputs.target_ids.device)


@pytest.fixture(scope="module")
def started():
    ranks = join_process_group()
    setup = set_up(load_config(None, SHORT).config, ranks.device)
    policy = shard(load_policy(setup.source, setup.config.policy, ranks.device), ranks, bfloat16=False)
    plain = AutoModelForCausalLM.from_pretrained(setup.source.folder, dtype=torch.float32)
    batch = setup.plan.batches.epoch(0)[0].preferences[:6]
    packs = list(setup.plan.train.micro_batches(batch))
    order = [int(index) for pack in packs for index in pack.preferences]
    tokens = [plain_token_logps(plain, setup.plan.train.store[index])[:2] for index in order]

    def pair_table(dpo: Dpo) -> PairTable:
        context, ledger = StepContext(Uniform(), dpo, ranks, "float32"), PairLedger()
        for pack in packs:
            ledger.add(pack_outcome(policy, context, pack))
        ledger.send(torch.tensor(7.0))
        table, also = ledger.read(ranks)
        assert also == [7.0]
        return table

    return pair_table, tokens, order


def test_tokens_beyond_the_shorter_completion_count_alpha(started):
    pair_table, tokens, _ = started
    by_hand = []
    for chosen, rejected in tokens:
        shared = min(len(chosen), len(rejected))
        sums = [logps[:shared].sum() + ALPHA * logps[shared:].sum() for logps in (chosen, rejected)]
        by_hand.append(-F.logsigmoid(BETA * (sums[0] - sums[1])).item())
    assert any(len(chosen) != len(rejected) for chosen, rejected in tokens)
    assert pair_table(Dpo(ld_alpha=ALPHA))["loss"] == pytest.approx(by_hand, abs=1e-4)


@pytest.mark.parametrize(
    ("dpo", "formula"),
    [
        (Dpo(preference_loss="ipo"), lambda c, r: (c.sum() - r.sum() - 5) ** 2),
        (Dpo(preference_loss="simpo"), lambda c, r: -F.logsigmoid(BETA * (c.mean() - r.mean()) - 0.5)),
        (Dpo(preference_loss="cpo"), lambda c, r: -F.logsigmoid(BETA * (c.sum() - r.sum())) - c.mean()),
        (
            Dpo(preference_loss={"sigmoid_norm": 0.5, "hinge": 2.0}),
            lambda c, r: -0.5 * F.logsigmoid(BETA * (c.mean() - r.mean())) + 2 * F.relu(1 - BETA * (c.sum() - r.sum())),
        ),
    ],
)
def test_a_chosen_loss_is_that_of_each_pair(started, dpo, formula):
    pair_table, tokens, _ = started
    by_hand = [formula(chosen, rejected).item() for chosen, rejected in tokens]
    assert pair_table(dpo)["loss"] == pytest.approx(by_hand, rel=1e-4)


def test_the_table_holds_the_numbers_of_each_pair(started):
    pair_table, tokens, order = started
    table = pair_table(Dpo(ld_alpha=ALPHA, sft_average_log_probs=True))
    chosen, rejected = ([pair[number] for pair in tokens] for number in (0, 1))
    assert table.preference.tolist() == order
    assert table.winner.tolist() == [0] * len(order)
    assert table.loser.tolist() == [1] * len(order)
    for which, logps in {"chosen": chosen, "rejected": rejected}.items():
        assert table[f"logp_{which}"] == pytest.approx([one.sum().item() for one in logps], rel=1e-4), which
        drift = [one.square().sum().item() / 2 for one in logps]
        assert table[f"drift_{which}"] == pytest.approx(drift, rel=1e-4), which
        assert table[f"reference_{which}"].tolist() == [0.0] * len(order), which
        assert table[f"tokens_{which}"].tolist() == [len(one) for one in logps], which
    assert table.sft == pytest.approx([-one.mean().item() for one in chosen], rel=1e-4)


@pytest.mark.parametrize(
    ("dpo", "per_token"),
    [
        (Dpo(), False),
        (Dpo(preference_loss="cpo"), False),
        (Dpo(preference_loss={"dpo": 1.0, "sigmoid_norm": 1.0}), False),
        (Dpo(preference_average_log_probs=True), True),
        (Dpo(preference_loss="sigmoid_norm"), True),
        (Dpo(preference_loss="sigmoid_norm", ld_alpha=1.0), True),
        (Dpo(preference_loss="simpo", wpo=True), True),
        (Dpo(preference_loss="orpo"), True),
    ],
)
def test_ties_of_rewards_per_token_are_a_length_narrower(started, dpo, per_token):
    pair_table, tokens, _ = started
    by_hand = []
    for chosen, rejected in tokens:
        sizes = (len(chosen), len(rejected)) if per_token else (1, 1)
        margin = chosen.sum().item() / sizes[0] - rejected.sum().item() / sizes[1]
        is_tie = abs(margin) <= 0.05 / sizes[0] + 0.05 / sizes[1]
        by_hand.append(0.5 if is_tie else float(margin > 0))
    found = summarise(pair_table(dpo), dpo, "bfloat16", Selection({}, np.arange(0)))
    assert found["accuracy"] == np.mean(by_hand)


def test_a_pair_names_its_completions_within_its_preference():
    rng = np.random.default_rng(0)

    def preference(lengths, pairs):
        completions = tuple(rng.integers(0, 9, size).astype(np.int32) for size in lengths)
        return TokenizedPreference(np.arange(3, dtype=np.int32), completions, pairs, "")

    two, three = preference([2, 2], ((1, 0),)), preference([1, 2, 3], ((2, 0), (2, 1), (0, 1)))
    pack = lay_out([7, 4], [two, three], length=32)
    owners, winners, losers = places_of_pairs(pack)
    assert owners.tolist() == [7, 4, 4, 4]
    assert list(zip(winners.tolist(), losers.tolist(), strict=True)) == [(1, 0), (2, 0), (2, 1), (0, 1)]

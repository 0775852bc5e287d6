"""The loss of a micro-batch against the same loss by hand, one sequence at a time."""

import pytest
import torch
import torch.nn.functional as F
from models import plain_token_logps
from running import SHORT
from transformers import AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.config.schema import Dpo
from tandem.model.load import load_policy
from tandem.model.parallel import shard, start_workers
from tandem.train.setup import set_up
from tandem.train.step import Side, pack_loss

ALPHA, BETA = 0.25, 0.1


class Uniform:
    """A reference that finds everything equally likely, so that ratios are the policy's log-probabilities."""

    def token_logps(self, pack, inputs):
        return torch.zeros(len(inputs.target_ids), device=inputs.target_ids.device)


@pytest.fixture(scope="module")
def started():
    workers = start_workers()
    setup = set_up(load_config(None, SHORT).config, workers.device)
    policy = shard(load_policy(setup.source, setup.config.policy, workers.device), workers, bfloat16=False)
    plain = AutoModelForCausalLM.from_pretrained(setup.source.folder, dtype=torch.float32)
    batch = setup.batches.epoch(0)[0].preferences[:6]
    packs = list(setup.train.micro_batches(batch))
    order = [int(index) for pack in packs for index in pack.preferences]
    tokens = [plain_token_logps(plain, setup.train.store[index])[:2] for index in order]

    def preference_loss(dpo: Dpo) -> list[float]:
        side = Side(Uniform(), dpo, workers, "float32")
        return [value for pack in packs for value in pack_loss(policy, side, pack).preference.tolist()]

    return preference_loss, tokens


def test_tokens_beyond_the_shorter_completion_count_alpha(started):
    preference_loss, tokens = started
    by_hand = []
    for chosen, rejected in tokens:
        shared = min(len(chosen), len(rejected))
        sums = [logps[:shared].sum() + ALPHA * logps[shared:].sum() for logps in (chosen, rejected)]
        by_hand.append(-F.logsigmoid(BETA * (sums[0] - sums[1])).item())
    assert any(len(chosen) != len(rejected) for chosen, rejected in tokens)
    assert preference_loss(Dpo(ld_alpha=ALPHA)) == pytest.approx(by_hand, abs=1e-4)


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
    preference_loss, tokens = started
    by_hand = [formula(chosen, rejected).item() for chosen, rejected in tokens]
    assert preference_loss(dpo) == pytest.approx(by_hand, rel=1e-4)

"""The head's log sum_v pi(v)^2 equals that of the plain logits and has no gradient; and WPO, which is computed from it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import as_policy, random_preference, tiny_model

from tandem.config.sections.dpo import Dpo
from tandem.data.store.selection import Selection
from tandem.model.distributed.process_group import join_process_group
from tandem.model.head import HeadRule, LanguageModelHead, chunked_logps
from tandem.model.reference import LiveReference
from tandem.packing.batches import GlobalBatch
from tandem.packing.layout import lay_out
from tandem.training.step import train_step
from tandem.training.terms import StepContext

CPU = torch.device("cpu")
BETA = 0.1
# A plain head; a soft-cap of 3; logits divided by 3; logits times 0.25.
HEADS = {"llama": HeadRule(), "gemma2": HeadRule(1.0, 3.0), "granite": HeadRule(1 / 3), "cohere": HeadRule(0.25)}


def preferences():
    rng = np.random.default_rng(5)
    return [random_preference(rng, num_completions=num) for num in (2, 3, 2)]


def pack_of(several, **settings):
    return lay_out(range(len(several)), several, length=256, **settings)


def plain(model, preference):
    """Yield, for each completion alone and with full logits, log pi of its tokens and log sum_v pi(v)^2 at their positions."""
    model.set_attn_implementation("eager")
    for completion in preference.completions:
        ids = torch.from_numpy(np.concatenate([preference.prompt, completion]).astype(np.int64))[None]
        logps = model(input_ids=ids, use_cache=False).logits[0, len(preference.prompt) - 1 : -1].log_softmax(-1)
        own = logps.gather(-1, ids[0, len(preference.prompt) :, None])[:, 0]
        yield own, logps.exp().square().sum(-1).log()


def gradients(model, value):
    model.zero_grad()
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# The head


@pytest.mark.parametrize("head_chunk", [1, 5, 512])
@pytest.mark.parametrize("architecture", HEADS)
def test_the_second_row_is_the_log_sum_of_squares_of_the_plain_softmax(architecture, head_chunk):
    model, several = tiny_model(architecture), preferences()
    policy = as_policy(model, head_chunk=head_chunk)
    assert policy.head == LanguageModelHead(HEADS[architecture], head_chunk)
    inputs = policy.inputs(pack_of(several), CPU)
    with torch.no_grad():
        got = policy(inputs, squares=True)[:, : inputs.num_scored]
        want = [torch.cat(row) for row in zip(*(one for p in several for one in plain(model, p)), strict=True)]
    torch.testing.assert_close(got, torch.stack(want), atol=2e-5, rtol=0)
    # Between the values of a uniform and of a certain prediction.
    assert (got[1] > -np.log(96)).all() and (got[1] < 0).all()


@pytest.mark.parametrize("architecture", HEADS)
def test_the_squares_are_the_same_unpacked(architecture):
    model, several = tiny_model(architecture), preferences()
    policy = as_policy(model, packed=False)
    inputs = policy.inputs(pack_of(several, arrangement="separate"), CPU)
    with torch.no_grad():
        got = policy(inputs, squares=True)[1, : inputs.num_scored]
        want = torch.cat([squares for p in several for _, squares in plain(model, p)])
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("architecture", HEADS)
def test_squares_change_neither_the_log_probabilities_nor_their_gradient(architecture):
    model = tiny_model(architecture)
    policy = as_policy(model)
    inputs = policy.inputs(pack_of(preferences()), CPU)
    outer = torch.randn(len(inputs.target_ids), generator=torch.Generator().manual_seed(1))
    both, logps = policy(inputs, squares=True), policy(inputs)
    assert both.shape == (2, *logps.shape)
    assert torch.equal(both[0], logps)
    with_squares, without = gradients(model, (both[0] * outer).sum()), gradients(model, (logps * outer).sum())
    assert with_squares.keys() == without.keys() != set()
    assert all(torch.equal(with_squares[name], without[name]) for name in without)


def test_the_squares_have_no_gradient():
    model = tiny_model("gemma2")
    policy = as_policy(model)
    got = gradients(model, policy(policy.inputs(pack_of(preferences()), CPU), squares=True)[1].sum())
    assert all((gradient == 0).all() for gradient in got.values())


def test_squares_of_three_tokens_by_hand():
    # Softmax of log [1, 1, 2] is [1/4, 1/4, 1/2]: squares add up to 1/16 + 1/16 + 1/4 = 3/8.
    weight = torch.tensor([1.0, 1.0, 2.0]).log()[:, None]
    logps, squares = chunked_logps(torch.ones(1, 1), weight, None, torch.tensor([2]), chunk=1, squares=True)
    assert logps.item() == pytest.approx(np.log(1 / 2))
    assert squares.item() == pytest.approx(np.log(3 / 8))


# WPO


class Recorder:
    """Used as an optimizer: stores the gradients and changes nothing."""

    def __init__(self, model):
        self.model, self.param_groups, self.gradients = model, [{"lr": 0.0}], {}

    def step(self):
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def zero_grad(self):
        self.model.zero_grad()


def weight(own, squares):
    return (own - squares).mean().exp().detach()


def dpo_loss(own, theirs, winner, loser):
    margin = (own[winner].sum() - theirs[winner].sum()) - (own[loser].sum() - theirs[loser].sum())
    return -F.logsigmoid(BETA * margin)


def orpo_loss(own, theirs, winner, loser):
    chosen, rejected = (own[number].mean() for number in (winner, loser))
    odds = [logp - torch.log(1 - logp.exp()) for logp in (chosen, rejected)]
    return -chosen - F.logsigmoid(odds[0] - odds[1])


WEIGHTED = {
    "dpo": (Dpo(wpo=True), dpo_loss),
    "dpo and orpo": (
        Dpo(wpo=True, preference_loss={"dpo": 1.0, "orpo": 0.5}),
        lambda *pair: dpo_loss(*pair) + 0.5 * orpo_loss(*pair),
    ),
}


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("num_packs", [1, 3])
def test_a_wpo_step_multiplies_losses_by_weights_without_gradient(architecture, name, num_packs):
    dpo, formula = WEIGHTED[name]
    several = preferences()
    by_hand, frozen = tiny_model(architecture), tiny_model(architecture, seed=1)
    losses, weights, best = [], [], []
    for preference in several:
        rows = list(plain(by_hand, preference))
        own = [logps for logps, _ in rows]
        with torch.no_grad():
            theirs = [logps for logps, _ in plain(frozen, preference)]
        best.append(own[preference.pairs[0][0]].sum())
        for winner, loser in preference.pairs:
            weights.append(weight(*rows[winner]) * weight(*rows[loser]))
            losses.append(formula(own, theirs, winner, loser))
    assert max(weights) > 1.5 * min(weights)
    weighted = (torch.stack(weights) * torch.stack(losses)).mean()
    # Both terms have a similar size, so that neither hides the other.
    sft = -torch.stack(best).mean()
    share = round(0.5 * (weighted / sft).item(), 6)
    want = gradients(by_hand, weighted + share * sft)

    model = tiny_model(architecture)
    context = StepContext(
        LiveReference(as_policy(tiny_model(architecture, seed=1))),
        dpo.model_copy(update={"sft_loss_weight": share}),
        join_process_group(),
        "float32",
    )
    packs = [pack_of(several)] if num_packs == 1 else [lay_out([i], [p], length=128) for i, p in enumerate(several)]
    recorder = Recorder(model)
    step = train_step(
        as_policy(model), context, packs, GlobalBatch(0, np.arange(3), len(losses)), recorder, max_grad_norm=None
    )
    store = Selection({}, np.arange(3))
    vars(store)["num_pairs"] = np.array([len(preference.pairs) for preference in several])
    metrics = step.read(store).metrics
    assert metrics["preference_loss"] == pytest.approx(weighted.item(), rel=2e-5)
    assert metrics["loss"] == pytest.approx((weighted + share * sft).item(), rel=2e-5)
    for parameter, gradient in want.items():
        off = (recorder.gradients[parameter] - gradient).abs().max()
        assert off <= 3e-5 * gradient.abs().max() + 1e-9, parameter

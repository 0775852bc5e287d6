"""Losses over a batch: steps and validations do not depend on how the batch is split into packs.

By hand every sequence goes alone through the model's own forward and a full log-softmax, and the loss is written out.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import as_policy, plain_token_logps, random_preference, tiny_model

from tandem.config.sections.dpo import Dpo
from tandem.errors import NonFiniteError
from tandem.model.distributed.process_group import join_process_group
from tandem.model.reference import LiveReference, NoReference
from tandem.packing.batches import GlobalBatch
from tandem.packing.packer import Packer, RankShare
from tandem.training.step import train_step
from tandem.training.terms import StepContext
from tandem.training.validation import ValidationSet, validate

BETA, EPS, ALPHA = 0.1, 0.1, 0.25
NUMS_OF_COMPLETIONS = (2, 2, 3, 2, 4, 2, 2, 3)  # 5 x 1 + 2 x 3 + 6 = 17 pairs
NUM_PAIRS = 17


class Store(list):
    """Preferences in memory."""

    fingerprint = "made"

    @property
    def num_pairs(self):
        return np.array([len(preference.pairs) for preference in self])

    def place(self, index):
        return f"memory:{index}"


def preferences():
    rng = np.random.default_rng(11)
    return Store(random_preference(rng, num_completions=num) for num in NUMS_OF_COMPLETIONS)


def packer_of(store, *, length, together, arrangement="shared"):
    prompts = [len(p.prompt) * (len(p.completions) if arrangement == "repeated" else 1) for p in store]
    sizes = [
        prompt + sum(len(completion) for completion in p.completions) for prompt, p in zip(prompts, store, strict=True)
    ]
    return Packer(store, np.array(sizes), (length,), arrangement, together, "first_fit_decreasing")


class Recorder:
    """Replaces the optimizer: records the gradients, and does not update weights."""

    def __init__(self, model):
        self.model, self.param_groups, self.gradients = model, [{"lr": 0.0}], {}

    def step(self):
        self.gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def zero_grad(self):
        self.model.zero_grad()


# By hand


@dataclass
class Whole:
    """All pairs of the batch, computed from full logits: log-probabilities of policy and reference, tokens and lengths."""

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    num_chosen: torch.Tensor
    num_rejected: torch.Tensor
    best: torch.Tensor  # [preferences]

    @property
    def margin(self):
        return (self.chosen - self.ref_chosen) - (self.rejected - self.ref_rejected)


def summed(tokens, other, ld_alpha):
    shared = min(len(tokens), len(other))
    return tokens[:shared].sum() + ld_alpha * tokens[shared:].sum()


def whole_batch(model, frozen, store, ld_alpha=1.0):
    rows, best = [], []
    for preference in store:
        own = plain_token_logps(model, preference)
        with torch.no_grad():
            theirs = plain_token_logps(frozen, preference)
        best.append(own[preference.pairs[0][0]].sum())
        for winner, loser in preference.pairs:
            sides = (winner, loser), (loser, winner)
            sums = [summed(logps[one], logps[other], ld_alpha) for logps in (own, theirs) for one, other in sides]
            rows.append([*sums, *(torch.tensor(float(len(own[number]))) for number in (winner, loser))])
    return Whole(*(torch.stack(column) for column in zip(*rows, strict=True)), torch.stack(best))


def smoothed(logits, eps):
    return -(1 - eps) * F.logsigmoid(logits) - eps * F.logsigmoid(-logits)


def aot(b, eps=0.0):
    own, theirs = (b.chosen - b.rejected).sort().values, (b.ref_chosen - b.ref_rejected).sort().values
    return smoothed(BETA * (own - theirs), eps).mean()


def aot_unpaired(b, eps=0.0, of=lambda ratio: ratio):
    delta = of(b.chosen - b.ref_chosen).sort().values - of(b.rejected - b.ref_rejected).sort().values
    return smoothed(BETA * delta, eps).mean()


def averaged(b):
    sides = b.chosen / b.num_chosen, b.rejected / b.num_rejected
    lengths = b.num_chosen, b.num_rejected
    return Whole(*sides, b.ref_chosen / b.num_chosen, b.ref_rejected / b.num_rejected, *lengths, b.best)


LOSSES = {
    "aot": (Dpo(preference_loss="aot"), aot),
    "aot_unpaired": (Dpo(preference_loss="aot_unpaired"), aot_unpaired),
    "aot, smoothed": (Dpo(preference_loss="aot", label_smoothing=EPS), lambda b: aot(b, EPS)),
    "aot_unpaired, smoothed": (
        Dpo(preference_loss="aot_unpaired", label_smoothing=EPS),
        lambda b: aot_unpaired(b, EPS),
    ),
    "aot, averaged": (
        Dpo(preference_loss="aot", preference_average_log_probs=True, sft_average_log_probs=False),
        lambda b: aot(averaged(b)),
    ),
    "aot_unpaired, forward KL": (
        Dpo(preference_loss="aot_unpaired", f_divergence="forward_kl"),
        lambda b: aot_unpaired(b, of=lambda ratio: 1 - torch.exp(-ratio)),
    ),
    "aot, LD-DPO": (Dpo(preference_loss="aot", ld_alpha=ALPHA), aot),
    "dpo and half of aot": (
        Dpo(preference_loss={"dpo": 1.0, "aot": 0.5}),
        lambda b: -F.logsigmoid(BETA * b.margin).mean() + 0.5 * aot(b),
    ),
    "aot and SFT": (
        Dpo(preference_loss="aot", preference_loss_weight=0.7, sft_loss_weight=0.3),
        lambda b: 0.7 * aot(b) - 0.3 * b.best.mean(),
    ),
}


def by_hand(name):
    """Loss and gradients of the complete batch, computed at once."""
    dpo, formula = LOSSES[name]
    model, frozen = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    loss = formula(whole_batch(model, frozen, preferences(), 1.0 if dpo.ld_alpha is None else dpo.ld_alpha))
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def hands():
    return {name: by_hand(name) for name in LOSSES}


def context_of(dpo):
    return StepContext(LiveReference(as_policy(tiny_model("llama", seed=1))), dpo, join_process_group(), "float32")


# length of a row, rows at once, how many micro-batches the batch then makes
CUTS = [(1024, 1, 1), (128, 1, 2), (64, 1, 3), (64, 2, 2)]


def stepped(dpo, *, length, together, arrangement="shared", store=None):
    """Run one step over the batch. Returns the report, the gradients and the number of micro-batches."""
    store, model = store or preferences(), tiny_model("llama", seed=0)
    order = np.random.default_rng(0).permutation(len(store))
    packs = list(packer_of(store, length=length, together=together, arrangement=arrangement).micro_batches(order))
    recorder = Recorder(model)
    batch = GlobalBatch(0, order, NUM_PAIRS)
    # As the loop hands them over: packs come once, one after another.
    step = train_step(as_policy(model), context_of(dpo), iter(packs), batch, recorder, max_grad_norm=None)
    return step.read(store), recorder.gradients, len(packs)


def assert_same_gradients(got, want):
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert (got[name] - gradient).abs().max() <= 3e-5 * gradient.abs().max() + 1e-9, name


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("length", "together", "num_packs"), CUTS)
def test_a_step_over_several_packs_equals_a_step_over_the_complete_batch(name, length, together, num_packs, hands):
    loss, gradients = hands[name]
    report, got, found = stepped(LOSSES[name][0], length=length, together=together)
    assert found == num_packs
    assert report.metrics["loss"] == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(got, gradients)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert report.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("arrangement", ["repeated", "separate"])
def test_sharing_prompts_does_not_change_a_step(name, arrangement, hands):
    report, gradients, _ = stepped(LOSSES[name][0], length=128, together=2, arrangement=arrangement)
    assert report.metrics["loss"] == pytest.approx(hands[name][0], rel=1e-5)
    assert_same_gradients(gradients, hands[name][1])


@pytest.mark.parametrize("formula", [aot, aot_unpaired])
def test_sorting_within_each_preference_would_change_the_loss(formula):
    """Without this, the tests above could not distinguish a batch from its packs."""
    model, frozen = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    with torch.no_grad():
        alone = [formula(whole_batch(model, frozen, [one])) * len(one.pairs) for one in preferences()]
        whole = formula(whole_batch(model, frozen, preferences()))
        unsorted = -F.logsigmoid(BETA * whole_batch(model, frozen, preferences()).margin).mean()
    assert abs(sum(alone) / NUM_PAIRS - whole) > 1e-3
    assert abs(unsorted - whole) > 1e-3


# Weights and margins of rows


def with_columns(weights=None, margins=None):
    """The preferences with these weights and margins; None: without that column."""
    given = {"weight": weights, "margin": margins}
    columns = [{n: (float(v[i]),) for n, v in given.items() if v is not None} for i in range(len(NUMS_OF_COMPLETIONS))]
    return Store(replace(one, columns=some) for one, some in zip(preferences(), columns, strict=True))


WEIGHTS, MARGINS = (1.0, 0.25, 2.0, 0.0, 0.5, 3.0, 1.0, 1.5), (0.0, 0.5, -1.0, 2.0, 0.25, 1.0, 0.0, 3.0)


@pytest.fixture(scope="module")
def weighted_by_hand():
    """Loss and gradients of sum over pairs of -w log s(beta d - m), divided by the number of pairs."""
    model, frozen = tiny_model("llama", seed=0), tiny_model("llama", seed=1)
    weights, margins = (
        torch.tensor([value for value, one in zip(values, preferences(), strict=True) for _ in one.pairs])
        for values in (WEIGHTS, MARGINS)
    )
    batch = whole_batch(model, frozen, preferences())
    loss = -(weights * F.logsigmoid(BETA * batch.margin - margins)).sum() / NUM_PAIRS
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("arrangement", ["shared", "repeated", "separate"])
@pytest.mark.parametrize(("length", "together"), [(1024, 1), (128, 2)])
def test_packed_weights_and_margins_equal_each_pair_alone(weighted_by_hand, length, together, arrangement):
    store = with_columns(WEIGHTS, MARGINS)
    report, gradients, _ = stepped(Dpo(), length=length, together=together, arrangement=arrangement, store=store)
    assert report.metrics["loss"] == pytest.approx(weighted_by_hand[0], rel=1e-5)
    assert_same_gradients(gradients, weighted_by_hand[1])


def test_ranks_add_up_to_the_weighted_batch(weighted_by_hand):
    store, order = with_columns(WEIGHTS, MARGINS), np.arange(len(NUMS_OF_COMPLETIONS))
    total = {}
    for rank in range(2):
        model = tiny_model("llama", seed=0)
        packer = replace(packer_of(store, length=64, together=1), share=RankShare(rank, 2))
        packs, recorder = packer.micro_batches(order), Recorder(model)
        batch = GlobalBatch(0, order, NUM_PAIRS)
        train_step(as_policy(model), context_of(Dpo()), packs, batch, recorder, max_grad_norm=None)
        total = {name: total.get(name, 0) + gradient for name, gradient in recorder.gradients.items()}
    assert_same_gradients(total, weighted_by_hand[1])


def test_validation_weights_pairs_like_training(weighted_by_hand):
    packer = packer_of(with_columns(WEIGHTS, MARGINS), length=128, together=1)
    report = validate(
        as_policy(tiny_model("llama", seed=0)), ValidationSet("default", packer, context_of(Dpo()), 6, None)
    )
    assert report.metrics["loss"] == pytest.approx(weighted_by_hand[0], rel=1e-5)


def test_a_weight_of_zero_contributes_no_gradient():
    _, gradients, _ = stepped(Dpo(), length=128, together=1, store=with_columns([0.0] * 8))
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.parametrize("columns", [{"weights": [1.0] * 8}, {"margins": [0.0] * 8}])
def test_a_column_of_defaults_equals_no_column_bit_for_bit(columns):
    plain, want, _ = stepped(Dpo(), length=128, together=1)
    report, got, _ = stepped(Dpo(), length=128, together=1, store=with_columns(**columns))
    assert report.metrics == plain.metrics
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())


# Validation


def validated(dpo, *, batch_size, length=128, together=1, max_batches=None):
    packer = packer_of(preferences(), length=length, together=together)
    validation = ValidationSet("default", packer, context_of(dpo), batch_size, max_batches)
    return validate(as_policy(tiny_model("llama", seed=0)), validation)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("cut", [{"batch_size": 6}, {"batch_size": 1, "together": 2}, {"batch_size": 9, "length": 64}])
def test_validation_does_not_depend_on_val_global_batch_size(name, cut, hands):
    dpo = LOSSES[name][0]
    whole, report = validated(dpo, batch_size=1000, length=1024), validated(dpo, **cut)
    assert whole.metrics["loss"] == pytest.approx(hands[name][0], rel=1e-5)
    assert report.num_pairs == whole.num_pairs == NUM_PAIRS
    assert report.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-6)


def test_validation_of_some_batches_uses_only_their_pairs():
    # Pairs 1, 1, 3, 1, 6, ... in batches of at most 6: the first four preferences are one.
    report = validated(Dpo(preference_loss="aot"), batch_size=6, max_batches=1)
    with torch.no_grad():
        want = aot(whole_batch(tiny_model("llama", seed=0), tiny_model("llama", seed=1), preferences()[:4]))
    assert report.num_pairs == 6
    assert report.metrics["loss"] == pytest.approx(want.item(), rel=1e-5)


# What is printed of a loss that is not finite


def spoiled():
    store, model = preferences(), tiny_model("llama", seed=0)
    context = StepContext(NoReference(), Dpo(preference_loss="aot"), join_process_group(), "float32")
    batch = GlobalBatch(0, np.arange(len(store)), NUM_PAIRS)
    packs = packer_of(store, length=128, together=1).micro_batches(batch.preferences)
    policy = as_policy(model)
    policy.register_forward_hook(lambda module, given, logps: logps * torch.nan)
    step = train_step(policy, context, packs, batch, Recorder(model), max_grad_norm=None)
    with pytest.raises(NonFiniteError) as stopped:
        step.read(store)
    return str(stopped.value)


def test_a_non_finite_sorted_loss_stops_the_run_without_naming_a_pair():
    printed = spoiled()
    assert printed.startswith("loss nan, gradient norm nan: not finite. The update was skipped and nothing was saved. ")
    assert "memory:" not in printed


def test_a_non_finite_sorted_loss_is_not_reported_as_finite():
    assert "Every loss was finite" not in spoiled()

"""One optimizer step: clipping, and what happens when a number is not finite."""

import numpy as np
import pytest
import torch
from models import plain_token_logps
from running import SHORT, metrics_of, short_run
from transformers import AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.config.sections.dpo import Dpo
from tandem.config.sections.policy import Optimizer, OptimizerKwargs
from tandem.errors import DefectError, NonFiniteError
from tandem.model.distributed.layers import shard
from tandem.model.distributed.process_group import join_process_group
from tandem.model.load import load_policy
from tandem.model.reference import LiveReference
from tandem.training import step as step_module
from tandem.training.optimizer import make_optimizer
from tandem.training.start.setup import set_up
from tandem.training.step import train_step
from tandem.training.terms import StepContext

pytestmark = pytest.mark.bfloat16


def start(*overrides):
    ranks = join_process_group()
    setup = set_up(load_config(None, [*SHORT, *overrides]).config, ranks.device)

    def load():
        return shard(load_policy(setup.source, setup.config.policy, ranks.device), ranks, bfloat16=False)

    context = StepContext(LiveReference(load()), setup.config.dpo, ranks, "float32")
    return setup, context, load()


@pytest.fixture
def started():
    return start()


def packs_of(setup, batch):
    return setup.plan.train.micro_batches(batch.preferences)


def whole(policy):
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def in_bfloat16(setup, context, weights=torch.float32):
    """The policy computing in bfloat16 over weights of this dtype."""
    policy = load_policy(setup.source, setup.config.policy, context.ranks.device, dtype=weights)
    return shard(policy, context.ranks, bfloat16=True)


def test_a_non_finite_loss_names_its_pairs_and_changes_no_weight(started):
    setup, context, policy = started
    batch = setup.plan.batches.epoch(0)[0]
    culprit = int(batch.preferences[3])

    packs = list(packs_of(setup, batch))

    def poisoned(module, given, logps):
        """The policy's own numbers of one preference: a reference that is not finite has a message of its own."""
        (inputs,) = given
        pack = next(pack for pack in packs if np.array_equal(pack.token_ids, inputs.token_ids.numpy()))
        owners = torch.from_numpy(pack.preferences[pack.owner] == culprit)
        factor = torch.ones_like(logps)
        factor[: inputs.num_scored][owners[inputs.completion[: inputs.num_scored]]] = float("nan")
        return logps * factor

    hook = policy.register_forward_hook(poisoned)
    optimizer = make_optimizer(policy.parameters(), setup.config.policy, seed=0)
    before = whole(policy)
    step = train_step(
        policy,
        context,
        packs,
        batch,
        optimizer,
        max_grad_norm=1.0,
    )
    hook.remove()
    store = setup.plan.train.store
    with pytest.raises(NonFiniteError) as stopped:
        step.read(store)
    assert str(stopped.value) == (
        "loss nan, gradient norm nan: not finite. The update was skipped and nothing was saved. "
        f"Pairs at: {store.place(culprit)}. Check these rows, or lower the learning rate."
    )
    after = whole(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(state["step"].item() == 0 for state in optimizer.state.values())


def test_clipping_scales_the_gradient_to_its_norm(started):
    setup, context, policy = started
    batch = setup.plan.batches.epoch(0)[0]
    # SGD-like: with eps far above any gradient, AdamW's first step is proportional to the clipped gradient.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1.0, eps=1e6, weight_decay=0.0, fused=True)
    before = whole(policy)
    step = train_step(policy, context, packs_of(setup, batch), batch, optimizer, max_grad_norm=0.5)
    norm = step.read(setup.plan.train.store).metrics["grad_norm"]
    assert norm > 0.5
    moved = sum(((after - before[name]) ** 2).sum() for name, after in whole(policy).items()).sqrt().item()
    assert moved * 1e6 == pytest.approx(0.5, rel=0.05)


def test_weights_are_float32_after_a_forward_without_backward(started):
    """Otherwise an optimizer, a checkpoint or an export made then would hold other tensors than those trained."""
    setup, context, _ = started
    policy = in_bfloat16(setup, context)
    before = list(policy.parameters())
    for pack in setup.plan.train.micro_batches(setup.plan.batches.epoch(0)[0].preferences):
        with torch.no_grad():
            policy(policy.inputs(pack, context.ranks.device))
    assert all(
        now is then and now.dtype == torch.float32 for now, then in zip(policy.parameters(), before, strict=True)
    )


def test_weights_are_float32_after_a_step(started):
    setup, context, _ = started
    policy, batch = in_bfloat16(setup, context), setup.plan.batches.epoch(0)[0]
    before = list(policy.parameters())
    optimizer = make_optimizer(policy.parameters(), setup.config.policy, seed=0)
    train_step(policy, context, packs_of(setup, batch), batch, optimizer, max_grad_norm=1.0)
    assert all(
        now is then and now.dtype == torch.float32 for now, then in zip(policy.parameters(), before, strict=True)
    )


@pytest.mark.slow
def test_bfloat16_weights_learn_by_stochastic_rounding_and_hardly_by_the_nearest():
    """At DPO's rates an update is below half a unit in the last place of a bfloat16 weight: rounding undoes it."""
    setup, context, _ = start("policy.model_name=embedded")  # of so many weights that chances even out
    margins = {}
    for weights in ("float32", "bfloat16_stochastic", "bfloat16_nearest"):
        kwargs = OptimizerKwargs(lr=3e-6, weight_decay=0.0, betas=[0.9, 0.999], eps=1e-8)
        how = setup.config.policy.model_copy(update={"weights": weights, "optimizer": Optimizer(kwargs=kwargs)})
        policy = in_bfloat16(setup, context, torch.float32 if weights == "float32" else torch.bfloat16)
        optimizer = make_optimizer(policy.parameters(), how, seed=0)
        for batch in setup.plan.batches.epoch(0)[:8]:
            step = train_step(policy, context, packs_of(setup, batch), batch, optimizer, max_grad_norm=1.0)
        margins[weights] = step.read(setup.plan.train.store).metrics["rewards_margin_mean"]
    assert margins["float32"] > 0.005
    assert margins["bfloat16_stochastic"] == pytest.approx(margins["float32"], rel=0.3)
    assert margins["bfloat16_nearest"] < 0.35 * margins["float32"]


def test_bfloat16_computes_in_bfloat16_over_float32_weights_and_gradients(started):
    setup, context, _ = started
    policy = in_bfloat16(setup, context)
    seen = []
    policy.model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    pack = next(setup.plan.train.micro_batches(setup.plan.batches.epoch(0)[0].preferences))
    with policy.computing():
        logps = policy(policy.inputs(pack, context.ranks.device))
        logps.sum().backward()
    assert seen == [torch.bfloat16]
    assert logps.dtype == torch.float32
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in policy.parameters()} == {torch.float32}


def test_the_sft_gradient_is_that_of_the_mean_over_preferences(started):
    setup, context, policy = started
    batch = setup.plan.batches.epoch(0)[0]
    plain = AutoModelForCausalLM.from_pretrained(setup.source.folder, dtype=torch.float32)
    chosen = [plain_token_logps(plain, setup.plan.train.store[int(i)])[0].sum() for i in batch.preferences]
    (-torch.stack(chosen).mean()).backward()
    want = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    sft_alone = StepContext(
        context.reference, Dpo(preference_loss_weight=0.0, sft_loss_weight=1.0), context.ranks, "float32"
    )
    optimizer = make_optimizer(policy.parameters(), setup.config.policy, seed=0)
    step = train_step(policy, sft_alone, packs_of(setup, batch), batch, optimizer, max_grad_norm=None)
    assert step.read(setup.plan.train.store).metrics["grad_norm"] == pytest.approx(want, rel=1e-4)


def test_the_learning_rate_follows_schedulers_and_milestones(tmp_path):
    schedule = (
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.5, total_iters: 2}},"
        "{name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 0.1, total_iters: 100}}, {milestones: [2]}]"
    )
    run = short_run(tmp_path / "run", schedule)
    assert [line["lr"] for line in metrics_of(run)] == pytest.approx([5e-4, 7.5e-4, 1e-4, 1e-4])


def test_the_gradient_norm_of_many_numbers_is_exact_on_a_cpu():
    many = torch.nn.Linear(3000, 3000, bias=False)
    many.weight.grad = torch.randn(3000, 3000, generator=torch.Generator().manual_seed(0))
    exact = many.weight.grad.double().norm().item()
    assert step_module.grad_norm(many).item() == pytest.approx(exact, rel=1e-6)  # type: ignore[arg-type]


def test_a_step_over_other_pairs_than_its_batchs_is_found_out(started):
    setup, context, policy = started
    batch, other = setup.plan.batches.epoch(0)[:2]
    optimizer = make_optimizer(policy.parameters(), setup.config.policy, seed=0)
    step = train_step(policy, context, packs_of(setup, other), batch, optimizer, max_grad_norm=1.0)
    with pytest.raises(
        DefectError, match="of the 4 pairs of this batch, 4 were not computed, and 4 were computed too often"
    ):
        step.read(setup.plan.train.store)

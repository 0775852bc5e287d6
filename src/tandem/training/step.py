"""Runs one optimizer step on a global batch and returns its StepReport. Only this module reduces losses over pairs."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.config.losses import scope_of
from tandem.config.sections.dpo import Dpo
from tandem.data.store.selection import Preferences
from tandem.errors import NonFiniteError
from tandem.failpoints import fail_point
from tandem.loss.objective import combined_losses, pair_loss
from tandem.model.policy import Policy
from tandem.model.router_balance import RouterBalance
from tandem.packing.batches import GlobalBatch
from tandem.packing.layout import Pack
from tandem.training.metrics import PairLedger, PairTable, check_pairs, summarise
from tandem.training.terms import PackOutcome, StepContext, joined_pairs, pack_completions, pack_outcome


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of one optimizer step, over all ranks."""

    metrics: dict[str, float]
    num_pairs: int
    num_tokens: int
    pack_fill: float
    lr: float
    seconds: float


class StepClock:
    """Measures the duration of a step: with CUDA events on a GPU, with the wall clock on a CPU. `mark` never waits."""

    def __init__(self, device: torch.device):
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._times = [0.0, 0.0]

    def mark(self, which: Literal["start", "end"]) -> None:
        index = ("start", "end").index(which)
        if self._events:
            self._events[index].record()
        else:
            self._times[index] = time.perf_counter()

    def is_over(self) -> bool:
        """Return whether the step has ended, without waiting for it."""
        return self._events is None or self._events[1].query()

    def seconds(self) -> float:
        if self._events:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) / 1000
        return self._times[1] - self._times[0]


class PendingStep:
    """A step that was launched and may still be running. `read` waits for this step only, not for steps launched later."""

    def __init__(self, batch: GlobalBatch, context: StepContext, lr: float):
        self.batch, self.context, self.lr = batch, context, lr
        self.ledger = PairLedger()
        self.balances_routers = False
        self.num_tokens = self.num_positions = 0
        self.clock = StepClock(context.ranks.device)

    def add(self, outcome: PackOutcome) -> None:
        self.ledger.add(outcome)
        self.num_tokens += outcome.pack.num_tokens
        self.num_positions += outcome.pack.token_ids.size

    def is_done(self) -> bool:
        return self.clock.is_over()

    def read(self, store: Preferences) -> StepReport:
        """Wait for the step and return its report.

        Raises NonFiniteError if the loss or the gradient is not finite; the update was then skipped. Raises DefectError if the
        ranks did not compute exactly the pairs of the batch.
        """
        table, (norm, balance) = self.ledger.read(self.context.ranks)
        check_pairs(table, self.batch.preferences, store)
        if not (np.isfinite(table["loss"]).all() and np.isfinite(table.sft).all() and math.isfinite(norm)):
            raise NonFiniteError(self._non_finite_message(table, norm, store))
        metrics = summarise(table, self.context.dpo, self.context.precision, store)
        if self.balances_routers:
            metrics["loss"] += self.context.dpo.router_aux_loss_coef * balance
            metrics["router_aux_loss"] = balance
        parts = self.context.ranks.gather_parts((self.num_tokens, self.num_positions, self.clock.seconds()))
        num_tokens, num_positions, seconds = zip(*parts, strict=True)
        return StepReport(
            metrics={**metrics, "grad_norm": norm},
            num_pairs=self.batch.num_pairs,
            num_tokens=sum(num_tokens),
            pack_fill=sum(num_tokens) / sum(num_positions),
            lr=self.lr,
            seconds=max(seconds),
        )

    def _non_finite_message(self, table: PairTable, norm: float, store: Preferences) -> str:
        dpo = self.context.dpo
        loss = dpo.preference_loss_weight * table["loss"].mean() + dpo.sft_loss_weight * table.sft.mean()
        # A cached reference was checked when it was computed; a live one is checked here.
        if wrong := table.preference[~np.isfinite(table["reference_chosen"] + table["reference_rejected"])].tolist():
            return (
                f"the reference's log-probabilities of the pairs at {_places(wrong, store)} are not finite. The update was "
                "skipped and nothing was saved. Check these rows; if other rows fail too, the reference model overflows: try "
                "policy.precision=float32."
            )
        # A loss that sorts the batch has no loss per pair.
        culprits = table.preference[~np.isfinite(table["loss"])].tolist() if _has_pair_scope(dpo) else []
        if culprits:
            where = f"Pairs at: {_places(culprits, store)}. Check these rows, or lower"
        elif math.isfinite(loss):
            where = "Every loss was finite. Lower"
        else:
            where = "Lower"
        return (
            f"loss {loss:g}, gradient norm {norm:g}: not finite. The update was skipped and "
            f"nothing was saved. {where} the learning rate."
        )


def _places(preferences: list[int], store: Preferences) -> str:
    """Return the file and line of up to ten of the preferences, without repetition, such as "a.jsonl:3, a.jsonl:7"."""
    return ", ".join(list(dict.fromkeys(store.place(index) for index in preferences))[:10])


def train_step(
    policy: Policy,
    context: StepContext,
    packs: Iterable[Pack],
    batch: GlobalBatch,
    optimizer: Any,
    max_grad_norm: float | None,
) -> PendingStep:
    """Run forward and backward on each pack, then one optimizer update. Nothing here waits for the device."""
    step = PendingStep(batch, context, lr=optimizer.param_groups[0]["lr"])
    step.clock.mark("start")
    with policy.computing():
        if policy.balance is None:
            balance = torch.zeros((), device=context.ranks.device)
            for outcome in pack_outcomes(policy, context, packs, batch):
                step.add(outcome)
        else:
            step.balances_routers, packs = True, list(packs)
            count_experts(policy, policy.balance, packs, context.ranks.device)
            with policy.balance.training() as balance:
                for outcome in pack_outcomes(policy, context, packs, batch):
                    step.add(outcome)
    norm = grad_norm(policy)
    step.ledger.send(norm, balance)
    fail_point("step.update")
    _update(optimizer, step, norm, max_grad_norm)
    fail_point("step.done")
    step.clock.mark("end")
    return step


def count_experts(policy: Policy, balance: RouterBalance, packs: Iterable[Pack], device: torch.device) -> None:
    """Run all packs of a batch without gradients, to count how often routers choose each expert."""
    with balance.counting():
        for pack in packs:
            policy(policy.inputs(pack, device))


def pack_outcomes(
    policy: Policy, context: StepContext, packs: Iterable[Pack], batch: GlobalBatch | None = None
) -> Iterator[PackOutcome]:
    """Yield the losses of every pack, in order. A loss that depends on the whole batch is computed over all packs together.

    `batch`: if given, the backward pass of each pack runs too, and `packs` must be the packs of this batch.
    """
    if not _has_pair_scope(context.dpo):
        yield from _batch_scope_outcomes(policy, context, list(packs), batch)
        return
    for pack, is_last in _with_last(packs):
        outcome = pack_outcome(policy, context, pack)
        if batch is not None:
            policy.reduce_gradients(is_last=is_last)
            # The only reduction: divide by the number of pairs in the global batch.
            _backward(outcome.loss.pair_losses.sum() / batch.num_pairs, outcome, context.dpo, batch)
        yield outcome


def _batch_scope_outcomes(
    policy: Policy, context: StepContext, packs: list[Pack], batch: GlobalBatch | None
) -> Iterator[PackOutcome]:
    """Yield the losses of every pack, for a loss that depends on the whole batch.

    All packs run without gradients, and the loss is computed over all of them. If `batch` is given, the derivative of the loss
    with respect to each log-probability is computed. Then every pack runs again, and its backward pass starts from these
    derivatives.
    """
    dpo, counts = context.dpo, [pack.num_pairs for pack in packs]
    with torch.no_grad():
        several = [pack_completions(policy, context, pack) for pack in packs]
    joined = joined_pairs(several, dpo, context.ranks)
    losses = combined_losses(joined.pairs, dpo)
    parts = losses.detach()[joined.own].split(counts)
    if batch is None:
        for pack, completions, part in zip(packs, several, parts, strict=True):
            yield PackOutcome(pack, completions, pair_loss(completions, dpo, part))
        return
    leaves = joined.policy.chosen, joined.policy.rejected
    slopes = torch.autograd.grad(losses.sum() / batch.num_pairs, leaves)
    by_pack = zip(*(slope[joined.own].split(counts) for slope in slopes), strict=True)
    for (pack, is_last), part, (by_chosen, by_rejected) in zip(_with_last(packs), parts, by_pack, strict=True):
        completions = pack_completions(policy, context, pack)
        outcome = PackOutcome(pack, completions, pair_loss(completions, dpo, part))
        logps = outcome.loss.policy
        policy.reduce_gradients(is_last=is_last)
        _backward((logps.chosen * by_chosen).sum() + (logps.rejected * by_rejected).sum(), outcome, dpo, batch)
        yield outcome


def _backward(preference_part: Tensor, outcome: PackOutcome, dpo: Dpo, batch: GlobalBatch) -> None:
    """Run the backward pass of the preference loss plus the SFT loss.

    `preference_part`: the preference loss, already divided by the number of pairs in the global batch. The SFT loss is divided
    here, by the number of preferences in the global batch.
    """
    sft = outcome.loss.sft.sum() / len(batch.preferences)
    (dpo.preference_loss_weight * preference_part + dpo.sft_loss_weight * sft).backward()


def _with_last(packs: Iterable[Pack]) -> Iterator[tuple[Pack, bool]]:
    """Yield each pack, and whether it is the last one."""
    remaining = iter(packs)
    for pack in remaining:
        for following in remaining:
            yield pack, False
            pack = following
        yield pack, True


def _has_pair_scope(dpo: Dpo) -> bool:
    return scope_of(dpo.preference_loss) == "pair"


@torch.no_grad()
def grad_norm(policy: Policy) -> Tensor:
    """Return the norm of all gradients of all ranks."""
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    if gradients[0].is_cuda:
        norm = torch.nn.utils.get_total_norm(gradients)
    else:
        # On a CPU a float32 sum of squares accumulates rounding error: with ten million numbers the norm is 0.04 % too low.
        each = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(each))
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).float()


def _update(optimizer: Any, step: PendingStep, norm: Tensor, max_grad_norm: float | None) -> None:
    """Clip the gradients and update the weights. If the loss or the gradient is not finite, the device skips the update."""
    finite = step.context.ranks.all_true(torch.isfinite(norm) & step.ledger.is_finite())
    optimizer.found_inf = (~finite).to(torch.float32)
    scale = torch.ones_like(norm) if max_grad_norm is None else ((norm + 1e-6) / max_grad_norm).clamp(min=1.0)
    optimizer.grad_scale = scale.to(torch.float32)
    optimizer.step()
    optimizer.zero_grad()

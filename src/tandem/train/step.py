"""A global batch in; one optimizer step, and its StepReport, out. The only place where losses are reduced."""

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
from tandem.packing.batches import GlobalBatch
from tandem.packing.layout import Pack
from tandem.train.metrics import PairLedger, PairTable, check_pairs, summarise
from tandem.train.terms import PackOutcome, StepContext, joined_pairs, pack_outcome, pack_terms


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did, reduced over workers."""

    metrics: dict[str, float]
    num_pairs: int
    num_tokens: int
    pack_fill: float
    lr: float
    seconds: float


class StepClock:
    """Times a step where it runs: by events on the GPU's stream, by the wall clock on a CPU. Starting never waits."""

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
        """Whether the step has ended, without waiting for it."""
        return self._events is None or self._events[1].query()

    def seconds(self) -> float:
        if self._events:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) / 1000
        return self._times[1] - self._times[0]


class PendingStep:
    """A step that may not have ended. Reading its numbers waits for it, not for what was asked of the device after it."""

    def __init__(self, batch: GlobalBatch, side: StepContext, lr: float):
        self.batch, self.side, self.lr = batch, side, lr
        self.ledger = PairLedger()
        self.num_tokens = self.num_positions = 0
        self.clock = StepClock(side.ranks.device)

    def add(self, outcome: PackOutcome) -> None:
        self.ledger.add(outcome)
        self.num_tokens += outcome.pack.num_tokens
        self.num_positions += outcome.pack.token_ids.size

    def is_done(self) -> bool:
        return self.clock.is_over()

    def read(self, store: Preferences) -> StepReport:
        """The report; NonFiniteError if the loss or the gradient was not finite (the update was then skipped).

        DefectError if the pairs of all ranks are not those of the batch.
        """
        table, (norm,) = self.ledger.read(self.side.ranks)
        check_pairs(table, self.batch.preferences, store)
        if not (np.isfinite(table.loss).all() and np.isfinite(table.sft).all() and math.isfinite(norm)):
            raise NonFiniteError(self._blame(table, norm, store))
        metrics = summarise(table, self.side.dpo, self.side.precision, store)
        of_workers = self.side.ranks.gather((self.num_tokens, self.num_positions, self.clock.seconds()))
        num_tokens, num_positions, seconds = zip(*of_workers, strict=True)
        return StepReport(
            {**metrics, "grad_norm": norm},
            num_pairs=self.batch.num_pairs,
            num_tokens=sum(num_tokens),
            pack_fill=sum(num_tokens) / sum(num_positions),
            lr=self.lr,
            seconds=max(seconds),
        )

    def _blame(self, table: PairTable, norm: float, store: Preferences) -> str:
        dpo = self.side.dpo
        loss = dpo.preference_loss_weight * table.loss.mean() + dpo.sft_loss_weight * table.sft.mean()
        # A cached reference was checked when it was computed; a live one is met here first.
        if wrong := table.preference[~np.isfinite(table.reference_chosen + table.reference_rejected)].tolist():
            return (
                f"the reference gives the pairs at {_places(wrong, store)} log-probabilities that are not finite. The update was "
                "skipped and nothing was saved. Look at these rows; if others fail too, the reference model itself overflows: "
                "try policy.precision=float32."
            )
        # Sorted over the batch, a loss stands in no pair's place.
        culprits = table.preference[~np.isfinite(table.loss)].tolist() if _is_of_pairs(dpo) else []
        if culprits:
            where = f"Pairs at: {_places(culprits, store)}. Look at these rows, or lower"
        elif math.isfinite(loss):
            where = "Every loss was finite. Lower"
        else:
            where = "Lower"
        return (
            f"loss {loss:g}, gradient norm {norm:g}: not finite. The update was skipped and "
            f"nothing was saved. {where} the learning rate."
        )


def _places(preferences: list[int], store: Preferences) -> str:
    """Of the first few, each once."""
    return ", ".join(list(dict.fromkeys(store.place(index) for index in preferences))[:10])


def train_step(
    policy: Policy,
    side: StepContext,
    packs: Iterable[Pack],
    batch: GlobalBatch,
    optimizer: Any,
    max_grad_norm: float | None,
) -> PendingStep:
    """Forward and backward pack by pack, then one update. Nothing here waits for the device."""
    step = PendingStep(batch, side, lr=optimizer.param_groups[0]["lr"])
    step.clock.mark("start")
    run_packs = _pair_scope if _is_of_pairs(side.dpo) else _batch_scope
    with policy.computing():
        for outcome in run_packs(policy, side, packs, batch):
            step.add(outcome)
    norm = grad_norm(policy)
    step.ledger.send(norm)
    fail_point("step.update")
    _update(optimizer, step, norm, max_grad_norm)
    fail_point("step.done")
    step.clock.mark("end")
    return step


def _is_of_pairs(dpo: Dpo) -> bool:
    return scope_of(dpo.preference_loss) == "pair"


def _pair_scope(policy: Policy, side: StepContext, packs: Iterable[Pack], batch: GlobalBatch) -> Iterator[PackOutcome]:
    """Backward of every pack as it comes."""
    dpo = side.dpo
    for pack in packs:
        outcome = pack_outcome(policy, side, pack)
        # The one reduction: by the pairs (for SFT, the preferences) of the whole global batch.
        pair_part = outcome.loss.pair_losses.sum() / batch.num_pairs
        sft = outcome.loss.sft.sum() / len(batch.preferences)
        (dpo.preference_loss_weight * pair_part + dpo.sft_loss_weight * sft).backward()
        yield outcome


def _batch_scope(policy: Policy, side: StepContext, packs: Iterable[Pack], batch: GlobalBatch) -> Iterator[PackOutcome]:
    """All packs without gradient; the loss over the whole batch and its derivative by each log-probability; then every
    pack again, its backward fed with those numbers."""
    dpo, packs = side.dpo, list(packs)
    with torch.no_grad():
        terms = [pack_terms(policy, side, pack) for pack in packs]
    joined = joined_pairs(terms, dpo, side.ranks)
    losses = combined_losses(joined.pairs, dpo)
    leaves = joined.policy.chosen, joined.policy.rejected
    by_chosen, by_rejected = torch.autograd.grad(losses.sum() / batch.num_pairs, leaves)
    start = joined.own.start
    for pack in packs:
        now = pack_terms(policy, side, pack)
        part = slice(start, start := start + pack.num_pairs)
        pair_part = (now.policy.chosen * by_chosen[part]).sum() + (now.policy.rejected * by_rejected[part]).sum()
        loss = pair_loss(now.own, now.compared(dpo), now.pairing, dpo, batch_losses=losses[part].detach())
        sft = loss.sft.sum() / len(batch.preferences)
        (dpo.preference_loss_weight * pair_part + dpo.sft_loss_weight * sft).backward()
        yield PackOutcome(pack, now, loss)


@torch.no_grad()
def grad_norm(policy: Policy) -> Tensor:
    """The norm of all gradients together, over all workers."""
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    if gradients[0].is_cuda:
        norm = torch.nn.utils.get_total_norm(gradients)
    else:
        # On a CPU a sum of squares in float32 loses digits with every number: of ten million, the norm is 0.04 % too low.
        each = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(each))
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).float()


def _update(optimizer: Any, step: PendingStep, norm: Tensor, max_grad_norm: float | None) -> None:
    """One fused update that clips, and skips itself on the device when the loss or the gradient is not finite."""
    finite = step.side.ranks.all_true(torch.isfinite(norm) & step.ledger.is_finite())
    optimizer.found_inf = (~finite).to(torch.float32)
    scale = torch.ones_like(norm) if max_grad_norm is None else ((norm + 1e-6) / max_grad_norm).clamp(min=1.0)
    optimizer.grad_scale = scale.to(torch.float32)
    optimizer.step()
    optimizer.zero_grad()

"""A global batch in; one optimizer step, and its StepReport, out. The only place where losses are reduced."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.config.losses import scope_of
from tandem.config.schema import Dpo
from tandem.errors import NonFiniteError
from tandem.loss.objective import PairLoss, compare, pair_loss, preference_loss
from tandem.loss.pairs import Pairing, Pairs, Sides
from tandem.loss.weighting import pair_sums, wpo_weights
from tandem.model.logps import CompletionLogps, sum_completions
from tandem.model.parallel import Workers
from tandem.model.policy import Policy
from tandem.model.reference import Reference
from tandem.packing.layout import Pack
from tandem.packing.schedule import GlobalBatch

# Differences of log-probability that rounding alone makes between two cuts of the same batch: a tie counts one half.
TIE_BAND = {"float32": 1e-3, "bfloat16": 0.1}

PAIR_METRICS = (
    "preference_loss",
    "accuracy",
    "logps_accuracy",
    "rewards_chosen_mean",
    "rewards_rejected_mean",
    "rewards_margin_mean",
    "logps_chosen_mean",
    "logps_rejected_mean",
)


@dataclass(frozen=True, slots=True)
class Side:
    """What a step needs besides the policy: the reference, the loss's settings, the workers and the precision."""

    reference: Reference
    dpo: Dpo
    workers: Workers
    precision: str


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did, reduced over workers."""

    metrics: dict[str, float]
    num_pairs: int
    num_tokens: int
    pack_fill: float
    lr: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PackTerms:
    """What one micro-batch gives the loss: sums per completion, and per pair what it compares."""

    own: CompletionLogps
    policy: Sides  # log pi of each pair, tokens weighted as LD-DPO asks
    reference: Sides
    num_tokens: Sides
    scores: Sides
    pairing: Pairing
    weights: Tensor | None  # WPO's

    def compared(self, dpo: Dpo) -> Pairs:
        return compare(self.policy, self.reference, self.num_tokens, dpo, self.scores)


def pack_terms(policy: Policy, side: Side, pack: Pack) -> PackTerms:
    """Forward of one micro-batch: policy and reference log-probabilities, summed."""
    dpo = side.dpo
    inputs = policy.inputs(pack, side.workers.device)
    pairing = Pairing(inputs.winners, inputs.losers, inputs.best)
    tokens, squares = policy(inputs, squares=True) if dpo.wpo else (policy(inputs), None)
    own = sum_completions(tokens, inputs.completion_lengths, inputs.completion)
    with torch.no_grad():
        reference_tokens = side.reference.token_logps(pack, inputs)
        reference = sum_completions(reference_tokens, inputs.completion_lengths, inputs.completion)
    return PackTerms(
        own,
        pair_sums(tokens, own, pairing, dpo.ld_alpha),
        pair_sums(reference_tokens, reference, pairing, dpo.ld_alpha),
        pairing.sides(own.num_tokens),
        pairing.sides(inputs.scores),
        pairing,
        None
        if squares is None
        else wpo_weights(tokens.detach(), squares, inputs.completion_lengths, inputs.completion, pairing),
    )


def pack_loss(policy: Policy, side: Side, pack: Pack) -> PairLoss:
    """The losses of a micro-batch, where a pair's depends on no other pair."""
    terms = pack_terms(policy, side, pack)
    return pair_loss(terms.own, terms.compared(side.dpo), terms.pairing, side.dpo, terms.weights)


def joined_pairs(several: Sequence[PackTerms], dpo: Dpo) -> tuple[Pairs, Sides]:
    """The pairs of several micro-batches as one, and the policy's numbers in them, by which a loss can be derived."""

    def cat(name: str) -> Sides:
        sides: list[Sides] = [getattr(terms, name) for terms in several]
        return Sides(torch.cat([one.chosen for one in sides]), torch.cat([one.rejected for one in sides]))

    policy = cat("policy").map(lambda values: values.detach().requires_grad_())
    return compare(policy, cat("reference"), cat("num_tokens"), dpo, cat("scores")), policy


def metric_sums(loss: PairLoss, dpo: Dpo, precision: str) -> Tensor:
    """Sums over pairs, in the order of PAIR_METRICS, and last the sum of SFT losses over preferences."""
    beta, band = dpo.reference_policy_kl_penalty, TIE_BAND[precision]
    margin = loss.rewards_chosen - loss.rewards_rejected
    values = [
        loss.preference.detach(),
        _above(margin / beta, band),
        _above(loss.logps_chosen - loss.logps_rejected, band),
        loss.rewards_chosen,
        loss.rewards_rejected,
        margin,
        loss.logps_chosen,
        loss.logps_rejected,
        loss.sft.detach(),
    ]
    return torch.stack([value.double().sum() for value in values])


def _above(difference: Tensor, band: float) -> Tensor:
    """1 above zero, 0 below, one half within the band."""
    return torch.where(difference.abs() <= band, 0.5, (difference > 0).double())


def mean_metrics(sums: list[float], num_pairs: int, num_preferences: int, dpo: Dpo) -> dict[str, float]:
    """Means over pairs (SFT: over preferences), and the total loss."""
    metrics = {name: value / num_pairs for name, value in zip(PAIR_METRICS, sums, strict=False)}
    metrics["sft_loss"] = sums[-1] / num_preferences
    total = dpo.preference_loss_weight * metrics["preference_loss"] + dpo.sft_loss_weight * metrics["sft_loss"]
    return {"loss": total, **metrics}


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
    """A step whose numbers are still on the device. Reading them waits for it, so the loop reads when it is done."""

    def __init__(self, batch: GlobalBatch, side: Side, lr: float):
        self.batch, self.side, self.lr = batch, side, lr
        self.sums: Tensor = torch.zeros(len(PAIR_METRICS) + 1, dtype=torch.float64, device=side.workers.device)
        self.grad_norm: Tensor = self.sums.new_zeros(())
        self.pair_losses: list[tuple[Pack, Tensor]] = []
        self.num_tokens = self.num_positions = 0
        self.clock = StepClock(side.workers.device)

    def add(self, pack: Pack, loss: PairLoss) -> None:
        self.sums += metric_sums(loss, self.side.dpo, self.side.precision)
        self.pair_losses.append((pack, loss.preference.detach()))
        self.num_tokens += pack.num_tokens
        self.num_positions += pack.token_ids.size

    def is_done(self) -> bool:
        return self.clock.is_over()

    def read(self, place_of: Callable[[int], str]) -> StepReport:
        """The report; NonFiniteError if the loss or the gradient was not finite (the update was then skipped)."""
        values = torch.cat([self.side.workers.sum(self.sums), self.grad_norm.double().reshape(1)]).tolist()
        *sums, norm = values
        metrics = mean_metrics(sums, self.batch.num_pairs, len(self.batch.preferences), self.side.dpo)
        metrics["grad_norm"] = norm
        if not (math.isfinite(metrics["loss"]) and math.isfinite(norm)):
            raise NonFiniteError(self._blame(metrics, place_of))
        return StepReport(
            metrics,
            num_pairs=self.batch.num_pairs,
            num_tokens=self.num_tokens,
            pack_fill=self.num_tokens / max(1, self.num_positions),
            lr=self.lr,
            seconds=self.clock.seconds(),
        )

    def _blame(self, metrics: dict[str, float], place_of: Callable[[int], str]) -> str:
        named = list(dict.fromkeys(place_of(index) for index in self._non_finite_preferences()))
        if named:
            where = f"Pairs at: {', '.join(named[:10])}. Look at these rows, or lower"
        elif math.isfinite(metrics["loss"]):
            where = "Every loss was finite. Lower"
        else:
            where = "Lower"
        return (
            f"loss {metrics['loss']:g}, gradient norm {metrics['grad_norm']:g}: not finite. The update was skipped and "
            f"nothing was saved. {where} the learning rate."
        )

    def _non_finite_preferences(self) -> Iterator[int]:
        # Sorted over the batch, a loss stands in no pair's place.
        for pack, losses in self.pair_losses if _is_of_pairs(self.side.dpo) else []:
            for pair in torch.nonzero(~torch.isfinite(losses)).flatten().tolist():
                yield int(pack.preferences[pack.owner[pack.winners[pair]]])


def train_step(
    policy: Policy, side: Side, packs: Iterable[Pack], batch: GlobalBatch, optimizer: Any, max_grad_norm: float | None
) -> PendingStep:
    """Forward and backward pack by pack, then one update. Nothing here waits for the device."""
    step = PendingStep(batch, side, lr=optimizer.param_groups[0]["lr"])
    step.clock.mark("start")
    losses = (
        _pair_scope(policy, side, packs, batch) if _is_of_pairs(side.dpo) else _batch_scope(policy, side, packs, batch)
    )
    for pack, loss in losses:
        step.add(pack, loss)
    step.grad_norm = grad_norm(policy)
    _update(optimizer, step, max_grad_norm)
    step.clock.mark("end")
    return step


def _is_of_pairs(dpo: Dpo) -> bool:
    return scope_of(dpo.preference_loss) == "pair"


def _pair_scope(
    policy: Policy, side: Side, packs: Iterable[Pack], batch: GlobalBatch
) -> Iterator[tuple[Pack, PairLoss]]:
    """Backward of every pack as it comes."""
    dpo = side.dpo
    for pack in packs:
        loss = pack_loss(policy, side, pack)
        # The one reduction: by the pairs (for SFT, the preferences) of the whole global batch.
        preference = loss.preference.sum() / batch.num_pairs
        sft = loss.sft.sum() / len(batch.preferences)
        (dpo.preference_loss_weight * preference + dpo.sft_loss_weight * sft).backward()
        yield pack, loss


def _batch_scope(
    policy: Policy, side: Side, packs: Iterable[Pack], batch: GlobalBatch
) -> Iterator[tuple[Pack, PairLoss]]:
    """All packs without gradient; the loss over the whole batch and its derivative by each log-probability; then every
    pack again, its backward fed with those numbers."""
    dpo, packs = side.dpo, list(packs)
    with torch.no_grad():
        terms = [pack_terms(policy, side, pack) for pack in packs]
    pairs, leaves = joined_pairs(terms, dpo)
    losses = preference_loss(pairs, dpo)
    by_chosen, by_rejected = torch.autograd.grad(losses.sum() / batch.num_pairs, (leaves.chosen, leaves.rejected))
    start = 0
    for pack in packs:
        now = pack_terms(policy, side, pack)
        part = slice(start, start := start + pack.num_pairs)
        preference = (now.policy.chosen * by_chosen[part]).sum() + (now.policy.rejected * by_rejected[part]).sum()
        loss = pair_loss(now.own, now.compared(dpo), now.pairing, dpo, of_batch=losses[part].detach())
        sft = loss.sft.sum() / len(batch.preferences)
        (dpo.preference_loss_weight * preference + dpo.sft_loss_weight * sft).backward()
        yield pack, loss


def grad_norm(policy: Policy) -> Tensor:
    """The norm of all gradients together, over all workers."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.parameters() if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _update(optimizer: Any, step: PendingStep, max_grad_norm: float | None) -> None:
    """One fused update that clips, and skips itself on the device when the loss or the gradient is not finite."""
    norm = step.grad_norm
    finite = torch.isfinite(norm) & torch.isfinite(step.sums).all()
    optimizer.found_inf = (~finite).to(torch.float32)
    scale = torch.ones_like(norm) if max_grad_norm is None else ((norm + 1e-6) / max_grad_norm).clamp(min=1.0)
    optimizer.grad_scale = scale.to(torch.float32)
    optimizer.step()
    optimizer.zero_grad()

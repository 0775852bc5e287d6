"""Validation sets in; the same metrics as in training out, over all pairs, whatever the batch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from tandem.config.losses import scope_of
from tandem.loss.objective import PairLoss, pair_loss, preference_loss
from tandem.model.policy import Policy
from tandem.packing.layout import Pack
from tandem.packing.packer import Packer
from tandem.packing.schedule import Batches
from tandem.train.step import PAIR_METRICS, Side, joined_pairs, mean_metrics, metric_sums, pack_loss, pack_terms


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """A named set, how it is packed, and what its pairs are compared with."""

    name: str
    packer: Packer
    side: Side
    batch_size: int
    max_batches: int | None

    @property
    def split(self) -> str:
        return f"validation-{self.name}"


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Metrics of one set."""

    split: str
    metrics: dict[str, float]
    num_pairs: int


@torch.no_grad()
def validate(policy: Policy, validation: ValidationSet) -> ValidationReport:
    side = validation.side
    batches = Batches(validation.packer.store.num_pairs, validation.batch_size).epoch(0)
    batches = batches[: validation.max_batches]
    sums = torch.zeros(len(PAIR_METRICS) + 1, dtype=torch.float64, device=side.workers.device)
    packs = (pack for batch in batches for pack in validation.packer.micro_batches(batch.preferences, batch.bounds))
    for loss in _losses(policy, side, packs):
        sums += metric_sums(loss, side.dpo, side.precision)
    num_pairs = sum(batch.num_pairs for batch in batches)
    num_preferences = sum(len(batch.preferences) for batch in batches)
    metrics = mean_metrics(side.workers.sum(sums).tolist(), num_pairs, num_preferences, side.dpo)
    return ValidationReport(validation.split, metrics, num_pairs)


def _losses(policy: Policy, side: Side, packs: Iterable[Pack]) -> Iterator[PairLoss]:
    """Of every pack; a loss that compares over the batch sees the whole set, so that no batch size changes it."""
    dpo = side.dpo
    if scope_of(dpo.preference_loss) == "pair":
        yield from (pack_loss(policy, side, pack) for pack in packs)
        return
    terms = [pack_terms(policy, side, pack) for pack in packs]
    pairs, _ = joined_pairs(terms, dpo)
    parts = preference_loss(pairs, dpo).split([len(one.pairing.winners) for one in terms])
    for one, part in zip(terms, parts, strict=True):
        yield pair_loss(one.own, one.compared(dpo), one.pairing, dpo, of_batch=part)

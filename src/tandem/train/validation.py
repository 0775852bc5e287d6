"""Validation sets in; the same metrics as in training out, over all pairs, whatever the batch."""

from dataclasses import dataclass

import torch

from tandem.model.policy import Policy
from tandem.packing.packer import Packer
from tandem.packing.schedule import Batches
from tandem.train.step import PAIR_METRICS, Side, mean_metrics, metric_sums, pack_loss


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
    for batch in batches:
        for pack in validation.packer.micro_batches(batch.preferences, batch.bounds):
            sums += metric_sums(pack_loss(policy, side, pack), side.dpo, side.precision)
    num_pairs = sum(batch.num_pairs for batch in batches)
    num_preferences = sum(len(batch.preferences) for batch in batches)
    metrics = mean_metrics(side.workers.sum(sums).tolist(), num_pairs, num_preferences, side.dpo)
    return ValidationReport(validation.split, metrics, num_pairs)

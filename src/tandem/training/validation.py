"""Measures validation sets. The metrics are the same as in training, cover all pairs, and do not depend on the batch size."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tandem.failpoints import fail_point
from tandem.model.policy import Policy
from tandem.packing.batches import Batches
from tandem.packing.layout import IntArray
from tandem.packing.packer import Packer
from tandem.training.metrics import PairLedger, PairTable, check_pairs, summarise
from tandem.training.step import pack_outcomes
from tandem.training.terms import StepContext


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """A named validation set, its packer, and the reference, loss settings and ranks for measuring it."""

    name: str
    packer: Packer
    context: StepContext
    batch_size: int
    max_batches: int | None

    @property
    def split(self) -> str:
        return f"validation-{self.name}"

    @property
    def data(self) -> str:
        """A short fingerprint of the pairs in the set."""
        return self.packer.store.fingerprint[:12]


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The metrics of one validation set."""

    split: str
    metrics: dict[str, float]
    num_pairs: int
    data: str  # a short fingerprint of the pairs
    seconds: float = 0.0
    # The values of every pair; None if the report was read from metrics.jsonl.
    table: PairTable | None = field(default=None, repr=False, compare=False)


def validate(policy: Policy, validation: ValidationSet, check: Callable[[], None] = lambda: None) -> ValidationReport:
    """Measure a validation set. `check`: called after each pack; it may raise to interrupt the validation."""
    started = time.perf_counter()
    context, packer = validation.context, validation.packer
    table = measure(policy, context, packer, validation.batch_size, max_batches=validation.max_batches, check=check)
    metrics = summarise(table, context.dpo, context.precision, packer.store)
    return ValidationReport(
        split=validation.split,
        metrics=metrics,
        num_pairs=len(table),
        data=validation.data,
        seconds=time.perf_counter() - started,
        table=table,
    )


def portions(packer: Packer, batch_size: int) -> list[IntArray]:
    """Split a set into groups of about `batch_size` pairs, in the order of the set. Each group is packed separately."""
    return [batch.preferences for batch in Batches(packer.store.num_pairs, batch_size).epoch(0)]


@torch.no_grad()
def measure(
    policy: Policy,
    context: StepContext,
    packer: Packer,
    batch_size: int,
    max_batches: int | None = None,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda num_preferences: None,
) -> PairTable:
    """Return the values of every pair of a set, or of the first `max_batches` groups of pairs (see `portions`).

    `check` and `progress` are called after each pack. `check` may raise to stop; `progress` gets the number of preferences.
    """
    measured = portions(packer, batch_size)[:max_batches]
    packs = (pack for portion in measured for pack in packer.micro_batches(portion))
    ledger = PairLedger()
    with policy.computing():
        # A loss with batch scope is computed over the whole set, so that it does not depend on the batch size.
        for outcome in pack_outcomes(policy, context, packs):
            ledger.add(outcome)
            fail_point("validation.pack")
            check()
            progress(len(outcome.pack.preferences))
    ledger.send()
    table, _ = ledger.read(context.ranks)
    check_pairs(table, np.concatenate(measured), packer.store)
    return table

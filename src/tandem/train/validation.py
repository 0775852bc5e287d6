"""Validation sets in; the same metrics as in training out, over all pairs, independent of the batch size."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tandem.failpoints import fail_point
from tandem.model.policy import Policy
from tandem.packing.batches import Batches
from tandem.packing.layout import IntArray
from tandem.packing.packer import Packer
from tandem.train.metrics import PairLedger, PairTable, check_pairs, summarise
from tandem.train.step import pack_outcomes
from tandem.train.terms import StepContext


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """A named validation set, how it is packed, and the context (reference, loss settings, ranks) that it is measured in."""

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
        """Which pairs these are."""
        return self.packer.store.fingerprint[:12]


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Metrics of one set."""

    split: str
    metrics: dict[str, float]
    num_pairs: int
    data: str  # the fingerprint of the set
    seconds: float = 0.0


def validate(policy: Policy, validation: ValidationSet, check: Callable[[], None] = lambda: None) -> ValidationReport:
    """`check` is called between packs, and may end it by raising."""
    started = time.perf_counter()
    context, packer = validation.context, validation.packer
    table = measure(policy, context, packer, validation.batch_size, validation.max_batches, check)
    metrics = summarise(table, context.dpo, context.precision, packer.store)
    return ValidationReport(validation.split, metrics, len(table), validation.data, time.perf_counter() - started)


def portions(packer: Packer, batch_size: int) -> list[IntArray]:
    """Split a set, in its order, into portions of this many pairs. A portion is packed together."""
    return [batch.preferences for batch in Batches(packer.store.num_pairs, batch_size).epoch(0)]


@torch.no_grad()
def measure(
    policy: Policy,
    context: StepContext,
    packer: Packer,
    batch_size: int,
    max_batches: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> PairTable:
    """The numbers of every pair of a set, or of its first batches."""
    measured = portions(packer, batch_size)[:max_batches]
    packs = (pack for portion in measured for pack in packer.micro_batches(portion))
    ledger = PairLedger()
    with policy.computing():
        # A loss that compares over the batch compares over the whole set, so that no batch size changes it.
        for outcome in pack_outcomes(policy, context, packs):
            ledger.add(outcome)
            fail_point("validation.pack")
            check()
    ledger.send()
    table, _ = ledger.read(context.ranks)
    check_pairs(table, np.concatenate(measured), packer.store)
    return table

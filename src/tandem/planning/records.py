"""The records that `plan` returns: what a run needs of memory, time, money and disk."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from tandem.planning.cards import Card
from tandem.planning.speed import Range

HOUR = 3600
Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The expected peak of GPU memory (or of the machine's memory without a GPU), in bytes."""

    weights: float
    gradients: float
    optimizer_states: float
    bfloat16_copy: float
    reference: float  # a frozen copy of the model, with reference.mode=live
    activations: float  # of the longest micro-batch
    head: float  # a chunk of logits and other temporary tensors
    available: int
    usable: float  # what the estimate may use; the rest is for memory that it does not include

    @property
    def total(self) -> float:
        fixed = self.weights + self.gradients + self.optimizer_states + self.bfloat16_copy + self.reference
        return fixed + self.activations + self.head

    @property
    def verdict(self) -> Verdict:
        if self.total <= self.usable:
            return "fits"
        return "tight" if self.total <= self.available else "does not fit"


@dataclass(frozen=True, slots=True)
class Rows:
    """How the training set is packed into rows."""

    length: int  # tokens of the longest row
    together: int  # rows that are computed together
    description: str  # the row length and the reason for it, in words
    longest_that_fits: int | None  # in tokens; None: not even a short row
    fill: float  # share of positions that are not filler


@dataclass(frozen=True, slots=True)
class TimeNeed:
    """The expected time of a run, in seconds. `reference`: computed once, and kept in the cache for later runs."""

    start: Range
    reference: Range
    training: Range
    validation: Range
    pairs_per_second: float  # in training, without validation

    @property
    def total(self) -> Range:
        return self.start + self.reference + self.training + self.validation

    def cost(self, price_per_hour: float | None) -> Range | None:
        """The cost of the run, in the currency of the price; None without a price."""
        if price_per_hour is None:
            return None
        return Range(self.total.low / HOUR * price_per_hour, self.total.high / HOUR * price_per_hour)


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """The disk space that the run directory needs, in bytes."""

    checkpoint: float  # one checkpoint
    num_checkpoints: int  # most at a time, with the one that is being written
    export: float
    folder: str
    free: int | None  # on this machine; None: unknown

    @property
    def total(self) -> float:
        return self.checkpoint * self.num_checkpoints + self.export


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change with which the run fits: settings, another card or both. The memory and the time are those of the changed run."""

    change: str  # in words
    command: str  # runs as printed
    memory: MemoryNeed
    time: TimeNeed | None
    cost: Range | None = None  # on the card that was planned for; the price of another card is not known


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """What a run needs, estimated before any weights load."""

    model: str
    num_weights: int
    num_trained: int
    card: Card | None  # None: no GPU
    num_steps: int
    num_pairs: int  # in all steps
    num_tokens: int  # in all steps; prompts counted once where they are shared
    rows: Rows
    memory: MemoryNeed
    time: TimeNeed | None
    no_time: str  # why there is no time; empty if there is
    price_per_hour: float | None
    cost: Range | None  # in the currency of the price
    disk: DiskNeed
    suggestions: tuple[Suggestion, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with totals, as JSON can hold it."""
        found = asdict(self)
        found["memory"] |= {"total": self.memory.total, "verdict": self.memory.verdict}
        found["disk"]["total"] = self.disk.total
        for record, time in (
            (found, self.time),
            *zip(found["suggestions"], (s.time for s in self.suggestions), strict=True),
        ):
            if time is not None:
                record["time"]["total"] = asdict(time.total)
        for record, one in zip(found["suggestions"], self.suggestions, strict=True):
            record["memory"] |= {"total": one.memory.total, "verdict": one.memory.verdict}
        return found

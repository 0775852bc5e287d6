"""The records that `plan` returns: what a run needs of memory, time, money and disk."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from tandem.model.distributed.mesh import MeshShape
from tandem.planning.cards import Card
from tandem.planning.gpus import GpuCount, Links
from tandem.planning.speed import Range
from tandem.planning.traffic import Traffic
from tandem.training.host_memory import HostNeed

HOUR = 3600
Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """The expected peak of the memory of each GPU (or of the machine's memory without a GPU), in bytes."""

    weights: float
    gradients: float
    optimizer_states: float
    bfloat16_copy: float
    reference: float  # a frozen copy of the model, with reference.mode=live
    activations: float  # of the longest micro-batch
    head: float  # a chunk of logits and other temporary tensors
    available: int
    usable: float  # what the estimate may use; the rest is for memory that it does not include
    gathered: float = 0  # of several ranks: weights that are gathered, and gradients before they are divided

    @property
    def total(self) -> float:
        fixed = self.weights + self.gradients + self.optimizer_states + self.bfloat16_copy + self.reference
        return fixed + self.activations + self.head + self.gathered

    @property
    def verdict(self) -> Verdict:
        if self.total <= self.usable:
            return "fits"
        return "tight" if self.total <= self.available else "does not fit"


@dataclass(frozen=True, slots=True)
class SeveralGpus:
    """What the ranks of a run on several GPUs exchange, and how that is expected to slow them down."""

    gpus: GpuCount
    mesh: MeshShape
    links: Links
    sent: Traffic  # by a rank in a training step
    exchange_seconds: float  # of a training step
    compute_seconds: float | None  # of a training step, with the waiting; None: not estimated
    efficiency: float | None  # computation as a share of the time of a step
    waiting: float  # share of the computation in which a rank waits for the one whose packs have the most attention
    one_gpu_speed: float | None = (
        None  # pairs per second of one GPU with these settings; None: not estimated, or it does not fit
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """How the training set is packed into rows."""

    length: int  # tokens of the longest row that the packs take
    limit: int  # tokens that a row may have
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
    copying: float = 0.0  # seconds of a step in which optimizer states are copied from host memory and back

    @property
    def total(self) -> Range:
        return self.start + self.reference + self.training + self.validation

    def cost(self, price_per_hour: float | None, num_gpus: int = 1) -> Range | None:
        """The cost of the run, in the currency of the price of a GPU; None without a price."""
        if price_per_hour is None:
            return None
        price = num_gpus * price_per_hour
        return Range(self.total.low / HOUR * price, self.total.high / HOUR * price)


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
    price_per_hour: float | None  # of a GPU
    cost: Range | None  # in the currency of the price
    disk: DiskNeed
    suggestions: tuple[Suggestion, ...]
    host: HostNeed | None = None  # the memory of each machine for optimizer states; None: they are on the GPU
    several: SeveralGpus | None = None  # None: one GPU
    notes: tuple[str, ...] = ()  # parts of the model that are not trained, or get no adapters, in words

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

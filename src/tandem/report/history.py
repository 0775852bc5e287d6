"""The metrics of one set over a run, in the form that verdicts judge."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import stdev

from tandem.config.schema import Config
from tandem.terminal.arguments import in_command, option
from tandem.training.checkpoint.ranking import Record, measured_on

NUM_PARTS = 4  # training is judged by the means of its quarters, because a single step has too few pairs
LOSS_ERROR = "loss_standard_error"  # of a mean over steps, which were measured on different pairs
# Metrics that verdicts read from every record.
NEEDED_METRICS = (
    *("num_pairs", "loss", "accuracy", "rewards_margin_mean", "rewards_chosen_mean"),
    *("logps_chosen_mean", "tokens_chosen_mean"),
)


@dataclass(frozen=True, slots=True)
class History:
    """The metrics of one set over a run, with the records of all training steps and the configuration."""

    split: str
    records: Sequence[Record]  # measured on the same pairs, in order of steps
    training: Sequence[Record]  # every training step
    config: Config
    has_ended: bool = True  # whether the run has no steps left
    overlap: float = 0.0  # share of the set's prompts that are also in the training set

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def last(self) -> Record:
        return self.records[-1]

    @property
    def start(self) -> Record | None:
        """The metrics from before the first step; None if they were not measured."""
        return self.first if self.first["step"] == 0 and len(self.records) > 1 else None

    @property
    def num_steps(self) -> int:
        return self.training[-1]["step"] if self.training else self.last["step"]

    @property
    def starts_at_reference(self) -> bool:
        """Whether policy and reference are equal before the first step.

        Every pair is then a tie, so accuracy starts at one half.
        """
        return "kl_per_token" in self.last and self.config.reference.model is None

    @property
    def writes_pairs(self) -> str:
        """The command, or in Python the call, that writes the set's pairs to a file, the smallest margins first."""
        # Without DATA, the pairs of the validation sets are written.
        given = [*(["RUN", "DATA"] if self.split == "train" else ["RUN"]), option("per_pair", metavar="FILE")]
        return f"`tandem eval {' '.join(given)}`" if in_command() else f"tandem.evaluate({', '.join(given)})"


def is_complete(record: Record) -> bool:
    """Return whether a record has all metrics that verdicts need. A record that was damaged on disk may lack some."""
    has_all = all(isinstance(record.get(name), int | float) for name in NEEDED_METRICS)
    is_trained = record["split"] != "train" or record["step"] > 0
    return has_all and is_trained and record["num_pairs"] > 0 and record["tokens_chosen_mean"] > 0


def on_last_pairs(lines: Sequence[Record]) -> list[Record]:
    """Return the records that were measured on the same pairs as the last record. A set may change when a run is resumed."""
    return [record for record in lines if measured_on(record) == measured_on(lines[-1])]


def quarter_means(records: Sequence[Record]) -> list[Record]:
    """Divide the records of training steps into quarters, and return the mean of each quarter. Every pair has the same weight."""
    size = -(-len(records) // NUM_PARTS)
    return [_mean(records[start : start + size]) for start in range(0, len(records), size)]


def _mean(records: Sequence[Record]) -> Record:
    """Return the mean over `records` of each metric that all of them have. Each record is weighted by its number of pairs."""
    pairs = sum(record["num_pairs"] for record in records)
    shared = [name for name in records[0] if all(isinstance(r.get(name), int | float) for r in records)]
    means = {name: sum(r[name] * r["num_pairs"] for r in records) / pairs for name in shared}
    losses = [record["loss"] for record in records]
    error = stdev(losses) / sqrt(len(losses)) if len(losses) > 1 else inf
    return {**means, "step": records[-1]["step"], "num_pairs": pairs, LOSS_ERROR: error}

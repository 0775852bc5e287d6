"""The results of an evaluation, as records. `as_dict` gives the keys that `tandem eval --json` prints."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from tandem.evaluation.intervals import Estimate
from tandem.terminal.printable import counted, escaped

ScoredBy = Literal["implicit reward", "log-probability", "model score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The results of some pairs. A result that the model or the missing reference does not allow is None."""

    name: str
    num_pairs: int
    num_prompts: int
    accuracy: Estimate | None  # share of pairs whose chosen completion has the higher reward, or score
    logps_accuracy: Estimate | None  # by the summed log-probability
    logps_per_token_accuracy: Estimate | None
    rewards_margin: Estimate | None  # mean of reward(chosen) - reward(rejected)
    logps_margin: Estimate | None
    loss: Estimate | None  # of the run, or of DPO


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfN:
    """Share of prompts with more than two completions whose highest-scored completion is a best one of the data."""

    num_prompts: int
    completions_per_prompt: float  # the mean
    is_mixed: bool  # whether prompts have different numbers of completions
    accuracy: Estimate


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Pairs whose sigmoid(|margin|) is between `low` and `high`."""

    low: float
    high: float
    num_pairs: int
    confidence: float  # mean of sigmoid(|margin|)
    accuracy: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Whether sigmoid(|margin|) is the probability that the reward orders a pair correctly."""

    expected_error: float  # ECE: mean over pairs of |accuracy - confidence| of the pair's bin
    bins: tuple[ReliabilityBin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """The results of RewardBench: per subset, per section, and in total."""

    name: Literal["RewardBench", "RewardBench 2"]
    subsets: dict[str, float]
    num_prompts: dict[str, int]  # measured, of each subset
    sections: dict[str, float]  # RewardBench 1 only
    score: float
    missing: tuple[str, ...]  # sections and subsets of the benchmark without prompts in the data
    uncounted: tuple[str, ...]  # subsets of the data that are not of the benchmark
    num_alone: int = 0  # prompts of Ties (RewardBench 2) without their counterpart, which lowers the score


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One accuracy of two models on the same pairs."""

    metric: Literal["accuracy", "logps_accuracy", "logps_per_token_accuracy"]
    value: float  # of the model
    against: float  # of the other
    difference: Estimate
    num_better: int  # pairs that the model orders better than the other
    num_worse: int
    p_value: float


@dataclass(frozen=True, slots=True)
class DifferingPair:
    """A pair that one of two models orders correctly and the other does not."""

    place: str
    chosen: int
    rejected: int
    margin: float
    against_margin: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two models on the same pairs."""

    against: str
    scored_by: ScoredBy  # the other model
    num_pairs: int
    num_left_out: int  # pairs that only one of the models could read
    differences: tuple[Difference, ...]
    metric: str  # by which the pairs below differ
    pairs: tuple[DifferingPair, ...]  # those with the largest change first


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessResult:
    """A metric of a task of the LM Evaluation Harness, for each model."""

    task: str
    metric: str
    values: dict[str, float]  # by model
    stderrs: dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything that `evaluate` measured."""

    model: str
    folder: str  # where its weights are
    reference: str | None
    scored_by: ScoredBy
    loss: str | None  # the preference loss whose implicit rewards are measured
    beta: float | None
    precision: str
    total: Group | None  # None if only tasks of the LM Evaluation Harness ran
    by_set: tuple[Group, ...] = ()
    by_length: tuple[Group, ...] = ()
    by_rank_distance: tuple[Group, ...] = ()
    by: str | None = None  # the field of the rows by which `by_field` groups pairs
    by_field: tuple[Group, ...] = ()
    best_of_n: BestOfN | None = None
    calibration: Calibration | None = None
    benchmarks: tuple[Benchmark, ...] = ()
    comparison: Comparison | None = None
    harness: tuple[HarnessResult, ...] = ()
    skipped: dict[str, dict[str, int]]  # by set: rows that were left out, by reason
    left_out: tuple[str, ...] = ()  # data that is also given under another name, in sentences
    seconds: float  # with loading and tokenising
    pairs_per_second: float | None  # of the model alone, without loading, tokenising and the reference

    def __repr__(self) -> str:
        """The model and its main numbers, with the names by which `total` has them. A notebook prints this."""
        lines = [f"{self.model}: by {self.scored_by}" if self.total else self.model]
        if self.total is not None:
            lines[0] += f", {counted(self.total.num_pairs, 'pair')} of {counted(self.total.num_prompts, 'prompt')}"
            lines.append(_main_numbers(self.total))
        if self.comparison is not None:
            changes = [f"{one.metric} {_shown(one.difference, '+.3f')}" for one in self.comparison.differences]
            lines.append(f"compared with {self.comparison.against}: {changes[0] if changes else 'no difference'}")
        elif self.harness:
            tasks = len({one.task for one in self.harness})
            lines.append(f"{counted(tasks, 'task')} of the LM Evaluation Harness")
        return "<Evaluation " + "\n  ".join(map(escaped, lines)) + ">"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return asdict(self)


def _main_numbers(total: Group) -> str:
    """The accuracy and margin of rewards or, without rewards, of log-probabilities, and the loss."""
    is_rewarded = total.accuracy is not None
    names = ("accuracy", "rewards_margin", "loss") if is_rewarded else ("logps_accuracy", "logps_margin", "loss")
    estimates = {name: getattr(total, name) for name in names}
    return ", ".join(f"{name} {_shown(one, '.3f')}" for name, one in estimates.items() if one is not None)


def _shown(estimate: Estimate, form: str) -> str:
    """0.750 (0.409 to 0.929)."""
    interval = "" if estimate.low is None else f" ({estimate.low:{form}} to {estimate.high:{form}})"
    return f"{estimate.value:{form}}{interval}"

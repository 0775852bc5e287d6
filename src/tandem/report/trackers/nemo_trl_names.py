"""The names under which NeMo RL and TRL log their metrics, and how each value follows from a record of metrics.jsonl.

Only names whose values follow exactly from a record are here. docs/trackers.md lists the names that are not logged, and why.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.config.losses import needs_reference, weights_of
from tandem.config.schema import Config
from tandem.config.sections.dpo import Dpo
from tandem.packing.batches import Batches
from tandem.report.trackers.adapters import Metrics

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Name:
    """A name of theirs, and its definition: a sum of our metrics, each with a factor, times `scale`."""

    name: str
    terms: Mapping[str, float]  # from our metric to its factor
    scale: Literal["1", "beta", "1/beta", "orpo_lambda/beta", "num_pairs"] = "1"

    @property
    def is_ours(self) -> bool:
        """Whether our metric of the same name has the same definition."""
        return dict(self.terms) == {self.name: 1} and self.scale == "1"


def _same(*names: str) -> tuple[Name, ...]:
    return tuple(Name(name, {name: 1}) for name in names)


# NeMo RL: in the splits train and validation-<name>, under our prefixes.
NEMO = (
    *_same("loss", "preference_loss", "sft_loss"),
    Name("accuracy", {"accuracy_strict": 1}),
    Name("rewards_chosen_mean", {"rewards_chosen_mean": 1}, "1/beta"),
    Name("rewards_rejected_mean", {"rewards_rejected_mean": 1}, "1/beta"),
    Name("num_valid_samples", {"num_pairs": 1}),
    Name("global_valid_seqs", {"num_pairs": 2}),
    Name("global_valid_toks", {"tokens_chosen_mean": 1, "tokens_rejected_mean": 1}, "num_pairs"),
)
NEMO_TRAIN = _same("grad_norm", "lr")
NEMO_TRAIN_TIMING = (Name("policy_training", {"step_seconds": 1}),)
NEMO_VALIDATION_SECONDS = "total_validation_time"

# TRL: in training and evaluation.
TRL = _same("loss")
TRL_TRAIN = (*_same("grad_norm", "epoch"), Name("learning_rate", {"lr": 1}))
TRL_VALIDATION_SECONDS = "runtime"
# TRL's rewards with a reference: beta times log-ratios summed over tokens, also if the loss averages or transforms them.
TRL_LOG_RATIOS = (
    Name("rewards/chosen", {"logratios_chosen_mean": 1}, "beta"),
    Name("rewards/rejected", {"logratios_rejected_mean": 1}, "beta"),
    Name("rewards/margins", {"logratios_chosen_mean": 1, "logratios_rejected_mean": -1}, "beta"),
    Name("rewards/accuracies", {"logratios_accuracy": 1}),
)
TRL_LOGPS = (
    Name("logps/chosen", {"logps_chosen_mean": 1}),
    Name("logps/rejected", {"logps_rejected_mean": 1}),
)
# Without a reference (TRL's CPOTrainer), and with the weighted sums of LD-DPO, TRL's rewards are ours.
TRL_OUR_REWARDS = (
    Name("rewards/chosen", {"rewards_chosen_mean": 1}),
    Name("rewards/rejected", {"rewards_rejected_mean": 1}),
    Name("rewards/margins", {"rewards_margin_mean": 1}),
    Name("rewards/accuracies", {"accuracy_strict": 1}),
)
# TRL's beta of ORPO is dpo.orpo_lambda here.
TRL_ORPO_REWARDS = (
    Name("rewards/chosen", {"rewards_chosen_mean": 1}, "orpo_lambda/beta"),
    Name("rewards/rejected", {"rewards_rejected_mean": 1}, "orpo_lambda/beta"),
    Name("rewards/margins", {"rewards_margin_mean": 1}, "orpo_lambda/beta"),
    Name("rewards/accuracies", {"accuracy_strict": 1}),
)
# Without a reference, TRL's log-probabilities are averaged over tokens if its rewards are.
TRL_LOGPS_OF_REWARDS = (
    Name("logps/chosen", {"rewards_chosen_mean": 1}, "1/beta"),
    Name("logps/rejected", {"rewards_rejected_mean": 1}, "1/beta"),
)
# The prefixes of names in training and evaluation, as transformers' integrations write them.
TRL_PREFIXES = {"tensorboard": ("train/", "eval/"), "wandb": ("train/", "eval/"), "mlflow": ("", "eval_")}
TRL_WANDB_STEP = "train/global_step"  # the horizontal axis of W&B's charts

# Where a name of NeMo RL has another definition than our metric, ours has this prefix in trackers.
OURS = "tandem"
VALIDATION = "validation-"
VALIDATION_TIMING = "timing/validation"


class Epochs:
    """Converts steps to epochs. `num_steps_of`: returns the number of steps in an epoch, by its index."""

    def __init__(self, num_steps_of: Callable[[int], int]):
        self._num_steps_of = num_steps_of
        self._ends = [0]  # steps done at the start, and at the end of each epoch so far

    def at(self, step: int) -> float:
        """Return how many epochs are done after `step`. Example: with 4 steps in each epoch, 6 gives 1.5."""
        while self._ends[-1] < step:
            self._ends.append(self._ends[-1] + self._num_steps_of(len(self._ends) - 1))
        epoch = bisect_left(self._ends, step)
        if epoch == 0:
            return 0.0
        start, end = self._ends[epoch - 1 : epoch + 1]
        return epoch - 1 + (step - start) / (end - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNames:
    """Which names of other trainers are logged, and the facts about the run that their values depend on."""

    nemo: bool
    trl: bool
    dpo: Dpo
    validation: Sequence[str]  # names of the validation sets
    epochs: Epochs

    @classmethod
    def of(cls, config: Config, validation: Iterable[str], batches: Batches) -> "OtherNames":
        return cls(
            nemo=config.logger.log_nemo_names,
            trl=config.logger.log_trl_names,
            dpo=config.dpo,
            validation=tuple(validation),
            epochs=Epochs(lambda epoch: len(batches.epoch(epoch))),
        )

    def with_nemo(self, record: Record, ours: Metrics) -> Metrics:
        """Return `ours`, the metrics of a record under our names, and the same metrics under the names of NeMo RL."""
        split = record["split"]
        if not self.nemo:
            return ours
        if split == VALIDATION_TIMING:
            each = self._seconds(record)
            times = {f"timing/{VALIDATION}{name}/{NEMO_VALIDATION_SECONDS}": value for name, value in each.items()}
            return ours | times | {f"{VALIDATION_TIMING}/{NEMO_VALIDATION_SECONDS}": sum(each.values())}
        if split != "train" and not split.startswith(VALIDATION):
            return ours
        theirs = {f"{split}/{name}": value for name, value in self._values(NEMO, record).items()}
        if split == "train":
            theirs |= {f"train/{name}": value for name, value in self._values(NEMO_TRAIN, record).items()}
            timing = self._values(NEMO_TRAIN_TIMING, record)
            theirs |= {f"timing/train/{name}": value for name, value in timing.items()}
        others = (f"{split}/{one.name}" for one in NEMO if not one.is_ours)
        moved = {f"{OURS}/{name}": ours[name] for name in others if name in ours and name in theirs}
        return ours | moved | theirs

    def trl_metrics(self, record: Record, tracker: str) -> Metrics:
        """Return the metrics of a record under TRL's names, as transformers writes them to this tracker."""
        split = record["split"]
        training, evaluation = TRL_PREFIXES[tracker]
        found: Metrics = {}
        if not self.trl:
            return found
        if split == "train":
            found = {f"{training}{name}": value for name, value in self._trl_values(record, TRL_TRAIN).items()}
        elif split.startswith(VALIDATION):
            prefix = evaluation + self._set_prefix(split.removeprefix(VALIDATION))
            found = {f"{prefix}{name}": value for name, value in self._trl_values(record).items()}
        elif split == VALIDATION_TIMING:
            found = {
                f"{evaluation}{self._set_prefix(name)}{TRL_VALIDATION_SECONDS}": value
                for name, value in self._seconds(record).items()
            }
        return found | {TRL_WANDB_STEP: record["step"]} if found and tracker == "wandb" else found

    def _seconds(self, record: Record) -> Metrics:
        """Return how long the validation of each set took, by the name of the set."""
        found = {name: record.get(f"{name}_seconds") for name in self.validation}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}

    def _set_prefix(self, name: str) -> str:
        """Return what distinguishes the names of several validation sets. A single set is not named."""
        return f"{name}_" if len(self.validation) > 1 else ""

    def _trl_values(self, record: Record, also: Iterable[Name] = ()) -> Metrics:
        names = (*TRL, *also, *trl_rewards(self.dpo))
        return self._values(names, {**record, "epoch": self.epochs.at(record["step"])})

    def _values(self, names: Iterable[Name], record: Record) -> Metrics:
        """Return the value of each name. A name is left out if the record does not have all of its metrics.

        A record of a damaged metrics.jsonl may have values that are not numbers.
        """
        beta = self.dpo.reference_policy_kl_penalty
        numbers = {metric: value for metric, value in record.items() if isinstance(value, int | float)}
        scales = {
            "1": 1,
            "beta": beta,
            "1/beta": 1 / beta,
            "orpo_lambda/beta": self.dpo.orpo_lambda / beta,
            "num_pairs": numbers.get("num_pairs"),
        }
        return {
            one.name: sum(factor * numbers[metric] for metric, factor in one.terms.items()) * scale
            for one in names
            if (scale := scales[one.scale]) is not None and numbers.keys() >= one.terms.keys()
        }


def trl_rewards(dpo: Dpo) -> tuple[Name, ...]:
    """Return TRL's names of rewards and log-probabilities that follow from the records of a run with these settings."""
    if weights_of(dpo.preference_loss).keys() == {"orpo"}:
        return TRL_ORPO_REWARDS + TRL_LOGPS_OF_REWARDS
    if not needs_reference(dpo.preference_loss):
        return TRL_OUR_REWARDS + TRL_LOGPS_OF_REWARDS
    if dpo.ld_alpha is None:
        return TRL_LOG_RATIOS + TRL_LOGPS
    # TRL's log-probabilities are then the weighted sums of LD-DPO, which records have only as rewards.
    is_log_ratio = not dpo.per_token and dpo.f_divergence == "reverse_kl"
    return TRL_OUR_REWARDS if is_log_ratio else ()

"""Settings that LLaMA-Factory and Axolotl take from transformers: batches, the schedule, the length and trackers.

Their rules give the values; the functions here say what becomes of them.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.config.compat.records import Given, Outcome, no_effect, refused, translated
from tandem.terminal.printable import counted

# Schedules of transformers, as named here.
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
FIRST_ROWS = re.compile(r"(\w+)\[:([1-9]\d{0,11})\]")  # train[:1000], of datasets
TRACKERS = ("wandb", "tensorboard", "mlflow")


class SetError(Exception):
    """A preference set that cannot be used, with the reason and what to do."""


@dataclass(frozen=True, slots=True)
class PreferenceSet:
    """A preference set, as fields of data.train."""

    fields: Mapping[str, Any]
    note: str | None = None
    # What texts become: a turn of the chat template, raw text in every row, or raw text in rows of plain text.
    text: Literal["turn", "raw", "as_is"] = "turn"


def rows_of_split(split: str, where: str) -> dict[str, Any]:
    """Return a split of datasets as fields of data.train. Raise SetError if it is another part than the first rows."""
    name, first = split, {}
    if found := FIRST_ROWS.fullmatch(split):
        name, first = found[1], {"max_rows": int(found[2])}
    if any(sign in name for sign in "[+"):
        raise SetError(
            f"{where}: tandem reads a split, or its first rows, such as train[:1000], not {split}. Write the rows to a file, and "
            "name the file."
        )
    return {**({} if name == "train" else {"split": name}), **first}


def has_own_training_set(given: Given) -> bool:
    """Whether data.train says where the pairs are, and not only how to read them."""
    own = given.get("data.train")
    return bool(own.get("data_path") or own.get("dataset_name")) if isinstance(own, dict) else bool(own)


def whole(value: Any) -> int:
    """Return a whole number: 3, or 3.0. Raise TypeError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise TypeError
    return int(value)


def num_ranks() -> int:
    """The number of processes of the run, from the launcher's environment."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isdecimal() and int(given) > 0 else 1


def batch(per_device: Any, accumulated: Any, ranks: int) -> Outcome:
    """The pairs of one optimizer step, over all devices."""
    one, times = whole(per_device), whole(accumulated)
    note = f"{one} per device x {times} accumulated x {counted(ranks, 'rank')}"
    return translated({"policy.train_global_batch_size": one * times * ranks}, note)


def validation_batch(key: str, value: Any, given: Given) -> Outcome:
    return translated({"dpo.val_global_batch_size": whole(value) * num_ranks()}, "the metrics do not depend on it")


def betas(key: str, value: Any, given: Given) -> Outcome:
    first, second = given.get("adam_beta1"), given.get("adam_beta2")
    return translated(
        {"policy.optimizer.kwargs.betas": [0.9 if first is None else first, 0.999 if second is None else second]}
    )


def held_out(key: str, value: Any, given: Given) -> Outcome:
    if not value:
        return no_effect("Nothing is held out.")
    if value >= 1:
        return refused(f"tandem holds out a share of the pairs. Set {key} to a share, such as 0.05.")
    return translated({"data.validation_share": value}, "pairs with the same prompt stay together")


def length(key: str, epochs: Any, max_steps: Any) -> Outcome:
    """The length of the run. Steps, if given, count instead of epochs, and take as many epochs as they need."""
    if max_steps is not None and whole(max_steps) > 0:
        if key in ("num_epochs", "num_train_epochs"):
            return no_effect("max_steps is the length of the run.")
        steps = whole(max_steps)  # an epoch has a step or more
        return translated({"dpo.max_num_steps": steps, "dpo.max_num_epochs": steps}, "enough epochs for these steps")
    if epochs != int(epochs):
        return refused("tandem trains complete epochs. Set a whole number of them, or max_steps.")
    return translated({"dpo.max_num_epochs": whole(epochs)})


def schedule(
    name: str, *, warmup_steps: Any, warmup_ratio: Any, settings: dict[str, Any], rate: Any, max_steps: Any
) -> Outcome:
    """A schedule of transformers. `settings`: its further arguments; `rate`: the highest learning rate."""
    if name not in SCHEDULES:
        return refused(
            "tandem has the schedules linear, cosine and constant, each with a warm-up, and torch's. Set one of them, or "
            "policy.scheduler."
        )
    found: dict[str, Any] = {"name": SCHEDULES[name]}
    least = dict(settings)
    if "min_lr" in least:
        least["min_lr_rate"] = round(least.pop("min_lr") / rate, 12)
    if name.startswith("cosine") and least.keys() <= {"min_lr_rate"}:
        found |= {"min_lr_ratio": least["min_lr_rate"]} if least else {}
    elif least:
        return refused(
            f"lr_scheduler_kwargs ({', '.join(map(str, settings))}): the schedule {name} has no such setting here. Leave it "
            "out, or set policy.scheduler."
        )
    steps = warmup_steps or 0
    if name == "constant":
        pass  # transformers' constant schedule has no warm-up
    elif 0 < steps < 1:
        found["warmup_ratio"] = steps
    elif steps and max_steps:
        found["warmup_ratio"] = round(whole(steps) / whole(max_steps), 9)
    elif steps:
        found["warmup_steps"] = whole(steps)
    elif warmup_ratio:
        found["warmup_ratio"] = warmup_ratio
    return translated({"policy.scheduler": found})


def trackers(given: Any, none: str) -> Outcome:
    """Where metrics are sent: a name, or a list of them. `none`: what to say if there is none."""
    names = [given] if isinstance(given, str) else list(given)
    if not names or names == ["none"]:
        return no_effect(none)
    if unknown := [name for name in names if name not in TRACKERS]:
        return refused(
            f"tandem logs to Weights & Biases, TensorBoard and MLflow, not to {', '.join(map(str, unknown))}. Leave it out."
        )
    return translated({f"logger.{name}_enabled": True for name in names})

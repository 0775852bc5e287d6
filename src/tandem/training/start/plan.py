"""Plans the steps of a run: which preferences each step trains on, and how many steps there are.

The schedule is the same on every machine. Row lengths also depend on the device, so setup.py chooses them.
"""

import math
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat

from tandem.config.schema import Config
from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.section import EMBEDDED
from tandem.data.store.sets import Sets
from tandem.errors import ConfigError, DataError
from tandem.packing.batches import Batches
from tandem.packing.packer import DATASET_PACK, Packer, make_packer, prepared_lengths
from tandem.packing.packs import open_packs
from tandem.terminal.printable import counted

# Suggested batch sizes: a set with fewer pairs than the first number of a row gets the second. docs/choosing.md states the rule.
# Very small sets get batches with which three epochs have about 20 steps.
BATCH_SIZES = ((15, 1), (30, 2), (60, 4), (500, 8), (5_000, 32), (50_000, 64))
LARGEST_BATCH = 128  # for more pairs than in any row
# Epochs are suggested that give at least this many steps: with fewer, a learning-rate schedule has hardly begun.
ENOUGH_STEPS = 20
MAX_STEPS = 10_000_000  # limit for a run, because its steps are counted one by one before training


@dataclass(frozen=True, slots=True)
class Schedule:
    """The batch of each step, the number of steps in the run, and the number of pairs in all of these steps."""

    batches: Batches
    num_steps: int
    num_pairs: int
    val_period: int  # steps between validations; <= 0: none
    save_period: int  # steps between checkpoints


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is computed from the data of a run: the sets, how they are packed, and the schedule of steps."""

    sets: Sets
    train: Packer
    validation: dict[str, Packer]  # by name
    rows: str  # the length of the training rows and the reason for it, as printed
    batches: Batches
    num_steps: int
    num_pairs: int  # in those steps
    val_period: int  # steps between validations; <= 0: none
    save_period: int  # steps between checkpoints
    highest_rate: float  # the highest learning rate that the schedule reaches in those steps

    def packers(self) -> dict[str, Packer]:
        """Return the packers of the training set and of every validation set, as a dict from split to packer."""
        return {"train": self.train, **{f"validation-{name}": packer for name, packer in self.validation.items()}}


def plan_steps(sets: Sets, config: Config) -> Schedule:
    """Return the schedule of the run. Raise DataError if the training set is smaller than one batch."""
    _check_weights(sets, config)
    size = config.policy.train_global_batch_size
    batches = Batches(
        sets.train.num_pairs,
        size,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        drop_last=config.data.drop_last,
        spans=sets.spans if any(span.weight != 1 for span in sets.spans) else (),
    )
    unpacked = batches
    if config.policy.packing.mode == "dataset":
        packer = make_packer(
            sets.train, config.policy.packing, usual_auto=DATASET_PACK, pairs_per_batch=size, seed=config.run.seed
        )
        batches = replace(batches, packs=open_packs(packer))
        _check_packs(batches, packer)
    counts = _pairs_per_step(batches, config)
    if not counts:
        raise DataError(
            f"the training set has {counted(batches.num_pairs_of(0), 'pair')}, fewer than one batch of {size}, so there would be "
            f"no step. {_suggest_smaller_batch(unpacked, config)}"
        )
    return Schedule(
        batches,
        num_steps=len(counts),
        num_pairs=sum(counts),
        val_period=_period_in_steps(batches, config.dpo.val_period),
        save_period=_period_in_steps(batches, config.checkpointing.save_period),
    )


def _period_in_steps(batches: Batches, given: float) -> int:
    """Return a number of steps, or a share of an epoch, as a number of steps. 0.25 of an epoch of 10 steps is 2 steps.

    Floating-point error does not count: a third of 9 steps is 3, although 0.3333 * 9 is below 3.
    """
    if isinstance(given, int):
        return given
    return max(1, math.floor(round(given * sum(1 for _ in batches.epoch(0)), 6)))


def _check_weights(sets: Sets, config: Config) -> None:
    """Raise DataError if the weight of a set is so low that an epoch has none of its preferences.

    Example: weight 0.1 for a set of 3 preferences.
    """
    for span, given in zip(sets.spans, config.data.training_sets, strict=False):
        size = span.end - span.start
        if size and round(span.weight * size) == 0:
            raise DataError(
                f"{shown_path(given)}: weight {given.weight:g} of {counted(size, 'preference')} is less than one, "
                f"so no epoch would train on any of them. Raise the weight to {math.ceil(100 / size) / 100:g} or more."
            )


def _pairs_per_step(batches: Batches, config: Config) -> list[int]:
    """Return the number of pairs in each step. Raise ConfigError if the run would have more than MAX_STEPS steps."""
    epochs, most = config.dpo.max_num_epochs, config.dpo.max_num_steps
    first = [batch.num_pairs for batch in batches.epoch(0)]
    is_same_set = batches.packs is None and not batches.spans
    if is_same_set and not first:  # then no other epoch has a batch either
        return []
    if (steps := epochs * len(first)) > MAX_STEPS and (most is None or most > MAX_STEPS):
        raise ConfigError(
            f"dpo.max_num_epochs = {epochs}: the run would have {steps:,} steps, over the limit of {MAX_STEPS:,}. Lower it, or "
            "set dpo.max_num_steps."
        )
    if is_same_set and (batches.num_pairs == 1).all():  # then shuffling does not change the number of pairs in a batch
        return list(islice(chain.from_iterable(repeat(first, epochs)), most))
    return list(islice((batch.num_pairs for epoch in range(epochs) for batch in batches.epoch(epoch)), most))


def suggested_batch_size(num_pairs: int) -> int:
    """Return the batch size that is suggested for a training set of this many pairs. Examples: 40 gives 4, 300 gives 8."""
    return next((size for limit, size in BATCH_SIZES if num_pairs < limit), LARGEST_BATCH)


def _suggest_smaller_batch(batches: Batches, config: Config) -> str:
    """Suggest the batch size for this number of pairs, and enough epochs for ENOUGH_STEPS steps.

    Example: for 45 pairs and 1 epoch, suggest batches of 4 and 2 epochs, which give 22 steps.
    """
    # Batches of whole packs are large, so packing by batch is suggested too.
    mode = "policy.packing.mode=batch " if config.policy.packing.mode == "dataset" else ""
    enough = min(ENOUGH_STEPS, config.dpo.max_num_steps or ENOUGH_STEPS)
    size = min(suggested_batch_size(batches.num_pairs_of(0)), batches.batch_size)
    steps = len(_pairs_per_step(replace(batches, batch_size=size), config))
    longer = config
    while 0 < steps < enough:
        more = longer.dpo.model_copy(update={"max_num_epochs": longer.dpo.max_num_epochs + 1})
        longer = longer.model_copy(update={"dpo": more})
        steps = len(_pairs_per_step(replace(batches, batch_size=size), longer))
    epochs = f" dpo.max_num_epochs={longer.dpo.max_num_epochs}" if longer is not config else ""
    return f"Set {mode}policy.train_global_batch_size={size}{epochs}, which gives {counted(steps, 'step')}."


def _check_packs(batches: Batches, train: Packer) -> None:
    if (most := int(batches.pairs_per_pack().max())) > batches.batch_size:
        others = ", ".join(str(length) for length in sorted(prepared_lengths(train.store)))
        raise ConfigError(
            f"policy.packing.mode = dataset: a pack of {train.length} tokens holds {most} pairs, more than a batch of "
            f"{batches.batch_size}. Raise policy.train_global_batch_size, or lower policy.packing.pack_length"
            f"{f' (prepared lengths: {others})' if others else ''}."
        )


def shown_path(given: DatasetFields) -> str:
    """Return the path of a set as messages show it."""
    return "the bundled pairs" if given.data_path == EMBEDDED else given.data_path or given.dataset_name

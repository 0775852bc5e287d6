"""A run's sets in; its batches, its steps, and the sets in words out. The machine decides nothing of it."""

import math
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat

from tandem.config.schema import Config
from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.section import EMBEDDED
from tandem.data.store.selection import Preferences
from tandem.data.store.sets import Sets
from tandem.errors import ConfigError, DataError
from tandem.packing.batches import Batches
from tandem.packing.packer import DATASET_PACK, Packer, make_packer, prepared_lengths
from tandem.packing.packs import open_packs

# Steps that a batch size is proposed for: with fewer, a schedule has hardly begun.
ENOUGH_STEPS = 20
MAX_STEPS = 10_000_000  # of a run, each of which is counted before it begins


@dataclass(frozen=True, slots=True)
class Plan:
    """Which preferences every step trains on, the number of steps of the whole run, and the pairs in them."""

    batches: Batches
    num_steps: int
    num_pairs: int


def plan_steps(sets: Sets, config: Config) -> Plan:
    """Refused where not even one batch is full."""
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
    whole = batches
    if config.policy.packing.mode == "dataset":
        packer = make_packer(
            sets.train, config.policy.packing, usual_auto=DATASET_PACK, pairs_per_batch=size, seed=config.run.seed
        )
        batches = replace(batches, packs=open_packs(packer))
        _check_packs(batches, packer)
    counts = _counts(batches, config)
    if not counts:
        raise DataError(
            f"the training set has {_counted(batches.num_pairs_of(0))}, fewer than one batch of {size}, so there would be no "
            f"step. {_smaller_batch(whole, config)}"
        )
    return Plan(batches, len(counts), sum(counts))


def _check_weights(sets: Sets, config: Config) -> None:
    """Refuse a set of which no epoch takes a preference: a tenth of 3, rounded, is none."""
    for span, given in zip(sets.spans, config.data.training_sets, strict=False):
        size = span.end - span.start
        if size and round(span.weight * size) == 0:
            raise DataError(
                f"{_path(given)}: weight {given.weight:g} of {size} preference{'s' if size > 1 else ''} is less than one, so "
                f"that no epoch would train on any of them. Raise the weight to {math.ceil(100 / size) / 100:g} or more."
            )


def _counts(batches: Batches, config: Config) -> list[int]:
    """The pairs of every step. A run that would never end is refused before its steps are counted one by one."""
    epochs, most = config.dpo.max_num_epochs, config.dpo.max_num_steps
    first = [batch.num_pairs for batch in batches.epoch(0)]
    is_same_set = batches.packs is None and not batches.spans
    if is_same_set and not first:  # nor has any other epoch a batch
        return []
    if (steps := epochs * len(first)) > MAX_STEPS and (most is None or most > MAX_STEPS):
        raise ConfigError(
            f"dpo.max_num_epochs = {epochs}: a run of {steps:,} steps, over the limit of {MAX_STEPS:,}. Lower it, or set "
            "dpo.max_num_steps."
        )
    if is_same_set and (batches.num_pairs == 1).all():  # then no order changes how many pairs a batch has
        return list(islice(chain.from_iterable(repeat(first, epochs)), most))
    return list(islice((batch.num_pairs for epoch in range(epochs) for batch in batches.epoch(epoch)), most))


def _smaller_batch(batches: Batches, config: Config) -> str:
    """The largest power of two that gives a run enough steps; of very few pairs, batches of one and more epochs.

    45 pairs, 1 epoch: batches of 2, 22 steps. 8 pairs: batches of 1, 3 epochs, 24 steps.
    """
    mode = "policy.packing.mode=batch " if config.policy.packing.mode == "dataset" else ""  # packs make large batches
    enough = min(ENOUGH_STEPS, config.dpo.max_num_steps or ENOUGH_STEPS)
    size = 1 << (batches.batch_size.bit_length() - 1)
    while size > 1 and len(_counts(replace(batches, batch_size=size), config)) < enough:
        size //= 2
    steps = len(_counts(replace(batches, batch_size=size), config))
    longer = config
    while 0 < steps < enough:
        more = longer.dpo.model_copy(update={"max_num_epochs": longer.dpo.max_num_epochs + 1})
        longer = longer.model_copy(update={"dpo": more})
        steps = len(_counts(replace(batches, batch_size=size), longer))
    epochs = f" dpo.max_num_epochs={longer.dpo.max_num_epochs}" if longer is not config else ""
    return f"Set {mode}policy.train_global_batch_size={size}{epochs}, which gives {steps} steps."


def _check_packs(batches: Batches, train: Packer) -> None:
    if (most := int(batches.pairs_per_pack().max())) > batches.batch_size:
        others = ", ".join(str(length) for length in sorted(prepared_lengths(train.store)))
        raise ConfigError(
            f"policy.packing.mode = dataset: a pack of {train.length} tokens holds {most} pairs, more than a batch of "
            f"{batches.batch_size}. Raise policy.train_global_batch_size, or lower policy.packing.pack_length"
            f"{f' (prepared are {others})' if others else ''}."
        )


def sets_in_words(sets: Sets, config: Config) -> list[tuple[str, str]]:
    """Where each set is read from, and its pairs: ("training set", "a.jsonl (10 pairs) and b.jsonl (20 pairs)")"""
    data = config.data
    given = data.training_sets
    names = ["train"] if len(given) == 1 else [f"train-{number}" for number in range(len(given))]
    read = [f"{_path(one)} ({_pairs(sets.read[name])})" for name, one in zip(names, given, strict=True)]
    held_out = f"; {_pairs(sets.train)} without those held out" if data.validation_share else ""
    rows = [("training set" if len(read) == 1 else "training sets", " and ".join(read) + held_out)]
    for name, chosen in sets.validation.items():
        one = data.validation_sets.get(name)
        where = f"{data.validation_share:g} of the training preferences" if one is None else _path(one)
        label = "validation set" if len(sets.validation) == 1 else f"validation set {name}"
        rows.append((label, f"{where} ({_pairs(chosen)})"))
    return rows if sets.validation else [*rows, ("validation set", "none")]


def _path(given: DatasetFields) -> str:
    return "the bundled pairs" if given.data_path == EMBEDDED else given.data_path or given.dataset_name


def _pairs(preferences: Preferences) -> str:
    return _counted(int(preferences.num_pairs.sum()))


def _counted(num_pairs: int) -> str:
    return f"{num_pairs:,} pair{'s' if num_pairs != 1 else ''}"

"""Checks before training that all ranks computed the same values from the configuration.

Each rank computes rows, packs and batches independently. If two ranks differed, some pairs would be trained twice and others
never, or the ranks would wait for each other forever.
"""

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tandem import __version__
from tandem.config.validation import flatten
from tandem.errors import RanksDifferError
from tandem.model.distributed.process_group import Ranks
from tandem.packing.batches import Batches
from tandem.packing.packer import Packer
from tandem.storage.cache import real_path
from tandem.training.start.setup import Setup

# Settings that may differ between machines: the number of tokenising workers, and paths. Their contents are compared instead.
PER_MACHINE = (
    "run.name",
    "run.dir",
    "data.train",
    "data.validation",
    "data.val_data_paths",
    "data.num_workers",
    "policy.model_name",
    "policy.tokenizer.name",
    "reference.model",
    "reference.cache_dir",
    "checkpointing.checkpoint_dir",
    "logger.log_dir",
)
COMPARED_BATCHES = 2  # the packs of this many batches are compared
MAX_SHOWN = 3  # differences in a message; the most likely causes come first


def derived(setup: Setup, run: Path) -> dict[str, str]:
    """Return a dict of all values that are computed before weights load and affect training. Long values are hashed.

    The keys of the dict are phrases that name the values in messages.
    """
    facts: dict[str, Any] = {
        "the version of tandem": __version__,
        "the version of torch": torch.__version__,
        "the version of transformers": transformers.__version__,
        **{key: value for key, value in flatten(setup.config.model_dump(mode="json")).items() if _is_shared(key)},
        "the kind of device": setup.device.type,
        "the precision": setup.precision,
        "compiled layers": setup.compiles,
        "the directory of checkpoints": real_path(setup.checkpoint_dir(run)),
        "the number of steps": setup.plan.num_steps,
        "the number of pairs": setup.plan.num_pairs,
        "the batches": _digest_of_batches(setup.plan.batches),
        "the pairs packed together in validation": setup.validation_batch_size,
    }
    for split, packer in setup.plan.packers().items():
        facts |= _packer_facts(split, packer)
    for number, batch in enumerate(setup.plan.batches.epoch(0)[:COMPARED_BATCHES], start=1):
        rounds = setup.plan.train.rounds(batch.preferences, batch.bounds)
        facts[f"the number of rounds of batch {number}"] = len(rounds)
        packs = [part for one in rounds for part in (np.array([one.length, len(one.packs)]), *one.packs)]
        facts[f"the packs of batch {number}"] = _digest(*packs, np.array([len(part) for part in packs]))
    return {name: str(value) for name, value in facts.items()}


def _packer_facts(split: str, packer: Packer) -> dict[str, Any]:
    return {
        f"the data of {split}": packer.store.fingerprint,
        f"the row lengths of {split}": ", ".join(map(str, packer.lengths)),
        f"the arrangement of {split}": packer.arrangement,
        f"the packing algorithm of {split}": packer.algorithm,
        f"the packs per micro-batch of {split}": packer.packs_per_micro_batch,
        f"the seed of packing {split}": packer.seed,
        f"the tokens in rows of {split}": _digest(packer.sizes),
        f"the costs of rows of {split}": "none" if packer.costs is None else _digest(packer.costs),
    }


def _is_shared(key: str) -> bool:
    return not any(key == one or key.startswith(f"{one}.") for one in PER_MACHINE)


def _digest_of_batches(batches: Batches) -> str:
    """Return a hash of the batches of the first epoch.

    Later epochs are computed from the same settings, so they need no comparison.
    """
    epoch = batches.epoch(0)
    ends = np.cumsum([len(batch.preferences) for batch in epoch])
    bounds = [batch.bounds for batch in epoch if batch.bounds is not None]
    return _digest(ends, *(batch.preferences for batch in epoch), *bounds)


def _digest(*parts: Any) -> str:
    made = blake2b(digest_size=16)
    for part in parts:
        made.update(np.ascontiguousarray(part).tobytes())
    return made.hexdigest()


def refuse_different_ranks(ranks: Ranks, facts: Callable[[], dict[str, str]]) -> None:
    """Raise RanksDifferError on all ranks if a value differs between ranks.

    `facts`: a function that returns the values of this rank, as a dict from description to value.
    """
    if ranks.count == 1:
        return
    of_ranks = ranks.gather(facts())

    def compare() -> None:
        if found := differences(of_ranks):
            shown = "\n".join(f"  {one}" for one in found[:MAX_SHOWN])
            more = f"\n  and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
            raise RanksDifferError(
                f"the ranks differ and would not train the same model:\n{shown}{more}\nNothing was trained. Start every rank "
                "with the same command, data, model and versions of tandem, torch and transformers."
            )

    ranks.run_or_stop_all(compare, on=ranks.is_first)


def differences(of_ranks: list[dict[str, str]]) -> list[str]:
    """Describe each value that differs between ranks, as in "the precision: float32 on rank 0; bfloat16 on ranks 1, 2"."""
    names = dict.fromkeys(name for facts in of_ranks for name in facts)
    found = []
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, facts in enumerate(of_ranks):
            ranks.setdefault(facts.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            each = (
                f"{value} on rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))}"
                for value, those in ranks.items()
            )
            found.append(f"{name}: {'; '.join(each)}")
    return found

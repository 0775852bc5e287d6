"""Audits the policy and makes the reference of every set.

The audit comes first, so that values of a wrong model are not cached.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from tandem.failpoints import fail_point
from tandem.model.checks.audit import Audit, audit, audit_reference, start_loss_verdict
from tandem.model.checks.trial import check_forward
from tandem.model.distributed.layers import compile_layers, freeze, recompute, shard
from tandem.model.distributed.process_group import Ranks
from tandem.model.files.source import ModelSource, weights_fingerprint
from tandem.model.load import as_policy, attention_kind, load_policy, unloaded_model
from tandem.model.lora.adapters import adapt_unloaded, load_adapted, read_weights
from tandem.model.lora.fingerprints import rounds_frozen_weights
from tandem.model.lora.layers import LoraPlan
from tandem.model.policy import Policy
from tandem.model.reference import (
    CachedReference,
    LiveReference,
    NoReference,
    Reference,
    cached_reference,
    is_intact,
    is_reference_name,
    reference_name,
    tokens_prefix,
)
from tandem.packing.packer import Packer
from tandem.report.reporter import Reporter
from tandem.storage.cache import cache_dir, read_json, write_atomically
from tandem.storage.ownership import remove_abandoned
from tandem.training.checkpoint.checkpoints import checkpoints
from tandem.training.start.setup import Setup
from tandem.training.validation import portions

# The file of a run that names the cache folders of the references it started with.
REFERENCES_FILE = "references.json"


def load_sharded(setup: Setup, source: ModelSource, ranks: Ranks, lora: LoraPlan | None = None) -> Policy:
    """Load a model, and apply activation checkpointing, sharding and compilation to its layers as configured.

    If possible, each of several ranks reads only its own shards of the weights.
    """
    config, read = setup.config.policy, None
    dtype, is_quantised = (setup.weights_dtype, False) if lora is None else (lora.dtype, lora.quantization is not None)
    # The weights of modules that an adapter trained in full are not in the files of the model.
    is_replaced = lora is not None and lora.start is not None and bool(lora.saved.modules)
    by_rows = ranks.count > 1 and not is_quantised and not is_replaced
    if by_rows and (unloaded := unloaded_model(source, config, dtype)) is not None:
        if lora is not None:
            adapt_unloaded(unloaded.model, lora, source)
        policy = as_policy(unloaded.model, source, config, ranks.device)
        read = partial(read_weights, source, unloaded, ranks.device, lora)
    elif lora is not None:
        policy = load_adapted(source, config, ranks.device, lora)
    else:
        policy = load_policy(source, config, ranks.device, dtype=setup.weights_dtype)
    fail_point("weights.load")
    if config.activation_checkpointing != "none":
        recompute(policy, config.activation_checkpointing)
    given: dict[str, Any] = {
        "reshard_after_forward": config.parallel.reshard_after_forward,
        "reduce_once": config.parallel.reduces_once(ranks.shape.weight_shards),
        "read": read,
    }
    shard(policy, ranks, bfloat16=setup.precision == "bfloat16", **given)
    if read is not None:
        check_forward(policy, source, ranks.device, longest=config.max_total_sequence_length, is_sharded=True)
    if setup.compiles:
        compile_layers(policy)
    return policy


def make_references(
    setup: Setup,
    policy: Policy,
    run: Path,
    ranks: Ranks,
    weights: str,
    reporter: Reporter,
    check: Callable[[], None],
    *,
    only_validation: bool = False,
) -> dict[str, Reference]:
    """Return the references of the training set and of every validation set, as a dict from split to reference.

    `weights`: the fingerprint of the start model. `check`: called during long computations; it may raise to stop the run.
    `only_validation`: leave out the training set, and write nothing to the run directory.
    """
    reporter.start_times.begin("reference")
    packers = setup.plan.packers()
    if only_validation:
        del packers["train"]
    if not setup.uses_reference:
        return dict.fromkeys(packers, NoReference())
    other = setup.reference_source
    source, lora = (setup.source, setup.lora) if other is None else (other, None)

    @cache
    def load() -> Policy:
        """Load the reference as a separate model. Audit the reference if it is not the start model."""
        loaded = freeze(load_sharded(setup, source, ranks, lora))
        if other is not None:
            audit_model(setup, loaded, other, ranks, reporter=reporter)
        return loaded

    if setup.config.reference.mode == "live":
        return dict.fromkeys(packers, LiveReference(load()))
    if other is not None:
        weights = ranks.one_then_all(lambda: weights_fingerprint(other))
    folder = Path(setup.config.reference.cache_dir or cache_dir() / "reference")
    ranks.run_or_stop_all(lambda: remove_abandoned(folder, ".+", is_held=False), on=ranks.is_first_here)
    places = _places_of_references(setup, packers, run, folder, weights, ranks, reporter)
    # Before the first update the policy equals the reference, unless reference.model names another model.
    model = load if other is not None else lambda: policy
    references: dict[str, Reference] = {
        name: _cached(setup, name, packer, folder / places[name], model, ranks, reporter=reporter, check=check)
        for name, packer in packers.items()
    }
    text = json.dumps(places, indent=1)
    is_writer = ranks.is_first and not only_validation
    ranks.run_or_stop_all(lambda: write_atomically(run / REFERENCES_FILE, text, "references"), on=is_writer)
    return references


def _cached(
    setup: Setup,
    split: str,
    packer: Packer,
    place: Path,
    model: Callable[[], Policy],
    ranks: Ranks,
    *,
    reporter: Reporter,
    check: Callable[[], None],
) -> CachedReference:
    """Return the cached reference of one set. If `place` does not hold it yet, compute it with a progress bar."""
    with reporter.progress(f"Reference, {split}", len(packer.store)) as done:

        def advance(count: int) -> None:
            done(count)
            check()

        return cached_reference(
            model,
            packer,
            ranks,
            place=place,
            progress=advance,
            # Packed as in a validation, so that the first validation finds policy and reference exactly equal.
            portions=None if packer is setup.plan.train else portions(packer, setup.validation_batch_size),
        )


def _places_of_references(
    setup: Setup,
    packers: dict[str, Packer],
    run: Path,
    folder: Path,
    weights: str,
    ranks: Ranks,
    reporter: Reporter,
) -> dict[str, str]:
    """Return the name of the cache folder for the reference of each set.

    The name depends on everything that affects the cached values, even if only by rounding. Some of this may change when a run is
    resumed: the version of transformers, the attention implementation, shared prompts. A resumed run therefore keeps the folders
    that it started with, if they still exist.
    """
    policy = setup.config.policy
    rounded = setup.reference_source is None and rounds_frozen_weights(setup.source, setup.lora)
    computed = {
        "transformers": transformers.__version__,
        # Loading weights in bfloat16 rounds differently than casting them to it later.
        "precision": f"{setup.precision}, {setup.weights_dtype} weights{', frozen in bfloat16' if rounded else ''}",
        "attention": "unpacked"
        if policy.packing.mode == "none"
        else attention_kind(policy, setup.device, setup.source.config),
    }
    places = {
        name: reference_name(weights, packer.store.tokens_fingerprint, arrangement=packer.arrangement, **computed)
        for name, packer in packers.items()
    }
    started = ranks.from_first(lambda: _started_with(run) if checkpoints(setup.checkpoint_dir(run)) else {})
    for name, packer in packers.items():
        before = started.get(name, places[name])
        if before == places[name] or not before.startswith(tokens_prefix(packer.store.tokens_fingerprint)):
            continue
        # If the old folder is gone, the values are not recomputed under its name: its name describes other settings.
        num_values = int(packer.store.num_scored_tokens.sum())
        intact = ranks.run_or_stop_all(
            lambda place=folder / before, num=num_values: is_intact(place, num), on=ranks.is_first_here
        )
        if not ranks.highest(intact is False):  # on any machine
            places[name] = before
        else:
            reporter.warn(
                f"the reference that {run} started with ({name}) is no longer in {folder}: it is recomputed with "
                f"transformers {transformers.__version__}, and may differ by rounding."
            )
    return places


def _started_with(run: Path) -> dict[str, str]:
    """Return the cache folders of the references that a run started with, as a dict from split to folder name.

    The dict is empty if the file is missing or damaged.
    """
    try:
        found = read_json(run / REFERENCES_FILE)
    except ValueError:
        return {}
    kept = found.items() if isinstance(found, dict) else ()
    return {name: folder for name, folder in kept if isinstance(folder, str) and is_reference_name(folder)}


def audit_model(setup: Setup, policy: Policy, source: ModelSource, ranks: Ranks, reporter: Reporter) -> Audit:
    """Check that packed and plain forward passes of a model agree. The model is the policy or a separate reference model."""
    reporter.start_times.begin("audit")
    model = source.place
    with policy.computing():
        found = audit(policy, setup.plan.train, ranks, precision=setup.precision, model=model)
    rows, whose = "packed" if policy.packed else "padded", "" if source is setup.source else f" of {model}"
    reporter.say(
        f"Audit{whose}: {len(found.completions)} completions of up to {found.longest:,} tokens, {rows} = plain forward to "
        f"{found.plain_difference:.1e} nats per token"
        + ("" if found.state_gradients is None else f"; gradients of recurrent layers to {found.state_gradients:.1e}")
    )
    if found.num_longer:
        part = ", so of the shortest only a part is audited" if found.is_cut else ""
        reporter.say(
            f"  not audited: {found.num_longer:,} longer preferences, whose eager forward may not fit in memory{part}"
        )
    return found


def audit_start(
    setup: Setup,
    policy: Policy,
    found: Audit,
    references: dict[str, Reference],
    ranks: Ranks,
    reporter: Reporter,
) -> None:
    """Check that policy and reference agree, if the reference is the start model. Print the start model's loss on the data."""
    is_start_model = setup.uses_reference and setup.reference_source is None
    if is_start_model:
        with policy.computing():
            difference = audit_reference(policy, found, references["train"], ranks)
        reporter.say(f"  policy = reference to {difference:.1e} nats per token")
    else:
        reporter.say(f"  policy and reference are not compared: {_why_not_compared(setup)}")
    reporter.say("Start model on the chosen completions")
    packers = setup.plan.packers()
    for split, reference in references.items():
        # A cache has the whole set. Without a cache, only the loss of the audited completions is known.
        if is_start_model and isinstance(reference, CachedReference):
            nats = _chosen_nats(packers[split], reference)
        elif split == "train":
            nats = found.chosen_nats
        else:
            continue
        reporter.say(f"  {split}: {start_loss_verdict(nats, setup.source.vocabulary)}")


def _why_not_compared(setup: Setup) -> str:
    return "the reference is another model" if setup.uses_reference else "the loss has no reference"


def _chosen_nats(packer: Packer, reference: CachedReference) -> float:
    """Return the mean loss per token of the best completions under the start model, over at most 10,000 preferences."""
    total = tokens = 0.0
    for index in range(min(len(packer.store), 10_000)):
        preference = packer.store[index]
        best = preference.pairs[0][0]
        start = sum(len(preference.scored(number)) for number in range(best))
        part = reference.of_preference(index)[start : start + len(preference.scored(best))]
        total -= float(np.sum(part, dtype=np.float64))
        tokens += len(part)
    return total / tokens

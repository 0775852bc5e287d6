"""A configuration in; a finished run directory out. Everything is built first; then the loop, which reads aloud."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.cache import cache_dir
from tandem.config.load import LoadedConfig
from tandem.config.schema import EMBEDDED
from tandem.data.selection import Preferences
from tandem.errors import ConfigError
from tandem.export import export_model
from tandem.model.audit import audit, start_loss_verdict
from tandem.model.load import ModelSource, find_model, load_policy, weights_fingerprint
from tandem.model.parallel import Workers, compile_layers, shard, start_workers
from tandem.model.policy import Policy
from tandem.model.reference import CachedReference, LiveReference, NoReference, Reference, cached_reference
from tandem.packing.layout import join
from tandem.packing.loader import load_ahead
from tandem.packing.packer import Packer
from tandem.packing.schedule import GlobalBatch
from tandem.train.checkpoint import (
    Progress,
    checkpoints,
    load_checkpoint,
    newest_verified,
    prune,
    remove_leftovers,
    save_checkpoint,
)
from tandem.train.metrics import PairTable
from tandem.train.optimizer import make_optimizer, make_scheduler
from tandem.train.per_pair import PerPairFile, check_per_pair
from tandem.train.report import MetricsFile, Reporter
from tandem.train.rundir import choose_run_dir, held, is_finished
from tandem.train.setup import Setup, set_up
from tandem.train.step import PendingStep, train_step
from tandem.train.terms import Side
from tandem.train.validation import ValidationReport, ValidationSet, measure, validate
from tandem.train.verdicts import judge


@dataclass(slots=True)
class Training:
    """What the loop works on."""

    setup: Setup
    run: Path
    policy: Policy
    side: Side
    validation_sets: list[ValidationSet]
    optimizer: Any
    scheduler: Any
    fingerprints: dict[str, str]
    reporter: Reporter
    metrics: MetricsFile
    progress: Progress


def train(loaded: LoadedConfig, reporter: Reporter, *, fresh: bool = False, per_pair: Path | None = None) -> Path:
    """Run to the end, or go on with an unfinished run; return its directory.

    per_pair: a file for the numbers of every pair of every set at the end.
    """
    if per_pair is not None:
        check_per_pair(per_pair)
    run = choose_run_dir(loaded, fresh=fresh)
    if is_finished(run) and per_pair is not None:
        raise ConfigError(
            f"--per-pair {per_pair}: {run} is finished, and the file is written at a run's end. Add --fresh."
        )
    if is_finished(run):
        reporter.say(f"{run} is finished: its model is in {run}/model.")
        return run
    workers = start_workers()
    setup = set_up(loaded.config, workers.device, reporter.progress)
    with held(run):
        reporter.say(f"Run directory: {run}{', going on' if checkpoints(run / 'checkpoints') else ''}")
        (run / "config.yaml").write_text(loaded.as_yaml(), encoding="utf-8")
        _gather_rejects(setup, run)
        reporter.preflight(setup.preflights())
        reporter.choices(setup.choices())
        _warn_of_short_run(setup, reporter)
        training = _build(setup, run, workers, reporter)
        try:
            before = _loop(training)
            _finish(training, before, per_pair)
        except KeyboardInterrupt:
            reporter.warn(_what_is_kept(training))
            raise
    return run


def _warn_of_short_run(setup: Setup, reporter: Reporter) -> None:
    wanted = setup.config.policy.optimizer.kwargs.lr
    if setup.highest_rate < 0.99 * wanted:
        reporter.warn(
            f"in {setup.num_steps} steps the learning rate never rises above {setup.highest_rate:g} of {wanted:g}. "
            "More epochs, a smaller batch, or another policy.scheduler (null: no warm-up)."
        )


def _what_is_kept(t: Training) -> str:
    place, _ = newest_verified(t.run / "checkpoints")
    kept = (
        f"The newest checkpoint is {place}; the same command goes on from it."
        if place
        else "No checkpoint was saved yet."
    )
    return f"interrupted in step {t.progress.step}. {kept}"


def _build(setup: Setup, run: Path, workers: Workers, reporter: Reporter) -> Training:
    """Weights, reference, audit, optimizer; and the newest checkpoint put back, if there is one."""
    config = setup.config
    torch.manual_seed(config.run.seed)
    reporter.say("\nLoading the model")
    policy = _load(setup, setup.source, workers)
    weights = weights_fingerprint(setup.source)
    references = _references(setup, policy, workers, weights, reporter)
    _audit(setup, policy, references, reporter)
    if setup.compiles:
        _compile_every_length(setup, policy, reporter)
    side = Side(references["train"], config.dpo, workers, setup.precision)
    optimizer = make_optimizer(policy.parameters(), config.policy)
    scheduler = make_scheduler(optimizer, config.policy)
    fingerprints = {"training data": setup.train.store.fingerprint, "start model": weights}
    progress = Progress(step=0, epoch=0, batch=0, metrics_bytes=0, val_loss=None)
    remove_leftovers(run / "checkpoints")
    place, damaged = newest_verified(run / "checkpoints")
    for problem in damaged:
        reporter.warn(f"{problem}. Falling back to an earlier checkpoint.")
    if place is not None:
        progress = load_checkpoint(place, policy, optimizer, scheduler, fingerprints)
        reporter.say(f"Going on from {place}")
    validation_sets = [
        ValidationSet(
            name,
            packer,
            Side(references[f"validation-{name}"], config.dpo, workers, setup.precision),
            config.dpo.val_global_batch_size or config.policy.train_global_batch_size,
            config.dpo.val_batches if (config.dpo.val_batches or 0) > 0 else None,
        )
        for name, packer in setup.validation.items()
    ]
    metrics = MetricsFile(run / "metrics.jsonl", progress.metrics_bytes)
    return Training(
        setup, run, policy, side, validation_sets, optimizer, scheduler, fingerprints, reporter, metrics, progress
    )


def _compile_every_length(setup: Setup, policy: Policy, reporter: Reporter) -> None:
    """One row of each length, forward and backward, before the first step: later steps then never stop to compile."""
    packer = setup.train
    smallest = int(np.argmin(packer.sizes))
    lengths = [length for length in packer.lengths if length >= packer.sizes[smallest]]
    with reporter.progress("Compiling", len(lengths)) as done:
        for length in lengths:
            rows = [packer.row([smallest], length)] * packer.packs_per_micro_batch
            policy(policy.inputs(join(rows), setup.device)).sum().backward()
            done()
    policy.zero_grad()


def _load(setup: Setup, source: ModelSource, workers: Workers) -> Policy:
    policy = load_policy(source, setup.config.policy, workers.device)
    shard(policy, workers, bfloat16=setup.precision == "bfloat16")
    if setup.compiles:
        compile_layers(policy)
    return policy


def _references(
    setup: Setup, policy: Policy, workers: Workers, weights: str, reporter: Reporter
) -> dict[str, Reference]:
    """The reference for the training set and every validation set, by split."""
    packers = setup.packers()
    if not setup.compares:
        return dict.fromkeys(packers, NoReference())
    if setup.config.reference.mode == "live":
        frozen = _load(setup, setup.source, workers).requires_grad_(False)
        return dict.fromkeys(packers, LiveReference(frozen))
    folder = Path(setup.config.reference.cache_dir or cache_dir() / "reference")
    references: dict[str, Reference] = {}
    for name, packer in packers.items():
        with reporter.progress(f"Reference, {name}", len(packer.store)) as done:
            references[name] = cached_reference(
                policy,
                packer,
                workers.device,
                folder=folder,
                weights=weights,
                precision=setup.precision,
                progress=done,
            )
    return references


def _audit(setup: Setup, policy: Policy, references: dict[str, Reference], reporter: Reporter) -> None:
    same = setup.compares
    found = audit(policy, references["train"], setup.train, setup.device, precision=setup.precision, same_start=same)
    reporter.say(
        f"Audit: {found.num_completions} completions, packed = plain forward to {found.plain_difference:.1e} nats a token"
        + (f", policy = reference to {found.reference_difference:.1e}" if same else "; the loss has no reference")
    )
    reporter.say("Start model on the chosen completions")
    packers = setup.packers()
    for split, reference in references.items():
        # Read from the cache over the whole set; a live reference knows only what the audit looked at.
        if isinstance(reference, CachedReference):
            nats = _chosen_nats(packers[split], reference)
        elif split == "train":
            nats = found.chosen_nats
        else:
            continue
        reporter.say(f"  {split}: {start_loss_verdict(nats, setup.source.vocabulary)}")


def _chosen_nats(packer: Packer, reference: CachedReference) -> float:
    """Mean loss per token of the best completions under the start model."""
    total = tokens = 0.0
    for index in range(min(len(packer.store), 10_000)):
        preference = packer.store[index]
        best = preference.pairs[0][0]
        start = sum(len(preference.scored(number)) for number in range(best))
        part = reference.of_preference(index)[start : start + len(preference.scored(best))]
        total -= float(np.sum(part, dtype=np.float64))
        tokens += len(part)
    return total / tokens


def _loop(t: Training) -> list[ValidationReport]:
    """Train to the last step; return the validation before the first."""
    dpo, total = t.setup.config.dpo, t.setup.num_steps
    before: list[ValidationReport] = []
    if dpo.val_at_start and t.progress.step == 0:
        before = _validate(t)
        t.reporter.validations("\nValidation before training", before)
    t.reporter.say("")
    unread: list[tuple[int, PendingStep, float]] = []
    max_grad_norm = t.setup.config.policy.max_grad_norm
    with t.reporter.progress("Training", total, done=t.progress.step) as bar:
        for place, loaded in zip(_places(t), load_ahead(_remaining(t), t.setup.train), strict=True):
            t.progress, step = place, place.step
            current = train_step(t.policy, t.side, loaded.packs, loaded.batch, t.optimizer, max_grad_norm)
            t.scheduler.step()
            unread.append((step, current, loaded.wait_seconds))
            validating, saving = _due(step, dpo.val_period, total), _saving(t, step)
            # A step is read once it is done, at most one step late: reading earlier would make the device wait.
            while unread and (len(unread) > 1 or validating or saving or step == total or unread[0][1].is_done()):
                _report(t, *unread.pop(0), bar)
            if validating:
                t.reporter.validations(f"\nValidation after step {step}", _validate(t))
            if saving:
                _save(t)
    return before


def _places(t: Training) -> Iterator[Progress]:
    """Where the run stands after each step still to do."""
    place = t.progress
    epoch, done = place.epoch, place.batch
    while place.step < t.setup.num_steps:
        for number in range(done + 1, len(t.setup.batches.epoch(epoch)) + 1):
            if place.step == t.setup.num_steps:
                return
            place = replace(t.progress, step=place.step + 1, epoch=epoch, batch=number)
            yield place
        epoch, done = epoch + 1, 0


def _remaining(t: Training) -> Iterator[GlobalBatch]:
    """The batches of those steps."""
    epoch, done, left = t.progress.epoch, t.progress.batch, t.setup.num_steps - t.progress.step
    while left:
        batches = t.setup.batches.epoch(epoch)[done : done + left]
        yield from batches
        epoch, done, left = epoch + 1, 0, left - len(batches)


def _due(step: int, period: int, total: int) -> bool:
    return period > 0 and step % period == 0 and step != total


def _saving(t: Training, step: int) -> bool:
    checkpointing = t.setup.config.checkpointing
    return checkpointing.enabled and _due(step, checkpointing.save_period, t.setup.num_steps)


def _report(t: Training, step: int, pending: PendingStep, waited: float, bar: Any) -> None:
    """Read a step's numbers, write and show them."""
    report = pending.read(t.setup.train.store)
    record = {
        "step": step,
        "split": "train",
        **report.metrics,
        "lr": report.lr,
        "num_pairs": report.num_pairs,
        "num_tokens": report.num_tokens,
        "pack_fill": report.pack_fill,
        "step_seconds": report.seconds,
        "loader_wait_seconds": waited,
        "pairs_per_second": report.num_pairs / report.seconds,
        "tokens_per_second": report.num_tokens / report.seconds,
    }
    t.metrics.write(record)
    t.reporter.step(record, t.setup.num_steps)
    bar(1, f"loss {record['loss']:.4f} accuracy {record['accuracy']:.3f}")


def _validate(t: Training) -> list[ValidationReport]:
    reports = []
    for validation in t.validation_sets:
        report = validate(t.policy, validation)
        t.metrics.write(
            {"step": t.progress.step, "split": report.split, **report.metrics, "num_pairs": report.num_pairs}
        )
        reports.append(report)
    if reports:
        t.progress = replace(t.progress, val_loss=reports[0].metrics["loss"])
    return reports


def _save(t: Training, metrics_bytes: int | None = None) -> None:
    folder = t.run / "checkpoints"
    t.progress = replace(t.progress, metrics_bytes=t.metrics.size() if metrics_bytes is None else metrics_bytes)
    place = save_checkpoint(folder, t.policy, t.optimizer, t.progress, t.fingerprints)
    prune(folder, t.setup.config.checkpointing.keep_top_k)
    t.reporter.detail(f"saved {place}")


def _finish(t: Training, before: list[ValidationReport], per_pair: Path | None) -> None:
    """Validate, save, judge, export; measure what was exported; say where everything is."""
    config = t.setup.config
    # A run killed from here on repeats the last validation: its lines do not belong to the checkpoint.
    trained_bytes = t.metrics.size()
    after = _validate(t) if config.dpo.val_at_end else []
    if config.checkpointing.enabled:
        _save(t, trained_bytes)
    verdicts = judge(t.metrics.records())
    (t.run / "verdicts.json").write_text(json.dumps([asdict(one) for one in verdicts], indent=2), encoding="utf-8")
    if per_pair is not None:
        _write_per_pair(t, per_pair)
    model = t.run / "model"
    dtype = t.setup.source.dtype if config.export.dtype == "auto" else getattr(torch, config.export.dtype)
    export_model(
        t.policy,
        t.setup.source.config,
        t.setup.template,
        model,
        dtype=dtype,
        rounding=config.export.rounding,
        seed=config.run.seed,
    )
    if before:
        t.reporter.change("\nValidation", ("before", "after"), before, after)
    else:
        t.reporter.validations("\nValidation after training", after)
    _measure_export(t, model, dtype, after)
    t.reporter.say("\nVerdict")
    for verdict in verdicts:
        t.reporter.say(f"  {verdict.split}: {verdict.text}")
    t.reporter.say(f"\nDone. Everything is in {t.run}")
    t.reporter.say(f"  {model}  the aligned model ({str(dtype).removeprefix('torch.')}), in the Hugging Face layout")
    t.reporter.say(f"  {t.run}/metrics.jsonl  every step and validation")
    if per_pair is not None:
        t.reporter.say(f"  {per_pair}  every pair, those the model disagrees with most first")
    if config.checkpointing.enabled and t.validation_sets:
        t.reporter.say(f"  {t.run}/checkpoints/best  the best checkpoint by validation loss")
    elif config.checkpointing.enabled:
        t.reporter.say(f"  {t.run}/checkpoints/latest  the newest checkpoint")
    if config.policy.model_name == EMBEDDED:
        given = [one.data_path for one in config.data.training_sets]
        own = (
            "your own pairs (JSONL with prompt, chosen, rejected) and your own model"
            if EMBEDDED in given
            else "your own model"
        )
        t.reporter.say(f"\nNext: {own}:")
        paths = "PAIRS.jsonl" if EMBEDDED in given else given[0]
        t.reporter.say(f"  tandem train policy.model_name=MODEL data.train.data_path={paths}")
    else:
        call = f"pipeline('text-generation', '{model}')([{{'role': 'user', 'content': 'Hello'}}])"
        t.reporter.say(f'\nNext: use it.\n  python -c "from transformers import pipeline; print({call})"')


def _write_per_pair(t: Training, path: Path) -> None:
    """The policy as it is now, on every pair of the training set and of the validation sets."""
    sides = {"train": t.side, **{validation.split: validation.side for validation in t.validation_sets}}
    batch_size = t.setup.config.policy.train_global_batch_size

    def tables() -> Iterator[tuple[str, PairTable, Preferences]]:
        for split, packer in t.setup.packers().items():
            yield split, measure(t.policy, sides[split], packer, batch_size), packer.store

    PerPairFile(path, t.setup.config.dpo).write(tables())


def _measure_export(t: Training, model: Path, dtype: torch.dtype, after: list[ValidationReport]) -> None:
    """Validate the folder that was written, beside the model in memory: rounding must not have cost the learning."""
    if not after:
        return
    exported = _reload(t, model)
    reports = [validate(exported, validation) for validation in t.validation_sets]
    for report in reports:
        t.metrics.write(
            {
                "step": t.progress.step,
                "split": report.split.replace("validation-", "exported-"),
                **report.metrics,
                "num_pairs": report.num_pairs,
            }
        )
    name = str(dtype).removeprefix("torch.")
    t.reporter.change("\nWhat was exported", ("in memory", f"exported ({name})"), after, reports)


def _reload(t: Training, model: Path) -> Policy:
    config = t.setup.config.policy.model_copy(update={"model_name": str(model), "revision": None})
    return _load(t.setup, find_model(config), t.side.workers)


def _gather_rejects(setup: Setup, run: Path) -> None:
    """`rejects.jsonl`: every row that was left out, of all sets, with its place and reason."""
    with (run / "rejects.jsonl").open("w", encoding="utf-8") as out:
        for split, store in setup.sets.read.items():
            with (store.folder / "rejects.jsonl").open(encoding="utf-8") as rejects:
                out.writelines(json.dumps({"split": split, **json.loads(line)}) + "\n" for line in rejects)

"""Trains a run from its configuration to its exported model: set up, build, loop, finish."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.config.compat.show import full_table
from tandem.config.load import LoadedConfig
from tandem.config.sections.checkpointing import Checkpointing
from tandem.data.preflight import preflights
from tandem.data.store.sets import write_rejects
from tandem.errors import AlreadyReportedError, AuditError, DefectError, NonFiniteError, StoppedError
from tandem.exporting.cached import export_named_checkpoints
from tandem.model.distributed.machines import join_machines, num_ranks_here
from tandem.model.distributed.process_group import Ranks, compute_deterministically, join_process_group
from tandem.packing.batches import GlobalBatch, load_ahead
from tandem.packing.packer import RankShare
from tandem.page.stored import Described, write_setup
from tandem.report.choices import describe_choices, describe_computation
from tandem.report.per_pair import check_per_pair
from tandem.report.reporter import Reporter
from tandem.report.setup_warnings import setup_warnings, unreached_limit
from tandem.report.translation import say_translation
from tandem.storage.cache import write_atomically
from tandem.storage.ownership import remove_abandoned
from tandem.terminal.arguments import same_call
from tandem.terminal.printable import counted
from tandem.training.checkpoint.checkpoints import Progress, checkpoints, refuse_taken_names, step_of
from tandem.training.memory import device_memory, out_of_memory_error, peak_memory_gib, suggest_less_memory
from tandem.training.run.callbacks import Callbacks
from tandem.training.run.directory import (
    TEMPORARY_NAMES,
    TRANSLATION_FILE,
    choose_run_dir,
    earlier_run,
    is_finished,
    may_be_extended,
    refuse_others_checkpoints,
)
from tandem.training.run.early_stopping import is_exhausted, must_be_kept, restore_exported
from tandem.training.run.extension import check_extension, refuse_shortening
from tandem.training.run.finish import finish, write_per_pair
from tandem.training.run.lock import locked
from tandem.training.run.stopping import Stopping, stopped_by_signals
from tandem.training.start.agreement import derived, refuse_different_ranks
from tandem.training.start.build import Training, build, writes_page
from tandem.training.start.setup import Setup, set_up
from tandem.training.step import PendingStep, train_step
from tandem.training.validation import ValidationReport


def train(
    loaded: LoadedConfig,
    reporter: Reporter,
    *,
    fresh: bool = False,
    per_pair: Path | None = None,
    callbacks: Callbacks | None = None,
) -> Path:
    """Train a new run to its end, or resume an unfinished one. Return the run's directory.

    `per_pair`: a file to which the metrics of every pair are written after training.
    """
    reporter.start_times.begin("device and ranks")
    if loaded.config.run.deterministic:
        compute_deterministically()
    ranks = join_process_group(loaded.config.policy.parallel)
    if not ranks.is_first:
        reporter = Reporter("silent")
    try:
        return _train(loaded, reporter, ranks, callbacks or Callbacks(), fresh=fresh, per_pair=per_pair)
    except (AuditError, DefectError, NonFiniteError, StoppedError) as error:
        # All ranks raise these: the first one reports.
        raise error if ranks.is_first else AlreadyReportedError(error.exit_code) from None


def _train(
    loaded: LoadedConfig,
    reporter: Reporter,
    ranks: Ranks,
    callbacks: Callbacks,
    *,
    fresh: bool,
    per_pair: Path | None,
) -> Path:
    run, finished, more = ranks.from_first(lambda: _choose_run(loaded, fresh=fresh, per_pair=per_pair))
    if finished and not more:
        reporter.say(f"{run} is finished: its model is in {run}/model.")
        if per_pair is None:
            reporter.result(run)
            return run
    reporter.start_times.begin("data and checks")
    ranks.run_or_stop_all(lambda: export_named_checkpoints(loaded.config, reporter.say), on=ranks.is_first_here)
    stopping = Stopping(loaded.config.checkpointing.seconds_to_save_by, ranks.highest)
    callbacks.start(run, stopping, is_first=ranks.is_first)
    setup = _set_up_together(loaded, ranks, reporter)
    refuse_different_ranks(ranks, lambda: derived(setup, run))
    extended_from = ranks.from_first(lambda: check_extension(run, setup, loaded) if finished and more else None)
    if finished and more and extended_from is None:
        reporter.say(f"{run} is finished, after {counted(setup.plan.num_steps, 'step')}: its model is in {run}/model.")
        for text in unreached_limit(setup):
            reporter.warn(text)
        if per_pair is None:
            reporter.result(run)
            return run
    kept = setup.checkpoint_dir(run)
    with ExitStack() as stack:
        ranks.run_or_stop_all(lambda: _claim_directories(stack, run, setup, loaded), on=ranks.is_first)
        _report_start(run, setup, reporter, ranks, extended_from)
        _report_translation(run, loaded, reporter)
        earlier = earlier_run(run, loaded) if not fresh and not checkpoints(kept) else None
        _report_setup(setup, run, reporter, earlier, ranks)
        saves = loaded.config.checkpointing.enabled
        with stopped_by_signals(stopping, alone=ranks.count == 1, prints=ranks.is_first, saves=saves):
            try:
                with stopping.stopping_at_once():
                    last = {"extended_from": extended_from, "callbacks": callbacks}
                    training = build(setup, run, ranks, reporter, stopping=stopping, given=loaded, **last)
                refuse_different_ranks(ranks, lambda: _resumed_from(training))
                _warn_of_changed_sets(training)
                with closing(training.tracking), closing(training.page), closing(training):
                    _run(training, loaded, per_pair)
            except StoppedError:
                _report_what_is_kept(kept, loaded.config.checkpointing, reporter)
                raise
            except (RuntimeError, MemoryError) as error:
                length, policy = setup.plan.train.length, loaded.config.policy
                if reported := out_of_memory_error(error, suggest_less_memory(length, policy, True, setup.offload)):
                    raise reported from None
                raise
    reporter.result(run)
    return run


def _set_up_together(loaded: LoadedConfig, ranks: Ranks, reporter: Reporter) -> Setup:
    """Set up the run: on one rank of each machine, which tokenise together, and then on the others, which find the tokens."""
    share = RankShare(ranks.data_index, ranks.data_parallel)
    # Before set_up, which ranks run one after another, because rows must have the same length on every rank.
    memory = ranks.lowest(device_memory(ranks.device))
    given: dict[str, Any] = {"share": share, "memory": memory, "mesh": ranks.shape, "machines": join_machines(ranks)}
    given["ranks_here"] = num_ranks_here(ranks)

    def check_and_tokenize() -> Setup:
        with given["machines"].taking_part():
            return set_up(loaded.config, ranks.device, reporter.progress, **given)

    return ranks.one_then_all(check_and_tokenize)


def _report_start(run: Path, setup: Setup, reporter: Reporter, ranks: Ranks, extended_from: int | None) -> None:
    reporter.say(f"Run directory: {run}{', resumed' if checkpoints(setup.checkpoint_dir(run)) else ''}")
    if extended_from is not None:
        reporter.say(f"Extended from {extended_from} to {setup.plan.num_steps} steps")
    if ranks.count > 1:
        reporter.say(f"Ranks: {ranks.count} ({ranks.shape})")


def _report_translation(run: Path, loaded: LoadedConfig, reporter: Reporter) -> None:
    if loaded.translation is not None:
        rest, verbose = f"Every key is in {run / TRANSLATION_FILE}.", reporter.verbosity == "verbose"
        say_translation(loaded.translation, loaded.file, reporter, all_keys=verbose, rest=rest)


def _report_setup(setup: Setup, run: Path, reporter: Reporter, earlier: tuple[str, str] | None, ranks: Ranks) -> None:
    """Print the data, the settings and warnings. `earlier`: a hint that an earlier run can be resumed, and the command for it."""
    sets, choices, computed = preflights(setup.plan.sets), describe_choices(setup), describe_computation(setup)
    if writes_page(setup, ranks):
        write_setup(run, setup, Described(sets, choices, computed, ranks.count), reporter.warn)
    reporter.preflight(sets, dict.fromkeys(setup.plan.sets.read, run / "rejects.jsonl"))
    reporter.choices(choices)
    reporter.shows_parts = setup.config.dpo.sft_loss_weight > 0
    reporter.say(f"Rows: {setup.plan.rows}")
    reporter.say(f"Computed: {computed}")
    if earlier is not None:
        reporter.warn(earlier[0], command=earlier[1])
    for text in setup_warnings(setup):
        reporter.warn(text)


def _choose_run(loaded: LoadedConfig, *, fresh: bool, per_pair: Path | None) -> tuple[Path, bool, bool]:
    """Return the run's directory, whether the run is finished, and whether this configuration may extend it."""
    if per_pair is not None:
        check_per_pair(per_pair)
    run = choose_run_dir(loaded, fresh=fresh)
    finished = is_finished(run)
    return run, finished, finished and may_be_extended(run, loaded)


def _claim_directories(stack: ExitStack, run: Path, setup: Setup, loaded: LoadedConfig) -> None:
    """Lock the run directory, and the checkpoint directory if it is separate. Write its first files."""
    stack.enter_context(locked(run))
    kept = setup.checkpoint_dir(run)
    if kept != run / "checkpoints":
        stack.enter_context(locked(kept, "checkpointing.checkpoint_dir"))
    refuse_others_checkpoints(run, kept, has_checkpoints=bool(checkpoints(kept)))
    refuse_taken_names(kept, setup.plan.num_steps)
    remove_abandoned(run, *TEMPORARY_NAMES, is_held=True)
    remove_abandoned(run / "samples", r"step_[0-9]+\.jsonl", is_held=True)
    refuse_shortening(run, setup, loaded)
    if not is_finished(run):  # a finished run that is extended gets its configuration later (extension.py)
        write_atomically(run / "config.yaml", loaded.as_yaml(), "config")
        if loaded.translation is not None:
            write_atomically(run / TRANSLATION_FILE, full_table(loaded.translation, loaded.file), "config")
    write_rejects(setup.plan.sets.read, run / "rejects.jsonl")


def _run(t: Training, loaded: LoadedConfig, per_pair: Path | None) -> None:
    if not t.ranks.from_first(lambda: is_finished(t.run)):
        finish(t, _loop(t), loaded, per_pair)
    elif per_pair is not None:
        restore_exported(t, per_pair)
        t.reporter.say(write_per_pair(t, per_pair))


def _resumed_from(t: Training) -> dict[str, str]:
    """Return the fingerprints and the step that this rank read from its disk. All ranks must have read the same values."""
    return {f"the {name}": value for name, value in t.fingerprints.items()} | {"the last step": str(t.progress.step)}


def _warn_of_changed_sets(t: Training) -> None:
    """Warn about validation sets that changed since the run was interrupted."""
    last = {record["split"]: record for record in t.metrics.records() if "data" in record}
    for validation in t.validation_sets:
        before = last.get(validation.split)
        if before is not None and before["data"] != validation.data:
            t.reporter.warn(
                f"the pairs of {validation.split} have changed since step {before['step']}. Earlier results are not comparable, "
                "and are not used to rank checkpoints once the new pairs are measured."
            )


def _report_what_is_kept(folder: Path, checkpointing: Checkpointing, reporter: Reporter) -> None:
    """Print which checkpoint an interrupted run can resume from. Warn if the run cannot be resumed."""
    place = max(checkpoints(folder), key=step_of, default=None)
    if place is None:
        reporter.warn(
            "No checkpoint was saved."
            if not checkpointing.enabled
            else f"No checkpoint was saved yet. {same_call().capitalize()} starts again at the first step."
        )
    elif not checkpointing.save_optimizer:
        reporter.warn(
            f"{place} is kept, without optimizer states (checkpointing.save_optimizer=false), so no run can resume from it."
        )
    else:
        reporter.end(f"{place} is saved; {same_call()} resumes from it.")


def _loop(t: Training) -> list[ValidationReport]:
    """Train to the last step. Return the results of the validation before the first step."""
    total, val_period = t.setup.plan.num_steps, t.setup.plan.val_period
    before = _recorded_start(t)
    if t.setup.config.dpo.val_at_start and t.progress.step == 0:
        t.reporter.start_times.begin("validation")
        before = t.validate()
        t.reporter.validations("\nValidation before training", before)
    t.reporter.say("")
    t.reporter.start_times.begin("step")
    unread: list[tuple[int, PendingStep, float]] = []
    max_grad_norm = t.setup.config.policy.max_grad_norm
    with t.reporter.progress("Training", total, done=t.progress.step) as bar:
        if t.progress.owes_validation and t.progress.step < total:
            _validate_and_save(t, saving=False)
        ahead = zip(_remaining_progress(t), load_ahead(_remaining_batches(t), t.setup.plan.train), strict=True)
        for place, loaded in () if is_exhausted(t) else ahead:
            t.progress, step = place, place.step
            current = train_step(
                t.policy, t.context, loaded.packs, loaded.batch, optimizer=t.optimizer, max_grad_norm=max_grad_norm
            )
            t.scheduler.step()
            unread.append((step, current, loaded.wait_seconds))
            validating, saving = step != total and _is_due(step, val_period), _is_save_due(t, step)
            stopping = t.stopping.is_wanted()
            # Metrics are read when the step is done, or one step later. Reading them earlier would make the device wait.
            while unread and (
                len(unread) > 1 or validating or saving or stopping or step == total or _is_done(t, unread[0][1])
            ):
                _report(t, *unread.pop(0), bar)
            # Also set after the last step, although finish() validates it: an extended run repeats this validation.
            t.progress = replace(t.progress, owes_validation=_is_due(step, val_period))
            if validating or saving or stopping:
                _validate_and_save(t, saving=saving)
            t.saver.check()
            if validating and is_exhausted(t):
                break
    return before


def _recorded_start(t: Training) -> list[ValidationReport]:
    """For a resumed run, return the results of the validation before the first step, read from metrics.jsonl."""
    return [
        ValidationReport(
            split=record["split"],
            metrics={name: value for name, value in record.items() if isinstance(value, float)},
            num_pairs=record["num_pairs"],
            data=record["data"],
        )
        for record in t.metrics.records()
        if record["step"] == 0 and "data" in record
    ]


def _validate_and_save(t: Training, *, saving: bool) -> None:
    """Validate and save if due. If the run should stop, save the current state and raise StoppedError."""
    try:
        t.stopping.check()
        if t.progress.owes_validation:
            step = t.progress.step
            t.reporter.validations(f"\nValidation after step {step}", t.validate())
            saving = saving or must_be_kept(t)
        if saving:
            t.save()
    except StoppedError:
        t.save(ranked=not t.progress.owes_validation)
        t.saver.wait()
        raise


def _remaining_progress(t: Training) -> Iterator[Progress]:
    """Yield the progress of the run after each remaining step."""
    place = t.progress
    epoch, done = place.epoch, place.batch
    while place.step < t.setup.plan.num_steps:
        for number in range(done + 1, len(t.setup.plan.batches.epoch(epoch)) + 1):
            if place.step == t.setup.plan.num_steps:
                return
            place = replace(t.progress, step=place.step + 1, epoch=epoch, batch=number)
            yield place
        epoch, done = epoch + 1, 0


def _remaining_batches(t: Training) -> Iterator[GlobalBatch]:
    """Yield the batch of each remaining step."""
    epoch, done, left = t.progress.epoch, t.progress.batch, t.setup.plan.num_steps - t.progress.step
    while left:
        batches = t.setup.plan.batches.epoch(epoch)[done : done + left]
        yield from batches
        epoch, done, left = epoch + 1, 0, left - len(batches)


def _is_done(t: Training, pending: PendingStep) -> bool:
    """Return whether a step is done on every rank. All ranks must read the metrics of a step together."""
    return not t.ranks.highest(not pending.is_done())


def _is_due(step: int, period: int) -> bool:
    return period > 0 and step % period == 0


def _is_save_due(t: Training, step: int) -> bool:
    plan = t.setup.plan
    return t.setup.config.checkpointing.enabled and step != plan.num_steps and _is_due(step, plan.save_period)


def _report(t: Training, step: int, pending: PendingStep, waited: float, bar: Any) -> None:
    """Wait for the metrics of a step, then record and print them."""
    try:
        report = pending.read(t.setup.plan.train.store)
    except (DefectError, NonFiniteError) as error:
        raise type(error)(f"step {step}: {error}") from None
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
        "memory_gib": peak_memory_gib(t.ranks.device),
    }
    t.record(record)
    t.stopping.took("step", report.seconds)
    t.reporter.step(record, t.setup.plan.num_steps)
    if (times := t.reporter.start_times.end(f"step {step}")) is not None:
        t.reporter.detail(times)
    bar(1, t.reporter.numbers(record))

"""Builds a Training from a Setup: loads and audits the model, makes the optimizer, and restores the newest checkpoint."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandem.config.load import LoadedConfig
from tandem.model.architecture import router_class
from tandem.model.distributed.layers import freeze
from tandem.model.distributed.process_group import Ranks
from tandem.model.files.source import weights_fingerprint
from tandem.model.lora.fingerprints import start_fingerprint
from tandem.model.lora.layers import is_lora_b
from tandem.model.policy import Policy
from tandem.model.reference import LiveReference, Reference
from tandem.model.router_balance import RouterBalance
from tandem.page.live import RunPage
from tandem.page.pairs import Measured
from tandem.report.reporter import MetricsFile, NoMetricsFile, Reporter
from tandem.report.trackers.nemo_trl_names import OtherNames
from tandem.report.trackers.tracking import Tracking, start_tracking
from tandem.storage.ownership import remove_abandoned
from tandem.training.checkpoint.checkpoints import (
    Progress,
    Saver,
    load_checkpoint,
    newest_verified,
    set_newer_aside,
    state_tensors,
)
from tandem.training.checkpoint.host_copy import HostCopier
from tandem.training.checkpoint.ranking import Ranking
from tandem.training.checkpoint.start_model import refuse_to_resume
from tandem.training.forecast import Forecast
from tandem.training.metrics import TIE_BAND
from tandem.training.optimizer import make_optimizer, make_scheduler
from tandem.training.run.callbacks import Callbacks
from tandem.training.run.directory import is_finished, values_from_environment
from tandem.training.run.extension import begin_extension
from tandem.training.run.stopping import Stopping
from tandem.training.samples import Samples, answers_of, prompts_of, write_samples
from tandem.training.start.references import audit_model, audit_start, load_sharded, make_references
from tandem.training.start.rehearsal import compile_shapes, forecast_memory, start_compile_workers
from tandem.training.start.setup import Setup
from tandem.training.terms import StepContext
from tandem.training.validation import ValidationReport, ValidationSet, validate


@dataclass(slots=True)
class Training:
    """The state of a run during training. Its methods validate, record metrics and save checkpoints."""

    setup: Setup
    run: Path
    policy: Policy
    context: StepContext
    validation_sets: list[ValidationSet]
    optimizer: Any
    scheduler: Any
    fingerprints: dict[str, str]
    config: str  # as YAML, stored in every checkpoint
    reporter: Reporter
    metrics: MetricsFile
    ranking: Ranking
    progress: Progress
    saver: Saver
    stopping: Stopping
    tracking: Tracking
    expected: Forecast | None  # of GPU memory; None on a CPU
    samples: Samples | None
    page: RunPage
    callbacks: Callbacks

    @property
    def ranks(self) -> Ranks:
        return self.context.ranks

    def validate(self) -> list[ValidationReport]:
        """Validate on every set and record the results. If a validation is interrupted, nothing is recorded."""
        started = time.perf_counter()
        reports = [validate(self.policy, one, self.stopping.check) for one in self.validation_sets]
        for report in reports:
            self.write(report)
        if reports:
            each = {f"{report.split.removeprefix('validation-')}_seconds": report.seconds for report in reports}
            total = {"seconds": time.perf_counter() - started}
            self.record({"step": self.progress.step, "split": "timing/validation", **total, **each})
        if self.samples is not None:
            self.show_samples(self.samples)
        self.progress = replace(self.progress, owes_validation=False)
        self.show_on_page(reports)
        return reports

    def show_on_page(self, reports: list[ValidationReport]) -> None:
        """Pass the pairs of a validation to the page, and refresh it."""
        for one, report in zip(self.validation_sets, reports, strict=True):
            if report.table is not None:
                rounding = report.table.rounding(TIE_BAND[one.context.precision])
                self.page.note(
                    one.split, Measured(self.progress.step, one.data, report.table, one.packer.store, rounding)
                )
        self.page.refresh()

    def show_samples(self, samples: Samples) -> None:
        """Generate the policy's answers, print them below the reference's, and store all answers in samples/step_N.jsonl."""
        taken = samples.take(self.policy, self.ranks.device)
        step = self.progress.step
        self.ranks.run_or_stop_all(lambda: write_samples(self.run / "samples", step, taken), on=self.ranks.is_first)
        self.reporter.samples(step, taken)

    def write(self, report: ValidationReport) -> None:
        """Record the result of a validation in metrics.jsonl."""
        measured = {"num_pairs": report.num_pairs, "data": report.data}
        self.record({"step": self.progress.step, "split": report.split, **report.metrics, **measured})

    def record(self, record: dict[str, Any]) -> None:
        """Write a record to metrics.jsonl, and pass it to the ranking, the trackers and the reporter."""
        self.metrics.write(record)
        self.ranking.note(record)
        self.tracking.log(record)
        self.reporter.record(record)
        self.callbacks.record(record)

    def save(self, metrics_bytes: int | None = None, *, ranked: bool = True) -> None:
        """Start saving a checkpoint of the current state.

        `metrics_bytes`: how many bytes of metrics.jsonl belong to the checkpoint; None: all bytes.
        `ranked`: False if the validation that ranks this checkpoint has not run yet.
        """
        checkpointing = self.setup.config.checkpointing
        if not checkpointing.enabled:
            return
        self.saver.wait()  # for the previous save, because there is at most one copy on the host
        self.progress = replace(
            self.progress, metrics_bytes=self.metrics.size() if metrics_bytes is None else metrics_bytes
        )
        self.saver.start(self.saved_tensors(), self.progress, self.fingerprints, self.config, ranked=ranked)
        self.reporter.detail(f"saving step {self.progress.step}")
        self.page.refresh()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and release host memory."""
        self.saver.close()
        if self.optimizer.host_states is not None:
            self.optimizer.host_states.close()

    def saved_tensors(self) -> dict[str, Any]:
        """Return the tensors that a checkpoint contains."""
        optimizer = self.optimizer if self.setup.config.checkpointing.save_optimizer else None
        return state_tensors(self.policy, optimizer, self.ranks.number)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The audited policy and the references, before training."""

    policy: Policy
    weights: str  # the fingerprint of the start model
    references: dict[str, Reference]  # by split
    samples: Samples | None
    expected: Forecast | None


def build(
    setup: Setup,
    run: Path,
    ranks: Ranks,
    reporter: Reporter,
    stopping: Stopping,
    given: LoadedConfig,
    extended_from: int | None,  # the last step of the finished run that is being extended
    callbacks: Callbacks | None = None,
) -> Training:
    """Load and audit the model, create the optimizer, and restore the newest checkpoint if there is one."""
    callbacks = callbacks or Callbacks()
    callbacks.last_step = setup.plan.num_steps
    loaded = _load(setup, run, ranks, reporter, check=stopping.check)
    reporter.start_times.begin("optimizer and checkpoint")
    policy, config, checkpointing = loaded.policy, given.as_yaml(), setup.config.checkpointing
    optimizer = _optimizer(setup, policy)
    scheduler = make_scheduler(optimizer, setup.config.policy, setup.plan.num_steps)
    fingerprints = _fingerprints(setup, ranks, loaded.weights) | values_from_environment(given)
    # Until here all ranks draw the same random numbers, so that new weights agree; from here on each rank draws its own.
    torch.manual_seed(setup.config.run.seed + ranks.number)
    folder, restored = setup.checkpoint_dir(run), (policy, optimizer, scheduler)
    progress = _restore_newest(folder, *restored, fingerprints=fingerprints, ranks=ranks, reporter=reporter)
    if extended_from is not None:
        _extend(run, extended_from, progress, given, ranks=ranks, reporter=reporter)
    metrics = _metrics_file(run, progress, ranks, reporter)
    if metrics.has_lost_lines:
        progress = replace(progress, spared=progress.step)
    ranking = Ranking(setup.tracked, higher_is_better=checkpointing.higher_is_better, records=metrics.records())
    contexts = {
        split: StepContext(reference, setup.config.dpo, ranks, setup.precision)
        for split, reference in loaded.references.items()
    }
    training = Training(
        setup=setup,
        run=run,
        policy=policy,
        context=contexts["train"],
        validation_sets=validation_sets(setup, contexts),
        optimizer=optimizer,
        scheduler=scheduler,
        fingerprints=fingerprints,
        config=config,
        reporter=reporter,
        metrics=metrics,
        ranking=ranking,
        progress=progress,
        saver=_saver(setup, run, ranks, optimizer, ranking=ranking, stopping=stopping, callbacks=callbacks),
        stopping=stopping,
        tracking=_tracking(setup, run, config, progress, metrics=metrics, reporter=reporter),
        expected=loaded.expected,
        samples=loaded.samples,
        page=RunPage(run, setup.template.tokenizer, reporter.warn, enabled=writes_page(setup, ranks)),
        callbacks=callbacks,
    )
    if checkpointing.enabled:
        training.saver.reserve(training.saved_tensors())
    return training


def _balance_routers(setup: Setup, policy: Policy, ranks: Ranks) -> None:
    coefficient, routers = setup.config.dpo.router_aux_loss_coef, router_class(policy.architecture)
    if coefficient > 0 and routers is not None:
        policy.balance = RouterBalance(policy.model, routers, coefficient=coefficient, ranks=ranks)


def _optimizer(setup: Setup, policy: Policy) -> Any:
    names, parameters = zip(*policy.trained(), strict=True)
    ratio = setup.config.policy.lora.loraplus_lr_ratio
    ratios = [ratio if is_lora_b(name) else 1.0 for name in names]
    return make_optimizer(parameters, setup.config.policy, setup.config.run.seed, ratios=ratios)


def writes_page(setup: Setup, ranks: Ranks) -> bool:
    return ranks.is_first and setup.config.logger.report


def _load(setup: Setup, run: Path, ranks: Ranks, reporter: Reporter, check: Callable[[], None]) -> Loaded:
    torch.manual_seed(setup.config.run.seed)
    reporter.say("\nLoading the model")
    reporter.start_times.begin("weights")
    start_compile_workers(setup)
    policy = load_sharded(setup, setup.source, ranks, setup.lora)
    _balance_routers(setup, policy, ranks)
    weights = ranks.one_then_all(lambda: start_fingerprint(setup.source, setup.lora))
    folder, lora = setup.checkpoint_dir(run), setup.config.policy.lora
    ranks.run_or_stop_all(lambda: refuse_to_resume(run, folder, setup.source, lora, weights), on=ranks.is_first)
    found = audit_model(setup, policy, setup.source, ranks, reporter=reporter)
    references = make_references(setup, policy, run, ranks, weights=weights, reporter=reporter, check=check)
    audit_start(setup, policy, found, references, ranks=ranks, reporter=reporter)
    samples = _samples(setup, policy, references, ranks)
    reporter.start_times.begin("compilation and memory")
    compile_shapes(setup, policy, references.values(), reporter, check)
    return Loaded(
        policy=policy,
        weights=weights,
        references=references,
        samples=samples,
        expected=forecast_memory(setup, policy, reporter) if setup.device.type == "cuda" else None,
    )


def _saver(
    setup: Setup, run: Path, ranks: Ranks, optimizer: Any, ranking: Ranking, stopping: Stopping, callbacks: Callbacks
) -> Saver:
    arrived = optimizer.host_states.arrived if optimizer.host_states else lambda: None
    copier, took = HostCopier(ranks.device, optimizer, arrived), partial(stopping.took, "save")
    keep = setup.config.checkpointing.keep_top_k
    return Saver(setup.checkpoint_dir(run), keep, ranks, copier, ranking=ranking, took=took, saved=callbacks.saved)


def _extend(run: Path, trained: int, progress: Progress, given: LoadedConfig, ranks: Ranks, reporter: Reporter) -> None:
    kept = ranks.from_first(lambda: begin_extension(run, trained, progress.step, given))
    reporter.say(f"The model exported so far is kept in {kept}")


def _fingerprints(setup: Setup, ranks: Ranks, weights: str) -> dict[str, str]:
    """Return fingerprints of the training data and of the models. `weights`: the fingerprint of the start model."""
    found = {"training data": setup.plan.train.store.fingerprint, "start model": weights}
    if (other := setup.reference_source) is not None:
        found["reference model"] = ranks.one_then_all(lambda: weights_fingerprint(other))
    return found | {f"code of {name}": digest for name, digest in setup.config.run.code.items()}


def validation_sets(setup: Setup, contexts: dict[str, StepContext]) -> list[ValidationSet]:
    """Return the validation sets of a run. `contexts`: the StepContext (reference, loss settings, ranks) of each split."""
    dpo = setup.config.dpo
    return [
        ValidationSet(
            name=name,
            packer=packer,
            context=contexts[f"validation-{name}"],
            batch_size=setup.validation_batch_size,
            max_batches=dpo.val_batches if (dpo.val_batches or 0) > 0 else None,
        )
        for name, packer in setup.plan.validation.items()
    ]


def _metrics_file(run: Path, progress: Progress, ranks: Ranks, reporter: Reporter) -> MetricsFile | NoMetricsFile:
    """Open metrics.jsonl. Lines that were written after the checkpoint from which the run resumes are removed."""
    if progress.step == 0 and _has_steps(run / "metrics.jsonl"):
        reporter.warn(
            f"{run} has steps in metrics.jsonl, but no checkpoint to resume from: it starts from the beginning."
        )
    kept = None if is_finished(run) else progress.metrics_bytes
    metrics = MetricsFile(run / "metrics.jsonl", kept) if ranks.is_first else NoMetricsFile()
    if metrics.has_lost_lines:
        reporter.warn(
            f"{run}/metrics.jsonl changed since step {progress.step} was saved: some lines are lost, so earlier checkpoints can "
            "no longer be ranked and are all kept. Training is not affected."
        )
    return metrics


def _tracking(
    setup: Setup, run: Path, config: str, progress: Progress, metrics: MetricsFile, reporter: Reporter
) -> Tracking:
    """Open the trackers. Only the first rank opens trackers, and a finished run opens none."""
    if isinstance(metrics, NoMetricsFile) or is_finished(run):
        return Tracking()
    return start_tracking(
        setup.config.logger,
        run,
        config,
        step=progress.step,
        records=metrics.records(),
        say=reporter.say,
        warn=reporter.warn,
        on_gpu=setup.device.type == "cuda",
        others=OtherNames.of(setup.config, setup.plan.validation, setup.plan.batches),
    )


def _restore_newest(
    folder: Path,
    policy: Policy,
    optimizer: Any,
    scheduler: Any,
    fingerprints: dict[str, str],
    ranks: Ranks,
    reporter: Reporter,
) -> Progress:
    """Load the newest intact checkpoint and return its progress. Without checkpoints, return the progress of a new run."""
    place, damaged = ranks.from_first(lambda: newest_verified(folder))
    names = ("step_[0-9]+", "latest", "best")
    ranks.run_or_stop_all(lambda: remove_abandoned(folder, *names, is_held=True), on=ranks.is_first)
    for problem in damaged:
        reporter.warn(f"{problem}. Falling back to an earlier checkpoint.")
    if place is None:
        return Progress()
    progress = load_checkpoint(place, policy, optimizer, scheduler, fingerprints, ranks)
    ranks.run_or_stop_all(lambda: set_newer_aside(place), on=ranks.is_first)
    reporter.say(f"Resuming from {place}")
    return progress


def _has_steps(metrics: Path) -> bool:
    return metrics.is_file() and '"split": "train"' in metrics.read_text(encoding="utf-8", errors="replace")


def _samples(setup: Setup, policy: Policy, references: dict[str, Reference], ranks: Ranks) -> Samples | None:
    """Choose the prompts whose answers are printed. Generate the reference's answers before the first update of the policy."""
    count, tokenizer = setup.config.logger.num_val_samples_to_print, setup.template.tokenizer
    if not count:
        return None
    name = next(iter(setup.plan.validation))
    prompts = prompts_of(setup.plan.validation[name].store, tokenizer, count)
    if not setup.uses_reference:
        return Samples(tokenizer, prompts, None)
    asked, other = references["train"], setup.reference_source
    model = asked.policy if isinstance(asked, LiveReference) else policy
    if other is not None and not isinstance(asked, LiveReference):
        model = freeze(load_sharded(setup, other, ranks))
    return Samples(tokenizer, prompts, answers_of(model, tokenizer, prompts, ranks.device))

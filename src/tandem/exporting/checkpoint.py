"""Exports any checkpoint of a run: rebuilds the policy, writes the export, loads the export again and measures it.

The checkpoints and metrics of the run are not changed. Optimizer states are not needed. A single process exports the
checkpoint, whatever the number of ranks that trained it.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tandem.config.schema import Config
from tandem.errors import ConfigError
from tandem.exporting.card import CARD, CardFacts, data_sets, described_pairs, model_card, recorded_sets
from tandem.exporting.folder import ExportForm, export_form, reload, write_export
from tandem.exporting.gguf import convert
from tandem.exporting.hub import Upload, push
from tandem.exporting.request import RECORD, ExportRequest, read_record, record_text, request_export
from tandem.exporting.start import Start, find_start, load_unmeasured, verified_state
from tandem.model.distributed.process_group import (
    Ranks,
    compute_deterministically,
    join_process_group,
    leave_process_group,
)
from tandem.model.files.source import find_model
from tandem.model.lora.files import CONFIG_FILE, read_adapter
from tandem.model.lora.fingerprints import start_fingerprint
from tandem.model.policy import Policy
from tandem.report.reporter import Reporter
from tandem.run_numbers import numbers_shown
from tandem.runs import SHOWN_RESULTS
from tandem.storage.cache import check_writable, read_json
from tandem.storage.ownership import remove_abandoned
from tandem.terminal.arguments import option
from tandem.terminal.printable import escaped
from tandem.training.checkpoint.checkpoints import load_weights
from tandem.training.checkpoint.ranking import Record, records_in
from tandem.training.checkpoint.saved_state import SavedState
from tandem.training.memory import out_of_memory_error
from tandem.training.start.build import validation_sets
from tandem.training.start.references import load_sharded, make_references
from tandem.training.start.setup import Setup
from tandem.training.terms import StepContext
from tandem.training.validation import ValidationReport, ValidationSet, validate

STAGES = ("verifying the checkpoint", "loading the start model", "measuring", "writing", "loading back and measuring")


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export: its folder, the exported checkpoint, and the metrics."""

    folder: Path
    checkpoint: Path
    step: int
    form: str  # model or adapter
    dtype: str
    in_memory: dict[str, dict[str, float]]  # metrics of the trained weights, by validation set
    exported: dict[str, dict[str, float]]  # the same metrics, of the exported weights
    not_measured: str | None  # why there are no metrics
    gguf: Path | None = None
    upload: Upload | None = None

    def __repr__(self) -> str:
        """Where the export is, what it is, and its results. A notebook prints this."""
        lines = [f"{self.folder}: step {self.step:,}, {self.form}, {self.dtype}"]
        lines += [f"{name}: {numbers_shown(record)}" for name, record in list(self.exported.items())[:SHOWN_RESULTS]]
        lines += [] if self.not_measured is None else [f"not measured: {self.not_measured}"]
        return "<Exported " + "\n  ".join(map(escaped, lines)) + ">"

    def as_json(self) -> str:
        return json.dumps(asdict(self), default=str)


def export(run: str | Path, *, reporter: Reporter | None = None, **options: Any) -> Exported:
    """Export a checkpoint of a run. `options`: the keyword arguments of `request_export`."""
    return run_export(request_export(run, **options), reporter or Reporter("quiet"))


def run_export(request: ExportRequest, reporter: Reporter) -> Exported:
    """Write the export, unless it exists already. Then convert it to GGUF and upload it, if requested."""
    if request.is_written:
        reporter.say(f"{request.folder} holds this export already.")
        done = _read_back(request)
    else:
        with _alone(request.config) as ranks:
            done = _Exporter(request, reporter, ranks).run()
    if request.converter is not None:
        with reporter.progress("Converting to GGUF", 1):
            done = replace(done, gguf=convert(done.folder, request.converter, done.dtype))
    if request.repository is not None:
        _warn_of_local_base(done.folder, reporter)
        with reporter.progress("Uploading", 1):
            upload = push(done.folder, request.repository, step=done.step, dry_run=request.dry_run)
        done = replace(done, upload=upload)
    return done


def _warn_of_local_base(folder: Path, reporter: Reporter) -> None:
    """Warn if a folder to upload holds an adapter whose base model is a folder of this machine."""
    try:
        base = read_json(folder / CONFIG_FILE)["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):  # not an adapter
        return
    if Path(str(base)).is_absolute():
        reporter.warn(
            f"{CONFIG_FILE} names the base model by its folder, {base}: others cannot load it. Set base_model_name_or_path "
            f"to a name on the hub, or export with {option('form', 'merged')}."
        )


@contextmanager
def _alone(config: Config) -> Iterator[Ranks]:
    """A context with a process group of one process. Raise ConfigError if torchrun started several processes."""
    was_joined = dist.is_initialized()
    if config.run.deterministic:
        compute_deterministically()
    ranks = join_process_group()
    if ranks.count > 1:
        raise ConfigError("tandem export works in one process. Start it without torchrun.")
    try:
        yield ranks
    finally:
        if not was_joined:
            leave_process_group()


def _read_back(request: ExportRequest) -> Exported:
    """Return the result of an export that was already written, read from the file tandem_export.json in its folder."""
    record = read_record(request.folder)
    return Exported(
        folder=request.folder,
        checkpoint=request.checkpoint.place,
        step=request.checkpoint.step,
        form=str(record.get("form")),
        dtype=str(record.get("dtype")),
        in_memory=record.get("in_memory") or {},
        exported=record.get("exported") or {},
        not_measured=record.get("not_measured"),
    )


class _Exporter:
    """Exports one checkpoint, in the order of STAGES."""

    def __init__(self, request: ExportRequest, reporter: Reporter, ranks: Ranks):
        self.request, self.reporter, self.ranks = request, reporter, ranks
        self.config, self.place = request.config, request.checkpoint.place
        self._bar: Callable[..., None] | None = None

    def run(self) -> Exported:
        folder = self.request.folder
        check_writable(folder.parent, f"{option('out', folder)}: its folder", f"Choose another {option('out')}.")
        remove_abandoned(folder.parent, ".+", is_held=False)
        with self._stage(0):
            saved = verified_state(self.place)
            run, measured = self.request.checkpoint.run, self.request.measured
            start = find_start(self.config, self.place, run, saved, self.ranks.device, measured=measured)
        form = export_form(self.config.export, start.source, start.lora)
        self.reporter.say(
            f"Exporting step {self.request.checkpoint.step} of {self.request.checkpoint.run or self.place}"
        )
        try:
            return self._export(start, form, saved)
        except (RuntimeError, MemoryError) as error:
            less = f"Leave out the evaluation with {option('measured', False)}, or export" if start.setup else "Export"
            if reported := out_of_memory_error(error, f"{less} on a machine with more memory."):
                raise reported from None
            raise

    def _export(self, start: Start, form: ExportForm, saved: SavedState) -> Exported:
        with self._stage(1):
            policy = self._load(start)
        sets = self._validation_sets(start.setup, policy)
        with self._stage(2):
            load_weights(self.place, policy)
            in_memory = [validate(policy, one) for one in sets]
        exported: list[ValidationReport] = []

        def measure_and_describe(written: Path) -> None:
            with self._stage(4):
                exported.extend(self._load_back(written, start, form, sets))
                (written / CARD).write_text(self._card(start, form, saved, exported), encoding="utf-8")
                (written / RECORD).write_text(self._record(start, form, in_memory, exported), encoding="utf-8")

        with self._stage(3):
            write_export(
                policy,
                form,
                self.request.folder,
                self.ranks,
                source=start.source,
                lora=start.lora,
                revision=self.config.policy.revision,
                template=start.template,
                measure=measure_and_describe,
            )
        if read_record(self.request.folder).get("made_of") != self.request.made_of:
            raise ConfigError(
                f"{option('out', self.request.folder)}: another process wrote there. Choose another {option('out')}."
            )
        self._report(start, form, in_memory, exported)
        return replace(_read_back(self.request), not_measured=start.not_measured)

    @contextmanager
    def _stage(self, number: int) -> Iterator[None]:
        """A context in which the progress bar shows a stage. A stage inside another stage uses the same bar."""
        if self._bar is not None:
            self._bar(1, [STAGES[number]])
            yield
            return
        with self.reporter.progress("Exporting", len(STAGES), done=number) as bar:
            self._bar = bar
            try:
                bar(0, [STAGES[number]])
                yield
            finally:
                self._bar = None

    def _load(self, start: Start) -> Policy:
        """Load the start model. The weights of the checkpoint are loaded into it later."""
        if start.setup is not None:
            return load_sharded(start.setup, start.source, self.ranks, start.lora)
        return load_unmeasured(start, start.source, start.lora)

    def _validation_sets(self, setup: Setup | None, policy: Policy) -> list[ValidationSet]:
        """Return the validation sets and their references. A reference that is not in the cache is computed now."""
        if setup is None:
            return []
        run = self.request.checkpoint.run or self.place.parent
        weights = start_fingerprint(setup.source, setup.lora)
        references = make_references(
            setup, policy, run, self.ranks, weights, self.reporter, lambda: None, only_validation=True
        )
        contexts = {
            split: StepContext(reference, setup.config.dpo, self.ranks, setup.precision)
            for split, reference in references.items()
        }
        return validation_sets(setup, contexts)

    def _load_back(
        self, written: Path, start: Start, form: ExportForm, sets: list[ValidationSet]
    ) -> list[ValidationReport]:
        if start.setup is not None:
            policy = reload(start.setup, form, written, self.ranks)
            return [validate(policy, one) for one in sets]
        if form.is_adapter:
            assert start.lora is not None
            load_unmeasured(start, start.source, replace(start.lora, start=read_adapter(str(written))))
        else:
            named = self.config.policy.model_copy(update={"model_name": str(written), "revision": None})
            load_unmeasured(start, find_model(named), None)
        return []

    def _records(self) -> list[Record]:
        """Return the undamaged lines of the run's metrics.jsonl, each as a dict."""
        run = self.request.checkpoint.run
        metrics = None if run is None else run / "metrics.jsonl"
        content = metrics.read_bytes() if metrics is not None and metrics.is_file() else b""
        return [record for record in records_in(content) if record is not None]

    def _card(self, start: Start, form: ExportForm, saved: SavedState, exported: list[ValidationReport]) -> str:
        loaded, records = self.request.loaded, self._records()
        data = (
            data_sets(loaded, start.setup.plan.sets)
            if start.setup is not None
            and start.setup.plan.train.store.fingerprint == saved.fingerprints.get("training data")
            else recorded_sets(loaded, saved.fingerprints, records, described_pairs(self.request.checkpoint.run))
        )
        facts = CardFacts(
            loaded=loaded,
            source=start.source,
            step=self.request.checkpoint.step,
            dtype=form.dtype_name,
            is_adapter=form.is_adapter,
            data=data,
            records=records,
            exported=exported,
            not_measured=start.shared_reason,
        )
        return model_card(facts)

    def _record(
        self, start: Start, form: ExportForm, in_memory: list[ValidationReport], exported: list[ValidationReport]
    ) -> str:
        return record_text(
            self.request,
            self.request.checkpoint.step,
            form=form.what,
            dtype=form.dtype_name,
            in_memory={one.split: one.metrics for one in in_memory},
            exported={one.split: one.metrics for one in exported},
            not_measured=start.shared_reason,
        )

    def _report(
        self, start: Start, form: ExportForm, in_memory: list[ValidationReport], exported: list[ValidationReport]
    ) -> None:
        times = ("in memory", f"exported ({form.dtype_name})")
        self.reporter.change(f"\nValidation of step {self.request.checkpoint.step}", times, in_memory, exported)
        if start.not_measured is not None and self.request.measured:
            self.reporter.warn(f"the export was loaded back, but not measured: {start.not_measured}")

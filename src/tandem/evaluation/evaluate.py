"""`evaluate`: measures how well a model orders preference pairs, alone or against another model."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.config.load import Overrides
from tandem.config.losses import needs_reference, spelled
from tandem.data.store.selection import Preferences
from tandem.evaluation.compare import compare
from tandem.evaluation.harness import check_installed, run_tasks
from tandem.evaluation.measure import Measured, measure_model
from tandem.evaluation.records import Evaluation, HarnessResult
from tandem.evaluation.request import Request, check_request
from tandem.evaluation.same_weights import refuse_same_weights
from tandem.evaluation.summary import PairResults, benchmarks, best_of_n
from tandem.exporting.cached import export_checkpoint
from tandem.model.files.source import find_source
from tandem.report.per_pair import PerPairFile
from tandem.report.reporter import Reporter
from tandem.training.checkpoint.start_model import refuse_changed
from tandem.training.metrics import PairTable


def evaluate(
    model: str,
    data: Sequence[str] = (),
    *,
    reference: str | None = None,
    against: str | None = None,
    beta: float | None = None,
    by: str | None = None,
    per_pair: Path | None = None,
    lm_eval: Sequence[str] = (),
    include_path: Path | None = None,
    limit: int | None = None,
    overrides: Overrides = (),
    allow_code: bool = False,
    reporter: Reporter | None = None,
) -> Evaluation:
    """Measure a model on preference pairs. Writes nothing except `per_pair` and the caches of tokens and references.

    model: a model folder or hub name, `embedded`, a run, which means its exported model with its own reference, or
    a checkpoint of a run, with the run's reference.
    data: files of preference pairs, in every format that training reads, or RewardBench's; a run's validation sets by default.
    reference: the model that implicit rewards compare with. Without one, a model is measured by its log-probabilities only.
    against: another model or run, measured on the same pairs.
    beta: the factor of implicit rewards; by default that of the run, or 0.1. It does not change accuracies.
    by: a field of the rows; results are also given for each of its values.
    per_pair: a file to write the numbers of every pair to, as `tandem train --per-pair` does.
    lm_eval: tasks of the LM Evaluation Harness, run on the model, its reference and `against`. include_path: a folder with more
    tasks. limit: the number of examples per task.
    overrides: configuration keys, such as {"policy.precision": "float32"} or ["data.default.prompt_key=question"].
    allow_code: whether the configuration of a run may name Python code to run, as a run with the user's own loss does.
    """
    request = check_request(
        model,
        data,
        reference=reference,
        against=against,
        beta=beta,
        by=by,
        per_pair=per_pair,
        lm_eval=lm_eval,
        include_path=include_path,
        limit=limit,
        overrides=overrides,
        allow_code=allow_code,
    )
    return run_request(request, reporter or Reporter("quiet"))


def run_request(request: Request, reporter: Reporter) -> Evaluation:
    """Run a checked request."""
    check_installed(request.tasks)
    for subject in (request.subject, request.against):
        for model in () if subject is None else (subject.model, subject.reference):
            if model is not None:
                export_checkpoint(model.key, model.policy.model_name, reporter.say)
                if model.trained_with is not None:
                    source = find_source(model.key, model.policy.model_name, model.policy.revision)
                    refuse_changed(model.trained_with, source)
    if request.against is not None:
        refuse_same_weights(request.subject, request.against)  # a checkpoint is exported now
    if not request.data:
        return _only_tasks(request, reporter)
    started = time.perf_counter()
    measured = measure_model(request.subject, request.data, request.by, reporter)
    seconds = time.perf_counter() - started
    results = PairResults(measured)
    comparison = None
    if request.against is not None:
        other = measure_model(request.against, request.data, None, reporter)
        comparison = compare(request.against.name, results, PairResults(other))
    if request.per_pair is not None:
        PerPairFile(request.per_pair, measured.dpo).write(_tables(measured))
    total = results.total()
    is_rewarded = measured.scored_by == "implicit reward"
    by_field = results.by_field(request.by)
    return Evaluation(
        model=request.subject.name,
        folder=str(measured.folder),
        reference=measured.reference,
        scored_by=measured.scored_by,
        loss=spelled(measured.dpo.preference_loss) if is_rewarded else None,
        beta=measured.dpo.reference_policy_kl_penalty if is_rewarded else None,
        precision=measured.precision,
        total=total,
        by_set=results.by_set(),
        by_length=results.by_length(),
        by_rank_distance=results.by_rank_distance(),
        by=(request.by or "subset") if by_field else None,
        by_field=by_field,
        best_of_n=best_of_n(measured),
        calibration=results.calibration(),
        benchmarks=benchmarks(measured),
        comparison=comparison,
        harness=_tasks(request, reporter),
        skipped={one.set.name: one.set.skipped for one in measured.sets if one.set.skipped},
        left_out=request.left_out,
        seconds=seconds,
        pairs_per_second=total.num_pairs / measured.seconds,
    )


def _tables(measured: Measured) -> Iterator[tuple[str, PairTable, Preferences]]:
    return ((one.set.name, one.table, one.set.store) for one in measured.sets)


def _only_tasks(request: Request, reporter: Reporter) -> Evaluation:
    started = time.perf_counter()
    harness = _tasks(request, reporter)
    subject = request.subject
    has_reference = subject.reference is not None
    return Evaluation(
        model=subject.name,
        folder=subject.model.policy.model_name,
        reference=subject.reference.name if subject.reference else None,
        scored_by="implicit reward" if has_reference else "log-probability",
        loss=spelled(subject.dpo.preference_loss) if needs_reference(subject.dpo.preference_loss) else None,
        beta=None,
        precision=subject.config.policy.precision,
        total=None,
        harness=harness,
        skipped={},
        seconds=time.perf_counter() - started,
        pairs_per_second=None,
    )


def _tasks(request: Request, reporter: Reporter) -> tuple[HarnessResult, ...]:
    """Run the tasks on the reference, on the model that is compared with, and on the model."""
    if not request.tasks:
        return ()
    subject, other = request.subject, request.against
    asked = [one for one in (subject.reference, other.model if other else None, subject.model) if one is not None]
    models = {one.name: (one.key, one.policy) for one in asked}
    return run_tasks(models, request.tasks, include_path=request.include_path, limit=request.limit, say=reporter.say)

"""Measures a model on sets: loads it and its reference, packs the pairs, and returns a PairTable for each set."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from tandem.config.losses import needs_reference
from tandem.config.schema import Config
from tandem.config.sections.dpo import Dpo
from tandem.data.text.template import make_template
from tandem.data.text.tokenizer import load_tokenizer
from tandem.errors import ConfigError
from tandem.evaluation.classifier import is_classifier, measure_scores
from tandem.evaluation.data_requests import DataRequest
from tandem.evaluation.records import ScoredBy
from tandem.evaluation.request import ModelRequest, Subject
from tandem.evaluation.sets import EvaluationSet, open_evaluation_sets
from tandem.model.architecture import check_packable
from tandem.model.checks.positions import check_positions, position_limit
from tandem.model.distributed.layers import compile_layers, freeze, shard
from tandem.model.distributed.process_group import Ranks, join_process_group, leave_process_group
from tandem.model.files.source import ModelSource, find_source, find_tokenizer
from tandem.model.load import attention_kind, load_policy
from tandem.model.lora.adapters import load_adapted
from tandem.model.lora.fingerprints import start_fingerprint
from tandem.model.policy import Policy
from tandem.model.reference import CachedReference, NoReference, Reference, cached_reference, reference_name
from tandem.packing.packer import Packer, make_packer
from tandem.report.reporter import Reporter
from tandem.storage.cache import cache_dir, check_cache_dir
from tandem.terminal.arguments import option
from tandem.training.memory import (
    CPU_ROW_TOKENS,
    out_of_memory_error,
    refuse_large_masks,
    suggest_less_memory_without_training,
)
from tandem.training.metrics import TIE_BAND, PairTable
from tandem.training.start.machine import Machine, check_machine
from tandem.training.start.setup import check_same_vocabulary, check_vocabulary
from tandem.training.terms import StepContext
from tandem.training.validation import measure, portions

LONGEST_BY_DEFAULT = 8192  # tokens, where neither the model nor the user sets a lower limit
GPU_ROW_TOKENS = 16_384  # rows of a forward pass without gradients
PORTION_PAIRS = 512  # pairs that are packed together


@dataclass(frozen=True, slots=True)
class MeasuredSet:
    """A set and the numbers of its pairs."""

    set: EvaluationSet
    table: PairTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A model's numbers on every set, and how they were computed."""

    sets: tuple[MeasuredSet, ...]
    folder: Path
    reference: str | None
    scored_by: ScoredBy
    dpo: Dpo
    precision: str
    seconds: float  # of the model's own computation, without loading, tokenising and the reference

    @property
    def has_rewards(self) -> bool:
        return self.scored_by != "log-probability"

    @property
    def has_logps(self) -> bool:
        return self.scored_by != "model score"

    @property
    def band(self) -> float:
        """The difference of summed log-probabilities that rounding alone can cause."""
        return TIE_BAND[self.precision]


def measure_model(subject: Subject, data: tuple[DataRequest, ...], by: str | None, reporter: Reporter) -> Measured:
    """Measure every pair of every set with one model. Uses one process and one device."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("tandem eval uses one process. Start it without torchrun.")
    check_cache_dir()
    source = find_source(subject.model.key, subject.model.policy.model_name, subject.model.policy.revision)
    with _single_rank() as ranks:
        if is_classifier(source):
            return _score_with_classifier(subject, source, data, by, ranks.device, reporter)
        return _measure_policy(subject, source, data, by, ranks, reporter)


@contextmanager
def _single_rank() -> Iterator[Ranks]:
    joined_before = dist.is_initialized()
    try:
        yield join_process_group()
    finally:
        if not joined_before:
            leave_process_group()


def _measure_policy(
    subject: Subject,
    source: ModelSource,
    data: tuple[DataRequest, ...],
    by: str | None,
    ranks: Ranks,
    reporter: Reporter,
) -> Measured:
    loader = _Loader(subject.config, ranks, _max_length(subject, source))
    machine = loader.check(subject.model, source)
    template = _template(subject, source)
    compared = subject.reference
    reference_source = None
    if compared is not None:
        reference_source = find_source(compared.key, compared.policy.model_name, compared.policy.revision)
        loader.check(compared, reference_source)
        check_same_vocabulary(reference_source, source, template.tokenizer)
    opened = open_evaluation_sets(data, subject, template, loader.max_length, by, reporter.progress)
    for one in opened.sets:
        check_vocabulary(one.store, source)
    check_positions(opened, source, reference_source)
    packers = [loader.packer(one, source) for one in opened.sets]
    references: list[Reference] = [NoReference() for _ in packers]
    if compared is not None and reference_source is not None:
        references = [*loader.references(compared, reference_source, opened.sets, packers, reporter)]
    policy = loader.load(subject.model, source, machine)
    tables, started = [], time.perf_counter()
    for one, packer, reference in zip(opened.sets, packers, references, strict=True):
        context = StepContext(reference=reference, dpo=subject.dpo, ranks=ranks, precision=machine.precision)
        with (
            reporter.progress(f"Measuring {Path(one.name).name}", len(packer.store)) as done,
            _out_of_memory_hints(packer, subject),
        ):
            tables.append(measure(policy, context, packer, PORTION_PAIRS, progress=done))
    rewards = compared is not None or (subject.run is not None and not needs_reference(subject.dpo.preference_loss))
    return Measured(
        sets=tuple(MeasuredSet(one, table) for one, table in zip(opened.sets, tables, strict=True)),
        folder=source.folder,
        reference=None if compared is None else compared.name,
        scored_by="implicit reward" if rewards else "log-probability",
        dpo=subject.dpo,
        precision=machine.precision,
        seconds=time.perf_counter() - started,
    )


def _score_with_classifier(
    subject: Subject,
    source: ModelSource,
    data: tuple[DataRequest, ...],
    by: str | None,
    device: torch.device,
    reporter: Reporter,
) -> Measured:
    """Measure a sequence-classification model with one label: its score of a completion is its reward."""
    if subject.reference is not None:
        raise ConfigError(
            f"{option('reference', subject.reference.name)}: {source.name} is a sequence-classification model, which gives "
            "each completion a score and has no reference. Leave it out."
        )
    template = _template(subject, source)
    opened = open_evaluation_sets(data, subject, template, _max_length(subject, source), by, reporter.progress)
    for one in opened.sets:
        check_vocabulary(one.store, source)
    precision = subject.config.policy.precision
    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" else "float32"
    started = time.perf_counter()
    tables = measure_scores(source, opened.sets, device, precision, reporter.progress)
    return Measured(
        sets=tuple(MeasuredSet(one, table) for one, table in zip(opened.sets, tables, strict=True)),
        folder=source.folder,
        reference=None,
        scored_by="model score",
        dpo=subject.dpo,
        precision=precision,
        seconds=time.perf_counter() - started,
    )


def _max_length(subject: Subject, source: ModelSource) -> int:
    """The longest sequence that is measured: as the run or the user says, or else as many tokens as the model has positions."""
    if subject.sets_length:
        return subject.config.policy.max_total_sequence_length
    return min(LONGEST_BY_DEFAULT, position_limit(source.config) or LONGEST_BY_DEFAULT)


def _template(subject: Subject, source: ModelSource) -> Any:
    return make_template(load_tokenizer(find_tokenizer(subject.model.policy, source)), subject.config.policy.tokenizer)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads models for measuring, on one device."""

    config: Config
    ranks: Ranks
    max_length: int

    def _policy(self, model: ModelRequest) -> Any:
        return model.policy.model_copy(
            update={"max_total_sequence_length": self.max_length, "activation_checkpointing": "none"}
        )

    def check(self, model: ModelRequest, source: ModelSource) -> Machine:
        """Choose precision and adapters for a model; refuse one that cannot be packed. Nothing is loaded."""
        policy = self._policy(model)
        check_packable(source, policy)
        machine = check_machine(self.config.model_copy(update={"policy": policy}), source, self.ranks.device)
        # Compiling takes longer than measuring most sets, so it is done only if it is asked for.
        return replace(machine, compiles=policy.compile is True)

    def dtype(self, source: ModelSource, machine: Machine) -> torch.dtype:
        """bfloat16 weights are computed with as they are; others are rounded stochastically from float32, as in training."""
        in_bfloat16 = machine.precision == "bfloat16" and source.dtype == torch.bfloat16
        return torch.bfloat16 if in_bfloat16 else torch.float32

    def load(self, model: ModelRequest, source: ModelSource, machine: Machine) -> Policy:
        policy, device = self._policy(model), self.ranks.device
        if machine.lora is not None:
            loaded = load_adapted(source, policy, device, machine.lora)
        else:
            loaded = load_policy(source, policy, device, dtype=self.dtype(source, machine))
        shard(loaded, self.ranks, bfloat16=machine.precision == "bfloat16")
        if machine.compiles:
            compile_layers(loaded)
        return freeze(loaded)

    def packer(self, one: EvaluationSet, source: ModelSource) -> Packer:
        policy, device = self.config.policy, self.ranks.device
        packing = policy.packing
        if packing.mode == "dataset":
            packing = packing.model_copy(update={"mode": "batch"})
        packer = make_packer(
            one.store,
            packing,
            usual_auto=GPU_ROW_TOKENS if device.type == "cuda" else CPU_ROW_TOKENS,
            pairs_per_batch=None,
            seed=self.config.run.seed,
            hidden_size=source.config.get_text_config().hidden_size,
        )
        refuse_large_masks(packer.length, min(packer.length, int(packer.sizes.max())), policy, device, source.config)
        return packer

    def references(
        self,
        model: ModelRequest,
        source: ModelSource,
        sets: tuple[EvaluationSet, ...],
        packers: list[Packer],
        reporter: Reporter,
    ) -> Iterator[CachedReference]:
        """The reference's log-probabilities of each set, from the cache that training uses too, or computed and stored there."""
        machine = self.check(model, source)
        weights = start_fingerprint(source, machine.lora)
        policy = self._policy(model)
        computed = {
            "transformers": transformers.__version__,
            "precision": f"{machine.precision}, {self.dtype(source, machine)} weights",
            "attention": "unpacked"
            if policy.packing.mode == "none"
            else attention_kind(policy, self.ranks.device, source.config),
        }
        loaded: list[Policy] = []

        def load() -> Policy:
            if not loaded:
                loaded.append(self.load(model, source, machine))
            return loaded[0]

        folder = Path(self.config.reference.cache_dir or cache_dir() / "reference")
        for one, packer in zip(sets, packers, strict=True):
            name = reference_name(weights, one.store.tokens_fingerprint, arrangement=packer.arrangement, **computed)
            with reporter.progress(f"Reference, {Path(one.name).name}", len(packer.store)) as done:
                yield cached_reference(
                    load,
                    packer,
                    self.ranks,
                    place=folder / name,
                    progress=done,
                    portions=portions(packer, PORTION_PAIRS),
                )


@contextmanager
def _out_of_memory_hints(packer: Packer, subject: Subject) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        advice = suggest_less_memory_without_training(packer.length, subject.config.policy)
        if known := out_of_memory_error(error, advice):
            raise known from None
        raise

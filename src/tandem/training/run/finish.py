"""Finishes a run: validates, saves, judges and exports the policy, and prints where everything is."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from tandem.config.load import LoadedConfig
from tandem.config.schema import Config
from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.section import EMBEDDED
from tandem.data.preflight import prompt_overlaps
from tandem.data.store.opening import is_prepared
from tandem.data.store.selection import Preferences
from tandem.data.text.template import QUESTION
from tandem.exporting.card import CARD, CardFacts, data_sets, model_card
from tandem.exporting.folder import ExportForm, export_form, reload, write_export
from tandem.model.architecture import is_multimodal
from tandem.report.per_pair import PerPairFile, described
from tandem.report.verdicts import Verdict, judge
from tandem.storage.cache import GIB, write_atomically
from tandem.terminal.commands import key_of, override, python_command, tandem_command, with_override
from tandem.training.checkpoint.checkpoints import checkpoints, step_of
from tandem.training.metrics import PairTable
from tandem.training.run.early_stopping import RestoredStep, is_exhausted, restore_best
from tandem.training.start.build import Training
from tandem.training.start.plan import suggested_batch_size
from tandem.training.start.setup import Setup
from tandem.training.validation import ValidationReport, measure, validate

REAL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # small enough for any machine
RUN_DIRECTORY_KEYS = ("run.dir", "checkpointing.checkpoint_dir")  # directories that belong to one run
MODEL_KEY = "policy.model_name"
MODEL_KEYS = ("policy.revision", "policy.tokenizer.name", "policy.lora.adapter", "reference.model")
BATCH_SIZE_KEY = "policy.train_global_batch_size"
# Settings of a quick try on the bundled pairs, which do not suit a longer run.
TRY_KEYS = ("dpo.max_num_steps", "dpo.val_period", "checkpointing.enabled", "checkpointing.save_period", "run.seed")
RATE_KEY, SCHEDULER_KEY = "policy.optimizer.kwargs.lr", "policy.scheduler"
# Words of verdicts that advise to change a setting.
ADVICE = {RATE_KEY: (RATE_KEY, "lower the learning rate", "learning rate was 0"), SCHEDULER_KEY: (SCHEDULER_KEY,)}
LORA_RATE = 1e-4  # docs/choosing.md


def finish(t: Training, before: list[ValidationReport], loaded: LoadedConfig, per_pair: Path | None) -> None:
    """Validate, save and export the policy, and print the verdicts on the run.

    The export is written and validated under a temporary name, and then renamed.
    """
    _report_memory(t)
    after = _validate_and_save_last(t)
    overlaps = prompt_overlaps(t.setup.plan.sets) if t.ranks.is_first else {}  # the first rank has the metrics
    verdicts = judge(t.metrics.records(), t.setup.config, overlaps)
    if (stop := restore_best(t)) is not None:
        verdicts = [stop.verdict, *_verdicts_on_export(verdicts, t, stop.exported_step, overlaps)]
        after = [validate(t.policy, one, t.stopping.check) for one in t.validation_sets]
        t.show_on_page(after)
    text = json.dumps([asdict(one) for one in verdicts], indent=2)
    t.ranks.run_or_stop_all(lambda: write_atomically(t.run / "verdicts.json", text, "verdicts"), on=t.ranks.is_first)
    pairs_line = None if per_pair is None else write_per_pair(t, per_pair)
    model = t.run / "model"
    start = {(one.split, one.data, one.num_pairs) for one in before}
    if after and all((one.split, one.data, one.num_pairs) in start for one in after):
        t.reporter.change("\nValidation", ("before", f"step {stop.exported_step}" if stop else "after"), before, after)
    else:
        t.reporter.validations(
            f"\nValidation of step {stop.exported_step}" if stop else "\nValidation after training", after
        )
    form = _export(t, model, after, loaded)
    t.reporter.say("\nVerdict")
    for verdict in verdicts:
        t.reporter.say(f"  {verdict.split}: {verdict.text}")
    t.page.finish()
    _report_results(t, model, form, pairs_line, stop)
    _suggest_better_checkpoint(t, loaded)
    # If training made the model worse, no next command is suggested: the verdict says what to change.
    if not any(verdict.name in ("diverged", "only_hurt") for verdict in verdicts):
        _suggest_next(t, model, loaded, blamed_keys(verdicts))


def _verdicts_on_export(of_run: list[Verdict], t: Training, step: int, overlaps: Mapping[str, float]) -> list[Verdict]:
    """Return verdicts on the exported step, which is before the last step.

    If the run diverged after the exported step, the verdict "diverged" is included. `of_run`: verdicts on the last step.
    """
    until = [record for record in t.metrics.records() if record["step"] <= step]
    later = [verdict for verdict in of_run if verdict.name == "diverged"]
    return [*later, *(verdict for verdict in judge(until, t.setup.config, overlaps) if verdict not in later)]


def _report_memory(t: Training) -> None:
    """Print the GPU memory used vs. expected, if any step ran."""
    if t.expected is not None and torch.cuda.max_memory_allocated() > t.expected.weights + t.expected.gradients:
        used = torch.cuda.max_memory_allocated()
        t.reporter.say(
            f"Memory: {used / GIB:.1f} GiB used at most, {t.expected.total / GIB:.1f} GiB expected "
            f"({t.expected.total / used - 1:+.1%})"
        )


def _export(t: Training, folder: Path, after: list[ValidationReport], loaded: LoadedConfig) -> ExportForm:
    """Export the model, or the adapters alone, with a model card. Return what was exported, and in which dtype."""
    setup = t.setup
    form = export_form(setup.config.export, setup.source, setup.lora)

    def measure_and_describe(written: Path) -> None:
        exported = _measure_export(t, written, form, after)

        def write_card() -> None:
            facts = CardFacts(
                loaded=loaded,
                source=setup.source,
                step=t.progress.step,
                dtype=form.dtype_name,
                is_adapter=form.is_adapter,
                data=data_sets(loaded, setup.plan.sets),
                records=t.metrics.records(),
                exported=exported,
            )
            (written / CARD).write_text(model_card(facts), encoding="utf-8")

        t.ranks.run_or_stop_all(write_card, on=t.ranks.is_first)

    write_export(
        t.policy,
        form,
        folder,
        t.ranks,
        source=setup.source,
        lora=setup.lora,
        revision=setup.config.policy.revision,
        template=setup.template,
        measure=measure_and_describe,
    )
    return form


def _report_results(
    t: Training, model: Path, form: ExportForm, pairs_line: str | None, stop: RestoredStep | None
) -> None:
    """Print where the exported model, the metrics and the checkpoints are."""
    config = t.setup.config
    t.reporter.end(f"Done. Everything is in {t.run}")
    best = (
        ", the best checkpoint"
        if stop and stop.helped
        else ", the best checkpoint, but worse than the model before training"
    )
    of_step = f"step {t.progress.step}{best if stop else ''}"
    t.reporter.say(f"  {model}  the aligned {form.what} ({form.dtype_name}), {form.layout}: {of_step}")
    if config.logger.report:
        t.reporter.say(f"  {t.run}/report.html  curves, pairs and settings, to open in a browser")
    t.reporter.say(f"  {t.run}/metrics.jsonl  every step and validation")
    if pairs_line is not None:
        t.reporter.say(f"  {pairs_line}")
    if config.checkpointing.enabled and (tracked := t.setup.tracked):
        best = min(map(step_of, checkpoints(t.saver.folder)), key=t.ranking.rank, default=None)
        of_step = "" if best is None else f", step {best}"
        t.reporter.say(f"  {t.saver.folder}/best  the best checkpoint by {tracked.split} {tracked.metric}{of_step}")
    elif config.checkpointing.enabled:
        t.reporter.say(f"  {t.saver.folder}/latest  the newest checkpoint")


def _suggest_better_checkpoint(t: Training, loaded: LoadedConfig) -> None:
    """If a checkpoint is better than the exported step, print the command that exports it."""
    tracked, exported = t.setup.tracked, t.progress.step
    kept = map(step_of, checkpoints(t.saver.folder)) if tracked else ()
    best = min(kept, key=t.ranking.rank, default=exported)
    if tracked is None or not t.ranking.is_better(best, exported):
        return
    values = f"{t.ranking.value_at(best):.4f}; step {exported}: {t.ranking.value_at(exported):.4f}"
    t.reporter.say(f"\nStep {best} is better by {tracked.split} {tracked.metric} ({values}). To export it:")
    t.reporter.command(tandem_command("export", str(t.run), "--checkpoint", f"step_{best}", *loaded.options))


def _suggest_next(t: Training, model: Path, loaded: LoadedConfig, blamed: Collection[str]) -> None:
    """Print what to do next. For the embedded model: the same run with a real model. Otherwise: a command that uses the model.

    `blamed`: keys that a verdict advises to change.
    """
    if t.setup.config.policy.model_name != EMBEDDED:
        t.reporter.say("\nNext: use it.")
        t.reporter.command(using(model, t.setup))
    elif any(is_prepared(Path(str(one.data_path))) for one in _sets(loaded)):
        t.reporter.say("\nNext: a real model (policy.model_name), for which the pairs must be prepared again.")
    else:
        others = ", then your own pairs (JSONL with prompt, chosen, rejected) as data.train"
        changed = " and ".join(key for key in sorted(blamed) if loaded.is_set_by_user(key))
        default = f", with tandem's {changed} instead of yours (see the verdict)" if changed else ""
        t.reporter.say(f"\nNext: a real model{default}{'' if _has_own_pairs(loaded) else others}.")
        t.reporter.command(with_real_model(loaded, t.run, t.setup.plan.batches.num_pairs_of(0), blamed))


def using(model: Path, setup: Setup) -> str:
    """Return a command that prompts an exported model: with a conversation if it has a chat template, else with plain text.

    transformers' pipelines move a model to the GPU. For multimodal checkpoints there is none that needs only the tokenizer.
    """
    conversation = setup.template.example()
    asked = json.dumps(conversation or QUESTION, ensure_ascii=False)
    name = json.dumps(str(model), ensure_ascii=False)
    if is_multimodal(setup.source.config):
        there = "" if setup.device.type == "cpu" else f'.to("{setup.device.type}")'
        tensors = 'return_tensors="pt"'
        templated = f"tokenizer.apply_chat_template({asked}, add_generation_prompt=True, return_dict=True, {tensors})"
        prompt = templated if conversation else f"tokenizer({asked}, {tensors})"
        return python_command(
            f"from transformers import AutoModelForImageTextToText, AutoTokenizer; name = {name}; "
            f"model = AutoModelForImageTextToText.from_pretrained(name){there}; "
            f"tokenizer = AutoTokenizer.from_pretrained(name); prompt = {prompt}{there}; "
            "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0]))"
        )
    return python_command(
        f'from transformers import pipeline; print(pipeline("text-generation", {name})({asked}, max_new_tokens=40))'
    )


def with_real_model(loaded: LoadedConfig, run: Path, num_pairs: int, blamed: Collection[str] = ()) -> str:
    """Return the command that repeats a run with a real model instead of the tiny embedded one, in another run directory.

    A learning rate and a batch size that the user set are kept. Those of the embedded default configuration suit a tiny random
    model: without them, the learning rate is its default, or for adapters the one suggested for them, and the batch size the one
    suggested for `num_pairs` pairs. TRY_KEYS are kept if the pairs are the user's own. `blamed`: keys that are left
    out.
    """
    config, own = loaded.config, _has_own_pairs(loaded)
    is_resumed = loaded.file is not None and Path(loaded.file).resolve() == (run / "config.yaml").resolve()
    # A run's config.yaml contains the embedded default configuration, which is for the embedded model only.
    file = None if is_resumed and not own else loaded.file
    left_out = {*RUN_DIRECTORY_KEYS, *MODEL_KEYS, MODEL_KEY, *([] if own else TRY_KEYS), *blamed}
    given = [one for one in loaded.overrides if not all(_is_in(key, left_out) for key in loaded.keys_set_by(one))]
    if file is not None:
        given += [override(key, None) for key in (*RUN_DIRECTORY_KEYS, *MODEL_KEYS) if _value(config, key) is not None]
    # in the words of the command, which may be another trainer's
    named_by = (key_of(one) for one in loaded.overrides if MODEL_KEY in loaded.keys_set_by(one))
    given = with_override(given, next(named_by, MODEL_KEY), REAL_MODEL)
    is_kept = file is not None or loaded.file is None
    if not own and not (is_kept and loaded.is_set_by_user("data.train")):
        given = with_override(given, "data.train.data_path", EMBEDDED)
    # With packs of a whole set, a batch must be large enough for a pack.
    if config.policy.packing.mode != "dataset" and not (is_kept and loaded.is_set_by_user(BATCH_SIZE_KEY)):
        given = with_override(given, BATCH_SIZE_KEY, suggested_batch_size(num_pairs))
    is_own_rate = is_kept and loaded.is_set_by_user(RATE_KEY) and RATE_KEY not in blamed
    if config.policy.lora.enabled and not is_own_rate:
        given = with_override(given, RATE_KEY, LORA_RATE)
    elif RATE_KEY in blamed and _is_still_set(RATE_KEY, file, given):
        given = with_override(given, RATE_KEY, Config().policy.optimizer.kwargs.lr)
    if SCHEDULER_KEY in blamed and _is_still_set(SCHEDULER_KEY, file, given):
        given = with_override(given, SCHEDULER_KEY, None)
    return tandem_command("train", *replace(loaded, file=file).file_arguments, *given)


def blamed_keys(verdicts: Sequence[Verdict]) -> set[str]:
    """Return the keys of the learning rate and its schedule that verdicts advise to change."""
    text = " ".join(verdict.text for verdict in verdicts)
    return {key for key, words in ADVICE.items() if any(one in text for one in words)}


def _is_in(key: str, keys: Collection[str]) -> bool:
    """Whether a key, or a section that contains it, is one of `keys`."""
    return any(f"{key}.".startswith(f"{one}.") for one in keys)


def _is_still_set(key: str, file: str | None, given: Sequence[str]) -> bool:
    """Whether a configuration file, or an override of a section that contains the key, may set it."""
    return file is not None or any(key.startswith(f"{key_of(one)}.") for one in given)


def _value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _has_own_pairs(loaded: LoadedConfig) -> bool:
    return any(one.data_path != EMBEDDED for one in loaded.config.data.training_sets)


def _sets(loaded: LoadedConfig) -> list[DatasetFields]:
    return [*loaded.config.data.training_sets, *loaded.config.data.validation_sets.values()]


def _validate_and_save_last(t: Training) -> list[ValidationReport]:
    """Run the last validation and save the last checkpoint, which is complete on disk when this returns."""
    if is_exhausted(t):  # by the validation of this step
        t.save()
        t.saver.wait()
        return []
    # A run killed from here on repeats the last validation, so its lines do not belong to the checkpoint.
    trained_bytes, owed = t.metrics.size(), t.progress.owes_validation
    ranked = False
    try:
        reports = t.validate() if t.setup.config.dpo.val_at_end else []
        ranked = True
    finally:
        t.progress = replace(t.progress, owes_validation=owed)
        t.save(trained_bytes, ranked=ranked)
        t.saver.wait()
    return reports


def write_per_pair(t: Training, path: Path) -> str:
    """Measure the current policy on every pair of the training and validation sets, and write the metrics to `path`.

    Return a line about the file for the output.
    """
    has_replaced = path.exists()
    contexts = {"train": t.context, **{validation.split: validation.context for validation in t.validation_sets}}
    batch_size = t.setup.config.policy.train_global_batch_size

    def tables() -> Iterator[tuple[str, PairTable, Preferences]]:
        for split, packer in t.setup.plan.packers().items():
            yield split, measure(t.policy, contexts[split], packer, batch_size, check=t.stopping.check), packer.store

    if t.ranks.is_first:
        PerPairFile(path, t.setup.config.dpo).write(tables())
    else:
        for _ in tables():  # measured together, written by one
            pass
    return f"{path}  {described(has_replaced=has_replaced)}"


def _measure_export(
    t: Training, model: Path, form: ExportForm, after: list[ValidationReport]
) -> list[ValidationReport]:
    """Validate the exported model, and print its metrics next to those of the model in memory, to show the effect of rounding."""
    if not after:
        return []
    exported = reload(t.setup, form, model, t.ranks)
    reports = [validate(exported, validation) for validation in t.validation_sets]
    for report in reports:
        t.write(replace(report, split=report.split.replace("validation-", "exported-")))
    t.reporter.change("\nExported model", ("in memory", f"exported ({form.dtype_name})"), after, reports)
    return reports

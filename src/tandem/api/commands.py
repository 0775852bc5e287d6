"""`tandem.evaluate`, `tandem.generate` and `tandem.export`: what the commands of the same names do, for Python."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from tandem.api.arguments import check_argument, with_checked_arguments
from tandem.api.process import own_process
from tandem.api.result import TrainResult
from tandem.api.rows import Rows, places_of, plain_row, store_rows
from tandem.config.load import Overrides
from tandem.config.sections.section import EMBEDDED, expand_home
from tandem.errors import ConfigError, DataError
from tandem.evaluation.records import Evaluation
from tandem.exporting.checkpoint import Exported
from tandem.exporting.checkpoint import export as run_export
from tandem.exporting.request import Form
from tandem.generation.generate import Generation
from tandem.generation.generate import generate as run_generate
from tandem.generation.records import DEFAULT_MAX_NEW_TOKENS, EngineName, EngineSettings, make_sampling
from tandem.report.reporter import Reporter, Verbosity
from tandem.terminal.arguments import option

FILE_ENDING = re.compile(r"\.[A-Za-z0-9]{1,8}\Z")
SHOWN_CHARACTERS = 60  # of a text in a message
Model = str | Path | TrainResult  # a TrainResult means its run


@with_checked_arguments
def evaluate(
    model: Model,
    data: str | Path | Sequence[str | Path] | Rows | None = None,
    *,
    rows: Rows | None = None,
    reference: Model | None = None,
    against: Model | None = None,
    beta: float | None = None,
    by: str | None = None,
    per_pair: str | Path | None = None,
    lm_eval: Sequence[str] = (),
    include_path: str | Path | None = None,
    limit: int | None = None,
    overrides: Overrides = (),
    allow_code: bool = False,
    verbosity: Verbosity = "quiet",
) -> Evaluation:
    """Measure how well a model orders preference pairs: `evaluate(run).total.accuracy` has a value and its interval.

    model: a model folder or hub name, `embedded`, or a run (its directory or what `train` returned),
    which means its exported model with its own reference.
    data: one or more files of pairs, or pairs as dicts; for a run, its validation sets by default.
    rows: pairs as dicts, in addition to files.
    reference: the model that implicit rewards compare with. Without one, a model is measured by its log-probabilities only.
    against: another model or run, measured on the same pairs.
    beta: the factor of implicit rewards; by default that of the run, or 0.1.
    by: a field of the rows; results are also given for each of its values.
    per_pair: a file to write the numbers of every pair to.
    lm_eval: tasks of the LM Evaluation Harness; include_path: a folder with more tasks; limit: examples per task.
    overrides: configuration keys, such as {"policy.precision": "float32"}, or a list of texts as on the command line.
    allow_code: whether the configuration of a run may name Python code to run, as with the user's own loss.
    """
    from tandem.evaluation.evaluate import evaluate as run_evaluate

    files, given = _files_or_rows(data)
    in_memory = {"data": given, "rows": rows}
    stored = {name: store_rows(name, one) for name, one in in_memory.items() if one is not None}
    with own_process("tandem.evaluate"), places_of(stored):
        return run_evaluate(
            _name(model),
            [*files, *map(str, stored.values())],
            reference=None if reference is None else _name(reference),
            against=None if against is None else _name(against),
            beta=beta,
            by=by,
            per_pair=None if per_pair is None else Path(per_pair),
            lm_eval=lm_eval,
            include_path=None if include_path is None else Path(include_path),
            limit=limit,
            overrides=overrides,
            allow_code=allow_code,
            reporter=Reporter(verbosity),
        )


@with_checked_arguments
def generate(
    model: Model,
    prompts: str | Path | Iterable[Any],
    *,
    compare: Model | None = None,
    num_samples: int = 1,
    temperature: float | None = None,
    top_p: float | None = None,
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    seed: int | None = None,
    engine: EngineName | EngineSettings = "transformers",
    chat_template: str | Path | None = None,
    out: str | Path | None = None,
    allow_code: bool = False,
    verbosity: Verbosity = "quiet",
) -> Generation:
    """Generate completions: `generate(run, ["Hello"]).records[0]["completions"][0]["completion"]` is a text.

    model: a model folder, a hub name, `embedded`, or a run (its directory or what `train` returned), which means its
    exported model.
    prompts: texts, lists of messages and rows ({"prompt": ...} or {"messages": [...]}) in a list, a datasets.Dataset or an
    iterator; or the path of a file (JSONL, CSV, Parquet, .txt, preference data).
    compare: another model that gets the same prompts.
    num_samples: completions per prompt. temperature: sample with it; None is greedy. top_p, seed: of sampling.
    max_new_tokens: the longest completion. engine: transformers, vllm or http, or its settings (EngineSettings).
    chat_template: a .jinja file, or none for plain text; by default that of the model.
    out: a JSONL file to write instead of returning `records`; the same call continues an incomplete one.
    allow_code: whether the format function that a run was trained with may read prompts that no known format fits.
    """
    if isinstance(prompts, str):
        _refuse_prompt_text(prompts)
    sampling = make_sampling(
        num_samples=num_samples, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed
    )
    settings = engine if isinstance(engine, EngineSettings) else EngineSettings(name=engine)
    for one in fields(EngineSettings):
        if (value := getattr(settings, one.name)) != one.default:
            check_argument(one.name, value)
    if chat_template is not None and settings.chat_template is not None:
        raise ConfigError(f"{option('chat_template', chat_template)}: engine has one too. Leave out one of them.")
    template = settings.chat_template if chat_template is None else chat_template
    if template is not None:
        settings = replace(settings, chat_template=expand_home(str(template)))
    found = prompts if isinstance(prompts, str | Path) else _listed_prompts(prompts)
    reporter = Reporter(verbosity)
    with own_process("tandem.generate"):
        return run_generate(
            _name(model),
            found,
            compare=None if compare is None else _name(compare),
            sampling=sampling,
            engine=settings,
            out=out,
            progress=reporter.progress,
            warn=reporter.warn,
            allow_code=allow_code,
        )


@with_checked_arguments
def export(
    run: Model,
    *,
    checkpoint: Literal["best", "latest"] | str | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None,
    form: Form | None = None,
    out: str | Path | None = None,
    max_shard_size: str | None = None,
    measured: bool = True,
    gguf: bool = False,
    llama_cpp: str | Path | None = None,
    push_to_hub: str | None = None,
    dry_run: bool = False,
    allow_env: Collection[str] = (),
    allow_code: bool = False,
    verbosity: Verbosity = "quiet",
) -> Exported:
    """Export a checkpoint of a run as a model folder: `export(run, checkpoint="best").folder` loads in transformers.

    run: a run (its directory or what `train` returned), or one of its checkpoints.
    checkpoint: best, latest or step_N; by default export.checkpoint of the run.
    dtype: of the weights. form: `adapter` or `merged`, for LoRA. out: the folder to write; by default RUN/exports/step_N.
    measured: whether to measure the export on the validation sets of the run.
    gguf: also write a GGUF file, with the converter of a checkout of llama_cpp.
    push_to_hub: a repository to upload to. dry_run: only list what would be uploaded.
    allow_env, allow_code: what the configuration of the run may do, as the options of `tandem export`.
    """
    with own_process("tandem.export"):
        return run_export(
            _name(run),
            reporter=Reporter(verbosity),
            checkpoint=checkpoint,
            dtype=dtype,
            form=form,
            out=out,
            max_shard_size=max_shard_size,
            measured=measured,
            gguf=gguf,
            llama_cpp=llama_cpp,
            push_to_hub=push_to_hub,
            dry_run=dry_run,
            allow_env=allow_env,
            allow_code=allow_code,
        )


def _files_or_rows(data: str | Path | Iterable[Any] | None) -> tuple[list[str], Rows | None]:
    """Return the files that `data` names, or else its rows. The first item decides; an iterator is not read further."""
    if data is None or isinstance(data, str | Path):
        return ([] if data is None else [str(data)]), None
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        return [], data  # refused as rows
    items = iter(data)
    first = next(items, None)
    if first is None:
        raise DataError(
            "data is empty. Give files or rows, or leave it out to measure on the validation sets of a run."
        )
    if not isinstance(first, str | Path):
        return [], chain([first], items)
    files = [first, *items]
    if other := next((one for one in files if not isinstance(one, str | Path)), None):
        raise ConfigError(
            f"data has files and an item of type {type(other).__name__}. Give files as data, and pairs as rows=[...]."
        )
    return [str(one) for one in files], None


def _listed_prompts(given: Iterable[Any]) -> list[Any]:
    """Return prompts as a list, with rows as plain dicts."""
    is_frame = hasattr(given, "iterrows")  # a DataFrame yields the names of its columns
    if isinstance(given, Mapping | bytes) or is_frame or not isinstance(given, Iterable):
        hint = ' Give frame.to_dict("records").' if is_frame else ""
        raise ConfigError(
            f"prompts is of type {type(given).__name__}, not a list of texts, of lists of messages or of rows.{hint}"
        )
    listed = list(given)
    if listed and isinstance(listed[0], Mapping) and {"role", "content"} <= listed[0].keys():
        raise DataError("prompts[0] is a message. Each prompt is a list of messages: give [[...]] for one.")
    return [plain_row(f"prompts[{n}]", one) if isinstance(one, Mapping) else one for n, one in enumerate(listed)]


def _name(model: Model) -> str:
    return str(model.run_dir if isinstance(model, TrainResult) else model)


def _refuse_prompt_text(given: str) -> None:
    """Refuse a text that is a prompt: it matches no file, and looks neither like the name of a file nor of a hub dataset."""
    is_text = " " in given or "\n" in given or "/" not in given
    if given == EMBEDDED or not is_text or FILE_ENDING.search(given) or glob(given):  # noqa: PTH207
        return
    shown = json.dumps(given if len(given) <= SHOWN_CHARACTERS else f"{given[:SHOWN_CHARACTERS]}…", ensure_ascii=False)
    raise DataError(f"prompts = {shown}: no such file. If it is a prompt, give a list: [{shown}].")

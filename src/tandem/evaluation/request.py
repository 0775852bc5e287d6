"""Resolves what an evaluation is asked for: models, references, data and tasks. Checks them before torch is imported."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.config.code import ChangedCodeError
from tandem.config.load import Given, LoadedConfig, Overrides, in_order, load_config
from tandem.config.losses import needs_reference
from tandem.config.schema import Config
from tandem.config.sections.datasets import DatasetFields
from tandem.config.sections.dpo import Dpo
from tandem.config.sections.policy import Lora
from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.config.sections.section import EMBEDDED
from tandem.data.formats.user_formats import formats_of
from tandem.errors import ConfigError, TandemError
from tandem.evaluation.data_requests import DataRequest, data_requests, each_once
from tandem.evaluation.reading import check_code, check_field
from tandem.evaluation.same_weights import refuse_same_weights
from tandem.evaluation.unused_keys import keys_and_texts, refuse_keys_of_training, refuse_unused_keys
from tandem.model.files.source import check_path, refuse_missing_model
from tandem.paths import check_data
from tandem.report.per_pair import check_per_pair
from tandem.storage.cache import is_checkpoint, is_export, is_run
from tandem.terminal.arguments import in_command, option, setting
from tandem.terminal.commands import override, tandem_command
from tandem.training.checkpoint.start_model import TrainedWith, base_of, config_without_data, reference_of
from tandem.training.run.other_folders import hint_of_run, refuse_without_model, what_runs_it_holds
from tandem.user_code import RefusedCodeError

LENGTH_KEY = "policy.max_total_sequence_length"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A model to load: its settings, and the argument or option that names it, for messages."""

    name: str
    key: str
    policy: PolicyConfig
    trained_with: TrainedWith | None = None  # what a run stored about policy.model_name, which may have changed since


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model to measure, and the reference that its implicit rewards compare it with."""

    name: str  # as given
    model: ModelRequest
    reference: ModelRequest | None
    config: Config
    dpo: Dpo  # whose implicit rewards are measured
    run: Path | None  # or a checkpoint of one
    sets_length: bool  # whether the longest sequence is given, by the run or by an override
    sets_fields: bool  # whether overrides say how data is read
    own_formats: tuple[str, ...] = ()  # functions for files that no known format fits: the run's, then the other run's
    refused_formats: Mapping[str, str]  # those that may not be run, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checked evaluation: nothing has been loaded yet."""

    subject: Subject
    against: Subject | None
    data: tuple[DataRequest, ...]
    left_out: tuple[str, ...]  # of the data that was given, what is measured under another name, in sentences
    by: str | None
    per_pair: Path | None
    tasks: tuple[str, ...]
    include_path: Path | None
    limit: int | None


def check_request(
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
) -> Request:
    """Check the arguments of `evaluate`, which has the same ones."""
    overrides = in_order(overrides)
    refuse_keys_of_training(overrides)
    if beta is not None and not 0 < beta < float("inf"):
        raise ConfigError(f"{option('beta', beta)}: not a positive number.")
    if per_pair is not None:
        check_per_pair(per_pair)
    _check_options_of_tasks(lm_eval, include_path, limit)
    if (model_path := next((path for path in data if _is_model(Path(path))), None)) is not None:
        options = {"against": against, "reference": reference, "beta": beta, "by": by, "per_pair": per_pair}
        options |= {"lm_eval": lm_eval, "include_path": include_path, "limit": limit, "allow_code": allow_code}
        raise ConfigError(_given_as_data(model_path, model, data, options, overrides))
    subject, other = _subjects(model, against, reference, beta, overrides, allow_code=allow_code)
    once, left_out = each_once(data)
    sets = data_requests(once, subject, tasks=bool(lm_eval))
    refuse_unused_keys(
        overrides,
        [one.path for one in sets],
        beta=beta,
        has_run=any(one is not None and one.run is not None for one in (subject, other)),
        are_of_run=not data and subject.run is not None,
    )
    check_data({one.name: one.fields or DatasetFields(data_path=one.path) for one in sets})
    for one in (subject, other):
        if one is not None:
            check_code(sets, one)
    if not sets and (per_pair is not None or by is not None):
        raise ConfigError(
            f"{option('per_pair')} and {option('by')} describe pairs, but no {option('data')} is given. Add a data file."
        )
    if by is not None:
        check_field(sets, by)
    return Request(
        subject=subject,
        against=other,
        data=sets,
        left_out=left_out,
        by=by,
        per_pair=per_pair,
        tasks=tuple(lm_eval),
        include_path=include_path,
        limit=limit,
    )


def _check_options_of_tasks(lm_eval: Sequence[str], include_path: Path | None, limit: int | None) -> None:
    tasks = option("lm_eval", metavar="TASKS")
    if include_path is not None and not lm_eval:
        raise ConfigError(f"{option('include_path', include_path)} has no effect without {tasks}. Leave it out.")
    if limit is not None and not lm_eval:
        raise ConfigError(f"{option('limit', limit)} has no effect without {tasks}. Leave it out.")
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(
            f"{option('include_path', include_path)}: no such directory. Give a folder with task files (.yaml)."
        )


def _subjects(
    model: str, against: str | None, reference: str | None, beta: float | None, overrides: Given, *, allow_code: bool
) -> tuple[Subject, Subject | None]:
    """The model to measure, and the one to compare it with, which must have other weights."""
    subject = _subject("model", model, reference, beta, overrides, allow_code=allow_code)
    if against is None:
        return subject, None
    other = _subject("against", against, reference, beta, overrides, allow_code=allow_code)
    refuse_same_weights(subject, other)
    return _with_formats_of(subject, other), _with_formats_of(other, subject)


def _subject(
    key: str, name: str, reference: str | None, beta: float | None, overrides: Given, *, allow_code: bool
) -> Subject:
    own = Path(name) if _has_settings(Path(name)) else None
    if own is None:
        loaded = load_config(None, [*overrides, override("policy.model_name", EMBEDDED)])
        config = loaded.config
        model = named_model(key, name, config.policy)
        compared, dpo = None, Dpo()
    else:
        loaded = _loaded_run(own, overrides, allow_code=allow_code)
        config = loaded.config
        model = model_of_run(key, own, config)
        compared = _reference_of_run(own, config) if needs_reference(config.dpo.preference_loss) else None
        dpo = config.dpo.model_copy(update={"wpo": False})  # weights of pairs change neither rewards nor accuracy
    if reference is not None:
        compared = named_model("reference", reference, config.policy)
        dpo = dpo if needs_reference(dpo.preference_loss) else Dpo()
    if own is None and compared is None:
        # Rewards are then log-probabilities, and margins their differences.
        dpo = Dpo(preference_loss="cpo", reference_policy_kl_penalty=1.0)
        if beta is not None:
            raise ConfigError(
                f"{option('beta', beta)} scales implicit rewards, which need a reference. Add "
                f"{option('reference', metavar='MODEL')}."
            )
    elif beta is not None:
        dpo = dpo.model_copy(update={"reference_policy_kl_penalty": beta})
    given = [changed for changed, _ in keys_and_texts(overrides)]
    if "data.pairing" not in given:
        config = config.model_copy(update={"data": config.data.model_copy(update={"pairing": "all"})})
    return Subject(
        name=name,
        model=model,
        reference=compared,
        config=config,
        dpo=dpo,
        run=own,
        sets_length=own is not None or LENGTH_KEY in given,
        sets_fields=any(one.startswith("data.default") for one in given),
        own_formats=() if own is None else formats_of(config.data.training_sets),
        refused_formats=loaded.refused_formats,
    )


def _with_formats_of(subject: Subject, other: Subject) -> Subject:
    """Return a subject that also reads files with the format functions of the run that it is compared with."""
    return replace(
        subject,
        own_formats=(*subject.own_formats, *other.own_formats),
        refused_formats={**other.refused_formats, **subject.refused_formats},
    )


def _loaded_run(run: Path, overrides: Given, *, allow_code: bool) -> LoadedConfig:
    try:
        return load_config(str(run / "config.yaml"), overrides, allow_code=allow_code, needs_formats=False)
    except ChangedCodeError as error:
        raise ChangedCodeError(f"{error} To evaluate the run with another loss, add dpo.preference_loss=dpo.") from None


def named_model(key: str, name: str, policy: PolicyConfig) -> ModelRequest:
    """The settings that load a model folder, a hub name, an adapter folder, the model of a run, or a checkpoint."""
    folder = Path(name)
    if _has_settings(folder):
        return model_of_run(key, folder, config_without_data(folder))
    plain = policy.model_copy(update={"model_name": name, "revision": None, "lora": Lora(), "weights": "float32"})
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        base = _base_of_adapter(key, folder)
        adapted = Lora(enabled=True, adapter=str(folder))
        return ModelRequest(name=name, key=key, policy=plain.model_copy(update={"model_name": base, "lora": adapted}))
    if not folder.is_dir() and folder.exists():
        raise ConfigError(f"{setting(key, name)}: a file, not a model folder or a run. Give the folder.")
    if not folder.exists():
        refuse_missing_model(setting(key, name), name)
    elif not (folder / "config.json").is_file() and (runs := what_runs_it_holds(folder)):
        raise ConfigError(f"{setting(key, name)}: {runs}.{hint_of_run(folder)}")
    check_path(key, name)
    return ModelRequest(name=name, key=key, policy=plain)


def _has_settings(folder: Path) -> bool:
    """Whether `folder` is a run or a checkpoint of one: both contain the configuration of the run, and no model."""
    return is_checkpoint(folder) or ((folder / "config.yaml").is_file() and not is_export(folder))


def model_of_run(key: str, run: Path, config: Config) -> ModelRequest:
    """The settings that load RUN/model, which is a model or, without merging, an adapter. Or those for a checkpoint's export."""
    policy = config.policy
    if is_checkpoint(run):
        check_path(key, str(run))
        changes = {"model_name": str(run), "revision": None, "weights": "float32", "lora": Lora()}
        return ModelRequest(name=str(run), key=key, policy=policy.model_copy(update=changes))
    folder = run / "model"
    refuse_without_model(setting(key, run), run)
    plain = {"revision": None, "weights": "float32", "compile": policy.compile}
    if (folder / "adapter_config.json").is_file():
        lora = policy.lora.model_copy(update={"adapter": str(folder), "dropout": 0.0})
        return ModelRequest(
            name=str(run),
            key=key,
            policy=policy.model_copy(update={"lora": lora, "weights": "float32"}),
            trained_with=base_of(run, config),
        )
    check_path(key, str(folder))
    changes = {**plain, "model_name": str(folder), "lora": Lora()}
    return ModelRequest(name=str(run), key=key, policy=policy.model_copy(update=changes))


def _reference_of_run(run: Path, config: Config) -> ModelRequest:
    """The model that a run trained against: reference.model, or the model that it started from, with its adapter."""
    key = f"reference of {run}"
    if config.reference.model is not None:
        named = named_model(key, config.reference.model, config.policy)
        return replace(named, trained_with=reference_of(run, config))
    name = config.policy.model_name
    check_path(key, name, config.policy.revision)
    policy = config.policy.model_copy(update={"weights": "float32"})
    if config.policy.lora.adapter is None and config.policy.lora.quantization is None:
        policy = policy.model_copy(update={"lora": Lora()})  # new adapters change nothing
    return ModelRequest(name=name, key=key, policy=policy, trained_with=reference_of(run, config))


def _base_of_adapter(key: str, folder: Path) -> str:
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError, OSError):
        base = None
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{setting(key, folder)}: an adapter whose adapter_config.json does not name its base model. Merge it into its "
            "base model, and give that folder."
        )
    return base


def _is_model(path: Path) -> bool:
    return is_run(path) or is_checkpoint(path) or is_export(path)


def _given_as_data(path: str, model: str, data: Sequence[str], options: dict[str, Any], overrides: Given) -> str:
    """Return a message about a run or model that is given as data, with the command that compares with it."""
    what = "a run" if is_run(Path(path)) else "a checkpoint" if is_checkpoint(Path(path)) else "a model"
    begin = f"{setting('data', path)}: {what}, not data."
    if options["against"] is not None:
        return f"{begin} Leave it out: {option('against', options['against'])} names the model to compare with."
    compared = options | {"against": path}
    if not in_command():
        return f"{begin} To compare {model} with it, give {option('against', path)}."
    files = [one for one in data if not _is_model(Path(one))]
    needs_data = not files and not _has_validation_sets(Path(model))
    compared["allow_code"] = compared["allow_code"] or _needs_code(model, files, compared, overrides)
    words = [word for name, value in compared.items() if value for word in _option_words(name, value)]
    changes = [one for one in overrides if isinstance(one, str)]
    command = tandem_command("eval", model, *files, *(["DATA"] if needs_data else []), *changes, *words)
    how = "With DATA, a file of preference pairs, compare" if needs_data else "To compare"
    return f"{begin} {how} {model} with it: {command}"


def _has_validation_sets(run: Path) -> bool:
    if not _has_settings(run):
        return False
    loaded = load_config(str(run / "config.yaml"), ["dpo={}"], needs_formats=False)  # no code is needed to know
    return bool(loaded.config.data.validation_sets)


def _needs_code(model: str, files: Sequence[str], options: dict[str, Any], overrides: Given) -> bool:
    """Whether an evaluation is refused because the configuration of a run names code."""
    try:
        check_request(model, files, **options, overrides=overrides)
    except RefusedCodeError:
        return True
    except TandemError:  # reported when the command is run
        return False
    return False


def _option_words(name: str, value: Any) -> list[str]:
    """Return an option and its value, as words of a command."""
    if value is True:
        return [option(name, True)]
    return [option(name), ",".join(value) if isinstance(value, list | tuple) else str(value)]

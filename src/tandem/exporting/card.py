"""Writes the text of an export's model card: README.md with the front matter that the Hugging Face hub reads.

The card shows no directories: of a local model or data file, it shows only the last part of the path. Values that come from
environment variables are not shown.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tandem import __version__
from tandem.config.load import LoadedConfig
from tandem.config.sections.dpo import Dpo
from tandem.config.sections.section import EMBEDDED
from tandem.config.source.yaml_text import to_yaml
from tandem.data.read.hub import is_hub_name
from tandem.data.store.sets import PUBLISHED_SETS, Sets
from tandem.exporting.licence import Licence, licence_of
from tandem.model.architecture import is_multimodal
from tandem.model.files.source import ModelSource
from tandem.storage.cache import is_checkpoint, read_json, real_path
from tandem.terminal.printable import escaped, scrubbed
from tandem.training.checkpoint.ranking import Record
from tandem.training.validation import ValidationReport

CARD = "README.md"
SHOWN_METRICS = ("loss", "accuracy", "rewards_margin_mean", "rewards_chosen_mean", "rewards_rejected_mean")
# Settings that decide the trained model. None of them is a path.
SETTINGS = (
    "dpo.preference_loss", "dpo.reference_policy_kl_penalty", "dpo.preference_loss_weight", "dpo.sft_loss_weight",
    "dpo.max_num_epochs", "dpo.max_num_steps", "policy.train_global_batch_size", "policy.max_total_sequence_length",
    "policy.optimizer.kwargs.lr", "policy.optimizer.kwargs.weight_decay", "policy.optimizer.kwargs.betas",
    "policy.scheduler", "policy.max_grad_norm", "policy.precision", "policy.weights", "policy.packing.mode",
    "data.pairing", "data.overlong", "run.seed",
)  # fmt: skip
NOT_SHOWN = ("dpo.val_", "dpo.early_stopping_patience")
LORA_SETTINGS = (
    *("dim", "alpha", "use_rslora", "use_dora", "dropout", "target_modules", "target_parameters", "exclude_modules"),
    *("modules_to_save", "trainable_token_indices", "loraplus_lr_ratio", "quantization"),
)
PACKAGES = ("torch", "transformers", "peft")
FINGERPRINT_DIGITS = 12


@dataclass(frozen=True, slots=True)
class DataSet:
    """What the card shows about a training or validation set."""

    split: str
    name: str
    num_pairs: int | None
    fingerprint: str | None  # of the tokenised pairs


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Everything that a model card reports."""

    loaded: LoadedConfig
    source: ModelSource
    step: int
    dtype: str
    is_adapter: bool
    data: Sequence[DataSet]
    records: Sequence[Record]  # the lines of metrics.jsonl
    exported: Sequence[ValidationReport] = field(default=())  # measured on the exported model
    not_measured: str | None = None  # why the exported model was not measured


def model_card(facts: CardFacts) -> str:
    """Return the text of README.md."""
    tree = facts.loaded.as_tree()  # without values from the environment
    licence = licence_of(facts.source.folder)
    sections = [
        _front_matter(facts, tree, licence),
        _introduction(facts, tree, licence),
        _use(facts),
        _data(facts.data),
        _metrics(facts),
        _settings(tree),
        _versions(),
    ]
    return escaped(scrubbed("\n".join(sections)))


def data_sets(loaded: LoadedConfig, sets: Sets) -> list[DataSet]:
    """Return what the card shows about each set of a run whose data can be read."""
    names = _set_names(loaded.as_tree())
    held_out = f"{loaded.config.data.validation_share:g} of the training preferences, held out"
    training = {split: store for split, store in sets.read.items() if split.startswith("train")}
    if loaded.config.data.validation_share and len(training) == 1:
        training = {"train": sets.train}  # without the preferences held out for validation
    validation = {f"validation-{name}": store for name, store in sets.validation.items()}
    return [
        DataSet(split, names.get(split, held_out), int(store.num_pairs.sum()), store.fingerprint[:FINGERPRINT_DIGITS])
        for split, store in {**training, **validation}.items()
    ]


def recorded_sets(
    loaded: LoadedConfig, fingerprints: dict[str, str], records: Sequence[Record], num_pairs: Mapping[str, int]
) -> list[DataSet]:
    """Return what the card shows about each set of a run whose data cannot be read.

    The information comes from the configuration, the fingerprints in a checkpoint, and the lines of metrics.jsonl. `num_pairs`:
    of each training set, as `described_pairs` returns them.
    """
    names = _set_names(loaded.as_tree())
    measured = {one["split"]: one for one in records if "data" in one and one["split"].startswith("validation-")}
    training = [split for split in names if split.startswith("train")]
    digest = fingerprints.get("training data", "")[:FINGERPRINT_DIGITS] or None
    return [
        *(
            DataSet(split, names[split], num_pairs.get(split), digest if len(training) == 1 else None)
            for split in training
        ),
        *(
            DataSet(split, names.get(split, "held out"), int(one["num_pairs"]), str(one["data"]))
            for split, one in measured.items()
        ),
    ]


def described_pairs(run: Path | None) -> dict[str, int]:
    """Return the number of pairs of each set, from setup.json of a run. Sets that it does not describe are left out."""
    try:
        sets = read_json(run / "setup.json")["sets"] if run is not None else []
        return {one["name"]: one["num_pairs"] for one in sets if type(one["num_pairs"]) is int}
    except (ValueError, KeyError, TypeError):
        return {}


def shown_model(name: str) -> str:
    """Return the name of a model for the card: its name on the hub, or the last part of a local path."""
    if name == EMBEDDED:
        return "tandem's embedded tiny model"
    if name.startswith("${"):
        return "a model named in the environment"
    if is_checkpoint(Path(name)):
        place = real_path(name)
        return f"{place.parent.parent.name}, {place.name}"
    return name if _is_hub_model(name) else Path(name).name


def _is_hub_model(name: str) -> bool:
    return name != EMBEDDED and not name.startswith(("/", ".", "~", "${")) and not Path(name).exists()


def _front_matter(facts: CardFacts, tree: dict[str, Any], licence: Licence) -> str:
    base = tree["policy"]["model_name"]
    hub_sets = sorted(set(_hub_sets(tree)))
    given = tree["dpo"]["preference_loss"]
    losses = [given] if isinstance(given, str) else sorted(given)
    matter: dict[str, Any] = {
        "library_name": "peft" if facts.is_adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if is_multimodal(facts.source.config) else "text-generation",
        **({"base_model": base} if _is_hub_model(base) else {}),
        **({"base_model_relation": "adapter"} if facts.is_adapter and _is_hub_model(base) else {}),
        **({"datasets": hub_sets} if hub_sets else {}),
        **licence.front_matter(),
        "tags": list(
            dict.fromkeys(["tandem", "preference-training", *losses, *(["lora"] if facts.is_adapter else [])])
        ),
    }
    return f"---\n{to_yaml(matter)}---\n"


def _introduction(facts: CardFacts, tree: dict[str, Any], licence: Licence) -> str:
    base = shown_model(tree["policy"]["model_name"])
    revision = tree["policy"]["revision"] or _hub_commit(facts.source.folder)
    what = "LoRA adapter for" if facts.is_adapter else "model trained from"
    reference = tree["reference"]["model"]
    rows = {
        "base model": base,
        **({"revision": revision} if revision else {}),
        "licence of the base model": licence.name or "not stated in its folder",
        **({"reference model": shown_model(reference)} if reference else {}),
        "step": facts.step,
        "weights": f"{facts.dtype}{', adapters alone' if facts.is_adapter else ''}",
    }
    return (
        f"# {_cell(tree['run']['name'])}, step {facts.step}\n\n"
        f"A {what} {_cell(base)} on preference pairs, with tandem {__version__}.\n\n"
        + _table(["", ""], [[name, value] for name, value in rows.items()])
    )


def _use(facts: CardFacts) -> str:
    multimodal = is_multimodal(facts.source.config)
    auto = "AutoModelForImageTextToText" if multimodal else "AutoModelForCausalLM"
    if facts.is_adapter and multimodal:
        load = (
            f"from peft import PeftModel\nfrom transformers import {auto}\n\n"
            f'base = {auto}.from_pretrained("BASE_MODEL")\n'
            'model = PeftModel.from_pretrained(base, "FOLDER_OR_REPO")'
        )
    elif facts.is_adapter:
        load = 'from peft import AutoPeftModelForCausalLM\n\nmodel = AutoPeftModelForCausalLM.from_pretrained("FOLDER_OR_REPO")'
    else:
        load = (
            f"from transformers import {auto}, AutoTokenizer\n\n"
            f'model = {auto}.from_pretrained("FOLDER_OR_REPO")\n'
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_REPO")'
        )
    note = "\nOnly the text model was trained. All other weights are those of the base model.\n" if multimodal else ""
    return f"## Use\n\n```python\n{load}\n```\n{note}"


def _data(data: Sequence[DataSet]) -> str:
    rows = [
        [one.split, one.name, "" if one.num_pairs is None else f"{one.num_pairs:,}", one.fingerprint or ""]
        for one in data
    ]
    return "## Data\n\n" + _table(["set", "source", "pairs", "fingerprint"], rows)


def _metrics(facts: CardFacts) -> str:
    """Return the section with metrics: before training, of the exported step in memory, and of the exported weights."""
    exported = {report.split: report.metrics for report in facts.exported}
    splits = [one["split"] for one in facts.records if one["split"].startswith("validation-")]
    rows = []
    for split in dict.fromkeys([*splits, *exported, "train"]):
        own = [one for one in facts.records if one["split"] == split and one["step"] <= facts.step]
        first = next((one for one in own if one["step"] == (1 if split == "train" else 0)), None)
        last = own[-1] if own and own[-1]["step"] == facts.step else None
        for name in SHOWN_METRICS:
            values = [of.get(name) if of else None for of in (first, last, exported.get(split))]
            if any(value is not None for value in values):
                rows.append([split, name, *("" if value is None else f"{value:.4f}" for value in values)])
    columns = ["set", "metric", "before (train: step 1)", f"step {facts.step}", f"exported ({facts.dtype})"]
    note = f"\nThe exported weights were not measured: {facts.not_measured}\n" if facts.not_measured else ""
    return "## Metrics\n\n" + (_table(columns, rows) if rows else "None were recorded.\n") + note


def _settings(tree: dict[str, Any]) -> str:
    defaults = Dpo().model_dump()
    changed = [f"dpo.{key}" for key in tree["dpo"] if key not in defaults or tree["dpo"][key] != defaults[key]]
    keys = dict.fromkeys([*SETTINGS, *(key for key in changed if not key.startswith(NOT_SHOWN))])
    rows = [[f"`{key}`", _as_yaml(_value(tree, key))] for key in keys]
    if (lora := tree["policy"]["lora"])["enabled"]:
        rows += [[f"`policy.lora.{key}`", _as_yaml(lora[key])] for key in LORA_SETTINGS]
    return "## Settings\n\nKeys of tandem's configuration.\n\n" + _table(["key", "value"], rows)


def _versions() -> str:
    rows = [
        ["tandem", __version__],
        *([name, _version(name)] for name in PACKAGES),
        ["Python", platform.python_version()],
    ]
    return "## Versions\n\n" + _table(["package", "version"], rows)


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _set_names(tree: dict[str, Any]) -> dict[str, str]:
    """Return a dict from split to the source of the set: the name of a hub dataset or of a file."""
    data = tree["data"]
    train = data.get("train") or {"data_path": EMBEDDED}
    several = train if isinstance(train, list) else [train]
    names = {"train" if len(several) == 1 else f"train-{i}": _set_name(one) for i, one in enumerate(several)}
    if data.get("validation"):
        names["validation-default"] = _set_name(data["validation"])
    elif any(one.get("data_path") == EMBEDDED for one in several) and not data.get("validation_share"):
        names["validation-default"] = "the pairs bundled with tandem"
    return names | {f"validation-{name}": _set_name(one) for name, one in (data.get("val_data_paths") or {}).items()}


def _set_name(given: dict[str, Any]) -> str:
    path = given.get("data_path")
    if path == EMBEDDED:
        return "the pairs bundled with tandem"
    if path is None:
        return str(PUBLISHED_SETS.get(given.get("dataset_name", ""), {}).get("data_path", "unknown"))
    if path.startswith("${"):
        return "named in the environment"
    return path if is_hub_name(path) else Path(path).name


def _hub_sets(tree: dict[str, Any]) -> list[str]:
    return [name for name in _set_names(tree).values() if is_hub_name(name)]


def _hub_commit(folder: Path) -> str | None:
    """Return the commit of a model in the hub's cache (models--NAME/snapshots/COMMIT); None for other folders."""
    return folder.name if folder.parent.name == "snapshots" else None


def _value(tree: dict[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _table(columns: list[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(_cell(value) for value in line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    """Return a value as text for one cell of a Markdown table. Characters that would end the cell or begin a tag are escaped."""
    text = " ".join(str(value).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")

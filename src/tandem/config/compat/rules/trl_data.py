"""Rules for TRL's configurations and scripts: the model, adapters and data."""

from collections.abc import Mapping
from typing import Any

from tandem.config.compat.records import Given, Outcome, no_effect, refused, translated
from tandem.config.compat.rules.hugging_face import SetError, rows_of_split
from tandem.config.sections.policy import ALL_LINEAR

FILE_LOADERS = ("json", "csv", "parquet", "arrow")  # names that datasets has for kinds of files
FILE_ENDINGS = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".gz", ".zst")
PEFT_LAYERS = ["q_proj", "v_proj"]
PEFT_LAYERS_NOTE = "peft's own choice for most models; set target_modules for others"
MERGED_NOTE = "save_model writes the adapter; tandem export RUN --merged merges it"
SCRIPT_LORA = {"r": 8, "lora_alpha": 8}  # defaults of LoraConfig
READ_FIELDS = ("path", "name", "data_dir", "data_files", "split", "revision")
AFTER_LOADING = ("select", "shuffle", "train_test_split", "part")  # what a script does to a dataset
OTHER_DATASET = {"train_dataset": "eval_dataset", "eval_dataset": "train_dataset"}
UNREAD = "The same rows are read without it."
FREE_FIELDS = ("columns", "streaming", "num_proc", "cache_dir", "token", "trust_remote_code")


def evaluation_strategy(given: Given) -> str:
    """no, steps or epoch. YAML reads a bare no as false."""
    value = given.get("eval_strategy", given.get("evaluation_strategy"))
    return "no" if value in (None, False) else str(value).lower()


def evaluates(given: Given) -> bool:
    return evaluation_strategy(given) != "no"


def trains_adapters(given: Given) -> bool:
    return bool(given.get("use_peft")) or "peft_config" in given


def data_type(key: str, value: Any, given: Given) -> Outcome:
    """The data type that weights are loaded in. It is also that of training."""
    if trains_adapters(given):
        return no_effect(
            "Only adapters are trained, in float32. Frozen weights keep their published type in bfloat16 runs."
        )
    match str(value).removeprefix("torch."):
        case "float32":
            return translated({"policy.weights": "float32"})
        case "bfloat16":
            note = "small updates are lost, as in TRL; bfloat16_stochastic keeps them, and float32 is exact"
            return translated({"policy.weights": "bfloat16_nearest"}, note)
        case "auto" | "None":
            note = (
                "float32 is exact; for the model's bfloat16, set policy.weights=bfloat16_nearest or bfloat16_stochastic"
            )
            return translated({"policy.weights": "float32"}, note)
    return refused("tandem trains weights in float32 or bfloat16. Set it to one of them.")


def reference_model(key: str, value: Any, given: Given) -> Outcome:
    if value == given.get("model_name_or_path"):
        return no_effect("It is the model before training, as by default.")
    return translated({"reference.model": value})


def tokenizer(key: str, value: Any, given: Given) -> Outcome:
    if value == given.get("model_name_or_path"):
        return no_effect("It is the model's own.")
    return translated({"policy.tokenizer.name": value})


def use_peft(key: str, value: Any, given: Given) -> Outcome:
    """Adapters. Defaults of TRL that differ from tandem's apply if their keys are not set."""
    settings: dict[str, Any] = {"policy.lora.enabled": True}
    if given.get("lora_dropout") is None:
        settings["policy.lora.dropout"] = 0.05
    return _with_layers(settings, given.get("lora_target_modules"))


def peft_config(key: str, value: Any, given: Given) -> Outcome:
    """A LoraConfig(...) call of a script, whose defaults are peft's."""
    if str(value).upper() != "LORA":
        return refused("tandem trains LoRA adapters.")
    settings: dict[str, Any] = {"policy.lora.enabled": True}
    if given.get("peft_config.r") is None:
        settings["policy.lora.dim"] = SCRIPT_LORA["r"]
    if given.get("peft_config.lora_alpha") is None:
        settings["policy.lora.alpha"] = SCRIPT_LORA["lora_alpha"]
    return _with_layers(settings, given.get("peft_config.target_modules"))


def exported_adapter(key: str, value: Any, given: Given) -> Outcome:
    """TRL's save_model writes the adapter alone."""
    is_on = trains_adapters(given) and given.get("policy.lora.enabled") is not False
    return translated({"export.merge_lora": False}, MERGED_NOTE) if is_on else no_effect("")


def _with_layers(settings: dict[str, Any], layers: Any) -> Outcome:
    if layers is not None:
        return translated(settings)
    return translated({**settings, "policy.lora.target_modules": PEFT_LAYERS}, PEFT_LAYERS_NOTE)


def layers(key: str, value: Any, given: Given) -> Outcome:
    """target_modules: all-linear, a regular expression, or a list of names. TRL reads a list of one item as its item."""
    names = value.split(",") if isinstance(value, str) and "," in value and "(" not in value else value
    if names in (ALL_LINEAR, [ALL_LINEAR]):
        return translated({"policy.lora.target_modules": ALL_LINEAR})
    if isinstance(names, str) and names.isidentifier():
        names = [names]
    return translated({"policy.lora.target_modules": names})


def dataset(key: str, value: Any, given: Given) -> Outcome:
    """dataset_name and its companions. The same set has the split to validate on."""
    if given.get("datasets"):
        return no_effect("datasets names the data.")
    found: dict[str, Any] = {}
    if str(given.get("dataset_name")).endswith(FILE_ENDINGS):
        return _file(key, value, given)
    if key == "dataset_name":
        found["data.train.data_path"] = value
        if evaluates(given):
            found |= {"data.validation.data_path": value, "data.validation.split": _test_split(given)}
    if key == "dataset_config":
        found["data.train.subset"] = value
        if evaluates(given):
            found["data.validation.subset"] = value
    if key == "dataset_train_split":
        found["data.train.split"] = value
    if key == "dataset_test_split":
        if not evaluates(given):
            return no_effect("eval_strategy is no, so nothing is validated.")
        found["data.validation.split"] = value
    return translated(found)


def _file(key: str, value: Any, given: Given) -> Outcome:
    """The same keys if dataset_name is a file, which has no splits."""
    if key != "dataset_name":
        return no_effect("dataset_name is a file, which has no parts.")
    note = "a file has no split to validate on; to validate, set data.validation.data_path or data.validation_share"
    return translated({"data.train.data_path": value}, note if evaluates(given) else None)


def _test_split(given: Given) -> str:
    return given.get("dataset_test_split") or "test"


def mixture(key: str, value: Any, given: Given) -> Outcome:
    """datasets: a list of sets to train on together."""
    if not value:
        return no_effect("It is empty.")
    sets = [fields_of(one) for one in value]
    if reason := next((one for one in sets if isinstance(one, str)), None):
        return refused(reason)
    return translated({"data.train": sets[0] if len(sets) == 1 else sets})


def fields_of(entry: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return one dataset as fields of tandem's, or the reason why that is not possible."""
    entry = {name: one for name, one in entry.items() if one is not None and name not in FREE_FIELDS}
    path, files, split = entry.get("path"), entry.get("data_files"), entry.get("split")
    if unknown := [name for name in entry if name not in READ_FIELDS]:
        what = " data.train takes a weight for each set." if unknown[0] == "fraction" else ""
        return f"tandem cannot translate {unknown[0]} of a dataset.{what} Remove it."
    if "data_dir" in entry and ("name" in entry or files is not None or path in FILE_LOADERS):
        return "tandem reads data_dir of a hub dataset, without name and data_files. Give the folder as path."
    try:
        rows = {} if split is None else {"split": "train", **rows_of_split(split, "split")}
    except SetError as error:
        return str(error)
    if path in FILE_LOADERS:
        files = files.get(rows.get("split", "train")) if isinstance(files, Mapping) else files
        files = files[0] if isinstance(files, list) and len(files) == 1 else files
        if not isinstance(files, str):
            return "tandem reads one path per set. Write data_files as a pattern, such as FOLDER/*.jsonl."
        return {"data_path": files, **({"max_rows": rows["max_rows"]} if "max_rows" in rows else {})}
    if files is not None or path is None:
        return "tandem reads the files of a split, not data_files. Name the file itself with path: json and data_files."
    subset = entry.get("name", entry.get("data_dir"))
    found = {"data_path": path, "subset": subset, "revision": entry.get("revision"), **rows}
    return {name: one for name, one in found.items() if one is not None}


def script_dataset(key: str, value: Any, given: Given) -> Outcome:
    """train_dataset.* and eval_dataset.*: the load_dataset(...) calls of a script. Each key gives the same result."""
    section, _, field = key.partition(".")
    if section == "eval_dataset" and not evaluates(given):
        return no_effect("eval_strategy is no, so nothing is validated.")
    if field.split(".")[0] in FREE_FIELDS:
        return no_effect(UNREAD)
    entry = dict(given.get(section))
    limit = entry.get("select")
    file_of, _, split = field.partition(".")
    if file_of == "data_files" and split and split != (own := _split_name(entry)):
        other = given.get(OTHER_DATASET[section])
        is_read = isinstance(other, Mapping) and value == _file_of_split(other) and evaluates(given)
        reader = f"; {OTHER_DATASET[section]} reads this one" if is_read else ""
        return no_effect(f"split={own} reads the other file{reader}.")
    fields = fields_of({name: one for name, one in entry.items() if name not in AFTER_LOADING})
    if isinstance(fields, str):
        return refused(fields)
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            return refused("select(range(N)) needs a whole number above 0.")
        fields["max_rows"] = min(limit, fields.get("max_rows", limit))
    target = "data.train" if section == "train_dataset" else "data.validation"
    return translated({f"{target}.{name}": one for name, one in fields.items()})


def _split_name(entry: Mapping[str, Any]) -> str:
    """train of split=train[:1000], and if no split is given."""
    return str(entry.get("split") or "train").partition("[")[0]


def _file_of_split(entry: Mapping[str, Any]) -> Any:
    files = entry.get("data_files")
    return files.get(_split_name(entry)) if isinstance(files, Mapping) else files


def held_out(key: str, value: Any, given: Given) -> Outcome:
    if isinstance(value, float) and 0 < value < 1:
        return translated(
            {"data.validation_share": value}, "other pairs than TRL holds out; pairs of a prompt stay together"
        )
    return refused(
        "tandem holds out a share of the pairs, which are not counted yet. Set a number between 0 and 1, or replace it: "
        f"~{key} data.validation_share=0.05."
    )


RULES = (
    *(data_type, reference_model, tokenizer, use_peft, peft_config, layers, exported_adapter),
    *(dataset, mixture, script_dataset, held_out),
)

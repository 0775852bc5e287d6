"""The section `data`: preference sets, and how unusable rows are handled."""

from itertools import combinations
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tandem.columns import COLUMNS, OPTIONAL_COLUMNS
from tandem.config.sections.row_paths import parse_path
from tandem.config.sections.section import EMBEDDED, MAX_SCORE, PathText, Section, Share, UserFunctionName
from tandem.user_code import function_missing, is_user_function

MAX_EXPANSION = 100.0
# Which of two completions a label prefers: the first, the second or neither.
Side = Literal["a", "b", "tie"]
# The parts of a preference that data.*.columns can name: those that are needed together, and the optional ones.
COLUMN_SETS = {
    frozenset({"chosen", "rejected"}): frozenset({"prompt", "chosen_score", "rejected_score", "system", "tools"}),
    frozenset({"prompt", "completions", "scores"}): frozenset({"system", "tools"}),
    frozenset({"prompt", "response_a", "response_b", "label"}): frozenset({"system", "tools"}),
}


def spelled_label(value: Any) -> str:
    """Return a label as a text, so that 1, 1.0 and "1" are the same label, and so are "A" and "a"."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip().casefold()


def _as_texts(labels: Any) -> Any:
    """Return a mapping with its keys as texts: in YAML, the label 1 is a number, and the label true is not a text."""
    if not isinstance(labels, dict):
        return labels
    return {key if isinstance(key, str) else spelled_label(key): side for key, side in labels.items()}


def _path_as_dataset(value: Any) -> Any:
    return {"data_path": value} if isinstance(value, str) else value


DatasetName = Literal[
    "auto",
    "BinaryPreferenceDataset",
    "PreferenceDataset",
    "HelpSteer3",
    "Tulu3Preference",
    "aligner",
    "scored",
    "best_of_n",
    "sharegpt",
    "alpaca",
    "alpaca_pair",
    "messages_pair",
    "question_responses",
    "dialogue_text",
    "implicit_prompt",
    "openai_preference",
    "ms_swift",
    "question_pair",
    "HelpSteer2",
    "nectar",
    "oasst_tree",
    "webgpt",
    "summarize_from_feedback",
    "arena_votes",
    "labelled_pair",
]


class DatasetFields(Section):
    """Where a preference set is, and how to read it."""

    data_path: PathText | None = Field(
        default=None,
        description="a .jsonl, .json, .csv, .parquet or .arrow file (also compressed: .gz, .zst), a glob pattern of files, a "
        "folder (from datasets' save_to_disk, or laid out like a hub dataset), or a hub dataset, org/name; "
        "embedded: the bundled pairs",
    )
    dataset_name: DatasetName | UserFunctionName = Field(
        default="auto",
        description="row format; auto: detected from the keys of the first row of a known format; FILE.py:FUNCTION: a function "
        "that turns a row into one of a known format (docs/python.md)",
    )
    prompt_key: str = Field(default="prompt", description="field that holds the prompt (text or messages)")
    chosen_key: str = Field(default="chosen", description="field that holds the better completion")
    rejected_key: str = Field(default="rejected", description="field that holds the worse completion")
    label_key: str | None = Field(
        default=None,
        description="in rows of two completions and a label: field that holds the label; null: winner, preference, label or "
        "another known name",
    )
    label_values: Annotated[dict[str, Side], BeforeValidator(_as_texts)] = Field(
        default={},
        description="what the labels mean: a map of each label to a (the first completion is better), b (the second) or tie; "
        "numbers are never guessed. For example {1: a, 0: b}",
    )
    columns: dict[str, str] = Field(
        default={},
        description="paths to the parts of a preference in rows of no known format, such as {prompt: conversation[0].value, "
        "completions: answers[*].text, scores: answers[*].score} (docs/data-columns.md)",
    )
    weight_key: str | None = Field(
        default=None,
        description="field that holds the weight of a row, 0 or more, which multiplies the losses of its pairs; null: no weights",
    )
    margin_key: str | None = Field(
        default=None,
        description="field that holds the margin m of a row: the loss is -log sigmoid(beta d - m); null: no margins",
    )
    prompt_file: PathText | None = Field(
        default=None,
        description="text file to insert each prompt into, in place of {}; if a prompt has turns, its last user turn is inserted",
    )
    system_prompt_file: PathText | None = Field(
        default=None, description="text file with a system turn to add to prompts that have none; needs a chat template"
    )
    subset: str | None = Field(default=None, description="configuration of a hub dataset, or a folder in it")
    split: str | None = Field(default=None, description="split of a hub dataset or saved dataset; null: train")
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub dataset")
    max_rows: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="rows to read, from the beginning of the set; null: all"
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="training sets only: passes over the set per epoch; 2: twice; 0.5: a different half each epoch",
    )

    @field_validator("dataset_name", mode="before")
    @classmethod
    def _known_format(cls, value: Any) -> Any:
        *most, last = (f"'{name}'" for name in get_args(DatasetName))
        if isinstance(value, str) and value not in get_args(DatasetName) and not is_user_function(value):
            known = f"Input should be {', '.join(most)} or {last}"
            raise PydanticCustomError("literal_error", function_missing(value) or known)  # pyright: ignore
        return value

    @model_validator(mode="after")
    def _different_keys(self) -> "DatasetFields":
        keys = {"prompt_key": self.prompt_key, "chosen_key": self.chosen_key, "rejected_key": self.rejected_key}
        keys |= {COLUMNS[name].key: key for name, key in self.number_columns.items()}
        for (one, value), (other, same) in combinations(keys.items(), 2):
            if value == same:
                raise ValueError(f"{one} and {other} are both {value!r}, but must name different fields. Change one")
        return self

    @field_validator("label_values")
    @classmethod
    def _one_meaning(cls, value: dict[str, Side]) -> dict[str, Side]:
        for (one, side), (other, same) in combinations(value.items(), 2):
            if spelled_label(one) == spelled_label(other) and side != same:
                raise ValueError(
                    f"label_values: {one!r} and {other!r} are the same label, but mean {side} and {same}. Remove one"
                )
        return value

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, value: dict[str, str]) -> dict[str, str]:
        for part, path in value.items():
            try:
                parse_path(path)
            except ValueError as error:
                raise ValueError(
                    f"columns.{part} = {path[:80]}: {error}. Write it as conversation[0].value or answers[*].text"
                ) from None
        if value and not any(needed <= value.keys() <= needed | more for needed, more in COLUMN_SETS.items()):
            raise ValueError(
                f"columns has {', '.join(value)[:80]}. Give chosen and rejected (and prompt), or prompt, completions and "
                "scores, or prompt, response_a, response_b and label; system and tools may be added"
            )
        return value

    @model_validator(mode="after")
    def _columns_alone(self) -> "DatasetFields":
        fields = type(self).model_fields
        for name in ("dataset_name", "prompt_key", "chosen_key", "rejected_key", "label_key"):
            if self.columns and getattr(self, name) != fields[name].default:
                raise ValueError(
                    f"{name} = {getattr(self, name)} has no effect, since columns says where each part is. "
                    "Leave out one of them"
                )
        return self

    @property
    def sides_by_label(self) -> dict[str, Side]:
        return {spelled_label(label): side for label, side in self.label_values.items()}

    @property
    def paths_and_labels(self) -> list[Any]:
        """The settings for rows of no known format and for labels, if any is set."""
        settings = [self.label_key, self.sides_by_label, self.columns]
        return settings if any(settings) else []

    @property
    def settings_of_tokens(self) -> list[Any]:
        """The settings that determine which tokens a set has, apart from its prompt files."""
        first = [] if self.max_rows is None else [f"the first {self.max_rows} rows"]
        return [
            *(self.dataset_name, self.prompt_key, self.chosen_key, self.rejected_key),
            *self.paths_and_labels,
            *first,
        ]

    @property
    def number_columns(self) -> dict[str, str]:
        """The optional columns to read, and the field that holds each one: {"weight": "importance"} for weight_key=importance."""
        named = {column.name: getattr(self, column.key) for column in OPTIONAL_COLUMNS if column.key}
        return {name: key for name, key in named.items() if key is not None}


Dataset = Annotated[DatasetFields, BeforeValidator(_path_as_dataset, json_schema_input_type=str | DatasetFields)]


OneOrSeveral = Annotated[
    Annotated[Dataset, Tag("one")] | Annotated[Annotated[list[Dataset], Field(min_length=1)], Tag("several")],
    Discriminator(lambda given: "several" if isinstance(given, list) else "one"),
]


class Data(Section):
    """Preference sets, and how unusable rows are handled."""

    train: OneOrSeveral = Field(
        default=DatasetFields(data_path=EMBEDDED), description="training set: a dataset, a path, or a list of them"
    )
    validation: Dataset | None = Field(
        default=None,
        description="validation set, named default; null: none, or the bundled one with the bundled training set",
    )
    val_data_paths: dict[str, Dataset] = Field(
        default={}, description="more validation sets: a map of names to paths or datasets"
    )
    validation_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="share of the training preferences to hold out as the validation set named default; preferences with the "
        "same prompt stay together",
    )
    default: DatasetFields = Field(default=DatasetFields(), description="defaults for the fields of every dataset")
    shuffle: bool = Field(default=True, description="shuffle the training data every epoch, with run.seed")
    num_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="number of tokenising processes; auto: one per core, fewer for small files; 0: same as 1",
    )
    drop_last: bool = Field(default=True, description="drop the last batch of an epoch if it is incomplete")
    pairing: Literal["best_worst", "all", "adjacent"] = Field(
        default="best_worst", description="which pairs to make from more than two ranked completions"
    )
    overlong: Literal["drop", "truncate_prompt", "truncate_completion", "error"] = Field(
        default="drop",
        description="what to do with preferences longer than policy.max_total_sequence_length: drop and count them, truncate "
        "them, or stop with an error",
    )
    duplicates: Literal["keep", "drop", "error"] = Field(
        default="keep",
        description="what to do with preferences that have the same tokens as an earlier one, in the same set or an earlier "
        "training set: keep and count them, drop and count them, or stop with an error",
    )
    default_chosen_reward: float | None = Field(
        default=None, description="score of the best completion if the data has none"
    )
    default_rejected_reward: float | None = Field(
        default=None, description="score of the other completions if the data has none"
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error", description="malformed rows: stop with an error, or skip and count them"
    )
    max_bad_share: Share = Field(
        default=0.01, description="with on_bad_row=skip: stop if more than this share of rows is malformed"
    )
    max_filtered_share: Share = Field(
        default=0.1,
        description="stop if more than this share of rows is dropped (too long, empty, equal texts, tied scores)",
    )

    max_expansion: float = Field(
        default=MAX_EXPANSION,
        ge=1,
        allow_inf_nan=False,
        description="stop if a compressed file or a table expands to over 256 MiB and more than this many times its size",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_default(cls, given: Any) -> Any:
        """Copy the fields that a dataset does not set from data.default, so that the resolved configuration shows them."""
        if not isinstance(given, dict) or not isinstance(given.get("default"), dict):
            return given

        def fill(dataset: Any) -> Any:
            dataset = _path_as_dataset(dataset)
            return {**given["default"], **dataset} if isinstance(dataset, dict) else dataset

        filled = {name: fill(given[name]) for name in ("train", "validation") if name in given}
        if isinstance(given.get("train"), list):
            filled["train"] = [fill(dataset) for dataset in given["train"]]
        if isinstance(given.get("val_data_paths"), dict):
            filled["val_data_paths"] = {name: fill(dataset) for name, dataset in given["val_data_paths"].items()}
        return {**given, **filled}

    @field_validator("default_chosen_reward", "default_rejected_reward")
    @classmethod
    def _within_float32(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and abs(value) > MAX_SCORE:
            raise ValueError(
                f"data.{info.field_name} = {value:g} is too large: scores are stored as float32. Use at most "
                f"{MAX_SCORE:.1e}"
            )
        return value

    @field_validator("val_data_paths")
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"data.val_data_paths: {name!r} is not a valid name. Use letters, digits, - and _")
            if name == "default":
                raise ValueError(
                    "data.val_data_paths: the name default is reserved for data.validation. Use another name"
                )
        return value

    @model_validator(mode="after")
    def _check_validation_sets(self) -> "Data":
        if self.validation_share and (self.validation or self.val_data_paths):
            raise ValueError(
                "data.validation_share makes a validation set, but data.validation or data.val_data_paths already gives one. "
                "Leave out one of them"
            )
        for name, dataset in self.validation_sets.items():
            if dataset.weight != 1:
                raise ValueError(
                    f"validation set {name} has weight {dataset.weight}, but only training sets can have a weight. "
                    "Leave out the weight"
                )
        return self

    @property
    def training_sets(self) -> list[DatasetFields]:
        return self.train if isinstance(self.train, list) else [self.train]

    @property
    def named_sets(self) -> dict[str, DatasetFields]:
        """All datasets, as a dict from key to dataset. A key is, for example, data.train[0] or data.validation."""
        several = isinstance(self.train, list)
        names = [f"data.train[{i}]" if several else "data.train" for i in range(len(self.training_sets))]
        validation = {"data.validation": self.validation} if self.validation else {}
        others = {f"data.val_data_paths.{name}": dataset for name, dataset in self.val_data_paths.items()}
        return {**dict(zip(names, self.training_sets, strict=True)), **validation, **others}

    @property
    def validation_sets(self) -> dict[str, DatasetFields]:
        """All validation sets, as a dict from name to dataset. data.validation is named default.

        If no validation set is given and the training set is the bundled one, the bundled validation set is used. It is not used
        if data.validation_share holds out a validation set.
        """
        given = {"default": self.validation, **self.val_data_paths} if self.validation else dict(self.val_data_paths)
        bundled = [dataset.data_path for dataset in self.training_sets] == [EMBEDDED]
        return given or (
            {"default": DatasetFields(data_path=EMBEDDED)} if bundled and not self.validation_share else {}
        )

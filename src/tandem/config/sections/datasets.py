"""The section `data`: preference sets, and what happens to rows that do not fit."""

from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from tandem.columns import COLUMNS, NAMED
from tandem.config.sections.section import EMBEDDED, MAX_SCORE, PathText, Section, Share

MAX_EXPANSION = 100.0


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
    "sharegpt",
    "alpaca",
    "alpaca_pair",
    "messages_pair",
    "question_responses",
    "dialogue_text",
    "implicit_prompt",
]


class DatasetFields(Section):
    """Where a preference set is and how it reads."""

    data_path: PathText | None = Field(
        default=None,
        description="a .jsonl, .json, .csv, .parquet or .arrow file (each also .gz, .zst), a pattern of such, a folder "
        "(of datasets' save_to_disk, or laid out like a hub dataset), or a hub dataset, org/name; "
        "embedded: the bundled pairs",
    )
    dataset_name: DatasetName = Field(
        default="auto", description="format; auto: told by the keys of the first row that fit one"
    )
    prompt_key: str = Field(default="prompt", description="field that holds the prompt (text or messages)")
    chosen_key: str = Field(default="chosen", description="field that holds the better completion")
    rejected_key: str = Field(default="rejected", description="field that holds the worse completion")
    weight_key: str | None = Field(
        default=None,
        description="field that holds the weight of a row, 0 or more, which multiplies the losses of its pairs; null: all 1",
    )
    margin_key: str | None = Field(
        default=None,
        description="field that holds the margin m by which chosen must be better: -log sigmoid(beta d - m); null: all 0",
    )
    prompt_file: PathText | None = Field(
        default=None, description="a text whose {} is replaced by the prompt (of messages: by the last user turn)"
    )
    system_prompt_file: PathText | None = Field(
        default=None, description="the system turn of prompts that have none; needs a chat template"
    )
    subset: str | None = Field(default=None, description="of a hub dataset: its configuration")
    split: str | None = Field(default=None, description="of a hub dataset or saved dataset; null: train")
    revision: str | None = Field(default=None, description="of a hub dataset: branch, tag or commit")
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="of a training set: passes over it in an epoch; 2: twice, 0.5: another half each time",
    )

    @model_validator(mode="after")
    def _different_keys(self) -> "DatasetFields":
        keys = {"prompt_key": self.prompt_key, "chosen_key": self.chosen_key, "rejected_key": self.rejected_key}
        keys |= {COLUMNS[name].key: key for name, key in self.columns.items()}
        for (one, value), (other, same) in combinations(keys.items(), 2):
            if value == same:
                raise ValueError(f"{one} and {other} are both {value!r}: a field cannot be two parts of a preference")
        return self

    @property
    def columns(self) -> dict[str, str]:
        """The columns that are read because a key names their field: {"weight": "importance"}."""
        named = {column.name: getattr(self, column.key) for column in NAMED if column.key}
        return {name: key for name, key in named.items() if key is not None}


Dataset = Annotated[DatasetFields, BeforeValidator(_path_as_dataset, json_schema_input_type=str | DatasetFields)]


OneOrSeveral = Annotated[
    Annotated[Dataset, Tag("one")] | Annotated[Annotated[list[Dataset], Field(min_length=1)], Tag("several")],
    Discriminator(lambda given: "several" if isinstance(given, list) else "one"),
]


class Data(Section):
    """Preference sets, and what happens to rows that do not fit."""

    train: OneOrSeveral = Field(
        default=DatasetFields(data_path=EMBEDDED), description="training set: a dataset, a path, or a list of those"
    )
    validation: Dataset | None = Field(
        default=None,
        description="validation set named default; null: none, or the bundled one with the bundled training set",
    )
    val_data_paths: dict[str, Dataset] = Field(
        default={}, description="more validation sets by name: a path or a dataset"
    )
    validation_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="share of the training preferences held out, by prompt, as the validation set named default",
    )
    default: DatasetFields = Field(default=DatasetFields(), description="fills what a dataset leaves out")
    shuffle: bool = Field(default=True, description="another order every epoch, from run.seed")
    num_workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default="auto", description="processes that tokenise; auto: one per core, fewer for small files; 0: as 1"
    )
    drop_last: bool = Field(default=True, description="leave out an epoch's last batch when it is short")
    pairing: Literal["best_worst", "all", "adjacent"] = Field(
        default="best_worst", description="pairs made of more than two ranked completions"
    )
    overlong: Literal["drop", "truncate_prompt", "truncate_completion", "error"] = Field(
        default="drop", description="preferences over policy.max_total_sequence_length: drop and count, cut, or stop"
    )
    duplicates: Literal["keep", "drop", "error"] = Field(
        default="keep",
        description="preferences with the same prompt and completions, as tokens, as an earlier one of the set or of a training "
        "set before it: keep and count, drop and count, or stop",
    )
    default_chosen_reward: float | None = Field(
        default=None, description="score of the best completion where the data gives none"
    )
    default_rejected_reward: float | None = Field(
        default=None, description="score of the other completions where the data gives none"
    )
    on_bad_row: Literal["error", "skip"] = Field(default="error", description="malformed rows: stop, or skip and count")
    max_bad_share: Share = Field(
        default=0.01, description="with skip: stop when more than this share of rows is malformed"
    )
    max_filtered_share: Share = Field(
        default=0.1, description="stop when more than this share of rows is filtered (over-long, equal, empty, ties)"
    )

    max_expansion: float = Field(
        default=MAX_EXPANSION,
        ge=1,
        allow_inf_nan=False,
        description="of a compressed file or a table: stop when it expands to more than this many times its size, and over "
        "256 MiB",
    )

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, given: Any) -> Any:
        """Fill what each dataset leaves out from `default`, here, so that the dumped configuration says what is read."""
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
                f"data.{info.field_name} = {value:g} is too large: scores are stored as float32, up to {MAX_SCORE:.1e}"
            )
        return value

    @field_validator("val_data_paths")
    @classmethod
    def _named_for_files(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"data.val_data_paths: {name!r} is no name; use letters, digits, - and _")
            if name == "default":
                raise ValueError("data.val_data_paths: the name default belongs to data.validation")
        return value

    @model_validator(mode="after")
    def _one_way_to_validate(self) -> "Data":
        if self.validation_share and (self.validation or self.val_data_paths):
            raise ValueError(
                "data.validation_share holds out training preferences where no validation set is given, but "
                "data.validation or data.val_data_paths is"
            )
        for name, dataset in self.validation_sets.items():
            if dataset.weight != 1:
                raise ValueError(f"validation set {name} has weight {dataset.weight}; only training sets are weighted")
        return self

    @property
    def training_sets(self) -> list[DatasetFields]:
        return self.train if isinstance(self.train, list) else [self.train]

    @property
    def named_sets(self) -> dict[str, DatasetFields]:
        """Every set by its key."""
        several = isinstance(self.train, list)
        names = [f"data.train[{i}]" if several else "data.train" for i in range(len(self.training_sets))]
        validation = {"data.validation": self.validation} if self.validation else {}
        others = {f"data.val_data_paths.{name}": dataset for name, dataset in self.val_data_paths.items()}
        return {**dict(zip(names, self.training_sets, strict=True)), **validation, **others}

    @property
    def validation_sets(self) -> dict[str, DatasetFields]:
        """By name: data.validation is the one named default; the bundled one goes with the bundled training set."""
        given = {"default": self.validation, **self.val_data_paths} if self.validation else dict(self.val_data_paths)
        bundled = [dataset.data_path for dataset in self.training_sets] == [EMBEDDED]
        return given or (
            {"default": DatasetFields(data_path=EMBEDDED)} if bundled and not self.validation_share else {}
        )

"""The closed, typed configuration: every key, its default and what it does, each in one place. Imports no torch."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from tandem.config.losses import LossName, misnamed, misread, needs_reference, spelled

CONFIG_VERSION = 1
EMBEDDED = "embedded"

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the configuration: closed, frozen, and strict about types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Run(Section):
    """The run as a whole."""

    name: str = Field(default="tandem", pattern=r"^[A-Za-z0-9._-]+$", description="names the run directory")
    dir: str | None = Field(
        default=None,
        description="run directory; null: runs/{name}-{n}, an unfinished one with the same configuration is resumed",
    )
    seed: int = Field(default=42, ge=0, lt=2**32, description="all randomness")


class Dpo(Section):
    """The loss, how long to train, when to validate."""

    preference_loss: LossName | dict[LossName, float] = Field(
        default="dpo", description="loss over pairs (docs/losses.md), or several with weights; sigmoid is dpo"
    )
    reference_policy_kl_penalty: float = Field(default=0.1, gt=0, description="beta")
    preference_loss_weight: float = Field(default=1.0, ge=0, description="weight of the preference loss")
    sft_loss_weight: float = Field(default=0.0, ge=0, description="weight of the SFT loss on the chosen completion")
    preference_average_log_probs: bool = Field(
        default=False, description="divide log-probabilities by completion length in the preference loss"
    )
    sft_average_log_probs: bool = Field(
        default_factory=lambda set_before: set_before.get("preference_average_log_probs", False),
        description="the same in the SFT loss; default: as preference_average_log_probs",
    )
    label_smoothing: float = Field(default=0.0, ge=0, le=0.5, description="share of labels taken to be wrong")
    gt_reward_scale: float = Field(default=1.0, gt=0, description="factor of the data's scores in the rpo losses")
    simpo_gamma: float = Field(default=0.5, ge=0, description="simpo: the margin asked for")
    orpo_lambda: float = Field(default=1.0, gt=0, description="orpo: weight of the odds ratio")
    cpo_alpha: float = Field(default=1.0, ge=0, description="cpo: weight of its own SFT term")
    discopop_tau: float = Field(default=0.05, gt=0, le=1, description="discopop: temperature of the mixture")
    ld_alpha: Share | None = Field(
        default=None, description="LD-DPO: weight of tokens beyond the pair's shorter completion; null: as 1"
    )
    wpo: bool = Field(default=False, description="WPO: weigh each pair by how likely the policy finds it")
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = Field(
        default="reverse_kl", description="what holds the policy to the reference"
    )
    f_alpha: float = Field(default=1.0, ge=0, description="order of the alpha divergence; 1: reverse KL, 0: forward KL")
    max_num_epochs: Positive = Field(default=1, description="passes over the training pairs; whichever ends first")
    max_num_steps: Positive | None = Field(
        default=None, description="optimizer steps; null: as many as the epochs hold"
    )
    val_period: int = Field(default=25, description="steps between validations; <= 0 turns off")
    val_batches: int | None = Field(default=None, description="batches per validation set; null or <= 0: all")
    val_global_batch_size: Positive | None = Field(
        default=None, description="pairs packed together in validation; null: as policy.train_global_batch_size"
    )
    val_at_start: bool = Field(default=True, description="validate before the first step")
    val_at_end: bool = Field(default=True, description="validate after the last step")

    @field_validator("preference_loss", mode="before")
    @classmethod
    def _known_losses(cls, value: Any) -> Any:
        if reason := misnamed(value):
            raise ValueError(reason)
        return value

    @model_validator(mode="after")
    def _losses_read_what_is_set(self) -> "Dpo":
        # By value, not by what was given: a resolved configuration gives every key, most of them by default.
        fields = type(self).model_fields.items()
        changed = {name: value for name, field in fields if (value := getattr(self, name)) != field.default}
        if reasons := misread(self.preference_loss, changed):
            raise ValueError(". ".join(reasons))
        return self

    @model_validator(mode="after")
    def _some_loss(self) -> "Dpo":
        if self.preference_loss_weight == 0 and self.sft_loss_weight == 0:
            raise ValueError(
                "dpo.preference_loss_weight and dpo.sft_loss_weight are both 0, so nothing would be learned"
            )
        return self


class Tokenizer(Section):
    """The tokenizer and the chat template."""

    name: str | None = Field(
        default=None, description="path, hub name, or a SentencePiece file (x.model); null: as policy.model_name"
    )
    chat_template: str | None = Field(
        default="default",
        description="default: the tokenizer's own; null: raw text; a path ending in .jinja: that file",
    )
    chat_template_kwargs: dict[str, Any] = Field(default={}, description="passed to the template")


class OptimizerKwargs(Section):
    """Arguments of the optimizer."""

    lr: float = Field(default=5e-6, ge=0, description="learning rate")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled weight decay, on every trained tensor")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.98], min_length=2, max_length=2, description="decay of the two moments"
    )
    eps: float = Field(default=1e-5, gt=0, description="added to the denominator")


class Optimizer(Section):
    """The optimizer."""

    name: Literal["torch.optim.AdamW"] = Field(default="torch.optim.AdamW", description="the optimizer")
    kwargs: OptimizerKwargs = Field(default=OptimizerKwargs(), description="its arguments")


SchedulerName = Literal[
    "torch.optim.lr_scheduler.LinearLR",
    "torch.optim.lr_scheduler.ConstantLR",
    "torch.optim.lr_scheduler.CosineAnnealingLR",
    "torch.optim.lr_scheduler.PolynomialLR",
    "torch.optim.lr_scheduler.ExponentialLR",
    "torch.optim.lr_scheduler.StepLR",
    "torch.optim.lr_scheduler.MultiStepLR",
]


class Scheduler(Section):
    """One of torch's learning-rate schedulers."""

    name: SchedulerName = Field(description="the scheduler")
    kwargs: dict[str, int | float | bool | list[int]] = Field(default={}, description="its arguments")


class Milestones(Section):
    """The steps at which the next scheduler of a list takes over."""

    milestones: list[Positive]


WARM_UP_THEN_CONSTANT: list[Scheduler | Milestones] = [
    Scheduler(
        name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.1, "end_factor": 1.0, "total_iters": 20}
    ),
    Scheduler(name="torch.optim.lr_scheduler.ConstantLR", kwargs={"factor": 1.0, "total_iters": 1}),
    Milestones(milestones=[20]),
]


class Packing(Section):
    """How preferences share rows."""

    mode: Literal["batch", "dataset", "none"] = Field(
        default="batch",
        description="batch: pack each global batch; dataset: pack the whole set once, batches of whole packs; "
        "none: one sequence a row, padded, nothing shared",
    )
    pack_length: Positive | Literal["auto"] = Field(
        default="auto",
        description="tokens in a row; auto: 8192 on CUDA, 512 elsewhere, less for small batches, more for long preferences",
    )
    share_prompts: bool = Field(
        default_factory=lambda set_before: set_before.get("mode") != "none",
        description="compute a prompt once for all its completions; default: true, but false with mode none",
    )
    packs_per_micro_batch: Positive = Field(default=1, description="rows that go through the model together")
    algorithm: Literal["first_fit_decreasing", "first_fit_shuffle", "exact_fit_decreasing"] = Field(
        default="first_fit_decreasing",
        description="how rows are filled: largest first; in an order drawn from run.seed; or each as full as can be",
    )

    @model_validator(mode="after")
    def _unpacked_shares_nothing(self) -> "Packing":
        if self.mode == "none" and self.share_prompts:
            raise ValueError(
                "policy.packing.share_prompts=true contradicts policy.packing.mode=none, where nothing is shared"
            )
        return self


class Policy(Section):
    """The model that is trained, and how."""

    model_name: str = Field(
        default=EMBEDDED, description="path or hub name; embedded: a tiny random model built locally"
    )
    revision: str | None = Field(default=None, description="revision of a hub model")
    tokenizer: Tokenizer = Field(default=Tokenizer(), description="tokenizer and chat template")
    train_global_batch_size: Positive = Field(
        default=256,
        description="pairs per optimizer step, in every packing mode; filled by whole preferences, never beyond",
    )
    max_total_sequence_length: Positive = Field(default=2048, description="tokens of prompt + one completion")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of computation; auto: bfloat16 on CUDA, else float32; master weights are float32"
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="optimizer")
    scheduler: list[Scheduler | Milestones] | Scheduler | None = Field(
        default=WARM_UP_THEN_CONSTANT,
        description="learning-rate schedule: a list with milestones, one scheduler, or null",
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="clip the global gradient norm; null: no clipping"
    )
    compile: Literal["auto"] | bool = Field(default="auto", description="compile the layers; auto: on CUDA")
    attention: Literal["auto", "flex", "sdpa"] = Field(default="auto", description="auto: flex on CUDA, sdpa elsewhere")
    head_chunk_tokens: Positive | Literal["auto"] = Field(
        default="auto", description="scored tokens per chunk of the head"
    )
    packing: Packing = Field(default=Packing(), description="packing")

    @field_validator("scheduler")
    @classmethod
    def _milestones_fit(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        schedulers = [item for item in value if isinstance(item, Scheduler)]
        milestones = [item for item in value if isinstance(item, Milestones)]
        steps = milestones[0].milestones if milestones else []
        if len(milestones) > 1 or len(steps) != len(schedulers) - 1 or steps != sorted(set(steps)):
            raise ValueError(
                f"policy.scheduler has {len(schedulers)} schedulers and milestones {steps}: give one list of "
                "rising milestones, one fewer than there are schedulers"
            )
        return value


class Reference(Section):
    """The frozen model the policy is compared with: the policy's own start."""

    mode: Literal["cached", "live", "none"] = Field(
        default="cached",
        description="cached: its log-probabilities are computed once and kept on disk; live: a frozen copy; "
        "none: what losses without a reference always have",
    )
    cache_dir: str | None = Field(
        default=None, description="null: reference/ in $TANDEM_CACHE or the user's cache directory"
    )


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

    data_path: str | None = Field(
        default=None,
        description="a .jsonl, .json, .csv (each also .gz, .zst), .parquet or .arrow file, a pattern of such, a folder "
        "(of datasets' save_to_disk, or laid out like a hub dataset), or a hub dataset, org/name; "
        "embedded: the bundled pairs",
    )
    dataset_name: DatasetName = Field(default="auto", description="format; auto: told by the keys of the first row")
    prompt_key: str = Field(default="prompt", description="field that holds the prompt (text or messages)")
    chosen_key: str = Field(default="chosen", description="field that holds the better completion")
    rejected_key: str = Field(default="rejected", description="field that holds the worse completion")
    prompt_file: str | None = Field(
        default=None, description="a text whose {} is replaced by the prompt (of messages: by the last user turn)"
    )
    system_prompt_file: str | None = Field(
        default=None, description="the system turn of prompts that have none; needs a chat template"
    )
    subset: str | None = Field(default=None, description="of a hub dataset: its configuration")
    split: str | None = Field(default=None, description="of a hub dataset or saved dataset; null: train")
    revision: str | None = Field(default=None, description="of a hub dataset: branch, tag or commit")
    weight: float = Field(
        default=1.0,
        gt=0,
        description="of a training set: passes over it in an epoch; 2: twice, 0.5: another half each time",
    )


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
        default="auto", description="processes that tokenise; auto: one per core, fewer for small files; 0: this one"
    )
    drop_last: bool = Field(default=True, description="leave out an epoch's last batch when it is short")
    pairing: Literal["best_worst", "all", "adjacent"] = Field(
        default="best_worst", description="pairs made of more than two ranked completions"
    )
    overlong: Literal["drop", "truncate_prompt", "truncate_completion", "error"] = Field(
        default="drop", description="preferences over policy.max_total_sequence_length: drop and count, cut, or stop"
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
    def validation_sets(self) -> dict[str, DatasetFields]:
        """By name: data.validation is the one named default; the bundled one goes with the bundled training set."""
        given = {"default": self.validation, **self.val_data_paths} if self.validation else dict(self.val_data_paths)
        bundled = [dataset.data_path for dataset in self.training_sets] == [EMBEDDED]
        return given or (
            {"default": DatasetFields(data_path=EMBEDDED)} if bundled and not self.validation_share else {}
        )


class Checkpointing(Section):
    """When the run saves itself, and what is kept."""

    enabled: bool = Field(default=True, description="save checkpoints")
    checkpoint_dir: str | None = Field(default=None, description="where they are; null: {run.dir}/checkpoints")
    save_period: Positive = Field(default=50, description="steps between checkpoints; the last step is always saved")
    keep_top_k: Positive = Field(default=3, description="checkpoints kept, by metric_name; the latest is kept too")
    metric_name: str | None = Field(
        default=None,
        description="what ranks them, such as validation-default_accuracy or train:loss; null: the loss of the first "
        "validation set, without one their age",
    )
    higher_is_better: bool = Field(default=False, description="of metric_name")
    save_optimizer: bool = Field(default=True, description="false: smaller checkpoints, from which no run can go on")
    checkpoint_must_save_by: str | None = Field(
        default=None, description="DD:HH:MM:SS after the start by which the run has saved and stopped; null: no limit"
    )

    @field_validator("checkpoint_must_save_by")
    @classmethod
    def _a_time(cls, value: str | None) -> str | None:
        if value is not None:
            seconds_of(value)
        return value

    @property
    def seconds_to_save_by(self) -> float | None:
        return None if self.checkpoint_must_save_by is None else seconds_of(self.checkpoint_must_save_by)


def seconds_of(duration: str) -> float:
    """DD:HH:MM:SS in seconds; leading parts may be left out. "01:30:00" -> 5400.0"""
    parts = duration.split(":")
    if len(parts) > 4 or not all(part.isdigit() for part in parts):
        raise ValueError(
            f"checkpointing.checkpoint_must_save_by = {duration!r} is no time; write DD:HH:MM:SS, such as 00:03:45:00"
        )
    days, hours, minutes, seconds = (int(part) for part in (["0"] * 4 + parts)[-4:])
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class Export(Section):
    """The model folder written at the end."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: the model's own"
    )
    rounding: Literal["stochastic", "nearest"] = Field(
        default="stochastic", description="to a smaller dtype; nearest loses most of what DPO learned"
    )


class Logger(Section):
    """Trackers beside metrics.jsonl, which is always written."""


class Cluster(Section):
    """Devices and machines."""


class Config(Section):
    """Everything that decides what a run does."""

    config_version: int = Field(default=CONFIG_VERSION, description="version of this schema")
    run: Run = Field(default=Run(), description="the run")
    dpo: Dpo = Field(default=Dpo(), description="loss, length and validation")
    policy: Policy = Field(default=Policy(), description="the model and its training")
    reference: Reference = Field(default=Reference(), description="the reference model")
    data: Data = Field(default=Data(), description="preference sets")
    checkpointing: Checkpointing = Field(default=Checkpointing(), description="checkpoints")
    export: Export = Field(default=Export(), description="the exported model")
    logger: Logger = Field(default=Logger(), description="trackers")
    cluster: Cluster = Field(default=Cluster(), description="devices and machines")

    @model_validator(mode="after")
    def _reference_where_needed(self) -> "Config":
        if self.reference.mode == "none" and needs_reference(self.dpo.preference_loss):
            raise ValueError(
                f"reference.mode=none, but dpo.preference_loss {spelled(self.dpo.preference_loss)} compares with a reference; "
                "use cached or live, or a loss without one (simpo, orpo, cpo)"
            )
        return self

    @field_validator("config_version")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value != CONFIG_VERSION:
            raise ValueError(f"config_version {value} is not known here; this tandem reads version {CONFIG_VERSION}")
        return value


def json_schema() -> dict[str, Any]:
    """What a configuration file may hold, for editors: the schema, and the key `defaults` that the loader reads."""
    schema = Config.model_json_schema()
    names = {"type": "array", "items": {"type": "string"}}
    schema["properties"]["defaults"] = {
        "anyOf": [{"type": "string"}, names],
        "description": "files this one inherits from, relative to it; later ones win",
    }
    return schema

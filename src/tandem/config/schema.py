"""The typed configuration: every key with its default and description. Unknown keys are refused. Does not import torch."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from tandem.columns import COLUMNS
from tandem.config.losses import needs_reference, scope_of, spelled, unsupported_column, without_reference
from tandem.config.sections.checkpointing import Checkpointing
from tandem.config.sections.cluster import Cluster
from tandem.config.sections.datasets import Data
from tandem.config.sections.dpo import Dpo
from tandem.config.sections.logger import Logger
from tandem.config.sections.policy import Policy
from tandem.config.sections.section import PathText, Section

CONFIG_VERSION = 1


class Run(Section):
    """The name, directory and seed of the run."""

    name: str = Field(
        default="tandem",
        pattern=r"^[A-Za-z0-9._-]+$",
        max_length=200,
        description="name of the run; part of the name of its directory",
    )
    dir: PathText | None = Field(
        default=None,
        description="run directory; null: runs/{name}-{n}; resumes an unfinished run with the same configuration",
    )
    seed: int = Field(default=42, ge=0, lt=2**32, description="seed of all random numbers")
    deterministic: bool = Field(default=False, description="bitwise reproducible on a GPU too; slower there")
    code: dict[str, str] = Field(
        default={},
        description="written by tandem: SHA-256 of the code of each FILE.py:FUNCTION that the run trains with; changed code is "
        "refused",
    )


class Reference(Section):
    """The frozen model that the policy is compared with. By default, the policy before training."""

    mode: Literal["cached", "live", "none"] = Field(
        default="cached",
        description="cached: compute its log-probabilities once and keep them on disk; live: keep a frozen copy in memory; "
        "none: no reference, for losses that do not use one",
    )
    model: PathText | None = Field(
        default=None,
        description="path (also of a run or a checkpoint) or hub name of another reference model; null: the policy before "
        "training",
    )
    cache_dir: PathText | None = Field(
        default=None,
        description="folder for cached log-probabilities; null: reference/ in $TANDEM_CACHE or the user's cache directory",
    )


def canonical_size(size: str) -> str:
    """Return a size with its unit in the usual letters, as transformers reads it: 5gb becomes 5GB, 5GIB becomes 5GiB."""
    return size.upper().replace("IB", "iB")


class Export(Section):
    """The model folder that is written at the end of a run."""

    checkpoint: Literal["latest", "best"] = Field(
        default="latest",
        description="latest: export the last step; best: export the checkpoint that checkpointing.metric_name ranks first (a run "
        "that stops early always does)",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="data type of the exported weights; auto: that of the original model"
    )
    rounding: Literal["stochastic", "nearest"] = Field(
        default="stochastic",
        description="rounding to a smaller dtype; nearest discards most of the small updates that DPO makes",
    )
    merge_lora: bool = Field(
        default=True,
        description="merge LoRA adapters into the weights; false: export only the adapters, in float32 by default",
    )
    max_shard_size: Annotated[str, AfterValidator(canonical_size)] = Field(
        default="5GB",
        pattern=r"^[1-9][0-9]{0,8}[KkMmGg][Ii]?[Bb]$",
        description="largest size of a shard of the exported weights; a larger model is split into several shards",
    )


class Config(Section):
    """The complete configuration of a run."""

    config_version: int = Field(default=CONFIG_VERSION, description="version of this schema")
    run: Run = Field(default=Run(), description="the run")
    dpo: Dpo = Field(default=Dpo(), description="loss, length and validation")
    policy: Policy = Field(default=Policy(), description="the model and its training")
    reference: Reference = Field(default=Reference(), description="the reference model")
    data: Data = Field(default=Data(), description="preference sets")
    checkpointing: Checkpointing = Field(default=Checkpointing(), description="checkpoints")
    export: Export = Field(default=Export(), description="the exported model")
    logger: Logger = Field(default=Logger(), description="trackers")
    cluster: Cluster = Field(default=Cluster(), description="machines, GPUs and the launcher")

    @model_validator(mode="after")
    def _check_reference_mode(self) -> "Config":
        if self.reference.mode == "none" and needs_reference(self.dpo.preference_loss):
            raise ValueError(
                f"reference.mode=none, but dpo.preference_loss {spelled(self.dpo.preference_loss)} needs a reference. "
                f"Set reference.mode=cached or live, or use a loss without a reference ({', '.join(without_reference())})"
            )
        return self

    @model_validator(mode="after")
    def _reference_has_an_effect(self) -> "Config":
        if self.reference.model is not None and not needs_reference(self.dpo.preference_loss):
            raise ValueError(
                f"reference.model = {self.reference.model} has no effect: dpo.preference_loss "
                f"{spelled(self.dpo.preference_loss)} does not use a reference. Leave out reference.model"
            )
        if self.reference.mode == "live" and not needs_reference(self.dpo.preference_loss):
            raise ValueError(
                f"reference.mode = live has no effect: dpo.preference_loss {spelled(self.dpo.preference_loss)} does not use "
                "a reference. Leave out reference.mode"
            )
        return self

    @model_validator(mode="after")
    def _check_lora(self) -> "Config":
        lora, loss = self.policy.lora, self.dpo.preference_loss
        if not self.export.merge_lora and not lora.enabled:
            raise ValueError(
                "export.merge_lora=false has no effect without LoRA adapters. Leave it out, or set policy.lora.enabled=true"
            )
        if lora.dropout > 0 and scope_of(loss) == "batch":
            raise ValueError(
                f"policy.lora.dropout = {lora.dropout:g} does not work with dpo.preference_loss {spelled(loss)}, which runs each "
                "batch through the model twice and needs the same results both times. Set policy.lora.dropout=0"
            )
        return self

    @model_validator(mode="after")
    def _columns_have_an_effect(self) -> "Config":
        for where, dataset in self.data.named_sets.items():
            for column, field in dataset.number_columns.items():
                if why := unsupported_column(self.dpo.preference_loss, column):
                    reason, others = why
                    key = f"{where}.{COLUMNS[column].key}"
                    raise ValueError(f"{key} = {field} {reason}. Leave it out, or use {others}")
        return self

    @field_validator("config_version")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value != CONFIG_VERSION:
            raise ValueError(
                f"config_version = {value} is not supported: this version of tandem reads {CONFIG_VERSION}. "
                "Update the file, or install another version of tandem"
            )
        return value


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of configuration files, for editors. It includes `defaults`, which is not a key of Config."""
    schema = Config.model_json_schema()
    names = {"type": "array", "items": {"type": "string"}}
    schema["properties"]["defaults"] = {
        "anyOf": [{"type": "string"}, names],
        "description": "files that this one inherits from, relative to it; later files win",
    }
    return schema

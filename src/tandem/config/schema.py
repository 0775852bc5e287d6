"""The closed, typed configuration: every key, its default and what it does, each in one place. Imports no torch."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tandem.columns import COLUMNS
from tandem.config.losses import needs_reference, scope_of, spelled, unsupported_column, without_reference
from tandem.config.sections.checkpointing import Checkpointing
from tandem.config.sections.datasets import Data
from tandem.config.sections.dpo import Dpo
from tandem.config.sections.logger import Logger
from tandem.config.sections.policy import Policy
from tandem.config.sections.section import PathText, Section

CONFIG_VERSION = 1


class Run(Section):
    """The run as a whole."""

    name: str = Field(
        default="tandem", pattern=r"^[A-Za-z0-9._-]+$", max_length=200, description="names the run directory"
    )
    dir: PathText | None = Field(
        default=None,
        description="run directory; null: runs/{name}-{n}, an unfinished one with the same configuration is resumed",
    )
    seed: int = Field(default=42, ge=0, lt=2**32, description="all randomness")
    deterministic: bool = Field(default=False, description="bit for bit the same on a GPU too; slower there")


class Reference(Section):
    """The frozen model the policy is compared with: by itself the policy's own start."""

    mode: Literal["cached", "live", "none"] = Field(
        default="cached",
        description="cached: its log-probabilities are computed once and kept on disk; live: a frozen copy; "
        "none: what losses without a reference always have",
    )
    model: PathText | None = Field(
        default=None, description="path or hub name of another model as the reference; null: the policy as it starts"
    )
    cache_dir: PathText | None = Field(
        default=None, description="null: reference/ in $TANDEM_CACHE or the user's cache directory"
    )


class Export(Section):
    """The model folder written at the end."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: the model's own"
    )
    rounding: Literal["stochastic", "nearest"] = Field(
        default="stochastic", description="to a smaller dtype; nearest loses most of what DPO learned"
    )
    merge_lora: bool = Field(
        default=True, description="add adapters to the weights; false: write the adapters alone, in float32 by default"
    )


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
                f"use cached or live, or a loss without one ({', '.join(without_reference())})"
            )
        return self

    @model_validator(mode="after")
    def _another_reference_is_read(self) -> "Config":
        if self.reference.model is not None and not needs_reference(self.dpo.preference_loss):
            raise ValueError(
                f"reference.model = {self.reference.model} is not read by dpo.preference_loss "
                f"{spelled(self.dpo.preference_loss)}, which compares with no reference: leave it out"
            )
        if self.reference.mode == "live" and not needs_reference(self.dpo.preference_loss):
            raise ValueError(
                f"reference.mode = live is not read by dpo.preference_loss {spelled(self.dpo.preference_loss)}, which compares "
                "with no reference: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _adapters_fit(self) -> "Config":
        lora, loss = self.policy.lora, self.dpo.preference_loss
        if not self.export.merge_lora and not lora.enabled:
            raise ValueError(
                "export.merge_lora=false is not read while policy.lora.enabled is false: there is no adapter to write alone"
            )
        if lora.dropout > 0 and scope_of(loss) == "batch":
            raise ValueError(
                f"policy.lora.dropout = {lora.dropout:g} contradicts dpo.preference_loss {spelled(loss)}, which computes a "
                "batch twice: the two would draw different dropout. Set policy.lora.dropout=0"
            )
        return self

    @model_validator(mode="after")
    def _columns_have_an_effect(self) -> "Config":
        for where, dataset in self.data.named_sets.items():
            for column, field in dataset.columns.items():
                if why := unsupported_column(self.dpo.preference_loss, column):
                    reason, others = why
                    key = f"{where}.{COLUMNS[column].key}"
                    raise ValueError(f"{key} = {field} {reason}: leave it out, or choose {others}")
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

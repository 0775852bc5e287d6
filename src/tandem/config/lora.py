"""The section `policy.lora`: adapters on the layers of a frozen model."""

import json
import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tandem.config.section import PathText, Positive, Section

ALL_LINEAR = "all-linear"
Name = Annotated[str, Field(min_length=1)]


class Lora(Section):
    """Adapters on the layers of a frozen model."""

    enabled: bool = Field(default=False, description="train LoRA adapters and nothing else (docs/lora.md)")
    dim: Positive = Field(default=16, description="rank of the adapters; by default that of lora.adapter, if given")
    alpha: float = Field(
        default=32.0, gt=0, description="adapters count alpha / dim times; by default that of lora.adapter, if given"
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="of the adapters' inputs, in training steps only; exactness is promised at 0",
    )
    target_modules: Annotated[list[Name], Field(min_length=1)] | Name = Field(
        default=ALL_LINEAR,
        description="all-linear: every linear layer but the head; a list of names, matched by their ends; or one regular "
        "expression for whole names",
    )
    exclude_modules: list[Name] = Field(default=[], description="names left out of them, matched by their ends")
    adapter: PathText | None = Field(
        default=None,
        description="folder (or hub name) of a trained LoRA adapter: the start and, by itself, the reference",
    )
    quantization: Literal["nf4", "int8"] | None = Field(
        default=None, description="of the frozen weights (QLoRA), by bitsandbytes on CUDA; null: none"
    )

    @field_validator("target_modules")
    @classmethod
    def _a_pattern(cls, value: list[str] | str) -> list[str] | str:
        if isinstance(value, str):
            try:
                re.compile(value)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(
                    f"policy.lora.target_modules = {json.dumps(value)} is no regular expression: {error}"
                ) from None
        return value

    @model_validator(mode="after")
    def _read_only_when_enabled(self) -> "Lora":
        if not self.enabled and (changed := self.changed()):
            name, value = next(iter(changed.items()))
            raise ValueError(
                f"policy.lora.{name} = {json.dumps(value)} is not read while policy.lora.enabled is false: "
                "set policy.lora.enabled=true, or leave it out"
            )
        return self

    def changed(self) -> dict[str, object]:
        """What is not as it would be by itself. By value: a resolved configuration gives every key."""
        fields = type(self).model_fields.items()
        return {name: value for name, field in fields if (value := getattr(self, name)) != field.default}

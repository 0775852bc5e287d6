"""The section `policy`: the model, its tokenizer, its optimizer and its packing."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tandem.config.sections.scheduler import (
    WARM_UP_THEN_CONSTANT,
    ConstantSchedule,
    Milestones,
    NamedSchedule,
    Schedule,
    Scheduler,
)
from tandem.config.sections.section import EMBEDDED, PathOrText, PathText, Positive, Section


class Tokenizer(Section):
    """The tokenizer and the chat template."""

    name: PathText | None = Field(
        default=None, description="path, hub name, or a SentencePiece file (x.model); null: as policy.model_name"
    )
    chat_template: PathOrText | None = Field(
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
    state_dtype: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32",
        description="of its two moments: 8, 4 or 2 bytes a parameter; below float32 they are rounded stochastically",
    )


LONGEST_PACK = 2**24


class Packing(Section):
    """How preferences share rows."""

    mode: Literal["batch", "dataset", "none"] = Field(
        default="batch",
        description="batch: pack each global batch; dataset: pack the whole set once, batches of whole packs; "
        "none: one sequence a row, padded, nothing shared",
    )
    pack_length: Annotated[int, Field(gt=0, le=LONGEST_PACK)] | Literal["auto"] = Field(
        default="auto",
        description="tokens in a row; auto: 2048 to 16384 on CUDA by what fits (small models: to 65536), 1024 elsewhere, "
        "less for small batches, more for long preferences",
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
    def _unpacked_has_no_packs(self) -> "Packing":
        if self.mode != "none":
            return self
        if self.share_prompts:
            raise ValueError(
                "policy.packing.share_prompts=true contradicts policy.packing.mode=none, where nothing is shared"
            )
        for name in ("pack_length", "algorithm"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"policy.packing.{name} = {getattr(self, name)} is not read with policy.packing.mode=none, where every "
                    "sequence is a row: leave it out, or pack"
                )
        return self


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


class Policy(Section):
    """The model that is trained, and how."""

    model_name: PathText = Field(
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
        default="auto", description="of computation; auto: bfloat16 on CUDA, else float32; weights have their own key"
    )
    weights: Literal["float32", "bfloat16_stochastic", "bfloat16_nearest"] = Field(
        default="float32",
        description="what the optimizer updates, and how it is rounded; nearest hardly learns at preference learning rates",
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="optimizer")
    scheduler: Schedule | None = Field(
        default=WARM_UP_THEN_CONSTANT,
        description="learning-rate schedule: by name and shares of the run (Schedules, below), torch's by a list with "
        "milestones or one alone, or null: constant",
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="clip the global gradient norm; null: no clipping"
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="compute activations again in the backward instead of keeping them: every second matrix product's, all",
    )
    compile: Literal["auto"] | bool = Field(default="auto", description="compile the layers; auto: on CUDA")
    attention: Literal["auto", "flex", "varlen", "sdpa"] = Field(
        default="auto",
        description="inside packs; auto: flex on CUDA, sdpa elsewhere; varlen: flash kernels, where no prompt is shared",
    )
    head_chunk_tokens: Positive | Literal["auto"] = Field(
        default="auto", description="scored tokens per chunk of the head"
    )
    packing: Packing = Field(default=Packing(), description="packing")
    lora: Lora = Field(default=Lora(), description="adapters on a frozen model")

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

    @model_validator(mode="after")
    def _attention_has_packs(self) -> "Policy":
        if self.attention in ("flex", "sdpa") and self.packing.mode == "none":
            raise ValueError(
                f"policy.attention = {self.attention} is not read with policy.packing.mode=none, where every sequence is a "
                "row: leave it out, or pack"
            )
        if self.attention == "varlen" and (self.packing.mode == "none" or self.packing.share_prompts):
            raise ValueError(
                "policy.attention = varlen sees each sequence of a pack as one run of tokens: it needs "
                "policy.packing.share_prompts=false and a policy.packing.mode other than none"
            )
        return self

    @property
    def scheduler_spans_run(self) -> bool:
        """Whether the learning rate of a step depends on the number of steps of the whole run."""
        given = self.scheduler
        if isinstance(given, ConstantSchedule):
            return given.warmup_ratio > 0
        return isinstance(given, NamedSchedule)

    @property
    def tokenizer_name(self) -> str:
        """Whose tokenizer is used."""
        return self.tokenizer.name or self.model_name

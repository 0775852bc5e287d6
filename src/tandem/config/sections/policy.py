"""The section `policy`: the model, tokenizer, optimizer, schedule, packing and LoRA."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tandem.config.sections.parallel import DEFAULT_PARALLEL, Parallel
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
        default=None, description="path, hub name, or SentencePiece file (x.model); null: same as policy.model_name"
    )
    chat_template: PathOrText | None = Field(
        default="default",
        description="default: the tokenizer's template; null: raw text; a path ending in .jinja: that file",
    )
    chat_template_kwargs: dict[str, Any] = Field(default={}, description="variables to pass to the template")
    plain_text: Literal["turn", "as_is"] = Field(
        default="turn",
        description="turn: a prompt of plain text becomes a user turn of the template; as_is: rows of plain text are raw text, "
        "with EOS at the end, and only rows of messages use the template, as in TRL",
    )


class OptimizerKwargs(Section):
    """Arguments of the optimizer."""

    lr: float = Field(default=5e-6, ge=0, description="learning rate")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled weight decay, on every trained tensor")
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=[0.9, 0.98], min_length=2, max_length=2, description="decay rates of the two moments"
    )
    eps: float = Field(default=1e-5, gt=0, description="added to the denominator for numerical stability")


class Optimizer(Section):
    """The optimizer."""

    name: Literal["torch.optim.AdamW"] = Field(default="torch.optim.AdamW", description="the optimizer")
    kwargs: OptimizerKwargs = Field(default=OptimizerKwargs(), description="arguments of the optimizer")
    state_dtype: Literal["float32", "bfloat16", "int8"] = Field(
        default="float32",
        description="data type of the two moments: 8, 4 or 2 bytes per parameter; bfloat16 and int8 are rounded stochastically",
    )
    offload: bool = Field(
        default=False,
        description="keep the two moments in host memory, and copy them through the GPU in every update; the result is the same",
    )


LONGEST_PACK = 2**24


class Packing(Section):
    """How preferences are packed into rows."""

    mode: Literal["batch", "dataset", "none"] = Field(
        default="batch",
        description="batch: pack each global batch; dataset: pack the set once, then form batches of packs; "
        "none: one padded sequence per row, no shared prompts",
    )
    pack_length: Annotated[int, Field(gt=0, le=LONGEST_PACK)] | Literal["auto"] = Field(
        default="auto",
        description="tokens per row; auto: 2048 to 16384 on CUDA, as memory allows (small models: up to 65536), 1024 "
        "elsewhere; less for small batches, more for long preferences",
    )
    share_prompts: bool = Field(
        default_factory=lambda set_before: set_before.get("mode") != "none",
        description="compute each prompt once for all its completions; default: true, or false with mode none",
    )
    packs_per_micro_batch: Positive = Field(default=1, description="rows per forward pass")
    algorithm: Literal["first_fit_decreasing", "first_fit_shuffle", "exact_fit_decreasing"] = Field(
        default="first_fit_decreasing",
        description="first_fit_decreasing: longest preferences first; first_fit_shuffle: in random order; exact_fit_decreasing: "
        "each row as full as possible",
    )

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "Packing":
        if self.mode != "none":
            return self
        if self.share_prompts:
            raise ValueError(
                "policy.packing.share_prompts=true does not work with policy.packing.mode=none, where every sequence has "
                "its own row. Leave it out, or set policy.packing.mode=batch"
            )
        for name in ("pack_length", "algorithm"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"policy.packing.{name} = {getattr(self, name)} has no effect with policy.packing.mode=none, where every "
                    "sequence has its own row. Leave it out, or set policy.packing.mode=batch"
                )
        return self


ALL_LINEAR = "all-linear"
Name = Annotated[str, Field(min_length=1)]


class Lora(Section):
    """LoRA adapters on a frozen model."""

    enabled: bool = Field(default=False, description="train only LoRA adapters (docs/lora.md)")
    dim: Positive = Field(default=16, description="rank of the adapters; taken from lora.adapter if that is set")
    alpha: float = Field(
        default=32.0,
        gt=0,
        description="adapters are scaled by alpha / dim; taken from lora.adapter if that is set",
    )
    use_rslora: bool = Field(
        default=False,
        description="scale adapters by alpha / sqrt(dim) (rank-stabilised LoRA); taken from lora.adapter if that is set",
    )
    use_dora: bool = Field(
        default=False,
        description="DoRA: also train the magnitude (the norm of each row) of an adapted weight; taken from lora.adapter if that "
        "is set",
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="dropout on the adapters' inputs, in training only; above 0, results depend on how preferences are packed",
    )
    target_modules: list[Name] | Name = Field(
        default=ALL_LINEAR,
        description="layers that get an adapter: all-linear (every linear layer except the head), a list of name suffixes, "
        "or a regular expression that matches the full name",
    )
    target_parameters: list[Name] = Field(
        default=[],
        description="suffixes of the names of experts that are stored in one tensor and get adapters too, such as "
        "experts.gate_up_proj; taken from lora.adapter if that is set",
    )
    exclude_modules: list[Name] = Field(default=[], description="suffixes of layer names that get no adapter")
    modules_to_save: list[Name] = Field(
        default=[],
        description="suffixes of the names of modules that are trained in full alongside the adapters, such as lm_head; taken "
        "from lora.adapter if that is set",
    )
    trainable_token_indices: list[int | Name] = Field(
        default=[],
        description="tokens, by id or as in the vocabulary, whose embeddings are trained alongside the adapters; taken from "
        "lora.adapter if that is set",
    )
    loraplus_lr_ratio: float = Field(
        default=1.0,
        gt=0,
        description="LoRA+: the learning rate of lora_B, as a multiple of policy.optimizer.kwargs.lr",
    )
    adapter: PathText | None = Field(
        default=None,
        description="folder or hub name of a trained LoRA adapter to start from, which is also the reference by default",
    )
    quantization: Literal["nf4", "int8"] | None = Field(
        default=None, description="quantise the frozen weights (QLoRA) with bitsandbytes on CUDA; null: no quantization"
    )

    @field_validator("target_modules")
    @classmethod
    def _is_valid_pattern(cls, value: list[str] | str) -> list[str] | str:
        if isinstance(value, str):
            try:
                re.compile(value)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(
                    f"policy.lora.target_modules = {json.dumps(value)} is not a valid regular expression: {error}. "
                    "Correct it, or give a list of layer names"
                ) from None
        return value

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "Lora":
        if not self.enabled and (changed := self.changed()):
            name, value = next(iter(changed.items()))
            raise ValueError(
                f"policy.lora.{name} = {json.dumps(value)} has no effect: policy.lora.enabled is false. "
                f"Set policy.lora.enabled=true, or leave out policy.lora.{name}"
            )
        return self

    @model_validator(mode="after")
    def _something_is_adapted(self) -> "Lora":
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                "policy.lora.target_modules is empty, so nothing would be adapted. Name layers, or leave it out for all of them"
            )
        return self

    @model_validator(mode="after")
    def _experts_have_plain_adapters(self) -> "Lora":
        """The adapters are added to the tensor, so they have no inputs of their own, and peft has no magnitudes for them."""
        if self.target_parameters:
            for name, value in (
                ("dropout", self.dropout),
                ("use_dora", self.use_dora),
                ("quantization", self.quantization),
            ):
                if value:
                    raise ValueError(
                        f"policy.lora.target_parameters does not work with policy.lora.{name} = {json.dumps(value)}: adapters "
                        f"of experts are added to their tensor. Leave out policy.lora.{name}, or target_parameters"
                    )
        return self

    @model_validator(mode="after")
    def _dora_is_not_quantised(self) -> "Lora":
        if self.use_dora and self.quantization is not None:
            raise ValueError(
                f"policy.lora.use_dora = true does not work with policy.lora.quantization = {self.quantization}: the lengths of "
                "rows are computed from weights that are not quantised. Leave one of them out"
            )
        return self

    def changed(self) -> dict[str, object]:
        """Return the settings that differ from their defaults.

        `model_fields_set` cannot be used for this, because a resolved configuration sets every key.
        """
        fields = type(self).model_fields.items()
        return {name: value for name, field in fields if (value := getattr(self, name)) != field.default}


class Policy(Section):
    """The trained model, and how it is trained."""

    model_name: PathText = Field(
        default=EMBEDDED,
        description="model folder, hub name, run or checkpoint of a run; embedded: a tiny random model built locally",
    )
    revision: str | None = Field(default=None, description="branch, tag or commit of a hub model")
    tokenizer: Tokenizer = Field(default=Tokenizer(), description="tokenizer and chat template")
    train_global_batch_size: Positive = Field(
        default=256,
        description="pairs per optimizer step, in every packing mode; preferences are never split between steps",
    )
    max_total_sequence_length: Positive = Field(
        default=2048, description="maximum number of tokens of a prompt plus one completion"
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="data type of computation; auto: bfloat16 on CUDA, else float32",
    )
    weights: Literal["float32", "bfloat16_stochastic", "bfloat16_nearest"] = Field(
        default="float32",
        description="data type and rounding of the trained weights; bfloat16_nearest loses most updates at the learning rates "
        "of preference training",
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="optimizer")
    scheduler: Schedule | None = Field(
        default=WARM_UP_THEN_CONSTANT,
        description="learning-rate schedule: a named schedule (see Schedules below), a torch scheduler, or a list of torch "
        "schedulers with milestones; null: constant",
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="clip the global gradient norm to this; null: no clipping"
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="recompute activations in the backward pass to save memory; selective: every second matrix product, "
        "full: all",
    )
    compile: Literal["auto"] | bool = Field(
        default="auto", description="compile the layers with torch.compile; auto: on CUDA only"
    )
    attention: Literal["auto", "flex", "varlen", "sdpa"] = Field(
        default="auto",
        description="attention kernel for packs; auto: flex on CUDA, sdpa elsewhere; varlen: flash kernels, which cannot "
        "share prompts",
    )
    head_chunk_tokens: Positive | Literal["auto"] = Field(
        default="auto", description="number of scored tokens for which the head computes log-probabilities at a time"
    )
    packing: Packing = Field(default=Packing(), description="packing")
    lora: Lora = Field(default=Lora(), description="LoRA adapters")
    parallel: Parallel = Field(default=DEFAULT_PARALLEL, description="how several GPUs divide the work")

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
                f"policy.scheduler has {len(schedulers)} schedulers and milestones {steps}. Give one list of increasing "
                "milestones, one fewer than there are schedulers"
            )
        return value

    @model_validator(mode="after")
    def _attention_fits_packing(self) -> "Policy":
        if self.attention in ("flex", "sdpa") and self.packing.mode == "none":
            raise ValueError(
                f"policy.attention = {self.attention} has no effect with policy.packing.mode=none, where every sequence has "
                "its own row. Leave it out, or set policy.packing.mode=batch"
            )
        if self.attention == "varlen" and (self.packing.mode == "none" or self.packing.share_prompts):
            raise ValueError(
                "policy.attention = varlen needs packs in which every sequence is contiguous. Set "
                "policy.packing.share_prompts=false and a policy.packing.mode other than none"
            )
        return self

    @model_validator(mode="after")
    def _context_needs_packs(self) -> "Policy":
        if self.parallel.context > 1 and self.packing.mode == "none":
            raise ValueError(
                f"policy.parallel.context = {self.parallel.context} divides packed rows among ranks, which "
                "policy.packing.mode=none does not have. Set policy.packing.mode=batch, or policy.parallel.context=1"
            )
        return self

    @property
    def scheduler_spans_run(self) -> bool:
        """Whether the learning rate of a step depends on the total number of steps of the run."""
        given = self.scheduler
        if isinstance(given, ConstantSchedule):
            return given.warmup_ratio > 0
        return isinstance(given, NamedSchedule)

    @property
    def tokenizer_name(self) -> str:
        """Path or hub name of the tokenizer: policy.tokenizer.name, or by default policy.model_name."""
        return self.tokenizer.name or self.model_name

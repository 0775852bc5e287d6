"""The section policy.parallel: how ranks are arranged."""

from typing import Literal

from pydantic import Field, model_validator

from tandem.config.sections.section import Positive, Section

REST: Literal[-1] = -1
MAX_CONTEXT = 128  # rows are multiples of 128 tokens


class Parallel(Section):
    """How the ranks of a run divide its work. replicate x shard x context is the number of ranks."""

    replicate: Literal[-1] | Positive = Field(
        default=1,
        description="groups of ranks that each hold all weights; set it to the number of machines to shard inside each "
        "machine only; -1: all remaining ranks",
    )
    shard: Literal[-1] | Positive = Field(
        default=REST,
        description="ranks that divide the batch, the weights and the optimizer states among them; -1: all remaining ranks",
    )
    context: Positive = Field(
        default=1,
        description="ranks that divide every pack among them, for packs too long for one GPU",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="free the gathered weights of a layer after its forward pass and gather them again for the backward pass; "
        "false: keep them for all packs of a step, for less communication and more memory",
    )
    reduce_once_per_step: Literal["auto"] | bool = Field(
        default="auto",
        description="sum gradients over the ranks once per step instead of after every pack, for less communication; every GPU "
        "then holds the gradients of all weights in float32; auto: if it holds them anyway (shard x context = 1)",
    )
    timeout_seconds: Positive = Field(
        default=1800,
        description="how long ranks wait for each other before the run fails; one of them may be tokenising meanwhile",
    )

    @model_validator(mode="after")
    def _sizes_are_possible(self) -> "Parallel":
        if self.replicate == REST and self.shard == REST:
            raise ValueError(
                "policy.parallel.replicate and policy.parallel.shard are both -1, which means all remaining ranks. Give a "
                "number for one of them"
            )
        if self.context > MAX_CONTEXT or self.context & (self.context - 1):
            raise ValueError(
                f"policy.parallel.context = {self.context}: must be a power of two up to {MAX_CONTEXT}, because rows are "
                f"multiples of {MAX_CONTEXT} tokens"
            )
        return self

    def reduces_once(self, weight_shards: int) -> bool:
        """Whether ranks sum gradients once per step. `weight_shards`: the number of ranks that divide the weights."""
        return weight_shards == 1 if self.reduce_once_per_step == "auto" else self.reduce_once_per_step


DEFAULT_PARALLEL = Parallel()

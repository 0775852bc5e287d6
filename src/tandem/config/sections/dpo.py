"""The section `dpo`: the loss, the length of training and the validation schedule."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from tandem.config.losses import LossName, averages, unsupported_settings, why_not_losses
from tandem.config.sections.section import Positive, Section, Share, ShareOfEpoch


class Dpo(Section):
    """The loss, the length of training and the validation schedule."""

    preference_loss: LossName | dict[LossName, float] = Field(
        default="dpo",
        description="preference loss (docs/losses.md), a function as FILE.py:FUNCTION (docs/python.md), or a map of losses to "
        "weights; sigmoid means dpo",
    )
    reference_policy_kl_penalty: float = Field(
        default=0.1, gt=0, description="beta: how strongly the policy is kept near the reference"
    )
    preference_loss_weight: float = Field(default=1.0, ge=0, description="weight of the preference loss")
    sft_loss_weight: float = Field(default=0.0, ge=0, description="weight of the SFT loss on the chosen completion")
    preference_average_log_probs: bool = Field(
        default=False, description="average log-probabilities over completion tokens in the preference loss"
    )
    sft_average_log_probs: bool = Field(
        default_factory=lambda set_before: set_before.get("preference_average_log_probs", False),
        description="average log-probabilities over completion tokens in the SFT loss; default: same as "
        "preference_average_log_probs",
    )
    label_smoothing: float = Field(default=0.0, ge=0, le=0.5, description="assumed share of pairs with swapped labels")
    gt_reward_scale: float = Field(default=1.0, gt=0, description="rpo losses: factor for the scores in the data")
    simpo_gamma: float = Field(default=0.5, ge=0, description="simpo: target margin")
    orpo_lambda: float = Field(default=1.0, gt=0, description="orpo: weight of the odds-ratio term")
    cpo_alpha: float = Field(default=1.0, ge=0, description="cpo: weight of the SFT term in the loss")
    discopop_tau: float = Field(default=0.05, gt=0, le=1, description="discopop: temperature of the mixture")
    router_aux_loss_coef: float = Field(
        default=0.0,
        ge=0,
        description="weight of the load-balancing loss of routers in mixtures of experts, over the tokens of the global batch; "
        "above 0, each batch runs through the model twice",
    )
    ld_alpha: Share | None = Field(
        default=None, description="LD-DPO: weight of tokens beyond the length of the shorter completion; null: 1"
    )
    wpo: bool = Field(default=False, description="WPO: weight each pair by its probability under the policy")
    f_divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] = Field(
        default="reverse_kl", description="divergence that keeps the policy close to the reference"
    )
    f_alpha: float = Field(
        default=1.0,
        ge=0,
        description="order of the alpha divergence; 1: reverse KL, 0: forward KL; it equals 1 - alpha in arXiv:2309.16240",
    )
    max_num_epochs: Positive = Field(
        default=1, description="passes over the training pairs; training ends after them or at max_num_steps"
    )
    max_num_steps: Positive | None = Field(
        default=None, description="maximum number of optimizer steps; null: all steps of max_num_epochs"
    )
    early_stopping_patience: Positive | None = Field(
        default=None,
        description="stop after this many validations without improvement of checkpointing.metric_name, and export the best "
        "checkpoint; null: never",
    )
    val_period: int | ShareOfEpoch = Field(
        default=25,
        description="steps between validations; 0.5: half an epoch, 1.0: an epoch; <= 0: none during training",
    )
    val_batches: int | None = Field(
        default=None, description="maximum number of batches per validation set; null or <= 0: all"
    )
    val_global_batch_size: Positive | None = Field(
        default=None, description="pairs per validation batch; null: same as policy.train_global_batch_size"
    )
    val_at_start: bool = Field(default=True, description="validate before the first step")
    val_at_end: bool = Field(default=True, description="validate after the last step")

    @property
    def validates(self) -> bool:
        """Whether the run validates at all."""
        return self.val_period > 0 or self.val_at_start or self.val_at_end

    @property
    def per_token(self) -> bool:
        """Whether a completion's reward is averaged over its tokens instead of summed."""
        return self.preference_average_log_probs or averages(self.preference_loss)

    @field_validator("preference_loss", mode="before")
    @classmethod
    def _known_losses(cls, value: Any) -> Any:
        if reason := why_not_losses(value):
            raise ValueError(reason)
        return value

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> "Dpo":
        # A resolved configuration sets every key, so values are compared with defaults instead of model_fields_set.
        values = {name: getattr(self, name) for name in type(self).model_fields}
        changed = [name for name, field in type(self).model_fields.items() if values[name] != field.default]
        if reasons := unsupported_settings(self.preference_loss, values, changed):
            raise ValueError(". ".join(reasons))
        return self

    @model_validator(mode="after")
    def _some_loss(self) -> "Dpo":
        if self.preference_loss_weight == 0 and self.sft_loss_weight == 0:
            raise ValueError(
                "dpo.preference_loss_weight and dpo.sft_loss_weight are both 0, so there is nothing to train. "
                "Set one of them above 0"
            )
        return self

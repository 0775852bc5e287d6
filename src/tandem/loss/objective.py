"""Log-probabilities per completion in; PairLoss out: the losses and implicit rewards of every pair."""

from dataclasses import dataclass

from torch import Tensor

from tandem.config.schema import Dpo
from tandem.loss.pairs import PairRatios
from tandem.loss.preference import PREFERENCE_LOSSES
from tandem.loss.sft import sft


@dataclass(frozen=True, slots=True)
class PairLoss:
    """Losses and implicit rewards. Rewards are scaled by beta, as the papers define them."""

    preference: Tensor  # [pairs]
    sft: Tensor  # [preferences], of the best completion
    rewards_chosen: Tensor  # [pairs]
    rewards_rejected: Tensor  # [pairs]
    logps_chosen: Tensor  # [pairs]
    logps_rejected: Tensor  # [pairs]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which completions form the pairs, and which is the best of each preference: indices into the completions."""

    winners: Tensor  # [pairs]
    losers: Tensor  # [pairs]
    best: Tensor  # [preferences]


def pair_loss(policy: Tensor, reference: Tensor, num_tokens: Tensor, pairing: Pairing, dpo: Dpo) -> PairLoss:
    """The losses of every pair from the summed log-probabilities [completions] of policy and reference."""
    ratios = policy - reference
    if dpo.preference_average_log_probs:
        ratios = ratios / num_tokens
    pairs = PairRatios(ratios[pairing.winners], ratios[pairing.losers])
    beta = dpo.reference_policy_kl_penalty
    return PairLoss(
        preference=PREFERENCE_LOSSES[dpo.preference_loss](pairs, beta=beta),
        sft=sft(policy[pairing.best], num_tokens[pairing.best], average=dpo.sft_average_log_probs),
        rewards_chosen=beta * pairs.chosen.detach(),
        rewards_rejected=beta * pairs.rejected.detach(),
        logps_chosen=policy[pairing.winners].detach(),
        logps_rejected=policy[pairing.losers].detach(),
    )

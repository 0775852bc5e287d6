"""Computes the losses and implicit rewards of every pair of a micro-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.completions import ChosenRejected, Completions
from tandem.config.losses import averages, needs_reference, weights_of
from tandem.config.sections.dpo import Dpo
from tandem.errors import ConfigError, TandemError, one_line
from tandem.loss.declare import loss_of
from tandem.loss.pairs import Pairs, PairSums, apply_divergence, divergence_slope, pair_sums, with_defaults, wpo_weights
from tandem.user_code import is_user_function


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss:
    """The losses and implicit rewards of a micro-batch. Rewards are multiplied by beta, as in the papers."""

    pair_losses: Tensor  # [pairs], sum of the configured losses, times WPO's weight and the row's weight
    sft: Tensor  # [preferences], SFT loss of the best completion
    policy: ChosenRejected  # log pi, summed as in PairSums; carries the gradient
    rewards: ChosenRejected
    reward_slopes: ChosenRejected  # change of the rewards per nat of a completion's log-probability


def pairs_from_sums(sums: PairSums, dpo: Dpo) -> Pairs:
    """Make the input of the losses from summed log-probabilities.

    Log-probabilities are averaged over tokens if dpo.preference_average_log_probs is set. Log-ratios are transformed by the
    f-divergence.
    """
    policy, reference, num_tokens = sums.policy, sums.reference, sums.num_tokens
    ratios = policy - reference
    if dpo.preference_average_log_probs:
        policy, reference, ratios = policy / num_tokens, reference / num_tokens, ratios / num_tokens
    ratios = ratios.map(lambda ratio: apply_divergence(ratio, dpo.f_divergence, dpo.f_alpha))
    return Pairs(
        policy=policy,
        reference=reference,
        ratios=ratios,
        num_tokens=num_tokens,
        # Without scores in the data, a loss that reads them becomes NaN, which stops the run.
        columns=with_defaults(sums.columns, policy),
    )


def combined_losses(pairs: Pairs, dpo: Dpo) -> Tensor:
    """Return the weighted sum of the configured losses: [pairs].

    A loss of scope batch sorts values over the global batch, so `pairs` must be all pairs of the global batch. The values of such
    a loss do not belong to single pairs; only their sum is meaningful.
    """
    losses = [
        weight * loss_of(name).function(pairs, **loss_of(name).arguments(dpo))
        for name, weight in weights_of(dpo.preference_loss).items()
    ]
    return torch.stack(losses).sum(0)


def sft(logps: Tensor, num_tokens: Tensor, *, average: bool) -> Tensor:
    """Return the SFT loss of each preference: -log pi of its best completion, summed or averaged over tokens. [preferences]"""
    return -(logps / num_tokens) if average else -logps


def implicit_rewards(pairs: Pairs, dpo: Dpo) -> ChosenRejected:
    """Return the implicit reward of each completion: beta times its log-ratio, or beta times log pi if no loss needs a reference.

    Rewards are divided by the completion length if the losses are.
    """
    values = pairs.ratios if needs_reference(dpo.preference_loss) else pairs.policy
    if averages(dpo.preference_loss):
        values = values / pairs.num_tokens
    return values.map(lambda value: dpo.reference_policy_kl_penalty * value.detach())


def reward_slopes(pairs: Pairs, dpo: Dpo) -> ChosenRejected:
    """Return the derivative of each implicit reward with respect to the summed log-probability of its completion.

    The derivative is beta times the slope of the f-divergence, divided by the completion length if rewards are per token.
    A rounding error of the summed log-probability is multiplied by this derivative in the reward.
    """
    beta = dpo.reference_policy_kl_penalty
    ratios = (pairs.policy - pairs.reference).map(lambda ratio: ratio.detach())
    slopes = ratios.map(lambda ratio: beta * divergence_slope(ratio, dpo.f_divergence, dpo.f_alpha))
    return slopes / pairs.num_tokens if dpo.per_token else slopes


def pair_loss(completions: Completions, dpo: Dpo, batch_losses: Tensor | None = None) -> PairLoss:
    """Compute the losses and rewards of every pair of a micro-batch.

    `batch_losses`: the losses of these pairs, if they were already computed over the global batch (scope batch).
    """
    pairing, num_tokens = completions.pairing, completions.num_tokens
    sums = pair_sums(completions, dpo.ld_alpha)
    pairs = pairs_from_sums(sums, dpo)
    losses = combined_losses(pairs, dpo) if batch_losses is None else batch_losses
    if dpo.wpo:
        assert completions.wpo_log_weights is not None, "dpo.wpo needs the weight of each completion"
        losses = wpo_weights(completions.wpo_log_weights, pairing) * losses
    if (weight := completions.columns.get("weight")) is not None:
        losses = completions.per_pair(weight) * losses
    return PairLoss(
        pair_losses=losses,
        sft=sft(completions.policy[pairing.best], num_tokens[pairing.best], average=dpo.sft_average_log_probs),
        policy=sums.policy,
        rewards=implicit_rewards(pairs, dpo),
        reward_slopes=reward_slopes(pairs, dpo),
    )


def check_user_losses(dpo: Dpo) -> None:
    """Compute each loss of the user's for a few ordinary pairs. Raise ConfigError if its values cannot be trained on.

    The loss itself checks their shape (loss/declare.py).
    """
    for name in filter(is_user_function, weights_of(dpo.preference_loss)):
        where = f"dpo.preference_loss = {name}"
        sums, leaf = _ordinary_pairs()
        try:
            losses = loss_of(name).function(pairs_from_sums(sums, dpo), **loss_of(name).arguments(dpo))
        except TandemError:
            raise
        except Exception as error:
            raise ConfigError(f"{where}: it fails with {type(error).__name__}: {one_line(error)}.") from error
        if not losses.requires_grad:
            raise ConfigError(f"{where}: its values do not depend on the policy, so there is nothing to train.")
        losses.sum().backward()
        for what, values in (("value", losses), ("gradient", leaf.grad)):
            if values is not None and not bool(values.isfinite().all()):
                pair = int((~values.isfinite()).nonzero()[0, -1])
                chosen, rejected = leaf[:, pair].tolist()
                reference = [one[pair].item() for one in (sums.reference.chosen, sums.reference.rejected)]
                raise ConfigError(
                    f"{where}: its {what} is {values[..., pair].flatten()[0].item()} for an ordinary pair (log-probabilities "
                    f"{chosen:g} and {rejected:g}, of the reference {reference[0]:g} and {reference[1]:g}). Check the formula."
                )


def _ordinary_pairs() -> tuple[PairSums, Tensor]:
    """Return pairs that a run could have, and the policy's log-probabilities: [chosen or rejected, pairs]."""
    policy = torch.tensor([[-20.0, -31.0, -8.0], [-24.0, -30.0, -8.0]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-20.5, -30.0, -8.0], [-23.5, -31.0, -8.0]], dtype=torch.float64)
    scores = torch.tensor([[1.0, 0.75, 0.5], [0.0, 0.25, 0.5]], dtype=torch.float64)
    num_tokens = torch.tensor([[8, 12, 3], [10, 12, 4]])
    sums = PairSums(
        policy=ChosenRejected(policy[0], policy[1]),
        reference=ChosenRejected(reference[0], reference[1]),
        num_tokens=ChosenRejected(num_tokens[0], num_tokens[1]),
        columns={"score": ChosenRejected(scores[0], scores[1])},
    )
    return sums, policy

"""Computes the losses of a pack, and its Completions: the record that losses and metrics read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.columns import COLUMNS
from tandem.completions import ChosenRejected, Completions, Pairing, sum_completions
from tandem.config.sections.dpo import Dpo
from tandem.loss.objective import PairLoss, pair_loss, pairs_from_sums
from tandem.loss.pairs import Pairs, PairSums, pair_sums, prefix_sums, with_defaults, wpo_log_weights
from tandem.model.distributed.process_group import Ranks
from tandem.model.policy import Policy
from tandem.model.reference import Reference
from tandem.packing.layout import Pack


@dataclass(frozen=True, slots=True)
class StepContext:
    """Everything that a step needs in addition to the policy: the reference, the loss settings, the ranks and the precision."""

    reference: Reference
    dpo: Dpo
    ranks: Ranks
    precision: str


@dataclass(frozen=True, slots=True)
class PackOutcome:
    """A micro-batch, its completions and its losses."""

    pack: Pack
    completions: Completions
    loss: PairLoss


def pack_completions(policy: Policy, context: StepContext, pack: Pack) -> Completions:
    """Run the forward pass of a micro-batch. Return the log-probabilities of policy and reference, summed per completion."""
    dpo = context.dpo
    inputs = policy.inputs(pack, context.ranks.device)
    segments = inputs.completion_lengths, inputs.completion
    pairing = Pairing(inputs.winners, inputs.losers, inputs.best)
    tokens, squares = policy(inputs, squares=True) if dpo.wpo else (policy(inputs), None)
    own = sum_completions(tokens, *segments)
    with torch.no_grad():
        reference_tokens = context.reference.token_logps(pack, inputs)
        reference = sum_completions(reference_tokens, *segments)
        drift = sum_completions((tokens.detach() - reference_tokens).square() / 2, *segments)

    def prefix(token_logps: torch.Tensor) -> ChosenRejected | None:
        return None if dpo.ld_alpha is None else prefix_sums(token_logps, own.num_tokens, pairing)

    return Completions(
        policy=own.total,
        reference=reference.total,
        num_tokens=own.num_tokens,
        drift=drift.total,
        preference=inputs.preference,
        pairing=pairing,
        columns=inputs.columns,
        wpo_log_weights=None if squares is None else wpo_log_weights(tokens.detach(), squares, *segments),
        policy_prefix=prefix(tokens),
        reference_prefix=prefix(reference_tokens),
    )


def pack_outcome(policy: Policy, context: StepContext, pack: Pack) -> PackOutcome:
    """Compute the losses of a micro-batch, for a loss in which pairs are independent of each other."""
    completions = pack_completions(policy, context, pack)
    return PackOutcome(pack, completions, pair_loss(completions, context.dpo))


@dataclass(frozen=True, slots=True)
class JoinedPairs:
    """The pairs of several micro-batches, concatenated over all ranks."""

    pairs: Pairs
    policy: ChosenRejected  # the policy's log-probabilities of these pairs: leaf tensors, for the gradient of the loss
    own: slice  # the pairs of this rank


def joined_pairs(several: Sequence[Completions], dpo: Dpo, ranks: Ranks) -> JoinedPairs:
    """Concatenate the pairs of several micro-batches of all ranks, as the input of a loss that depends on the whole batch."""
    views = [pair_sums(completions, dpo.ld_alpha) for completions in several]

    def stacked(view: PairSums) -> dict[str, torch.Tensor]:
        """Return each field of `view` as a tensor [pairs, 2]: column 0 for the chosen, column 1 for the rejected completion."""
        both = {
            "policy": view.policy,
            "reference": view.reference,
            "num_tokens": view.num_tokens,
            **{f"column {name}": values for name, values in with_defaults(view.columns, view.policy).items()},
        }
        return {name: torch.stack([one.chosen, one.rejected], dim=1).detach().double() for name, one in both.items()}

    columns = [stacked(view) for view in views]
    rows = torch.cat([torch.cat(list(by_name.values()), dim=1) for by_name in columns])
    joined, own = ranks.concatenate_parts(rows)
    both = {
        name: ChosenRejected(*part.unbind(1)) for name, part in zip(columns[0], joined.split(2, dim=1), strict=True)
    }
    policy = both["policy"].map(lambda values: values.requires_grad_())
    data = {name: both[f"column {name}"] for name in COLUMNS}
    sums = PairSums(policy=policy, reference=both["reference"], num_tokens=both["num_tokens"], columns=data)
    return JoinedPairs(pairs_from_sums(sums, dpo), policy, own)

"""A pack in; what the loss compares out: policy and reference log-probabilities, per completion and per pair."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.completions import CompletionLogps, sum_completions
from tandem.config.sections.dpo import Dpo
from tandem.loss.objective import PairLoss, compare, pair_loss
from tandem.loss.pairs import ChosenRejected, Pairing, Pairs, pair_sums, wpo_weights
from tandem.model.distributed.process_group import Ranks
from tandem.model.policy import Policy
from tandem.model.reference import Reference
from tandem.packing.layout import Pack


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step needs besides the policy: the reference, the loss's settings, the workers and the precision."""

    reference: Reference
    dpo: Dpo
    ranks: Ranks
    precision: str


@dataclass(frozen=True, slots=True)
class PackTerms:
    """What one micro-batch gives the loss: sums per completion, and per pair what it compares."""

    own: CompletionLogps
    policy: ChosenRejected  # log pi of each pair, tokens weighted as LD-DPO asks
    reference: ChosenRejected
    plain_reference: ChosenRejected  # tokens unweighted
    drift: ChosenRejected  # half the squared log-ratio of each token, summed: an estimate of the KL, never below 0
    num_tokens: ChosenRejected
    scores: ChosenRejected
    pairing: Pairing
    weights: torch.Tensor | None  # WPO's

    def compared(self, dpo: Dpo) -> Pairs:
        return compare(self.policy, self.reference, self.num_tokens, dpo, self.scores)


@dataclass(frozen=True, slots=True)
class PackOutcome:
    """A micro-batch, its terms and its losses."""

    pack: Pack
    terms: PackTerms
    loss: PairLoss


def pack_terms(policy: Policy, side: StepContext, pack: Pack) -> PackTerms:
    """Forward of one micro-batch: policy and reference log-probabilities, summed."""
    dpo = side.dpo
    inputs = policy.inputs(pack, side.ranks.device)
    segments = inputs.completion_lengths, inputs.completion
    pairing = Pairing(inputs.winners, inputs.losers, inputs.best)
    tokens, squares = policy(inputs, squares=True) if dpo.wpo else (policy(inputs), None)
    own = sum_completions(tokens, *segments)
    with torch.no_grad():
        reference_tokens = side.reference.token_logps(pack, inputs)
        reference = sum_completions(reference_tokens, *segments)
        drift = sum_completions((tokens.detach() - reference_tokens).square() / 2, *segments)
    return PackTerms(
        own,
        policy=pair_sums(tokens, own, pairing, dpo.ld_alpha),
        reference=pair_sums(reference_tokens, reference, pairing, dpo.ld_alpha),
        plain_reference=pairing.sides(reference.total),
        drift=pairing.sides(drift.total),
        num_tokens=pairing.sides(own.num_tokens),
        scores=pairing.sides(inputs.scores),
        pairing=pairing,
        weights=None if squares is None else wpo_weights(tokens.detach(), squares, *segments, pairing),
    )


def pack_outcome(policy: Policy, side: StepContext, pack: Pack) -> PackOutcome:
    """The losses of a micro-batch, where a pair's depends on no other pair."""
    terms = pack_terms(policy, side, pack)
    loss = pair_loss(terms.own, terms.compared(side.dpo), terms.pairing, side.dpo, terms.weights)
    return PackOutcome(pack, terms, loss)


@dataclass(frozen=True, slots=True)
class JoinedPairs:
    """The pairs of several micro-batches of all workers as one."""

    pairs: Pairs
    policy: ChosenRejected  # the policy's numbers in them, by which a loss can be derived
    own: slice  # this worker's


def joined_pairs(several: Sequence[PackTerms], dpo: Dpo, ranks: Ranks) -> JoinedPairs:
    """What a loss that compares over the batch sees."""

    def columns(terms: PackTerms) -> list[torch.Tensor]:
        sides = (terms.policy, terms.reference, terms.num_tokens, terms.scores)
        return [values.detach().double() for side in sides for values in (side.chosen, side.rejected)]

    rows = torch.cat([torch.stack(columns(terms), dim=1) for terms in several])
    joined, own = ranks.concatenate(rows)
    policy, reference, num_tokens, scores = (ChosenRejected(*joined[:, i : i + 2].unbind(1)) for i in range(0, 8, 2))
    policy = policy.map(lambda values: values.requires_grad_())
    return JoinedPairs(compare(policy, reference, num_tokens, dpo, scores), policy, own)

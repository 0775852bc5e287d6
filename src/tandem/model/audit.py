"""Before the first update: is what is about to be trained what the plain model computes? Few preferences, exact answers."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from tandem.data.selection import Preferences
from tandem.errors import AuditError
from tandem.model.attention import counted_calls
from tandem.model.policy import Policy
from tandem.model.reference import Reference
from tandem.packing.packer import Packer

# Mean absolute difference per token that rounding can make (docs/exactness.md).
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
NUM_PREFERENCES = 4
# The eager forward keeps a matrix of length x length per head: longer preferences are left out.
MAX_AUDIT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Audit:
    """What the audit found: largest mean difference per token to the plain forward, and to the reference."""

    plain_difference: float
    reference_difference: float | None
    num_completions: int
    chosen_nats: float  # the start model's mean loss per token of the best completions looked at


def audit(
    policy: Policy, reference: Reference, packer: Packer, device: torch.device, *, precision: str, same_start: bool
) -> Audit:
    """Compare packed log-probabilities with the plain eager forward and with the reference; AuditError if they differ.

    `same_start`: the reference is the model the policy starts from, so that their numbers must agree.
    """
    tolerance = TOLERANCE[precision]
    packer = packer.alone()  # every worker looks at the same, so that all find the same
    _check_calls(policy, packer, device)
    plain_worst = reference_worst = 0.0
    num_completions = num_tokens = 0
    nats = 0.0
    for pack in packer.micro_batches(_sample(packer.store)):
        inputs = policy.inputs(pack, device)
        with torch.no_grad():
            packed = policy(inputs)[: inputs.num_scored]
        against = reference.token_logps(pack, inputs)[: inputs.num_scored].to(packed)
        lengths = pack.completion_lengths.tolist()
        ours, theirs = packed.split(lengths), against.split(lengths)
        sequences = [
            (index, number, preference)
            for index in pack.preferences.tolist()
            for preference in (packer.store[index],)
            for number in range(len(preference.completions))
        ]
        for (index, number, preference), own, other in zip(sequences, ours, theirs, strict=True):
            place = f"{packer.store.place(index)} (completion {number})"
            whole = policy.plain_logps(_ids(preference.prompt, device), _ids(preference.completions[number], device))
            plain = whole[_ids(preference.scored(number), device)]
            plain_worst = max(plain_worst, _compare_plain(own, plain, tolerance, place))
            if same_start:
                reference_worst = max(reference_worst, _compare_reference(own, other, tolerance, place))
            num_completions += 1
        for best in pack.best.tolist():
            nats -= float(ours[best].double().sum())
            num_tokens += lengths[best]
    return Audit(plain_worst, reference_worst if same_start else None, num_completions, nats / num_tokens)


def _sample(store: Preferences) -> np.ndarray:
    """The first few preferences, and the longest that fits the audit: it is the one that passes a window."""
    fitting = np.flatnonzero(store.longest <= MAX_AUDIT_TOKENS)
    fitting = fitting if len(fitting) else np.array([int(np.argmin(store.longest))])
    longest = fitting[np.argmax(store.longest[fitting])]
    return np.unique([*fitting[: NUM_PREFERENCES - 1].tolist(), int(longest)])


def _compare_plain(own: torch.Tensor, plain: torch.Tensor, tolerance: float, place: str) -> float:
    difference = _mean_difference(own, plain)
    if not difference <= tolerance:
        raise AuditError(
            f"audit: {place}: packed log-probabilities differ from the model's plain forward by {difference:.2g} nats a "
            f"token (rounding explains {tolerance:g}), so training would not be exact. Nothing was trained. "
            "Train this model with policy.packing.mode=none, and report it."
        )
    return difference


def _compare_reference(own: torch.Tensor, other: torch.Tensor, tolerance: float, place: str) -> float:
    difference = _mean_difference(own, other)
    if not difference <= tolerance:
        raise AuditError(
            f"audit: {place}: the reference differs from the model it was made of by {difference:.2g} nats a token "
            f"(rounding explains {tolerance:g}). Nothing was trained. Remove the cached reference "
            "(reference.cache_dir) and start again."
        )
    return difference


def _mean_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean absolute difference; NaN, which passes no comparison, if any number is not finite."""
    return float((a.double() - b.double()).abs().mean())


def _check_calls(policy: Policy, packer: Packer, device: torch.device) -> None:
    """Every attention layer must ask for the pack's mask once; seen uncompiled, where calls can be counted."""
    if not policy.packed:
        return
    pack = next(packer.micro_batches(_sample(packer.store)))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), counted_calls() as calls:
        policy(policy.inputs(pack, device))
    config = policy.model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    expected = sum("attention" in kind for kind in kinds) if kinds else config.num_hidden_layers
    if len(calls) != expected:
        raise AuditError(
            f"audit: {len(calls)} of {expected} attention layers asked for the pack's mask, so sequences would see each "
            "other. Nothing was trained. Train this model with policy.packing.mode=none."
        )


def _ids(ids: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(device)


def start_loss_verdict(nats: float, vocabulary: int) -> str:
    """What the start model's mean loss per token of the chosen completions says about model and template."""
    guessing = math.log(vocabulary)
    if nats > 0.95 * guessing:
        return f"{nats:.2f} nats a token, as much as guessing ({guessing:.2f}): these weights are untrained"
    if nats > 4.0:
        return f"{nats:.2f} nats a token: implausible; is this the template it was trained with?"
    return f"{nats:.2f} nats a token"

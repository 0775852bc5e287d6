"""Before the first update: is what is about to be trained what the plain model computes? Few preferences, exact answers."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tandem.data.selection import Preferences
from tandem.errors import AuditError
from tandem.model.attention import counted_calls
from tandem.model.policy import Policy
from tandem.model.reference import Reference
from tandem.model.workers import Workers
from tandem.packing.layout import Pack
from tandem.packing.packer import Packer

# Mean absolute difference per token that rounding makes at least (docs/exactness.md).
LEAST_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
# Some models round more. How much is seen where the plain forward differs from itself with filler behind the sequence, or
# with embeddings that are off by one rounding; packing differed by up to 1.5 times that where it was measured
# (docs/exactness.md).
TIMES_ROUNDING = 4
FILLER = 100
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
    policy: Policy, reference: Reference, packer: Packer, workers: Workers, *, precision: str, same_start: bool
) -> Audit:
    """Compare packed log-probabilities with the plain eager forward and with the reference; AuditError if they differ.

    `same_start`: the reference is the model the policy starts from, so that their numbers must agree.
    """
    packer = packer.alone()  # every worker looks at the same, so that all find the same
    _check_calls(policy, packer, workers.device)
    compared = [
        one
        for pack in packer.micro_batches(_sample(packer.store))
        for one in _compare(policy, reference, packer.store, pack, workers.device)
    ]
    tolerance = LEAST_TOLERANCE[precision]
    differs = not all(one.plain <= tolerance and (one.reference <= tolerance or not same_start) for one in compared)
    # Forwards are computed by all workers or by none, even where one finds what another just does not.
    if workers.highest(differs):
        tolerance = max(tolerance, TIMES_ROUNDING * float(np.mean([one.rounding() for one in compared])))
    for one in compared:
        _check_plain(one, tolerance)
        if same_start:
            _check_reference(one, tolerance)
    best = [one for one in compared if one.is_best]
    return Audit(
        plain_difference=max(one.plain for one in compared),
        reference_difference=max(one.reference for one in compared) if same_start else None,
        num_completions=len(compared),
        chosen_nats=sum(one.nats for one in best) / sum(one.num_tokens for one in best),
    )


@dataclass(frozen=True, slots=True)
class _Compared:
    """A completion's mean absolute differences per token, and its loss under the policy."""

    place: str
    plain: float  # of the pack to the plain forward
    reference: float  # of the pack to the reference
    rounding: Callable[[], float]  # of the plain forward to itself, rounded otherwise; two more forwards tell
    nats: float
    num_tokens: int
    is_best: bool


def _compare(
    policy: Policy, reference: Reference, store: Preferences, pack: Pack, device: torch.device
) -> Iterator[_Compared]:
    """Every completion of a pack."""
    inputs = policy.inputs(pack, device)
    with torch.no_grad():
        packed = policy(inputs)[: inputs.num_scored]
    against = reference.token_logps(pack, inputs)[: inputs.num_scored].to(packed)
    lengths, best = pack.completion_lengths.tolist(), set(pack.best.tolist())
    sequences = [
        (index, number) for index in pack.preferences.tolist() for number in range(len(store[index].completions))
    ]
    parts = zip(sequences, packed.split(lengths), against.split(lengths), strict=True)
    for at, ((index, number), own, other) in enumerate(parts):
        preference = store[index]
        ids = _ids(preference.prompt, device), _ids(preference.completions[number], device)
        scored = _ids(preference.scored(number), device)
        plain = policy.plain_logps(*ids)[scored]
        yield _Compared(
            f"{store.place(index)} (completion {number})",
            plain=_mean_difference(own, plain),
            reference=_mean_difference(own, other),
            rounding=partial(_rounding, policy, ids, scored, plain),
            nats=-float(own.double().sum()),
            num_tokens=len(own),
            is_best=at in best,
        )


def _rounding(policy: Policy, ids: tuple[Tensor, Tensor], scored: Tensor, plain: Tensor) -> float:
    """How far the plain forward of a prompt and a completion is from itself where it is rounded otherwise."""
    otherwise = policy.plain_logps(*ids, filler=FILLER), policy.plain_logps(*ids, nudged=True)
    return max(_mean_difference(plain, one[scored]) for one in otherwise)


def _sample(store: Preferences) -> np.ndarray:
    """The first few preferences, and the longest that fits the audit: it is the one that passes a window."""
    fitting = np.flatnonzero(store.longest <= MAX_AUDIT_TOKENS)
    fitting = fitting if len(fitting) else np.array([int(np.argmin(store.longest))])
    longest = fitting[np.argmax(store.longest[fitting])]
    return np.unique([*fitting[: NUM_PREFERENCES - 1].tolist(), int(longest)])


def _check_plain(one: _Compared, tolerance: float) -> None:
    if not one.plain <= tolerance:
        raise AuditError(
            f"audit: {one.place}: packed log-probabilities differ from the model's plain forward by {one.plain:.2g} nats a "
            f"token (rounding explains {tolerance:.2g}), so training would not be exact. Nothing was trained. "
            "Train this model with policy.packing.mode=none, and report it."
        )


def _check_reference(one: _Compared, tolerance: float) -> None:
    if not one.reference <= tolerance:
        raise AuditError(
            f"audit: {one.place}: the reference differs from the model it was made of by {one.reference:.2g} nats a token "
            f"(rounding explains {tolerance:.2g}). Nothing was trained. Remove the cached reference "
            "(reference.cache_dir) and start again."
        )


def _mean_difference(a: Tensor, b: Tensor) -> float:
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


def _ids(ids: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(device)


def start_loss_verdict(nats: float, vocabulary: int) -> str:
    """What the start model's mean loss per token of the chosen completions says about model and template."""
    guessing = math.log(vocabulary)
    if nats > 0.95 * guessing:
        return f"{nats:.2f} nats a token, as much as guessing ({guessing:.2f}): these weights are untrained"
    if nats > 4.0:
        return f"{nats:.2f} nats a token: implausible; is this the template it was trained with?"
    return f"{nats:.2f} nats a token"

"""Before a model computes anything that is kept: is what it computes in packs what its plain forward computes?

A few preferences, exact answers. The policy is audited before its reference is computed, and so is a reference that is another
model: a model that is refused leaves nothing in the cache.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.data.store.selection import Preferences
from tandem.errors import AuditError
from tandem.model.attention.pack_attention import counted_calls
from tandem.model.distributed.process_group import Ranks
from tandem.model.policy import Policy
from tandem.model.reference import Reference
from tandem.packing.layout import Pack
from tandem.packing.packer import Packer

# Mean absolute difference per token that rounding makes at least (docs/exactness.md).
LEAST_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
# Some models round more. How much is seen where the plain forward differs from itself with filler after the sequence, or
# with embeddings that are off by one rounding; packing differed by up to 1.5 times that where it was measured
# (docs/exactness.md).
TIMES_ROUNDING = 4
# But filler changes what some models compute (RoPE scaled by the longest position), and then it does not measure rounding.
MOST_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.25}
FILLER = 100
NUM_PREFERENCES = 4
# The eager forward keeps matrices of length x length per head: a preference is audited as far as they fit in free memory, and
# no longer than this, which is past every sliding window and chunk in use.
MAX_AUDIT_TOKENS = 16_384
SHARE_OF_FREE_MEMORY = 0.5
MEMORY = Path("/proc/meminfo")  # of the host; Linux has it


@dataclass(frozen=True, slots=True)
class AuditedCompletion:
    """A completion's token log-probabilities in a pack, and how they compare with the plain forward."""

    place: str
    packed: Tensor
    plain_difference: float  # mean absolute difference per token
    rounding: Callable[[], float]  # of the plain forward to itself, rounded in another way; takes two more forwards
    is_best: bool


@dataclass(slots=True)
class Audit:
    """What the audit of a model found."""

    packs: list[Pack]
    completions: list[AuditedCompletion]
    precision: str
    num_longer: int  # preferences too long to be audited
    longest: int  # tokens of the longest that was
    _tolerance: float | None = field(default=None, init=False)

    @property
    def plain_difference(self) -> float:
        """The largest of any completion."""
        return max(one.plain_difference for one in self.completions)

    @property
    def chosen_nats(self) -> float:
        """The model's mean loss per token of the best completions that were looked at."""
        best = torch.cat([one.packed for one in self.completions if one.is_best])
        return -float(best.double().mean())

    def tolerance(self, differences: list[float], ranks: Ranks) -> float:
        """What rounding explains of a difference. It is measured only if some difference is above the least tolerance."""
        least = LEAST_TOLERANCE[self.precision]
        # Forwards are computed by all ranks or by none, even where one finds what another just does not.
        if self._tolerance is None and ranks.highest(not all(one <= least for one in differences)):
            rounding = TIMES_ROUNDING * float(np.mean([one.rounding() for one in self.completions]))
            self._tolerance = min(max(least, rounding), MOST_TOLERANCE[self.precision])
        return least if self._tolerance is None else self._tolerance


def audit(policy: Policy, packer: Packer, ranks: Ranks, *, precision: str, model: str) -> Audit:
    """Compare packed log-probabilities with the plain eager forward; AuditError if they differ.

    `model`: its key and name in the configuration.
    """
    packer = packer.alone()  # every rank looks at the same, so that all find the same
    longest = -ranks.highest(-_longest_that_fits(policy, ranks.device))
    sample = _sample(packer.store, longest)
    packs = list(packer.micro_batches(sample))
    _check_calls(policy, packs[0], ranks.device, model)
    completions = [one for pack in packs for one in _compare(policy, packer.store, pack, ranks.device)]
    lengths = packer.store.longest
    found = Audit(
        packs,
        completions,
        precision,
        num_longer=int((lengths > max(longest, lengths[sample].max())).sum()),
        longest=int(lengths[sample].max()),
    )
    tolerance = found.tolerance([one.plain_difference for one in completions], ranks)
    for one in completions:
        _check_plain(one, tolerance, model, packed=policy.packed)
    if policy.packed:
        _check_last_columns(policy, packer, found, ranks, model)
    return found


def audit_reference(policy: Policy, found: Audit, reference: Reference, ranks: Ranks) -> float:
    """Compare a policy, as it was audited, with the reference made of it; the largest mean difference per token."""
    against: list[Tensor] = []
    for pack in found.packs:
        inputs = policy.inputs(pack, ranks.device)
        values = reference.token_logps(pack, inputs)[: inputs.num_scored]
        against += values.split(pack.completion_lengths.tolist())
    pairs = list(zip(found.completions, against, strict=True))
    differences = [_mean_difference(one.packed, other.to(one.packed)) for one, other in pairs]
    tolerance = found.tolerance(differences, ranks)
    for (one, _), difference in zip(pairs, differences, strict=True):
        if not difference <= tolerance:
            raise AuditError(
                f"audit: {one.place}: the reference differs from the model it was made of by {difference:.2g} nats a token "
                f"(rounding explains {tolerance:.2g}). Nothing was trained. Remove the cached reference "
                "(reference.cache_dir) and start again."
            )
    return max(differences)


def _compare(policy: Policy, store: Preferences, pack: Pack, device: torch.device) -> Iterator[AuditedCompletion]:
    """Every completion of a pack."""
    inputs = policy.inputs(pack, device)
    with torch.no_grad():
        packed = policy(inputs)[: inputs.num_scored]
    lengths, best = pack.completion_lengths.tolist(), set(pack.best.tolist())
    sequences = [
        (index, number) for index in pack.preferences.tolist() for number in range(len(store[index].completions))
    ]
    for at, ((index, number), own) in enumerate(zip(sequences, packed.split(lengths), strict=True)):
        preference = store[index]
        ids = _ids(preference.prompt, device), _ids(preference.completions[number], device)
        scored = _ids(preference.scored(number), device)
        plain = policy.plain_logps(*ids)[scored]
        yield AuditedCompletion(
            f"{store.place(index)} (completion {number})",
            own,
            plain_difference=_mean_difference(own, plain),
            rounding=partial(_rounding, policy, ids, scored, plain),
            is_best=at in best,
        )


def _check_last_columns(policy: Policy, packer: Packer, found: Audit, ranks: Ranks, model: str) -> None:
    """AuditError if a preference at the end of the longest row is not what it was near the beginning of its row.

    The sample fills only the first columns. A model that computes something from columns, not from position ids, may do so only
    beyond a number of them: the attention temperature of Llama 4 changes every 8,192.
    """
    sample = np.concatenate([pack.preferences for pack in found.packs])
    index = int(sample[np.argmin(packer.sizes[sample])])
    if packer.sizes[index] > packer.length:  # has several rows
        return
    pack = _at_the_end(packer.row([index], packer.length))
    inputs = policy.inputs(pack, ranks.device)
    with torch.no_grad():
        last = policy(inputs)[: inputs.num_scored].split(pack.completion_lengths.tolist())
    owners = np.concatenate([pack.preferences[pack.owner] for pack in found.packs])
    first = [one for one, owner in zip(found.completions, owners, strict=True) if owner == index]
    differences = [_mean_difference(one.packed, other) for one, other in zip(first, last, strict=True)]
    tolerance = found.tolerance(differences, ranks)
    for one, difference in zip(first, differences, strict=True):
        if not difference <= tolerance:
            raise AuditError(
                f"audit: {model}: {one.place}: its log-probabilities at the end of a row of {packer.length:,} tokens differ from "
                f"those at the beginning by {difference:.2g} nats a token (rounding explains {tolerance:.2g}), so training would "
                "not be exact. Nothing was trained. Lower policy.packing.pack_length, or train this model with "
                "policy.packing.mode=none, and report it."
            )


def _at_the_end(pack: Pack) -> Pack:
    """A pack of one row with its filler first: tokens 5 6 7 and two of filler -> two of filler and 5 6 7."""
    by = pack.token_ids.shape[1] - pack.num_tokens
    rows = {name: np.roll(getattr(pack, name), by, axis=1) for name in ("token_ids", "position_ids", "tree", "branch")}
    return replace(pack, **rows, predicting=pack.predicting + by)


def _rounding(policy: Policy, ids: tuple[Tensor, Tensor], scored: Tensor, plain: Tensor) -> float:
    """How far the plain forward of a prompt and a completion is from itself where it is rounded in another way."""
    others = policy.plain_logps(*ids, filler=FILLER), policy.plain_logps(*ids, nudged=True)
    return max(_mean_difference(plain, one[scored]) for one in others)


def _sample(store: Preferences, longest: int) -> np.ndarray:
    """The first few preferences, and the longest up to so many tokens: it is the one that passes a window."""
    fitting = np.flatnonzero(store.longest <= longest)
    fitting = fitting if len(fitting) else np.array([int(np.argmin(store.longest))])
    last = fitting[np.argmax(store.longest[fitting])]
    return np.unique([*fitting[: NUM_PREFERENCES - 1].tolist(), int(last)])


def _longest_that_fits(policy: Policy, device: torch.device) -> int:
    """Tokens of a sequence whose eager forward surely fits in free memory, up to MAX_AUDIT_TOKENS."""
    config = policy.model.config.get_text_config()
    heads, size = getattr(config, "num_attention_heads", None) or 1, next(policy.parameters()).element_size()
    heads = max(heads) if isinstance(heads, list) else heads
    # Scores and the same masked in the model's dtype, their softmax in float32; logits, the same in float32, their softmax.
    per_square, per_token = heads * (2 * size + 4), config.vocab_size * (size + 8)
    room = SHARE_OF_FREE_MEMORY * _free_memory(device)
    # per_square * n^2 + per_token * n = room
    root = math.sqrt(per_token**2 + 4 * per_square * room)
    return min(MAX_AUDIT_TOKENS, int((root - per_token) / (2 * per_square)))


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    # Most of what is not free holds files that were read, the model's among them, and is given up when it is needed.
    if MEMORY.is_file() and (found := re.search(r"^MemAvailable: +(\d+) kB", MEMORY.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_plain(one: AuditedCompletion, tolerance: float, model: str, *, packed: bool) -> None:
    if not torch.isfinite(one.packed).all():
        raise AuditError(
            f"audit: {model}: {one.place}: its log-probabilities are not finite, so no loss can be computed. Nothing was "
            "trained. Either its weights hold numbers that are not finite, and it must be downloaded again, or it overflows: try "
            "policy.precision=float32."
        )
    if not one.plain_difference <= tolerance:
        rows, advice = (
            ("packed", "Train this model with policy.packing.mode=none, and report it.")
            if packed
            else ("padded", "This model cannot be trained exactly here: please report it.")
        )
        raise AuditError(
            f"audit: {model}: {one.place}: {rows} log-probabilities differ from the model's plain forward by "
            f"{one.plain_difference:.2g} nats a token (rounding explains {tolerance:.2g}), so training would not be exact. "
            f"Nothing was trained. {advice}"
        )


def _mean_difference(a: Tensor, b: Tensor) -> float:
    """Mean absolute difference; NaN, which passes no comparison, if any number is not finite."""
    return float((a.double() - b.double()).abs().mean())


def _check_calls(policy: Policy, pack: Pack, device: torch.device, model: str) -> None:
    """Every attention layer must ask for the pack's mask once; seen uncompiled, where calls can be counted."""
    if not policy.packed:
        return
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), counted_calls() as calls:
        policy(policy.inputs(pack, device))
    config = policy.model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    expected = sum("attention" in kind for kind in kinds) if kinds else config.num_hidden_layers
    if len(calls) < expected:  # some ask twice
        raise AuditError(
            f"audit: {model}: {len(calls)} of {expected} attention layers asked for the pack's mask, so sequences would see each "
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

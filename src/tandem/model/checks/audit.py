"""The audit: checks that a model computes the same log-probabilities in packs as in its plain forward pass.

A few preferences are compared. The policy is audited before the reference's log-probabilities are computed. A reference that is a
different model is audited too. If a model fails the audit, nothing is cached.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.data.store.selection import Preferences
from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import AuditError
from tandem.model.attention.pack_attention import record_calls
from tandem.model.checks.state_gradients import check_state_gradients
from tandem.model.distributed.process_group import Ranks
from tandem.model.files.layer_values import values_of
from tandem.model.policy import Policy
from tandem.model.recurrent.layers import record_recurrent_calls
from tandem.model.reference import Reference
from tandem.packing.layout import Pack, lay_out
from tandem.packing.packer import Packer

# Tolerated mean absolute difference per token, for models with ordinary rounding error (docs/exactness.md).
MIN_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
# Some models have larger rounding error. It is measured by repeating the plain forward with filler after the sequence, and with
# embeddings that are off by one rounding step. Measured packing differences were up to 1.5 times that (docs/exactness.md).
ROUNDING_FACTOR = 4
# Filler changes what some models compute (RoPE scaled by the longest position), so the measured tolerance is capped.
MAX_TOLERANCE = {"float32": 1e-2, "bfloat16": 0.25}
NUM_FILLER_TOKENS = 100
NUM_PREFERENCES = 4
# The eager forward keeps a length x length matrix per head. Preferences are audited up to the length whose matrices fit in free
# memory, and up to this length, which is beyond every sliding window and chunk in use. If all are longer, the shortest is cut.
MAX_AUDIT_TOKENS = 16_384
FREE_MEMORY_FRACTION = 0.5
MEMINFO = Path("/proc/meminfo")  # free memory of the host, on Linux


@dataclass(frozen=True, slots=True)
class AuditedCompletion:
    """The token log-probabilities of a completion in a pack, and their difference from the model's plain forward pass."""

    place: str
    packed: Tensor
    plain_difference: float  # mean absolute difference per token
    rounding: Callable[[], float]  # measures the rounding error of the plain forward; costs two more forward passes
    is_best: bool


@dataclass(slots=True)
class Audit:
    """The result of auditing a model."""

    packs: list[Pack]  # with whole preferences, even if one was cut for the audit
    completions: list[AuditedCompletion]
    precision: str
    num_longer: int  # preferences too long to be audited
    longest: int  # tokens of the longest audited preference
    is_cut: bool = False  # whether only a part of a preference was audited, because all are too long
    state_gradients: float | None = (
        None  # relative difference of gradients in packs; None without recurrent layers in packs
    )
    _tolerance: float | None = field(default=None, init=False)

    @property
    def plain_difference(self) -> float:
        """The largest mean difference per token between a pack and the plain forward pass, over all audited completions."""
        return max(one.plain_difference for one in self.completions)

    @property
    def chosen_nats(self) -> float:
        """The model's mean loss per token, in nats, on the best completion of each audited preference."""
        best = torch.cat([one.packed for one in self.completions if one.is_best])
        return -float(best.double().mean())

    def tolerance(self, differences: list[float], ranks: Ranks) -> float:
        """Return the largest mean difference per token that rounding explains.

        `differences`: the mean differences that will be compared with the result. Rounding is measured only if one of them
        exceeds the minimum tolerance, because measuring takes extra forward passes.
        """
        minimum = MIN_TOLERANCE[self.precision]
        # All ranks run the extra forward passes or none does, even if only one rank finds a difference above the minimum.
        if self._tolerance is None and ranks.highest(not all(one <= minimum for one in differences)):
            rounding = ROUNDING_FACTOR * float(np.mean([one.rounding() for one in self.completions]))
            self._tolerance = min(max(minimum, rounding), MAX_TOLERANCE[self.precision])
        return minimum if self._tolerance is None else self._tolerance


def audit(policy: Policy, packer: Packer, ranks: Ranks, *, precision: str, model: str) -> Audit:
    """Compare a model's log-probabilities in packs with its plain eager forward pass. Raise AuditError if they differ.

    `model`: the model's key and name in the configuration, for messages.
    """
    packer = packer.for_single_rank()  # every rank audits the same preferences, so all reach the same result
    longest = -ranks.highest(-_longest_that_fits(policy, ranks.device))
    sample = _sample(packer.store, longest)
    packs = list(packer.micro_batches(sample))
    _check_calls(policy, packs[0], ranks.device, model)
    preferences = {index: _cut(packer.store[index], longest) for index in sample.tolist()}
    lengths = packer.store.longest
    is_cut = bool(lengths[sample].max() > longest)
    audited = [_shortest_row(packer, *one) for one in preferences.items()] if is_cut else packs
    found = Audit(
        packs=packs,
        completions=[one for pack in audited for one in _compare(policy, preferences, pack, ranks.device)],
        precision=precision,
        num_longer=int((lengths > longest).sum()),
        longest=max(one.longest for one in preferences.values()),
        is_cut=is_cut,
    )
    tolerance = found.tolerance([one.plain_difference for one in found.completions], ranks)
    for one in found.completions:
        _check_plain(one, tolerance, model, packed=policy.packed)
    if policy.packed:
        _check_last_columns(policy, packer, found, preferences, ranks, model=model)
    if policy.recurrent is not None:
        shortest = preferences[int(sample[np.argmin(packer.sizes[sample])])]
        found.state_gradients = check_state_gradients(policy, shortest, ranks, precision=precision, model=model)
    return found


def audit_reference(policy: Policy, found: Audit, reference: Reference, ranks: Ranks) -> float:
    """Compare the log-probabilities of an audited policy with those of the reference, which was computed from the same model.

    Return the largest mean difference per token. Raise AuditError if rounding does not explain the difference.
    """
    own_logps: list[Tensor] = []
    reference_logps: list[Tensor] = []
    for pack in found.packs:
        inputs = policy.inputs(pack, ranks.device)
        reference_logps += _split(policy, reference.token_logps(pack, inputs), pack)
        if found.is_cut:
            with torch.no_grad():
                own_logps += _split(policy, policy(inputs), pack)
    own_logps = own_logps or [one.packed for one in found.completions]
    pairs = zip(own_logps, reference_logps, strict=True)
    differences = [_mean_difference(own, other.to(own)) for own, other in pairs]
    tolerance = found.tolerance(differences, ranks)
    for one, difference in zip(found.completions, differences, strict=True):
        if not difference <= tolerance:
            raise AuditError(
                f"audit: {one.place}: the reference differs from the model it was computed with by {difference:.2g} nats a "
                f"token (rounding explains {tolerance:.2g}). Nothing was trained. Remove the cached reference "
                "(reference.cache_dir) and start again."
            )
    return max(differences)


def _compare(
    policy: Policy, preferences: Mapping[int, TokenizedPreference], pack: Pack, device: torch.device
) -> Iterator[AuditedCompletion]:
    """Compare each completion of a pack with the plain forward pass, and yield the results. `preferences`: by their indices."""
    inputs = policy.inputs(pack, device)
    with torch.no_grad():
        packed = _split(policy, policy(inputs), pack)
    best = set(pack.best.tolist())
    sequences = [
        (index, number) for index in pack.preferences.tolist() for number in range(len(preferences[index].completions))
    ]
    for at, ((index, number), own) in enumerate(zip(sequences, packed, strict=True)):
        preference = preferences[index]
        ids = _ids(preference.prompt, device), _ids(preference.completions[number], device)
        scored = _ids(policy.head.values_in_pack(preference, number), device)
        plain = policy.plain_logps(*ids)[scored]
        yield AuditedCompletion(
            place=f"{preference.place} (completion {number})",
            packed=own,
            plain_difference=_mean_difference(own, plain),
            rounding=partial(_measure_rounding, policy, ids, scored, plain),
            is_best=at in best,
        )


def _split(policy: Policy, values: Tensor, pack: Pack) -> tuple[Tensor, ...]:
    """Split `values`, the output of the head for a pack, into one tensor per completion. Padding is removed."""
    counts = policy.head.num_values(pack).tolist()
    return values[: sum(counts)].split(counts)


def _check_last_columns(
    policy: Policy,
    packer: Packer,
    found: Audit,
    preferences: Mapping[int, TokenizedPreference],
    ranks: Ranks,
    *,
    model: str,
) -> None:
    """Raise AuditError if a preference's log-probabilities change when it is moved to the end of a row of full length.

    The audited preferences fill only the first columns of a row. Some models compute something from columns instead of position
    ids, and only beyond a certain column: the attention temperature of Llama 4 changes every 8,192 columns.
    """
    sample = np.concatenate([pack.preferences for pack in found.packs])
    index = int(sample[np.argmin(packer.sizes[sample])])
    if packer.sizes[index] > packer.length:  # it takes several rows
        return
    pack = _move_to_end(_row(packer, index, preferences[index], packer.length))
    inputs = policy.inputs(pack, ranks.device)
    with torch.no_grad():
        last = _split(policy, policy(inputs), pack)
    owners = np.concatenate([pack.preferences[pack.owner] for pack in found.packs])
    first = [one for one, owner in zip(found.completions, owners, strict=True) if owner == index]
    differences = [_mean_difference(one.packed, other) for one, other in zip(first, last, strict=True)]
    tolerance = found.tolerance(differences, ranks)
    for one, difference in zip(first, differences, strict=True):
        if not difference <= tolerance:
            raise AuditError(
                f"audit: {model}: {one.place}: its log-probabilities at the end of a row of {packer.length:,} tokens differ from "
                f"those at the beginning by {difference:.2g} nats a token (rounding explains {tolerance:.2g}), so losses "
                "would be wrong. Nothing was trained. Lower policy.packing.pack_length, or train this model with "
                "policy.packing.mode=none, and report it."
            )


def _move_to_end(pack: Pack) -> Pack:
    """Move the tokens of a one-row pack to its end, after the filler F: tokens 5 6 7 F F become F F 5 6 7."""
    by = pack.token_ids.shape[1] - pack.num_tokens
    rows = {name: np.roll(getattr(pack, name), by, axis=1) for name in ("token_ids", "position_ids", "tree", "branch")}
    return replace(pack, **rows, predicting=pack.predicting + by)


def _measure_rounding(policy: Policy, ids: tuple[Tensor, Tensor], scored: Tensor, plain: Tensor) -> float:
    """Return how much rounding changes the log-probabilities of a completion in the plain forward pass, as a mean per token.

    The completion is computed twice more, with different rounding. The larger change is returned.
    """
    others = policy.plain_logps(*ids, filler=NUM_FILLER_TOKENS), policy.plain_logps(*ids, perturbed=True)
    return max(_mean_difference(plain, one[scored]) for one in others)


def _sample(store: Preferences, longest: int) -> np.ndarray:
    """Return the indices of the first few preferences, and of the longest preference with at most `longest` tokens.

    The longest preference is included because it may exceed the model's sliding windows.
    """
    fitting = np.flatnonzero(store.longest <= longest)
    fitting = fitting if len(fitting) else np.array([int(np.argmin(store.longest))])
    last = fitting[np.argmax(store.longest[fitting])]
    return np.unique([*fitting[: NUM_PREFERENCES - 1].tolist(), int(last)])


def _cut(preference: TokenizedPreference, longest: int) -> TokenizedPreference:
    """Return the end of a prompt with the beginning of each completion: at most `longest` tokens together."""
    if preference.longest <= longest:
        return preference
    completions = tuple(one[: max(1, longest // 2)] for one in preference.completions)
    prompt = preference.prompt[-max(1, longest - max(map(len, completions))) :]
    return replace(preference, prompt=prompt, completions=completions, unscored=())


def _shortest_row(packer: Packer, index: int, preference: TokenizedPreference) -> Pack:
    copies = 1 if packer.arrangement == "shared" else len(preference.completions)
    size = copies * len(preference.prompt) + sum(map(len, preference.completions))
    length = next((length for length in packer.lengths if length >= size), packer.length)
    return _row(packer, index, preference, length)


def _row(packer: Packer, index: int, preference: TokenizedPreference, length: int) -> Pack:
    """Lay out one preference. `index`: in the set."""
    return lay_out([index], [preference], length=length, arrangement=packer.arrangement)


def _longest_that_fits(policy: Policy, device: torch.device) -> int:
    """Return the number of tokens whose eager forward pass certainly fits in free memory, but at most MAX_AUDIT_TOKENS."""
    config = policy.model.config.get_text_config()
    heads, size = max(values_of(config, "num_attention_heads"), default=1), next(policy.parameters()).element_size()
    # Per head and pair of positions: scores and masked scores in the model's dtype, their softmax in float32.
    per_square, per_token = heads * (2 * size + 4), policy.head.plain_bytes_per_token(config.vocab_size, size)
    available = FREE_MEMORY_FRACTION * _free_memory(device)
    # per_square * n^2 + per_token * n = available
    root = math.sqrt(per_token**2 + 4 * per_square * available)
    return min(MAX_AUDIT_TOKENS, int((root - per_token) / (2 * per_square)))


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    # MemAvailable, not MemFree: most memory that is not free caches files, and is released when it is needed.
    if MEMINFO.is_file() and (found := re.search(r"^MemAvailable: +(\d+) kB", MEMINFO.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_plain(one: AuditedCompletion, tolerance: float, model: str, *, packed: bool) -> None:
    if not torch.isfinite(one.packed).all():
        raise AuditError(
            f"audit: {model}: {one.place}: its log-probabilities are not finite, so no loss can be computed. Nothing was "
            "trained. Try policy.precision=float32, in case the model overflows; or download it again, in case it is damaged."
        )
    if not one.plain_difference <= tolerance:
        rows, advice = (
            ("packed", "Train this model with policy.packing.mode=none, and report it.")
            if packed
            else ("padded", "tandem cannot train this model correctly: please report it.")
        )
        raise AuditError(
            f"audit: {model}: {one.place}: {rows} log-probabilities differ from the model's plain forward by "
            f"{one.plain_difference:.2g} nats a token (rounding explains {tolerance:.2g}), so losses would be wrong. "
            f"Nothing was trained. {advice}"
        )


def _mean_difference(a: Tensor, b: Tensor) -> float:
    """Return the mean absolute difference. If any number is not finite, the result is never <= a tolerance."""
    return float((a.double() - b.double()).abs().mean())


def _check_calls(policy: Policy, pack: Pack, device: torch.device, model: str) -> None:
    """Raise AuditError unless every attention layer uses the pack's mask, and every recurrent layer its segments.

    The model runs uncompiled, so that the calls of `attend` can be counted.
    """
    if not policy.packed:
        return
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        with record_calls() as calls, record_recurrent_calls() as recurrent_calls:
            policy(policy.inputs(pack, device))
    expected = policy.architecture.num_attention_layers
    if len(calls) < expected:  # in some models a layer calls twice
        raise AuditError(
            f"audit: {model}: only {len(calls)} of {expected} attention layers use the pack's mask, so sequences would see each "
            "other. Nothing was trained. Train this model with policy.packing.mode=none."
        )
    if policy.recurrent is None:
        return
    found, expected = policy.recurrent.count_layers(recurrent_calls), policy.recurrent.num_layers
    if found < expected:
        raise AuditError(
            f"audit: {model}: only {found} of {expected} recurrent layers separate the sequences of a pack, so their states "
            "would leak. Nothing was trained. Train this model with policy.packing.mode=none."
        )


def _ids(ids: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(device)


def start_loss_verdict(nats: float, vocabulary: int) -> str:
    """Return a text with the model's loss before training, and a remark if the loss is implausibly high.

    `nats`: the mean loss per token on chosen completions.
    """
    guessing = math.log(vocabulary)
    if nats > 0.95 * guessing:
        return f"{nats:.2f} nats a token, as much as guessing ({guessing:.2f}): these weights are untrained"
    if nats > 4.0:
        return f"{nats:.2f} nats a token: implausibly high; is this the template the model was trained with?"
    return f"{nats:.2f} nats a token"

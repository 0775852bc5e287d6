"""The reference: log-probabilities of every scored token under the frozen start model, cached or live."""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.data.store.selection import Preferences
from tandem.errors import DefectError, NonFiniteError
from tandem.failpoints import fail_point
from tandem.model.attention.pack_attention import PackMask
from tandem.model.distributed.process_group import Ranks
from tandem.model.policy import PackInputs, Policy
from tandem.model.transfer import PendingHostCopy, to_device, to_host
from tandem.packing.layout import Pack
from tandem.packing.packer import Packer
from tandem.storage.cache import fingerprint, published, read_manifest, write_manifest
from tandem.storage.ownership import free_path

# Raised whenever the same weights and tokens would give other numbers.
LOGPS_VERSION = 3
PREFERENCES_AT_ONCE = 256
VALUES_AT_ONCE = 1 << 20  # looked at together


class Reference(Protocol):
    """Answers a pack with the reference's token log-probabilities, padded like the policy's."""

    def token_logps(self, pack: Pack, inputs: PackInputs) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LiveReference:
    """A frozen copy of the start model beside the policy."""

    policy: Policy

    @torch.no_grad()
    def token_logps(self, pack: Pack, inputs: PackInputs) -> Tensor:
        # Inputs are the policy's. A reference that is another model may have other windows.
        mask, own = inputs.mask, self.policy
        if isinstance(mask, PackMask) and not (own.windows <= mask.masks.keys() and own.block == mask.block):
            inputs = own.inputs(pack, inputs.token_ids.device)
        return own(inputs)


@dataclass(frozen=True, slots=True)
class NoReference:
    """For losses that compare with nothing: every log-probability is 0."""

    def token_logps(self, pack: Pack, inputs: PackInputs) -> Tensor:
        return torch.zeros(len(inputs.target_ids), device=inputs.target_ids.device)


@dataclass(frozen=True, slots=True)
class CachedReference:
    """Token log-probabilities of a whole set, on disk in the order of its preferences."""

    values: NDArray[np.float32]
    ends: NDArray[np.int64]  # of each preference's tokens

    def token_logps(self, pack: Pack, inputs: PackInputs) -> Tensor:
        parts = [self.of_preference(index) for index in pack.preferences.tolist()]
        flat = np.zeros(len(inputs.target_ids), np.float32)
        np.concatenate([np.zeros(0, np.float32), *parts], out=flat[: inputs.num_scored])
        return to_device(flat, inputs.target_ids.device)

    def of_preference(self, index: int) -> NDArray[np.float32]:
        start = self.ends[index - 1] if index else 0
        return self.values[start : self.ends[index]]


def reference_name(weights: str, tokens: str, **computed: str) -> str:
    """The folder of a reference in the cache, after all that decides its numbers: weights, tokens, and how it is computed.

    Never the length of rows, which differs from card to card: it changes nothing but rounding.
    """
    return f"{tokens_prefix(tokens)}{fingerprint(LOGPS_VERSION, weights, tokens, computed)[:16]}"


def is_reference_name(name: str) -> bool:
    """Whether it is one as above, and so a folder directly in the cache: a run's list of them may be anyone's."""
    return re.fullmatch("[0-9a-f]{16}-[0-9a-f]{16}", name) is not None


def tokens_prefix(tokens: str) -> str:
    """With which the name of every reference of a set begins."""
    return f"{tokens[:16]}-"


def cached_reference(
    policy: Callable[[], Policy],
    packer: Packer,
    ranks: Ranks,
    *,
    place: Path,
    progress: Callable[[int], None],
    portions: Sequence[NDArray[np.int64]] | None = None,
) -> CachedReference:
    """The reference's numbers for a set: found in `place`, which is named after all that decides them, or computed now.

    `portions` of the set, in its order, are packed by themselves. A policy that starts as the reference, packed alike, then
    agrees with it to the bit, where the numbers were not found but computed; else up to rounding.
    `policy` is called where they must be computed. `progress` is called after every pack, with the preferences that are done
    since (0 but at the end of a portion), and may end it by raising.
    """
    store = packer.store
    # One rank of each machine keeps what all of them compute.
    num_values = int(store.num_scored_tokens.sum())
    missing = ranks.agreed(lambda: not is_sound(place, num_values), by=ranks.is_first_here) or False
    if ranks.highest(missing):
        with ExitStack() as stack:
            model = policy()
            aside = ranks.agreed(lambda: stack.enter_context(published(place, "reference")), by=missing)
            compute_reference(model, packer, ranks, aside / "logps.f32" if aside else None, progress, portions)

            def complete() -> None:
                assert aside is not None
                write_manifest(aside, version=LOGPS_VERSION, tokens=store.tokens_fingerprint)
                stack.close()

            ranks.agreed(complete, by=missing)
    values = np.memmap(place / "logps.f32", np.float32, mode="r")
    return CachedReference(values, np.cumsum(store.num_scored_tokens))


def is_sound(place: Path, num_values: int) -> bool:
    """A cache that is there but damaged, or has another number of values, is moved aside, to be computed again."""
    if not place.is_dir():
        return False
    try:
        read_manifest(place)
        _check_values(place / "logps.f32", num_values)
        return True
    except ValueError:
        place.rename(free_path(place.parent, f"{place.name}.damaged"))
        return False


def _check_values(file: Path, num_values: int) -> None:
    """Refuse values that do not belong to the tokens of a set, or that nothing can be computed from."""
    if not file.is_file() or file.stat().st_size != 4 * num_values:
        raise ValueError(f"{file} does not have {num_values} values")
    values = np.memmap(file, np.float32, mode="r")
    for start in range(0, num_values, VALUES_AT_ONCE):
        if not np.isfinite(values[start : start + VALUES_AT_ONCE]).all():
            raise ValueError(f"{file} has values that are not finite")


@torch.no_grad()
def compute_reference(
    policy: Policy,
    packer: Packer,
    ranks: Ranks,
    path: Path | None,
    progress: Callable[[int], None],
    portions: Sequence[NDArray[np.int64]] | None = None,
) -> None:
    """Every worker computes its share of the set, and gets all of it; one that has a path writes it there."""
    store = packer.store
    ends = np.cumsum(store.num_scored_tokens)
    if portions is None:
        at_once = PREFERENCES_AT_ONCE * ranks.count
        portions = [np.arange(start, min(start + at_once, len(store))) for start in range(0, len(store), at_once)]
    # Not by a memory map: on a full disk that ends the process without a word.
    with nullcontext() if path is None else path.open("wb") as out, policy.computing():

        def keep(asked: _Asked) -> None:
            first, last = asked.indices[0], asked.indices[-1]
            before = int(ends[first - 1]) if first else 0
            values = np.zeros(int(ends[last]) - before, np.float32)
            computed = [one for of_rank in ranks.gather(asked.read(store)) for one in of_rank]
            if sorted(index for index, _ in computed) != asked.indices.tolist():
                raise DefectError(
                    f"the reference of {len(asked.indices)} preferences was to be computed, and that of {len(computed)} was. "
                    "This is a defect of tandem; nothing was cached or trained. Please report it with the run's config.yaml."
                )
            for index, part in computed:
                values[ends[index] - before - len(part) : ends[index] - before] = part
                _refuse_not_finite(part, store, index)
            if out is not None:
                out.write(values.tobytes())
            fail_point("reference.chunk")
            progress(len(asked.indices))

        # Some are read only when the next are asked for, so that the device never waits for the host.
        unread: _Asked | None = None
        for indices in portions:
            asked = _ask(policy, packer, ranks.device, indices, lambda: progress(0))
            if unread is not None:
                keep(unread)
            unread = asked
        if unread is not None:
            keep(unread)


def _refuse_not_finite(logps: NDArray[np.float32], store: Preferences, index: int) -> None:
    """Cached, such numbers would end every later run. All ranks have the same, and meet this alike."""
    if not np.isfinite(logps).all():
        raise NonFiniteError(
            f"{store.place(index)}: the reference gives this preference log-probabilities that are not finite, so no loss can "
            "be computed from it. Nothing was cached or trained. Look at this row; if others fail too, the reference model "
            "itself overflows: try policy.precision=float32."
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """Preferences of all workers, and this one's packs of them, whose numbers are on their way to the host."""

    indices: NDArray[np.int64]
    packs: list[Pack]
    logps: PendingHostCopy  # of every scored token, pack by pack

    def read(self, store: Preferences) -> list[tuple[int, NDArray[np.float32]]]:
        """Each preference of this worker with its numbers."""
        own = np.concatenate([pack.preferences for pack in self.packs])
        parts = np.split(self.logps.read(), np.cumsum(store.num_scored_tokens[own]))[:-1]
        return list(zip(own.tolist(), parts, strict=True))


def _ask(
    policy: Policy, packer: Packer, device: torch.device, indices: NDArray[np.int64], after_each: Callable[[], None]
) -> _Asked:
    packs: list[Pack] = []
    values: list[Tensor] = []
    for pack in packer.micro_batches(indices):
        inputs = policy.inputs(pack, device)
        packs.append(pack)
        values.append(policy(inputs)[: inputs.num_scored])
        after_each()
    return _Asked(indices, packs, to_host(torch.cat(values)))

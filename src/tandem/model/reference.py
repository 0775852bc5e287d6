"""The reference: log-probabilities of every scored token under a frozen model, read from a cache or computed live."""

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

# Increased whenever the same weights and tokens would give different numbers.
LOGPS_VERSION = 3
PREFERENCES_PER_PORTION = 256  # per data-parallel rank
VALUES_PER_CHECK = 1 << 20


class Reference(Protocol):
    """Provides the reference's log-probability of each scored token of a pack, padded like the policy's log-probabilities."""

    def token_logps(self, pack: Pack, inputs: PackInputs) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LiveReference:
    """Computes log-probabilities with a frozen model that is kept in memory with the policy."""

    policy: Policy

    @torch.no_grad()
    def token_logps(self, pack: Pack, inputs: PackInputs) -> Tensor:
        # The inputs were made for the policy. A reference that is a different model may have other windows.
        mask, own = inputs.mask, self.policy
        if isinstance(mask, PackMask) and not (own.windows <= mask.masks.keys() and own.block == mask.block):
            inputs = own.inputs(pack, inputs.token_ids.device)
        return own(inputs)


@dataclass(frozen=True, slots=True)
class NoReference:
    """Returns log-probabilities of 0, for losses that do not use a reference."""

    def token_logps(self, pack: Pack, inputs: PackInputs) -> Tensor:
        return torch.zeros(inputs.num_values, device=inputs.target_ids.device)


@dataclass(frozen=True, slots=True)
class CachedReference:
    """The token log-probabilities of a set, read from disk. They are stored in the order of the set's preferences."""

    values: NDArray[np.float32]
    ends: NDArray[np.int64]  # where each preference's values end

    def token_logps(self, pack: Pack, inputs: PackInputs) -> Tensor:
        parts = [self.of_preference(index) for index in pack.preferences.tolist()]
        flat = np.zeros(inputs.num_values, np.float32)
        np.concatenate([np.zeros(0, np.float32), *parts], out=flat[: inputs.num_scored])
        return to_device(flat, inputs.target_ids.device)

    def of_preference(self, index: int) -> NDArray[np.float32]:
        start = self.ends[index - 1] if index else 0
        return self.values[start : self.ends[index]]


def reference_name(weights: str, tokens: str, **computed: str) -> str:
    """Return the name of a reference's folder in the cache: a hash of the model, the set's tokens and some settings.

    `weights`: fingerprint of the model. `tokens`: fingerprint of the set's tokens. `computed`: settings that change the result.
    Do not include the row length: it differs between GPUs and changes only rounding.
    """
    return f"{tokens_prefix(tokens)}{fingerprint(LOGPS_VERSION, weights, tokens, computed)[:16]}"


def is_reference_name(name: str) -> bool:
    """Whether `name` has the form of a `reference_name`. Such a name cannot lead outside the cache.

    Needed because a run's list of references may come from an untrusted file.
    """
    return re.fullmatch("[0-9a-f]{16}-[0-9a-f]{16}", name) is not None


def tokens_prefix(tokens: str) -> str:
    """Return the common start of the `reference_name` of all references of a set. `tokens`: fingerprint of the set's tokens."""
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
    """Return the reference's log-probabilities for a set. They are read from the folder `place`, or computed and stored there.

    `place` must be named by `reference_name`. `policy` loads the model, and is called only if log-probabilities must be computed.

    `portions`: parts of the set (indices, in order) that are packed separately. Newly computed log-probabilities are bit for bit
    equal to those of a policy with the same weights and the same packs. Log-probabilities from the cache may differ by rounding.

    `progress` is called after every pack with the number of preferences completed since the last call. The number is 0 except at
    the end of a portion. `progress` may raise an error to stop the computation.
    """
    store = packer.store
    # All ranks compute; one rank of each machine stores the result.
    num_values = int(store.num_scored_tokens.sum())
    missing = ranks.run_or_stop_all(lambda: not is_intact(place, num_values), on=ranks.is_first_here) or False
    if ranks.highest(missing):
        with ExitStack() as stack:
            model = policy()
            aside = ranks.run_or_stop_all(lambda: stack.enter_context(published(place, "reference")), on=missing)
            path = aside / "logps.f32" if aside else None
            compute_reference(model, packer, ranks, path=path, progress=progress, portions=portions)

            def complete() -> None:
                assert aside is not None
                write_manifest(aside, version=LOGPS_VERSION, tokens=store.tokens_fingerprint)
                stack.close()

            ranks.run_or_stop_all(complete, on=missing)
    values = np.memmap(place / "logps.f32", np.float32, mode="r")
    return CachedReference(values, np.cumsum(store.num_scored_tokens))


def is_intact(place: Path, num_values: int) -> bool:
    """Whether the folder `place` holds an intact cached reference of `num_values` values.

    A folder that is damaged or has another number of values is renamed to NAME.damaged.
    """
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
    """Raise ValueError unless a file holds `num_values` finite values."""
    if not file.is_file() or file.stat().st_size != 4 * num_values:
        raise ValueError(f"{file} does not have {num_values} values")
    values = np.memmap(file, np.float32, mode="r")
    for start in range(0, num_values, VALUES_PER_CHECK):
        if not np.isfinite(values[start : start + VALUES_PER_CHECK]).all():
            raise ValueError(f"{file} has values that are not finite")


@torch.no_grad()
def compute_reference(
    policy: Policy,
    packer: Packer,
    ranks: Ranks,
    *,
    path: Path | None,
    progress: Callable[[int], None],
    portions: Sequence[NDArray[np.int64]] | None = None,
) -> None:
    """Compute the reference's log-probabilities for a set. Each rank computes a part, and receives the parts of all ranks.

    `path`: the file to write all log-probabilities to; None: this rank writes nothing.
    """
    store = packer.store
    ends = np.cumsum(store.num_scored_tokens)
    if portions is None:
        size = PREFERENCES_PER_PORTION * ranks.data_parallel
        portions = [np.arange(start, min(start + size, len(store))) for start in range(0, len(store), size)]
    # Not through a memory map: on a full disk that would kill the process without a message.
    with nullcontext() if path is None else path.open("wb") as out, policy.computing():

        def store_values(pending: _PendingPortion) -> None:
            first, last = pending.indices[0], pending.indices[-1]
            before = int(ends[first - 1]) if first else 0
            values = np.zeros(int(ends[last]) - before, np.float32)
            computed = [one for of_rank in ranks.gather_parts(pending.read(store)) for one in of_rank]
            if sorted(index for index, _ in computed) != pending.indices.tolist():
                raise DefectError(
                    f"the reference was computed for {len(computed)} preferences instead of {len(pending.indices)}. "
                    "This is a bug in tandem; nothing was cached or trained. Please report it with the run's config.yaml."
                )
            for index, part in computed:
                values[ends[index] - before - len(part) : ends[index] - before] = part
                _refuse_not_finite(part, store, index)
            if out is not None:
                out.write(values.tobytes())
            fail_point("reference.chunk")
            progress(len(pending.indices))

        # A portion is read only after the next one was started, so that the device never waits for the host.
        unread: _PendingPortion | None = None
        for indices in portions:
            pending = _start_portion(policy, packer, ranks.device, indices, after_each=lambda: progress(0))
            if unread is not None:
                store_values(unread)
            unread = pending
        if unread is not None:
            store_values(unread)


def _refuse_not_finite(logps: NDArray[np.float32], store: Preferences, index: int) -> None:
    """Raise NonFiniteError if log-probabilities are not finite. If they were cached, every later run would fail.

    All ranks have the same values, so all ranks raise the error.
    """
    if not np.isfinite(logps).all():
        raise NonFiniteError(
            f"{store.place(index)}: the reference's log-probabilities of this preference are not finite, so no loss can be "
            "computed. Nothing was cached or trained. Check this row; if other rows fail too, the reference model itself "
            "overflows: try policy.precision=float32."
        )


@dataclass(frozen=True, slots=True, eq=False)
class _PendingPortion:
    """A part of the set, and this rank's packs of that part. The packs' log-probabilities are being copied to the host."""

    indices: NDArray[np.int64]  # preferences of all ranks
    packs: list[Pack]  # of this rank
    logps: PendingHostCopy  # of every scored token, pack by pack

    def read(self, store: Preferences) -> list[tuple[int, NDArray[np.float32]]]:
        """Return (index, log-probabilities) for each preference that this rank computed."""
        own = np.concatenate([pack.preferences for pack in self.packs])
        parts = np.split(self.logps.read(), np.cumsum(store.num_scored_tokens[own]))[:-1]
        return list(zip(own.tolist(), parts, strict=True))


def _start_portion(
    policy: Policy, packer: Packer, device: torch.device, indices: NDArray[np.int64], *, after_each: Callable[[], None]
) -> _PendingPortion:
    """Start to compute this rank's packs of a part of the set, without waiting for the device.

    `after_each` is called after every pack.
    """
    packs: list[Pack] = []
    values: list[Tensor] = []
    for pack in packer.micro_batches(indices):
        inputs = policy.inputs(pack, device)
        packs.append(pack)
        values.append(policy(inputs)[: int(policy.head.num_values(pack).sum())])
        after_each()
    return _PendingPortion(indices, packs, to_host(torch.cat(values)))

"""The reference: log-probabilities of every scored token under the frozen start model, cached or live."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.cache import fingerprint, published, read_manifest, write_manifest
from tandem.data.selection import Preferences
from tandem.model.policy import PackInputs, Policy
from tandem.packing.layout import Pack
from tandem.packing.packer import Packer

# Raised whenever the same weights and tokens would give other numbers.
LOGPS_VERSION = 1
PREFERENCES_AT_ONCE = 256


class Reference(Protocol):
    """Answers a pack with the reference's token log-probabilities, padded like the policy's."""

    def token_logps(self, pack: Pack, inputs: PackInputs) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LiveReference:
    """A frozen copy of the start model beside the policy."""

    policy: Policy

    @torch.no_grad()
    def token_logps(self, pack: Pack, inputs: PackInputs) -> Tensor:
        return self.policy(inputs)


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
        tensor, device = torch.from_numpy(flat), inputs.target_ids.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    def of_preference(self, index: int) -> NDArray[np.float32]:
        start = self.ends[index - 1] if index else 0
        return self.values[start : self.ends[index]]


def cached_reference(
    policy: Callable[[], Policy],
    packer: Packer,
    device: torch.device,
    *,
    folder: Path,
    weights: str,
    precision: str,
    progress: Callable[[int], None],
) -> CachedReference:
    """The reference's numbers for a set: found under a name made of weights, tokens and precision, or computed now.

    `policy` is called where they must be computed. `progress` is told how many preferences were done, each time some are.
    """
    store = packer.store
    place = folder / fingerprint(LOGPS_VERSION, weights, store.fingerprint, precision)
    if not _is_sound(place):
        with published(place) as aside:
            _compute(policy(), packer, device, aside / "logps.f32", progress)
            write_manifest(aside, version=LOGPS_VERSION, tokens=store.fingerprint, precision=precision)
    values = np.memmap(place / "logps.f32", np.float32, mode="r")
    return CachedReference(values, np.cumsum(store.num_scored_tokens))


def _is_sound(place: Path) -> bool:
    """A cache that is there but damaged is moved aside, to be computed anew: it holds nothing that cannot be."""
    if not place.is_dir():
        return False
    try:
        read_manifest(place)
        return True
    except ValueError:
        aside = place.with_name(place.name + ".damaged")
        if not aside.exists():
            place.rename(aside)
        return False


@torch.no_grad()
def _compute(policy: Policy, packer: Packer, device: torch.device, path: Path, progress: Callable[[int], None]) -> None:
    store = packer.store
    ends = np.cumsum(store.num_scored_tokens)
    out = np.memmap(path, np.float32, mode="w+", shape=(int(ends[-1]),))
    for start in range(0, len(store), PREFERENCES_AT_ONCE):
        indices = np.arange(start, min(start + PREFERENCES_AT_ONCE, len(store)))
        for pack in packer.micro_batches(indices):
            inputs = policy.inputs(pack, device)
            values = policy(inputs)[: inputs.num_scored].cpu().numpy()
            for index, part in zip(pack.preferences.tolist(), _split(values, store, pack), strict=True):
                out[ends[index] - len(part) : ends[index]] = part
        progress(len(indices))
    out.flush()


def _split(values: NDArray[np.float32], store: Preferences, pack: Pack) -> list[NDArray[np.float32]]:
    """The scored tokens of a pack, preference by preference."""
    return np.split(values, np.cumsum(store.num_scored_tokens[pack.preferences])[:-1])

"""Attention within runs of consecutive tokens, for packs that repeat prompts. A run is a prompt followed by one completion."""

import inspect
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.model.transfer import to_device
from tandem.packing.layout import FILLER, IntArray, Pack

# Filler is cut into runs of at most this many tokens, so that it does not become the longest run.
FILLER_RUN = 128
# Bounds are padded with empty runs to a multiple of this, so that there are few different shapes.
BOUNDS_MULTIPLE = 64


class Runs:
    """Where each run begins and ends in the concatenated rows of a micro-batch. Runs of 3 and 2 tokens have bounds 0, 3, 5."""

    def __init__(self, bounds: Tensor, longest: int, window: int | None):
        self.bounds = bounds  # [runs + 1] int32, padded
        self.longest = longest  # rounded up to a power of two
        self.window = window


def runs_of(pack: Pack, window: int | None, device: torch.device) -> Runs:
    """Find the runs of a pack, and copy their bounds to the device."""
    bounds = bounds_of(pack.tree)
    longest = max(FILLER_RUN, 1 << int(np.diff(bounds).max() - 1).bit_length())
    padding = -len(bounds) % BOUNDS_MULTIPLE
    padded = np.pad(bounds, (0, padding), mode="edge").astype(np.int32)
    return Runs(to_device(padded, device), longest, window)


def bounds_of(tree: IntArray) -> IntArray:
    """Return the bounds of the runs in concatenated rows. A run is a part of one row that has the same number in `tree`.

    [[0, 0, 1], [1, 1, -1]] is returned as 0, 2, 3, 5, 6. Filler (-1) is cut into runs of at most FILLER_RUN tokens.
    """
    flat, length = tree.ravel(), tree.shape[1]
    starts = np.flatnonzero((flat[1:] != flat[:-1]) | (np.arange(1, flat.size) % length == 0)) + 1
    bounds = np.concatenate([[0], starts, [flat.size]])
    filler = [np.arange(start, end, FILLER_RUN) for start, end in pairwise(bounds) if flat[start] == FILLER]
    return np.unique(np.concatenate([bounds, *filler]))


def attend_runs(query: Tensor, key: Tensor, value: Tensor, runs: Runs, *, scaling: float | None) -> Tensor:
    """Compute attention within runs. The arguments and the result are [rows, heads, length, dim].

    A token attends to itself and to the earlier tokens of its run that are within the window.
    """
    rows, _, length, _ = query.shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [tokens, heads, dim]
    out = (_flash if query.is_cuda else _run_by_run)(q, k, v, runs, scaling)
    return out.unflatten(0, (rows, length)).transpose(1, 2)


def _flash(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if _supports_gqa():
            grouped = {"enable_gqa": True}
        else:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # The window of varlen_attn does not count the token itself.
    before = -1 if runs.window is None else runs.window - 1
    bounds, longest = runs.bounds, runs.longest
    out = varlen_attn(
        query, key, value, bounds, bounds, longest, longest, scale=scaling, window_size=(before, 0), **grouped
    )
    assert isinstance(out, Tensor)  # not a tuple: no log-sum-exp was requested
    return out


@cache
def _supports_gqa() -> bool:
    """Whether torch's varlen_attn supports grouped queries. It does since torch 2.12."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _run_by_run(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None) -> Tensor:
    """Compute the same result as `_flash`, but on any device: one run at a time, with SDPA."""
    sizes = runs.bounds.diff()
    sizes = sizes[sizes > 0].tolist()
    grouped = query.shape[1] != key.shape[1]
    outs = []
    for q, k, v in zip(*(tensor.split(sizes) for tensor in (query, key, value)), strict=True):
        mask = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
        if runs.window is not None:
            mask = mask.triu(1 - runs.window)
        heads_first = [part.transpose(0, 1)[None] for part in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads_first, mask, scale=scaling, enable_gqa=grouped)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)

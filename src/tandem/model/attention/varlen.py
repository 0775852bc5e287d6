"""Attention over runs of tokens laid end to end, each run by itself: packs whose prompts are repeated, not shared."""

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

# Filler is cut into runs of this many tokens at most, so that the longest run is one that counts.
FILLER_RUN = 128
# Few shapes occur: bounds are padded with empty runs to a multiple of this.
BOUNDS_MULTIPLE = 64


class Runs:
    """Where the runs of a micro-batch begin and end, its rows taken as one: runs of 3 and 2 tokens are 0, 3, 5."""

    def __init__(self, bounds: Tensor, longest: int, window: int | None):
        self.bounds = bounds  # [runs + 1, padded] int32
        self.longest = longest  # rounded up to a power of two
        self.window = window


def runs_of(pack: Pack, window: int | None, device: torch.device) -> Runs:
    bounds = bounds_of(pack.tree)
    longest = max(FILLER_RUN, 1 << int(np.diff(bounds).max() - 1).bit_length())
    padding = -len(bounds) % BOUNDS_MULTIPLE
    padded = np.pad(bounds, (0, padding), mode="edge").astype(np.int32)
    return Runs(to_device(padded, device), longest, window)


def bounds_of(tree: IntArray) -> IntArray:
    """Every tree is a run. tree [[0, 0, 1], [1, 1, -1]]: 0, 2, 3, 5, 6; a run ends with its row."""
    flat, length = tree.ravel(), tree.shape[1]
    starts = np.flatnonzero((flat[1:] != flat[:-1]) | (np.arange(1, flat.size) % length == 0)) + 1
    bounds = np.concatenate([[0], starts, [flat.size]])
    filler = [np.arange(start, end, FILLER_RUN) for start, end in pairwise(bounds) if flat[start] == FILLER]
    return np.unique(np.concatenate([bounds, *filler]))


def attend_runs(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None) -> Tensor:
    """[rows, heads, length, dim] in and out; a token sees those before it in its own run, within the window if there is one."""
    rows, _, length, _ = query.shape
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [tokens, heads, dim]
    out = (_flash if query.is_cuda else _one_by_one)(q, k, v, runs, scaling)
    return out.unflatten(0, (rows, length)).transpose(1, 2)


def _flash(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if _knows_groups():
            grouped = {"enable_gqa": True}
        else:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    # What it calls a window does not count the token itself.
    before = -1 if runs.window is None else runs.window - 1
    bounds, longest = runs.bounds, runs.longest
    out = varlen_attn(
        query, key, value, bounds, bounds, longest, longest, scale=scaling, window_size=(before, 0), **grouped
    )
    assert isinstance(out, Tensor)  # no log-sum-exp was asked for
    return out


@cache
def _knows_groups() -> bool:
    """Since torch 2.12."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None) -> Tensor:
    """The same in plain steps, where there are no flash kernels."""
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

"""Attention inside a pack: the masks, and the function that transformers calls in every attention layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from transformers import AttentionInterface

from tandem.errors import TandemError
from tandem.model.attention.varlen import attend_runs, bounds_of, runs_of
from tandem.model.distributed.context import Context, to_columns, to_heads
from tandem.model.transfer import to_device
from tandem.packing.blocks import block_lists, seen_until
from tandem.packing.layout import Pack
from tandem.packing.packer import BLOCK

IMPLEMENTATION = "tandem_pack"
# sdpa: rows with a dense mask; trees: each tree of a row separately.
AttentionKind = Literal["flex", "varlen", "sdpa", "trees"]

# Smaller blocks contain fewer masked positions. These kernel options were the fastest of those tried on an H200
# (benchmarks/LAB_NOTES.md). Torch's default tiles for a backward do not divide a small block, and torch checks them against the
# block size that the mask declares: so the mask declares the usual size (see block_mask).
SMALL_BLOCK = 64
TILE_SIZES = ("fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
SMALL_BLOCK_OPTIONS = {
    "SPARSE_Q_BLOCK_SIZE": SMALL_BLOCK,
    "SPARSE_KV_BLOCK_SIZE": SMALL_BLOCK,
    **dict.fromkeys(TILE_SIZES, SMALL_BLOCK),
    "fwd_num_warps": 4,
    "fwd_num_stages": 3,
    "bwd_num_warps": 4,
    "bwd_num_stages": 2,
}
MEASURED_HEAD_DIMS = {64, 128}
HOPPER = (9, 0)
FIRST_UNTESTED_TORCH = "2.14.dev0"  # from this version on, it is not known whether the options have an effect

# Arguments that layers pass to attention but that do not change it.
IGNORED_ARGUMENTS = {
    "position_ids",
    "use_cache",
    "cache_position",
    "output_attentions",
    "output_router_logits",
    "is_causal",
}


class PackMask:
    """The attention masks of a pack: a dict with one mask for every sliding window of the model's layers (None: no window).

    Passed to the model as the keyword argument `pack`. transformers passes it on to `attend` in every layer.
    """

    def __init__(self, masks: dict[int | None, Any], kind: AttentionKind, block: int, context: Context | None = None):
        self.masks = masks
        self.context = context  # the ranks that compute the same rows; None: only this one
        self.kind = kind
        self.block = block  # block size of FlexAttention
        self.segments: Any = None  # of the pack, for recurrent layers (recurrent/layers.py)


def make_mask(
    pack: Pack,
    windows: set[int | None],
    device: torch.device,
    kind: AttentionKind,
    block: int = BLOCK,
    context: Context | None = None,
) -> PackMask:
    """Return the masks of a pack: one for every sliding window in `windows`."""
    makers: dict[AttentionKind, Callable[[Pack, int | None, torch.device], Any]]
    makers = {"flex": partial(block_mask, block=block), "varlen": runs_of, "sdpa": _dense_mask, "trees": _tree_masks}
    make = makers[kind]
    longest = int(pack.position_ids.max()) + 1
    masks: dict[int | None, Any] = {}
    for window in sorted(windows, key=lambda w: -1 if w is None else w):
        # A window longer than the longest sequence has no effect: layers with it share the mask without a window.
        masks[window] = masks[None] if window and window >= longest else make(pack, window, device)
    return PackMask(masks, kind, block, context)


def block_size(model: nn.Module, device: torch.device, *, bfloat16: bool) -> int:
    """Return the block size for FlexAttention: SMALL_BLOCK where it was measured to be faster, otherwise BLOCK.

    `bfloat16`: whether the model computes in bfloat16.
    """
    dims = {module.head_dim for module in model.modules() if hasattr(module, "head_dim")}
    if not bfloat16 or device.type != "cuda" or torch.__version__ >= FIRST_UNTESTED_TORCH:
        return BLOCK
    measured = dims and dims <= MEASURED_HEAD_DIMS and torch.cuda.get_device_capability(device) == HOPPER
    return SMALL_BLOCK if measured else BLOCK


def may_attend(until: Tensor, position: Tensor, q: Any, k: Any, *, window: int | None) -> Tensor:
    """Return whether the query in column q attends to the key in column k: k <= q < until[k] (see packing/blocks.py).

    With a `window`, the position id of the query minus that of the key must also be less than `window`. The distance in columns
    does not matter: in a row, a completion may be far from its prompt.
    """
    seen = (k <= q) & (q < until[k])
    return seen if window is None else seen & (position[q] - position[k] < window)


def _dense_mask(pack: Pack, window: int | None, device: torch.device) -> Tensor:
    """Return a dense mask for each row, [rows, 1, length, length] bool: True where a query attends to a key."""
    columns = torch.arange(pack.token_ids.shape[1], device=device)
    q, k = columns[:, None], columns[None, :]
    arrays = seen_until(pack.tree, pack.branch), pack.position_ids
    rows = zip(*(to_device(array, device) for array in arrays), strict=True)
    return torch.stack([may_attend(until, position, q, k, window=window) for until, position in rows])[:, None]


def _tree_masks(pack: Pack, window: int | None, device: torch.device) -> list[Tensor]:
    """Return a mask, [size, size] bool, for each tree of a pack. A tree is a prompt with the completions that share it."""
    rows = np.arange(pack.tree.shape[0])[:, None] * pack.tree.shape[1]
    until = to_device((seen_until(pack.tree, pack.branch) + rows).ravel(), device)
    position = to_device(pack.position_ids.ravel(), device)
    trees = (torch.arange(start, end, device=device) for start, end in pairwise(bounds_of(pack.tree)))
    return [may_attend(until, position, tree[:, None], tree[None], window=window) for tree in trees]


def block_mask(pack: Pack, window: int | None, device: torch.device, block: int = BLOCK) -> BlockMask:
    """Return the block-sparse mask for FlexAttention."""
    lists = block_lists(pack.tree, pack.branch, pack.position_ids, block=block, window=window)

    def on_device(array: Any) -> Tensor:
        return to_device(array, device)[:, None]

    until = to_device(seen_until(pack.tree, pack.branch), device)
    position = to_device(pack.position_ids.astype("int32"), device)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return may_attend(until[b], position[b], q, k, window=window)

    length, declared = pack.token_ids.shape[1], max(block, BLOCK)
    return BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=on_device(lists.kv_partial_counts),
        kv_indices=on_device(lists.kv_partial),
        full_kv_num_blocks=on_device(lists.kv_full_counts),
        full_kv_indices=on_device(lists.kv_full),
        q_num_blocks=on_device(lists.q_partial_counts),
        q_indices=on_device(lists.q_partial),
        full_q_num_blocks=on_device(lists.q_full_counts),
        full_q_indices=on_device(lists.q_full),
        BLOCK_SIZE=(declared, declared),
        mask_mod=rule,
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    pack: PackMask | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,  # ignored: models are in evaluation mode, but some in transformers pass it even then
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention in a pack. The arguments are [rows, heads, length, dim]; the result is [rows, length, heads, dim]."""
    pack = _checked(pack, attention_mask, sliding_window, others)
    if _calls is not None:
        _calls.append(sliding_window)
        # Nothing is computed: uncompiled, FlexAttention would fill the memory with the scores of full rows.
        return query.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[-1]), None
    mask, context = pack.masks[sliding_window], pack.context
    if context is not None:
        query, key, value = to_heads(query, key, value, context)
        s_aux = None if s_aux is None else context.own_heads(s_aux)
    if pack.kind == "flex":
        options = SMALL_BLOCK_OPTIONS if pack.block == SMALL_BLOCK else None
        out = _flex(query, key, value, mask, scaling=scaling, softcap=softcap, s_aux=s_aux, options=options)
    elif pack.kind == "varlen":
        if softcap is not None or s_aux is not None:
            raise TandemError(
                "this model's attention caps its scores or has sinks, which policy.attention=varlen does not support. Use "
                "policy.attention=auto."
            )
        out = attend_runs(query, key, value, mask, scaling=scaling)
    else:
        dense = partial(_dense, scaling=scaling, softcap=softcap, s_aux=s_aux)
        out = (
            _tree_by_tree(query, key, value, mask, dense=dense)
            if pack.kind == "trees"
            else dense(query, key, value, mask)
        )
    out = out if context is None else to_columns(out, context)
    return out.transpose(1, 2).contiguous(), None


def _checked(
    pack: PackMask | None, attention_mask: Tensor | None, sliding_window: int | None, others: dict[str, Any]
) -> PackMask:
    """Return the pack's mask. Raise TandemError if the model's attention does something that packs do not support."""
    if pack is None:
        raise TandemError(
            "this model's layers do not pass the pack's mask on to attention. Train it with policy.packing.mode=none."
        )
    if attention_mask is not None:
        raise TandemError(
            "this model's attention uses its own mask, which packing does not support. Train it with "
            "policy.packing.mode=none."
        )
    for name, given in others.items():
        if given is not None and name not in IGNORED_ARGUMENTS:
            raise TandemError(
                f"this model's attention takes the argument {name}, which packing does not support. "
                "Train it with policy.packing.mode=none."
            )
    if sliding_window not in pack.masks:
        raise TandemError(
            f"this model's attention has a window of {sliding_window} tokens that is not in its configuration. Train it with "
            "policy.packing.mode=none."
        )
    return pack


def _tree_by_tree(
    query: Tensor, key: Tensor, value: Tensor, masks: list[Tensor], *, dense: Callable[..., Tensor]
) -> Tensor:
    """Compute attention for each tree (a prompt with its completions) separately. No token attends to another tree."""
    rows, _, length, _ = query.shape
    sizes = [len(mask) for mask in masks]
    trees = (tensor.transpose(1, 2).flatten(0, 1).split(sizes) for tensor in (query, key, value))  # [size, heads, dim]
    outs = []
    for q, k, v, mask in zip(*trees, masks, strict=True):
        out = dense(*(part.transpose(0, 1)[None] for part in (q, k, v)), mask)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs).unflatten(0, (rows, length)).transpose(1, 2)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Compute attention with SDPA, or in separate operations if scores are soft-capped or have sinks.

    SDPA does not support soft-caps and sinks.
    """
    if softcap is None and s_aux is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=grouped)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if s_aux is not None:
        sink = s_aux.float().reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def allow_many_graphs() -> None:
    """Raise torch's limit on compiled graphs from 8 to 64. Beyond the limit, code silently runs uncompiled.

    One graph is compiled for every row length and kind of layer.
    """
    torch._dynamo.config.recompile_limit = 64


@cache
def _flex_compiled() -> Any:
    """Return compiled FlexAttention. It is created on first use, because importing torch's compiler takes a second."""
    allow_many_graphs()
    return torch.compile(flex_attention, dynamic=False)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    *,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    options: Any,
) -> Tensor:
    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    score_mod = None if softcap is None else cap
    # Inside a compiled layer, flex_attention is part of the layer's graph. Elsewhere it must be compiled: unfused, it would fill
    # the memory.
    call = flex_attention if torch.compiler.is_compiling() else _flex_compiled()
    grouped = query.shape[1] != key.shape[1]
    if s_aux is None:
        return call(query, key, value, score_mod, mask, scaling, grouped, kernel_options=options)
    # A sink adds exp(sink) to the softmax's denominator: out * exp(lse) / (exp(lse) + exp(sink)).
    given = {"kernel_options": options, "return_aux": AuxRequest(lse=True)}
    out, aux = call(query, key, value, score_mod, mask, scaling, grouped, **given)
    assert aux.lse is not None
    keep = torch.sigmoid(aux.lse - s_aux.float().reshape(1, -1, 1))
    return (out * keep.unsqueeze(-1)).to(out.dtype)


_calls: list[int | None] | None = None


@contextmanager
def record_calls() -> Iterator[list[int | None]]:
    """Yield a list. Inside this context, every call of `attend` appends its sliding window to the list, and returns zeros."""
    global _calls
    _calls = []
    try:
        yield _calls
    finally:
        _calls = None


AttentionInterface.register(IMPLEMENTATION, attend)

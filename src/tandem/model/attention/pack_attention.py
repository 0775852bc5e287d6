"""The rule of attention inside a pack, as the function that transformers calls in every attention layer."""

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
from tandem.model.transfer import to_device
from tandem.packing.blocks import block_lists, seen_until
from tandem.packing.layout import Pack
from tandem.packing.packer import BLOCK

IMPLEMENTATION = "tandem_pack"
# sdpa: whole rows under a dense mask; trees: each tree of them by itself.
AttentionKind = Literal["flex", "varlen", "sdpa", "trees"]

# Smaller blocks hold less that nobody may see; what is told to the kernels for them was the fastest of what was tried on an
# H200 (benchmarks/LAB_NOTES.md). Torch's own tiles for a backward do not divide such a block, and it compares them with what the
# mask says of itself: that it has the usual blocks.
SMALL_BLOCK = 64
SIDES = ("fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
FOR_SMALL_BLOCKS = {
    "SPARSE_Q_BLOCK_SIZE": SMALL_BLOCK,
    "SPARSE_KV_BLOCK_SIZE": SMALL_BLOCK,
    **dict.fromkeys(SIDES, SMALL_BLOCK),
    "fwd_num_warps": 4,
    "fwd_num_stages": 3,
    "bwd_num_warps": 4,
    "bwd_num_stages": 2,
}
HEAD_DIMS = {64, 128}
HOPPER = (9, 0)
UNREAD_TORCH = "2.14.dev0"  # whether it heeds these is not known

# Arguments that layers pass along and that do not change attention.
HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits", "is_causal"}


class PackMask:
    """Who may see whom in a pack, for every window the model's layers have (None: no window).

    Passed to the model as the keyword `pack`; transformers hands it down to `attend` in every layer.
    """

    def __init__(self, masks: dict[int | None, Any], kind: AttentionKind, block: int):
        self.masks = masks
        self.kind = kind
        self.block = block  # of FlexAttention


def make_mask(
    pack: Pack, windows: set[int | None], device: torch.device, kind: AttentionKind, block: int = BLOCK
) -> PackMask:
    makers: dict[AttentionKind, Callable[[Pack, int | None, torch.device], Any]]
    makers = {"flex": partial(block_mask, block=block), "varlen": runs_of, "sdpa": _dense_mask, "trees": _tree_masks}
    make = makers[kind]
    longest = int(pack.position_ids.max()) + 1
    masks: dict[int | None, Any] = {}
    for window in sorted(windows, key=lambda w: -1 if w is None else w):
        # A window that reaches past the longest sequence is no window: layers with it share the plain mask.
        masks[window] = masks[None] if window and window >= longest else make(pack, window, device)
    return PackMask(masks, kind, block)


def windows_of(model: Any) -> set[int | None]:
    """The sliding windows of a model's layers, and None."""
    config = model.config.get_text_config()
    found = [getattr(config, "sliding_window", None), *(getattr(m, "sliding_window", None) for m in model.modules())]
    return {None, *(window for window in found if isinstance(window, int) and window > 0)}


def block_size(model: nn.Module, device: torch.device, *, bfloat16: bool) -> int:
    """Of FlexAttention's blocks for a model that computes in bfloat16, or not: small where that was measured to pay."""
    dims = {module.head_dim for module in model.modules() if hasattr(module, "head_dim")}
    if not bfloat16 or device.type != "cuda" or torch.__version__ >= UNREAD_TORCH:
        return BLOCK
    measured = dims and dims <= HEAD_DIMS and torch.cuda.get_device_capability(device) == HOPPER
    return SMALL_BLOCK if measured else BLOCK


def may_attend(until: Tensor, position: Tensor, q: Any, k: Any, window: int | None) -> Tensor:
    """The rule: q sees k when k is not later, and as far as k is seen (packing/blocks.py).

    A window counts position ids, not columns: a completion may stand far from its prompt in the row.
    """
    seen = (k <= q) & (q < until[k])
    return seen if window is None else seen & (position[q] - position[k] < window)


def _dense_mask(pack: Pack, window: int | None, device: torch.device) -> Tensor:
    """[rows, 1, length, length] bool."""
    columns = torch.arange(pack.token_ids.shape[1], device=device)
    q, k = columns[:, None], columns[None, :]
    arrays = seen_until(pack.tree, pack.branch), pack.position_ids
    rows = zip(*(to_device(array, device) for array in arrays), strict=True)
    return torch.stack([may_attend(until, position, q, k, window) for until, position in rows])[:, None]


def _tree_masks(pack: Pack, window: int | None, device: torch.device) -> list[Tensor]:
    """Of each tree, the rows taken as one: [size, size] bool."""
    rows = np.arange(pack.tree.shape[0])[:, None] * pack.tree.shape[1]
    until = to_device((seen_until(pack.tree, pack.branch) + rows).ravel(), device)
    position = to_device(pack.position_ids.ravel(), device)
    trees = (torch.arange(start, end, device=device) for start, end in pairwise(bounds_of(pack.tree)))
    return [may_attend(until, position, tree[:, None], tree[None], window) for tree in trees]


def block_mask(pack: Pack, window: int | None, device: torch.device, block: int = BLOCK) -> BlockMask:
    lists = block_lists(pack.tree, pack.branch, pack.position_ids, block, window)

    def on_device(array: Any) -> Tensor:
        return to_device(array, device)[:, None]

    until = to_device(seen_until(pack.tree, pack.branch), device)
    position = to_device(pack.position_ids.astype("int32"), device)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return may_attend(until[b], position[b], q, k, window)

    length, said = pack.token_ids.shape[1], max(block, BLOCK)
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
        BLOCK_SIZE=(said, said),
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
    dropout: float = 0.0,  # not applied: models are in evaluation mode, but some of transformers' pass it even then
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[rows, heads, length, dim] in; [rows, length, heads, dim] out, by the rule of the pack."""
    if pack is None:
        raise TandemError(
            "this model's layers do not pass the pack's mask on to attention. Train it with policy.packing.mode=none."
        )
    if attention_mask is not None:
        raise TandemError(
            "this model's attention has a mask of its own, which packing does not know and must not ignore. Train it with "
            "policy.packing.mode=none."
        )
    for name, given in others.items():
        if given is not None and name not in HARMLESS:
            raise TandemError(
                f"this model's attention takes {name}, which packing does not know and must not ignore. "
                "Train it with policy.packing.mode=none."
            )
    if sliding_window not in pack.masks:
        raise TandemError(
            f"this model's attention has a window of {sliding_window} tokens that its configuration does not name. Train it with "
            "policy.packing.mode=none."
        )
    if _calls is not None:
        _calls.append(sliding_window)
        # Only counted: uncompiled, FlexAttention would fill the memory with the scores of whole rows.
        return query.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[-1]), None
    mask = pack.masks[sliding_window]
    if pack.kind == "flex":
        options = FOR_SMALL_BLOCKS if pack.block == SMALL_BLOCK else None
        out = _flex(query, key, value, mask, scaling, softcap, s_aux, options)
    elif pack.kind == "varlen":
        if softcap is not None or s_aux is not None:
            raise TandemError(
                "this model's attention caps its scores or has sinks, which policy.attention=varlen does not know. Use "
                "policy.attention=auto."
            )
        out = attend_runs(query, key, value, mask, scaling)
    else:
        dense = partial(_dense, scaling=scaling, softcap=softcap, s_aux=s_aux)
        out = _tree_by_tree(query, key, value, mask, dense) if pack.kind == "trees" else dense(query, key, value, mask)
    return out.transpose(1, 2).contiguous(), None


def _tree_by_tree(
    query: Tensor, key: Tensor, value: Tensor, masks: list[Tensor], dense: Callable[..., Tensor]
) -> Tensor:
    """No tree sees another, so that nothing between them is computed."""
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
    if softcap is None and s_aux is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=grouped)
    return _explicit(query, key, value, mask, scaling, softcap, s_aux)


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attention written out, for what SDPA does not know: a soft-cap of the scores, sinks in the softmax."""
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
    """One for every length of rows, with and without gradients: beyond torch's own limit of 8, code quietly runs uncompiled."""
    torch._dynamo.config.recompile_limit = 64


@cache
def _flex_compiled() -> Any:
    """FlexAttention compiled by itself. Made when it is first called, since torch takes a second to import its compiler."""
    allow_many_graphs()
    return torch.compile(flex_attention, dynamic=False)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
    options: Any,
) -> Tensor:
    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    score_mod = None if softcap is None else cap
    # Inside a compiled layer flex_attention is part of its graph; outside it would run unfused and fill the memory.
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
def counted_calls() -> Iterator[list[int | None]]:
    """Collect the sliding window of every call of `attend` inside the block, which computes nothing there."""
    global _calls
    _calls = []
    try:
        yield _calls
    finally:
        _calls = None


AttentionInterface.register(IMPLEMENTATION, attend)

"""Layers that forget what they computed and compute it again in the backward: everything, or all but the dear half."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # which registers its operation
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tandem.model.parallel import decoder_layers
from tandem.model.policy import Policy

# It tells of in-place operations, of which a layer has none, at every start.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in record.getMessage())

aten = torch.ops.aten
ATTENTION = {
    torch.ops.higher_order.flex_attention,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
}
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._grouped_mm.default}


def recompute(policy: Policy, how: Literal["selective", "full"]) -> None:
    """Selective keeps attention and every second wide matrix product of a layer; full keeps a layer's input alone.

    Inside a layer's forward, so that compiling a layer sees it: around a compiled one, selective would do nothing.
    """
    ranks = [len(parameter) for name, parameter in policy.named_parameters() if "lora_A" in name]
    contexts = partial(_selective, max(ranks, default=0)) if how == "selective" else _nothing
    for layer in decoder_layers(policy):
        layer.forward = _recomputed(layer.forward, contexts, by_policy=how == "selective")


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any], *, by_policy: bool) -> Callable[..., Any]:
    def recomputed(*given: Any, **named: Any) -> Any:
        # Up to torch 2.12 a compiled layer would keep what is computed inside an autograd.Function, as adapters are, unless
        # a policy says otherwise.
        more: dict[str, Any] = {"context_fn": contexts} if by_policy or torch.compiler.is_compiling() else {}
        return checkpoint(forward, *given, use_reentrant=False, **more, **named)

    return recomputed


def _selective(rank: int) -> Any:
    return create_selective_checkpoint_contexts(_every_second_product(rank))


def _nothing() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


def _every_second_product(rank: int) -> Callable[..., CheckpointPolicy]:
    """Forward and recomputation meet the same operations in the same order; each is counted apart.

    Products into and out of adapters of that rank are not counted: the first leave little to keep, the second little to
    compute again.
    """
    counts = {False: 0, True: 0}

    def keep(context: Any, operation: Any, *given: Any, **_: Any) -> CheckpointPolicy:
        if operation in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operation in PRODUCTS:
            left, right = [one for one in given if getattr(one, "ndim", 0) > 1][-2:]
            if right.shape[-1] <= rank:
                return CheckpointPolicy.MUST_SAVE
            if left.shape[-1] > rank:
                counts[context.is_recompute] += 1
                if counts[context.is_recompute] % 2:
                    return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return keep

"""The policy sharded over the workers, and its layers compiled."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from tandem.model.policy import Policy
from tandem.model.rounding import cast_by_chance, salt_of
from tandem.model.workers import Workers

T = TypeVar("T")


def shard(policy: Policy, workers: Workers, *, bfloat16: bool) -> Policy:
    """Shard layers and root. bfloat16: computation in bfloat16 over float32 weights, gradients reduced in float32.

    On one worker only what is computed with in another dtype than it is kept in goes this way; the rest stays as it is.
    """
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    precision = (
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if bfloat16 else MixedPrecisionPolicy()
    )
    # Quantised weights, which are integers, are frozen: every worker holds them whole.
    whole = {p for p in policy.parameters() if not p.is_floating_point() or (workers.count == 1 and p.dtype == dtype)}
    if whole == set(policy.parameters()):
        return policy
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=workers.mesh, mp_policy=precision, ignored_params=whole)
    # The root too gives its gathered weights back after a forward. By default it keeps them until a backward, and after
    # a forward without one (validation, reference) `parameters()` would not be what the optimizer updates.
    fully_shard(policy, mesh=workers.mesh, mp_policy=precision, reshard_after_forward=True, ignored_params=whole)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the pairs of the whole global batch: workers add up, nothing more.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for method in ("plain_logps", "answer"):
        register_fsdp_forward_method(policy, method)
    for name, parameter in policy.named_parameters():
        if bfloat16 and parameter.dtype == torch.float32:
            cast_by_chance(parameter, salt_of(name.removeprefix("model.").replace(".base_layer.", ".")))
    return policy


def in_turn(policy: Policy, packs: Iterable[T], workers: Workers) -> Iterator[T]:
    """A step's packs one by one. Each is taken forward and backward before the next is asked for.

    On one worker, weights are cast once and gradients joined with the optimizer's once a step, not once a pack: there is
    nobody to share them with in between.
    """
    if not isinstance(policy, FSDPModule) or workers.count > 1:
        yield from packs
        return
    policy.set_reshard_after_forward(False)
    for pack, is_last in _with_last(packs):
        policy.set_reshard_after_backward(is_last)
        policy.set_requires_gradient_sync(is_last)
        yield pack
    policy.set_reshard_after_forward(True)


@contextmanager
def unchanged(policy: Policy, workers: Workers) -> Iterator[None]:
    """While weights stay as they are, without gradients: on one worker they are cast once, not once a pack."""
    if not isinstance(policy, FSDPModule) or workers.count > 1:
        yield
        return
    policy.set_reshard_after_forward(False)
    try:
        yield
    finally:
        policy.set_reshard_after_forward(True)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _with_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """[a, b] -> (a, False), (b, True)"""
    waiting = iter(items)
    try:
        item = next(waiting)
    except StopIteration:
        return
    for following in waiting:
        yield item, False
        item = following
    yield item, True


def decoder_layers(policy: Policy) -> list[torch.nn.Module]:
    """The repeated layers of the trunk."""
    return list(policy.model.base_model.layers)


def compile_layers(policy: Policy) -> None:
    """Compile each layer on its own: one graph serves all layers of a kind.

    A layer has a graph per pack length, with and without gradients, and per kind of attention. Beyond torch's own limit
    of 8 it would quietly run uncompiled.
    """
    torch._dynamo.config.recompile_limit = 64
    for layer in decoder_layers(policy):
        layer.compile(fullgraph=True, dynamic=False)

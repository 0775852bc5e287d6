"""The policy sharded over the workers, and its layers compiled."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # which registers its operation
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.errors import ConfigError
from tandem.model.attention.pack_attention import allow_many_graphs, block_size
from tandem.model.distributed.process_group import Ranks
from tandem.model.files.source import ModelSource
from tandem.model.load import empty_model
from tandem.model.policy import Policy, trunk_of
from tandem.model.precision.rounding import cast_stochastically, salt_in_policy
from tandem.model.precision.working_copy import GradientSums, WorkingCopy


def shard(policy: Policy, ranks: Ranks, *, bfloat16: bool) -> Policy:
    """Shard layers and root. bfloat16: computation in bfloat16 over float32 weights, gradients reduced in float32.

    One worker has all of them. It keeps copies to compute with instead, where it computes in another dtype.
    """
    policy.block = block_size(policy, ranks.device, bfloat16=bfloat16)
    if ranks.count == 1:
        if bfloat16 and any(parameter.dtype == torch.float32 for parameter in policy.parameters()):
            policy.working_copy = WorkingCopy(policy)
        _sum_gradients_in_float32(policy)
        return policy
    precision = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if bfloat16
        else MixedPrecisionPolicy()
    )
    # Quantised weights, which are integers, are frozen: every worker holds them whole.
    whole = {parameter for parameter in policy.parameters() if not parameter.is_floating_point()}
    for layer in decoder_layers(policy):
        fully_shard(layer, mesh=ranks.mesh, mp_policy=precision, ignored_params=whole)
    # The root too gives its gathered weights back after a forward. By default it keeps them until a backward, and after
    # a forward without one (validation, reference) `parameters()` would not be what the optimizer updates.
    fully_shard(policy, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=True, ignored_params=whole)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the pairs of the whole global batch: workers add up, nothing more.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for method in ("plain_logps", "answer"):
        register_fsdp_forward_method(policy, method)
    for name, parameter in policy.named_parameters():
        if bfloat16 and parameter.dtype == torch.float32:
            cast_stochastically(parameter, salt_in_policy(name))
    _sum_gradients_in_float32(policy)
    return policy


def _sum_gradients_in_float32(policy: Policy) -> None:
    rounded = [parameter for _, parameter in policy.trained() if parameter.dtype == torch.bfloat16]
    policy.gradient_sums = GradientSums(rounded) if rounded else None


def frozen(policy: Policy) -> Policy:
    """One that is never updated. Where it has copies to compute with, they are all it keeps."""
    if policy.working_copy is not None:
        policy.working_copy.keep_copies()
        policy.working_copy = None
    return policy.requires_grad_(False)


def decoder_layers(policy: Policy) -> list[torch.nn.Module]:
    """The repeated layers of the trunk."""
    return list(trunk_of(policy.model).layers)


def check_layers(source: ModelSource, policy: PolicyConfig, num_ranks: int) -> bool:
    """Whether `decoder_layers` finds the layers of a model. Refused where they are needed, before any weights load."""
    if isinstance(getattr(trunk_of(empty_model(source)), "layers", None), torch.nn.ModuleList):
        return True
    again = policy.activation_checkpointing
    needed = {
        f"policy.activation_checkpointing = {again}": (again != "none", "Leave it out."),
        "policy.compile = true": (policy.compile is True, "Use policy.compile=auto."),
        f"{num_ranks} workers": (num_ranks > 1, "Train it with one."),
    }
    for what, (is_needed, way_out) in needed.items():
        if is_needed:
            raise ConfigError(
                f"{what}: needs the list of a model's layers, which {source.name} (model type {source.config.model_type}) does "
                f"not have where other models have it. {way_out}"
            )
    return False


def compile_layers(policy: Policy) -> None:
    """Compile each layer on its own: one graph serves all layers of a kind.

    A layer has a graph per pack length, with and without gradients, and per kind of attention.
    """
    allow_many_graphs()
    for layer in decoder_layers(policy):
        layer.compile(fullgraph=True, dynamic=False)


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

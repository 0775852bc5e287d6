"""Shards a policy over ranks, compiles its layers and sets up activation recomputation."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.attention.varlen  # registers the operation named below
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.errors import ConfigError
from tandem.model.architecture import decoder_layers, has_layer_list
from tandem.model.attention.pack_attention import allow_many_graphs, block_size
from tandem.model.distributed.context import Context
from tandem.model.distributed.process_group import Ranks
from tandem.model.files.source import ModelSource
from tandem.model.load import empty_model
from tandem.model.lora.layers import TrainingDropout
from tandem.model.lora.magnitudes import Magnitudes
from tandem.model.lora.rows import trained_rows
from tandem.model.policy import Policy
from tandem.model.precision.rounding import ShardCasts, salt_in_policy
from tandem.model.precision.working_copy import GradientSums, WorkingCopy


def shard(
    policy: Policy,
    ranks: Ranks,
    *,
    bfloat16: bool,
    reshard_after_forward: bool = True,
    reduce_once: bool = False,
    read: Callable[[], None] | None = None,
    even_alone: bool = False,
) -> Policy:
    """Shard the weights of a policy over the ranks: each layer separately, and all other weights together.

    `bfloat16`: compute in bfloat16 with float32 weights, and reduce gradients in float32. The policy of a single rank is not
    sharded; with `bfloat16`, it computes with bfloat16 copies of its weights.
    `reshard_after_forward`: see policy.parallel. `reduce_once`: sum gradients over ranks only when
    `Policy.reduce_gradients` says so. `read`: a function that reads the weights, if they are not loaded yet.
    `even_alone`: also shard the policy of a single rank, to measure what sharding costs.
    """
    policy.block = block_size(policy, ranks.device, bfloat16=bfloat16)
    if ranks.count == 1 and not even_alone:
        sources = _prepare_adapters(policy, bfloat16=bfloat16)
        if bfloat16 and any(parameter.dtype == torch.float32 for parameter in policy.parameters()):
            policy.working_copy = WorkingCopy(policy, sources)
        _sum_gradients_in_float32(policy)
        return policy
    if (group := ranks.context_group) is not None:
        policy.context = Context(group.group_name, dist.get_rank(group), ranks.shape.context)
    precision = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if bfloat16
        else MixedPrecisionPolicy()
    )
    # Quantised weights are integers and frozen: every rank holds all of them.
    unsharded = {parameter for parameter in policy.parameters() if not parameter.is_floating_point()}
    given: dict[str, Any] = {"mesh": ranks.weights_mesh, "mp_policy": precision, "ignored_params": unsharded}
    for module in (*decoder_layers(policy.model), policy):
        # Also the root: by default it keeps gathered weights until the backward pass, and after a forward pass without one
        # (validation, reference) `parameters()` would not return what the optimizer updates.
        sharded = fully_shard(module, reshard_after_forward=reshard_after_forward, **given)
        sharded.set_reshard_after_backward(reshard_after_forward)
    policy.keeps_gathered, policy.reduces_once = not reshard_after_forward, reduce_once
    if read is not None:
        read()
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the number of pairs in the global batch, so gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for method in ("plain_logps", "generate"):
        register_fsdp_forward_method(policy, method)
    sources = _prepare_adapters(policy, bfloat16=bfloat16)
    if bfloat16:
        policy.shard_casts = ShardCasts()
        for name, parameter in policy.named_parameters():
            if parameter.dtype == torch.float32:
                policy.shard_casts.add(parameter, salt_in_policy(name), sources.get(parameter))
    _sum_gradients_in_float32(policy)
    return policy


def _prepare_adapters(policy: Policy, *, bfloat16: bool) -> dict[nn.Parameter, Tensor]:
    """Set `policy.rows` and `policy.magnitudes`. Return the tensors that are cast to bfloat16 instead of a parameter."""
    policy.rows = trained_rows(policy.model)
    magnitudes = Magnitudes(policy.model, bfloat16=bfloat16)
    if not magnitudes.layers:
        return {}
    policy.magnitudes = magnitudes
    return magnitudes.differences


def _sum_gradients_in_float32(policy: Policy) -> None:
    in_bfloat16 = [parameter for _, parameter in policy.trained() if parameter.dtype == torch.bfloat16]
    policy.gradient_sums = GradientSums(in_bfloat16) if in_bfloat16 else None


def freeze(policy: Policy) -> Policy:
    """Make a policy untrainable. If it computes with bfloat16 copies of its weights, only the copies are kept."""
    if policy.magnitudes is not None:
        policy.magnitudes.refresh()  # for the last time
        policy.magnitudes = None
    policy.rows = None  # they were written when the weights were loaded
    if policy.working_copy is not None:
        policy.working_copy.keep_copies()
        policy.working_copy = None
    policy.shares_graphs = False
    return policy.requires_grad_(False)


def check_layers(source: ModelSource, policy: PolicyConfig, num_ranks: int) -> bool:
    """Return whether `decoder_layers` finds the layers of a model.

    If it does not, raise ConfigError for settings that need the layers, such as policy.compile=true. Called before any weights
    load.
    """
    if has_layer_list(empty_model(source)):
        return True
    checkpointing = policy.activation_checkpointing
    needed = {
        f"policy.activation_checkpointing = {checkpointing}": (checkpointing != "none", "Leave it out."),
        "policy.compile = true": (policy.compile is True, "Use policy.compile=auto."),
        f"{num_ranks} ranks": (num_ranks > 1, "Train it with one rank."),
    }
    for what, (is_needed, way_out) in needed.items():
        if is_needed:
            raise ConfigError(
                f"{what}: needs a model whose layers are in a list named `layers`, which {source.name} (model type "
                f"{source.config.model_type}) does not have. {way_out}"
            )
    return False


def compile_layers(policy: Policy) -> None:
    """Compile each layer separately, so that layers of the same kind share a graph.

    There is one graph for each pack length and each kind of attention. Passes without gradients use it too, unless the policy is
    frozen, or has dropout, which they must not apply. Convolutions and scans of recurrent layers are not compiled in packs, nor
    where they are kernels: a layer is then several graphs.
    """
    allow_many_graphs()
    drops = any(isinstance(module, TrainingDropout) for module in policy.modules())
    policy.shares_graphs = any(True for _ in policy.trained()) and not drops
    for layer in decoder_layers(policy.model):
        layer.compile(fullgraph=not policy.architecture.recurrent, dynamic=False)


# At every start this logger warns about in-place operations, which the layers do not have.
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
    """Make every layer recompute its activations in the backward pass.

    "selective" keeps the outputs of attention and of every second matrix product of a layer. "full" keeps only the layer's input.
    The layer's `forward` is wrapped, so that the wrapper is compiled with the layer. Around a compiled layer, "selective" would
    have no effect.
    """
    # Adapters of experts have as many rows per expert.
    ranks = [
        len(parameter) // getattr(policy.get_submodule(name.rpartition(".lora_A")[0]), "num_experts", 1)
        for name, parameter in policy.named_parameters()
        if ".lora_A." in name
    ]
    contexts = partial(_selective, max(ranks, default=0)) if how == "selective" else _keep_nothing
    for layer in decoder_layers(policy.model):
        layer.forward = _recomputed(layer.forward, contexts, by_policy=how == "selective")


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any], *, by_policy: bool) -> Callable[..., Any]:
    def recomputed(*given: Any, **named: Any) -> Any:
        # Up to torch 2.12, without a policy a compiled layer keeps what is computed inside an autograd.Function, as adapters
        # are.
        more: dict[str, Any] = {"context_fn": contexts} if by_policy or torch.compiler.is_compiling() else {}
        return checkpoint(forward, *given, use_reentrant=False, **more, **named)

    return recomputed


def _selective(rank: int) -> Any:
    return create_selective_checkpoint_contexts(_every_second_product(rank))


def _keep_nothing() -> Any:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


def _every_second_product(rank: int) -> Callable[..., CheckpointPolicy]:
    """Return a checkpointing policy that keeps the outputs of attention and of every second matrix product.

    Products are counted separately in the forward pass and in the recomputation, which run the same operations in the same order.
    `rank`: the rank of LoRA adapters; 0 without adapters. Products with lora_A and lora_B are not counted: the output of lora_A
    is always kept, because it is small, and the output of lora_B is always recomputed, because that is cheap.
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

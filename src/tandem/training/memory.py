"""Estimates the memory of a run and chooses its row length. Refuses a run that does not fit in memory."""

import os
import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.errors import MachineError, OutOfMemoryError
from tandem.model.architecture import architecture_of, feed_forward_width
from tandem.model.distributed.layer_sizes import layers_of
from tandem.model.distributed.mesh import SINGLE_RANK_MESH, MeshShape
from tandem.model.files.source import ModelSource
from tandem.model.load import attention_kind, empty_model
from tandem.model.lora.layers import LoraPlan
from tandem.model.lora.quantised import BYTES_PER_WEIGHT
from tandem.model.recurrent.outlook import bytes_per_token
from tandem.packing.batches import GlobalBatch
from tandem.packing.packer import BLOCK, DATASET_PACK, Packer, in_blocks, prepared_lengths, tokens_of_pairs
from tandem.storage.cache import GIB
from tandem.terminal.printable import counted
from tandem.training.adamw import state_bytes
from tandem.training.offload import bytes_on_device

CPU_ROW_TOKENS = 1024  # for the tiny model 10 % faster than 512; 2,048 is another 5 % faster and needs twice the memory
ROW_LENGTHS = (65536, 32768, 16384, 8192, 4096, 2048)
# With 1.5 billion weights, rows twice as long were 1 % faster and needed 50 % more memory (docs/benchmarks.md).
LONG_ROW_TOKENS = 16384
# Tokens per row x weights that keep a GPU busy. With fewer, the GPU finishes a row before the host has launched the next one:
# with 1.5 billion weights it waited at 4,096 tokens per row, and hardly at 8,192 (docs/benchmarks.md).
BUSY_TOKENS_TIMES_WEIGHTS = 12e12
# Ranks that share the weights gather them, and sum gradients, once per row, however long it is. Computing a row takes as long as
# that with 2,000 tokens inside a machine, and with 16,000 between machines (`tandem plan --gpus`; computed).
SHARDED_ROW_TOKENS = 8192
# The share of a GPU's memory that the estimate may use. The rest is for memory that the estimate does not include.
USABLE_SHARE = 0.85
# Activations that a layer keeps for the backward pass, as multiples of its hidden and intermediate sizes; fitted to runs of
# four model shapes that differ only in the length of packs (benchmarks/results/train.jsonl and small_models.jsonl).
# KEPT_SHARE: the share of them that is kept with each kind of activation checkpointing.
KEPT_PER_HIDDEN, KEPT_PER_INTERMEDIATE = 7.2, 2.9
KEPT_SHARE = {"none": 1.0, "selective": 0.42, "full": 0.11}
# Bytes per entry of a dense mask: as booleans, and as the numbers that attention adds to its scores.
MASK_FLAG_BYTES, MASK_NUMBER_BYTES = 1, 4
GRADIENT_BYTES = 4  # gradients are summed in float32
LOGITS_BYTES = 2 * GIB  # a chunk of logits and other temporary tensors
# Temporary memory is an estimate. A run is refused only if even this share of it would not fit.
CERTAIN_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class RowLength:
    """The automatically chosen row length in tokens, and the reason for this length in words."""

    tokens: int
    reason: str
    shortest: int = 0  # rows are shorter than this only if a whole batch fits into one of them


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """The memory per rank that does not depend on the length of rows, in bytes."""

    weights: float
    gradients: float
    states: float  # of the optimizer, on the device
    copy: float  # for computation: the bfloat16 copy of float32 weights, and experts with their adapters added
    all_states: float  # with policy.optimizer.offload, those in host memory

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.states + self.copy


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The memory that a run is expected to need per rank, in bytes. The estimate is made before weights load."""

    num_weights: int
    parts: FixedMemory
    per_token: float
    head: float = LOGITS_BYTES  # chunks of logits, and the head's gradient before it is added; both are small on a CPU
    context: int = 1  # the ranks that divide every row among them
    gathered: float = 0  # of several ranks: weights that are gathered, and gradients before they are divided

    @property
    def fixed(self) -> float:
        """Weights, gradients, optimizer states, and the bfloat16 copy of the weights."""
        return self.parts.total

    def temporary(self, tokens: int) -> float:
        """Return the bytes of activations, logits and gathered weights of a micro-batch with this many tokens."""
        return self.head + self.gathered + tokens * self.per_token


def estimate_memory(
    source: ModelSource,
    policy: PolicyConfig,
    device: torch.device,
    *,
    lora: LoraPlan | None,
    precision: str,
    mesh: MeshShape = SINGLE_RANK_MESH,
) -> MemoryEstimate:
    model = empty_model(source)
    num = sum(parameter.numel() for parameter in model.parameters())
    per_token = _bytes_per_token(source.config.get_text_config(), policy, precision)
    if lora is not None:  # DoRA keeps the output of each layer, before its rows are scaled
        per_token += KEPT_SHARE[policy.activation_checkpointing] * lora.num_magnitudes * _itemsize(precision)
        if lora.tokens.is_tied:  # the head keeps its input, and the slopes of the logits of these tokens
            width = source.config.get_text_config().hidden_size
            per_token += (width + len(lora.tokens.ids)) * _itemsize(precision)
    per_token = (per_token + _recurrent_bytes_per_token(source.config, policy, precision, device)) / mesh.context
    head = (
        _head_bytes(source.config.get_text_config(), trains=_trains_head(model, lora)) if device.type == "cuda" else 0
    )
    parts = _fixed_memory(num, policy, lora, precision, mesh)
    gathered = 0.0
    if mesh.num_ranks > 1:
        trained = num if lora is None else lora.num_trained
        layers = layers_of(model) if lora is None or lora.quantization is None else layers_of(model).quantised()
        itemsize, keeps = 2 if precision == "bfloat16" else 4, not policy.parallel.reshard_after_forward
        gathered = layers.gathered_bytes(itemsize, keeps_gathered=keeps, num_trained=trained)
        if policy.parallel.reduces_once(mesh.weight_shards):  # in float32, until they are divided
            gathered += GRADIENT_BYTES * trained * (1 - 1 / mesh.weight_shards)
    return MemoryEstimate(num, parts, per_token, head=head, context=mesh.context, gathered=gathered)


def auto_row_length(
    need: MemoryEstimate, policy: PolicyConfig, device: torch.device, memory: int | None = None
) -> RowLength:
    """Choose the row length.

    On a GPU, choose the longest row length that is expected to fit in memory. Lengths that would hardly be faster than shorter
    ones are not considered.
    `memory`: the smallest device memory of all ranks, in bytes; None: the memory of this device.
    """
    if policy.packing.mode == "dataset":
        return RowLength(DATASET_PACK, "the default for a set packed once")
    if device.type != "cuda":
        return RowLength(CPU_ROW_TOKENS, "the default on a CPU")
    available, together = memory or device_memory(device), policy.packing.packs_per_micro_batch
    busy = BUSY_TOKENS_TIMES_WEIGHTS / need.num_weights / together * need.context
    lengths = [length * need.context for length in ROW_LENGTHS]
    useful = [length for length in lengths if length < 2 * max(LONG_ROW_TOKENS * need.context, busy)]
    fits = (length for length in useful if need.fixed + need.temporary(length * together) <= USABLE_SHARE * available)
    fitting = next(fits, lengths[-1])
    expected = need.fixed + need.temporary(fitting * together)
    if expected > USABLE_SHARE * available:
        why = "; there is no shorter length"
    else:
        why = "; longer rows gain little" if fitting == useful[0] else "; longer rows would not fit"
    return RowLength(
        fitting,
        f"expected to need {expected / GIB:.0f} of {available / GIB:.0f} GiB{why}",
        min(fitting, int(max(busy, SHARDED_ROW_TOKENS * need.context if need.gathered else 0))),
    )


def refuse_certain_overflow(
    need: MemoryEstimate,
    packer: Packer,
    batch: GlobalBatch,
    policy: PolicyConfig,
    device: torch.device,
    memory: int | None = None,
    offload: str = "",
) -> None:
    """Raise OutOfMemoryError, before weights load, if the run certainly does not fit in memory.

    For other runs, memory is measured after weights load (start/build.py). `offload`: as in `suggest_less_memory`.
    """
    available, whose = memory or device_memory(device), "the GPU" if device.type == "cuda" else "this machine"
    length, together = longest_micro_batch(packer, batch)
    temporary = need.temporary(length * together)
    if need.fixed + CERTAIN_SHARE * temporary > available:
        raise OutOfMemoryError(
            f"the run needs about {(need.fixed + temporary) / GIB:.0f} GiB and {whose} has {available / GIB:.0f}: weights, "
            f"gradients and optimizer states {need.fixed / GIB:.0f}, activations in rows of {length:,} tokens "
            f"{temporary / GIB:.0f}. "
            f"{suggest_less_memory(length, policy, need.fixed < USABLE_SHARE * available, offload)}"
        )


def longest_micro_batch(packer: Packer, batch: GlobalBatch) -> tuple[int, int]:
    """Return the tokens of the longest row of a batch, and the number of rows that are computed together."""
    bins = packer.bins(batch.preferences, batch.bounds)
    return packer.longest_row(bins), min(packer.packs_per_micro_batch, -(-len(bins) // packer.share.num_ranks))


def suggest_less_memory(length: int, policy: PolicyConfig, shorter_rows_help: bool, offload: str = "") -> str:
    """Suggest settings that need less memory and are not in use yet, the cheapest first. `length`: tokens in the longest row.

    `offload`: how to move optimizer states to the host (`offload_advice`), if that helps and the host has the memory.
    """
    of_rows = [
        *_smaller_rows(length, policy),
        "policy.activation_checkpointing=selective" if policy.activation_checkpointing == "none" else "",
        "policy.activation_checkpointing=full" if policy.activation_checkpointing == "selective" else "",
    ]
    of_weights = [
        "policy.parallel.reduce_once_per_step=auto" if policy.parallel.reduce_once_per_step is True else "",
        "policy.optimizer.state_dtype=int8" if policy.optimizer.state_dtype != "int8" else "",
        offload,
        "policy.weights=bfloat16_stochastic" if policy.weights == "float32" and not policy.lora.enabled else "",
        "policy.lora.enabled=true" if not policy.lora.enabled else "",
    ]
    return _advice([*of_rows, *of_weights] if shorter_rows_help else [*of_weights, "more GPUs", *of_rows])


def suggest_less_memory_without_training(length: int, policy: PolicyConfig) -> str:
    """Like `suggest_less_memory`, for an evaluation, which keeps neither activations nor gradients nor optimizer states."""
    return _advice(
        [*_smaller_rows(length, policy), "policy.precision=bfloat16" if policy.precision == "float32" else ""]
    )


def _smaller_rows(length: int, policy: PolicyConfig) -> list[str]:
    rows = policy.packing.packs_per_micro_batch
    return [
        f"policy.packing.packs_per_micro_batch={rows // 2}" if rows > 1 else "",
        f"policy.packing.pack_length below {length} (rows may be as short as the longest preference)"
        if policy.packing.mode != "none"
        else "a lower policy.max_total_sequence_length",
    ]


def _advice(ways: list[str]) -> str:
    first, *others = [way for way in ways if way]
    return f"To use less memory, try {first}" + (f"; then {', '.join(others)}." if others else ".")


def describe_rows(packer: Packer, policy: PolicyConfig, usual: RowLength) -> str:
    """Describe the row length of a run, and the reason for this length. `usual`: the automatic row length."""
    rows = f"{packer.length:,} tokens"
    longest = int(packer.sizes.max())
    if policy.packing.mode == "none":
        return f"one sequence each, padded to at most {packer.length:,} tokens"
    if policy.packing.pack_length != "auto":
        rounded = packer.length != policy.packing.pack_length
        return f"{rows} ({policy.packing.pack_length:,} rounded up to a multiple of {BLOCK})" if rounded else rows
    if policy.packing.mode == "dataset" and prepared_lengths(packer.store):
        return f"{rows} (auto: the longest prepared packs)"
    if packer.length == in_blocks(usual.tokens):
        return f"{rows} (auto: {usual.reason})"
    if packer.length == in_blocks(longest):
        return f"{rows} (auto: the longest preference, with all its completions, has {longest:,})"
    return f"{rows} (auto: batches of {counted(policy.train_global_batch_size, 'pair')} fill rows of this length)"


def filler_warning(packer: Packer, policy: PolicyConfig) -> str | None:
    """Return a warning if pack_length is so high that a batch would fill at most half of the shortest row; otherwise None."""
    shortest = packer.lengths[0]
    pairs = policy.train_global_batch_size / packer.share.num_ranks
    tokens = int(tokens_of_pairs(pairs, packer.sizes, packer.store))
    if policy.packing.mode != "batch" or policy.packing.pack_length == "auto" or 2 * tokens > shortest:
        return None
    whose = "a batch" if packer.share.num_ranks == 1 else "a rank's part of a batch"
    return (
        f"policy.packing.pack_length = {policy.packing.pack_length}: {whose} has about {tokens:,} tokens, and the shortest rows "
        f"at that setting have {shortest:,}, so {1 - tokens / shortest:.0%} of the computation is filler. Set it to auto for "
        "shorter rows."
    )


def refuse_large_masks(
    length: int, longest: int, policy: PolicyConfig, device: torch.device, config: Any, memory: int | None = None
) -> None:
    """Raise MachineError if the dense attention masks of rows do not fit in memory.

    `length`: tokens per row. `longest`: tokens of the longest preference. `config`: the model's.
    """
    kind = attention_kind(policy, device, config)
    if policy.packing.mode == "none" or kind not in ("sdpa", "trees"):
        return
    tokens = policy.packing.packs_per_micro_batch * length
    needed = (
        tokens * length * (MASK_FLAG_BYTES + MASK_NUMBER_BYTES)
        if kind == "sdpa"
        else tokens * longest * MASK_FLAG_BYTES + longest**2 * MASK_NUMBER_BYTES
    )
    available = memory or device_memory(device)
    if needed > available:
        cause = "policy.attention=sdpa" if device.type == "cuda" else "policy.compile=true on a CPU"
        where = (
            f"where attention is dense ({cause})" if kind == "sdpa" else f"for preferences of up to {longest:,} tokens"
        )
        raise MachineError(
            f"policy.packing.pack_length = {policy.packing.pack_length}: rows of {length:,} tokens need a mask of "
            f"{needed / GIB:.1f} GiB {where}, and this device has {available / GIB:.1f} GiB. "
            "Lower policy.packing.pack_length, or policy.max_total_sequence_length if a single preference is that long."
        )


def device_memory(device: torch.device) -> int:
    """Return the total memory of the GPU in bytes. If the device is a CPU, return the memory of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory_gib(device: torch.device) -> float:
    """Return the most memory used so far in GiB: allocated on the GPU, or of this process if the device is a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def _fixed_memory(
    num: int, policy: PolicyConfig, lora: LoraPlan | None, precision: str, mesh: MeshShape
) -> FixedMemory:
    """Return the memory per rank for weights, gradients and optimizer states.

    All are sharded over ranks, except quantised weights.
    """
    states = state_bytes(policy.optimizer.state_dtype)
    # Several ranks gather one layer at a time and keep no bfloat16 copy of the model.
    copy = 2 if policy.weights == "float32" and precision == "bfloat16" and mesh.num_ranks == 1 else 0
    if lora is not None:
        quantised = 0 if lora.quantization is None else lora.num_quantisable
        frozen = (lora.num_frozen - quantised) * float(lora.dtype.itemsize)
        if lora.quantization is not None:
            frozen += BYTES_PER_WEIGHT[lora.quantization] * quantised
        num, weight = lora.num_trained, 4
    else:
        frozen, weight = 0.0, 4 if policy.weights == "float32" else 2
    # Experts with adapters are merged in every layer, and kept until its backward pass.
    kept = KEPT_SHARE[policy.activation_checkpointing] * _itemsize(precision)
    merged = 0.0 if lora is None else lora.num_in_experts * kept
    is_sharded = lora is None or lora.quantization is None
    per_rank = num / mesh.weight_shards
    return FixedMemory(
        weights=(frozen / mesh.weight_shards if is_sharded else frozen) + per_rank * weight,
        gradients=per_rank * GRADIENT_BYTES,
        states=bytes_on_device(per_rank * states, offload=policy.optimizer.offload),
        copy=per_rank * copy + merged,
        all_states=per_rank * states,
    )


def _bytes_per_token(config: Any, policy: PolicyConfig, precision: str) -> float:
    kept = KEPT_PER_HIDDEN * config.hidden_size + KEPT_PER_INTERMEDIATE * feed_forward_width(config)
    return config.num_hidden_layers * KEPT_SHARE[policy.activation_checkpointing] * kept * _itemsize(precision)


def _head_bytes(config: Any, *, trains: bool) -> float:
    """Return the bytes of a chunk of logits, and of the gradient of a trained head in one row, in float32 until it is added."""
    return LOGITS_BYTES + (4 * config.vocab_size * config.hidden_size if trains else 0)


def _trains_head(model: Any, lora: LoraPlan | None) -> bool:
    """Whether the head is trained: without adapters, or by `policy.lora.modules_to_save`."""
    if lora is None:
        return True
    head, saved = model.get_output_embeddings(), lora.saved.parameters
    return head is not None and any(one is head.weight for name, one in model.named_parameters() if name in saved)


def _itemsize(precision: str) -> int:
    return 2 if precision == "bfloat16" else 4


def _recurrent_bytes_per_token(config: Any, policy: PolicyConfig, precision: str, device: torch.device) -> float:
    """Return the bytes per token that recurrent layers keep in packs, besides those that every layer keeps."""
    architecture = architecture_of(config)
    if architecture.scan is None or policy.packing.mode == "none":
        return 0.0
    num = sum(one in ("recurrent", "both") for one in architecture.layers or ())
    keeping = KEPT_SHARE[policy.activation_checkpointing] * num
    return bytes_per_token(config.get_text_config(), device, precision, num_layers=keeping)


def out_of_memory_error(error: Exception, advice: str) -> OutOfMemoryError | None:
    """Return an OutOfMemoryError with this advice if `error` means that device or host ran out of memory; otherwise None."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if not known and "DefaultCPUAllocator: " not in str(error):  # "can't allocate", or "not enough memory"
        return None
    return OutOfMemoryError(f"{' '.join(str(error).split())} {advice}")

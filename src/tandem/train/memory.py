"""A model, its settings and its card in; how long rows are, and why, out, unless they cannot be."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.errors import MachineError, OutOfMemoryError
from tandem.model.files.source import ModelSource
from tandem.model.load import attention_kind, empty_model
from tandem.model.lora.layers import LoraPlan
from tandem.model.policy import Policy
from tandem.packing.batches import GlobalBatch
from tandem.packing.packer import BLOCK, DATASET_PACK, Packer, in_blocks, prepared_lengths, tokens_of_pairs
from tandem.train.adamw import state_bytes

GIB = 2**30
ON_A_CPU = 1024  # the tiny model gained a tenth over 512, and a twentieth more at 2,048, for twice the memory
LENGTHS = (65536, 32768, 16384, 8192, 4096, 2048)
# Rows twice as long gained 1 % at 1.5 billion weights, for half as much memory again (docs/benchmarks.md).
LONG = 16384
# But a row of a small model is over before the host has asked for the next: so many tokens times weights keep a GPU busy that
# long. Of 1.5 billion weights it waited at 4,096 tokens a row, and hardly at 8,192 (docs/benchmarks.md).
BUSY = 12e12
# Of the card: the rest is for what no estimate knows.
USED = 0.85
# Numbers that a layer keeps for its backward, as multiples of its hidden and its intermediate size; fitted to what runs of
# three models' shapes took. The share of them that is kept when activations are computed again.
OF_HIDDEN, OF_INTERMEDIATE = 8.0, 3.2
KEPT = {"none": 1.0, "selective": 0.45, "full": 0.1}
# Bytes of a dense mask's entries: as it is made, and as attention adds it to its scores.
FLAG, NUMBER = 1, 4
LOGITS = 2 * GIB  # of the head's chunk, and what comes and goes beside it
# What comes and goes is an estimate: a run is not refused for more of it than this share, which it surely takes.
SURELY = 0.6


@dataclass(frozen=True, slots=True)
class RowLength:
    """Tokens of a row that a run would choose by itself, and the reason in words."""

    tokens: int
    reason: str
    shortest: int = 0  # rows below it hold a batch whole


@dataclass(frozen=True, slots=True)
class Need:
    """What a run is expected to take of each worker's memory, in bytes, by what is known before weights load."""

    num_weights: int  # of the model
    fixed: float  # weights, gradients, optimizer states, and the copy of the weights that is computed with
    per_token: float
    head: float = LOGITS

    def passing(self, tokens: int) -> float:
        """What comes and goes with so many tokens at a time."""
        return self.head + tokens * self.per_token


def expected_need(
    source: ModelSource,
    policy: PolicyConfig,
    lora: LoraPlan | None,
    precision: str,
    num_ranks: int,
    device: torch.device,
) -> Need:
    num = sum(parameter.numel() for parameter in empty_model(source).parameters())
    per_token = _bytes_per_token(source.config.get_text_config(), policy, precision)
    head = LOGITS if device.type == "cuda" else 0  # a CPU's chunks are small
    return Need(num, _fixed_bytes(num, policy, lora, precision, num_ranks), per_token, head)


def usual_row(need: Need, policy: PolicyConfig, device: torch.device, memory: int | None = None) -> RowLength:
    """On a GPU the longest row that is expected to fit. `memory`: of the smallest device of all ranks; None: of this one."""
    if policy.packing.mode == "dataset":
        return RowLength(DATASET_PACK, "usual for a set packed once")
    if device.type != "cuda":
        return RowLength(ON_A_CPU, "usual on a CPU")
    room, together = memory or device_memory(device), policy.packing.packs_per_micro_batch
    busy = BUSY / need.num_weights / together
    useful = [length for length in LENGTHS if length < 2 * max(LONG, busy)]
    fits = (length for length in useful if need.fixed + need.passing(length * together) <= USED * room)
    fitting = next(fits, LENGTHS[-1])
    longer = "longer ones gain little" if fitting == useful[0] else "longer ones would not fit"
    expected = need.fixed + need.passing(fitting * together)
    return RowLength(
        fitting,
        f"expected to take {expected / GIB:.0f} of {room / GIB:.0f} GiB; {longer}",
        min(fitting, int(busy)),
    )


def refuse_what_is_too_large(
    need: Need,
    packer: Packer,
    batch: GlobalBatch,
    policy: PolicyConfig,
    device: torch.device,
    memory: int | None = None,
) -> None:
    """Before weights load, where that is sure; else a rehearsal decides, which measures (train/memory.py)."""
    room, whose = memory or device_memory(device), "a GPU" if device.type == "cuda" else "a machine"
    bins = packer.bins(batch.preferences, batch.bounds)
    length = packer.longest_row(bins)
    together = min(packer.packs_per_micro_batch, -(-len(bins) // packer.share.num_ranks))
    passing = need.passing(length * together)
    if need.fixed + SURELY * passing > room:
        raise OutOfMemoryError(
            f"the run needs about {(need.fixed + passing) / GIB:.0f} GiB of {whose} that has {room / GIB:.0f}: weights, "
            f"gradients and optimizer states {need.fixed / GIB:.0f}, activations in rows of {length:,} tokens "
            f"{passing / GIB:.0f}. {what_to_lower(length, policy, shorter_rows_help=need.fixed < USED * room)}"
        )


def what_to_lower(length: int, policy: PolicyConfig, *, shorter_rows_help: bool) -> str:
    """The ways out that are still open, the cheapest first that may be enough. `length`: of the longest rows."""
    rows = policy.packing.packs_per_micro_batch
    of_rows = [
        f"policy.packing.packs_per_micro_batch={rows // 2}" if rows > 1 else "",
        f"policy.packing.pack_length below {length} (rows may be as short as the longest preference)"
        if policy.packing.mode != "none"
        else "a lower policy.max_total_sequence_length",
        "policy.activation_checkpointing=selective" if policy.activation_checkpointing == "none" else "",
        "policy.activation_checkpointing=full" if policy.activation_checkpointing == "selective" else "",
    ]
    of_weights = [
        "policy.optimizer.state_dtype=int8" if policy.optimizer.state_dtype != "int8" else "",
        "policy.weights=bfloat16_stochastic" if policy.weights == "float32" and not policy.lora.enabled else "",
        "policy.lora.enabled=true" if not policy.lora.enabled else "",
    ]
    ways = [*of_rows, *of_weights] if shorter_rows_help else [*of_weights, "more GPUs", *of_rows]
    first, *others = [way for way in ways if way]
    return f"To need less, try {first}" + (f"; then {', '.join(others)}." if others else ".")


def why(packer: Packer, policy: PolicyConfig, usual: RowLength) -> str:
    """The rows of a run, and why they are as long as they are."""
    rows = f"{packer.length:,} tokens"
    longest = int(packer.sizes.max())
    if policy.packing.mode == "none":
        return f"one sequence each, padded to at most {packer.length:,} tokens"
    if policy.packing.pack_length != "auto":
        rounded = packer.length != policy.packing.pack_length
        return f"{rows} ({policy.packing.pack_length:,} in whole blocks of {BLOCK})" if rounded else rows
    if policy.packing.mode == "dataset" and prepared_lengths(packer.store):
        return f"{rows} (auto: the longest packs that were prepared)"
    if packer.length == in_blocks(usual.tokens):
        return f"{rows} (auto: {usual.reason})"
    if packer.length == in_blocks(longest):
        return f"{rows} (auto: the longest preference takes {longest:,})"
    return f"{rows} (auto: so that batches of {policy.train_global_batch_size} pairs fill their rows)"


def much_filler(packer: Packer, policy: PolicyConfig) -> str | None:
    """Told where a length was given that a batch does not fill by half, even in the shortest rows beside it."""
    shortest = packer.lengths[0]
    pairs = policy.train_global_batch_size / packer.share.num_ranks
    tokens = int(tokens_of_pairs(pairs, packer.sizes, packer.store))
    if policy.packing.mode != "batch" or policy.packing.pack_length == "auto" or 2 * tokens > shortest:
        return None
    whose = "a batch" if packer.share.num_ranks == 1 else "a worker's part of a batch"
    return (
        f"policy.packing.pack_length = {policy.packing.pack_length}: {whose} has about {tokens:,} tokens, and the shortest rows "
        f"beside that length {shortest:,}: {1 - tokens / shortest:.0%} of what is computed is filler. auto takes shorter ones."
    )


def refuse_large_masks(
    length: int, tree: int, policy: PolicyConfig, device: torch.device, memory: int | None = None
) -> None:
    """Where attention takes masks, of flags and then of numbers, what cannot fit is not begun. length: of a row; tree: the
    largest in it."""
    kind = attention_kind(policy, device)
    if policy.packing.mode == "none" or kind not in ("sdpa", "trees"):
        return
    tokens = policy.packing.packs_per_micro_batch * length
    needed = tokens * length * (FLAG + NUMBER) if kind == "sdpa" else tokens * tree * FLAG + tree**2 * NUMBER
    room = memory or device_memory(device)
    if needed > room:
        cause = "policy.attention=sdpa" if device.type == "cuda" else "policy.compile=true on a CPU"
        where = f"where attention is dense ({cause})" if kind == "sdpa" else f"for preferences of up to {tree:,}"
        raise MachineError(
            f"policy.packing.pack_length = {policy.packing.pack_length}: rows of {length:,} tokens need a mask of "
            f"{needed / GIB:.1f} GiB {where}, and there are {room / GIB:.1f}. "
            "Lower it, or policy.max_total_sequence_length where a single preference is so long."
        )


def device_memory(device: torch.device) -> int:
    """All of the device's, in bytes: of a CPU, the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _fixed_bytes(num: int, policy: PolicyConfig, lora: LoraPlan | None, precision: str, num_ranks: int) -> float:
    """Of so many weights. Ranks share them all, but for quantised ones, which each holds whole."""
    states = 2 * state_bytes(policy.optimizer.state_dtype)
    # Several workers gather a layer at a time, and keep no copy of them all.
    copy = 2 if policy.weights == "float32" and precision == "bfloat16" and num_ranks == 1 else 0
    if lora is not None:
        frozen = {"nf4": 0.6, "int8": 1.1, None: float(lora.dtype.itemsize)}[lora.quantization] * lora.num_frozen
        trained = lora.num_trained * (8 + copy + states)
        return frozen + trained / num_ranks if lora.quantization else (frozen + trained) / num_ranks
    weights = (4 if policy.weights == "float32" else 2) + 4  # gradients add up in float32
    return num * (weights + copy + states) / num_ranks


def _bytes_per_token(config: Any, policy: PolicyConfig, precision: str) -> float:
    hidden = config.hidden_size
    chosen = getattr(config, "num_experts_per_tok", None)
    wide = getattr(config, "moe_intermediate_size", None) if chosen else None
    wide = wide * chosen if wide else (getattr(config, "intermediate_size", None) or 4 * hidden)
    wide = sum(wide) / len(wide) if isinstance(wide, list) else wide  # Gemma 3n: a size per layer
    numbers = KEPT[policy.activation_checkpointing] * (OF_HIDDEN * hidden + OF_INTERMEDIATE * wide)
    return config.num_hidden_layers * numbers * (2 if precision == "bfloat16" else 4)


# AdamW keeps two moments of every trained number.
MOMENTS = 2


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes on this worker's device."""

    weights: int
    gradients: int
    states: int  # the optimizer's
    activations: int  # of the longest micro-batch, with everything else that comes and goes
    length: int  # tokens of its rows

    @property
    def fixed(self) -> int:
        """Without the copy of the weights that is computed with: it is measured with the activations."""
        return self.weights + self.gradients + self.states

    @property
    def total(self) -> int:
        return self.fixed + self.activations

    def __str__(self) -> str:
        return (
            f"weights {_gib(self.weights)}, gradients {_gib(self.gradients)}, optimizer states {_gib(self.states)}, "
            f"activations in rows of {self.length:,} tokens {_gib(self.activations)}: {_gib(self.total)} GiB"
        )


def forecast(policy: Policy, peak: int, length: int, *, state_bytes: float) -> Forecast:
    """From the peak of forward and backward beside gradients that are there already; the optimizer's states come later.

    `state_bytes`: of each number of a moment.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    weights = sum(_bytes(parameter) for parameter in policy.parameters())
    gradients = sum(torch.float32.itemsize * _local(parameter).numel() for parameter in trained)
    states = int(sum(MOMENTS * state_bytes * _local(parameter).numel() for parameter in trained))
    return Forecast(weights, gradients, states, max(0, peak - weights - gradients), length)


def refuse_what_cannot_fit(expected: Forecast, device: torch.device, policy: PolicyConfig) -> None:
    """Before the first step, rather than in it."""
    room = torch.cuda.get_device_properties(device).total_memory
    if expected.total > room:
        raise OutOfMemoryError(
            f"the run needs {_gib(expected.total)} GiB of a GPU that has {_gib(room)}: {expected}. "
            f"{what_to_lower(expected.length, policy, shorter_rows_help=expected.fixed < USED * room)}"
        )


def out_of_memory(error: Exception, length: int, policy: PolicyConfig) -> OutOfMemoryError | None:
    """What to tell the user if the device, or the host, had no room left; None for any other error."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if not known and "DefaultCPUAllocator: " not in str(error):  # "can't allocate", or "not enough memory"
        return None
    return OutOfMemoryError(f"{' '.join(str(error).split())} {what_to_lower(length, policy, shorter_rows_help=True)}")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _local(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _bytes(parameter: nn.Parameter) -> int:
    local = _local(parameter)
    return local.numel() * local.element_size()

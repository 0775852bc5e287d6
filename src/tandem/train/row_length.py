"""A model, its settings and its card in; how long rows are, and why, out, unless they cannot be."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from tandem.config.policy import Policy as PolicyConfig
from tandem.errors import ConfigError
from tandem.model.load import attention_kind, empty_model
from tandem.model.lora import LoraPlan
from tandem.model.source import ModelSource
from tandem.packing.packer import USUAL_PACK, Packer, in_blocks, prepared_lengths
from tandem.train.adamw import state_bytes

GIB = 2**30
LENGTHS = (65536, 32768, 16384, 8192, 4096, 2048)
# Longer rows than this were not faster at 1.5 billion weights, and a batch fills them worse (docs/benchmarks.md).
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


@dataclass(frozen=True, slots=True)
class RowLength:
    """Tokens of a row that a run would choose by itself, and the reason in words."""

    tokens: int
    reason: str
    shortest: int = 0  # rows below it hold a batch whole


def usual_row(
    source: ModelSource, policy: PolicyConfig, lora: LoraPlan | None, precision: str, device: torch.device
) -> RowLength:
    """On a GPU the longest row that is expected to fit. A set packed once is packed alike wherever it is trained on."""
    usual = USUAL_PACK[device.type]
    if device.type != "cuda" or policy.packing.mode == "dataset":
        return RowLength(usual, f"usual on {'a GPU' if device.type == 'cuda' else 'a CPU, where attention is dense'}")
    num = sum(parameter.numel() for parameter in empty_model(source).parameters())
    together = policy.packing.packs_per_micro_batch
    room = USED * torch.cuda.get_device_properties(device).total_memory
    fixed = _fixed_bytes(num, policy, lora, precision)
    each = _bytes_per_token(source.config.get_text_config(), policy, precision) * together
    busy = BUSY / num / together
    useful = [length for length in LENGTHS if length < 2 * max(LONG, busy)]
    fitting = next((length for length in useful if fixed + length * each <= room), LENGTHS[-1])
    longer = "no longer ones are faster" if fitting == useful[0] else "longer ones would not fit"
    return RowLength(
        fitting,
        f"expected to take {(fixed + fitting * each) / GIB:.0f} of {room / USED / GIB:.0f} GiB; {longer}",
        min(fitting, int(busy)),
    )


def why(packer: Packer, policy: PolicyConfig, usual: RowLength) -> str:
    """The rows of a run, and why they are as long as they are."""
    rows = f"{packer.length:,} tokens"
    longest = int(packer.sizes.max())
    if policy.packing.mode == "none":
        return f"one sequence each, padded to at most {packer.length:,} tokens"
    if policy.packing.pack_length != "auto":
        return rows
    if policy.packing.mode == "dataset" and prepared_lengths(packer.store):
        return f"{rows} (auto: the longest packs that were prepared)"
    if packer.length == in_blocks(usual.tokens):
        return f"{rows} (auto: {usual.reason})"
    if packer.length == in_blocks(longest):
        return f"{rows} (auto: the longest preference takes {longest:,})"
    return f"{rows} (auto: for batches of {policy.train_global_batch_size} pairs)"


def refuse_dense_rows(length: int, policy: PolicyConfig, device: torch.device) -> None:
    """Where attention is dense, a mask over whole rows is built, of flags and then of numbers; one that cannot fit is not."""
    if policy.packing.mode == "none" or attention_kind(policy, device) != "sdpa":
        return
    needed = policy.packing.packs_per_micro_batch * length**2 * (FLAG + NUMBER)
    room = (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    if needed > room:
        dense = "policy.attention=sdpa" if device.type == "cuda" else "on a CPU"
        raise ConfigError(
            f"policy.packing.pack_length = {policy.packing.pack_length}: rows of {length:,} tokens need a mask of "
            f"{needed / GIB:.1f} GiB where attention is dense ({dense}), and there are {room / GIB:.1f}. "
            "Lower it, or policy.max_total_sequence_length where a single preference is so long."
        )


def _fixed_bytes(num: int, policy: PolicyConfig, lora: LoraPlan | None, precision: str) -> float:
    """Weights (so many), gradients, optimizer states, and the copy of the weights that is computed with."""
    states = 2 * state_bytes(policy.optimizer.state_dtype)
    if lora is not None:
        frozen = {"nf4": 0.6, "int8": 1.1, None: float(lora.dtype.itemsize)}[lora.quantization]
        return lora.num_frozen * frozen + lora.num_trained * (8 + 2 + states) + LOGITS
    weights = 8 if policy.weights == "float32" else 4
    copy = 2 if policy.weights == "float32" and precision == "bfloat16" else 0
    return num * (weights + copy + states) + LOGITS


def _bytes_per_token(config: Any, policy: PolicyConfig, precision: str) -> float:
    hidden = config.hidden_size
    chosen = getattr(config, "num_experts_per_tok", None)
    wide = getattr(config, "moe_intermediate_size", None) if chosen else None
    wide = wide * chosen if wide else (getattr(config, "intermediate_size", None) or 4 * hidden)
    numbers = KEPT[policy.activation_checkpointing] * (OF_HIDDEN * hidden + OF_INTERMEDIATE * wide)
    return config.num_hidden_layers * numbers * (2 if precision == "bfloat16" else 4)

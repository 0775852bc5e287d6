"""How the recurrent layers of a model will be computed in packs, and the memory that this takes. Used before weights load."""

from typing import Any

import torch

from tandem.model.recurrent.families import FAMILIES, state_sizes
from tandem.model.recurrent.kernels import Kernels, usable_kernels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Completions keep a copy of their prompt's state for the backward pass. This many tokens of a pack, prompts included, have one
# completion: 16,384 tokens of ordinary chats have about 90 (docs/memory.md).
TOKENS_PER_COMPLETION = 180
# Numbers that a scan keeps per token and head: copies of queries, keys and values in the order of the segments. Two were counted;
# the run of benchmarks/results/hybrids.jsonl needed a little more.
KEPT_COPIES = 2.2
# Torch operations need, in float32, matrices of a chunk of 64 tokens per head, and more copies (7 to 8 were counted). On a GPU
# they are recomputed: only one layer needs this memory at a time.
TORCH_MATRICES, TORCH_COPIES, CHUNK_TOKENS = 6.0, 8.0, 64


def expected_kernels(config: Any, device: torch.device, precision: str) -> Kernels:
    """Return the kernels for the recurrent layers of a model that can be packed. `config`: of the text model."""
    return usable_kernels(FAMILIES[config.model_type], state_sizes(config), device, DTYPES[precision])


def describe_recurrent_layers(config: Any, device: torch.device, precision: str, *, shares_prompts: bool) -> str:
    """Describe how recurrent layers are computed in packs.

    `config`: of the text model. `shares_prompts`: the completions in a row share their prompt (policy.packing.share_prompts).
    """
    if state_sizes(config) is None:
        return "convolutions within each sequence"
    kernels = expected_kernels(config, device, precision)
    forked = "each prompt once, its state copied for every completion"
    prompts = forked if shares_prompts else "each prompt again for every completion"
    if kernels.scan is not None:
        return f"{prompts}, by flash-linear-attention"
    reason = f", because {kernels.reason}" if device.type == "cuda" else ""
    return f"{prompts}, by torch operations{reason}"


def bytes_per_token(config: Any, device: torch.device, precision: str, *, num_layers: float) -> float:
    """Return the bytes per token that the scans of recurrent layers need in packs, besides what every layer needs.

    `config`: of the text model. `num_layers`: the number of recurrent layers that keep what they compute.
    """
    sizes = state_sizes(config)
    if sizes is None:
        return 0.0
    state = 4 * sizes.num_numbers / TOKENS_PER_COMPLETION
    numbers = sizes.heads * (2 * sizes.key_size + sizes.value_size)
    kept = state + KEPT_COPIES * numbers * DTYPES[precision].itemsize
    by_torch = 4 * (TORCH_MATRICES * sizes.heads * CHUNK_TOKENS + TORCH_COPIES * numbers)
    if device.type != "cuda":
        return num_layers * (state + by_torch)
    # Without a GPU here, the estimate is for another machine, which is expected to have the kernels.
    has_kernel = not torch.cuda.is_available() or expected_kernels(config, device, precision).scan is not None
    return num_layers * kept + (0.0 if has_kernel else by_torch)

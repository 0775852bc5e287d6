"""FlexAttention uses small blocks only where they were measured to be faster."""

import pytest
import torch
from models import tiny_model
from torch.torch_version import TorchVersion

from tandem.model.attention.pack_attention import SMALL_BLOCK, block_size
from tandem.packing.packer import BLOCK

CUDA = torch.device("cuda")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize(
    ("head_dim", "device", "bfloat16", "card", "version", "size"),
    [
        (128, CUDA, True, (9, 0), "2.11.0+cu130", SMALL_BLOCK),
        (128, CUDA, True, (9, 0), "2.13.1", SMALL_BLOCK),
        (128, CUDA, True, (9, 0), "2.14.0", BLOCK),
        (128, CUDA, True, (9, 0), "2.14.0.dev20261101", BLOCK),
        (128, CUDA, True, (8, 0), "2.11.0", BLOCK),
        (128, CUDA, False, (9, 0), "2.11.0", BLOCK),
        (64, CUDA, True, (9, 0), "2.11.0", SMALL_BLOCK),
        (96, CUDA, True, (9, 0), "2.11.0", BLOCK),
        (128, torch.device("cpu"), True, (9, 0), "2.11.0", BLOCK),
    ],
)
def test_blocks_are_small_only_where_that_was_measured_to_be_faster(
    architecture, head_dim, device, bfloat16, card, version, size, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    model = tiny_model(architecture, head_dim=head_dim)
    assert block_size(model, device, bfloat16=bfloat16) == size

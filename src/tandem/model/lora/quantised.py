"""Which weights policy.lora.quantization quantises, and how many bytes they then take."""

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

# nf4: half a byte, and a byte for the scale of every 64 weights. int8: a byte; there are few scales.
BYTES_PER_WEIGHT = {"nf4": 0.5 + 1 / 64, "int8": 1.0}


def quantised_layers(model: Any) -> dict[str, nn.Module]:
    """Return the layers that transformers quantises, by name: linear layers except the head.

    Embeddings, norms, and experts that are stored in one tensor keep their dtype.
    """
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and module is not head
    }

"""Linear layers with a DoRA adapter: an adapter whose weight's rows have trained lengths (lora/magnitudes.py)."""

from typing import Any

import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn

from tandem.model.lora.joined import joined_linear
from tandem.model.lora.magnitudes import ScaledRows, factors_of, row_lengths


class Magnitude(nn.Module):
    """The magnitudes of a layer, [outputs]. The parameter has the same name as in peft."""

    def __init__(self, magnitudes: Tensor):
        super().__init__()
        self.weight = nn.Parameter(magnitudes)


class DoraLinear(ScaledRows, Linear):
    """peft's linear layer with frozen weight and bias, an adapter, and magnitudes.

    With dropout, only what the adapter adds to the layer's output is computed from dropped inputs, as in peft.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        (name,) = self.active_adapters
        layer: Any = self.get_base_layer()
        down, up = (getattr(self, side)[name].weight for side in ("lora_A", "lora_B"))
        scale, dropout = self.scaling[name], self.lora_dropout[name]
        lengths = row_lengths(layer.weight, down, up, scale) if self.row_lengths is None else self.row_lengths
        factors = factors_of(self.lora_magnitude_vector[name].weight, lengths)  # type: ignore[arg-type]
        if isinstance(dropout, nn.Identity):
            out = joined_linear(x, layer.weight, None, down=down, up=up, scale=scale)
            out = (out * factors).to(out.dtype)
            return out if layer.bias is None else out + layer.bias
        dropped = dropout(x)
        added = F.linear(F.linear(dropped, down), up) * (scale * factors)
        added = added + F.linear(dropped, layer.weight) * (factors - 1)
        return layer(x) + added.to(x.dtype)


def add_magnitudes(model: nn.Module, adapter: str) -> None:
    """Make every adapted layer a DoraLinear. The magnitudes have no values yet."""
    for module in model.modules():
        if isinstance(module, Linear):
            assert type(module) is Linear and isinstance(module.get_base_layer(), nn.Linear), type(module)
            up: Any = module.lora_B[adapter].weight
            module.lora_magnitude_vector[adapter] = Magnitude(up.detach().new_ones(len(up)))
            module.__class__ = DoraLinear

"""The sizes of a model's layers, which determine how much its ranks gather and exchange."""

from dataclasses import dataclass, replace
from typing import Any

from tandem.model.architecture import decoder_layers, has_layer_list
from tandem.model.files.layer_values import values_of


@dataclass(frozen=True, slots=True)
class Layers:
    """The sizes of a model that determine how much its ranks exchange."""

    num_layers: int
    weights_per_layer: float
    other_weights: int  # embeddings, head and the last norm
    num_heads: int
    num_key_heads: int
    head_dim: int

    @property
    def num_weights(self) -> float:
        return self.num_layers * self.weights_per_layer + self.other_weights

    def quantised(self) -> "Layers":
        """Return the sizes of what ranks exchange if layers are quantised and frozen: each rank holds all of those weights."""
        return replace(self, weights_per_layer=0.0)

    def gathered_bytes(self, itemsize: int, *, keeps_gathered: bool, num_trained: float) -> float:
        """Return the bytes that a rank of several needs for weights that it gathers, and for gradients before they are divided.

        Two layers are gathered at a time, one of them in advance, and all weights outside of layers; with `keeps_gathered`, all
        weights. Of one layer and of the head, the gradients are there in full, also in float32.
        `itemsize`: of a gathered weight. `num_trained`: weights with gradients.
        """
        layers = self.num_layers if keeps_gathered else min(2, self.num_layers)
        weights = itemsize * (layers * self.weights_per_layer + self.other_weights)
        trained = num_trained / self.num_weights
        gradients = (itemsize + 4) * (self.weights_per_layer + self.other_weights)
        return weights + trained * gradients


def layers_of(model: Any) -> Layers:
    """Return the sizes of a model. `model`: built without weights."""
    text = model.config.get_text_config()
    layers = decoder_layers(model) if has_layer_list(model) else [model]
    in_layers = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    heads = max(values_of(text, "num_attention_heads"), default=1)
    return Layers(
        num_layers=len(layers),
        weights_per_layer=in_layers / len(layers),
        other_weights=total - in_layers,
        num_heads=heads,
        num_key_heads=max(values_of(text, "num_key_value_heads"), default=heads),
        head_dim=max(values_of(text, "head_dim"), default=text.hidden_size // heads),
    )

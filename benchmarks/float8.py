"""An experiment: matrix products in float8, by torchao."""

from typing import Any

import torch


def compute_in_float8(model: Any, recipe: str) -> None:
    """Those of the layers, where both sides are multiples of 16; the head stays as it is."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    def fits(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and not (module.in_features % 16 or module.out_features % 16)

    config = Float8LinearConfig.from_recipe_name(recipe)
    for layer in model.base_model.layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=fits)

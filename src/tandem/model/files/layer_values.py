"""Values in a model's configuration that may differ from layer to layer."""

from typing import Any


def values_of(config: Any, name: str) -> list[Any]:
    """Return the values of a setting: one, or one per layer if the layers differ. None and 0 are left out.

    Some configurations have a list for the layers. Others refuse to give a value that differs: in Gemma 4, `head_dim` is 256 in
    layers with a window and 512 in the others. `config`: the configuration of the text model.
    """
    if name in different_settings(config):
        found = [getattr(layer, name, None) for layer in config.per_layer_config]
    else:
        value = getattr(config, name, None)
        found = list(value) if isinstance(value, list | tuple) else [value]
    return [one for one in found if one]


def different_settings(config: Any) -> set[str]:
    """Return the names of the settings that differ from layer to layer. Older versions of transformers have no such attribute."""
    return set(getattr(config, "per_layer_attributes", None) or ())

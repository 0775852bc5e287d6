"""Settings from the declarations of losses, for tests that run over all losses."""

from tandem.loss.losses import LOSSES


def needed_settings(name: str) -> dict[str, float]:
    """The settings in section dpo that a loss requires, with example values."""
    return {bounds.key: bounds.example for bounds in LOSSES[name].bounds if bounds.example is not None}

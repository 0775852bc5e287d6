"""What the declaration of a loss says about its settings, for tests that run over all losses."""

from tandem.loss.losses import LOSSES


def needed_settings(name: str) -> dict[str, float]:
    """The settings of section dpo without which a loss is refused."""
    return {bounds.key: bounds.example for bounds in LOSSES[name].bounds if bounds.example is not None}

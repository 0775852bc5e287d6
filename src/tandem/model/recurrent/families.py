"""The model types whose recurrent layers can be packed, and the sizes of their states. Does not import torch."""

from dataclasses import dataclass
from typing import Any, Literal

# What a recurrent layer computes along a row, besides its short convolution:
#   gated_delta  the gated delta rule: a matrix per head that decays by one number per token
#   kimi_delta   the same with one decay per row of the matrix (Kimi Delta Attention)
#   mamba2       the state space of Mamba-2
#   convolution  nothing: the layer is a short convolution
Scan = Literal["gated_delta", "kimi_delta", "mamba2", "convolution"]

# By the type of the text model. Recurrent layers of every other type are refused in packs.
FAMILIES: dict[str, Scan] = {
    "bailing_hybrid": "kimi_delta",
    "bamba": "mamba2",
    "falcon_h1": "mamba2",
    "granitemoehybrid": "mamba2",
    "kimi_linear": "kimi_delta",
    "lfm2": "convolution",
    "lfm2_moe": "convolution",
    "lfm3": "convolution",
    "nemotron_h": "mamba2",
    "olmo_hybrid": "gated_delta",
    "qwen3_5_moe_text": "gated_delta",
    "qwen3_5_text": "gated_delta",
    "qwen3_next": "gated_delta",
    "zamba2": "mamba2",
}
# The first version of transformers whose layers pass the pack on to the functions that are replaced.
FIRST_TRANSFORMERS = {"lfm2": "5.22", "lfm2_moe": "5.22", "lfm3": "5.22"}

# Names of the same number in the configurations of different types.
HEADS = ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "linear_num_heads")
KEY_HEADS = ("linear_num_key_heads", "mamba_n_groups", "mamba_ngroups", "n_groups", "linear_num_heads")
KEY_SIZES = ("linear_key_head_dim", "mamba_d_state", "ssm_state_size", "linear_head_dim")
VALUE_SIZES = ("linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_headdim", "linear_head_dim")


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The state of a recurrent layer: a matrix of key_size x value_size numbers per head."""

    heads: int
    key_heads: int  # heads are divided into this many groups, which share queries and keys (in Mamba-2: C and B)
    key_size: int
    value_size: int

    @property
    def num_numbers(self) -> int:
        return self.heads * self.key_size * self.value_size

    @property
    def channels(self) -> int:
        """The channels of the convolution before the scan: those of queries, keys and values (in Mamba-2: C, B and x)."""
        return 2 * self.key_heads * self.key_size + self.heads * self.value_size


def state_sizes(config: Any) -> StateSizes | None:
    """Return the sizes of the states in a model's recurrent layers. None: they have no state, or none that can be packed.

    `config`: the configuration of the text model.
    """
    if FAMILIES.get(config.model_type, "convolution") == "convolution":
        return None
    return StateSizes(*(_first(config, names) for names in (HEADS, KEY_HEADS, KEY_SIZES, VALUE_SIZES)))


def _first(config: Any, names: tuple[str, ...]) -> int:
    return next(value for name in names if isinstance(value := getattr(config, name, None), int))

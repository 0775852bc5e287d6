"""f-divergences: log-ratios in; what stands for them when policy and reference are held together by another divergence.

With u = pi / ref and r = log u each is f'(u) up to a constant, chosen so that it is 0 at r = 0: arXiv:2309.16240.
The paper writes f'(u) = (1 - u^-alpha) / alpha: its alpha is 1 - a here.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Beyond it an exponential goes on as its tangent: it still rises, and its square is still finite in float32.
LARGEST_EXPONENT = 30.0


def diverged(ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """reverse_kl: r; forward_kl: 1 - exp(-r); js: log 2 + log s(r); alpha: (exp((a - 1) r) - 1) / (a - 1)."""
    if divergence == "js":
        return math.log(2) + F.logsigmoid(ratio)
    order = {"reverse_kl": 1.0, "forward_kl": 0.0, "alpha": alpha}[divergence]
    if order == 1.0:
        return ratio
    return _expm1((order - 1) * ratio) / (order - 1)


def divergence_slope(ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """The derivative of `diverged` with respect to the log-ratio."""
    if divergence == "js":
        return torch.sigmoid(-ratio)
    order = {"reverse_kl": 1.0, "forward_kl": 0.0, "alpha": alpha}[divergence]
    if order == 1.0:
        return torch.ones_like(ratio)
    return ((order - 1) * ratio).clamp(max=LARGEST_EXPONENT).exp()


def _expm1(exponent: Tensor) -> Tensor:
    beyond = F.relu(exponent - LARGEST_EXPONENT)
    return torch.expm1(exponent.clamp(max=LARGEST_EXPONENT)) + math.exp(LARGEST_EXPONENT) * beyond

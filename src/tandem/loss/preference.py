"""Preference losses: PairRatios in, one loss per pair out. Pure functions, and the table of their names."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from tandem.loss.pairs import PairRatios


def dpo(pair: PairRatios, *, beta: float) -> Tensor:
    """-log sigmoid(beta * margin), Eq. 7 of arXiv:2305.18290."""
    return -F.logsigmoid(beta * pair.margin)


PREFERENCE_LOSSES: dict[str, Callable[..., Tensor]] = {"dpo": dpo, "sigmoid": dpo}

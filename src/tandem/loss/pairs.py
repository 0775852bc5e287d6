"""What a preference loss reads, pair by pair."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sides:
    """One number for each completion of each pair."""

    chosen: Tensor  # [pairs]
    rejected: Tensor  # [pairs]

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected

    def __sub__(self, other: "Sides") -> "Sides":
        return Sides(self.chosen - other.chosen, self.rejected - other.rejected)

    def __truediv__(self, other: "Sides") -> "Sides":
        return Sides(self.chosen / other.chosen, self.rejected / other.rejected)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Sides":
        return Sides(function(self.chosen), function(self.rejected))


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which completions form the pairs, and which is the best of each preference: indices into the completions."""

    winners: Tensor  # [pairs]
    losers: Tensor  # [pairs]
    best: Tensor  # [preferences]

    def sides(self, values: Tensor) -> Sides:
        """A number per completion, seen from the pairs."""
        return Sides(values[self.winners], values[self.losers])


@dataclass(frozen=True, slots=True)
class Pairs:
    """All that any preference loss reads.

    Log-probabilities are sums over tokens, or means where averaging is on, tokens weighted as LD-DPO asks.
    """

    policy: Sides  # log pi
    reference: Sides  # log ref; zeros without a reference
    ratios: Sides  # r = log pi - log ref, or what the f-divergence makes of it
    num_tokens: Sides  # completion lengths
    scores: Sides  # given in the data; NaN where there are none

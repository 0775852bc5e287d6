"""What a preference loss reads, pair by pair."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PairRatios:
    """log pi - log ref of both completions of each pair: summed over tokens, or their mean where averaging is on."""

    chosen: Tensor  # [pairs] r_c
    rejected: Tensor  # [pairs] r_r

    @property
    def margin(self) -> Tensor:
        """d = r_c - r_r."""
        return self.chosen - self.rejected

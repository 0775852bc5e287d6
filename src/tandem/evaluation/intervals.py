"""Means with 95 % confidence intervals. Pairs of one prompt are not independent, so variances are computed by prompt."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

Z = 1.959964  # of a two-sided interval of 95 %


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % confidence interval. With a single prompt, a mean of unbounded values has no interval."""

    value: float
    low: float | None
    high: float | None


def mean_estimate(values: FloatArray, prompts: IntArray) -> Estimate:
    """The mean with a normal interval. values [pairs]; prompts [pairs]: which prompt each pair belongs to."""
    value = float(values.mean())
    variance = variance_of_mean(values, prompts)
    if variance is None:
        return Estimate(value, None, None)
    half = Z * math.sqrt(variance)
    return Estimate(value, value - half, value + half)


def share_estimate(values: FloatArray, prompts: IntArray) -> Estimate:
    """The mean of values in [0, 1] with Wilson's interval for the effective number of independent pairs.

    That number is p(1 - p) / variance of the mean, at most the number of pairs. If all values are equal the variance says
    nothing, and it is the number of prompts.
    """
    share, variance = float(values.mean()), variance_of_mean(values, prompts)
    count = min(len(values), share * (1 - share) / variance) if variance else len(np.unique(prompts))
    centre = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    # At 0 and 1 the interval ends there, but for rounding.
    low, high = 0.0 if share == 0 else centre - half, 1.0 if share == 1 else centre + half
    return Estimate(share, max(0.0, low), min(1.0, high))


def difference_estimate(differences: FloatArray, prompts: IntArray) -> Estimate:
    """The mean difference of two accuracies on the same pairs, each difference in [-1, 1].

    Bonett and Price's interval for paired shares, by prompt: one prompt that each side wins is added before a normal interval is
    taken, so that no interval is empty. The value is the mean without them.
    """
    new = int(prompts.max()) + 1
    padded = np.concatenate([differences, [1.0, -1.0]])
    around = mean_estimate(padded, np.concatenate([prompts, [new, new + 1]]))
    assert around.low is not None and around.high is not None
    return Estimate(float(differences.mean()), max(-1.0, around.low), min(1.0, around.high))


def variance_of_mean(values: FloatArray, prompts: IntArray) -> float | None:
    """The variance of the mean if prompts were drawn again, each with all of its pairs; None with a single prompt.

    It is the sum over prompts of the squared sum of residuals, over the squared number of pairs. Values 1 1 0 of prompts
    0 0 1: residuals 1/3 1/3 -2/3, sums by prompt 2/3 and -2/3, variance 2/1 * (4/9 + 4/9) / 9.
    """
    _, prompt = np.unique(prompts, return_inverse=True)
    count = int(prompt.max()) + 1
    if count < 2:
        return None
    sums = np.bincount(prompt, values - values.mean())
    return float(count / (count - 1) * np.square(sums).sum() / len(values) ** 2)


def exact_sign_test(wins: int, losses: int) -> float:
    """The two-sided p-value of the exact McNemar test: how likely so uneven a split is if both sides win equally often."""
    trials, fewer = wins + losses, min(wins, losses)
    if trials == 0 or wins == losses:
        return 1.0
    log_half = trials * math.log(0.5)
    tail = math.fsum(math.exp(_log_choose(trials, k) + log_half) for k in range(fewer + 1))
    return min(1.0, 2 * tail)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

"""Sizes in; bins out: lists of indices whose sizes fit a capacity together."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def first_fit_decreasing(sizes: Sequence[int] | NDArray[np.integer], capacity: int) -> list[list[int]]:
    """Largest first, each into the first bin with room. Ties keep their order, so the result is reproducible.

    sizes [3, 7, 5, 4], capacity 10 -> [[1, 0], [2, 3]]
    """
    sizes = np.asarray(sizes)
    if len(sizes) and sizes.max() > capacity:
        raise ValueError(f"a size of {sizes.max()} does not fit a bin of {capacity}")
    order = np.argsort(-sizes, kind="stable")
    room = np.full(len(sizes), capacity)
    bins: list[list[int]] = []
    for index in order.tolist():
        # One bin beyond the opened ones is always empty, so argmax always finds room.
        target = int(np.argmax(room[: len(bins) + 1] >= sizes[index]))
        if target == len(bins):
            bins.append([])
        bins[target].append(index)
        room[target] -= sizes[index]
    return bins


ALGORITHMS = {"first_fit_decreasing": first_fit_decreasing}

"""What the head does with a chunk of logits, as one pass over the GPU's memory each. model/head.py says what is computed."""

import torch
import triton  # type: ignore[import-not-found] - comes with torch where there is a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

# Logits a program reads at a time. One program takes a whole row of the forward, a piece of a row of the backward.
BLOCK = 8192
WARPS = 16


@triton.jit
def _ruled(logits, scale, softcap, CAPPED: tl.constexpr):
    """The model's own rule over logits, and tanh(logits / cap), which the derivative of a soft-cap needs."""
    logits = logits.to(tl.float32) * scale
    capped = logits
    if CAPPED:
        capped = 2 * tl.sigmoid(2 * logits / softcap) - 1
        logits = softcap * capped
    return logits, capped


@triton.jit
def _score(
    logits, targets, logps, normalisers, log_squares, vocabulary, scale, softcap,
    CAPPED: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    highest = -float("inf")
    total = 0.0
    squares = 0.0
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        values, _ = _ruled(tl.load(logits + columns, mask=inside, other=0.0), scale, softcap, CAPPED)
        values = tl.where(inside, values, -float("inf"))
        higher = tl.maximum(highest, tl.max(values, 0))
        fade = tl.exp(highest - higher)
        powers = tl.exp(values - higher)
        total = total * fade + tl.sum(powers, 0)
        if SQUARES:
            squares = squares * fade * fade + tl.sum(powers * powers, 0)
        highest = higher
    normaliser = highest + tl.log(total)
    at_target, _ = _ruled(tl.load(logits + tl.load(targets + row)), scale, softcap, CAPPED)
    tl.store(normalisers + row, normaliser)
    tl.store(logps + row, at_target - normaliser)
    if SQUARES:
        tl.store(log_squares + row, 2 * highest + tl.log(squares) - 2 * normaliser)


@triton.jit
def _slope(
    logits, slopes, targets, normalisers, grads, vocabulary, scale, softcap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = row * vocabulary + columns
    inside = columns < vocabulary
    values, capped = _ruled(tl.load(logits + places, mask=inside, other=0.0), scale, softcap, CAPPED)
    hit = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    slope = (hit - tl.exp(values - tl.load(normalisers + row))) * tl.load(grads + row) * scale
    if CAPPED:
        slope *= 1 - capped * capped
    tl.store(slopes + places, slope.to(slopes.dtype.element_ty), mask=inside)


def score_rows(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, *, squares: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """[tokens, vocabulary] in; log-probability of the target, log-sum-exp and, asked for, log sum p^2 of each out."""
    logps, normalisers = (torch.empty(len(logits), device=logits.device) for _ in range(2))
    log_squares = torch.empty_like(logps) if squares else None
    _score[(len(logits),)](  # type: ignore[index]
        logits, targets, logps, normalisers, log_squares, logits.shape[1], scale, softcap or 1.0,
        CAPPED=softcap is not None, SQUARES=squares, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return logps, normalisers, log_squares


def slope_rows(
    logits: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    grads: Tensor,
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient that reaches logits from `grads` of the log-probabilities. In their own dtype it takes their memory."""
    slopes = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    _slope[(len(logits), triton.cdiv(logits.shape[1], BLOCK))](  # type: ignore[index]
        logits, slopes, targets, normalisers, grads.contiguous(), logits.shape[1], scale, softcap or 1.0,
        CAPPED=softcap is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return slopes

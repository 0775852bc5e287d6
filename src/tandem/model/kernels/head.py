"""GPU kernels for `_target_logps` and `_grad_logits` of model/head.py. Each kernel reads the logits of a chunk once."""

import torch
import triton  # type: ignore[import-not-found] - comes with torch where there is a GPU
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

# Logits that a program reads at a time. In the forward one program handles a row, in the backward one block of a row.
LOGITS_PER_BLOCK = 8192
WARPS = 16


@triton.jit
def _apply_rule(logits, scale, softcap, CAPPED: tl.constexpr):
    """Return the scaled and capped logits, and tanh(logits / cap), which the derivative of a soft-cap needs."""
    logits = logits.to(tl.float32) * scale
    capped = logits
    if CAPPED:
        capped = 2 * tl.sigmoid(2 * logits / softcap) - 1
        logits = softcap * capped
    return logits, capped


@triton.jit
def _target_logps(
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
        values, _ = _apply_rule(tl.load(logits + columns, mask=inside, other=0.0), scale, softcap, CAPPED)
        values = tl.where(inside, values, -float("inf"))
        higher = tl.maximum(highest, tl.max(values, 0))
        fade = tl.exp(highest - higher)
        powers = tl.exp(values - higher)
        total = total * fade + tl.sum(powers, 0)
        if SQUARES:
            squares = squares * fade * fade + tl.sum(powers * powers, 0)
        highest = higher
    normaliser = highest + tl.log(total)
    at_target, _ = _apply_rule(tl.load(logits + tl.load(targets + row)), scale, softcap, CAPPED)
    tl.store(normalisers + row, normaliser)
    tl.store(logps + row, at_target - normaliser)
    if SQUARES:
        tl.store(log_squares + row, 2 * highest + tl.log(squares) - 2 * normaliser)


@triton.jit
def _grad_logits(
    logits, slopes, targets, normalisers, grads, vocabulary, scale, softcap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    places = row * vocabulary + columns
    inside = columns < vocabulary
    values, capped = _apply_rule(tl.load(logits + places, mask=inside, other=0.0), scale, softcap, CAPPED)
    hit = tl.where(columns == tl.load(targets + row), 1.0, 0.0)
    slope = (hit - tl.exp(values - tl.load(normalisers + row))) * tl.load(grads + row) * scale
    if CAPPED:
        slope *= 1 - capped * capped
    tl.store(slopes + places, slope.to(slopes.dtype.element_ty), mask=inside)


def target_logps(
    logits: Tensor, targets: Tensor, scale: float, softcap: float | None, *, squares: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return, for each row of `logits` [tokens, vocabulary]: the target's log-probability, the log-sum-exp and log sum p^2.

    The third value is None unless `squares`.
    """
    logps, normalisers = (torch.empty(len(logits), device=logits.device) for _ in range(2))
    log_squares = torch.empty_like(logps) if squares else None
    _target_logps[(len(logits),)](  # type: ignore[index]
        logits, targets, logps, normalisers, log_squares, logits.shape[1], scale, softcap or 1.0,
        CAPPED=softcap is not None, SQUARES=squares, BLOCK=LOGITS_PER_BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return logps, normalisers, log_squares


def grad_logits(
    logits: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    grads: Tensor,
    scale: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the logits as `dtype`. `grads`: the gradients of the log-probabilities.

    If the logits already have this dtype, the result overwrites the logits.
    """
    slopes = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    _grad_logits[(len(logits), triton.cdiv(logits.shape[1], LOGITS_PER_BLOCK))](  # type: ignore[index]
        logits, slopes, targets, normalisers, grads.contiguous(), logits.shape[1], scale, softcap or 1.0,
        CAPPED=softcap is not None, BLOCK=LOGITS_PER_BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return slopes

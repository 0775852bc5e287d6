"""The head of a policy: computes numbers, such as log-probabilities, from hidden states of the trunk (the layers below the head).

The language-model head computes the log-probability of each scored token from the hidden state of the position that predicts it.
It works in chunks and does not store logits: its backward pass recomputes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tandem.data.text.tokens import TokenizedPreference
from tandem.packing.layout import Pack

if TYPE_CHECKING:
    from tandem.model.policy import PackInputs


class Head(Protocol):
    """Computes numbers for the completions of a pack, such as log-probabilities, from the trunk's hidden states.

    For the audit, a head also computes the same numbers with the model's own forward pass (`plain_values`). A head has settings
    but no weights. The weights stay in the model, where sharding, adapters and export find them.

    To train a reward model, which gives one number per completion, add a class with these methods:

    - `positions`: the last token of each completion, as a new field of `PackInputs`
    - `compute`: the product of the hidden states at these positions with the model's score layer
    - `num_values`: 1 for every completion
    - `plain_values`: the score that the model itself gives a sequence
    - `values_in_pack`: index 0, because there is only one number
    - `plain_bytes_per_token`: 0, because there are no logits

    `architecture.head_of` would choose this class, and `architecture.auto_class` the transformers class that loads and exports
    the model. There would be no reference, and `training/terms.py` would copy the numbers into `Completions` instead of adding up
    log-probabilities.
    """

    def positions(self, inputs: "PackInputs") -> Tensor:
        """Return the positions, in the flattened rows of a pack, whose hidden states the head needs."""
        ...

    def compute(self, model: Any, hidden: Tensor, inputs: "PackInputs", *, squares: bool = False) -> Tensor:
        """Return the head's numbers in float32. `hidden`: the hidden states at `positions`.

        `squares`: see `LanguageModelHead.compute`.
        """
        ...

    def num_values(self, pack: Pack) -> NDArray[np.integer[Any]]:
        """Return how many numbers `compute` returns for each completion of a pack, in order.

        Padding comes after the last completion.
        """
        ...

    def plain_values(self, model: Any, prompt: Tensor, completion: Tensor, *, filler: int = 0) -> Tensor:
        """Return the numbers of one completion, computed with the model's own forward pass.

        `filler`: how many filler tokens to add after the sequence.
        """
        ...

    def values_in_pack(self, preference: TokenizedPreference, number: int) -> NDArray[np.integer[Any]]:
        """Return the indices, in the result of `plain_values`, of the numbers that `compute` also returns."""
        ...

    def plain_bytes_per_token(self, vocabulary: int, element_size: int) -> int:
        """Return how many bytes per token `plain_values` needs in addition to the trunk."""
        ...


@dataclass(frozen=True, slots=True)
class HeadRule:
    """How a model changes its logits: logits * scale and then, if `softcap` is set, softcap * tanh(logits / softcap)."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class LanguageModelHead:
    """A head that computes the log-probability of every scored token."""

    rule: HeadRule
    chunk: int  # scored tokens whose logits exist at the same time

    def positions(self, inputs: "PackInputs") -> Tensor:
        return inputs.predicting

    def compute(self, model: Any, hidden: Tensor, inputs: "PackInputs", *, squares: bool = False) -> Tensor:
        """Return the log-probabilities of the scored tokens, [scored], with padding at the end.

        `squares`: return [2, scored] instead. The second row is log sum_v pi(v)^2 at the same positions, without gradient.
        """
        layer = model.get_output_embeddings()
        bias = getattr(layer, "bias", None)
        settings: dict[str, Any] = {"rule": self.rule, "chunk": self.chunk, "squares": squares}
        return chunked_logps(hidden, layer.weight, bias, inputs.target_ids, **settings, rows=_rows_of(model, layer))

    def num_values(self, pack: Pack) -> NDArray[np.integer[Any]]:
        return pack.completion_lengths

    def plain_values(self, model: Any, prompt: Tensor, completion: Tensor, *, filler: int = 0) -> Tensor:
        """Return the log-probability of every token of a completion, computed without packing from full float32 logits."""
        ids = torch.cat([prompt, completion, prompt.new_zeros(filler)])[None]
        end = len(prompt) + len(completion) - 1
        hook = model.get_output_embeddings().register_forward_hook(_float32_logits)
        try:
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : end]
        finally:
            hook.remove()
        return logits.to(_wide(logits)).log_softmax(-1).gather(-1, completion[:, None])[:, 0]

    def values_in_pack(self, preference: TokenizedPreference, number: int) -> NDArray[np.integer[Any]]:
        return preference.scored(number)

    def plain_bytes_per_token(self, vocabulary: int, element_size: int) -> int:
        """Return the bytes per token of three tensors together: logits in the model's dtype, logits in float32, their softmax."""
        return vocabulary * (element_size + 8)


def _rows_of(model: Any, layer: Any) -> tuple[Tensor, Tensor] | None:
    """Return the trained rows of the head's weight (lora/rows.py), which are those of tied embeddings, and their indices."""
    embeddings = model.get_input_embeddings()
    rows = getattr(embeddings, "trained_rows", None)
    return None if rows is None or embeddings.weight is not layer.weight else (rows, embeddings.trained_ids)


def auto_head_chunk(vocabulary: int, device: torch.device) -> int:
    """Return the number of tokens per chunk, a power of two.

    The float32 logits of a chunk take at most 2 GiB on a GPU and 64 MiB on a CPU.
    """
    logits = 2**29 if device.type == "cuda" else 2**24
    return max(64, min(4096, 2 ** ((logits // vocabulary).bit_length() - 1)))


def _float32_logits(head: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """A forward hook that replaces a head's bfloat16 output with the same product computed in float32."""
    if output.dtype.itemsize >= torch.float32.itemsize:
        return output
    bias = getattr(head, "bias", None)
    return nn.functional.linear(inputs[0].float(), head.weight.float(), None if bias is None else bias.float())  # type: ignore[operator, union-attr]


class _ChunkedLogps(torch.autograd.Function):
    """Computes log softmax(head(hidden))[target], one chunk of tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        rule: HeadRule,
        chunk: int,
        squares: bool,
        rows: Tensor | None,
        ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        logps = hidden.new_empty(len(hidden), dtype=_wide(hidden))
        normalisers = torch.empty_like(logps)
        log_squares = torch.empty_like(logps) if squares else logps.new_empty(0)
        # With a frozen head, a token's gradient is its incoming gradient times a vector that can be computed here already.
        ctx.frozen = ctx.needs_input_grad[0] and not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        slopes = torch.empty_like(hidden) if ctx.frozen else None
        of_rows = hidden.new_empty(len(hidden), len(ids)) if slopes is not None and ids is not None else None
        logits_of = _float32_head(weight, bias)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits = logits_of(hidden[part])
            logps[part], normalisers[part], chunk_squares = _target_logps(logits, targets[part], rule, squares=squares)
            if chunk_squares is not None:
                log_squares[part] = chunk_squares
            if slopes is not None:
                ones = torch.ones_like(logps[part])
                slope = _grad_logits(logits, targets[part], normalisers[part], ones, rule, weight.dtype)
                slopes[part] = slope @ weight
                if of_rows is not None:
                    of_rows[part] = slope[:, ids]
        if ctx.frozen:
            ctx.save_for_backward(slopes, of_rows, None if of_rows is None else hidden)
        else:
            ctx.save_for_backward(hidden, weight, bias, targets, normalisers)
        ctx.rule, ctx.chunk, ctx.rows_dtype = rule, chunk, None if rows is None else rows.dtype
        ctx.mark_non_differentiable(log_squares)
        return logps, log_squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.frozen:
            slopes, of_rows, hidden = ctx.saved_tensors
            grad_rows = None if of_rows is None else (of_rows * grad[:, None]).T @ hidden.to(grad.dtype)
            grad_hidden = (slopes * grad[:, None]).to(slopes.dtype)
            return grad_hidden, *[None] * 6, None if grad_rows is None else grad_rows.to(ctx.rows_dtype), None
        hidden, weight, bias, targets, normalisers = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Sums over chunks are float32: in bfloat16, small terms of later chunks would be lost.
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight)) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=_wide(bias)) if ctx.needs_input_grad[2] else None
        logits_of = _float32_head(weight, bias)
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = logits_of(hidden[part])
            grad_logits = _grad_logits(logits, targets[part], normalisers[part], grad[part], ctx.rule, weight.dtype)
            grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden[part])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_hidden, _like(grad_weight, weight), _like(grad_bias, bias), *[None] * 6


def _target_logps(
    logits: Tensor, targets: Tensor, rule: HeadRule, *, squares: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return, for each row of logits: the log-probability of its target, the log-sum-exp and, if `squares`, log sum p^2."""
    if _has_kernels(logits):
        from tandem.model.kernels.head import target_logps

        return target_logps(logits, targets, rule.scale, rule.softcap, squares=squares)
    final, _ = _apply_rule(logits, rule)
    normalisers = final.logsumexp(-1)
    logps = final.gather(-1, targets[:, None]).squeeze(-1) - normalisers
    # log sum p^2 = log sum exp(2 logits) - 2 log sum exp(logits)
    return logps, normalisers, final.mul(2).logsumexp(-1) - 2 * normalisers if squares else None


def _grad_logits(
    logits: Tensor, targets: Tensor, normalisers: Tensor, grad: Tensor, rule: HeadRule, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the logits as `dtype`. `grad`: the gradient of the log-probabilities."""
    if _has_kernels(logits):
        from tandem.model.kernels.head import grad_logits

        return grad_logits(logits, targets, normalisers, grad, rule.scale, rule.softcap, dtype)
    final, capped = _apply_rule(logits, rule)
    # d logp / d logits = onehot(target) - softmax(logits)
    slope = (final - normalisers[:, None]).exp_().mul_(-grad[:, None])
    slope.scatter_add_(-1, targets[:, None], grad[:, None])
    if capped is not None:
        slope.mul_(1 - capped.square())
    return slope.mul_(rule.scale).to(dtype)


def _has_kernels(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype != torch.float64


def _float32_head(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a function that computes float32 logits from hidden states.

    In bfloat16, logits would be too coarse: numbers between 16 and 32 are spaced by 0.125.
    """
    wide = _wide(weight)
    if wide == weight.dtype:
        return lambda hidden: torch.nn.functional.linear(hidden, weight, bias)
    if not weight.is_cuda:  # the CPU cannot multiply bfloat16 into float32
        wide_weight, wide_bias = weight.to(wide), None if bias is None else bias.to(wide)
        return lambda hidden: torch.nn.functional.linear(hidden.to(wide), wide_weight, wide_bias)

    def product(hidden: Tensor) -> Tensor:
        logits = torch.mm(hidden, weight.T, out_dtype=wide)
        return logits if bias is None else logits.add_(bias)

    return product


def _apply_rule(logits: Tensor, rule: HeadRule) -> tuple[Tensor, Tensor | None]:
    """Return the scaled and capped logits in float32 and, for the derivative of a soft-cap, tanh(logits / cap).

    The second value is None without a soft-cap.
    """
    logits = logits.to(_wide(logits))
    if rule.scale != 1.0:
        logits = logits * rule.scale
    if rule.softcap is None:
        return logits, None
    capped = torch.tanh(logits / rule.softcap)
    return capped * rule.softcap, capped


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total` in place. `total` may have a wider dtype."""
    if total.is_cuda and total.dtype != left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def chunked_logps(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    rule: HeadRule | None = None,
    chunk: int,
    squares: bool = False,
    rows: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the float32 log-probability of each target, [tokens], for hidden states [tokens, hidden] and targets [tokens].

    `squares`: return [2, tokens] instead. The second row is log sum_v p(v)^2, without gradient.
    `rows`: a parameter that gets the gradient of some rows of a frozen weight, which equal it, and the indices of these rows.
    """
    given = (hidden, weight, bias, targets, rule or HeadRule(), chunk, squares, *(rows or (None, None)))
    logps, log_squares = _ChunkedLogps.apply(*given)  # type: ignore[misc]
    return torch.stack([logps, log_squares]) if squares else logps


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _like(gradient: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if gradient is None or parameter is None else gradient.to(parameter.dtype)

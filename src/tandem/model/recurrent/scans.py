"""What recurrent layers compute along a row, for the segments of a pack.

Every prompt is computed once, from an empty state. Every completion then starts from a copy of its prompt's final state, and the
gradients of the copies are added up. Short convolutions get the last tokens of the prompt before the first of a completion.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tandem.model.recurrent.segments import PackSegments, Sequences

# Tokens that torch operations compute at once, at most. Longer chunks are not needed for short sequences.
LONGEST_CHUNK = 64
# On these devices, torch operations are computed again in the backward pass. They would keep 10 kB per token, head and layer.
RECOMPUTING_DEVICES = ("cuda",)

# (tensors of [batch, length, ...], initial states or None, chunk size) -> outputs [batch, length, ...], final states [batch, ...]
PaddedScan = Callable[[list[Tensor], Tensor | None, int], tuple[Tensor, Tensor]]
# (tensors of [tokens, ...], initial states or None, sequences) -> outputs [tokens, ...], final states [sequences, ...]
SequenceScan = Callable[[list[Tensor], Tensor | None, Sequences], tuple[Tensor, Tensor]]


@torch.compiler.disable()
def convolve(
    own: Callable[..., Tensor],
    segments: PackSegments,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    """Convolve each segment of a pack with the tokens before it. `x`: [rows, channels, length]; `weight`: [channels, width].

    All rows are convolved as they are, which is wrong only for the first width - 1 tokens of each segment: they are replaced.
    """
    from transformers.activations import ACT2FN

    kernel = segments.kernels(x).convolution
    tokens = x.transpose(1, 2)  # [rows, length, channels]
    if kernel is not None and activation in (None, "silu", "swish"):
        out = kernel(tokens.contiguous(), weight, bias, activation=activation)[0]
    else:
        out = own(x, weight, bias, activation=activation).transpose(1, 2)
    starts = segments.starts(weight.shape[-1])
    inputs = tokens.flatten(0, 1).index_select(0, starts.inputs.flatten()).unflatten(0, starts.inputs.shape)
    inputs = inputs.float() * starts.is_real[..., None]  # [starts, width, channels]
    first = (inputs * weight.T.float()).sum(1)
    if bias is not None:
        first = first + bias.float()
    if activation is not None:
        first = ACT2FN[activation](first)
    out = out.flatten(0, 1).index_copy(0, starts.positions, first.to(out.dtype))
    return out.unflatten(0, tokens.shape[:2]).transpose(1, 2)


def _fork(segments: PackSegments, tensors: list[Tensor], scan: SequenceScan) -> Tensor:
    """Scan the prompts of a pack, then the completions from the final states of their prompts.

    `tensors`: [rows, length, ...]. Return the outputs, [rows, length, ...], with zeros for filler.
    """
    shape = tensors[0].shape[:2]
    tokens = [segments.gather(one) for one in tensors]
    num_in_prompts = segments.prompts.num_tokens
    outputs, states = scan([one[:num_in_prompts] for one in tokens], None, segments.prompts)
    if segments.completions.num_tokens:
        more, _ = scan([one[num_in_prompts:] for one in tokens], copies(states, segments), segments.completions)
        outputs = torch.cat([outputs, more])
    return segments.scatter(outputs, shape)


def copies(states: Tensor, segments: PackSegments) -> Tensor:
    """Return the state that each completion starts from. The backward pass adds up the gradients of a prompt's copies."""
    return states.index_select(0, segments.prompt_of)


def _padded(scan: PaddedScan) -> SequenceScan:
    """Return a scan over sequences of different lengths, from one over a batch: sequences of similar length are padded.

    Padding must leave a state as it is.
    """

    def once(parts: list[Tensor], initial: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
        if parts[0].device.type not in RECOMPUTING_DEVICES:
            return scan(parts, initial, chunk)
        return checkpoint(scan, parts, initial, chunk, use_reentrant=False)

    def over_sequences(tokens: list[Tensor], initial: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        sizes = [one.num_tokens for one in sequences.rectangles]
        counts = [one.num_sequences for one in sequences.rectangles]
        starts = [None] * len(counts) if initial is None else initial.split(counts)
        outputs, finals = [], []
        parts = zip(*(one.split(sizes) for one in tokens), strict=True)
        for rectangle, part, start in zip(sequences.rectangles, parts, starts, strict=True):
            chunk = min(LONGEST_CHUNK, 1 << (rectangle.longest - 1).bit_length())
            out, final = once([rectangle.fill(one) for one in part], start, chunk)
            outputs.append(rectangle.take(out))
            finals.append(final)
        return torch.cat(outputs), torch.cat(finals)

    return over_sequences


@torch.compiler.disable()
def gated_delta(own: Callable[..., Any], segments: PackSegments, tensors: list[Tensor], *, normalizes: bool) -> Tensor:
    """Compute the gated delta rule, or Kimi Delta Attention, in a pack.

    `own`: transformers' torch function. `tensors`: query, key, value, g (the logarithm of the decay) and beta, each
    [rows, length, heads, ...]. `normalizes`: queries and keys are normalised first.
    """
    kernel = segments.kernels(tensors[0]).scan

    def padded(parts: list[Tensor], initial: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
        # Where there is no token, beta and g are zero: nothing is written, and nothing decays.
        named = dict(zip(("query", "key", "value", "g", "beta"), parts, strict=True))
        return own(
            **named,
            chunk_size=chunk,
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=normalizes,
        )

    def by_kernel(parts: list[Tensor], initial: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        assert kernel is not None
        out, final = kernel(
            *(one[None] for one in parts),
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=normalizes,
            cu_seqlens=sequences.bounds,
            cu_seqlens_cpu=sequences.host_bounds,
        )
        return out[0], final

    return _fork(segments, tensors, _padded(padded) if kernel is None else by_kernel)


@torch.compiler.disable()
def mamba2(
    own: Callable[..., Any],
    segments: PackSegments,
    tensors: list[Tensor],
    *,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> Tensor:
    """Compute the state space of Mamba-2 in a pack.

    `own`: transformers' torch function. `tensors`: x [rows, length, heads, value size], dt [rows, length, heads], and B and C
    [rows, length, groups, key size]. The other arguments are those of transformers' function.
    """
    x, dt, B, C = tensors
    kernel = segments.kernels(x).scan
    if kernel is not None:
        dt = dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    # Limited here and not in `own`: where there is no token, dt must stay zero, so that a state does not change.
    dt = dt.clamp(*dt_limit)

    def padded(parts: list[Tensor], initial: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
        x, dt, B, C = parts
        return own(x, dt, A, B, C, chunk_size=chunk, D=D, initial_states=initial, return_final_states=True)

    def by_kernel(parts: list[Tensor], initial: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        assert kernel is not None
        x, dt, B, C = parts
        keys, queries = (one.repeat_interleave(x.shape[1] // one.shape[1], 1) for one in (B, C))
        values = (x * dt[..., None]).to(x.dtype)
        out, final = kernel(
            *(one[None] for one in (queries, keys, values, dt * A.float())),
            scale=1.0,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=sequences.bounds,
            cu_seqlens_cpu=sequences.host_bounds,
        )
        return (out[0] if D is None else out[0] + (D[:, None] * x).to(out.dtype)), final

    return _fork(segments, [x, dt, B, C], _padded(padded) if kernel is None else by_kernel)

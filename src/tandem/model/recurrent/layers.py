"""Makes transformers' recurrent layers compute packs: their convolutions and scans are replaced by those of this package.

Layers call these functions by their names in the module of the model, and pass on the keyword `pack`. The names are replaced once
per process. Without `pack`, the replaced functions are called as before.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem.model.recurrent import scans
from tandem.model.recurrent.families import FAMILIES, Scan, StateSizes, state_sizes
from tandem.model.recurrent.kernels import Kernels, usable_kernels
from tandem.model.recurrent.segments import PackSegments
from tandem.packing.layout import Pack

Call = Literal["convolution", "scan"]

_calls: list[Call] | None = None
_recomputes_rows = False
_replaced: set[Callable[..., Any]] = set()


class RecurrentLayers:
    """The recurrent layers of a model that is trained in packs."""

    def __init__(self, model: Any):
        config = model.config.get_text_config()
        self.scan = FAMILIES[config.model_type]
        self.sizes: StateSizes | None = state_sizes(config)
        self.kernels: Kernels | None = None  # used instead of those that `usable_kernels` returns
        self.num_layers = sum(_is_convolution(module) for module in model.modules())
        replace_functions(model)

    def segments(self, pack: Pack, device: torch.device) -> PackSegments:
        """Return the segments of a pack, for the attribute `segments` of its mask."""
        return PackSegments(pack, device, self.kernels_for)

    def kernels_for(self, device: torch.device, dtype: torch.dtype) -> Kernels:
        return self.kernels or usable_kernels(self.scan, self.sizes, device, dtype)

    def count_layers(self, calls: list[Call]) -> int:
        """Return how many layers computed all their parts in a pack. `calls`: recorded in one forward pass."""
        parts: list[Call] = ["convolution"] if self.scan == "convolution" else ["convolution", "scan"]
        return min(calls.count(part) for part in parts)


def _is_convolution(module: nn.Module) -> bool:
    """Whether a module is the short convolution over single channels that every recurrent layer has once."""
    return isinstance(module, nn.Conv1d) and module.groups == module.in_channels


def replace_functions(model: nn.Module) -> None:
    """Replace the functions of the modules in which the model's layers are defined, unless they are replaced already."""
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        for function, replacement in REPLACEMENTS.items():
            own = getattr(module, function, None)
            if own is not None and name.startswith("transformers.") and own not in _replaced:
                new = replacement(own)
                _replaced.add(new)
                setattr(module, function, new)


@contextmanager
def record_recurrent_calls() -> Iterator[list[Call]]:
    """Yield a list. Inside this context, every convolution and every scan in a pack is added to the list."""
    global _calls
    _calls = []
    try:
        yield _calls
    finally:
        _calls = None


@contextmanager
def recomputed_rows() -> Iterator[None]:
    """Inside this context, scans outside packs are computed again in the backward pass where those of packs are.

    Torch operations would otherwise keep so much of every layer that the audit could need more memory than training.
    """
    global _recomputes_rows
    _recomputes_rows = True
    try:
        yield
    finally:
        _recomputes_rows = False


def _outside_packs(scan: Callable[..., Any], *tensors: Tensor, **named: Any) -> Any:
    """Compute a scan along rows that are not packs."""
    if _recomputes_rows and tensors[0].device.type in scans.RECOMPUTING_DEVICES:
        return checkpoint(scan, *tensors, use_reentrant=False, **named)
    return scan(*tensors, **named)


def _segments(pack: Any, call: Call) -> PackSegments | None:
    """Return the segments of the pack that a layer was given. None: the layer does not compute a pack."""
    found = getattr(pack, "segments", None)
    if found is not None and _calls is not None:
        _calls.append(call)
    return found


def _plain(own: Callable[..., Any]) -> Any:
    """Return the function that computes rows outside packs.

    Where flash-linear-attention is installed, `own` calls its kernels even if there is no GPU.
    """
    return own if torch.cuda.is_available() else _by_torch(own)


def _by_torch(own: Callable[..., Any]) -> Any:
    """Return the function of transformers that uses torch operations only."""
    return inspect.unwrap(own)


def _convolution(own: Callable[..., Any]) -> Callable[..., Any]:
    plain = _plain(own)

    @wraps(own)
    def convolution(x: Tensor, weight: Tensor, bias: Any = None, *given: Any, pack: Any = None, **named: Any) -> Tensor:
        segments = _segments(pack, "convolution")
        if segments is None:
            return plain(x, weight, bias, *given, **named)
        return scans.convolve(plain, segments, x, weight, bias, named.get("activation"))

    return convolution


def _delta_rule(own: Callable[..., Any]) -> Callable[..., Any]:
    plain, by_torch = _plain(own), _by_torch(own)

    def function(query: Tensor, value: Tensor, scan: Scan) -> Callable[..., Any]:
        """Return `own` only if the kernel that it calls is correct here, which flash-linear-attention does not always check."""
        sizes = StateSizes(value.shape[2], query.shape[2], query.shape[3], value.shape[3])
        return plain if usable_kernels(scan, sizes, query.device, query.dtype).scan is not None else by_torch

    @wraps(own)
    def delta_rule(query: Tensor, key: Tensor, value: Tensor, *, pack: Any = None, **named: Any) -> Any:
        segments = _segments(pack, "scan")
        if segments is None:
            scan: Scan = "gated_delta" if named["g"].dim() == 3 else "kimi_delta"
            return _outside_packs(function(query, value, scan), query, key, value, **named)
        tensors = [query, key, value, named["g"], named["beta"]]
        return scans.gated_delta(by_torch, segments, tensors, normalizes=named["use_qk_l2norm_in_kernel"]), None

    return delta_rule


def _mamba2(own: Callable[..., Any]) -> Callable[..., Any]:
    plain, by_torch = _plain(own), _by_torch(own)

    @wraps(own)
    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, pack: Any = None, **named: Any) -> Any:
        segments = _segments(pack, "scan")
        if segments is None:
            return _outside_packs(plain, x, dt, A, B, C, **named)
        settings = {name: named[name] for name in ("D", "dt_bias", "dt_softplus", "dt_limit")}
        return scans.mamba2(by_torch, segments, [x, dt, B, C], A=A, **settings)

    return scan


def _fused_mamba2(own: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the kernel of a complete layer, which cannot copy states: without a result, the layer calls the other functions."""

    @wraps(own)
    def fused(*given: Any, pack: Any = None, **named: Any) -> Any:
        return own(*given, **named) if getattr(pack, "segments", None) is None else None

    return fused


REPLACEMENTS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _fused_mamba2,
}

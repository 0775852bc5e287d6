"""Emulates bfloat16 matrix products on a CPU without them: computed in float32 and rounded once, as the hardware does.

Without this, torch multiplies number by number, which is hundreds of times slower.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


@contextmanager
def with_bfloat16_products() -> Iterator[None]:
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() or torch.cuda.is_available():
        yield
        return
    with _InFloat32(), sdpa_kernel(SDPBackend.MATH):
        yield


class _InFloat32(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and args[-1].dtype == torch.bfloat16:
            return func(*(arg.float() for arg in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))

"""GPU kernels of flash-linear-attention for recurrent layers. A kernel is used only after it was checked on this device.

Every function here has the signature of flash-linear-attention: sequences one after another in a batch of one, with `cu_seqlens`
as their bounds, and one initial and one final state per sequence.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.errors import one_line
from tandem.model.recurrent.families import Scan, StateSizes
from tandem.terminal.commands import install_command

PACKAGE = "fla-core"  # the kernels of flash-linear-attention; the package of this name has the same version
# Earlier versions return wrong gradients of the states of sequences that are shorter than a convolution.
FIRST_VERSION = (0, 6, 0)
INSTALL = f"in the tandem checkout, run {install_command('hybrids')}"

# Lengths of the sequences that a kernel is checked with: shorter than a chunk of 64 tokens, longer than one, longer than two.
CHECKED_LENGTHS = (1, 5, 70, 130)
# Largest relative difference, as a norm, of an output or gradient. Kernels multiply in bfloat16.
CHECK_TOLERANCE = 0.03
CHECKED_CHANNELS, CHECKED_WIDTH = 64, 4  # of a convolution, if the model's channels are not known
# Their backward pass uses chunk_bwd_dqkwg, which some versions of Triton compute incorrectly on an H100 or H200.
NEED_CORRECT_TRITON = ("chunk_gated_delta_rule", "chunk_simple_gla")

Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels that a model's recurrent layers use in packs. None: torch operations are used instead."""

    scan: Kernel | None
    convolution: Kernel | None
    reason: str = ""  # why no kernel is used for the scan


def no_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    return Kernels(None, None)


@cache
def usable_kernels(scan: Scan, sizes: StateSizes | None, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the kernels that compute the same as torch on this device, with gradients, for states of these sizes.

    The first call takes a few seconds, because kernels are compiled. Later calls with the same arguments return the same.
    """
    if device.type != "cuda":
        return Kernels(None, None, "there are no kernels for a CPU")
    if dtype == torch.float32:
        return Kernels(None, None, "kernels would round float32")
    if reason := missing_package():
        return Kernels(None, None, reason)
    if not torch.cuda.is_available():
        return Kernels(None, None, "there is no GPU to check kernels on")
    here = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def checked() -> Kernels:
        with torch.cuda.device(here):
            return _checked_kernels(scan, sizes, here, dtype)

    # In another thread, because the first call may be inside a recomputed layer, which would record what the checks compute.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(checked).result()


def _checked_kernels(scan: Scan, sizes: StateSizes | None, device: torch.device, dtype: torch.dtype) -> Kernels:
    try:
        convolution, candidates = _convolution(), _scans(scan)
    except Exception as error:  # of the package, or of the Triton that it imports
        return Kernels(None, None, f"flash-linear-attention cannot be imported ({one_line(error)})")
    # With the model's channels, because the kernel is tuned for each number of them.
    channels = CHECKED_CHANNELS if sizes is None else sizes.channels
    if _failure(partial(_check_convolution, convolution, channels, device, dtype)):
        convolution = None
    if sizes is None:
        return Kernels(None, convolution)
    kernel, reason = first_correct(candidates, scan, sizes, device, dtype)
    return Kernels(kernel, convolution, reason)


def first_correct(
    kernels: list[Kernel], scan: Scan, sizes: StateSizes, device: torch.device, dtype: torch.dtype
) -> tuple[Kernel | None, str]:
    """Return the first kernel that passes `check_scan`; or None, and the reason why the first kernel does not."""
    reasons = []
    for kernel in kernels:
        reason = refusal(kernel) or _failure(partial(check_scan, kernel, scan, sizes, device, dtype))
        if not reason:
            return kernel, ""
        reasons.append(reason)
    return None, reasons[0]


def refusal(kernel: Kernel) -> str:
    """Return why flash-linear-attention will refuse a kernel's backward pass on this GPU, or an empty text if it is not known to.

    Otherwise the kernel would be run until it refuses, which takes long, because its forward pass is tuned first.
    """
    if (
        kernel.__name__ not in NEED_CORRECT_TRITON or find_spec("tilelang") is not None
    ):  # tilelang has its own backward pass
        return ""
    from fla import utils  # pyright: ignore[reportMissingImports]

    names = ("IS_NVIDIA_HOPPER", "TRITON_ABOVE_3_4_0", "TRITON_ABOVE_3_7_1")
    is_hopper, has_defect, is_corrected = (getattr(utils, name, False) for name in names)
    if not (is_hopper and has_defect and not is_corrected):
        return ""
    return "flash-linear-attention refuses its backward pass on this GPU with Triton before 3.7.1 and without tilelang"


def missing_package() -> str:
    """Return why flash-linear-attention cannot be used, or an empty text."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return f"flash-linear-attention is not installed ({INSTALL})"
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if numbers < FIRST_VERSION:
        wanted = ".".join(str(number) for number in FIRST_VERSION)
        return f"flash-linear-attention {found} is older than {wanted}, the first with correct gradients of states ({INSTALL})"
    return ""


def _scans(scan: Scan) -> list[Kernel]:
    """Return the kernels for a scan, the fastest first."""
    if scan == "gated_delta":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

        return [chunk_gated_delta_rule]
    if scan == "kimi_delta":
        from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

        return [chunk_kda]
    if scan == "mamba2":
        from fla.ops.simple_gla import (  # pyright: ignore[reportMissingImports]
            chunk_simple_gla,
            fused_chunk_simple_gla,
        )

        def fused(*given: Any, cu_seqlens_cpu: Any = None, **named: Any) -> Any:
            return fused_chunk_simple_gla(*given, **named)

        return [chunk_simple_gla, fused]
    return []


def _convolution() -> Kernel:
    from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports]

    return causal_conv1d


def _failure(check: Callable[[], str]) -> str:
    """Return the reason why a check failed: what it returns, or the error that the kernel raised."""
    try:
        return check()
    except (
        Exception
    ) as error:  # a kernel may raise anything: for a GPU, a version of Triton or a size that it does not support
        return f"flash-linear-attention cannot compute it here ({one_line(error)})"


def check_scan(kernel: Kernel, scan: Scan, sizes: StateSizes, device: torch.device, dtype: torch.dtype) -> str:
    """Compare a kernel with `scan_by_token`: outputs, final states and all gradients. Return what differs, or an empty text."""
    generator = torch.Generator().manual_seed(0)
    tokens, num = sum(CHECKED_LENGTHS), len(CHECKED_LENGTHS)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys = sizes.heads if scan == "mamba2" else sizes.key_heads  # Mamba-2 repeats them
    decays = (tokens, sizes.heads, sizes.key_size) if scan == "kimi_delta" else (tokens, sizes.heads)
    arguments = {
        "q": random(tokens, keys, sizes.key_size),
        "k": random(tokens, keys, sizes.key_size) / (sizes.key_size**0.5 if scan == "mamba2" else 1),
        "v": random(tokens, sizes.heads, sizes.value_size),
        "g": F.logsigmoid(random(*decays) + 3),
    }
    if scan != "mamba2":
        arguments["beta"] = random(tokens, sizes.heads).sigmoid()
    states = random(num, sizes.heads, sizes.key_size, sizes.value_size)
    given = {name: one[None].to(device, torch.float32 if name == "g" else dtype) for name, one in arguments.items()}
    given["initial_state"] = states.to(device)
    bounds = torch.tensor([0, *CHECKED_LENGTHS]).cumsum(0).to(torch.int32)
    settings: dict[str, Any] = {"scale": 1.0} if scan == "mamba2" else {"use_qk_l2norm_in_kernel": True}
    settings |= {"cu_seqlens": bounds.to(device), "cu_seqlens_cpu": bounds, "output_final_state": True}
    weights = [random(1, tokens, sizes.heads, sizes.value_size), random(*states.shape)]
    found, wanted = (_results(one, given, settings, weights) for one in (kernel, scan_by_token))
    return _difference(found, wanted)


def _results(
    kernel: Kernel, given: dict[str, Tensor], settings: dict[str, Any], weights: list[Tensor]
) -> dict[str, Tensor]:
    """Return the outputs of a kernel, and the gradients of their weighted sum."""
    leaves = {name: one.detach().clone().requires_grad_() for name, one in given.items()}
    with torch.enable_grad():
        outputs = kernel(**leaves, **settings)
        sums = [(out.float() * weight.to(out.device)).sum() for out, weight in zip(outputs, weights, strict=True)]
        gradients = torch.autograd.grad(torch.stack(sums).sum(), list(leaves.values()))
    named = {f"the gradient of {name}": one for name, one in zip(leaves, gradients, strict=True)}
    return {"the output": outputs[0].detach(), "the final state": outputs[1].detach(), **named}


def _difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    for name, want in wanted.items():
        difference = float((found[name].float() - want.float()).norm() / want.float().norm())
        if not difference <= CHECK_TOLERANCE:
            return f"{name} of flash-linear-attention's kernel is off by {difference:.0%} here"
    return ""


def _check_convolution(kernel: Kernel, channels: int, device: torch.device, dtype: torch.dtype) -> str:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 100, channels), "weight": (channels, CHECKED_WIDTH), "bias": (channels,)}
    given = {name: torch.randn(*shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}
    weights = [torch.randn(*shapes["x"], generator=generator)]

    def by_torch(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, None]:
        padded = F.pad(x.float().transpose(1, 2), (CHECKED_WIDTH - 1, 0))
        out = F.conv1d(padded, weight.float()[:, None], bias.float(), groups=channels)
        return F.silu(out).transpose(1, 2), None

    def results(function: Kernel, **settings: Any) -> dict[str, Tensor]:
        leaves = {name: one.detach().clone().requires_grad_() for name, one in given.items()}
        with torch.enable_grad():
            out = function(**leaves, **settings)[0]
            gradients = torch.autograd.grad((out.float() * weights[0].to(device)).sum(), list(leaves.values()))
        return {"the output": out.detach(), **dict(zip(leaves, gradients, strict=True))}

    return _difference(results(kernel, activation="silu"), results(by_torch))


def scan_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute a scan one token at a time, in float32: what kernels are compared with.

    Per head, the state S is a matrix of key_size x value_size numbers. With `beta` (the delta rule):
      S <- exp(g) S;  S <- S + k (beta (v - k S));  output = scale q S
    Without: S <- exp(g) S + k v, output = scale q S. g is one number per head and token, or one per row of S.
    """
    groups = v.shape[2] // q.shape[2]
    if use_qk_l2norm_in_kernel:
        q, k = (one.float() * torch.rsqrt(one.float().square().sum(-1, keepdim=True) + 1e-6) for one in (q, k))
    q, k = (one.float().repeat_interleave(groups, 2) for one in (q, k))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    decay = g.float().exp()
    decay = decay[..., None, None] if g.dim() == 3 else decay[..., None]
    outputs, finals = [], []
    for number, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        state = q.new_zeros(v.shape[2], q.shape[-1], v.shape[-1])
        if initial_state is not None:
            state = initial_state[number].float()
        for t in range(start, end):
            key, value = k[0, t, :, :, None], v[0, t, :, None].float()
            state = state * decay[0, t]
            if beta is not None:
                value = (value - (state * key).sum(1, keepdim=True)) * beta[0, t, :, None, None].float()
            state = state + key * value
            outputs.append((state * q[0, t, :, :, None]).sum(1) * factor)
        finals.append(state)
    return torch.stack(outputs)[None].to(v.dtype), torch.stack(finals)

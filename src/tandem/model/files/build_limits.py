"""Stops building a model whose configuration asks for far more modules or weights than its weight files hold."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.nn.modules import module as torch_modules

from tandem.errors import ConfigError
from tandem.model.files.source import ModelSource

# A byte holds at most 8 one-bit weights, and each weight is created twice: on the meta device and when it is read. The
# extra allowances are for models with very small files.
WEIGHTS_PER_BYTE, EXTRA_WEIGHTS = 16, 100_000_000
# Real models have 1 to 4 modules per tensor.
MODULES_PER_TENSOR, EXTRA_MODULES = 20, 2_000
# Masks and position tables are not stored in files: 24 masks of 2,048 x 2,048 have 10**8 elements.
EXTRA_BUFFER_ELEMENTS = 2**32


@contextmanager
def within_limits(source: ModelSource) -> Iterator[None]:
    """Raise ConfigError as soon as a model that is built inside this context is far larger than its weight files.

    Build the model on the meta device, so that no memory is allocated before the error.
    """
    if source.stored is None:
        yield
        return
    stored = source.stored
    counts = {"modules": 0, "weights": 0, "buffer elements": 0}
    limits = {
        "modules": MODULES_PER_TENSOR * stored.num_tensors + EXTRA_MODULES,
        "weights": WEIGHTS_PER_BYTE * stored.num_bytes + EXTRA_WEIGHTS,
        "buffer elements": WEIGHTS_PER_BYTE * stored.num_bytes + EXTRA_BUFFER_ELEMENTS,
    }

    def count(what: str, number: int) -> None:
        counts[what] += number
        if counts[what] > limits[what]:
            raise ConfigError(
                f"{source.place}: its config.json describes a model with more than {limits[what]:,} {what}, but its weight "
                f"files hold {stored.num_tensors:,} tensors in {stored.num_bytes:,} bytes. Download the model again, or "
                "choose another."
            )

    def size(tensor: Any) -> int:
        return 0 if tensor is None else tensor.numel()

    hooks = (
        torch_modules.register_module_module_registration_hook(lambda *_: count("modules", 1)),
        torch_modules.register_module_parameter_registration_hook(lambda *given: count("weights", size(given[2]))),
        torch_modules.register_module_buffer_registration_hook(lambda *given: count("buffer elements", size(given[2]))),
    )
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        yield

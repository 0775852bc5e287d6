"""Limits while a model is built from its configuration: no more modules and weights than its files could ever fill."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.nn.modules import module as torch_modules

from tandem.errors import ConfigError
from tandem.model.files.source import ModelSource

# A byte holds 8 weights of one bit, and each is made twice: on the meta device, and when it is read. The rest is for models
# of a few bytes.
WEIGHTS_PER_BYTE, MORE_WEIGHTS = 16, 100_000_000
# Real models have 1 to 4 modules for each tensor.
MODULES_PER_TENSOR, MORE_MODULES = 20, 2_000
BUFFERS = 2**32  # elements. Masks and tables of positions are in no file: 24 masks of 2,048 squared are 10**8


@contextmanager
def within_limits(source: ModelSource) -> Iterator[None]:
    """Within: refuse a model as soon as it is far larger than its weight files. It should be built on the meta device."""
    if source.held is None:
        yield
        return
    held = source.held
    counted = {"modules": 0, "weights": 0, "elements of buffers": 0}
    limits = {
        "modules": MODULES_PER_TENSOR * held.num_tensors + MORE_MODULES,
        "weights": WEIGHTS_PER_BYTE * held.num_bytes + MORE_WEIGHTS,
        "elements of buffers": WEIGHTS_PER_BYTE * held.num_bytes + BUFFERS,
    }

    def count(what: str, number: int) -> None:
        counted[what] += number
        if counted[what] > limits[what]:
            raise ConfigError(
                f"{source.key} = {source.name}: its config.json describes a model of more than {limits[what]:,} {what}, but its "
                f"weight files hold {held.num_tensors:,} tensors in {held.num_bytes:,} bytes. Download the model again, or "
                "choose another."
            )

    def size(tensor: Any) -> int:
        return 0 if tensor is None else tensor.numel()

    hooks = (
        torch_modules.register_module_module_registration_hook(lambda *_: count("modules", 1)),
        torch_modules.register_module_parameter_registration_hook(lambda *given: count("weights", size(given[2]))),
        torch_modules.register_module_buffer_registration_hook(
            lambda *given: count("elements of buffers", size(given[2]))
        ),
    )
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        yield

"""Loads a model so that each rank reads only its own rows of every weight from the files.

No rank ever holds a whole model, in host memory or on its device. The files must name the weights as transformers' model does,
which those of most models do. transformers rearranges the weights of some models when it loads them, such as those of experts;
every rank then loads the whole model first.
"""

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.errors import ConfigError, one_line
from tandem.model.architecture import auto_class
from tandem.model.distributed.shards import own_rows
from tandem.model.files.build_limits import within_limits
from tandem.model.files.source import ModelSource, weights_of


def model_without_weights(source: ModelSource, dtype: torch.dtype, attention: str) -> Any:
    """Build a model whose parameters are on the meta device. Its buffers are on the CPU, with their values."""
    from accelerate import init_empty_weights
    from transformers import GenerationConfig
    from transformers.initialization import no_init_weights

    with within_limits(source), no_init_weights(), init_empty_weights(include_buffers=False):
        config = copy.deepcopy(source.config)  # from_config changes its dtype, which exports use
        model = auto_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    if (source.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(source.folder))
    return model


def can_read_shards(source: ModelSource, model: Any, dtype: torch.dtype) -> bool:
    """Return whether the files hold exactly the weights of the model, under the same names and with the same shapes."""
    if getattr(source.config, "quantization_config", None) or (dtype != torch.float32 and _keeps_float32(model)):
        return False
    shapes = _shapes_in(weights_of(source))
    needed = {name: tuple(tensor.shape) for name, tensor in _stored(model).items()}
    return all(shapes.get(name) == shape for name, shape in needed.items())


def _keeps_float32(model: Any) -> bool:
    return bool(getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None))


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that files must hold, by name. A tied weight is returned once."""
    kept = model.state_dict().keys()
    return {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if name in kept}


def _shapes_in(files: list[Path]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return shapes


def read_shards(source: ModelSource, model: nn.Module, device: torch.device) -> None:
    """Fill a sharded model, whose parameters are on the meta device, with this rank's rows of the weights in its files."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)
    stored, read = _stored(model), {}
    with ExitStack() as stack:
        files = [stack.enter_context(_opened(source, path)) for path in weights_of(source)]
        places = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping
        for name, tensor in stored.items():
            read[name] = _rows_of(places[name].get_slice(name), tensor, device)
    # A tied weight has several names, which must stay one parameter.
    names = {id(tensor): name for name, tensor in stored.items()}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    kept = model.state_dict().keys()
    state = {name: read[names[id(tensor)]] for name, tensor in every if name in kept}
    model.load_state_dict(state, assign=True)


def _opened(source: ModelSource, path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ConfigError(
            f"{source.key} = {source.name}: its weights are not readable as safetensors ({one_line(error)}). "
            "Is the download complete?"
        ) from None


def _rows_of(stored: Any, tensor: Any, device: torch.device) -> Tensor:
    """Return this rank's rows of a stored tensor, sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        whole = stored[:].to(device, tensor.dtype)
        return nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
    own = own_rows(tensor)
    rows = stored[own.start : own.stop].to(device, tensor.dtype)
    given = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    sharded = DTensor.from_local(rows, tensor.device_mesh, tensor.placements, **given)
    return nn.Parameter(sharded, tensor.requires_grad)

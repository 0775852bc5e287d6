"""Loads a model so that each rank reads only its own rows of every weight from the files.

No rank ever holds a whole model, in host memory or on its device. If transformers rearranges a weight in a way that mixes its
rows, every rank makes the whole weight and keeps its rows, one weight at a time.
"""

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.errors import ConfigError, one_line
from tandem.model.architecture import auto_class
from tandem.model.distributed.recipes import Recipe, Shape, find_recipes
from tandem.model.distributed.shards import own_rows
from tandem.model.files.build_limits import within_limits
from tandem.model.files.source import ModelSource, weights_of

PLAIN = re.compile(r"(\.base_layer)+\.")  # several where several tensors of one module have adapters
ROWS_AT_ONCE = 1024  # rows of two tensors that are compared


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """transformers' model on the meta device, and how its tensors are made from those in the files."""

    model: Any
    recipes: list[Recipe]


def model_without_weights(source: ModelSource, dtype: torch.dtype, attention: str) -> Any:
    """Build a model whose parameters are on the meta device. Its buffers are on the CPU, with their values."""
    from accelerate import init_empty_weights
    from transformers import GenerationConfig
    from transformers.initialization import no_init_weights

    with within_limits(source), no_init_weights(), init_empty_weights(include_buffers=False):
        config = copy.deepcopy(source.config)  # from_config changes its dtype, which exports use
        model = auto_class(config).from_config(config, dtype=dtype, attn_implementation=attention)
    model.tie_weights()
    _keep_float32(model, dtype)
    if (source.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(source.folder))
    return model


def _keep_float32(model: Any, dtype: torch.dtype) -> None:
    """Give tensors that transformers always loads in float32 this dtype."""
    from transformers.core_model_loading import build_glob_alternation

    if not (plan := model._get_dtype_plan(dtype)):
        return
    pattern, by_group, _ = build_glob_alternation(list(plan))
    for name, tensor in _stored(model).items():
        if (found := pattern.search(name)) is not None and found.lastgroup is not None:
            tensor.data = tensor.data.to(plan[by_group[found.lastgroup]])


def recipes_for(source: ModelSource, model: Any) -> list[Recipe] | None:
    """Return how every tensor of a model, which is on the meta device, is made from the files; None if that is not known."""
    if getattr(source.config, "quantization_config", None):
        return None
    if (recipes := find_recipes(model, _shapes_in(weights_of(source)))) is None:
        return None
    shapes = {name: shape for recipe in recipes for name, shape in recipe.shapes}
    stored, files = _stored(model), _Files(source)
    for first, names in _names_of(model).items():
        found = [name for name in names if name in shapes]
        if any(shapes[name] != tuple(stored[first].shape) for name in found) or not found:
            return None
        # transformers does not tie weights that are stored separately and differ.
        if len(found) > 1 and not _are_equal(recipes, found, files):
            return None
    return recipes


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that files must hold, by name. A tied weight is returned once."""
    kept = model.state_dict().keys()
    return {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if name in kept}


def _names_of(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each tensor that files must hold, by its first name. Only a tied weight has several."""
    first = {id(tensor): name for name, tensor in _stored(model).items()}
    names: dict[str, list[str]] = {name: [] for name in first.values()}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in every:
        if id(tensor) in first:
            names[first[id(tensor)]].append(name)
    return names


def _shapes_in(files: list[Path]) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return shapes


def _are_equal(recipes: list[Recipe], names: list[str], files: "_Files") -> bool:
    """Return whether tensors of the model that are stored as they are have the same values. Return False if any is converted."""
    stored = {recipe.name: recipe.stored[0][1] for recipe in recipes if recipe.converter is None}
    if any(name not in stored for name in names):
        return False
    keys = [stored[name] for name in names]
    num_rows = len(files.read(keys[0], slice(None)))
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        first, *others = (files.read(key, rows) for key in keys)
        if not all(torch.equal(first, other) for other in others):
            return False
    return True


def read_shards(source: ModelSource, unloaded: UnloadedModel, device: torch.device) -> None:
    """Fill a sharded model, whose parameters are on the meta device, with this rank's rows of the weights in its files.

    Adapters that were added to the model keep their values.
    """
    model, files = unloaded.model, _Files(source)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)
    stored, names = _stored(model), _names_of(model)
    first_of = {plain_name(name): first for first, every in names.items() for name in every}
    read = {name: one for name, one in stored.items() if isinstance(one, nn.Parameter) and not one.is_meta}  # adapters
    for recipe in unloaded.recipes:
        # A tied weight may be stored under several names. All are the same.
        wanted = {
            name: stored[first_of[name]]
            for name, _ in recipe.shapes
            if first_of.get(name, name) in stored.keys() - read.keys()
        }
        made = _own_parts(recipe, model, wanted, files) if wanted else {}
        read |= {first_of[name]: _placed(made[name], tensor, device) for name, tensor in wanted.items()}
    model.load_state_dict({name: read[first] for first, every in names.items() for name in every}, assign=True)


def plain_name(name: str) -> str:
    """Return the name of a tensor in the model without adapters."""
    return PLAIN.sub(".", name)


def _own_parts(recipe: Recipe, model: Any, wanted: dict[str, Any], files: "_Files") -> dict[str, Tensor]:
    """Return what this rank holds of each wanted tensor that a recipe makes."""
    first = next(iter(wanted.values()), None)
    if isinstance(first, DTensor) and recipe.is_by_rows():
        return recipe.make_rows(model, own_rows(first), files.read)
    made = recipe.make(model, lambda name: files.read(name, slice(None)))
    rows = {name: own_rows(tensor) for name, tensor in wanted.items() if isinstance(tensor, DTensor)}
    return made | {name: made[name][own.start : own.stop] for name, own in rows.items()}


def _placed(part: Tensor, tensor: Any, device: torch.device) -> Tensor:
    """Return a part of a tensor on the device, sharded like `tensor`. The part is copied, because it may be a mapped file."""
    own = torch.empty(part.shape, dtype=tensor.dtype, device=device).copy_(part)
    if not isinstance(tensor, DTensor):
        return nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
    given = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    return nn.Parameter(DTensor.from_local(own, tensor.device_mesh, tensor.placements, **given), tensor.requires_grad)


class _Files:
    """The weight files of a model. One file is mapped into memory at a time."""

    def __init__(self, source: ModelSource):
        self._source, self._open, self._path = source, None, Path()
        self._places = {name: path for path in weights_of(source) for name in self._names_in(path)}

    def read(self, name: str, rows: slice) -> Tensor:
        """Return rows of a stored tensor, as a view of the mapped file."""
        stored = self._opened(self._places[name]).get_slice(name)
        return stored[rows] if stored.get_shape() else self._opened(self._places[name]).get_tensor(name)

    def _names_in(self, path: Path) -> list[str]:
        return list(self._opened(path).keys())

    def _opened(self, path: Path) -> Any:
        if path != self._path:
            self._open = None
            try:
                self._open, self._path = safe_open(path, "pt"), path
            except SafetensorError as error:
                raise ConfigError(
                    f"{self._source.place}: its weights are not readable as safetensors ({one_line(error)}). Is the "
                    "download complete?"
                ) from None
        return self._open

"""Finds how each tensor of a model is made from the tensors in its files, with the conversions of transformers.

Most are stored as they are. Files of some models name one tensor per expert, which transformers stacks:
mlp.experts.0.down_proj.weight and mlp.experts.1.down_proj.weight become mlp.experts.down_proj. A rank that needs only some rows
of such a tensor needs only some of the stored ones.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Shape = tuple[int, ...]
# How rows of the result are made from parts of what is stored: from the same rows of each stored tensor, or from as many stored
# tensors (row 3 from the fourth of each pattern). None: from everything.
Rows = Literal["same rows", "one tensor per row"] | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one or several tensors of a model are made from stored tensors."""

    name: str  # in the model; the first of several
    stored: tuple[tuple[str, str], ...]  # (transformers' pattern, name in the files)
    converter: Any = None  # transformers' WeightConverter; None: the stored tensor as it is
    rows: Rows = "same rows"
    shapes: tuple[tuple[str, Shape], ...] = ()  # of everything that it makes, by name

    def make(self, model: Any, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return all of the tensors. `read` returns a stored tensor by name."""
        return self._make(model, [(pattern, read(name)) for pattern, name in self.stored])

    def make_rows(self, model: Any, rows: range, read: Callable[[str, slice], Tensor]) -> dict[str, Tensor]:
        """Return these rows of the tensors. `read` returns rows of a stored tensor. The tensors have equally many rows."""
        if not rows:
            return {name: torch.empty((0, *shape[1:])) for name, shape in self.shapes}
        if self.rows == "one tensor per row":
            stored = [one for pattern in self._patterns() for one in self._named(pattern)[rows.start : rows.stop]]
            return self._make(model, [(pattern, read(name, slice(None))) for pattern, name in stored])
        own = slice(rows.start, rows.stop)
        return self._make(model, [(pattern, read(name, own)) for pattern, name in self.stored])

    def is_by_rows(self) -> bool:
        """Return whether `make_rows` can be used."""
        return self.rows is not None and len({shape[:1] for _, shape in self.shapes}) == 1

    def _make(self, model: Any, given: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
        if self.converter is None:
            ((_, tensor),) = given
            return {self.name: tensor}
        converter = copy.deepcopy(self.converter)  # it collects tensors
        for number, (pattern, tensor) in enumerate(given):
            converter.add_tensor(self.name, str(number), pattern, tensor)
        del given
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    def _patterns(self) -> list[str]:
        return list(dict.fromkeys(pattern for pattern, _ in self.stored))

    def _named(self, pattern: str) -> list[tuple[str, str]]:
        return [one for one in self.stored if one[0] == pattern]


def find_recipes(model: Any, stored: dict[str, Shape]) -> list[Recipe] | None:
    """Return how transformers makes the tensors of a model, which is on the meta device, from stored tensors of these shapes.

    Return None if it is not known.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    named, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, list[tuple[str, str | None]]] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, named)
        if name not in named and key in named:  # it is in the form that the model has
            name, pattern = rename_source_key(key, [], [], prefix, named)
        if name in named:
            found.setdefault(name, []).append((key, pattern))
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    recipes = [_recipe(model, name, keys, by_pattern, stored) for name, keys in found.items()]
    return None if None in recipes else [one for one in recipes if one is not None]


def _recipe(
    model: Any, name: str, keys: list[tuple[str, str | None]], by_pattern: dict[str, Any], stored: dict[str, Shape]
) -> Recipe | None:
    patterns = {pattern for _, pattern in keys}
    if patterns == {None}:
        ((key, _), *others) = keys
        return None if others else Recipe(name, ((key, key),), shapes=((name, stored[key]),))
    if None in patterns or len({id(by_pattern[pattern]) for pattern in patterns if pattern}) != 1:
        return None
    converter = by_pattern[next(iter(pattern for pattern in patterns if pattern))]
    recipe = Recipe(name, tuple((pattern, key) for key, pattern in keys if pattern), converter, None)
    # Conversions on the meta device say which tensors they make, without reading any.
    made = recipe.make(model, lambda key: torch.empty(stored[key], device="meta"))
    shapes = tuple((one, tuple(tensor.shape)) for one, tensor in made.items())
    rows = _rows_of(recipe, shapes[0][1])
    return Recipe(name, recipe.stored, converter, rows, shapes)


def _rows_of(recipe: Recipe, shape: Shape) -> Rows:
    """Return how rows are made. Only conversions that are known not to mix rows are used for rows."""
    from transformers.core_model_loading import MergeModulelist

    first, *later = recipe.converter.operations
    if type(first) is MergeModulelist and first.dim == 0 and all(map(_keeps_rows, later)):
        counts = {len(recipe._named(pattern)) for pattern in recipe._patterns()}
        return "one tensor per row" if counts == {shape[0]} else None
    return "same rows" if all(map(_keeps_rows, (first, *later))) else None


def _keeps_rows(operation: Any) -> bool:
    """Return whether each row of the result of an operation depends on the same row of its tensors alone."""
    from transformers import core_model_loading as transforms

    if type(operation) is transforms.Transpose:
        return min(operation.dim0, operation.dim1) > 0 and not operation.check_dims
    return type(operation) in (transforms.Concatenate, transforms.Chunk, transforms.Interleave) and operation.dim > 0

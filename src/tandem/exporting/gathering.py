"""Gathers the weights of a sharded policy on the first rank, on disk, so that no rank holds more than one whole weight.

The weights get their published names and shapes: what transformers rearranged when it loaded them is arranged as before.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.model.distributed.process_group import Ranks
from tandem.model.distributed.sharded_load import plain_name
from tandem.model.distributed.shards import whole_on_host
from tandem.model.lora.adapters import merge_adapter, merge_rows
from tandem.model.lora.layers import adapted_weights, is_of_adapter, is_of_rows
from tandem.model.lora.rows import trained_rows
from tandem.model.policy import Policy


def gather_to_disk(
    policy: Policy, published: Any, scratch: Path, round_one: Callable[[str, Tensor], Tensor], ranks: Ranks
) -> dict[str, Tensor]:
    """Gather the weights, one after another, with adapters merged into them.

    `published`: the model that is saved, without weights. `round_one`: called with the name and value of each weight.
    The first rank writes each weight to a file in the folder `scratch`. Return the weights, mapped into memory, on the first
    rank, and nothing on the others.
    """
    saved = policy.state_dict().keys()
    named = {name: t for name, t in [*policy.named_parameters(), *policy.named_buffers()] if name in saved}
    tensors = {name.removeprefix("model."): tensor for name, tensor in named.items()}
    by_plain_name = {plain_name(name): name for name in sorted(tensors) if not is_of_adapter(name)}
    layers, rows = adapted_weights(policy.model), trained_rows(policy.model)
    mapped: dict[str, Tensor] = {}
    for group in _groups(published, list(by_plain_name)):
        full: dict[str, Tensor] = {}
        for plain in group:
            weight = whole_on_host(tensors[by_plain_name[plain]], keeps=ranks.is_first)
            if plain in layers:
                name, layer = layers[plain]
                of_layer = {one: tensor for one, tensor in tensors.items() if one.startswith(f"{name}.lora_")}
                own = {one: whole_on_host(tensor, keeps=ranks.is_first) for one, tensor in of_layer.items()}
                weight = merge_adapter(name, layer, weight, own) if ranks.is_first else weight
            if rows is not None and plain == rows.name:
                of_rows = {one: whole_on_host(t, keeps=ranks.is_first) for one, t in tensors.items() if is_of_rows(one)}
                weight = merge_rows(policy.model, weight, of_rows) if ranks.is_first else weight
            full[plain] = round_one(plain, weight) if ranks.is_first else weight
            del weight

        def write(full: dict[str, Tensor] = full) -> None:
            scratch.mkdir(exist_ok=True)
            for name, tensor in _arranged(published, full).items():
                mapped[name] = _write_and_map(scratch / str(len(mapped)), tensor)

        ranks.run_or_stop_all(write, on=ranks.is_first)
    return mapped


def _groups(published: Any, names: list[str]) -> list[list[str]]:
    """Return the names in groups: weights that are stored together as one tensor are in the same group."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import GroupWeightRename, WeightConverter, rename_source_key

    conversions = get_model_conversion_mapping(published, add_legacy=False)
    if any(isinstance(one, GroupWeightRename) for one in conversions):  # new names depend on other names
        return [names]
    converters = [one.reverse_transform() for one in conversions[::-1] if isinstance(one, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        stored, _ = rename_source_key(name, [], converters, reverse=True)  # type: ignore[arg-type]
        groups.setdefault(stored, []).append(name)
    return list(groups.values())


def _arranged(published: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under their published names, arranged as they are stored. `tensors` is emptied, to free memory."""
    from transformers.core_model_loading import revert_weight_conversion

    ignored = published._keys_to_ignore_on_save or ()
    given = {name: tensors.pop(name) for name in list(tensors) if name not in ignored}
    return revert_weight_conversion(published, given)


def _write_and_map(file: Path, tensor: Tensor) -> Tensor:
    """Write a tensor to a file, and return it mapped into memory: it takes no memory until it is read."""
    numbers: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    numbers.tofile(file)
    return torch.from_file(str(file), shared=False, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)

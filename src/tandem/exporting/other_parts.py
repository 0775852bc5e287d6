"""Completes the export of a multimodal checkpoint, of which only the text model was trained.

The tensors of the other parts (vision tower, projector, audio tower) are copied from the weight files of the start model: same
names, dtypes and bytes. The trained tensors get the names that those files give them. The processor's files are copied too.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.errors import DefectError
from tandem.model.files.folder import INDEX, SINGLE, SUFFIX
from tandem.model.files.source import ModelSource, weights_of

# Files of processors. The chat template of the run is written with the tokenizer.
PROCESSOR_FILES = ("*processor_config.json", "audio_tokenizer_config.json")


def named_as_stored(
    state: dict[str, Tensor], model: Any, source: ModelSource, *, is_published: bool
) -> dict[str, Tensor]:
    """Return the tensors of a text model with the names that the weight files of the start model give them.

    A tensor that these files store in another form, such as one per expert, gets the name that transformers saves it with.
    `is_published`: whether the tensors have the latter names already.
    """
    from transformers.core_model_loading import revert_weight_conversion

    saved = state if is_published else revert_weight_conversion(model, state)
    stored = _only_name_of(_names_in_model(model, _stored_in(source)))
    own = _only_name_of(_names_in_model(model, saved))
    renamed = {name: stored[in_model] for in_model, name in own.items() if in_model in stored}
    return {renamed.get(name, name): tensor for name, tensor in saved.items()}


def copy_other_parts(folder: Path, model: Any, source: ModelSource, max_shard_size: str) -> None:
    """Add the tensors of the start model that are not in its text model to an export, in weight files of their own.

    `folder`: holds the weight files of the text model. `model`: the text model, without weights.
    """
    from safetensors.torch import save_file

    stored = _stored_in(source)
    in_model = _names_in_model(model, stored)
    others = {name: file for name, file in stored.items() if in_model[name] is None}
    written = sorted(folder.glob(f"model*{SUFFIX}"))
    if not others:
        return
    shards = _shards(others, max_shard_size)
    places: dict[str, str] = {}
    num_bytes = 0
    for number, file in enumerate(written, 1):
        name = _file_name(number, len(written) + len(shards))
        file.rename(folder / name)
        for tensor, size in _sizes(folder / name).items():
            places[tensor], num_bytes = name, num_bytes + size
    if both := places.keys() & others.keys():
        raise DefectError(
            f"{min(both)} of {source.name} belongs to its text model and to its other parts. This is a bug in tandem; nothing "
            "was exported. Please report it with the model's config.json."
        )
    for number, names in enumerate(shards, len(written) + 1):
        name = _file_name(number, len(written) + len(shards))
        tensors = {tensor: _read(others[tensor], tensor) for tensor in names}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(names, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def keep_dtypes(config: Any, source: ModelSource) -> None:
    """Give the parts that are copied the dtypes of the start model's configuration."""
    text = config.get_text_config()
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None and part is not text:
            part.dtype = getattr(source.config, name).dtype


def copy_processor(folder: Path, source: ModelSource) -> None:
    """Copy the files of the start model's processor, which prepares images, video and audio."""
    for pattern in PROCESSOR_FILES:
        for file in source.folder.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number:05}-of-{count:05}{SUFFIX}"


def _stored_in(source: ModelSource) -> dict[str, Path]:
    """Return every tensor in the weight files of a model, with its file."""
    return {name: file for file in weights_of(source) for name in _sizes(file)}


def _names_in_model(model: Any, stored: Iterable[str]) -> dict[str, str | None]:
    """Return, for each name in weight files, the parameter that transformers loads it into; None: it is not in the model.

    Of several parameters that a stored tensor is split into, the first is returned.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    expected, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, str | None] = {}
    for name in sorted(stored):
        renamed, _ = rename_source_key(name, renamings, converters, prefix, expected)
        found[name] = next((one for one in (renamed, name) if one in expected), None)
    return found


def _only_name_of(in_model: dict[str, str | None]) -> dict[str, str]:
    """Return a dict from parameter to stored name, for the parameters that one stored tensor is loaded into."""
    names: dict[str, list[str]] = {}
    for name, parameter in in_model.items():
        if parameter is not None:
            names.setdefault(parameter, []).append(name)
    return {parameter: only for parameter, (only, *more) in names.items() if not more}


def _shards(others: dict[str, Path], max_shard_size: str) -> list[list[str]]:
    """Divide tensors into weight files of at most `max_shard_size`."""
    from huggingface_hub import split_state_dict_into_shards_factory

    sizes = {name: size for file in set(others.values()) for name, size in _sizes(file).items() if name in others}
    split = split_state_dict_into_shards_factory(
        {name: sizes[name] for name in others},
        get_storage_size=lambda size: size,
        filename_pattern="{suffix}",
        max_shard_size=max_shard_size,
    )
    return list(split.filename_to_tensors.values())


def _sizes(file: Path) -> dict[str, int]:
    """Return the size in bytes of every tensor in a weight file, according to its header."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return {
        name: described["data_offsets"][1] - described["data_offsets"][0]
        for name, described in header.items()
        if name != "__metadata__"
    }


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return opened.get_tensor(name)

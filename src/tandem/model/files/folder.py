"""Reads and checks a model folder: its JSON files and the weight files that will be loaded. Does not import torch."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError, one_line
from tandem.model.files.layer_values import different_settings
from tandem.storage.cache import outside_of, refuse_outside
from tandem.terminal.arguments import setting

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
# If files with these names exist, transformers reads them instead of the two above.
DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
MAX_JSON_BYTES = 256 * 1024 * 1024  # the largest tokenizers are 35 MB, the largest indexes 10 MB
MAX_NESTING = 64  # the configuration of a quantised multi-model checkpoint is 6 levels deep
# Keys of config.json that set how many layers, heads or other parts are built.
COUNT = re.compile(r"(layer|expert|head|block|group|label|stage)s?$|depth", re.IGNORECASE)
MAX_COUNT = 65_536

# Settings that tandem computes with, of the model and of its RoPE. Each is a number or null.
NUMBERS = (
    "attention_chunk_size", "hidden_size", "index_topk", "max_position_embeddings", "max_seq_len", "moe_intermediate_size",
    "num_experts_per_tok", "num_hidden_layers", "vocab_size",
)  # fmt: skip
# Types of text models with a list instead of one of them. They are refused later, by their type.
LISTS = {"ernie4_5_vl_moe_text": ("moe_intermediate_size",)}
ROPE_NUMBERS = ("factor", "original_max_position_embeddings")
LARGEST = 2**63


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Size of a model's weight files, according to their headers."""

    num_tensors: int
    num_bytes: int


def read_json(path: Path) -> dict[str, Any]:
    """Parse a file that holds one JSON object. Raise ConfigError if the file is too large or nested too deep."""
    refuse_outside(path.parent, path)
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ConfigError(
                f"{path}: {size:,} bytes, over the limit of {MAX_JSON_BYTES:,} for a JSON file. Download it again."
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}. Download it again.") from None
    except RecursionError:
        raise _nesting_error(path) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}, not a JSON object. Download it again.")
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise _nesting_error(path)
        level = [inner for outer in level for inner in _values(outer) if isinstance(inner, dict | list)]
    return value


def weight_files(key: str, name: str, folder: Path, described: dict[str, Any]) -> list[Path]:
    """Return the files that transformers reads weights from, in order.

    Raise ConfigError unless all of them are safetensors files in `folder` itself. `described`: the parsed config.json of the
    folder.
    """
    place = setting(key, name)
    for file in folder.iterdir():
        if DISTRIBUTED.fullmatch(file.name):
            raise ConfigError(
                f"{place}: {folder} holds part of a distributed checkpoint ({file.name}), which tandem does not read. Save the "
                "model again with transformers' save_pretrained."
            )
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"{place}: {folder} holds an adapter (adapter_config.json) next to the model, and transformers would add it to the "
            "weights. Move the adapter to a separate folder and set policy.lora.adapter to that folder."
        )
    first = described.get("transformers_weights")
    if first is None:
        first = next((file for file in (SINGLE, INDEX) if (folder / file).is_file()), None)
        if first is None:
            raise _no_weights_error(place, folder)
    elif not (_is_file_name(first, SUFFIX) or _is_file_name(first, f"{SUFFIX}.index.json")):
        raise _outside_error(place, folder / "config.json", first)
    names = [first] if first.endswith(SUFFIX) else _read_index(place, folder / first)
    files = [folder / name for name in names]
    for file in files:
        check_weight_file(place, file)
    return files


def has_weights(folder: Path) -> bool:
    """Whether a folder holds any weight file. A downloaded index alone is not one."""
    return any(file.is_file() for file in folder.glob(f"*{SUFFIX}"))


def check_weight_file(place: str, file: Path) -> None:
    """Raise ConfigError if a file is missing, or links to anything outside its folder and the hub's cache."""
    if not file.is_file():
        raise ConfigError(f"{place}: {file} is missing or is not a file. Is the download complete?")
    if target := outside_of(file.parent, file):
        raise ConfigError(
            f"{place}: {file} is a link to {target}, which is outside its folder, and weights are read only from the folder "
            "itself. Replace the link with a copy of the file."
        )


def read_weight_headers(place: str, files: list[Path]) -> StoredWeights:
    """Return the number of tensors and bytes in the weight files. Raise ConfigError if a file is not safetensors."""
    from safetensors import SafetensorError, safe_open

    num_tensors = 0
    for file in files:
        try:
            with safe_open(file, "np") as opened:
                num_tensors += len(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{place}: its weights are not readable as safetensors ({one_line(error)}). Is the download complete?"
            ) from None
    return StoredWeights(num_tensors, sum(file.stat().st_size for file in files))


def refuse_large_counts(place: str, folder: Path, described: dict[str, Any], stored: StoredWeights | None) -> None:
    """Raise ConfigError if config.json asks for more layers, experts or heads than any real model has.

    Building a model with so many parts would exhaust memory. `stored`: None if the folder has no weight files.
    """
    limit = MAX_COUNT if stored is None else max(MAX_COUNT, stored.num_tensors)
    known = f"the limit is {limit:,}" if stored is None else f"the weight files hold {stored.num_tensors:,} tensors"
    for key, value in _numbers(described):
        if COUNT.search(key) and value > limit:
            raise ConfigError(
                f"{place}: {folder / 'config.json'} asks for {key} = {_shown(value)}, but {known}. Download the model again, or "
                "choose another."
            )


def refuse_rebuilding(place: str, folder: Path, described: dict[str, Any]) -> None:
    """Raise ConfigError if config.json has a fusion_config, which makes transformers replace layers of the model.

    Also raise ConfigError if config.json has an invalid quantization_config.
    """
    if described.get("fusion_config"):
        raise ConfigError(
            f"{place}: {folder / 'config.json'} has a fusion_config, which makes transformers replace layers of every model in "
            "the process. tandem trains the layers as they are; remove fusion_config."
        )
    inner = described.get("text_config")
    for level in (described, inner if isinstance(inner, dict) else {}):
        given = level.get("quantization_config")
        if given is None:
            continue
        if not isinstance(given, dict):
            problem = "which is not a mapping with a quant_method"
        elif not isinstance(given.get("quant_method", ""), str):
            problem = "whose quant_method is not a text"
        else:
            continue
        raise ConfigError(
            f"{place}: {folder / 'config.json'} has quantization_config = {_shown(given)}, {problem}. Download the model again, "
            "or choose another."
        )


def refuse_wrong_types(place: str, folder: Path, text: Any) -> None:
    """Raise ConfigError if a value in the model's config.json that tandem uses has the wrong type.

    `text`: the parsed configuration of the language model.
    """
    described = folder / "config.json"
    if not hasattr(text, "model_type"):
        raise ConfigError(
            f"{place}: {described} describes its language model with {_shown(text)}, which is not an object. Download the model "
            "again, or choose another."
        )
    if different := sorted(different_settings(text) & {*NUMBERS, "layer_types", "rope_parameters"}):
        raise ConfigError(
            f"{place}: {described} has a different {different[0]} for some layers, which tandem does not support. Choose another "
            "model."
        )
    rope = getattr(text, "rope_parameters", None)
    kinds = getattr(text, "layer_types", None)
    lists = LISTS.get(text.model_type, ())
    found = {key: getattr(text, key, None) for key in NUMBERS if key not in lists}
    if "sliding_window" not in different_settings(text):
        found["sliding_window"] = getattr(text, "sliding_window", None)
    wrong = {key: (value, "a number") for key, value in found.items() if not _is_number(value)}
    if not (rope is None or isinstance(rope, dict)):
        wrong["rope_parameters"] = (rope, "an object")
    elif rope:
        for kind in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
            wrong |= {key: (kind.get(key), "a number") for key in ROPE_NUMBERS if not _is_number(kind.get(key))}
    if not (kinds is None or (isinstance(kinds, list | tuple) and all(isinstance(kind, str) for kind in kinds))):
        wrong["layer_types"] = (kinds, "a list of names")
    for key, (value, wanted) in wrong.items():
        raise ConfigError(
            f"{place}: {described} has {key} = {_shown(value)}, which is not {wanted}. Download the model again, "
            "or choose another."
        )


def _is_number(value: Any) -> bool:
    """Whether a value is None, or a number between -2**63 and 2**63."""
    return value is None or (isinstance(value, int | float) and -LARGEST < value < LARGEST)


def _read_index(place: str, index: Path) -> list[str]:
    """Return the names of the weight files that an index lists, each name once."""
    if not index.is_file():
        raise ConfigError(f"{place}: {index} is missing or is not a file. Is the download complete?")
    described = read_json(index)
    weights = described.get("weight_map")
    if not isinstance(weights, dict) or not weights or not isinstance(described.get("metadata", {}), dict):
        raise ConfigError(f"{place}: {index} has no weight_map, so it is not an index of weights. Download it again.")
    for named in weights.values():
        if not _is_file_name(named, SUFFIX):
            raise _outside_error(place, index, named)
    return sorted(set(weights.values()))


def _is_file_name(name: Any, suffix: str) -> bool:
    """Whether `name` is a plain file name with this suffix: not a path, not a hidden file."""
    return (
        isinstance(name, str)
        and name.endswith(suffix)
        and not name.startswith(".")
        and not any(character in "/\\:" or not character.isprintable() for character in name)
    )


def _no_weights_error(place: str, folder: Path) -> ConfigError:
    if any(folder.glob(f"*{SUFFIX}")):
        return ConfigError(
            f"{place}: {folder} holds neither {SINGLE} nor {INDEX}, so transformers does not know which weights to read. Save "
            "the model again with transformers' save_pretrained."
        )
    return ConfigError(
        f"{place}: {folder} holds no .safetensors weights. "
        "Pickled weights are not read; convert them with transformers' save_pretrained."
    )


def _outside_error(place: str, file: Path, named: Any) -> ConfigError:
    return ConfigError(
        f"{place}: {file} names {_shown(named)} as weights. Only .safetensors files in the folder itself are read; save the "
        "model again with transformers' save_pretrained."
    )


def _nesting_error(path: Path) -> ConfigError:
    return ConfigError(f"{path}: nested more than {MAX_NESTING} levels deep, unlike any real file. Download it again.")


def _values(value: dict[str, Any] | list[Any]) -> Any:
    return value.values() if isinstance(value, dict) else value


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield every number in a JSON value, with the key that holds it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, key)
    elif isinstance(value, int | float):
        yield key, value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else f"{text[:100]}…"

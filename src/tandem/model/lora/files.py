"""Reads and checks the folder of a trained LoRA adapter, and writes adapters to a folder in peft's layout."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.errors import ConfigError
from tandem.model.files.folder import check_weight_file, read_json
from tandem.model.files.source import download, refuse_run
from tandem.storage.cache import content_of, is_checkpoint
from tandem.terminal.commands import export_call

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
WEIGHT = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?:(?P<side>[AB])\.weight|magnitude_vector)")
MAGNITUDE = "magnitude"
ROWS_SUFFIX = ".token_adapter.trainable_tokens_delta"  # rows of embeddings

# Keys of adapter_config.json that describe how an adapter was made or where it belongs, not what it computes.
DESCRIPTIVE_KEYS = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "task_type",
}  # fmt: skip
READ_KEYS = {
    "r", "lora_alpha", "use_rslora", "use_dora", "modules_to_save", "target_parameters", "trainable_token_indices"
}  # fmt: skip
# Initialisations that leave the base weights unchanged; others (PiSSA, OLoRA) subtract the initial adapter from them.
PLAIN_INITIALISATIONS = (True, False, "gaussian", "orthogonal", "eva")
UNSET = (None, False, "none", [], {})


@dataclass(frozen=True, slots=True)
class TrainedAdapter:
    """A LoRA adapter on disk: its settings, and the shapes of the two weights of each adapted layer."""

    name: str
    folder: Path
    dim: int
    alpha: float
    rslora: bool
    dora: bool
    # module -> {"A": [dim, in], "B": [out, dim]}, and with DoRA "magnitude": [out]
    shapes: dict[str, dict[str, tuple[int, ...]]]
    modules_to_save: tuple[str, ...]  # ends of the names of modules that were trained in full
    target_parameters: tuple[str, ...]  # ends of the names of adapted tensors of experts
    saved: dict[str, tuple[int, ...]]  # the weights of these modules -> their shapes
    ids_of_rows: tuple[int, ...] = ()  # tokens whose embeddings were trained, in the order of the rows in the file
    token_layers: tuple[str, ...] = ()  # the layers that have these rows, if the configuration names any
    token_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)  # names in the file -> shapes

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens whose embeddings were trained, in ascending order."""
        return tuple(sorted(self.ids_of_rows))

    def weights(self) -> dict[str, Tensor]:
        """Return the adapter's tensors by their names in the model, such as model.layers.0.self_attn.q_proj.lora_A.weight.

        Rows of embeddings are in the order of `token_ids`.
        """
        from safetensors.torch import load_file

        order = [self.ids_of_rows.index(one) for one in self.token_ids]
        tensors = {key.removeprefix(PREFIX): tensor for key, tensor in load_file(self.folder / WEIGHTS_FILE).items()}
        return {name: tensor[order] if name in self.token_rows else tensor for name, tensor in tensors.items()}

    def equal(self, first: str, second: str) -> bool:
        """Return whether two of the adapter's tensors are equal."""
        import torch
        from safetensors import safe_open

        with safe_open(self.folder / WEIGHTS_FILE, "pt") as file:
            return torch.equal(*(file.get_tensor(PREFIX + name) for name in (first, second)))

    def content(self) -> list[Any]:
        """Return everything that determines what the adapter computes, to be hashed."""
        ids = [self.ids_of_rows] if self.ids_of_rows else []
        return [content_of(self.folder / WEIGHTS_FILE), self.dim, self.alpha, self.rslora, *ids]


def read_adapter(name: str) -> TrainedAdapter:
    """Read an adapter from a local folder or the hub. Raise ConfigError unless it is plain LoRA with weights in safetensors."""
    key = f"policy.lora.adapter = {name}"
    refuse_run("policy.lora.adapter", name)
    folder = Path(name).resolve() if Path(name).is_dir() else download("policy.lora.adapter", name, None, ["adapter_*"])
    if not (folder / CONFIG_FILE).is_file():
        hint = (
            f"It is a checkpoint: run {export_call(name, 'adapter')} first."
            if is_checkpoint(folder)
            else "Give a folder saved by peft."
        )
        raise ConfigError(f"{key}: {folder} holds no {CONFIG_FILE}, so it is not an adapter. {hint}")
    if not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(
            f"{key}: {folder} holds no {WEIGHTS_FILE}. Pickled weights are not read; save the adapter again with peft."
        )
    check_weight_file(key, folder / WEIGHTS_FILE)
    described = read_json(folder / CONFIG_FILE)
    _check_plain(key, described)
    dim, alpha = described.get("r"), described.get("lora_alpha")
    if type(dim) is not int or dim < 1 or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ConfigError(
            f"{key}: its {CONFIG_FILE} has no valid r and lora_alpha, so it is not a LoRA adapter. Save it again with peft."
        )
    to_save, parameters = (_names_in(key, described, one) for one in ("modules_to_save", "target_parameters"))
    dora = bool(described.get("use_dora"))
    ids, layers = _tokens_in(key, described.get("trainable_token_indices"))
    shapes, saved, rows = _read_shapes(key, folder / WEIGHTS_FILE, has_saved=bool(to_save), has_rows=bool(ids))
    _check_complete(key, shapes, dora=dora)
    return TrainedAdapter(
        name=name,
        folder=folder,
        dim=dim,
        alpha=float(alpha),
        rslora=bool(described.get("use_rslora")),
        dora=dora,
        shapes=shapes,
        modules_to_save=to_save,
        target_parameters=tuple(sorted(parameters)),  # peft stores a set
        saved=saved,
        ids_of_rows=ids,
        token_layers=layers,
        token_rows=rows,
    )


def write_adapter(folder: Path, config: Any, tensors: dict[str, Tensor]) -> None:
    """Write an adapter to `folder`. `config`: a peft configuration. `tensors`: named as in the model (…q_proj.lora_A.weight)."""
    from safetensors.torch import save_file

    named = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _names_in(key: str, described: dict[str, Any], name: str) -> tuple[str, ...]:
    names = described.get(name) or []
    if not isinstance(names, list) or not all(isinstance(one, str) and one for one in names):
        raise ConfigError(f"{key}: {name} in its {CONFIG_FILE} is not a list of names. Save it again with peft.")
    return tuple(names)


def _tokens_in(key: str, given: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the ids in trainable_token_indices of an adapter, and the layers for which it lists them.

    It is a list of ids, of the model's embeddings, or a dict of such lists by layer.
    """
    lists = list(given.values()) if isinstance(given, dict) else [given or []]
    ids = lists[0] if lists else []
    is_valid = isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids) and len(set(ids)) == len(ids)
    if not is_valid or any(one != ids for one in lists):
        raise ConfigError(
            f"{key}: trainable_token_indices in its {CONFIG_FILE} is not one list of different ids. Merge the adapter with peft, "
            "and start from the result."
        )
    return tuple(ids), tuple(given) if isinstance(given, dict) else ()


def name_of_rows(embeddings: str) -> str:
    """Return the name, in an adapter's files, of trained rows of embeddings."""
    return f"{embeddings}{ROWS_SUFFIX}"


def _check_plain(key: str, described: dict[str, Any]) -> None:
    if described.get("peft_type") != "LORA":
        raise ConfigError(f"{key}: its peft_type is {described.get('peft_type')}. Only LORA adapters are supported.")
    initialisation = described.get("init_lora_weights", True)
    if initialisation not in PLAIN_INITIALISATIONS:
        raise ConfigError(
            f"{key}: init_lora_weights = {json.dumps(initialisation)}: the adapter belongs to base weights that this "
            "initialisation changed. Convert it to plain LoRA with peft."
        )
    for name, value in described.items():
        if name not in DESCRIPTIVE_KEYS | READ_KEYS | {"init_lora_weights"} and value not in UNSET:
            raise ConfigError(f"{key}: {name} = {json.dumps(value)}: only plain LoRA and DoRA adapters are supported.")


def _read_shapes(
    key: str, path: Path, *, has_saved: bool, has_rows: bool
) -> tuple[dict[str, dict[str, tuple[int, ...]]], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of the adapters' weights by module, of weights that were trained in full, and of rows of embeddings.

    `has_saved`, `has_rows`: whether the adapter may hold the second and the third kind.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    saved: dict[str, tuple[int, ...]] = {}
    rows: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                shape = tuple(file.get_slice(name).get_shape())
                if found := WEIGHT.fullmatch(name):
                    shapes.setdefault(found["module"], {})[found["side"] or MAGNITUDE] = shape
                elif has_rows and name.startswith(PREFIX) and name.endswith(ROWS_SUFFIX):
                    rows[name.removeprefix(PREFIX)] = shape
                elif has_saved and name.startswith(PREFIX) and ".lora_" not in name:
                    saved[name.removeprefix(PREFIX)] = shape
                else:
                    raise ConfigError(
                        f"{key}: holds {name}, which is not a weight of a LoRA adapter. Save it again with peft."
                    )
    except SafetensorError as error:
        raise ConfigError(f"{key}: its weights are not readable as safetensors ({error}). Is it complete?") from None
    return shapes, saved, rows


def _check_complete(key: str, shapes: dict[str, dict[str, tuple[int, ...]]], *, dora: bool) -> None:
    """Raise ConfigError unless every layer has all of its weights, and only those. `dora`: whether it should have magnitudes."""
    for module, sides in shapes.items():
        if not sides.keys() >= {"A", "B"}:
            raise ConfigError(
                f"{key}: has only one of the two weights (lora_A, lora_B) of {module}, so it is incomplete. Download it again."
            )
        if (MAGNITUDE in sides) != dora:
            found = "has no" if dora else "has a"
            raise ConfigError(
                f"{key}: {found} lora_magnitude_vector of {module}, but use_dora is {str(dora).lower()} in its {CONFIG_FILE}. "
                "Save it again with peft."
            )

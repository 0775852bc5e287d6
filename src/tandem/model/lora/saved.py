"""Modules that are trained in full alongside adapters (policy.lora.modules_to_save): which ones, and their names in peft's files.

peft wraps such a module and keeps a second copy of its weights. tandem trains the module itself, because the reference never
needs the original weights: its log-probabilities are cached before the first step, or computed by a separate model.
"""

from dataclasses import dataclass
from typing import Any

from tandem.config.sections.policy import Lora
from tandem.errors import ConfigError
from tandem.model.architecture import is_multimodal
from tandem.model.files.source import ModelSource
from tandem.model.lora.files import TrainedAdapter
from tandem.model.lora.quantised import quantised_layers
from tandem.model.lora.targets import ends_with
from tandem.terminal.printable import listed

KEY = "policy.lora.modules_to_save"
MERGE = "Merge the adapter with peft, and start from the result."


@dataclass(frozen=True, slots=True)
class SavedModules:
    """The modules that are trained in full."""

    modules: tuple[str, ...] = ()  # full names
    peft_names: tuple[str, ...] = ()  # names that select exactly these modules in peft
    # Every weight of the modules, by its name in peft's files -> its name among the model's parameters. A tied weight has
    # several names in files and one among the parameters.
    weights: tuple[tuple[str, str], ...] = ()

    @property
    def parameters(self) -> set[str]:
        """The names of the trained parameters, in the model."""
        return {name for _, name in self.weights}

    def holds(self, module: str) -> bool:
        """Whether a module is one of these, or inside one of them."""
        return any(module == own or module.startswith(f"{own}.") for own in self.modules)


def select_saved(model: Any, source: ModelSource, lora: Lora, start: TrainedAdapter | None) -> SavedModules:
    """Return the modules that a configuration, or the adapter that training starts from, trains in full.

    `model`: the model without weights and without adapters. Raise ConfigError for modules that cannot be trained.
    """
    asked = _find(model, source, lora.modules_to_save)
    if start is None:
        key, modules = KEY, asked
    else:
        key = f"policy.lora.adapter = {start.name}"
        modules = _modules_of(model, start)
        if lora.modules_to_save and set(asked) != set(modules):
            raise ConfigError(
                f"{key}: its modules_to_save are {listed(modules) if modules else 'none'}, but {KEY} selects {listed(asked)}. "
                f"Leave out {KEY}."
            )
    if not modules:
        if start is not None and start.saved:
            raise _other_model(key, min(start.saved), source)
        return SavedModules()
    saved = _describe(model, modules)
    _refuse_shared_weights(model, source, saved, start)
    if lora.quantization is not None:
        _refuse_quantised(model, modules, key, lora.quantization)
    if start is not None:
        _check_start(model, source, saved, start)
    return saved


def _find(model: Any, source: ModelSource, wanted: list[str]) -> tuple[str, ...]:
    """Return the full names of the modules whose names end with an item of `wanted`."""
    with_weights = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    found: list[str] = []
    for pattern in wanted:
        selected = [name for name in with_weights if ends_with(name, pattern)]
        if not selected:
            weights = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # a tied head's too
            own = {name.rpartition(".")[0].rpartition(".")[2] for name in weights} - {""}
            whose, only = source.name, ""
            if is_multimodal(source.config):
                whose, only = f"the text model of {whose}", " Modules of its other parts are not trained."
            raise ConfigError(
                f"{KEY}: {pattern} matches no module with weights of {whose}. It has {listed(sorted(own))}.{only}"
            )
        found += selected
    modules = tuple(name for name in with_weights if name in found)
    for name in modules:
        if inside := next((other for other in modules if other.startswith(f"{name}.")), None):
            raise ConfigError(f"{KEY} selects {name} and also {inside}, which is a part of it. Leave one of them out.")
    return modules


def _modules_of(model: Any, start: TrainedAdapter) -> tuple[str, ...]:
    """Return the modules that peft trains in full for this adapter. peft compares the ends of names, parts of words included."""
    return tuple(name for name, _ in model.named_modules() if any(name.endswith(end) for end in start.modules_to_save))


def _describe(model: Any, modules: tuple[str, ...]) -> SavedModules:
    names = {parameter: name for name, parameter in model.named_parameters()}
    weights = [
        (f"{name}.{own}", names[parameter])
        for name in modules
        for own, parameter in model.get_submodule(name).named_parameters(remove_duplicate=False)
    ]
    every = [name for name, _ in model.named_modules()]
    short = sorted({name.rpartition(".")[2] for name in modules})
    # peft would also select model.layers.0.input_layernorm for norm.
    selected = {name for name in every if any(name.endswith(end) for end in short)}
    peft_names = tuple(short) if selected == set(modules) else modules
    return SavedModules(modules=modules, peft_names=peft_names, weights=tuple(weights))


def _refuse_shared_weights(model: Any, source: ModelSource, saved: SavedModules, start: TrainedAdapter | None) -> None:
    """Raise ConfigError if a weight is also used outside of the modules: it would be trained there too."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        if not saved.holds(module) and names[parameter] in saved.parameters:
            other = next(own for own, found in saved.weights if found == names[parameter]).rpartition(".")[0]
            shared = f"{other} and {module} are one weight in {source.name} (tied embeddings)"
            if start is not None:
                raise ConfigError(f"policy.lora.adapter = {start.name}: changes {other} alone, but {shared}. {MERGE}")
            both = ",".join(sorted(one.rpartition(".")[2] for one in (other, module)))
            raise ConfigError(f"{KEY}: {shared}, so they can only be trained together. Name both: {KEY}=[{both}].")


def _refuse_quantised(model: Any, modules: tuple[str, ...], key: str, quantization: str) -> None:
    layers = quantised_layers(model)
    for name in modules:
        if any(layer == name or layer.startswith(f"{name}.") for layer in layers):
            raise ConfigError(
                f"{key}: {name} is quantised by policy.lora.quantization = {quantization}, and quantised weights cannot be "
                f"trained. Leave {name} out, or policy.lora.quantization."
            )


def _check_start(model: Any, source: ModelSource, saved: SavedModules, start: TrainedAdapter) -> None:
    """Raise ConfigError unless the adapter's files hold exactly the weights of the modules, with their shapes."""
    key, names = f"policy.lora.adapter = {start.name}", dict(saved.weights)
    for name in sorted(names.keys() | start.saved.keys()):
        if name not in start.saved:
            raise ConfigError(f"{key}: holds no {name}, which its modules_to_save name. Download it again.")
        if name not in names:
            raise _other_model(key, name, source)
        expected = tuple(model.get_parameter(names[name]).shape)
        if start.saved[name] != expected:
            raise ConfigError(
                f"{key}: made for a different model: the shape of {name} is {list(start.saved[name])}, but {source.name} needs "
                f"{list(expected)}. Set policy.model_name to the adapter's base model."
            )
    tensors: dict[str, str] = {}
    for name, parameter in saved.weights:
        first = tensors.setdefault(parameter, name)
        if first != name and not start.equal(first, name):
            raise ConfigError(
                f"{key}: {first} and {name} differ in it, but are one weight in {source.name} (tied embeddings). {MERGE}"
            )


def _other_model(key: str, weight: str, source: ModelSource) -> ConfigError:
    return ConfigError(
        f"{key}: made for a different model: it holds {weight}, which is not a weight of {source.name} that its modules_to_save "
        "name. Set policy.model_name to the adapter's base model."
    )

"""Decides which linear layers of a model get adapters, before any weights load."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from tandem.config.sections.policy import ALL_LINEAR, Lora
from tandem.data.store.pool import WorkerDied, WorkerStalled, run_in_process
from tandem.errors import ConfigError
from tandem.model.distributed.sharded_load import plain_name
from tandem.model.files.source import ModelSource
from tandem.model.lora.files import MAGNITUDE, TrainedAdapter
from tandem.terminal.printable import listed

KEY_OF_EXPERTS = "policy.lora.target_parameters"
PATTERN_SECONDS, PATTERN_BYTES = 10.0, 2**30  # limits of matching a regular expression


def linear_layers(model: Any) -> tuple[dict[str, nn.Linear], str | None]:
    """Return two values: a dict from name to linear layer, which leaves out the head, and the name of the head."""
    head = model.get_output_embeddings()
    # A subclass that computes something else, as PhiMoE's router does, cannot have an adapter.
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    }
    head_name = next((name for name, module in model.named_modules() if module is head), None)
    return {name: module for name, module in linear.items() if module is not head}, head_name


def selected_targets(
    model: Any, source: ModelSource, lora: Lora, trained_in_full: Callable[[str], bool] = lambda _: False
) -> list[str]:
    """Return the full names of the layers that target_modules selects and exclude_modules does not exclude.

    `trained_in_full`: whether a module, given by name, is trained without an adapter. all-linear leaves such layers out.
    """
    layers, head = linear_layers(model)
    if not layers and lora.target_modules:
        raise ConfigError(
            f"policy.lora: {source.name} (model type {source.config.model_type}) has no linear layers that can have adapters. "
            "Train it in full: leave out policy.lora."
        )
    known = f"Its linear layers are {listed(sorted({name.rsplit('.', 1)[-1] for name in layers}))}."
    selected = _select(lora.target_modules, list(layers), head, source, known=known)
    for name in lora.exclude_modules:
        if not any(ends_with(layer, name) for layer in (*layers, head or "")):
            instead = _numbers_of(name, [*layers]) or known
            raise ConfigError(
                f"policy.lora.exclude_modules: {name} matches no linear layer of {source.name}. {instead}"
            )
    if not lora.target_modules:
        return []
    if lora.target_modules == ALL_LINEAR:
        selected = [layer for layer in selected if not trained_in_full(layer)]
    remaining = [layer for layer in selected if not any(ends_with(layer, name) for name in lora.exclude_modules)]
    if twice := next((layer for layer in remaining if trained_in_full(layer)), None):
        raise ConfigError(
            f"policy.lora.target_modules selects {twice}, which policy.lora.modules_to_save trains in full. Leave it out of one "
            "of them."
        )
    if not remaining:
        raise ConfigError(
            "policy.lora.exclude_modules excludes every layer that policy.lora.target_modules selects, so nothing would be "
            "trained. Exclude fewer."
        )
    return remaining


def _select(
    wanted: list[str] | str, layers: list[str], head: str | None, source: ModelSource, *, known: str
) -> list[str]:
    """Return the names in `layers` that `wanted` selects: all-linear, a list of name suffixes, or a regular expression.

    `head`: the name of the head. `known`: a sentence that lists the linear layers, for messages.
    """
    if wanted == ALL_LINEAR:
        return layers
    names = layers if head is None else [*layers, head]
    if isinstance(wanted, str):
        found = {wanted: _match(wanted, names)}
    else:
        found = {pattern: {name for name in names if ends_with(name, pattern)} for pattern in wanted}
    for pattern, selected in found.items():
        if head in selected:
            raise ConfigError(
                f"policy.lora.target_modules: {pattern} selects {head}, the head, which cannot have an adapter: its weight is "
                "used directly, so that logits need not be stored. Leave it out."
            )
        if not selected:
            hint = (
                " A regular expression must match full names; give short names as a list." if pattern is wanted else ""
            )
            instead = known if isinstance(wanted, str) else _numbers_of(pattern, names) or known
            raise ConfigError(
                f"policy.lora.target_modules: {pattern} matches no linear layer of {source.name}. {instead}{hint}"
            )
    return [layer for layer in layers if any(layer in selected for selected in found.values())]


def _numbers_of(wanted: str, names: list[str]) -> str | None:
    """Return a sentence with the numbers that the first number of a name may have. None: no name differs only in its numbers.

    Example: layers.9.mlp.up_proj, of a model with four layers: "Its layers of this name have the numbers 0 to 3."
    """
    parts = wanted.split(".")
    if not any(part.isdecimal() for part in parts):
        return None
    alike = [r"(\d+)" if part.isdecimal() else re.escape(part) for part in parts]
    pattern = re.compile(r"(?:.*\.)?" + r"\.".join(alike))
    numbers = sorted({int(match[1]) for name in names if (match := pattern.fullmatch(name))})
    if not numbers:
        return None
    first, last = numbers[0], numbers[-1]
    has_all = numbers == list(range(first, last + 1)) and first < last
    return f"Its layers of this name have the numbers {f'{first} to {last}' if has_all else listed(numbers)}."


def adapter_targets(start: TrainedAdapter, model: Any, source: ModelSource, lora: Lora) -> list[str]:
    """Return the names of the layers that a trained adapter adapts.

    Raise ConfigError if the adapter does not fit the model or the configuration.
    """
    key = f"policy.lora.adapter = {start.name}"
    changed = lora.changed()
    for name, own in (("dim", start.dim), ("alpha", start.alpha)):
        if name in changed and changed[name] != own:
            raise ConfigError(
                f"{key}: its {name} is {own:g}, but policy.lora.{name} = {changed[name]:g}. Leave out policy.lora.{name}."
            )
    if lora.use_rslora and not start.rslora:
        raise ConfigError(
            f"{key}: its scale is alpha / dim, but policy.lora.use_rslora = true. Leave out policy.lora.use_rslora."
        )
    if lora.use_dora and not start.dora:
        raise ConfigError(
            f"{key}: it is not a DoRA adapter, but policy.lora.use_dora = true. Leave out policy.lora.use_dora."
        )
    layers, _ = linear_layers(model)
    adapted = {module: sides for module, sides in start.shapes.items() if not _is_of_experts(module, model, start)}
    for module, sides in adapted.items():
        if module not in layers:
            raise ConfigError(
                f"{key}: made for a different model: it adapts {module}, which is not a linear layer of {source.name}. Set "
                "policy.model_name to the adapter's base model."
            )
        layer = layers[module]
        expected: dict[str, tuple[int, ...]] = {
            "A": (start.dim, layer.in_features),
            "B": (layer.out_features, start.dim),
            MAGNITUDE: (layer.out_features,),
        }
        for side in sides:
            if sides[side] != expected[side]:
                raise ConfigError(
                    f"{key}: made for a different model: the shape of {module}.lora_{side} is {list(sides[side])}, but "
                    f"{source.name} needs {list(expected[side])}. Set policy.model_name to the adapter's base model."
                )
    if {"target_modules", "exclude_modules"} & changed.keys():
        asked = selected_targets(model, source, lora)
        if set(asked) != adapted.keys():
            different = min(set(asked) ^ adapted.keys())
            raise ConfigError(
                f"{key}: its layers differ from those selected by policy.lora.target_modules, for example in {different}. Leave "
                "out target_modules and exclude_modules."
            )
    return [name for name in layers if name in adapted]


def _is_of_experts(module: str, model: Any, start: TrainedAdapter) -> bool:
    """Whether a module that an adapter adapts is one with experts, or peft's wrapper of one."""
    plain = plain_name(f"{module}.")
    adapted = [name for name in experts_of(model) if any(ends_with(name, end) for end in start.target_parameters)]
    return any(name.startswith(plain) for name in adapted)


def experts_of(model: Any) -> list[str]:
    """Return the full names of the tensors that hold one matrix for each of several experts."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Conv1d)
    ]


def selected_experts(
    model: Any, source: ModelSource, lora: Lora, start: TrainedAdapter | None, trained_in_full: Callable[[str], bool]
) -> list[str]:
    """Return the full names of the tensors that target_parameters, or the adapter that training starts from, selects."""
    selected = _select_experts(model, source, lora.target_parameters, KEY_OF_EXPERTS)
    if start is not None:
        key = f"policy.lora.adapter = {start.name}"
        given = selected
        selected = _select_experts(model, source, start.target_parameters, f"{key}: target_parameters")
        if lora.target_parameters and given != selected:
            raise ConfigError(
                f"{key}: its target_parameters are {listed(start.target_parameters) if selected else 'none'}, but "
                f"{KEY_OF_EXPERTS} selects others. Leave out {KEY_OF_EXPERTS}."
            )
        for name, value in (("dropout", lora.dropout), ("quantization", lora.quantization)):
            if selected and value:
                raise ConfigError(
                    f"{key}: adapts experts (target_parameters), which does not work with policy.lora.{name} = {value}. Leave it "
                    "out."
                )
    if twice := next((one for one in selected if trained_in_full(one.rpartition(".")[0])), None):
        raise ConfigError(
            f"{KEY_OF_EXPERTS} selects {twice}, which policy.lora.modules_to_save trains in full. Leave it out of one of them."
        )
    return selected


def _select_experts(model: Any, source: ModelSource, names: Iterable[str], key: str) -> list[str]:
    known = experts_of(model)
    for name in names:
        if not any(ends_with(one, name) for one in known):
            has = f"It has {listed(sorted({one.rpartition('.')[2] for one in known}))}." if known else "It has none."
            raise ConfigError(f"{key}: {name} matches no tensor of experts of {source.name}. {has}")
    return [one for one in known if any(ends_with(one, name) for name in names)]


def ends_with(module: str, name: str) -> bool:
    """Whether a module's name ends with the complete part `name`. model.layers.0.mlp.up_proj ends with up_proj, not with proj."""
    return module == name or module.endswith(f".{name}")


def _match(pattern: str, modules: list[str]) -> set[str]:
    """Return the module names that a regular expression matches completely.

    Runs in a separate process that can be killed, because some expressions never finish.
    """
    try:
        return run_in_process(
            lambda: {module for module in modules if re.fullmatch(pattern, module)}, PATTERN_SECONDS, PATTERN_BYTES
        )
    except (WorkerStalled, WorkerDied, MemoryError):
        raise ConfigError(
            f"policy.lora.target_modules: matching the regular expression {pattern} with the names of {len(modules)} layers "
            f"takes more than {PATTERN_SECONDS:g} seconds. Give a simpler one, or a list of names."
        ) from None


def short_names(targets: Iterable[str], modules: list[str]) -> tuple[str, ...]:
    """Return the last parts of the target names, each once, if they select the targets and no other module.

    The targets layers.0.mlp.up_proj and layers.1.mlp.up_proj are returned as up_proj. If layers.2.mlp.up_proj is a module but
    not a target, the full target names are returned.
    """
    targets = list(targets)
    short = sorted({target.rsplit(".", 1)[-1] for target in targets})
    matched = [module for module in modules if any(ends_with(module, name) for name in short)]
    return tuple(short) if set(matched) == set(targets) else tuple(targets)

"""LoRA adapters of a model: adds them to a loaded or an unloaded model, and merges them into its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.model.distributed.sharded_load import UnloadedModel, plain_name, read_shards
from tandem.model.files.source import ModelSource
from tandem.model.load import load_policy
from tandem.model.lora.layers import (
    ADAPTER,
    MAGNITUDES,
    LoraPlan,
    adapted_weights,
    inject,
    is_of_adapter,
    is_of_rows,
    name_in_files,
)
from tandem.model.lora.magnitudes import begin, merged_weight
from tandem.model.lora.rows import IDS, trained_rows
from tandem.model.policy import Policy


def load_adapted(source: ModelSource, policy: PolicyConfig, device: torch.device, plan: LoraPlan) -> Policy:
    """Load the frozen model and add adapters to it, either from policy.lora.adapter or new ones.

    New adapters do not change the model's output before they are trained.
    """
    loaded = load_policy(source, policy, device, dtype=plan.dtype, quantization=plan.quantization_config())
    _add(loaded.model, plan, source)
    _begin(loaded.model, plan)
    return loaded


def adapt_unloaded(model: Any, plan: LoraPlan, source: ModelSource) -> None:
    """Add adapters to a model whose weights are on the meta device.

    The adapters have their values, in host memory: those that `load_adapted` adds with the same random state. Only new magnitudes
    get theirs from the weights, in `read_weights`.
    """
    model.requires_grad_(False)
    with _on_host_without_memory(model, [*(f"{name}.weight" for name in plan.targets), *plan.experts]):
        _add(model, plan, source)


def read_weights(source: ModelSource, unloaded: UnloadedModel, device: torch.device, plan: LoraPlan | None) -> None:
    """Fill a sharded model, with or without adapters, with this rank's rows of the weights in its files."""
    read_shards(source, unloaded, device)
    if plan is not None:
        _begin(unloaded.model, plan)


def _begin(model: Any, plan: LoraPlan) -> None:
    """Set what new adapters take from the weights. Write trained rows of an adapter to start from into the weights."""
    rows = trained_rows(model)
    if plan.start is None:
        begin(model)
    if rows is not None:
        rows.read() if plan.start is None else rows.write()


def _add(model: Any, plan: LoraPlan, source: ModelSource) -> None:
    inject(model, plan, source)
    if plan.dropout == 0 and plan.quantization is None:
        from tandem.model.lora.joined import join_adapters

        join_adapters(model)
    _set_trained_weights(model, plan)


def _set_trained_weights(model: Any, plan: LoraPlan) -> None:
    """Hold the trained weights in float32, and read them from the adapter that training starts from."""
    given = {} if plan.start is None else plan.start.weights()
    in_files = {parameter: name for name, parameter in plan.saved.weights}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
                if given:
                    parameter.copy_(given[in_files.get(name) or name_in_files(name)])


@contextmanager
def _on_host_without_memory(model: Any, names: list[str]) -> Iterator[None]:
    """Replace weights on the meta device by tensors of the same shape on the host that take no memory.

    peft moves new adapters to the device of the layer's weight, and on the meta device they would lose their values.
    """
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    weights = [layer._parameters[name] for layer, name in places]
    for (layer, name), weight in zip(places, weights, strict=True):
        layer._parameters[name] = nn.Parameter(
            torch.zeros((), dtype=weight.dtype).expand(weight.shape), requires_grad=False
        )
    try:
        yield
    finally:
        for (layer, name), weight in zip(places, weights, strict=True):
            layer._parameters[name] = weight


def merge_adapters(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the plain model, with the adapters merged into the weights in float32.

    `tensors`: the weights of the adapted model, including those of the adapters.
    """
    plain = {plain_name(name): tensor for name, tensor in tensors.items() if not is_of_adapter(name)}
    if (rows := trained_rows(model)) is not None:
        plain[rows.name] = merge_rows(model, plain[rows.name], tensors)
    for weight, (name, layer) in adapted_weights(model).items():
        plain[weight] = merge_adapter(name, layer, plain[weight], tensors)
    return plain


def merge_adapter(name: str, layer: Any, weight: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Return the weight of an adapted layer, with its adapter, which is in `tensors`, merged into it in float32."""
    up, down = (tensors[f"{name}.{side}.{ADAPTER}.weight"].float() for side in ("lora_B", "lora_A"))
    scale = layer.scaling[ADAPTER]
    if (magnitudes := tensors.get(f"{name}{MAGNITUDES}{ADAPTER}.weight")) is not None:
        return merged_weight(weight, down=down, up=up, scale=scale, magnitudes=magnitudes)
    if weight.ndim == 3:
        from tandem.model.lora.experts import merged_experts

        return merged_experts(layer, weight, down=down, up=up, scale=scale)
    return weight.float() + scale * (up @ down)


def merge_rows(model: Any, weight: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Return the weight of the embeddings with trained rows, which are in `tensors`, in float32."""
    (rows,) = (tensor for name, tensor in tensors.items() if is_of_rows(name))
    ids = getattr(model.get_input_embeddings(), IDS)
    return weight.float().index_copy(0, ids.to(weight.device), rows.float())


def dequantise(model: Any) -> dict[str, Tensor]:
    """Return a dict from name to dequantised weight, on the host, for all quantised layers."""
    from peft.utils.integrations import dequantize_module_weight

    return {
        f"{name}.weight": dequantize_module_weight(module).detach().cpu()
        for name, module in model.named_modules()
        if (weight := module._parameters.get("weight")) is not None and not weight.is_floating_point()
    }

"""Makes classes of transformers build only the text model of a multimodal checkpoint.

The class is that of the checkpoint, such as Gemma3ForConditionalGeneration, without its vision tower, projector and audio tower:
names of weights, rotary positions, scales and soft-caps of logits are those of the complete model. The other parts are removed
while they have no weights yet, so that they are never read. `exporting/other_parts.py` copies them from the files of the start
model.
"""

from functools import cache
from typing import Any

import torch
from torch import nn


@cache
def text_model_class(complete: Any, path: str) -> Any:
    """Return a class that builds only the text model, with its head, of the multimodal class `complete`.

    `path`: where the text model, without its head, is in the complete model. The class has the name of the complete one, which
    transformers uses to convert the names of weights, and writes to config.json.
    """

    def build(model: Any, config: Any, *given: Any, **named: Any) -> None:
        complete.__init__(model, config, *given, **named)
        _remove_other_parts(model, path)

    def set_attention(model: Any, name: str) -> None:
        # Not the attention of the other parts: transformers would warn that it cannot find them.
        complete.set_attn_implementation(model, {"": name, "text_config": name})

    def from_config(cls: Any, config: Any, **named: Any) -> Any:
        return cls._from_config(config, **named)

    own = {
        "__init__": build,
        "__module__": complete.__module__,
        "__doc__": complete.__doc__,
        "set_attn_implementation": set_attention,
        "from_config": classmethod(from_config),
        # Weights of the other parts are in the files, but not in the model.
        "_keys_to_ignore_on_load_unexpected": [".*"],
    }
    return type(complete)(complete.__name__, (complete,), own)


def _remove_other_parts(model: Any, path: str) -> None:
    """Remove all modules of a model that are neither part of its text model, nor contain it, nor are its head.

    Weights that belong to a module which contains the text model are removed too, such as LLaVA-NeXT's image_newline.
    """
    kept = {model, model.get_output_embeddings(), model.get_submodule(path)}
    names = path.split(".")
    parents = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names))]
    for parent in parents:
        for name, child in list(parent.named_children()):
            if child not in kept and child not in parents:
                setattr(parent, name, None)
        for name, _ in list(parent.named_parameters(recurse=False)):
            delattr(parent, name)
            setattr(parent, name, torch.empty(0))  # not None: transformers initialises it by its name
    _keep_only_existing_ties(model)


def _keep_only_existing_ties(model: Any) -> None:
    ties = getattr(model, "all_tied_weights_keys", None)
    if ties:
        present = {name for name, _ in nn.Module.named_parameters(model, remove_duplicate=False)}
        model.all_tied_weights_keys = {name: other for name, other in ties.items() if name in present}

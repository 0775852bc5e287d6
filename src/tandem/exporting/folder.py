"""Writes a policy to an export folder, as a complete model or as adapters alone, and loads export folders."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tandem.config.schema import Export
from tandem.config.sections.section import EMBEDDED
from tandem.data.text.template import Template
from tandem.exporting.weights import export_adapter, export_model
from tandem.model.distributed.process_group import Ranks
from tandem.model.files.source import ModelSource, find_model
from tandem.model.lora.files import read_adapter
from tandem.model.lora.layers import LoraPlan
from tandem.model.policy import Policy
from tandem.training.start.references import load_sharded
from tandem.training.start.setup import Setup


@dataclass(frozen=True, slots=True)
class ExportForm:
    """Whether an export is a complete model or only adapters, and how its weights are stored."""

    is_adapter: bool  # the adapters alone, without the base model
    dtype: torch.dtype
    rounding: str
    max_shard_size: str

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def what(self) -> str:
        return "adapter" if self.is_adapter else "model"

    @property
    def layout(self) -> str:
        return "in peft's layout" if self.is_adapter else "in the Hugging Face layout"


def export_form(export: Export, source: ModelSource, lora: LoraPlan | None) -> ExportForm:
    """Return the form of an export. With dtype `auto`, a model keeps the dtype of the start model, and adapters are float32."""
    is_adapter = lora is not None and not export.merge_lora
    own = torch.float32 if is_adapter else source.dtype
    dtype = own if export.dtype == "auto" else getattr(torch, export.dtype)
    return ExportForm(is_adapter, dtype, export.rounding, export.max_shard_size)


def write_export(
    policy: Policy,
    form: ExportForm,
    folder: Path,
    ranks: Ranks,
    *,
    source: ModelSource,
    lora: LoraPlan | None,
    revision: str | None,
    template: Template,
    measure: Callable[[Path], None],
) -> None:
    """Write the export under a temporary name, call `measure` with that path, and then rename it to `folder`."""
    if not form.is_adapter:
        export_model(
            policy,
            source,
            template,
            folder,
            ranks,
            dtype=form.dtype,
            rounding=form.rounding,
            max_shard_size=form.max_shard_size,
            measure=measure,
            adapted=lora is not None,
        )
        return
    assert lora is not None
    base = base_of_adapter(source)
    export_adapter(
        policy, lora, base, revision, template, folder, ranks, dtype=form.dtype, rounding=form.rounding, measure=measure
    )


def base_of_adapter(source: ModelSource) -> str:
    """Return the base model for adapter_config.json: its name on the hub, or the absolute path of its local folder."""
    return str(source.folder) if is_local(source) else source.name


def is_local(source: ModelSource) -> bool:
    """Return whether a model is a local folder rather than a model on the hub."""
    return source.name == EMBEDDED or Path(source.name).is_dir()


def reload(setup: Setup, form: ExportForm, folder: Path, ranks: Ranks) -> Policy:
    """Load an exported model or adapter in the same way as a model that is trained."""
    if form.is_adapter:
        assert setup.lora is not None
        return load_sharded(setup, setup.source, ranks, replace(setup.lora, start=read_adapter(str(folder))))
    config = setup.config.policy.model_copy(update={"model_name": str(folder), "revision": None})
    return load_sharded(setup, find_model(config), ranks)

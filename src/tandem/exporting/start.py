"""Finds the start model and the tokenizer, to rebuild the policy of a checkpoint, and the run's data, to measure the policy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.config.schema import Config
from tandem.config.sections.policy import Lora
from tandem.data.text.template import Template, make_template
from tandem.data.text.tokenizer import check_export, load_tokenizer
from tandem.errors import CheckpointError, ConfigError, MachineError, TandemError
from tandem.model.files.source import ModelSource, find_tokenizer
from tandem.model.load import load_policy
from tandem.model.lora.adapters import load_adapted
from tandem.model.lora.fingerprints import start_fingerprints
from tandem.model.lora.layers import LoraPlan
from tandem.model.policy import Policy
from tandem.storage.cache import read_manifest
from tandem.terminal.arguments import option
from tandem.training.checkpoint.checkpoints import FORMAT_VERSION
from tandem.training.checkpoint.saved_state import SavedState, read_state
from tandem.training.start.machine import Machine, check_machine
from tandem.training.start.setup import Setup, check_model, fit_to_machine, open_inputs


@dataclass(frozen=True, slots=True)
class Start:
    """The model that the run of a checkpoint started from, and what is needed to load it and to measure the export."""

    config: Config
    source: ModelSource
    machine: Machine
    template: Template
    setup: Setup | None  # None: the export is not measured
    not_measured: str | None  # why the export is not measured
    is_data_missing: bool  # whether the reason is a problem with the data

    @property
    def shared_reason(self) -> str | None:
        """Why the export is not measured. The text contains no paths, because it is written to files that may be uploaded."""
        return "the run's data could not be read." if self.is_data_missing else self.not_measured

    @property
    def lora(self) -> LoraPlan | None:
        return self.machine.lora


def verified_state(place: Path) -> SavedState:
    """Return the state of a checkpoint. Raise CheckpointError if it is damaged or was written in another format."""
    try:
        version = read_manifest(place, ["state.json"]).get("format_version")
    except ValueError as error:
        others = sorted(path.name for path in place.parent.glob("step_*") if path.is_dir() and path.name != place.name)
        hint = f" Choose another {option('checkpoint')}: {', '.join(others)}." if others else ""
        raise CheckpointError(f"{error}. Nothing was exported.{hint}") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{place}: written in format {version}; this tandem reads format {FORMAT_VERSION}. Export it with the version of "
            "tandem that wrote it."
        )
    return read_state(place)


def find_start(
    given: Config, place: Path, run: Path | None, saved: SavedState, device: torch.device, *, measured: bool
) -> Start:
    """Find the model that the run started from, and the run's data. Raise CheckpointError if that model has changed since.

    If the data cannot be read, the exported model is not evaluated on it, and `Start.not_measured` says why.
    """
    config, not_measured = (
        _computed_here(given, device),
        None if measured else f"{option('measured', False)} was given.",
    )
    lora = config.policy.lora
    if lora.quantization is not None and device.type != "cuda":
        if config.export.merge_lora:
            raise MachineError(
                f"policy.lora.quantization = {lora.quantization}: merging needs the quantised weights, which need a CUDA "
                f"device, and this machine has none. Export the adapters with {option('form', 'adapter')}, or merge on a "
                "machine with a GPU."
            )
        not_measured = f"policy.lora.quantization = {lora.quantization} needs a CUDA device."
        unquantised = lora.model_copy(update={"quantization": None})
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"lora": unquantised})})
    source = _find_model(config, run or place)
    machine = check_machine(config, source, device)
    _refuse_other_model(place, saved, source, lora)
    tokenizer_folder = find_tokenizer(config.policy, source)
    tokenizer = load_tokenizer(tokenizer_folder)
    check_export(tokenizer, tokenizer_folder, source.config)
    template = make_template(tokenizer, config.policy.tokenizer)
    setup, problem = (None, None) if not_measured else _open_data(config, source, machine)
    if not_measured is None and setup is not None and not setup.plan.validation:
        setup, not_measured = None, "the run has no validation set."
    return Start(config, source, machine, template, setup, not_measured or problem, is_data_missing=problem is not None)


def load_unmeasured(start: Start, source: ModelSource, lora: LoraPlan | None) -> Policy:
    """Load a model without sharding and compilation. The model is only written or checked; no forward pass runs."""
    policy, device = start.config.policy, start.machine.device
    if lora is not None:
        return load_adapted(source, policy, device, lora)
    return load_policy(source, policy, device, dtype=torch.float32 if policy.weights == "float32" else torch.bfloat16)


def _computed_here(config: Config, device: torch.device) -> Config:
    """Return the configuration with settings that this device supports. The replaced settings do not affect the weights."""
    policy: dict[str, Any] = {} if device.type == "cuda" else {"attention": "auto", "compile": "auto"}
    if config.policy.weights != "float32" and config.policy.precision == "auto":
        policy["precision"] = "bfloat16"  # as on the GPU that trained it
    return config.model_copy(update={"policy": config.policy.model_copy(update=policy)})


def _find_model(config: Config, trained: Path) -> ModelSource:
    try:
        return check_model(config)
    except ConfigError as error:
        if Path(config.policy.model_name).is_absolute() or Path(config.policy.model_name).exists():
            raise
        raise type(error)(
            f"{error} {trained} was trained from this model. If it is a local folder, run this command in the directory where "
            "the run was started."
        ) from None


def _refuse_other_model(place: Path, saved: SavedState, source: ModelSource, lora: Lora) -> None:
    """Raise CheckpointError if the start model changed, because weights that were not trained are taken from it."""
    then = saved.fingerprints.get("start model")
    if then is not None and then not in start_fingerprints(source, lora):
        raise CheckpointError(
            f"{place}: the start model, {source.name}, changed since this checkpoint was saved, so the trained model cannot be "
            "rebuilt exactly. Restore the start model."
        )


def _open_data(config: Config, source: ModelSource, machine: Machine) -> tuple[Setup | None, str | None]:
    """Return the Setup and None. If the run's data cannot be used, return None and the error message."""
    try:
        return fit_to_machine(open_inputs(config, source), machine), None
    except TandemError as error:
        return None, str(error).splitlines()[0]

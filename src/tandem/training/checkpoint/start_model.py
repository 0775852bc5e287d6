"""Refuses to use a run with a model that changed since the run trained with it. Does not import torch until models are compared.

A run that trained adapters needs its start model to be loaded, and every run needs its reference to be measured. A checkpoint
stores the fingerprints of both.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.config.load import load_config
from tandem.config.schema import Config
from tandem.config.sections.policy import Lora
from tandem.errors import CheckpointError, ConfigError
from tandem.model.files.source import ModelSource, weights_fingerprint
from tandem.storage.cache import is_checkpoint
from tandem.storage.ownership import step_in
from tandem.terminal.arguments import option
from tandem.training.checkpoint.saved_state import SavedState, read_state
from tandem.training.run.directory import checkpoint_dir

Role = Literal["start model", "reference model"]


@dataclass(frozen=True, slots=True)
class TrainedWith:
    """A model that a run trained with, as its checkpoints describe it."""

    run: Path  # or a checkpoint
    role: Role
    fingerprint: str
    lora: Lora  # of the run
    advice: str  # how a message about a change ends


def config_without_data(run: Path) -> Config:
    """Load the configuration of a run or a checkpoint without its loss and data, so that no code that they name is run."""
    return load_config(str(run / "config.yaml"), ["dpo={}", "data={}", "reference={}"]).config


def base_of(run: Path, config: Config) -> TrainedWith | None:
    """The start model of a run of adapters, on which they are loaded. None if no checkpoint of the run describes it."""
    return _trained_with(run, config, "start model", "so its adapters do not belong to it. Restore that model.")


def reference_of(run: Path, config: Config) -> TrainedWith | None:
    """The model that a run trained against. None if no checkpoint of the run describes it."""
    role: Role = "start model" if config.reference.model is None else "reference model"
    name = config.policy.model_name if config.reference.model is None else config.reference.model
    return _trained_with(
        run,
        config,
        role,
        "so rewards would not be those that it was trained with. Restore that model, or compare with it as it is now: "
        f"{option('reference', name)}.",
    )


def _trained_with(run: Path, config: Config, role: Role, advice: str) -> TrainedWith | None:
    state = newest_state(run.parent, run.name) if is_checkpoint(run) else newest_state(checkpoint_dir(config, run))
    found = None if state is None else state.fingerprints.get(role)
    return None if found is None else TrainedWith(run, role, found, config.policy.lora, advice)


def newest_state(folder: Path, pattern: str = "step_*") -> SavedState | None:
    """Return the contents of the newest readable state.json in a folder of checkpoints; None if there is none."""
    places = [path.resolve() for path in folder.glob(pattern) if is_checkpoint(path)]
    for place in sorted(places, key=lambda path: step_in(path.name) or 0, reverse=True):
        try:
            return read_state(place)
        except CheckpointError:
            continue  # whatever loads this checkpoint reports it
    return None


def refuse_changed(model: TrainedWith, source: ModelSource) -> None:
    """Raise CheckpointError if `source` is no longer the model that the run trained with."""
    if model.role == "reference model":
        now = {weights_fingerprint(source)}
    else:
        from tandem.model.lora.fingerprints import start_fingerprints

        try:
            now = start_fingerprints(source, model.lora)
        except ConfigError:  # the adapter that the run started with is missing, so the models cannot be compared
            return
    if model.fingerprint not in now:
        raise CheckpointError(
            f"{model.run}: its {model.role}, {source.name}, changed since the run trained with it, {model.advice}"
        )


def refuse_to_resume(run: Path, folder: Path, source: ModelSource, lora: Lora, weights: str) -> None:
    """Raise CheckpointError if the start model changed since the run began. `folder`: of checkpoints; `weights`: fingerprint now.

    Checked before the audit, which would compare the model with the reference that was cached for the model before the change.
    """
    state = newest_state(folder)
    if state is None or state.fingerprints.get("start model", weights) == weights:
        return
    what = "this model" if lora.adapter is None else f"this model, or policy.lora.adapter = {lora.adapter},"
    raise CheckpointError(
        f"{source.place}: {what} changed since {run} began, so the run cannot resume. Restore it, or start again with "
        f"{option('fresh', True)}."
    )

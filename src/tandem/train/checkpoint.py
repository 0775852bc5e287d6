"""The whole state of a run in; `checkpoints/step_N` out, verified by SHA-256 before it is read again."""

import json
import os
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from tandem.cache import published, read_manifest, write_manifest
from tandem.errors import CheckpointError
from tandem.model.policy import Policy

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: steps done, the place in the schedule, how far metrics.jsonl reached, the latest ranking."""

    step: int
    epoch: int
    batch: int  # batches of this epoch already done
    metrics_bytes: int
    val_loss: float | None


def save_checkpoint(
    folder: Path, policy: Policy, optimizer: Any, progress: Progress, fingerprints: dict[str, str]
) -> Path:
    """Write `step_N` aside, sync it, rename it, then point `latest` at it."""
    place = folder / f"step_{progress.step}"
    if place.is_dir():
        return place
    with published(place) as aside:
        dcp.save(_tensors(policy, optimizer), checkpoint_id=aside / "tensors")
        facts = {"progress": asdict(progress), "fingerprints": fingerprints}
        (aside / "state.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
        write_manifest(aside, format_version=FORMAT_VERSION)
    point(folder / "latest", place)
    return place


def load_checkpoint(
    place: Path, policy: Policy, optimizer: Any, scheduler: Any, fingerprints: dict[str, str]
) -> Progress:
    """Put a verified checkpoint back into policy, optimizer, scheduler and random state.

    The scheduler is a function of the step alone: a new one is stepped to where it was.
    """
    facts = json.loads((place / "state.json").read_text(encoding="utf-8"))
    for name, then in facts["fingerprints"].items():
        if fingerprints.get(name) != then:
            raise CheckpointError(
                f"{place}: the {name} changed since this checkpoint was saved, so the run cannot go on exactly. "
                "Put it back as it was, or start anew with --fresh."
            )
    _make_room(policy, optimizer)
    tensors = _tensors(policy, optimizer)
    dcp.load(tensors, checkpoint_id=place / "tensors")  # in place
    torch.set_rng_state(tensors["random"])
    progress = Progress(**facts["progress"])
    with warnings.catch_warnings(action="ignore"):  # that no optimizer step went before
        for _ in range(progress.step):
            scheduler.step()
    return progress


def _tensors(policy: Policy, optimizer: Any) -> dict[str, Any]:
    """Every tensor that a run goes on from, by name: weights, optimizer states, random state."""
    tensors: dict[str, Any] = {"random": torch.get_rng_state()}
    for name, parameter in policy.named_parameters():
        tensors[f"policy.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _make_room(policy: Policy, optimizer: Any) -> None:
    """AdamW's states, which it would otherwise make at its first step."""
    for parameter in policy.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def newest_verified(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose files all match their SHA-256, and what was wrong with newer ones."""
    damaged = []
    for place in sorted(checkpoints(folder), key=step_of, reverse=True):
        try:
            read_manifest(place)
            return place, damaged
        except ValueError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(
            "no checkpoint of this run is whole:\n  " + "\n  ".join(damaged) + "\n"
            "Restore one, or start anew with --fresh. Nothing was changed."
        )
    return None, []


def prune(folder: Path, keep: int) -> None:
    """Keep the best `keep` by validation loss (newest first without one) and the latest; point `best` at the first."""
    places = sorted(checkpoints(folder), key=step_of, reverse=True)
    if not places:
        return
    ranked = sorted(places, key=_rank)
    point(folder / "best", ranked[0])
    for place in ranked[keep:]:
        if place != places[0]:
            shutil.rmtree(place)


def remove_leftovers(folder: Path) -> None:
    """Folders that a killed process was still writing: hidden, never read, and as large as a checkpoint."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


def checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step_*") if path.is_dir() and path.name[5:].isdigit()]


def step_of(place: Path) -> int:
    return int(place.name[5:])


def point(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to its neighbour `target`, in one rename."""
    aside = link.with_name(f".{link.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target.name)
    aside.replace(link)


def _rank(place: Path) -> tuple[float, int]:
    facts = json.loads((place / "state.json").read_text(encoding="utf-8"))
    loss = facts["progress"]["val_loss"]
    return (0.0 if loss is None else loss, -step_of(place))

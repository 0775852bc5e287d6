"""Saves the state of a run in the folder `checkpoints/step_N`, and loads it after verifying the SHA-256 of every file."""

import json
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tandem.errors import CheckpointError, writing
from tandem.failpoints import fail_point
from tandem.model.distributed.process_group import Ranks
from tandem.model.policy import Policy
from tandem.storage.cache import intact_manifest, published, read_json, read_manifest, sync_file, write_manifest
from tandem.storage.ownership import MARKER, free_path, remove_folder, step_in, temporary_path
from tandem.terminal.arguments import option
from tandem.training.checkpoint.host_copy import HostCopier, HostCopy
from tandem.training.checkpoint.parts import Part, fill_parts, names_in, part_of, write_parts
from tandem.training.checkpoint.ranking import Ranking
from tandem.training.checkpoint.saved_state import Progress, read_state

FORMAT_VERSION = 5
RANDOM = "random."
# Older checkpoints have files named worker_N and can still be resumed.
TENSOR_FILES = ("rank_*.safetensors", "worker_*.safetensors")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of everything that is needed to resume a run. The copy is written to disk while training continues."""

    parts: HostCopy
    progress: Progress
    fingerprints: dict[str, str]
    config: str


class Saver:
    """Writes checkpoints in a background thread, one at a time.

    Keeps the latest checkpoint and the best ones, and removes the rest.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        ranks: Ranks,
        copier: HostCopier,
        *,
        ranking: Ranking,
        took: Callable[[float], None],
        saved: Callable[[Path, int], None] = lambda place, step: None,
    ):
        """`took`: a function that is called after each checkpoint with the seconds it took to write.

        `saved`: a function that the thread of the training loop calls for each checkpoint when it is complete.
        """
        self.folder, self._keep, self._ranking, self._took, self._saved = folder, keep, ranking, took, saved
        self._ranks, self._copier = ranks.with_separate_channel(), copier
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[int] | None = None  # its result is the step

    def reserve(self, tensors: dict[str, Any]) -> None:
        """Start allocating host memory for copies of these tensors, in the background."""
        self._copier.reserve(self._parts_of_rank(tensors))

    def start(
        self, tensors: dict[str, Any], progress: Progress, fingerprints: dict[str, str], config: str, *, ranked: bool
    ) -> None:
        """Start writing a checkpoint. The previous checkpoint must be complete, because all copies use the same host memory.

        `ranked`: whether the metric that ranks this checkpoint is already measured. If not, no checkpoint is removed.
        """
        assert self._writing is None
        snapshot = Snapshot(self._copier.copy(self._parts_of_rank(tensors)), progress, fingerprints, config)
        self._writing = self._thread.submit(self._write, snapshot, ranked)

    def check(self) -> None:
        """Raise the error of a write that failed in the background. Does not wait for a write that is still in progress."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            step = writing.result()
            self._saved(self.folder / f"step_{step}", step)

    def close(self) -> None:
        self._thread.shutdown()
        self._copier.close()

    def _parts_of_rank(self, tensors: dict[str, Any]) -> dict[str, Part]:
        """Return the parts that this rank saves: its shards, if it is in the first replica, and random states.

        The first rank also saves tensors that are not sharded.
        """
        is_first, saves_shards = self._ranks.is_first, self._ranks.is_in_first_replica
        return {
            name: part_of(tensor)
            for name, tensor in tensors.items()
            if is_first or (saves_shards and isinstance(tensor, DTensor | Part)) or name.startswith(RANDOM)
        }

    def _write(self, snapshot: Snapshot, ranked: bool) -> int:
        started = time.perf_counter()
        ranks = self._ranks
        write_checkpoint(self.folder, snapshot, ranks)
        self._took(time.perf_counter() - started)
        if ranked:
            spared = snapshot.progress.spared
            ranks.run_or_stop_all(lambda: prune(self.folder, self._keep, self._ranking, spared), on=ranks.is_first)
        return snapshot.progress.step


def write_checkpoint(folder: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    """Write a checkpoint as `step_N`, under a temporary name until it is complete.

    Each rank writes its own parts. The first rank then renames the folder, and makes the link `latest` point to it.
    """
    place = folder / f"step_{snapshot.progress.step}"
    if ranks.from_first(lambda: _is_saved(place)):  # by a run that stopped at this step
        ranks.run_or_stop_all(lambda: point(folder / "latest", place), on=ranks.is_first)
        return
    with ExitStack() as stack:
        aside = ranks.from_first(lambda: stack.enter_context(published(place, "checkpoint")))
        name = f"tensors/rank_{ranks.number}.safetensors"

        def write() -> str:
            with writing(place):
                (aside / "tensors").mkdir(exist_ok=True)
                digest = write_parts(aside / name, snapshot.parts.arrived())
                fail_point("checkpoint.part")
                sync_file(aside / name)  # on the machine that wrote it
                return digest

        def complete() -> None:
            fail_point("checkpoint.tensors")
            facts = {"progress": asdict(snapshot.progress), "fingerprints": snapshot.fingerprints}
            (aside / "state.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")
            (aside / "config.yaml").write_text(snapshot.config, encoding="utf-8")
            write_manifest(aside, digests, format_version=FORMAT_VERSION)
            stack.close()
            point(folder / "latest", place)

        digests = dict(ranks.gather((name, ranks.run_or_stop_all(write, on=True) or "")))
        ranks.run_or_stop_all(complete, on=ranks.is_first)


def load_checkpoint(
    place: Path,
    policy: Policy,
    optimizer: Any,
    scheduler: Any,
    fingerprints: dict[str, str],
    ranks: Ranks,
) -> Progress:
    """Load a verified checkpoint into the policy, the optimizer, the scheduler and the random number generators.

    Return the progress of the run. The state of the scheduler is not saved, because it depends only on the step: the new
    scheduler is stepped to the saved step.
    """
    version = intact_manifest(place).get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{place}: written in format {version}; this tandem reads format {FORMAT_VERSION}. Resume with the version of "
            f"tandem that wrote it, or start again with {option('fresh', True)}."
        )
    saved = read_state(place)
    for name, then in saved.fingerprints.items():
        if fingerprints.get(name) != then:
            raise CheckpointError(
                f"{place}: the {name} changed since this checkpoint was saved, so the run cannot resume from it. Undo the "
                f"change, or start again with {option('fresh', True)}."
            )
    tensors = state_tensors(policy, optimizer, ranks.number)
    kept = names_in(place / "tensors")
    # With more ranks than before, some have no saved random state and keep their new one.
    tensors = {name: tensor for name, tensor in tensors.items() if name in kept or not name.startswith(RANDOM)}
    missing = tensors.keys() - kept
    if missing and all(name.startswith("optimizer.") for name in missing):
        raise CheckpointError(
            f"{place}: saved without optimizer states (checkpointing.save_optimizer=false), so no run can resume from it. "
            f"Start again with {option('fresh', True)}."
        )
    fill_parts(place / "tensors", {name: part_of(tensor) for name, tensor in tensors.items()})
    _set_random_states(tensors, ranks.number, place)
    with warnings.catch_warnings(action="ignore"):  # torch warns that no optimizer step came first
        for _ in range(saved.progress.step):
            scheduler.step()
    return saved.progress


def load_weights(place: Path, policy: Policy) -> None:
    """Load the trained weights of a checkpoint into the policy, without optimizer states or random states."""
    weights = {f"policy.{name}": part_of(parameter) for name, parameter in policy.trained()}
    fill_parts(place / "tensors", weights)


def state_tensors(policy: Policy, optimizer: Any | None, rank: int) -> dict[str, Any]:
    """Return all tensors that are needed to resume a run, as a dict from name to tensor.

    These are the trained weights, the optimizer states and this rank's random states.
    """
    tensors: dict[str, Any] = {f"{RANDOM}cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors[f"{RANDOM}cuda.{rank}"] = torch.cuda.get_rng_state()
    for name, parameter in policy.trained():
        tensors[f"policy.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items() if optimizer is not None else ():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _set_random_states(tensors: dict[str, Any], rank: int, place: Path) -> None:
    for device, set_state in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        if (state := tensors.get(f"{RANDOM}{device}.{rank}")) is None:
            continue
        try:
            set_state(state)
        except RuntimeError as error:
            raise CheckpointError(
                f"{place}: {RANDOM}{device}.{rank} is not a random state ({error}), so no run can resume from this "
                f"checkpoint. Move {place} elsewhere to resume from an earlier one, or start again with "
                f"{option('fresh', True)}."
            ) from None


def newest_verified(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint whose files all match their SHA-256, and an error message for each newer (damaged) one.

    Return None if the folder has no checkpoints. Raise CheckpointError if all of its checkpoints are damaged.
    """
    damaged = []
    for place in sorted(checkpoints(folder), key=step_of, reverse=True):
        try:
            read_manifest(place, ["state.json"])
            return place, damaged
        except ValueError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(
            "all checkpoints of this run are damaged:\n  " + "\n  ".join(damaged) + "\n"
            f"Restore one, or start again with {option('fresh', True)}. Nothing was changed."
        )
    return None, []


def prune(folder: Path, keep: int, ranking: Ranking, spared: int = 0) -> None:
    """Remove all checkpoints except the latest one and the `keep` best ones by the tracked metric. Update the link `best`.

    Without a tracked metric, the newest checkpoints count as the best. `spared`: checkpoints up to this step are never removed.
    """
    places = sorted(checkpoints(folder), key=step_of, reverse=True)
    ranked = sorted(places, key=lambda place: ranking.rank(step_of(place)))
    point(folder / "best", ranked[0])
    for place in ranked[keep:]:
        if place != places[0] and step_of(place) > spared and _holds_nothing_else(place):
            remove_folder(place, renamed=lambda: fail_point("checkpoint.prune"))


def set_newer_aside(place: Path) -> None:
    """Rename the damaged checkpoints that are newer than `place`.

    The run resumes from `place`, and will save checkpoints of the same steps under the original names.
    """
    for newer in checkpoints(place.parent):
        if step_of(newer) > step_of(place) and not newer.is_symlink():
            newer.rename(free_path(newer.parent, f"{newer.name}.damaged"))


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, intact or damaged. A folder `step_N` without the files of a checkpoint is left out."""
    return [path for path in folder.glob("step_*") if step_in(path.name) is not None and _is_checkpoint(path)]


def step_of(place: Path) -> int:
    step = step_in(place.name)
    assert step is not None, place
    return step


def _is_checkpoint(place: Path) -> bool:
    """Return whether a folder is a checkpoint of the step in its name.

    The folder must have the files of a checkpoint, or an intact manifest that lists these files.
    """
    files = (path for pattern in TENSOR_FILES for path in place.glob(f"tensors/{pattern}"))
    names = {f"tensors/{path.name}" for path in files}
    if (place / "state.json").is_file():
        names.add("state.json")
    names |= _listed_files(place)
    is_complete = "state.json" in names and any(name.startswith("tensors/") for name in names)
    return is_complete and _saved_step(place) in (step_in(place.name), None)


def _listed_files(place: Path) -> set[str]:
    """Return the files that the checkpoint's manifest lists; an empty set if the manifest is damaged."""
    try:
        return set(intact_manifest(place)["files"])
    except ValueError:
        return set()


def _saved_step(place: Path) -> int | None:
    try:
        step = read_json(place / "state.json")["progress"]["step"]
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return step if type(step) is int else None


def _holds_nothing_else(place: Path) -> bool:
    """Return whether a checkpoint contains only files that its manifest lists.

    A checkpoint with a user's file is never removed.
    """
    listed = {"manifest.json", *_listed_files(place)} if not place.is_symlink() else set()
    folders = {str(parent) for name in listed for parent in Path(name).parents}
    for path in place.rglob("*"):
        name = str(path.relative_to(place))
        expected = name in folders if path.is_dir() else name in listed or name == MARKER
        if path.is_symlink() or not expected:
            return False
    return len(listed) > 1


def _is_saved(place: Path) -> bool:
    """Return whether the checkpoint already exists. Raise CheckpointError if another file or folder has its name."""
    if not os.path.lexists(place):
        return False
    if not _is_checkpoint(place):
        raise CheckpointError(_name_taken(place))
    if place.is_symlink():
        try:
            read_manifest(place)
        except ValueError as error:
            raise CheckpointError(
                f"{error}. {place} is a link to this damaged checkpoint, but this run saves a checkpoint under that "
                "name. Remove the link."
            ) from None
    return True


def refuse_taken_names(folder: Path, num_steps: int) -> None:
    """Raise CheckpointError if a run of `num_steps` steps would save a checkpoint under the name of another file or folder."""
    for name in ("best", "latest"):
        _refuse_other_than_pointer(folder / name)
    newest = max(map(step_of, checkpoints(folder)), default=0)
    for path in sorted(folder.glob("step_*")):
        step = step_in(path.name)
        if step is not None and newest < step <= num_steps:
            raise CheckpointError(_name_taken(path))


def _name_taken(path: Path) -> str:
    return f"{path}: not a checkpoint written by tandem, and this run saves one under that name. Move it elsewhere."


def _refuse_other_than_pointer(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_symlink():
        what = "a directory" if path.is_dir() else "a file"
        raise CheckpointError(
            f"{path}: {what}, but tandem writes a link to a checkpoint under that name. Move it elsewhere."
        )
    target = str(path.readlink())
    if step_in(target) is None:
        raise CheckpointError(
            f"{path}: a link to {target}, not to a checkpoint (step_N) in the same folder. Remove the link."
        )


def point(link: Path, target: Path) -> None:
    """Atomically make `link` a symbolic link to `target`, which is in the same folder."""
    fail_point(f"checkpoint.{link.name}")
    _refuse_other_than_pointer(link)
    aside = temporary_path(link)
    aside.symlink_to(target.name)
    aside.replace(link)

"""What a folder holds that was given as a run and is none, for messages."""

from pathlib import Path

from tandem.errors import CheckpointError
from tandem.storage.cache import is_checkpoint, is_export, is_run
from tandem.storage.ownership import lock_holder
from tandem.terminal.commands import finish_or_use_checkpoint, with_other_path

# In the directory of a sweep, whose other folders are runs.
SWEEP_FILE, SWEEP_LOGS = "sweep.json", "logs"


def other_than_run(path: Path) -> str | None:
    """Return what an existing path is instead of a run's directory; None if it is one."""
    if is_checkpoint(path):
        return "a checkpoint, not a run"
    if not path.is_dir():
        return "a file, not a run's directory"
    return None if (path / "config.yaml").is_file() else why_not_a_run(path)


def why_not_a_run(folder: Path) -> str:
    """Return the reason why a folder without config.yaml is not a run."""
    if checkpoints := checkpoints_in(folder):
        run = run_of_checkpoints(folder)
        return (
            f"it holds checkpoints, such as {checkpoints[0]}" if run is None else f"it holds the checkpoints of {run}"
        )
    if holds := what_runs_it_holds(folder):
        return holds
    if is_export(folder):
        run = run_of_model(folder)
        return f"it holds a model{'' if run is None else f' of the run {run}'}, not a run"
    kept = sorted(folder.glob("checkpoints/step_*/config.yaml"))
    return f"its config.yaml is missing; {kept[-1]} is a copy" if kept else "it has no config.yaml, so it is not a run"


def what_runs_it_holds(folder: Path) -> str | None:
    """Return text that says that a folder is a sweep, or holds runs or checkpoints, with one of them; None if none is true."""
    if checkpoints := checkpoints_in(folder):
        run = run_of_checkpoints(folder)
        what, either = ("checkpoints", "") if run is None else (f"the checkpoints of {run}", "that run, or ")
        return f"it holds {what}: name {either}one of them, such as {checkpoints[0]}"
    runs = sorted(path.parent.name for path in folder.glob("*/config.yaml"))
    is_sweep = (folder / SWEEP_FILE).is_file()
    if not runs and not is_sweep:
        return None
    what = "it is a sweep" if is_sweep else "it holds runs"
    return f"{what}: name one of its runs{', such as ' + str(folder / runs[0]) if runs else ''}"


def refuse_without_model(place: str, run: Path) -> None:
    """Raise a CheckpointError if a run has no model yet. `place`: the argument that names the run, for the message."""
    if not is_export(run / "model"):
        raise CheckpointError(
            f"{place}: a run that has no model yet: {run / 'model'} is written when the run is finished. "
            f"{finish_or_use_checkpoint(str(run), lock_holder(run))}"
        )


def run_of_checkpoints(folder: Path) -> Path | None:
    """Return the run directory whose folder of checkpoints this is; None if it is none, or not inside its run."""
    run = folder.parent if folder.name not in ("", "..") and folder.parent.name else folder.resolve().parent
    return run if (run / "config.yaml").is_file() and checkpoints_in(folder) else None


def run_around(folder: Path) -> Path | None:
    """Return the run that a folder belongs to, such as a checkpoint or a model; None if there is none.

    It is written as the user wrote the path, if that is possible.
    """
    given = [] if ".." in folder.parts else folder.parents[:2]
    return next((one for one in (*given, *folder.resolve().parents[:2]) if is_run(one)), None)


def run_of_model(folder: Path) -> Path | None:
    """Return the run directory that exported a model; None for a model that is in no run, and for other folders."""
    return run_around(folder) if is_export(folder) else None


def hint_of_run(folder: Path) -> str:
    """Return a sentence with the command that names the run instead of its folder of checkpoints, or of its model.

    For other folders, return nothing.
    """
    run = run_of_checkpoints(folder) or run_of_model(folder)
    return "" if run is None else f" {with_other_path(folder, run)}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints that a folder holds, without opening them."""
    return sorted(path.parent for path in folder.glob("*/state.json") if is_checkpoint(path.parent))

"""Plans a sweep before anything is trained: every configuration is checked, and the plan is stored in sweep.json."""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.load import LoadedConfig, load_config, require_training_set
from tandem.config.schema import Config
from tandem.config.validation import flatten
from tandem.errors import CheckpointError, ConfigError, TandemError
from tandem.paths import check_paths
from tandem.storage.cache import fingerprint, read_json, replacing
from tandem.storage.ownership import refuse_other_than_file
from tandem.sweeping.grid import NOT_SWEPT, Combination, Grid, parse_grid
from tandem.terminal.arguments import option
from tandem.terminal.commands import key_of, override, tandem_command
from tandem.training.run.directory import numbers_in
from tandem.training.run.other_folders import SWEEP_FILE

FORMAT = 1
DEFAULT_PARENT, DEFAULT_STEM = Path("runs"), "sweep"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run of a sweep: its name, which is that of its directory, and its settings."""

    name: str
    combination: Combination
    loaded: LoadedConfig  # with run.dir=null
    settings: str  # a fingerprint of the settings that differ from their defaults


@dataclass(frozen=True, slots=True)
class Reading:
    """What a configuration file may do, and what it was written for, as the arguments of `load_config` of the same names."""

    allow_env: tuple[str, ...] = ()
    allow_code: bool = False
    from_format: str | None = None

    @property
    def options(self) -> list[str]:
        """The same as options of a command."""
        named = [] if self.from_format is None else ["--from-format", self.from_format]
        code = ["--allow-code"] if self.allow_code else []
        return [*named, *code, *(part for name in self.allow_env for part in ("--allow-env", name))]


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A checked sweep: its arguments, and its runs in the order in which they are trained."""

    config: str | None
    arguments: tuple[str, ...]  # the overrides, as given
    reading: Reading
    swept: tuple[str, ...]  # keys
    runs: tuple[PlannedRun, ...]

    def command(self, folder: Path) -> str:
        """Return the command that starts or continues this sweep in `folder`."""
        return tandem_command("sweep", *self._options(), "--out", str(folder), *self.arguments)

    def train_arguments(self, run: PlannedRun, folder: Path) -> list[str]:
        """Return the arguments of `tandem` that train a run of the sweep."""
        return ["train", *self._options(), *run.combination.overrides, override("run.dir", str(folder / run.name))]

    def _options(self) -> list[str]:
        return [*([] if self.config is None else ["--config", self.config]), *self.reading.options]

    def stored(self, folder: Path) -> dict[str, Any]:
        """Return the content of sweep.json."""
        runs = [{"name": one.name, "values": one.combination.values, "settings": one.settings} for one in self.runs]
        return {"format": FORMAT, "command": self.command(folder), "swept": self.swept, "runs": runs}


def make_plan(
    overrides: Sequence[str],
    config: str | None,
    reading: Reading,
    bar: Callable[..., AbstractContextManager[Callable[..., None]]],
) -> SweepPlan:
    """Check every configuration of a grid, with the paths that it names. An error names the combination.

    `bar`: shows a progress bar, as Reporter.progress does.
    """
    grid = parse_grid(overrides)
    for one in overrides:
        if (key := key_of(one)) in ("run.dir", "checkpointing.checkpoint_dir"):
            raise ConfigError(f"override {one!r}: {NOT_SWEPT[key]}. Leave it out.")
    with bar("Checking configurations", grid.num_runs) as done:
        runs = _checked_runs(grid, config, reading, done)
    return SweepPlan(
        config=config,
        arguments=tuple(overrides),
        reading=reading,
        swept=grid.swept,
        runs=tuple(runs),
    )


def _checked_runs(grid: Grid, config: str | None, reading: Reading, done: Callable[..., None]) -> list[PlannedRun]:
    """Return the runs of a grid. `done`: called after each of them is checked."""
    runs: list[PlannedRun] = []
    by_settings: dict[str, str] = {}
    for name, one in zip(grid.names(), grid.combinations(), strict=True):
        described = one.described
        try:
            loaded = _load_checked(one, config, reading)
        except TandemError as error:
            if not runs and _is_of_every_run(error, grid, config, reading):
                raise
            raise of_run(error, len(runs) + 1, grid.num_runs, one) from None
        settings = _fingerprint(loaded)
        if same := by_settings.get(settings):
            raise ConfigError(f"{same} and {described} are the same configuration. Leave out one of them.")
        by_settings[settings] = described
        runs.append(PlannedRun(name=name, combination=one, loaded=loaded, settings=settings))
        done()
    return runs


def of_run(error: TandemError, number: int, num_runs: int, combination: Combination) -> TandemError:
    """Return the same error with the run that it belongs to at the start of its message."""
    return type(error)(f"run {number} of {num_runs}, {combination.described}: {error}")


def _is_of_every_run(error: TandemError, grid: Grid, config: str | None, reading: Reading) -> bool:
    """Whether an error has nothing to do with the swept values, such as a configuration file that does not exist."""
    try:
        _load_checked(grid.shared, config, reading)
    except TandemError as found:
        return str(found) == str(error)
    return False


def _load_checked(one: Combination, config: str | None, reading: Reading) -> LoadedConfig:
    given = {"allow_code": reading.allow_code, "from_format": reading.from_format}
    loaded = load_config(config, [*one.overrides, "run.dir=null"], reading.allow_env, **given)
    require_training_set(loaded.config)
    for key, value in (
        ("checkpointing.checkpoint_dir", loaded.config.checkpointing.checkpoint_dir),
        ("checkpointing.checkpoint_must_save_by", loaded.config.checkpointing.checkpoint_must_save_by),
    ):
        if value is not None:
            reason = NOT_SWEPT.get(key, "this limit is of a single run; a signal, such as SIGTERM, stops a sweep")
            raise ConfigError(f"{key} = {value}: {reason}. Set {key}=null.")
    cluster = loaded.config.cluster
    if cluster.num_nodes > 1 or cluster.launcher not in ("auto", "local"):
        raise ConfigError(
            f"cluster.num_nodes = {cluster.num_nodes}, cluster.launcher = {cluster.launcher}: a sweep trains its runs on this "
            "machine. Set cluster.num_nodes=1 cluster.launcher=auto."
        )
    check_paths(loaded.config)
    return loaded


def _fingerprint(loaded: LoadedConfig) -> str:
    """Return a fingerprint of the settings that differ from their defaults, so that new keys of tandem do not change it."""
    given, defaults = flatten(loaded.as_tree()), flatten(Config().model_dump())
    return fingerprint({key: value for key, value in given.items() if key not in defaults or defaults[key] != value})


def choose_folder(plan: SweepPlan, out: str | Path | None) -> Path:
    """Return the directory of a sweep: `out`, or the newest runs/sweep-N with the same sweep, or else the next free number.

    Raise an error if `out` holds anything else than this sweep.
    """
    if out is not None:
        folder = Path(out)
        if os.path.lexists(folder) and not folder.is_dir():
            raise ConfigError(f"{option('out', folder)}: a file, not a directory. Choose another directory.")
        _refuse_other_content(plan, folder)
        return folder
    numbers = numbers_in(DEFAULT_PARENT, DEFAULT_STEM)
    for folder in (DEFAULT_PARENT / f"{DEFAULT_STEM}-{number}" for number in numbers):
        if _same(read_plan(folder), plan):
            return folder
    return DEFAULT_PARENT / f"{DEFAULT_STEM}-{numbers[0] + 1 if numbers else 1}"


def read_plan(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's sweep.json; None if there is none, or if it is damaged."""
    file = folder / SWEEP_FILE
    try:
        refuse_other_than_file(file)
        found = read_json(file)
    except (ValueError, CheckpointError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("runs"), list) else None


def write_plan(plan: SweepPlan, folder: Path) -> None:
    """Write sweep.json, unless it is there already. The directory must be locked by this process."""
    _refuse_other_content(plan, folder)
    if read_plan(folder) is None:
        with replacing(folder / SWEEP_FILE) as file:
            file.write(json.dumps(plan.stored(folder), indent=1, ensure_ascii=False) + "\n")


def _refuse_other_content(plan: SweepPlan, folder: Path) -> None:
    """Raise an error if a directory holds another sweep, or something else than a sweep."""
    refuse_other_than_file(folder / SWEEP_FILE)
    stored = read_plan(folder)
    if stored is None and os.path.lexists(folder / SWEEP_FILE):
        raise CheckpointError(
            f"{folder / SWEEP_FILE}: damaged. Move it elsewhere, or choose another directory with {option('out', metavar='DIR')}."
        )
    if stored is not None and not _same(stored, plan):
        raise CheckpointError(
            f"{folder} holds another sweep. Choose another directory with {option('out', metavar='DIR')}, or continue that "
            f"sweep with its command:\n"
            f"  {stored.get('command', 'unknown')}"
        )
    if stored is None and folder.is_dir() and any(_is_foreign(path) for path in folder.iterdir()):
        raise ConfigError(f"{option('out', folder)}: not empty, and not a sweep. Choose another directory.")


def _is_foreign(path: Path) -> bool:
    return path.name != "lock" and not path.name.startswith(".")


def _same(stored: dict[str, Any] | None, plan: SweepPlan) -> bool:
    """Whether a stored plan has the runs of `plan`, with the same names and settings."""
    runs = [] if stored is None else [one for one in stored["runs"] if isinstance(one, dict)]
    return [(one.get("name"), one.get("settings")) for one in runs] == [(one.name, one.settings) for one in plan.runs]

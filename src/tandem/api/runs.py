"""`tandem.sweep`, `list_runs`, `open_run` and `write_report`: several runs trained and compared, for Python."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.api.arguments import with_checked_arguments
from tandem.api.process import own_process
from tandem.api.result import TrainResult
from tandem.api.values import texts_of
from tandem.errors import ConfigError
from tandem.page.write import Report
from tandem.page.write import write_report as write
from tandem.report.reporter import Reporter, Verbosity
from tandem.runs import Run
from tandem.runs import list_runs as list_all
from tandem.runs import open_run as read
from tandem.sweeping.records import SweepResult

RunPath = str | Path | TrainResult  # the directory of a run, or what `train` returned


@with_checked_arguments
def sweep(
    overrides: Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    *,
    config: str | Path | None = None,
    out: str | Path | None = None,
    parallel: int | None = None,
    dry_run: bool = False,
    allow_env: Collection[str] = (),
    allow_code: bool = False,
    from_format: str | None = None,
    verbosity: Verbosity = "quiet",
) -> SweepResult:
    """Train one run for every combination of values: `sweep({"run.seed": [1, 2]}).best.name` is the best.

    Each run is trained by its own process, in its own directory. The same call again skips the runs that are finished and resumes
    the others. A run that fails is recorded in the result, and the others are trained.

    overrides: a dict in which a list holds the values to try, and other values are for all runs. Where a value is itself a list,
    give a list of lists: {"policy.lora.target_modules": [["q_proj"], ["q_proj", "v_proj"]]}. Or texts as on the command line:
    ["run.seed=1,2", "dpo.max_num_steps=50"].
    config: a YAML file with the other settings. from_format: the trainer that it was written for; None: recognised by its keys.
    out: the directory of the sweep; None: runs/sweep-N.
    parallel: how many runs to train at a time; None: one on a CPU, as many as fit on GPUs.
    dry_run: check the configurations and return the plan, but train and write nothing.
    allow_env, allow_code: what the file may do, as the options of `tandem sweep`.

    Raises StoppedError after a signal, when the runs that were training have saved their checkpoints.
    """
    from tandem.sweeping.sweep import sweep as run_sweep

    if config is not None and not isinstance(config, str | Path):
        raise ConfigError(f"config is of type {type(config).__name__}. Give the path of a YAML file.")
    texts = texts_of(overrides)
    with own_process("tandem.sweep"):
        return run_sweep(
            texts,
            config=None if config is None else str(config),
            out=out,
            allow_env=tuple(allow_env),
            allow_code=allow_code,
            from_format=from_format,
            parallel=parallel,
            dry_run=dry_run,
            reporter=Reporter(verbosity),
        )


@with_checked_arguments
def open_run(run: RunPath) -> Run:
    """Read the directory of a run, also one that is being written or damaged: what cannot be read is listed in `problems`."""
    return read(_path(run))


@with_checked_arguments
def list_runs(folder: str | Path = "runs") -> list[Run]:
    """Read every run in a folder, sorted by name. The folder may also be a sweep, or a run itself."""
    return list_all(folder)


@with_checked_arguments
def write_report(runs: RunPath | Sequence[RunPath], out: str | Path | None = None) -> Report:
    """Write the page of a run, or of several runs compared: `write_report(["runs/a-1", "runs/a-2"]).page` is its path.

    runs: directories of runs or of sweeps. A single one need not be in a list. Of several, those that are no runs are left out,
    and each run is shown once; `left_out` of the report says which.
    out: the file to write; None: RUN/report.html for one run, SWEEP/comparison.html for a sweep, comparison.html in the working
    directory for several runs. A file that is not a page of tandem is never replaced.
    """
    several = [runs] if isinstance(runs, str | Path | TrainResult) else runs
    return write([_path(run) for run in several], out)


def _path(run: RunPath) -> str | Path:
    return run.run_dir if isinstance(run, TrainResult) else run

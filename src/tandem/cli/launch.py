"""`tandem launch slurm`: checks a configuration, and writes a batch script for Slurm that trains it."""

import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.app import AllowCode, AllowEnv, ConfigFile, FromFormat, Overrides, app, expand_home_callback
from tandem.errors import ConfigError, MachineError, TandemError, full_disk, one_line

launch = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Write a batch script for a job scheduler.")
app.add_typer(launch, name="launch")


@launch.callback()
def _group() -> None:
    """Write a batch script for a job scheduler."""


@launch.command("slurm")
def slurm(
    overrides: Overrides = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    allow_code: AllowCode = False,
    from_format: FromFormat = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="LIMIT", help="Time limit, such as 04:00:00. The run saves before it, and the job is requeued."
        ),
    ] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Partition of the cluster.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Account to charge.")] = None,
    job_name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job. Default: run.name.")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Another option of sbatch, such as qos=high. Repeatable."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", callback=expand_home_callback, help="Where to write the script. Default: JOB-NAME.sbatch."
        ),
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Also submit the script with sbatch.")] = False,
) -> None:
    """Write a batch script that trains the configuration on cluster.num_nodes nodes.

    Each node has cluster.gpus_per_node GPUs.
    """
    from tandem.config.load import load_config, require_training_set
    from tandem.launch.slurm_script import SlurmOptions, batch_script, check_arguments, check_job_name, parse_extra
    from tandem.paths import check_paths, check_run
    from tandem.sweeping.plan import Reading

    check_arguments(overrides or [])
    check_job_name(job_name)
    extra = parse_extra(sbatch or [])
    loaded = load_config(config, overrides or [], allow_env or (), allow_code=allow_code, from_format=from_format)
    require_training_set(loaded.config)
    options = SlurmOptions(
        job_name=job_name or loaded.config.run.name,
        time=time,
        partition=partition,
        account=account,
        extra=extra,
    )
    reading = Reading(tuple(allow_env or ()), allow_code, from_format)
    file = [] if config is None else ["--config", config]
    arguments = [*file, *reading.options, *_after_options(overrides or [])]
    script = batch_script(loaded, arguments, options, Path.cwd())
    if loaded.translation is None:
        check_run(loaded, fresh=False, per_pair=None)
    else:  # its batch size may be that of one rank, so the job compares it with that of a run to resume
        check_paths(loaded.config)
    place = Path(out or f"{options.job_name}.sbatch")
    _write(place, script)
    print(f"{place} trains the run: submit it with sbatch {place}" if not submit else f"{place} is written")
    if submit:
        _submit(place)


def _after_options(overrides: list[str]) -> list[str]:
    """Return the overrides, after -- if one of them is an option of another trainer (--from-format)."""
    return ["--", *overrides] if any(one.startswith("-") for one in overrides) else overrides


def _write(place: Path, script: str) -> None:
    """Write the script. Raise ConfigError if its folder does not exist, or if the file exists and is not a script of tandem."""
    from tandem.launch.slurm_script import MARK
    from tandem.storage.cache import replacing

    try:
        if place.exists() and MARK not in place.read_text(encoding="utf-8", errors="replace"):
            raise ConfigError(f"--out {place}: it exists, and tandem did not write it. Choose another file.")
        if not place.parent.exists():
            raise ConfigError(f"--out {place}: there is no folder {place.parent}. Create it first.")
        with replacing(place) as file:
            file.write(script)
    except OSError as error:
        if full_disk(error):
            raise
        raise ConfigError(f"--out {place}: cannot be written ({error.strerror}). Choose another file.") from None


def _submit(place: Path) -> None:
    program = shutil.which("sbatch")
    if program is None:
        raise MachineError(
            f"sbatch is not on the PATH, so {place} was not submitted. Submit it where Slurm is installed."
        )
    done = subprocess.run([program, "--", str(place)], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise TandemError(f"sbatch refused {place}: {one_line(Exception(done.stderr))}. Correct the options.")
    print(done.stdout.strip())

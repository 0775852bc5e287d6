"""`tandem prepare`: tokenises and packs datasets, stores the results and prints a report."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.app import (
    LOADING_MESSAGE,
    AllowCode,
    AllowEnv,
    ConfigFile,
    FromFormat,
    Overrides,
    app,
    expand_home_callback,
    reported_once_per_machine,
    with_option,
)
from tandem.errors import ConfigError
from tandem.rank_variables import check_rank_variables, is_distributed

if TYPE_CHECKING:
    from tandem.config.load import LoadedConfig
    from tandem.report.reporter import Reporter, Verbosity


@app.command()
def prepare(
    overrides: Overrides = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    allow_code: AllowCode = False,
    from_format: FromFormat = None,
    pack_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Pack with each of these row lengths. Default: policy.packing.pack_length."
        ),
    ] = None,
    packing_algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="Same as policy.packing.algorithm=NAME.")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Same as run.seed=N.")] = None,
    output_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            callback=expand_home_callback,
            help="Write each dataset to a folder in DIR. To train on it, set data.train.data_path=DIR/NAME.",
        ),
    ] = None,
    from_nemo: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            callback=expand_home_callback,
            help="Read packs of NeMo Aligner (.npy) instead of data.train.",
        ),
    ] = None,
    to_nemo: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            callback=expand_home_callback,
            help="Also write packs for NeMo Aligner to DIR, as packed_{size}_seed{seed}.npy.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")] = False,
) -> None:
    """Tokenise and pack the data, and report what it contains.

    Finds the same errors in the data as `tandem train`, and stores the results, so that training starts sooner.
    """
    from tandem.config.load import load_config
    from tandem.launch.srun import adopt_srun_variables

    adopt_srun_variables()
    check_rank_variables()
    is_first = os.environ.get("RANK", "0") == "0"
    verbosity: Verbosity = "silent" if not is_first else "quiet" if quiet or as_json else "normal"
    with reported_once_per_machine():
        changes = with_option(overrides or [], "--packing-algorithm", "policy.packing.algorithm", packing_algorithm)
        changes = with_option(changes, "--seed", "run.seed", seed)
        loaded = load_config(config, changes, allow_env or (), allow_code=allow_code, from_format=from_format)
        output_dir = _given_once("--output-dir", output_dir, loaded)
        pack_sizes = _given_once("--pack-sizes", pack_sizes, loaded)
        output, nemo = (Path(folder) if folder else None for folder in (output_dir, to_nemo))
        lengths = _parse_lengths(pack_sizes)
        if from_nemo is None:
            _check_sets(loaded, output, nemo)
        else:
            _refuse_packing(nemo, lengths)
    if from_nemo is not None:
        if is_first:
            _convert_packs(loaded, Path(from_nemo), output, verbosity)
    else:
        _prepare_sets(loaded, lengths, output=output, to_nemo=nemo, verbosity=verbosity, as_json=as_json)


def _given_once(option: str, value: str | None, loaded: "LoadedConfig") -> str | None:
    """Return the value of an option, which a key of another trainer may also give. Raise ConfigError if both do."""
    if loaded.translation is None or (by_key := loaded.translation.options.get(option)) is None:
        return value
    if value is not None:
        raise ConfigError(
            f"{option} {value}: a key of {loaded.translation.origin} sets it to {by_key}. Leave out one of them."
        )
    return by_key


def _refuse_packing(to_nemo: Path | None, lengths: list[int]) -> None:
    """Raise ConfigError if options that pack a dataset are given together with --from-nemo."""
    if to_nemo is not None or lengths:
        raise ConfigError(
            "--from-nemo only converts packs to a dataset of pairs. Leave out --to-nemo and --pack-sizes."
        )


def _convert_packs(loaded: "LoadedConfig", file: Path, output: Path | None, verbosity: "Verbosity") -> None:
    """Convert a NeMo Aligner file of packs to a dataset in the folder `output`."""
    from tandem.config.sections.section import EMBEDDED

    if [one.data_path for one in loaded.config.data.training_sets] != [EMBEDDED]:
        raise ConfigError("--from-nemo reads FILE instead of data.train. Leave out data.train.")
    if output is None:
        raise ConfigError("--from-nemo needs a folder to write the dataset to. Add --output-dir DIR.")
    reporter = _announce_loading(verbosity)

    from tandem import prepare as preparing

    found = preparing.prepare_from_nemo(loaded.config, file, output)
    preparing.show_imported(found, output, loaded, reporter)


def _check_sets(loaded: "LoadedConfig", output: Path | None, to_nemo: Path | None) -> None:
    """Check the paths of the datasets and of the output."""
    from tandem.config.load import require_training_set
    from tandem.paths import check_output, check_paths

    require_training_set(loaded.config)
    check_output("--output-dir", output)
    check_output("--to-nemo", to_nemo)
    check_paths(loaded.config)


def _prepare_sets(
    loaded: "LoadedConfig",
    lengths: list[int],
    *,
    output: Path | None,
    to_nemo: Path | None,
    verbosity: "Verbosity",
    as_json: bool,
) -> None:
    """Prepare the datasets that the configuration names, and print the report."""
    reporter = _announce_loading(verbosity)
    if loaded.translation is not None:
        from tandem.report.translation import say_translation
        from tandem.terminal.commands import tandem_command

        say_translation(loaded.translation, loaded.file, reporter, all_keys=False)
        reporter.say("To see every key:")
        reporter.command(tandem_command("config", "--verbose", *loaded.file_arguments, *loaded.overrides))

    from tandem import prepare as preparing

    prepare = preparing.prepare_on_ranks if is_distributed() else preparing.prepare_data
    prepared = prepare(loaded.config, reporter.progress, lengths, output, to_nemo)
    if prepared is None:  # the first rank prints the report
        return
    if as_json:
        print(preparing.as_json(prepared))
    else:
        preparing.show(prepared, reporter)


def _announce_loading(verbosity: "Verbosity") -> "Reporter":
    from tandem.report.reporter import Reporter

    reporter = Reporter(verbosity)
    reporter.say(LOADING_MESSAGE)
    return reporter


def _parse_lengths(given: str | None) -> list[int]:
    """Parse --pack-sizes: "8192,4096" is returned as [4096, 8192]."""
    from tandem.config.sections.policy import LONGEST_PACK

    try:
        lengths = [int(part) for part in (given or "").split(",") if part.strip()]
    except ValueError:
        lengths = [0]
    if any(not 1 <= length <= LONGEST_PACK for length in lengths):
        raise ConfigError(
            f"--pack-sizes {given}: not a list of lengths from 1 to {LONGEST_PACK}. Write 4096,8192, for example."
        )
    return sorted(set(lengths))

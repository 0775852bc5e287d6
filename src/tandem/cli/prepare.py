"""`tandem prepare`: tokenises and packs sets, writes both to disk and prints a report."""

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.app import LOADING_MESSAGE, AllowEnv, ConfigFile, Overrides, app, expand_home_callback, with_option
from tandem.errors import ConfigError


@app.command()
def prepare(
    overrides: Overrides = None,
    config: ConfigFile = None,
    allow_env: AllowEnv = None,
    pack_sizes: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Pack to each of these lengths. Default: policy.packing.pack_length."),
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
            help="Write each set to a folder in DIR. Train on it with data.train.data_path=DIR/SET.",
        ),
    ] = None,
    from_nemo: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", callback=expand_home_callback, help="Read NeMo Aligner's packed .npy instead of data.train."
        ),
    ] = None,
    to_nemo: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            callback=expand_home_callback,
            help="Also write NeMo Aligner's packed_{size}_seed{seed}.npy there.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only warnings and errors.")] = False,
) -> None:
    """Tokenise and pack data before training.

    Reports what the training and validation sets contain, and refuses what training would refuse.
    """
    from tandem.config.load import load_config, require_training_set
    from tandem.config.sections.section import EMBEDDED
    from tandem.paths import check_output, check_paths

    changes = with_option(overrides or [], "--packing-algorithm", "policy.packing.algorithm", packing_algorithm)
    changes = with_option(changes, "--seed", "run.seed", seed)
    loaded = load_config(config, changes, allow_env or ())
    if from_nemo is None:
        require_training_set(loaded.config)
    lengths = _parse_lengths(pack_sizes)
    output, nemo = (Path(folder) if folder else None for folder in (output_dir, to_nemo))
    if from_nemo is None:
        check_output("--output-dir", output)
        check_output("--to-nemo", nemo)
        check_paths(loaded.config)

    from tandem.report.reporter import Reporter

    reporter = Reporter("quiet" if quiet or as_json else "normal")
    reporter.say(LOADING_MESSAGE)

    from tandem import prepare as preparing

    if from_nemo is not None:
        if to_nemo is not None or lengths:
            raise ConfigError(
                "--from-nemo only turns packs back into a set of pairs. Leave out --to-nemo and --pack-sizes."
            )
        if [one.data_path for one in loaded.config.data.training_sets] != [EMBEDDED]:
            raise ConfigError("--from-nemo reads FILE instead of data.train. Leave out data.train.")
        if output is None:
            raise ConfigError("--from-nemo needs a folder to write the set to. Add --output-dir DIR.")
        found = preparing.prepare_from_nemo(loaded.config, Path(from_nemo), output)
        preparing.show_imported(found, output, loaded, reporter)
        return
    prepared = preparing.prepare_data(loaded.config, reporter.progress, lengths, output, nemo)
    if as_json:
        print(preparing.as_json(prepared))
    else:
        preparing.show(prepared, reporter)


def _parse_lengths(given: str | None) -> list[int]:
    from tandem.config.sections.policy import LONGEST_PACK

    try:
        lengths = [int(part) for part in (given or "").split(",") if part.strip()]
    except ValueError:
        lengths = [0]
    if any(not 1 <= length <= LONGEST_PACK for length in lengths):
        raise ConfigError(f"--pack-sizes {given}: not a list of lengths from 1 to {LONGEST_PACK}. Write 4096,8192.")
    return sorted(set(lengths))

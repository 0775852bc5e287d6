"""Tokenises and packs the datasets of a configuration before training, and summarises them."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.config.load import LoadedConfig
from tandem.config.schema import Config
from tandem.config.sections.parallel import DEFAULT_PARALLEL
from tandem.config.sections.section import EMBEDDED
from tandem.data.preflight import Lengths, Preflight, preflight, preflights
from tandem.data.store.duplicates import DUPLICATE, without_duplicates
from tandem.data.store.machines import ALONE, Machines
from tandem.data.store.opening import check_usable_shares
from tandem.data.store.selection import Preferences, Selection
from tandem.data.store.sets import ProgressBar, Sets
from tandem.data.store.token_store import TokenStore
from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import ConfigError, DataError, MachineError, OutOfMemoryError
from tandem.exporting.cached import export_named_checkpoints
from tandem.model.distributed.machines import join_machines
from tandem.model.distributed.process_group import join_process_group, leave_process_group
from tandem.model.files.source import find_model
from tandem.packing.binning import Bins
from tandem.packing.nemo_files import check_for_nemo, export_nemo, import_nemo
from tandem.packing.packer import DATASET_PACK, Packer, make_packer
from tandem.packing.packs import file_name, open_packs, pack_settings, write_packs
from tandem.packing.savings import PADDED_BATCH_SIZE, PackingStats, packed_by_batch, packing_stats
from tandem.paths import check_output
from tandem.report.reporter import Reporter
from tandem.storage.cache import published, read_manifest, write_manifest
from tandem.terminal.commands import key_of, override, tandem_command, with_override
from tandem.terminal.printable import counted
from tandem.training.start.machine import check_machine, this_device
from tandem.training.start.plan import suggested_batch_size
from tandem.training.start.setup import Inputs, check_model, fit_to_machine, open_inputs
from tandem.training.validation import portions

SHOWN_TOKENS = 12
PACK_COLUMNS = [
    "set",
    "pack length",
    "packs",
    "fill",
    "preferences each",
    "pairs each",
    "packs a batch",
    "times padding",
]
BAR_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """How training would pack rows on this machine, or why training would not start."""

    length: str  # the row length and the reason for it, in words
    sets: dict[str, PackingStats]  # one epoch of each set; without the training set in policy.packing.mode=dataset
    refused: str | None  # why training would not start


@dataclass(frozen=True, slots=True)
class Preparation:
    """The result of `prepare_data`: for each set a summary, its folder and its packs, and an excerpt of the first preference."""

    sets: list[Preflight]
    folders: dict[str, str]
    packs: dict[
        str, list[PackingStats]
    ]  # of complete sets; only in mode dataset, or with --pack-sizes or an output folder
    training: TrainingRows
    num_steps: int  # training steps
    pairs_per_batch: int
    packing: str  # policy.packing.mode
    weights: dict[str, float]  # weights of training sets other than 1
    tokenizer: str  # the name of the tokenizer
    has_template: bool
    max_length: int
    prompt_end: str
    completion_start: str
    completion_end: str


def prepare_on_ranks(
    config: Config,
    bar: ProgressBar,
    pack_sizes: Sequence[int] = (),
    output: Path | None = None,
    to_nemo: Path | None = None,
) -> Preparation | None:
    """Prepare data as `prepare_data` does, on one rank of each machine. They tokenise together, each into its own cache.

    Return the result on the first rank, which alone writes to `output` and `to_nemo`, and None on the others.
    """
    timeout = config.policy.parallel.timeout_seconds
    ranks = join_process_group(DEFAULT_PARALLEL.model_copy(update={"timeout_seconds": timeout}), uses_gpus=False)
    machines = join_machines(ranks)
    folders = (output, to_nemo) if ranks.is_first else (None, None)

    def prepared() -> Preparation:
        with machines.taking_part():
            return prepare_data(config, bar, pack_sizes, *folders, machines=machines)

    done = ranks.run_or_stop_all(prepared, on=ranks.is_first_here)
    leave_process_group()
    return done if ranks.is_first else None


def prepare_data(
    config: Config,
    bar: ProgressBar,
    pack_sizes: Sequence[int] = (),
    output: Path | None = None,
    to_nemo: Path | None = None,
    *,
    machines: Machines = ALONE,
) -> Preparation:
    """Tokenise and pack every set of a configuration.

    `output`: also write each set to a prepared folder in this directory. `to_nemo`: also write each set as packed files
    of NeMo Aligner to this directory. `machines`: those that tokenise the same sets together.
    """
    check_output("--output-dir", output)
    check_output("--to-nemo", to_nemo)
    if output is not None and config.data.validation_share:
        raise ConfigError(
            f"--output-dir {output}: the packs would contain the complete set, but training holds out data.validation_share = "
            f"{config.data.validation_share} of it. Leave out --output-dir, and training uses the packs in the cache; or split "
            "the file in two."
        )
    export_named_checkpoints(config, say=lambda text: None)
    source = check_model(config)
    inputs = open_inputs(config, source, bar, machines=machines)
    sets, template = inputs.sets, inputs.template
    # If a set is split or joined with others, training uses the packs of the resulting Selection.
    used = {"train": sets.train, **{f"validation-{name}": store for name, store in sets.validation.items()}}
    chosen = {name: store for name, store in used.items() if isinstance(store, Selection)}
    if pack_sizes or output is not None or to_nemo is not None:
        packed = {**sets.read, **chosen}
    else:
        packed = {"train": sets.train} if config.policy.packing.mode == "dataset" else {}
    packs = {name: _pack_set(store, config, pack_sizes) for name, store in packed.items()}
    pairs = config.policy.train_global_batch_size
    return Preparation(
        sets=preflights(sets),
        folders=_write_folders(sets, packs, config, output, to_nemo),
        packs={
            name: [packing_stats(packer, bins, pairs) for packer, bins in several] for name, several in packs.items()
        },
        training=_training_rows(inputs),
        num_steps=inputs.schedule.num_steps,
        pairs_per_batch=pairs,
        packing=config.policy.packing.mode,
        weights={f"train-{i}": one.weight for i, one in enumerate(config.data.training_sets) if one.weight != 1},
        tokenizer=config.policy.tokenizer_name,
        has_template=template.source is not None,
        max_length=config.policy.max_total_sequence_length,
        **_excerpt(sets.train[0], template.tokenizer),
    )


def _training_rows(inputs: Inputs) -> TrainingRows:
    """Return how training would pack rows on this machine.

    If training would not start on this machine, return the reason. This is not an error, because training may run on
    another machine.
    """
    try:
        setup = fit_to_machine(inputs, check_machine(inputs.config, inputs.source, this_device()))
    except (MachineError, OutOfMemoryError) as error:
        return TrainingRows(length="", sets={}, refused=str(error))
    size, val_size = setup.config.policy.train_global_batch_size, setup.validation_batch_size
    rows: dict[str, PackingStats] = {}
    if setup.plan.batches.packs is None:
        batches = [batch.preferences for batch in setup.plan.batches.epoch(0)]
        rows["train"] = packing_stats(setup.plan.train, packed_by_batch(setup.plan.train, batches), size)
    for name, packer in setup.plan.validation.items():
        packed = packed_by_batch(packer, portions(packer, val_size))
        rows[f"validation-{name}"] = packing_stats(packer, packed, val_size)
    return TrainingRows(length=setup.plan.rows, sets=rows, refused=None)


def _write_folders(
    sets: Sets,
    packs: dict[str, list[tuple[Packer, Bins]]],
    config: Config,
    output: Path | None,
    to_nemo: Path | None,
) -> dict[str, str]:
    """Write each set as a prepared folder to `output`, and as NeMo files to `to_nemo`, unless these are None.

    Return a dict from set name to folder. Without `output`, the folder of a set is in the cache.
    """
    folders = {name: str(store.folder) for name, store in sets.read.items()}
    if to_nemo is not None:
        for name, store in sets.read.items():
            check_for_nemo(store, min(packer.length for packer, _ in packs[name]))
    if output is not None:
        folders = {name: str(_write_folder(store, packs[name], output / name)) for name, store in sets.read.items()}
    if to_nemo is not None:
        packing, seed = config.policy.packing, config.run.seed
        for name, store in sets.read.items():
            for packer, _ in packs[name]:
                size = packer.length
                folders[f"{name}, for NeMo Aligner at {size}"] = str(
                    export_nemo(store, to_nemo / name, size=size, algorithm=packing.algorithm, seed=seed)
                )
    return folders


def prepare_from_nemo(config: Config, file: Path, output: Path) -> Preflight:
    """Import a packed file of NeMo Aligner as a prepared folder, and return a summary of the imported set."""
    check_output("--output-dir", output)
    folder, source = output / "train", find_model(config.policy)
    store = import_nemo(file, folder, config.data, config.policy.max_total_sequence_length)
    try:
        check_usable_shares(store, str(file), config.data)
        if (highest := store.highest_token_id) >= source.vocabulary:
            raise DataError(
                f"{file}: token id {highest}, but the model ({config.policy.model_name}) has only {source.vocabulary} tokens. "
                "Set policy.model_name to the model that the packs were made for."
            )
        kept = without_duplicates({"train": store}, config.data)["train"]
    except DataError:
        shutil.rmtree(folder)
        raise
    if kept is not store:
        shutil.rmtree(folder)
        _write_folder(kept, [], folder)
    return preflight("train", kept)


def show_imported(found: Preflight, output: Path, loaded: LoadedConfig, reporter: Reporter) -> None:
    """Print a summary of the imported set, and the command that trains on it."""
    reporter.preflight([found], {found.name: output / found.name / "rejects.jsonl"})
    reporter.say("\nTrain on it:")
    reporter.command(tandem_command("train", *training_arguments(loaded, found, output)))


def training_arguments(loaded: LoadedConfig, found: Preflight, output: Path) -> list[str]:
    """Return the arguments of the `tandem train` command that trains on the packs imported with this configuration."""
    config, overrides = loaded.config.policy, loaded.overrides
    given = {key_of(one) for one in overrides}
    asked = {
        "data.train.data_path": str(output / found.name),
        "policy.model_name": loaded.from_environment.get(("policy", "model_name"), config.model_name),
        "policy.max_total_sequence_length": config.max_total_sequence_length,
    }
    arguments = [override(key, value) for key, value in asked.items() if key not in given] + list(overrides)
    # Loaded again with these arguments, because the default batch size depends on the data.
    changed_config = loaded.with_overrides(arguments).config
    if found.num_pairs < changed_config.policy.train_global_batch_size:
        arguments = with_override(arguments, "policy.train_global_batch_size", suggested_batch_size(found.num_pairs))
    return [*loaded.file_arguments, *arguments]


def _pack_set(store: Preferences, config: Config, pack_sizes: Sequence[int]) -> list[tuple[Packer, Bins]]:
    """Pack a set once for each length in `pack_sizes`. If `pack_sizes` is empty, use the configured pack length."""
    longest = int(store.longest.argmax())
    if pack_sizes and store.longest[longest] > min(pack_sizes):
        raise ConfigError(
            f"--pack-sizes {min(pack_sizes)}: too short for {store.place(longest)}, which has {store.longest[longest]} tokens. "
            "Give longer packs, or lower policy.max_total_sequence_length."
        )
    packing = config.policy.packing.model_copy(update={"mode": "dataset"})
    if config.policy.packing.mode == "none":  # this mode does not share prompts
        packing = packing.model_copy(update={"share_prompts": True})
    lengths: list[int | Literal["auto"]] = list(pack_sizes) or [config.policy.packing.pack_length]
    packers = [
        make_packer(
            store,
            packing.model_copy(update={"pack_length": length}),
            usual_auto=DATASET_PACK,
            pairs_per_batch=config.policy.train_global_batch_size,
            seed=config.run.seed,
        )
        for length in lengths
    ]
    # Lengths are rounded up, so that several may be the same.
    by_length = {packer.length: packer for packer in packers}
    return [(packer, open_packs(packer)) for packer in by_length.values()]


def _write_folder(store: TokenStore, packs: list[tuple[Packer, Bins]], folder: Path) -> Path:
    """Write the store and its packs to a folder, and return the folder."""
    with published(folder, "tokens") as aside:
        for name in ("tokens.arrow", "rejects.jsonl"):
            shutil.copyfile(store.folder / name, aside / name)
        for packer, bins in packs:
            write_packs(bins, aside / file_name(packer.length))
        facts = {key: value for key, value in read_manifest(store.folder).items() if key != "files"}
        write_manifest(aside, **facts, packs=[pack_settings(packer) for packer, _ in packs])
    return folder


def _excerpt(first: TokenizedPreference, tokenizer: Any) -> dict[str, str]:
    best = first.completions[first.pairs[0][0]]
    parts = {
        "prompt_end": first.prompt[-SHOWN_TOKENS:],
        "completion_start": best[:SHOWN_TOKENS],
        "completion_end": best[-SHOWN_TOKENS:],
    }
    return {name: tokenizer.decode(part.tolist()) for name, part in parts.items()}


def show(preparation: Preparation, reporter: Reporter) -> None:
    rejects = {name: Path(folder) / "rejects.jsonl" for name, folder in preparation.folders.items()}
    reporter.preflight(preparation.sets, rejects)
    for name, weight in preparation.weights.items():
        reporter.say(f"  {name}: an epoch uses it {weight:g} times (weight)")
    if preparation.tokenizer == EMBEDDED:
        reporter.say("  Tokens of the embedded model: set your own with policy.model_name=MODEL")
    if not preparation.has_template:
        reporter.say("  No chat template: texts are used as they are")
    for found in preparation.sets:
        reporter.say(f"\n{found.name}: tokens")
        reporter.lengths(
            {
                "prompt": found.prompt_lengths,
                "completion": found.completion_lengths,
                "prompt + longest completion": found.whole_lengths,
            }
        )
        _show_histogram(found.whole_lengths, reporter)
        if found.longer_than:
            _show_limits(found, preparation.max_length, reporter)
    _show_packs(preparation, reporter)
    reporter.say("\nExcerpt of the first preference, as the model sees it")
    reporter.say(f"  prompt ends        {preparation.prompt_end!r}")
    reporter.say(f"  completion starts  {preparation.completion_start!r}")
    reporter.say(f"  completion ends    {preparation.completion_end!r}")
    for name, folder in preparation.folders.items():
        reporter.say(f"\n{name} is stored in {folder}")


def _show_packs(preparation: Preparation, reporter: Reporter) -> None:
    training, batch = preparation.training, f"a batch of {counted(preparation.pairs_per_batch, 'pair')} in them"
    if preparation.packs:
        how = {
            "dataset": "training uses the packs of the training set",
            "batch": "training packs each batch separately",
            "none": "training does not pack",
        }[preparation.packing]
        reporter.say(f"\nComplete sets as packs ({how}: policy.packing.mode={preparation.packing}), and {batch}")
        reporter.table(
            PACK_COLUMNS, [_row(name, one) for name, several in preparation.packs.items() for one in several]
        )
    if training.sets:
        reporter.say(f"\nRows of training on this machine: {training.length}; an epoch of them, and {batch}")
        reporter.table(PACK_COLUMNS, [_row(name, one) for name, one in training.sets.items()])
    if preparation.packs or training.sets:
        reporter.say(
            f"  times padding: positions computed if every {PADDED_BATCH_SIZE} sequences were padded to the longest, divided by "
            "those computed in packs; fill: of the actual rows, which may be shorter than a pack"
        )
    if training.refused is not None:
        reporter.warn(f"training would not start on this machine: {training.refused}")
    reporter.say(f"  training steps: {preparation.num_steps:,}")


def _row(name: str, packs: PackingStats) -> list[str]:
    return [
        name,
        f"{packs.pack_length:,}",
        f"{packs.num_packs:,}",
        f"{packs.fill:.1%}",
        f"{packs.preferences_per_pack:.1f}",
        f"{packs.pairs_per_pack:.1f}",
        f"{packs.batch_in_packs:,}",
        f"{packs.padding_factor:.2f}",
    ]


def as_json(preparation: Preparation) -> str:
    return json.dumps(asdict(preparation), ensure_ascii=False, indent=1)


def _show_histogram(lengths: Lengths, reporter: Reporter) -> None:
    """Print a bar for each bin of lengths."""
    most, step = max(lengths.histogram), max(len(lengths.histogram), lengths.longest) / len(lengths.histogram)
    for number, count in enumerate(lengths.histogram):
        start, end = round(number * step), round((number + 1) * step)
        reporter.say(f"  {start:>7,} to {end:>7,}  {count:>9,}  {'#' * -(-BAR_CHARACTERS * count // most)}")


def _show_limits(found: Preflight, max_length: int, reporter: Reporter) -> None:
    total = found.counts.accepted + sum(found.counts.filtered.get(reason, 0) for reason in ("over-long", DUPLICATE))
    shares = [f"{count / total:.1%} over {limit:,}" for limit, count in found.longer_than.items() if count]
    over = found.counts.filtered.get("over-long", 0)
    reporter.say(
        f"  over the limit of {max_length:,}: {over:,} left out; by limit: {', '.join(shares) or 'none over 256'}"
    )

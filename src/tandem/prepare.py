"""A configuration in; its sets tokenised ahead of training, and what is in them, out."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.cache import check_cache_dir, published, read_manifest, write_manifest
from tandem.commands import changed, key_of, override
from tandem.config.load import load_config
from tandem.config.schema import Config
from tandem.config.section import EMBEDDED
from tandem.data.duplicates import DUPLICATE, without_duplicates
from tandem.data.opening import judge
from tandem.data.preflight import Lengths, Preflight, preflight, preflights
from tandem.data.selection import Preferences, Selection
from tandem.data.sets import ProgressBar, open_sets
from tandem.data.store import TokenStore
from tandem.data.template import make_template
from tandem.data.tokenizer import load_tokenizer
from tandem.data.tokens import TokenizedPreference
from tandem.errors import ConfigError, DataError
from tandem.model.source import find_model, find_tokenizer
from tandem.packing.binning import Bins
from tandem.packing.exchange import check_for_nemo, export_nemo, import_nemo
from tandem.packing.outlook import PADDED_TOGETHER, Outlook, outlook
from tandem.packing.packer import DATASET_PACK, Packer, make_packer
from tandem.packing.packs import facts_of, file_name, open_packs, write_packs
from tandem.train.report import Reporter

SHOWN_TOKENS = 12
LEAST_STEPS = 20  # of an epoch, where a batch has to be proposed
BAR = 40


@dataclass(frozen=True, slots=True)
class Preparation:
    """What became of every set, where it is kept, how it packs, and how its first preference reads around the answer."""

    sets: list[Preflight]
    folders: dict[str, str]
    packs: dict[str, list[Outlook]]
    pairs_per_batch: int
    packing: str  # policy.packing.mode
    weights: dict[str, float]  # of training sets that an epoch does not pass over once
    tokenizer: str  # whose tokens these are
    has_template: bool
    max_length: int
    prompt_end: str
    completion_start: str
    completion_end: str


def prepare_data(
    config: Config,
    bar: ProgressBar,
    pack_sizes: Sequence[int] = (),
    output: Path | None = None,
    to_nemo: Path | None = None,
) -> Preparation:
    """Tokenise and pack every set; with `output`, write each into a folder there that can be trained on by its path.

    With `to_nemo`, write each as NeMo Aligner's packed files too.
    """
    check_cache_dir()
    check_outputs(output, to_nemo)
    if output is not None and config.data.validation_share:
        raise ConfigError(
            f"--output-dir {output}: it would hold packs of the whole set, but data.validation_share = "
            f"{config.data.validation_share} is held out of it only when training. Leave out --output-dir, and training finds "
            "the packs in the cache; or split the file in two."
        )
    source = find_model(config.policy)
    template = make_template(load_tokenizer(find_tokenizer(config.policy, source)), config.policy.tokenizer)
    sets = open_sets(config, template, bar)
    packs = {name: _packed(store, config, pack_sizes) for name, store in sets.read.items()}
    # What is trained on and held out, where that is not a set as it was read: the packs that training would look for.
    used = {"train": sets.train, **{f"validation-{name}": store for name, store in sets.validation.items()}}
    chosen = {name: _packed(store, config, pack_sizes) for name, store in used.items() if isinstance(store, Selection)}
    folders = {name: str(store.folder) for name, store in sets.read.items()}
    if to_nemo is not None:
        for name, store in sets.read.items():
            check_for_nemo(store, min(packer.length for packer, _ in packs[name]))
    if output is not None:
        folders = {name: str(_write(store, packs[name], output / name)) for name, store in sets.read.items()}
    if to_nemo is not None:
        packing, seed = config.policy.packing, config.run.seed
        for name, store in sets.read.items():
            for packer, _ in packs[name]:
                size = packer.length
                folders[f"{name}, for NeMo Aligner at {size}"] = str(
                    export_nemo(store, to_nemo / name, size=size, algorithm=packing.algorithm, seed=seed)
                )
    pairs = config.policy.train_global_batch_size
    return Preparation(
        preflights(sets),
        folders,
        {
            name: [outlook(packer, bins, pairs) for packer, bins in several]
            for name, several in (packs | chosen).items()
        },
        pairs,
        config.policy.packing.mode,
        {f"train-{i}": one.weight for i, one in enumerate(config.data.training_sets) if one.weight != 1},
        config.policy.tokenizer_name,
        template.source is not None,
        config.policy.max_total_sequence_length,
        *_around_the_answer(sets.train[0], template.tokenizer),
    )


def prepare_from_nemo(config: Config, file: Path, output: Path | None) -> Preflight:
    """A file of NeMo Aligner's packs as a prepared folder, to be trained on by its path."""
    if output is None:
        raise ConfigError("--from-nemo needs --output-dir, where the set is written.")
    _check_output(output, "--output-dir")
    folder, source = output / "train", find_model(config.policy)
    store = import_nemo(file, folder, config.data, config.policy.max_total_sequence_length)
    try:
        judge(store, str(file), config.data)
        if (highest := store.highest_token_id) >= source.vocabulary:
            raise DataError(
                f"{file}: token id {highest}, but the model ({config.policy.model_name}) knows only {source.vocabulary} tokens. "
                "Name the model that the packs were made for: policy.model_name=MODEL."
            )
        kept = without_duplicates({"train": store}, config.data)["train"]
    except DataError:
        shutil.rmtree(folder)
        raise
    if kept is not store:
        shutil.rmtree(folder)
        _write(kept, [], folder)
    return preflight("train", kept)


def training_arguments(overrides: Sequence[str], config_file: str | None, found: Preflight, output: Path) -> list[str]:
    """What `tandem train` needs to train on packs that were imported under these settings."""
    config = load_config(config_file, overrides).config.policy
    given = {key_of(one) for one in overrides}
    asked = {
        "data.train.data_path": str(output / found.name),
        "policy.model_name": config.model_name,
        "policy.max_total_sequence_length": config.max_total_sequence_length,
    }
    arguments = [override(key, value) for key, value in asked.items() if key not in given] + list(overrides)
    # The usual batch is another with data of one's own than in the embedded default.
    if found.num_pairs < load_config(config_file, arguments).config.policy.train_global_batch_size:
        arguments = changed(arguments, "policy.train_global_batch_size", max(1, found.num_pairs // LEAST_STEPS))
    return [*(["--config", config_file] if config_file else []), *arguments]


def check_outputs(output: Path | None, to_nemo: Path | None) -> None:
    _check_output(output, "--output-dir")
    _check_output(to_nemo, "--to-nemo")


def _check_output(folder: Path | None, option: str) -> None:
    """A folder to write into that is empty, and can be written to, before anything is read."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        filled = any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{option} {folder}: {error.strerror}. Choose another folder.") from None
    if filled:
        raise ConfigError(f"{option} {folder}: not empty. Choose another, or empty it.")


def _packed(store: Preferences, config: Config, pack_sizes: Sequence[int]) -> list[tuple[Packer, Bins]]:
    """The set as packs of each length."""
    longest = int(store.longest.argmax())
    if pack_sizes and store.longest[longest] > min(pack_sizes):
        raise ConfigError(
            f"--pack-sizes {min(pack_sizes)}: a sequence at {store.place(longest)} takes {store.longest[longest]} tokens. "
            "Give longer packs, or lower policy.max_total_sequence_length."
        )
    lengths: list[int | Literal["auto"]] = list(pack_sizes) or [config.policy.packing.pack_length]
    packers = [
        make_packer(
            store,
            config.policy.packing.model_copy(update={"mode": "dataset", "pack_length": length, "share_prompts": True}),
            usual_auto=DATASET_PACK,
            pairs_per_batch=config.policy.train_global_batch_size,
            seed=config.run.seed,
        )
        for length in lengths
    ]
    return [(packer, open_packs(packer)) for packer in packers]


def _write(store: TokenStore, packs: list[tuple[Packer, Bins]], folder: Path) -> Path:
    """The store and its packs as a folder of their own."""
    with published(folder, "tokens") as aside:
        for name in ("tokens.arrow", "rejects.jsonl"):
            shutil.copyfile(store.folder / name, aside / name)
        for packer, bins in packs:
            write_packs(bins, aside / file_name(packer.length))
        facts = {key: value for key, value in read_manifest(store.folder).items() if key != "files"}
        write_manifest(aside, **facts, packs=[facts_of(packer) for packer, _ in packs])
    return folder


def _around_the_answer(first: TokenizedPreference, tokenizer: Any) -> tuple[str, str, str]:
    best = first.completions[first.pairs[0][0]]
    parts = (first.prompt[-SHOWN_TOKENS:], best[:SHOWN_TOKENS], best[-SHOWN_TOKENS:])
    prompt, start, end = (tokenizer.decode(part.tolist()) for part in parts)
    return prompt, start, end


def show(preparation: Preparation, reporter: Reporter) -> None:
    rejects = {name: Path(folder) / "rejects.jsonl" for name, folder in preparation.folders.items()}
    reporter.preflight(preparation.sets, rejects)
    for name, weight in preparation.weights.items():
        reporter.say(f"  {name}: an epoch passes over it {weight:g} times (weight)")
    if preparation.tokenizer == EMBEDDED:
        reporter.say("  Tokens are the embedded model's: name your own by policy.model_name=MODEL")
    if not preparation.has_template:
        reporter.say("  No chat template: the texts are taken as they are")
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
    reporter.say("\nThe first preference around its answer, literally")
    reporter.say(f"  prompt ends        {preparation.prompt_end!r}")
    reporter.say(f"  completion starts  {preparation.completion_start!r}")
    reporter.say(f"  completion ends    {preparation.completion_end!r}")
    for name, folder in preparation.folders.items():
        reporter.say(f"\n{name} is kept in {folder}")


def _show_packs(preparation: Preparation, reporter: Reporter) -> None:
    how = {
        "dataset": "training uses these",
        "batch": "training packs each batch anew",
        "none": "training packs nothing",
    }
    reporter.say(
        f"\nWhole sets as packs ({how[preparation.packing]}: policy.packing.mode={preparation.packing}), and a batch of "
        f"{preparation.pairs_per_batch} pairs in them"
    )
    columns = [
        "set",
        "pack length",
        "packs",
        "fill",
        "preferences each",
        "pairs each",
        "packs a batch",
        "times padding",
    ]
    rows = [
        [
            name,
            f"{o.pack_length:,}",
            f"{o.num_packs:,}",
            f"{o.fill:.1%}",
            f"{o.preferences_per_pack:.1f}",
            f"{o.pairs_per_pack:.1f}",
            f"{o.batch_in_packs:,}",
            f"{o.padding_factor:.2f}",
        ]
        for name, several in preparation.packs.items()
        for o in several
    ]
    reporter.table(columns, rows)
    reporter.say(
        f"  times padding: positions that rows padded to the longest of {PADDED_TOGETHER} sequences would compute, over "
        "those computed in packs; fill: of rows as they are, which may be shorter than a pack"
    )


def as_json(preparation: Preparation) -> str:
    return json.dumps(asdict(preparation), ensure_ascii=False, indent=1)


def _show_histogram(lengths: Lengths, reporter: Reporter) -> None:
    """A bar per step of length."""
    most, step = max(lengths.histogram), max(len(lengths.histogram), lengths.longest) / len(lengths.histogram)
    for number, count in enumerate(lengths.histogram):
        start, end = round(number * step), round((number + 1) * step)
        reporter.say(f"  {start:>7,} to {end:>7,}  {count:>9,}  {'#' * -(-BAR * count // most)}")


def _show_limits(found: Preflight, max_length: int, reporter: Reporter) -> None:
    total = found.counts.accepted + sum(found.counts.filtered.get(reason, 0) for reason in ("over-long", DUPLICATE))
    shares = [f"{count / total:.1%} over {limit:,}" for limit, count in found.longer_than.items() if count]
    over = found.counts.filtered.get("over-long", 0)
    reporter.say(
        f"  over the limit of {max_length:,}: {over:,} left out; by limit: {', '.join(shares) or 'none over 256'}"
    )

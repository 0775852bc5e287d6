"""A configuration in; its sets tokenised ahead of training, and what is in them, out."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.cache import check_cache_dir
from tandem.config.schema import Config
from tandem.data.preflight import Lengths, Preflight, preflights
from tandem.data.sets import ProgressBar, open_sets
from tandem.data.template import make_template
from tandem.data.tokenizer import load_tokenizer
from tandem.data.tokens import TokenizedPreference
from tandem.model.load import find_model
from tandem.train.report import Reporter

SHOWN_TOKENS = 12
BAR = 40


@dataclass(frozen=True, slots=True)
class Preparation:
    """What became of every set, where it is kept, and how its first preference reads around the answer."""

    sets: list[Preflight]
    folders: dict[str, str]
    max_length: int
    prompt_end: str
    completion_start: str
    completion_end: str


def prepare_data(config: Config, bar: ProgressBar) -> Preparation:
    check_cache_dir()
    source = find_model(config.policy)
    given = config.policy.tokenizer.name
    template = make_template(load_tokenizer(Path(given) if given else source.folder), config.policy.tokenizer)
    sets = open_sets(config, template, bar)
    first = sets.train[0]
    return Preparation(
        preflights(sets),
        {name: str(store.folder) for name, store in sets.read.items()},
        config.policy.max_total_sequence_length,
        *_around_the_answer(first, template.tokenizer),
    )


def _around_the_answer(first: TokenizedPreference, tokenizer: Any) -> tuple[str, str, str]:
    best = first.completions[first.pairs[0][0]]
    parts = (first.prompt[-SHOWN_TOKENS:], best[:SHOWN_TOKENS], best[-SHOWN_TOKENS:])
    prompt, start, end = (tokenizer.decode(part.tolist()) for part in parts)
    return prompt, start, end


def show(preparation: Preparation, reporter: Reporter) -> None:
    reporter.preflight(preparation.sets)
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
    reporter.say("\nThe first preference around its answer, literally")
    reporter.say(f"  prompt ends        {preparation.prompt_end!r}")
    reporter.say(f"  completion starts  {preparation.completion_start!r}")
    reporter.say(f"  completion ends    {preparation.completion_end!r}")
    for name, folder in preparation.folders.items():
        reporter.say(f"\n{name} is kept in {folder}")


def as_json(preparation: Preparation) -> str:
    return json.dumps(asdict(preparation), ensure_ascii=False, indent=1)


def _show_histogram(lengths: Lengths, reporter: Reporter) -> None:
    """A bar per step of length."""
    most, step = max(lengths.histogram), max(len(lengths.histogram), lengths.longest) / len(lengths.histogram)
    for number, count in enumerate(lengths.histogram):
        start, end = round(number * step), round((number + 1) * step)
        reporter.say(f"  {start:>7,} to {end:>7,}  {count:>9,}  {'#' * -(-BAR * count // most)}")


def _show_limits(found: Preflight, max_length: int, reporter: Reporter) -> None:
    total = found.counts.accepted + found.counts.filtered.get("over-long", 0)
    shares = [f"{count / total:.1%} over {limit:,}" for limit, count in found.longer_than.items() if count]
    over = found.counts.filtered.get("over-long", 0)
    reporter.say(
        f"  over the limit of {max_length:,}: {over:,} left out; by limit: {', '.join(shares) or 'none over 256'}"
    )

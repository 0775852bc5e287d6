"""Simulates how full rows are, and how long workers wait for each other, with 8 to 1,024 workers.

    python benchmarks/scale.py [--data FILE ... --tokenizer FOLDER] [--plot FILE]
    python benchmarks/scale.py --seeds 0 1 2 3 4 --workers 64 [--data FILE ... --tokenizer FOLDER]

Lengths are those of preference files with two completions (many workers take theirs from the first file, drawn with
replacement), or log-normal as in benchmarks/train.py. A global batch is 256 pairs, or 16 pairs for each worker.

    batch            each batch packed by first fit decreasing and distributed, in rows of at most --pack-length
    batch, auto      the same, in rows short enough that every worker has four rows per batch
    dataset          65,536 pairs packed once, batches of complete packs, dealt to the workers in turn
    greedy           each batch packed in order, a row closed when the next pair does not fit; dealt in turn
    padded           one sequence a row, padded to the longest of a micro-batch of 8 pairs, in random order; dealt in turn
    padded, sorted   the same, the pairs of a batch first sorted by their longest sequence
    padded, grouped  the same, all 65,536 sorted, so batches have similar lengths (and are no longer random)

Cost is as in tandem.packing.distribution: tokens through the linear layers and pairs in attention, here including filler and
padding, because they are computed too.

    fill        tokens over positions, of rows that contain any ("lowest fill" in the JSON: of one step)
    imbalance   cost of the worker with the most over the mean of all; the mean over steps
    idle        share of the workers' time spent waiting, if they synchronise at the end of a step
    by round    the same, if they synchronise in every round (micro-batch), as with sharded weights
    useful      cost of the pairs, each prompt once and no filler, over the workers' time if they synchronise by round

With --seeds, only the first two methods are compared, for every set and seed.

A worker without a pair in a round counts as idle, though it may compute filler. Prints tables and, as its last line, one
JSON object. Exits with 1 if the rows of a single worker are less than 97 % full over an epoch at 256 pairs per batch, unless
such a batch does not fill four rows.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from drawing import key, line, rule, svg, text
from options import options_of

from tandem.packing.batches import Batches
from tandem.packing.binning import Bins, first_fit_decreasing, pack_into_bins
from tandem.packing.distribution import assign_to_ranks, row_cost
from tandem.packing.packer import ROWS_PER_BATCH, row_lengths

MIN_FILL = 0.97
PAIRS_PER_BATCH, PAIRS_PER_WORKER, PAIRS_PER_MICRO_BATCH = 256, 16, 8
MAX_STEPS, POOL = 24, 65_536
SMALL_POOL = 8192  # pairs for each of several seeds
METHODS = ["batch", "batch, auto", "dataset", "greedy", "padded", "padded, sorted", "padded, grouped"]
ALGORITHMS = ["first_fit_decreasing", "first_fit_shuffle", "exact_fit_decreasing"]
METRICS = ["fill", "imbalance", "idle", "by round", "useful"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The lengths of a set's pairs."""

    prompts: np.ndarray
    completions: np.ndarray  # [pairs, 2]

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, chosen: np.ndarray) -> "Pairs":
        return Pairs(self.prompts[chosen], self.completions[chosen])

    @property
    def sizes(self) -> np.ndarray:
        """Tokens in a row, the prompt once."""
        return self.prompts + self.completions.sum(1)

    @property
    def sequences(self) -> np.ndarray:
        """Tokens of each prompt with each of its completions: [pairs, 2]."""
        return self.prompts[:, None] + self.completions

    def costs(self, hidden_size: int) -> np.ndarray:
        two = np.full(len(self), 2)
        return row_cost(self.prompts, self.completions.ravel(), two, hidden_size=hidden_size)


@dataclass(frozen=True, slots=True)
class Step:
    """The work of every worker in every round of a step; zero if it has none."""

    positions: np.ndarray  # [rounds, workers]
    costs: np.ndarray  # [rounds, workers]
    num_tokens: int  # that are not filler
    least_cost: float  # of these pairs: no filler, each prompt once


# Lengths of pairs


def log_normal(num: int, seed: int) -> Pairs:
    """Random lengths: prompts of 200 tokens on average, completions of 250, sigma 0.7, at most 2,048 together."""
    rng = np.random.default_rng(seed)

    def drawn(mean: float, *shape: int) -> np.ndarray:
        return np.maximum(4, rng.lognormal(np.log(mean) - 0.7**2 / 2, 0.7, shape).astype(np.int64))

    pairs = Pairs(drawn(200, 2 * num), drawn(250, 2 * num, 2))
    return pairs[np.flatnonzero(pairs.sequences.max(1) <= 2048)[:num]]


def read(file: str, tokenizer: str) -> Pairs:
    from tandem.config.schema import Config
    from tandem.config.sections.datasets import DatasetFields
    from tandem.data.store.opening import open_store
    from tandem.data.text.template import make_template
    from tandem.data.text.tokenizer import load_tokenizer

    config = Config()
    template = make_template(load_tokenizer(Path(tokenizer)), config.policy.tokenizer)
    lenient = config.data.model_copy(update={"on_bad_row": "skip", "max_bad_share": 1.0, "max_filtered_share": 1.0})
    store = open_store(file, DatasetFields(data_path=file), template, lenient, 2048)
    if (store.num_completions != 2).any():
        sys.exit(f"{file}: some preferences have more than two completions; this benchmark pads pairs.")
    return Pairs(store.num_prompt_tokens, store.completion_lengths.reshape(-1, 2).astype(np.int64))


# Work of each worker


@dataclass(frozen=True, slots=True)
class Simulation:
    """Pairs, the workers that compute them, and the settings they share."""

    pairs: Pairs
    ranks: int
    pairs_per_batch: int
    pack_length: int
    hidden_size: int

    def steps(self, method: str, num_steps: int) -> list[Step]:
        if method == "dataset":
            return self._of_whole_packs(num_steps)
        if method == "padded, grouped":
            in_groups = by_length(self.pairs)[: len(self.pairs) // self.pairs_per_batch * self.pairs_per_batch]
            return [self._padded(self.pairs[batch]) for batch in in_groups.reshape(-1, self.pairs_per_batch)]
        step: Callable[[Pairs], Step] = {
            "batch": lambda pairs: self._shared_out(pairs, row_lengths(self.pack_length)),
            "batch, auto": lambda pairs: self._shared_out(pairs, self.auto_lengths()),
            "greedy": lambda pairs: self._dealt_packs(pairs, in_order(pairs.sizes, self.pack_length)),
            "padded": self._padded,
            "padded, sorted": lambda pairs: self._padded(pairs[by_length(pairs)]),
        }[method]
        numbers = np.arange(num_steps * self.pairs_per_batch).reshape(num_steps, -1)
        return [step(self.pairs[chosen]) for chosen in numbers]

    def auto_lengths(self) -> tuple[int, ...]:
        per_worker = self.pairs_per_batch * self.pairs.sizes.mean() / self.ranks
        return row_lengths(max(int(self.pairs.sizes.max()), min(self.pack_length, int(per_worker / ROWS_PER_BATCH))))

    def _shared_out(self, pairs: Pairs, lengths: tuple[int, ...]) -> Step:
        sizes, costs = pairs.sizes, pairs.costs(self.hidden_size)
        bins = first_fit_decreasing(sizes, lengths[-1])
        rounds = assign_to_ranks(bins, sizes, costs, lengths=lengths, num_ranks=self.ranks, repack=True)
        positions = np.array([[round.length * (len(pack) > 0) for pack in round.packs] for round in rounds])
        attention = np.array([[(costs - sizes)[pack].sum() for pack in round.packs] for round in rounds])
        return Step(positions, positions + attention, int(sizes.sum()), float(costs.sum()))

    def _of_whole_packs(self, num_steps: int) -> list[Step]:
        packs = first_fit_decreasing(self.pairs.sizes, self.pack_length)
        ones = np.ones(len(self.pairs), np.int64)
        batches = Batches(ones, self.pairs_per_batch, shuffle=True, drop_last=True, packs=packs).epoch(0)[:num_steps]
        steps = []
        for batch in batches:
            assert batch.bounds is not None
            of_batch = Bins(np.arange(len(batch.preferences)), batch.bounds)
            steps.append(self._dealt_packs(self.pairs[batch.preferences], of_batch))
        return steps

    def _dealt_packs(self, pairs: Pairs, packs: Bins) -> Step:
        sizes, costs = pairs.sizes, pairs.costs(self.hidden_size)
        attention = np.array([(costs - sizes)[pack].sum() for pack in packs])
        positions = np.full(len(packs), self.pack_length)
        return Step(
            dealt(positions, self.ranks),
            dealt(positions + attention, self.ranks),
            int(sizes.sum()),
            float(costs.sum()),
        )

    def _padded(self, pairs: Pairs) -> Step:
        together = min(PAIRS_PER_MICRO_BATCH, -(-len(pairs) // self.ranks))
        starts = np.arange(0, len(pairs), together)
        longest = np.maximum.reduceat(pairs.sequences.max(1), starts)
        rows = 2 * np.diff(np.append(starts, len(pairs)))
        none = np.zeros(0, np.int64)
        cost_of_row = row_cost(longest, none, np.zeros_like(longest), hidden_size=self.hidden_size)
        return Step(
            dealt(rows * longest, self.ranks),
            dealt(rows * cost_of_row, self.ranks),
            int(pairs.sequences.sum()),
            float(pairs.costs(self.hidden_size).sum()),
        )


def by_length(pairs: Pairs) -> np.ndarray:
    return np.argsort(-pairs.sequences.max(1), kind="stable")


def dealt(values: np.ndarray, ranks: int) -> np.ndarray:
    """Values dealt to workers in turn, padded with zeros: 1 2 3 for two workers -> [[1, 2], [3, 0]]."""
    return np.pad(values, (0, -len(values) % ranks)).reshape(-1, ranks)


def in_order(sizes: np.ndarray, capacity: int) -> Bins:
    """Bins of items in order; a bin is closed when the next item does not fit."""
    bounds, room = [0], capacity
    for number, size in enumerate(sizes.tolist()):
        if size > room:
            bounds.append(number)
            room = capacity
        room -= size
    return Bins(np.arange(len(sizes)), np.array([*bounds, len(sizes)]))


def measures(steps: Sequence[Step]) -> dict[str, float]:
    ranks = steps[0].costs.shape[1]
    per_worker = np.array([step.costs.sum(0) for step in steps])  # [steps, workers]
    by_round = sum(float(step.costs.max(1).sum()) for step in steps)
    found = {
        "fill": sum(step.num_tokens for step in steps) / sum(int(step.positions.sum()) for step in steps),
        "lowest fill": min(step.num_tokens / int(step.positions.sum()) for step in steps),
        "imbalance": float((per_worker.max(1) / per_worker.mean(1)).mean()),
        "idle": 1 - float(per_worker.mean(1).sum() / per_worker.max(1).sum()),
        "by round": max(0.0, 1 - float(per_worker.mean(1).sum()) / by_round),  # one worker: rounding below zero
        "useful": sum(step.least_cost for step in steps) / (ranks * by_round),
    }
    return {name: round(value, 4) for name, value in found.items()}


# Tables


def epochs(name: str, pairs: Pairs, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows for one shuffled epoch of a set at 256 pairs per batch, on one worker and on eight."""
    order = np.random.default_rng(options.seed).permutation(len(pairs))
    num_steps = len(pairs) // PAIRS_PER_BATCH
    rows = []
    for ranks in (1, 8):
        run = Simulation(pairs[order], ranks, PAIRS_PER_BATCH, options.pack_length, options.hidden_size)
        for method, length in (("batch", options.pack_length), ("batch, auto", run.auto_lengths()[-1])):
            row = {"set": name, "workers": ranks, "pairs": PAIRS_PER_BATCH, "method": method, "length": length}
            rows.append(row | measures(run.steps(method, num_steps)))
            show(rows[-1], name[:28])
    return rows


def whole_set(name: str, pairs: Pairs, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows for a set packed once by each algorithm: fill, and the fewest and most pairs in a pack."""
    rows = []
    for algorithm in ALGORITHMS:
        packs = pack_into_bins(algorithm, pairs.sizes, options.pack_length, options.seed)
        fill = round(int(pairs.sizes.sum()) / (len(packs) * options.pack_length), 4)
        fewest, most = int(np.diff(packs.bounds).min()), int(np.diff(packs.bounds).max())
        row = {"set": name, "algorithm": algorithm, "packs": len(packs), "fill": fill, "fewest": fewest, "most": most}
        print(f"{name[:28]:<29}{algorithm:<25}{len(packs):>9,}{fill:>11.3f}{fewest:>13,}{most:>11,}", flush=True)
        rows.append(row)
    return rows


def many_workers(pairs: Pairs, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows for every method and number of workers, for batches of 256 pairs and of 16 pairs per worker."""
    rows = []
    for batch in ("fixed", "growing"):
        for ranks in options.workers:
            per_batch = PAIRS_PER_BATCH if batch == "fixed" else PAIRS_PER_WORKER * ranks
            num_steps = min(MAX_STEPS, len(pairs) // per_batch)
            run = Simulation(pairs, ranks, per_batch, options.pack_length, options.hidden_size)
            for method in METHODS:
                length = {"batch, auto": run.auto_lengths()[-1]}.get(method, options.pack_length)
                row = {"batch": batch, "workers": ranks, "pairs": per_batch, "method": method, "length": length}
                rows.append(row | measures(run.steps(method, num_steps)))
                show(rows[-1], f"{per_batch:,} pairs")
    return rows


def several_seeds(sets: dict[str, Pairs], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the packed methods for every set and seed: batches of 256 pairs, and of 16 pairs per worker."""
    rows = []
    for name in sets or ["log-normal"]:
        for seed in options.seeds:
            draw = np.random.default_rng(seed).integers
            pairs = sets[name][draw(len(sets[name]), size=SMALL_POOL)] if sets else log_normal(SMALL_POOL, seed)
            for ranks in options.workers:
                rows += _of_one_seed(f"{name[:10]}, seed {seed}", pairs, ranks, options)
    return rows


def _of_one_seed(name: str, pairs: Pairs, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for per_batch in (PAIRS_PER_BATCH, PAIRS_PER_WORKER * ranks):
        run = Simulation(pairs, ranks, per_batch, options.pack_length, options.hidden_size)
        for method, length in (("batch", options.pack_length), ("batch, auto", run.auto_lengths()[-1])):
            row = {"set": name, "workers": ranks, "pairs": per_batch, "method": method, "length": length}
            rows.append(row | measures(run.steps(method, min(8, SMALL_POOL // per_batch))))
            show(rows[-1], f"{name}, {per_batch:,}")
    return rows


def heading(first: str) -> None:
    print(f"\n{first:<29}{'workers':>8}  {'method':<15}{'length':>7}" + "".join(f"{name:>11}" for name in METRICS))


def show(row: dict[str, Any], first: str) -> None:
    length = f"{row['length']:,}" if "padded" not in row["method"] else ""
    numbers = "".join(f"{row[name]:>11.3f}" for name in METRICS)
    print(f"{first:<29}{row['workers']:>8,}  {row['method']:<15}{length:>7}{numbers}", flush=True)


def missed_targets(rows: list[dict[str, Any]], sets: dict[str, Pairs], pack_length: int) -> list[str]:
    missed = []
    for row in rows:
        rows_per_batch = PAIRS_PER_BATCH * sets[row["set"]].sizes.mean() / pack_length
        judged = row["workers"] == 1 and row["method"] == "batch" and rows_per_batch >= ROWS_PER_BATCH
        if judged and row["fill"] < MIN_FILL:
            missed.append(f"{row['set']}, one worker: a fill of {row['fill']}, under {MIN_FILL}")
    return missed


# The plot: a row for each metric, a column for batches of 256 pairs and one for 16 pairs per worker

WIDTH, HEIGHT, PANEL_WIDTH, PANEL_HEIGHT = 900, 800, 370, 170
PLOTTED = {"by round": "idle share, waiting by round", "fill": "fill", "useful": "useful share"}
COLOURS = ["#0b5fa5", "#3fa7d6", "#2e7d32", "#8e5bb5", "#b3261e", "#d9822b", "#8a6d3b"]


def plot(rows: list[dict[str, Any]], ranks: list[int]) -> str:
    """An SVG with two columns of panels."""
    parts: list[str] = []
    for column, batch in enumerate(("fixed", "growing")):
        of_batch = [row for row in rows if row["batch"] == batch]
        title = f"{PAIRS_PER_BATCH} pairs a batch" if batch == "fixed" else f"{PAIRS_PER_WORKER} pairs a worker"
        x = 60 + column * (PANEL_WIDTH + 60)
        parts.append(text(x + PANEL_WIDTH / 2, 24, title, anchor="middle", weight="bold"))
        for number, (metric, name) in enumerate(PLOTTED.items()):
            parts += panel(of_batch, ranks, metric, name, x, 50 + number * (PANEL_HEIGHT + 66))
    for number, method in enumerate(METHODS):
        x, y = 60 + number % 4 * 200, 756 + number // 4 * 24
        parts += key(x, y, method, COLOURS[number], dash(method))
    return svg(WIDTH, HEIGHT, parts)


def panel(rows: list[dict[str, Any]], ranks: list[int], metric: str, name: str, left: float, top: float) -> list[str]:
    def x(count: int) -> float:
        span = np.log2(ranks[-1] / ranks[0]) or 1
        return left + PANEL_WIDTH * float(np.log2(count / ranks[0]) / span)

    def y(share: float) -> float:
        return top + PANEL_HEIGHT * (1 - share)

    parts = [text(left, top - 8, name)]
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(rule(left, y(share), PANEL_WIDTH))
        parts.append(text(left - 8, y(share) + 4, f"{share:.0%}", anchor="end"))
    parts += [text(x(count), top + PANEL_HEIGHT + 18, f"{count:,}", anchor="middle") for count in ranks]
    parts.append(text(left + PANEL_WIDTH / 2, top + PANEL_HEIGHT + 36, "workers", anchor="middle"))
    for method, colour in zip(METHODS, COLOURS, strict=True):
        points = [(x(row["workers"]), y(row[metric])) for row in rows if row["method"] == method]
        parts.append(line(points, colour, dash(method)))
    return parts


def dash(method: str) -> str:
    """The dash pattern of a method: solid, or dashed or dotted for its variants."""
    return {"auto": "7 4", "sorted": "7 4", "grouped": "2 3"}.get(method.partition(", ")[2], "")


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--data", nargs="+", default=[], help="preference files")
    parser.add_argument("--tokenizer", default="", help="folder of the tokenizer for them")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--pack-length", type=int, default=8192, help="tokens in a row")
    parser.add_argument("--hidden-size", type=int, default=1536, help="weighs attention: see row_cost")
    parser.add_argument("--plot", help="an SVG file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, nargs="+", help="compare several seeds, instead of everything else")
    options = parser.parse_args()
    if options.data and not options.tokenizer:
        parser.error("--data needs --tokenizer, the folder of a tokenizer")
    started = time.perf_counter()
    sets = {Path(file).name: read(file, options.tokenizer) for file in options.data}
    if options.seeds:
        heading("a batch of")
        print(json.dumps({"benchmark": "scale", "rows": several_seeds(sets, options)}))
        return
    sets = sets or {"log-normal": log_normal(POOL, options.seed)}
    heading("one epoch of")
    of_sets = [row for name, pairs in sets.items() for row in epochs(name, pairs, options)]
    print(f"\n{'packed once':<29}{'algorithm':<25}{'packs':>9}{'fill':>11}{'fewest pairs':>13}{'most pairs':>11}")
    packed_once = [row for name, pairs in sets.items() for row in whole_set(name, pairs, options)]
    first = next(iter(sets.values()))
    pool = first[np.random.default_rng(options.seed).integers(len(first), size=POOL)]
    heading("a batch of")
    rows = many_workers(pool, options)
    if options.plot:
        Path(options.plot).write_text(plot(rows, options.workers), encoding="utf-8")
    missed = missed_targets(of_sets, sets, options.pack_length)
    for target in missed:
        print(f"missed: {target}")
    about = {
        "seconds": round(time.perf_counter() - started),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    found = {"sets": of_sets, "packed_once": packed_once, "rows": rows, "missed": missed}
    print(json.dumps({"benchmark": "scale", **vars(options), **found, **about}))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

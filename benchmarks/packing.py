"""Times the algorithms that put preferences into rows: seconds, fill and peak memory, each in a separate process.

    python benchmarks/packing.py [--data FILE --tokenizer FOLDER | --data STORE] [--trl-python PYTHON]

Sizes are log-normal, fitted to the complete sequences of HH (median 150 tokens, 95 % below 444, none above 965), or drawn
with replacement from those of a preference file or of a prepared store (a folder with tokens.arrow), prompts shared.
Fill is the sum of the sizes over bins * capacity. tandem's algorithms are compared with a plain first-fit loop, where it
finishes in reasonable time, and with TRL's pack_dataset, if --trl-python is given: with its default of 1,000 rows at a time,
and with all rows at once. TRL's time includes moving the tokens, which are one byte each here. Seconds are the best of three
calls (fewer if they take over 10 s together).

Prints a table and, as its last line, one JSON object. Exits with 1 if an algorithm of tandem misses a target: at most 2 s
and 1 GiB, and a fill of at least 99 % (which is possible only with about 100 bins or more).
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import trl_python
from options import options_of

# TRL's interpreter runs this file too, so tandem is imported where it is used; and the parent process stays small,
# because a child's peak memory starts from its parent's.
MAX_SECONDS, MAX_MIB, MIN_FILL = 2.0, 1024, 0.99
OURS = ["first_fit_decreasing", "first_fit_shuffle", "exact_fit_decreasing"]
TRL = ["trl_bfd_by_1000", "trl_bfd_at_once"]
PLAIN_LOOP, PLAIN_LOOP_ENDS_BY = "plain_first_fit_loop", 10_000


def plain_first_fit_loop(sizes: np.ndarray, capacity: int) -> int:
    """Number of bins by textbook first fit: try each bin in turn for each item, largest first."""
    rooms: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        for bin, room in enumerate(rooms):
            if room >= size:
                rooms[bin] -= size
                break
        else:
            rooms.append(capacity - size)
    return len(rooms)


def trl_packing(sizes: np.ndarray, *, at_once: bool) -> Callable[[int], int]:
    """A function that packs a dataset of such sequences; the dataset is built here, before the clock starts."""
    import datasets  # pyright: ignore[reportMissingImports]
    import pyarrow as pa
    from trl import pack_dataset  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    datasets.disable_caching()  # otherwise the second call would read the cache of the first
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]), pa.int32())
    tokens = pa.array(np.zeros(int(sizes.sum()), np.uint8))
    rows = datasets.Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)}))
    map_kwargs = {"batch_size": len(sizes)} if at_once else {}
    return lambda capacity: len(pack_dataset(rows, capacity, strategy="bfd", map_kwargs=map_kwargs))


def algorithm_of(name: str, sizes: np.ndarray) -> Callable[[int], int]:
    """A function that packs the sizes into bins of a given capacity and returns the number of bins."""
    if name in TRL:
        return trl_packing(sizes, at_once=name == "trl_bfd_at_once")
    if name == PLAIN_LOOP:
        return lambda capacity: plain_first_fit_loop(sizes, capacity)
    from tandem.packing import binning

    if name == "first_fit_shuffle":
        return lambda capacity: len(binning.first_fit_shuffle(sizes, capacity, seed=0))
    return lambda capacity: len(binning.ALGORITHMS[name](sizes, capacity))


def measure(name: str, file: str, capacity: int) -> None:
    """Run one algorithm on the sizes in a file and print its time, bins and peak memory. Runs in a child process."""
    sizes = np.load(file)
    pack = algorithm_of(name, sizes)
    seconds: list[float] = []
    num_bins = 0
    while len(seconds) < 3 and sum(seconds) < 10:
        started = time.perf_counter()
        num_bins = pack(capacity)
        seconds.append(time.perf_counter() - started)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": round(min(seconds), 3), "bins": num_bins, "peak_mib": round(peak_mib)}))


def write_sizes(data: str, tokenizer: str, file: str) -> None:
    """Write the row sizes of a preference file or a prepared store to a file. Runs in a child process."""
    from tandem.config.schema import Config
    from tandem.config.sections.datasets import DatasetFields
    from tandem.data.store.opening import open_store
    from tandem.data.store.token_store import TokenStore
    from tandem.data.text.template import make_template
    from tandem.data.text.tokenizer import load_tokenizer
    from tandem.packing.packer import row_sizes
    from tandem.storage.cache import read_manifest

    if Path(data).is_dir():
        store = TokenStore(Path(data), read_manifest(Path(data)))
    else:
        config = Config()
        template = make_template(load_tokenizer(Path(tokenizer)), config.policy.tokenizer)
        lenient = config.data.model_copy(update={"on_bad_row": "skip", "max_bad_share": 1.0, "max_filtered_share": 1.0})
        store = open_store(data, DatasetFields(data_path=data), template, lenient, 2048)
    np.save(file, row_sizes(store, "shared"))


def like_hh(num: int, rng: np.random.Generator) -> np.ndarray:
    # 5 % are more than 1.645 standard deviations above the median.
    drawn = rng.lognormal(np.log(150), np.log(444 / 150) / 1.645, 2 * num + 100).astype(np.int64)
    return drawn[(drawn >= 1) & (drawn <= 965)][:num]


def in_child(python: str, *arguments: str) -> str:
    done = subprocess.run([python, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def rows_for(num: int, sizes: np.ndarray, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One row of the table for each algorithm."""
    file = folder / f"{num}.npy"
    np.save(file, sizes)
    plain = [PLAIN_LOOP] if num <= PLAIN_LOOP_ENDS_BY else []
    rows = []
    for name in [*OURS, *plain, *(TRL if options.trl_python else [])]:
        python = options.trl_python if name in TRL else sys.executable
        last_line = in_child(python, "measure", name, str(file), str(options.capacity)).splitlines()[-1]
        row = {"preferences": num, "algorithm": name, **json.loads(last_line)}
        row["fewest_bins"] = -(-int(sizes.sum()) // options.capacity)
        row["fill"] = round(int(sizes.sum()) / (row["bins"] * options.capacity), 5)
        rows.append(row)
        show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['preferences']:>11,}  {row['algorithm']:<22}{row['seconds']:>9.3f}{row['fill']:>9.5f}"
        f"{row['bins']:>9,}{row['fewest_bins']:>9,}{row['peak_mib']:>9,}",
        flush=True,
    )


def missed_targets(rows: list[dict[str, Any]]) -> list[str]:
    missed = []
    for row in (row for row in rows if row["algorithm"] in OURS):
        where = f"{row['algorithm']} at {row['preferences']:,}"
        if row["seconds"] > MAX_SECONDS:
            missed.append(f"{where}: {row['seconds']} s, over {MAX_SECONDS}")
        if row["peak_mib"] > MAX_MIB:
            missed.append(f"{where}: {row['peak_mib']} MiB, over {MAX_MIB}")
        if row["fill"] < MIN_FILL:
            missed.append(f"{where}: a fill of {row['fill']}, under {MIN_FILL}")
    return missed


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="preferences")
    parser.add_argument("--capacity", type=int, default=8192, help="tokens in a row")
    parser.add_argument("--data", help="a preference file, or the folder of a prepared store")
    parser.add_argument("--tokenizer", default="", help="folder of the tokenizer for a preference file")
    parser.add_argument("--trl-python", help="an interpreter with trl and datasets")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.trl_python:
        trl_python.check(options.trl_python, "datasets", "trl")
    rng = np.random.default_rng(options.seed)
    print(f"{'preferences':>11}  {'algorithm':<22}{'seconds':>9}{'fill':>9}{'bins':>9}{'fewest':>9}{'MiB':>9}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        found = None
        if options.data:
            in_child(sys.executable, "write_sizes", options.data, options.tokenizer, f"{folder}/found.npy")
            found = np.load(f"{folder}/found.npy")
        for num in options.counts:
            sizes = like_hh(num, rng) if found is None else rng.choice(found, num)
            rows += rows_for(num, sizes, options, Path(folder))
    missed = missed_targets(rows)
    for line in missed:
        print(f"missed: {line}")
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    print(json.dumps({"benchmark": "packing", **vars(options), "rows": rows, "missed": missed, **versions}))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    elif sys.argv[1:2] == ["write_sizes"]:
        write_sizes(*sys.argv[2:5])
    else:
        main()

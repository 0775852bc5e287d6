"""Times the conversion of a file of pairs to tokens: tandem, TRL's dataset preparation, and bare `tokenizers` encoding.

    python benchmarks/prepare.py --tokenizer DIR --trl-python PATH [--rows 100000] [--data FILE …] [--memory 1000000]

All three read the same pairs on the same cores, one after another, each in a separate process. Imports and loading the
tokenizer are not timed, but everything that tandem then does with it is. TRL and tandem use as many processes as there are
cores; bare encoding (`encode_batch` over all rendered texts, kept in memory) uses the threads of `tokenizers`.
Several files of `--data` are several sets of one run, read one after another in the same process.
`--memory` tokenises that many short rows, and 10,000 of them, and compares peak memory.
If TRL does not support the keys of a file, tandem is compared with bare encoding only.
Prints a table and, as its last line, one JSON object; exits with 1 if a target is missed.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trl_python
from options import options_of

TARGETS = {"versus_trl": 5.0, "versus_bare": 1.5, "memory_growth": 1.2}
NUM_CORES = len(os.sched_getaffinity(0))


# Each of the three runs in a child process, TRL with a separate interpreter, so imports are inside the functions.


def with_tandem(files: list[str], tokenizer_folder: str, cores: int, cache: str) -> tuple[float, int]:
    """Seconds and tokens of tandem's tokenisation, including writing its store to disk."""
    from tandem.config.sections.datasets import Data, DatasetFields
    from tandem.config.sections.policy import Tokenizer
    from tandem.data.store.opening import open_store
    from tandem.data.store.processes import Processes
    from tandem.data.text.template import make_template
    from tandem.data.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(tokenizer_folder))
    lenient = Data(on_bad_row="skip", max_bad_share=1.0, max_filtered_share=1.0, num_workers=cores)
    start = time.perf_counter()
    template = make_template(tokenizer, Tokenizer())
    with Processes(template) as kept:
        stores = [open_store(file, DatasetFields(), template, lenient, 4096, processes=kept) for file in files]
    seconds = time.perf_counter() - start
    return seconds, int(sum(store.num_prompt_tokens.sum() + store.num_completion_tokens.sum() for store in stores))


def with_trl(files: list[str], tokenizer_folder: str, cores: int, cache: str) -> tuple[float, int]:
    """Seconds and tokens of TRL's dataset preparation."""
    import datasets  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer
    from trl import DPOTrainer  # pyright: ignore[reportMissingImports]

    datasets.disable_caching()
    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    start = time.perf_counter()
    this = SimpleNamespace(_tokenizer=tokenizer)
    args = SimpleNamespace(dataset_num_proc=cores, max_length=None)
    sets = []
    for file in files:
        rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)
        sets.append(DPOTrainer._prepare_dataset(this, rows, tokenizer, args, "train"))
    seconds = time.perf_counter() - start
    names = "prompt_ids", "chosen_ids", "rejected_ids"
    return seconds, sum(len(ids) for rows in sets for name in names for ids in rows[name])


def with_bare_tokenizers(files: list[str], tokenizer_folder: str, cores: int, cache: str) -> tuple[float, int]:
    """Seconds and tokens of encoding alone: the texts are rendered before the clock starts."""
    from tandem.config.sections.datasets import DatasetFields
    from tandem.config.sections.policy import Tokenizer
    from tandem.data.formats.formats import detect_format, read_preference
    from tandem.data.formats.prompt_files import Wording
    from tandem.data.read.sources import RowError, read_rows
    from tandem.data.text.template import make_template
    from tandem.data.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(tokenizer_folder))
    template = make_template(tokenizer, Tokenizer())
    sets: list[list[str]] = []
    for file in files:
        texts: list[str] = []
        for row in read_rows(Path(file)):
            if isinstance(row, RowError):
                continue
            try:
                name, _ = detect_format(row, DatasetFields())
                rendered = template.render(read_preference(row, DatasetFields(), name, Wording()))
            except RowError:  # tandem skips it as well
                continue
            texts += [rendered.prompt, *(part.text for parts in rendered.completions for part in parts)]
        sets.append(texts)
    start = time.perf_counter()
    encoded = [tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False) for texts in sets]
    return time.perf_counter() - start, sum(len(one.ids) for of_set in encoded for one in of_set)


PROGRAMS = {"tandem": with_tandem, "trl": with_trl, "bare": with_bare_tokenizers}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tokenizer", required=True, help="a folder with a tokenizer that has a chat template")
    parser.add_argument("--trl-python", help="an interpreter with TRL; if not given, TRL is left out")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--data", nargs="+", type=Path, help="files to read instead of generated pairs")
    parser.add_argument("--memory", type=int, default=0, metavar="ROWS", help="compare peak memory with 10,000 rows")
    parser.add_argument("--repeat", type=int, default=1, help="number of rounds; the fastest of each program counts")
    given = parser.parse_args()
    if given.trl_python:
        trl_python.check(given.trl_python, "datasets", "trl")
    with tempfile.TemporaryDirectory() as scratch:
        results = run(given, Path(scratch))
    print(json.dumps(results))
    sys.exit(0 if all(results["met"].values()) else 1)


def run(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    data = given.data or [generate(scratch / "pairs.jsonl", given.rows, words=90)]
    pythons = {"tandem": sys.executable, "trl": given.trl_python, "bare": sys.executable}
    timed: dict[str, list[tuple[float, int]]] = {name: [] for name, python in pythons.items() if python}
    unread = []
    for _ in range(given.repeat):  # in turn, because the speed of a machine varies over time
        for name in [name for name in timed if name not in unread]:
            try:
                timed[name].append(measure(pythons[name], name, data, given.tokenizer, scratch))
            except CannotRead:
                unread.append(name)
    seconds = {name: min(times)[0] for name, times in timed.items() if times}
    tokens = {name: times[0][1] for name, times in timed.items() if times}
    ratios = {"versus_bare": seconds["tandem"] / seconds["bare"]}
    if "trl" in seconds:
        ratios["versus_trl"] = seconds["trl"] / seconds["tandem"]
    if given.memory:
        short = scratch / "short.jsonl"
        peaks = [
            peak_memory(generate(short, rows, words=12), given.tokenizer, scratch) for rows in (10_000, given.memory)
        ]
        ratios["memory_growth"] = peaks[1] / peaks[0]
        print(f"peak memory: {peaks[0] / 2**20:.0f} MiB at 10,000 rows, {peaks[1] / 2**20:.0f} MiB at {given.memory:,}")
    met = {
        name: value >= TARGETS[name] if name == "versus_trl" else value <= TARGETS[name]
        for name, value in ratios.items()
    }
    print(f"{'':8}{'seconds':>9}{'tokens':>14}")
    for name in seconds:
        print(f"{name:8}{seconds[name]:>9.1f}{tokens[name]:>14,}")
    for name in unread:
        print(f"{name:8}{'cannot read':>23}")
    for name, value in ratios.items():
        print(f"{name}: {value:.2f} (target {TARGETS[name]}, {'met' if met[name] else 'MISSED'})")
    rows = {"files": [file.name for file in data]} if given.data else {"rows": given.rows}
    return {**rows, "cores": NUM_CORES, "seconds": seconds, "tokens": tokens, "ratios": ratios, "met": met}


def generate(file: Path, rows: int, words: int) -> Path:
    """Write pairs as messages, with words from English text and log-normal lengths of about `words` per pair."""
    random.seed(0)
    with (Path(__file__).parent.parent / "src/tandem/embedded/train.jsonl").open(encoding="utf-8") as lines:
        text = " ".join(json.loads(line)["chosen"] for line in lines).split() * 2

    def said(role: str, mean: float) -> list[dict[str, str]]:
        length = max(1, int(random.lognormvariate(0, 0.7) * mean))
        start = random.randrange(len(text) // 2)
        return [{"role": role, "content": " ".join(text[start : start + length])}]

    with file.open("w", encoding="utf-8") as out:
        for number in range(rows):
            prompt = said("user", words / 3)
            prompt[0]["content"] += f" ({number})"
            row = {"prompt": prompt, "chosen": said("assistant", words / 3), "rejected": said("assistant", words / 3)}
            out.write(json.dumps(row) + "\n")
    return file


class CannotRead(Exception):
    """A program cannot read the pairs in their format."""


def measure(python: str, program: str, data: list[Path], tokenizer: str, scratch: Path) -> tuple[float, int]:
    """Seconds and tokens, as reported by the program."""
    with started(python, program, data, tokenizer, scratch) as process:
        printed, complaints = process.communicate()
    if process.returncode and program == "trl" and "\nKeyError: " in complaints:
        raise CannotRead  # TRL reads only the keys prompt, chosen and rejected
    if process.returncode:
        sys.exit(f"{complaints}\n{python} failed")
    seconds, tokens = printed.split()[-2:]
    return float(seconds), int(tokens)


def peak_memory(data: Path, tokenizer: str, scratch: Path) -> int:
    """Peak memory in bytes of all tandem processes together. Sampling slows them down, so this run is not timed."""
    peak = 0
    with started(sys.executable, "tandem", [data], tokenizer, scratch) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(proportional_bytes, family(process.pid))))
            time.sleep(0.2)
    if process.returncode:
        sys.exit(f"{sys.executable} failed")
    return peak


@contextmanager
def started(
    python: str, program: str, data: list[Path], tokenizer: str, scratch: Path
) -> Iterator[subprocess.Popen[str]]:
    with tempfile.TemporaryDirectory(dir=scratch) as cache:
        environment = {**os.environ, "TANDEM_CACHE": f"{cache}/tandem", "HF_HOME": f"{cache}/hf", "HF_HUB_OFFLINE": "1"}
        arguments = [json.dumps([str(file) for file in data]), tokenizer, str(NUM_CORES), f"{cache}/datasets"]
        command = [python, __file__, "measure", program, *arguments]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
            yield process


def family(pid: int) -> Iterator[int]:
    yield pid
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))
    except OSError:
        return


def proportional_bytes(pid: int) -> int:
    """Memory of a process, with shared pages counted proportionally, without mapped files, which the system can drop."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        _, _, program, files, tokenizer, cores, cache = sys.argv
        print(*PROGRAMS[program](json.loads(files), tokenizer, int(cores), cache))
    else:
        main()

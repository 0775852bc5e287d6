"""Compares parts that tandem writes itself with the libraries that could replace them: seconds, memory, and what goes wrong.

    pip install --target LIBRARIES --no-deps ijson pebble datasets dill multiprocess pandas xxhash python-dateutil
    PYTHONPATH=LIBRARIES python benchmarks/hand_written_parts.py --tokenizer FOLDER --results results.jsonl

A library that is not installed is reported and left out. Each measurement runs in a separate process with a limit on memory
and time, because some of the alternatives do not end or use all memory. The last line is one JSON object.
"""

import hashlib
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import alternatives
import numpy as np
import prepare
from made_model import SHAPES, config_of
from options import options_of

from tandem.data.store.pool import RowMonitor

SOURCE = Path(__file__).parents[1] / "src/tandem"
FILES = {
    "word_cache": ["data/text/word_cache.py"],
    "pool": ["data/store/pool.py", "data/store/processes.py"],
    "json_array": ["data/read/json_array.py"],
    "hub": ["data/read/hub.py"],
    "plain_pickle": ["data/formats/plain_pickle.py"],
    "pinned_memory": ["training/checkpoint/host_copy.py"],
    "trackers": ["report/trackers/tracking.py", "report/trackers/child.py"],
}
LIBRARIES = ("ijson", "pebble", "datasets", "wandb", "mlflow")
MEMORY_BYTES = 4 * 1024**3  # that a measured process may reserve
Record = dict[str, Any]


def peak_mib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM:"))


def cpu_seconds() -> float:
    """Of this process and of the children that have ended. Other load on the machine hardly changes it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


# Word cache and pool: pairs into tokens, as a run does it


def tokens(file: str, tokenizer_folder: str, cached: bool, pool: str, cache: str) -> Record:
    """Seconds to tokenise a file in two processes, and a hash of the tokens."""
    from tandem.config.sections.datasets import Data, DatasetFields
    from tandem.config.sections.policy import Tokenizer
    from tandem.data.store import processes
    from tandem.data.store.opening import open_store
    from tandem.data.text import word_cache
    from tandem.data.text.template import make_template
    from tandem.data.text.tokenizer import load_tokenizer

    os.environ["TANDEM_CACHE"] = cache
    if not cached:
        setattr(word_cache, "_can_be_cut", lambda backend: False)  # noqa: B010 (pyright: private)
    if pool != "tandem":
        setattr(processes, "Pool", POOLS[pool]())  # noqa: B010
    template = make_template(load_tokenizer(Path(tokenizer_folder)), Tokenizer())
    data = Data(on_bad_row="skip", max_bad_share=1.0, max_filtered_share=1.0, num_workers=2)
    start, cpu_start = time.perf_counter(), cpu_seconds()
    store = open_store(file, DatasetFields(), template, data, 4096)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu_start
    count = int(store.num_prompt_tokens.sum() + store.num_completion_tokens.sum())
    arrow = next(path for path in sorted(Path(cache).rglob("*.arrow")))
    return {
        "seconds": seconds,
        "cpu": cpu,
        "tokens": count,
        "sha256": hashlib.sha256(arrow.read_bytes()).hexdigest()[:16],
    }


def _own_pool() -> Any:
    from tandem.data.store.pool import Pool

    return Pool


POOLS: dict[str, Callable[[], Any]] = {
    "tandem": _own_pool,
    "pebble": lambda: alternatives.PebblePool,
    "concurrent.futures": lambda: alternatives.ExecutorPool,
}
ROW_SECONDS = 1.0  # limit of a row where one never ends


def _work(fault: str, item: int, monitor: RowMonitor) -> int:
    for row in range(10):
        monitor.start_row(row)
        if (item, row) == (5, 3) and fault == "hangs":
            time.sleep(1e6)
        if (item, row) == (5, 3) and fault == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "slow chunk":
            time.sleep(ROW_SECONDS / 5)  # no row is slow, but the ten of a chunk take twice the limit of a row
    monitor.end_row()
    return item


def faulty_work(pool: str, fault: str) -> Record:
    """How a pool reports a row that hangs, a process that is killed, and a chunk of many fast rows."""
    start = time.perf_counter()
    made = POOLS[pool]()(partial(_work, fault), 2, ROW_SECONDS)
    try:
        num = len(list(made.map(iter(range(8)))))
        return {"seconds": time.perf_counter() - start, "outcome": f"{num} results"}
    except Exception as error:
        found = {name: getattr(error, name) for name in ("item", "row") if hasattr(error, name)}
        return {"seconds": time.perf_counter() - start, "outcome": type(error).__name__, **found}
    finally:
        made.stop()


def hang_in_pool(pool: str) -> Record:
    """Never ends: the process that started the pool is killed by the caller."""
    list(POOLS[pool]()(partial(_work, "hangs"), 2, 1e6).map(iter(range(8))))
    return {}


def processes_left(pool: str) -> Record:
    """How many processes of a pool still run two seconds after the process that started them was killed."""
    command = [sys.executable, __file__, "measure", "hang_in_pool", json.dumps([pool]), str(MEMORY_BYTES)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while len(family := list(prepare.family(process.pid))) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        family = list(prepare.family(process.pid))[1:]
        process.kill()
    time.sleep(2)
    left = [pid for pid in family if _is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return {"started": len(family), "left": len(left)}


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# JSON arrays


def read_array(reader: str, file: str) -> Record:
    path, before, start = Path(file), peak_mib(), cpu_seconds()
    with path.open("rb") as opened:
        if reader == "tandem":
            from tandem.data.read.json_array import elements

            rows: Iterator[Any] = (element for _, element, _ in elements(opened, path))
        elif reader == "json.load":
            rows = iter(json.load(opened))
        else:
            rows = alternatives.ijson_elements(opened, refuse_duplicates=reader == "ijson, keys checked")
        num, last = 0, None
        for num, last in enumerate(rows, 1):  # noqa: B007 (the last values are reported)
            pass
    return {"cpu": cpu_seconds() - start, "mib": peak_mib() - before, "elements": num, "last": ascii(last)[:60]}


ARRAYS = {
    "a key twice": '[{"a": 1, "a": 2}]',
    "NaN": '[{"a": NaN}]',
    "an integer of 30 digits": f"[{'1' * 30}]",
    "half a surrogate pair": '["\\ud83d"]',
    "a missing comma": '[{"a": 1}\n{"a": 2}]',
    "50,000 levels": "[" * 50_000 + "]" * 50_000,
}


# Files of a dataset


def import_seconds(module: str) -> Record:
    import huggingface_hub  # what tandem imports in either case

    _ = huggingface_hub.HfApi, huggingface_hub.hf_hub_download
    before, modules, start = peak_mib(), len(sys.modules), cpu_seconds()
    __import__(module)
    return {"cpu": cpu_seconds() - start, "mib": peak_mib() - before, "modules": len(sys.modules) - modules}


LAYOUTS: dict[str, tuple[list[str], str]] = {
    "words in file names": (["my_train.jsonl", "test.jsonl", "more.jsonl"], ""),
    "words in folders": (["training/1.csv", "dev/0.csv", "test.csv"], ""),
    "shards": ([f"data/{split}-0000{i}-of-00002.parquet" for split in ("test", "train") for i in (0, 1)], ""),
    "no words": (["a.csv", "b.csv"], ""),
    "README.md, patterns": (
        ["a/one.jsonl", "a/two.jsonl", "b/three.jsonl"],
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: a/*.jsonl\n---\n",
    ),
    "one table in two formats": (["train.csv", "train.parquet"], ""),
    "metadata of datasets": (["train.jsonl", "dataset_infos.json", "state.json"], ""),
    "2,000 shards": ([f"data/train-{i:05}-of-02000.parquet" for i in range(2000)], ""),
}


def choose(resolver: str, layout: str, folder: str) -> Record:
    """The files of the split train in a layout; tandem needs only their names, `datasets` an existing folder."""
    from tandem.data.read.hub import choose_files

    listing, readme = LAYOUTS[layout]
    if resolver == "datasets":
        for file in [*listing, "README.md"]:
            (Path(folder) / file).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / file).write_text(readme if file == "README.md" else "{}" * file.endswith(".json"))
        __import__("datasets")  # not timed here
    start = cpu_seconds()
    if resolver == "datasets":
        found = alternatives.datasets_files(Path(folder), subset=None, split="train")
    else:
        found = choose_files("acme/pairs", sorted(listing), readme, subset=None, split="train")
    return {"cpu": cpu_seconds() - start, "outcome": _shown(found)}


def _shown(files: list[str]) -> str:
    return ", ".join(sorted(files)) if len(files) < 5 else f"{len(files)} files"


# Pickles


def unpickle(reader: str, file: str) -> Record:
    data = Path(file).read_bytes()
    before, start = peak_mib(), cpu_seconds()
    if reader == "tandem":
        from tandem.data.formats.plain_pickle import load_objects as load
    else:
        load = alternatives.allow_list_objects
    objects = load(data)
    return {"cpu": cpu_seconds() - start, "mib": peak_mib() - before, "objects": len(objects)}


def write_packs(file: Path, num_tokens: int) -> None:
    """A packed file of NeMo Aligner with packs of about 4,096 tokens."""
    from tandem.data.formats.nemo_packs import write_nemo
    from tandem.data.text.tokens import TokenizedPreference

    ids = np.random.default_rng(0).integers(0, 150_000, 512, np.int32)
    one = TokenizedPreference(prompt=ids[:256], completions=(ids, ids[::-1]), pairs=((0, 1),), place="made")
    write_nemo(file, [[one] * 3] * max(1, num_tokens // 4608))


# Pinned memory: what can be computed without a GPU


def pinned_bytes(shape: str) -> Record:
    """Bytes of float32 weights and two optimizer states in pinned memory: tandem's, and torch's, in powers of two."""
    import torch
    from transformers import AutoModelForCausalLM

    from tandem.training.checkpoint.host_copy import _paged_bytes

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    tensors = [*model.parameters()]
    exact = [tensor.numel() * 4 for tensor in tensors]
    own = sum(map(_paged_bytes, (tensor.float() for tensor in tensors)))
    torchs = sum(1 << (size - 1).bit_length() for size in exact)
    return {f"{name}_gib": 3 * size / 2**30 for name, size in (("tandem", own), ("torch", torchs))}


# Trackers


STEPS, STEP_SECONDS = 20, 0.05


def tracked_steps(way: str, tracker: str, address: str, folder: str) -> Record:
    """A loop of 20 short steps that logs to a server that accepts connections and never answers."""
    from tandem.config.sections.logger import Logger
    from tandem.report.trackers.adapters import TRACKERS, Opening
    from tandem.report.trackers.tracking import Feed

    os.environ.update(WANDB_BASE_URL=address, WANDB_API_KEY="0" * 40, WANDB_ERROR_REPORTING="false")
    settings = Logger().model_dump()
    settings["mlflow"]["tracking_uri"] = address
    Path(folder).mkdir(parents=True)
    opening = Opening(folder, f"{folder}/logs", 0, [], settings, {"seed": 1})
    print(json.dumps({"began": time.time()}), flush=True)
    start = time.perf_counter()
    if way == "child process":
        feed = Feed([tracker], opening, print, print)
        log, close = feed.put, feed.close
    elif way == "in the loop":
        opened = TRACKERS[tracker](opening)
        log, close = opened.log, opened.close
    else:
        lines: list[tuple[int, dict[str, float]]] = []
        thread = threading.Thread(target=lambda: TRACKERS[tracker](opening), daemon=True)
        thread.start()
        log, close = (lambda step, metrics: lines.append((step, metrics))), (lambda: thread.join(10))
    for step in range(STEPS):
        time.sleep(STEP_SECONDS)
        log(step, {"loss": 0.5})
    print(json.dumps({"steps_seconds": time.perf_counter() - start}), flush=True)
    close()
    return {"closed_seconds": time.perf_counter() - start}


@contextmanager
def silent_server() -> Iterator[str]:
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:

        def accept() -> None:
            try:
                while True:
                    kept.append(server.accept()[0])
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


# Measurements in processes

MEASURED: dict[str, Callable[..., Record]] = {
    function.__name__: function
    for function in (tokens, faulty_work, hang_in_pool, read_array, import_seconds, choose, unpickle, pinned_bytes)
} | {"tracked_steps": tracked_steps}


def measure(function: Callable[..., Record], *arguments: Any, seconds: float, limit: int = MEMORY_BYTES) -> Record:
    """What a function returns in a separate process, or how that process ended."""
    command = [sys.executable, __file__, "measure", function.__name__, json.dumps(arguments), str(limit)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        found: Record = {}
        for line in out:
            if line.startswith("{"):
                found |= json.loads(line)
    if code is None:
        found["outcome"] = f"did not end in {seconds:g} seconds"
    elif code < 0:
        found["outcome"] = f"ended by {signal.Signals(-code).name}"
    if "began" in found:  # after its imports
        found["ended_seconds"] = time.time() - found.pop("began")
    return _rounded(found)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.3g}") if isinstance(value, float) else value


def run_measured(name: str, arguments: str, limit: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        print(json.dumps(MEASURED[name](*json.loads(arguments))), flush=True)
    except Exception as error:
        shown = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        shown = re.sub(r"/\S*/", "", " ".join(shown.split()))  # without the folder of the measurement
        print(json.dumps({"outcome": shown[:150], "mib": peak_mib()}), flush=True)


# Parts


def compare_word_cache(given: Any, scratch: Path) -> Record:
    pairs = str(prepare.generate(scratch / "pairs.jsonl", given.rows, words=90))
    return {
        name: measure(
            tokens, pairs, given.tokenizer, cached, "tandem", str(scratch / name), seconds=given.seconds, limit=2**40
        )
        for name, cached in (("tandem", True), ("tokenizers", False))
    }


def compare_pool(given: Any, scratch: Path) -> Record:
    pairs = str(prepare.generate(scratch / "pairs.jsonl", given.rows, words=90))
    found: Record = {}
    for name in POOLS:
        if name == "pebble" and find_spec("pebble") is None:
            found[name] = "not installed"
            continue
        of_pool = partial(measure, seconds=given.seconds, limit=2**40)
        found[name] = {"tokens": of_pool(tokens, pairs, given.tokenizer, True, name, str(scratch / name))}
        for fault in ("hangs", "is killed", "slow chunk"):
            found[name][fault] = measure(faulty_work, name, fault, seconds=30 * ROW_SECONDS)
        found[name]["parent killed"] = processes_left(name)
    return found


def compare_json_array(given: Any, scratch: Path) -> Record:
    readers = ["tandem", "json.load", *(["ijson", "ijson, keys checked"] if find_spec("ijson") else [])]
    big = scratch / "big.json"
    write_array(big, given.array_mb * 10**6)
    found: Record = {name: {"file": measure(read_array, name, str(big), seconds=given.seconds)} for name in readers}
    for number, (case, text) in enumerate(ARRAYS.items()):
        small = scratch / f"{number}.json"
        small.write_text(text)
        for name in readers:
            found[name][case] = measure(read_array, name, str(small), seconds=given.seconds)
    return found if find_spec("ijson") else {**found, "ijson": "not installed"}


def write_array(file: Path, num_bytes: int) -> None:
    rows = (SOURCE / "embedded/train.jsonl").read_text(encoding="utf-8").splitlines()
    random.seed(0)
    with file.open("w", encoding="utf-8") as out:
        written = out.write("[" + rows[0])
        while written < num_bytes:
            written += out.write(",\n" + random.choice(rows))
        out.write("]\n")


def compare_hub(given: Any, scratch: Path) -> Record:
    if find_spec("datasets") is None:
        return {"datasets": "not installed"}
    found: Record = {
        "import of tandem's part": measure(import_seconds, "tandem.data.read.hub", seconds=given.seconds),
        "import of datasets": measure(import_seconds, "datasets", seconds=given.seconds),
    }
    for number, layout in enumerate(LAYOUTS):
        found[layout] = {
            name: measure(choose, name, layout, str(scratch / f"repository-{number}"), seconds=given.seconds)
            for name in ("tandem", "datasets")
        }
    return found


def compare_plain_pickle(given: Any, scratch: Path) -> Record:
    readers = ("tandem", "allow-list")
    packs = scratch / "packs.npy"
    write_packs(packs, given.pickled_tokens)
    found: Record = {name: {"file": measure(unpickle, name, str(packs), seconds=given.seconds)} for name in readers}
    for number, (attack, pickled) in enumerate(alternatives.attacks().items()):
        bad = scratch / f"{number}.npy"
        bad.write_bytes(alternatives.as_npy(pickled))
        for name in readers:
            found[name][attack] = measure(unpickle, name, str(bad), seconds=given.seconds)
    return found


def compare_pinned_memory(given: Any, scratch: Path) -> Record:
    return {shape: measure(pinned_bytes, shape, seconds=given.seconds, limit=2**40) for shape in given.shapes}


def compare_trackers(given: Any, scratch: Path) -> Record:
    found: Record = {}
    with silent_server() as address:
        for tracker in given.trackers:
            if find_spec(tracker) is None:
                found[tracker] = "not installed"
                continue
            found[tracker] = {
                way: measure(
                    tracked_steps,
                    way,
                    tracker,
                    address,
                    str(scratch / tracker / way),
                    seconds=given.patience,
                    limit=2**40,
                )
                for way in ("child process", "thread", "in the loop")
            }
    return found


PARTS: dict[str, Callable[[Any, Path], Record]] = {
    "word_cache": compare_word_cache,
    "pool": compare_pool,
    "json_array": compare_json_array,
    "hub": compare_hub,
    "plain_pickle": compare_plain_pickle,
    "pinned_memory": compare_pinned_memory,
    "trackers": compare_trackers,
}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tokenizer", help="a folder with a tokenizer that has a chat template")
    parser.add_argument("--rows", type=int, default=100_000, help="pairs that are tokenised")
    parser.add_argument("--array-mb", type=float, default=200, help="size of the JSON array")
    parser.add_argument("--pickled-tokens", type=int, default=10_000_000, help="tokens in the packed file")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen2.5-1.5b", "llama3.1-8b"])
    parser.add_argument("--trackers", nargs="+", choices=["mlflow", "wandb"], default=["mlflow", "wandb"])
    parser.add_argument("--seconds", type=float, default=300, help="limit of one measurement")
    parser.add_argument("--patience", type=float, default=150, help="limit of a run with a tracker that hangs")
    parser.add_argument("--results", type=Path, help="a file to which one line of JSON for each part is written")
    given = parser.parse_args()
    if given.tokenizer is None and {"word_cache", "pool"} & set(given.parts):
        parser.error("word_cache and pool need --tokenizer")
    records = []
    for part in given.parts:
        with tempfile.TemporaryDirectory() as scratch:
            found = PARTS[part](given, Path(scratch))
        lines = sum(len((SOURCE / file).read_text(encoding="utf-8").splitlines()) for file in FILES[part])
        records.append({"benchmark": "hand_written_parts", "part": part, "lines": lines, "found": found})
        print(f"{part}, {lines} lines")
        show(found)
    versions = {name: _version(name) for name in LIBRARIES}
    if given.results:
        date = time.strftime("%Y-%m-%d")
        texts = [json.dumps({**record, "date": date, "versions": versions}) + "\n" for record in records]
        given.results.write_text("".join(texts), encoding="utf-8")
    print(json.dumps({"cores": prepare.NUM_CORES, "versions": versions, "parts": records}))


def show(found: Record, indent: int = 2) -> None:
    for name, value in found.items():
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            print(" " * indent + name)
            show(value, indent + 2)
        else:
            facts = value if isinstance(value, str) else ", ".join(f"{key} {one}" for key, one in value.items())
            print(f"{' ' * indent}{name}: {facts}")


def _version(name: str) -> str | None:
    try:
        return version({"mlflow": "mlflow-skinny"}.get(name, name))
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        run_measured(*sys.argv[2:])
    else:
        main()

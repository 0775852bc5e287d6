"""Times the tokenising of a file by several machines together: ranks of this machine, each with a cache and a share of its cores.

    python benchmarks/machines.py --tokenizer DIR [--rows 50000] [--machines 2] [--workers 1]

First one process tokenises the file alone with that many workers, then several do so together, with as many workers each. The
stores must have the same bytes. "serial" is what every machine does alone, whatever their number: reading the file, and writing
the results of all rows. CPU seconds do not depend on what else the machine does. Start-up and loading the tokenizer are not
timed.
Prints one JSON object; exits with 1 if the bytes differ.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from options import options_of
from prepare import generate

FILES = ("tokens.arrow", "rejects.jsonl", "manifest.json")


def tokenize(file: Path, tokenizer_folder: str, workers: int) -> dict[str, Any]:
    """Tokenise the file as a rank of a run, and return the seconds and the folder of the store."""
    from tandem.config.sections.datasets import Data, DatasetFields
    from tandem.config.sections.policy import Tokenizer
    from tandem.data.store.opening import open_store
    from tandem.data.text.template import make_template
    from tandem.data.text.tokenizer import load_tokenizer
    from tandem.model.distributed.machines import join_machines
    from tandem.model.distributed.process_group import join_process_group, leave_process_group

    template = make_template(load_tokenizer(Path(tokenizer_folder)), Tokenizer())
    lenient = Data(on_bad_row="skip", max_bad_share=1.0, max_filtered_share=1.0, num_workers=workers)
    machines = join_machines(join_process_group(uses_gpus=False))
    start, before = time.perf_counter(), os.times()
    with machines.taking_part():
        store = open_store(str(file), DatasetFields(), template, lenient, 4096, machines=machines)
        seconds, after = time.perf_counter() - start, os.times()
    leave_process_group()
    tokens = int(store.num_prompt_tokens.sum() + store.num_completion_tokens.sum())
    used = {
        "own": after.user + after.system - before.user - before.system,
        "workers": after.children_user + after.children_system - before.children_user - before.children_system,
    }
    return {"seconds": seconds, "cpu": used, "tokens": tokens, "folder": str(store.folder)}


def serial(file: Path, folder: Path, tokenizer_folder: str, scratch: Path) -> dict[str, float]:
    """Return the seconds of reading the file, and of writing as many bytes of results as the store in `folder` has."""
    import pyarrow as pa

    from tandem.data.read.sources import read_chunks
    from tandem.data.store.writer import ChunkResult, write_store

    start = time.perf_counter()
    num_chunks = sum(1 for _ in read_chunks(file, file.name))
    read = time.perf_counter() - start
    results = []
    with pa.memory_map(str(folder / "tokens.arrow")) as mapped, pa.ipc.open_file(mapped) as reader:
        for number in range(reader.num_record_batches):
            batch, sink = reader.get_batch(number), pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, batch.schema) as out:
                out.write_batch(batch)
            digests = batch["digest"].to_numpy().tobytes()
            results.append(ChunkResult(digests=digests, batch=sink.getvalue().to_pybytes()))
    assert len(results) <= num_chunks
    scratch.mkdir()
    start = time.perf_counter()
    write_store(results, scratch)
    return {"reading": read, "writing": time.perf_counter() - start}


def on_ranks(count: int, file: Path, tokenizer: str, workers: int, scratch: Path) -> list[dict[str, Any]]:
    """Tokenise the file on several ranks, each of which is the first of a machine with its own cache."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", str(file), tokenizer, str(workers)],
            env={**os.environ, **group, "RANK": str(number), "TANDEM_CACHE": str(scratch / f"cache-{count}-{number}")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--tokenizer", required=True, help="a folder with a tokenizer")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="worker processes of each machine")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        file = generate(scratch / "pairs.jsonl", given.rows, words=90)
        (alone,) = on_ranks(1, file, given.tokenizer, given.workers, scratch)
        together = on_ranks(given.machines, file, given.tokenizer, given.workers, scratch)
        stores = [[(Path(one["folder"]) / part).read_bytes() for part in FILES] for one in (alone, *together)]
        results = {
            "rows": given.rows,
            "tokens": alone["tokens"],
            "machines": given.machines,
            "workers": given.workers,
            "seconds": {"alone": alone["seconds"], "together": max(one["seconds"] for one in together)},
            "cpu_seconds": {"alone": alone["cpu"], "together": [one["cpu"] for one in together]},
            "serial": serial(file, Path(alone["folder"]), given.tokenizer, scratch / "written"),
            "same_bytes": all(one == stores[0] for one in stores),
        }
    print(json.dumps(results))
    sys.exit(0 if results["same_bytes"] else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _, _, path, folder, num_workers = sys.argv
        print(json.dumps(tokenize(Path(path), folder, int(num_workers))))
    else:
        main()

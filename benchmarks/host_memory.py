"""Measures the host memory of two CPU ranks that load a large model by rows, save a checkpoint and export the model.

    python benchmarks/host_memory.py [--shape llama3.1-70b] [--layers 2] [--vocabulary 16032] [--write]

The model has decoder layers of a real shape (1.7 GB each in bfloat16 at 70B) and random weights, which stay bfloat16. Of each
stage, the most anonymous memory of a rank is sampled every 5 ms, and the most resident memory, which includes mapped files, is
VmHWM of /proc/self/status. Needs Linux; at 70B 16 GB of disk space and 9 GB of memory. The last line is one JSON object.
`--write` puts the table, with numbers computed from it for all layers, into docs/scaling.md, and appends the result to
benchmarks/results.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from made_model import SHAPES, config_of
from options import options_of

from tandem.config.keys import with_table
from tandem.storage.cache import GIB

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
RESULTS = Path(__file__).parent / "results" / "host_memory.jsonl"
NUM_RANKS = 2
SAMPLE_SECONDS = 0.005
STAGES = ("load", "checkpoint", "export")
COMPUTED_FOR = (8, 16, 64)  # ranks


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama3.1-70b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=16_032, help="rows of the embeddings; Llama 3.1 has 128,256")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tandem-host-memory"))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rank", type=int, help="used by the script itself")
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(measure(options.rank, options.folder)))
        return
    shutil.rmtree(options.folder, ignore_errors=True)
    write_model(options.folder / "model", options.shape, options.layers, options.vocabulary)
    ranks = start_ranks(options.folder)
    shutil.rmtree(options.folder)
    result = {
        "benchmark": "host_memory",
        "shape": options.shape,
        "layers": options.layers,
        "vocabulary": options.vocabulary,
    }
    table = as_table(ranks, options.shape)
    print(table)
    line = json.dumps(result | {"ranks": ranks})
    print(line)
    if options.write:
        with RESULTS.open("a") as results:
            results.write(line + "\n")
        PAGE.write_text(with_table(PAGE.read_text(), "host-memory", table))


def write_model(folder: Path, shape: str, layers: int, vocabulary: int) -> None:
    """Write random weights, one file for each layer, without ever holding more than a layer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from tandem.model.files.tiny import tiny_tokenizer

    config = config_of(shape)
    config.num_hidden_layers, config.vocab_size, config.dtype = layers, vocabulary, torch.bfloat16
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    folder.mkdir(parents=True)
    for file in tiny_tokenizer().iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config.save_pretrained(folder)
    places: dict[str, str] = {}
    repeated = torch.empty(1 << 20, dtype=torch.bfloat16).uniform_(-0.02, 0.02)
    for number in range(layers + 1):  # the last file holds what is in no layer
        own = [name for name in shapes if f"layers.{number}." in name or (number == layers and "layers." not in name)]
        file = f"model-{number + 1:05}-of-{layers + 1:05}.safetensors"
        made = {name: repeated.repeat(-(-shapes[name].numel() // len(repeated))) for name in own}
        made = {name: numbers[: shapes[name].numel()].view(shapes[name]) for name, numbers in made.items()}
        save_file(made, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def start_ranks(folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--folder", str(folder), "--rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True, env=environment)
        for number in range(NUM_RANKS)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return [json.loads(out.splitlines()[-1]) for out in printed]


def measure(number: int, folder: Path) -> dict[str, Any]:
    """Load, save and export the model as one of the ranks. Return the memory of each stage in bytes."""
    import torch
    import torch.distributed as dist
    from transformers import AutoTokenizer

    from tandem.config.sections.policy import Policy as PolicyConfig
    from tandem.config.sections.policy import Tokenizer
    from tandem.data.text.template import make_template
    from tandem.exporting.weights import export_model
    from tandem.model.distributed.layers import shard
    from tandem.model.distributed.mesh import MeshShape
    from tandem.model.distributed.process_group import make_ranks
    from tandem.model.distributed.sharded_load import read_shards
    from tandem.model.distributed.shards import local_shard
    from tandem.model.files.source import find_model
    from tandem.model.load import as_policy, unloaded_model
    from tandem.training.checkpoint.checkpoints import Snapshot, state_tensors, write_checkpoint
    from tandem.training.checkpoint.host_copy import HostCopier
    from tandem.training.checkpoint.parts import part_of
    from tandem.training.checkpoint.saved_state import Progress

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=number, world_size=NUM_RANKS)
    cpu = torch.device("cpu")
    ranks = make_ranks(cpu, MeshShape(shard=NUM_RANKS))
    config = PolicyConfig.model_validate({"model_name": str(folder / "model")})
    source = find_model(config)
    template = make_template(AutoTokenizer.from_pretrained(folder / "model"), Tokenizer())
    found: dict[str, Any] = {"before": memory()["RssAnon"]}

    with sampled(found, "load"):
        unloaded = unloaded_model(source, config, torch.bfloat16)
        assert unloaded is not None
        policy = as_policy(unloaded.model, source, config, cpu)
        shard(policy, ranks, bfloat16=False, read=lambda: read_shards(source, unloaded, cpu))
    parameters = list(policy.parameters())
    found["own"] = sum(local_shard(one).nbytes for one in parameters)
    found["largest"] = max(one.numel() * one.element_size() for one in parameters)
    with sampled(found, "checkpoint"):
        # Without optimizer states, which are copied like weights.
        tensors = {name: part_of(one) for name, one in state_tensors(policy, None, number).items()}
        copier = HostCopier(cpu, torch.optim.SGD(parameters, lr=0.0))
        write_checkpoint(folder / "checkpoints", Snapshot(copier.copy(tensors), Progress(step=1), {}, ""), ranks)
        copier.close()
    with sampled(found, "export"):
        form: dict[str, Any] = {"dtype": torch.bfloat16, "rounding": "stochastic", "max_shard_size": "5GB"}
        export_model(policy, source, template, folder / "export", ranks, **form, measure=lambda _: None)
    dist.destroy_process_group()
    return found


@contextmanager
def sampled(found: dict[str, Any], stage: str) -> Iterator[None]:
    """Record the most memory of this process while the context is open."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    most, ends = [memory()["RssAnon"]], threading.Event()

    def sample() -> None:
        while not ends.wait(SAMPLE_SECONDS):
            most[0] = max(most[0], memory()["RssAnon"])

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield
    ends.set()
    thread.join()
    found[stage] = {"anonymous": most[0], "resident": memory()["VmHWM"], "after": memory()["RssAnon"]}


def memory() -> dict[str, int]:
    """Return the sizes in /proc/self/status, in bytes."""
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1] == "kB"}


def as_table(ranks: list[dict[str, Any]], shape: str) -> str:
    """Return the measured memory of the rank that needed most, and what follows for all layers of the model."""
    lines = [
        "| | load | checkpoint | export, first rank | export, others |",
        "|---|---|---|---|---|",
    ]
    own, largest, before = (max(rank[name] for rank in ranks) for name in ("own", "largest", "before"))
    peaks = [
        *(max(rank[stage]["anonymous"] for rank in ranks) for stage in ("load", "checkpoint")),
        ranks[0]["export"]["anonymous"],
        max(rank["export"]["anonymous"] for rank in ranks[1:]),
    ]
    lines.append(row(f"measured, {NUM_RANKS} ranks, {own / GIB:.1f} GiB of weights each", peaks))
    # Beyond what the process had before and its weights: of the rows of one weight, of all weights, of one whole weight.
    units = (largest / NUM_RANKS, own, largest, largest)
    multiples = [max(0.0, peak - before - own) / unit for peak, unit in zip(peaks, units, strict=True)]
    total, biggest = full_model(shape)
    for count in COMPUTED_FOR:
        rows = total / count
        needs = [
            before + rows + many * unit
            for many, unit in zip(multiples, (biggest / count, rows, biggest, biggest), strict=True)
        ]
        lines.append(
            row(
                f"*computed*, {SHAPES[shape].sizes[2]} layers, {count} ranks, {rows / GIB:.1f} GiB of weights each",
                needs,
            )
        )
    return "\n".join(lines)


def row(name: str, sizes: list[float]) -> str:
    return f"| {name} | {' | '.join(f'{size / GIB:.1f} GiB' for size in sizes)} |"


def full_model(shape: str) -> tuple[float, float]:
    """Return the bytes of all weights of the shape in bfloat16, and of the largest one."""
    hidden, intermediate, layers, heads, key_heads = SHAPES[shape].sizes
    attention = 2 * hidden * hidden * (1 + key_heads / heads)
    table = SHAPES[shape].vocabulary * hidden
    return 2 * (layers * (attention + 3 * hidden * intermediate) + 2 * table), 2 * table


if __name__ == "__main__":
    main()

"""Times training steps of a randomly initialised model of a real shape on pairs of realistic lengths.

    python benchmarks/throughput.py --shape qwen2.5-1.5b --pairs 128 --pack-length 16384 [--mode none] [--no-fsdp]

Lengths are log-normal (prompt mean 200, completions mean 250, sigma 0.7, total at most 2,048), the same for every
system and seed. Prints a table and, as its last line, one JSON object.
"""

import argparse
import json
import platform
import time
from typing import Any

import numpy as np
import torch
import transformers

from tandem.config.schema import Config
from tandem.data.tokens import TokenizedPreference
from tandem.model.attention import IMPLEMENTATION
from tandem.model.parallel import compile_layers, decoder_layers, shard
from tandem.model.policy import Policy, auto_head_chunk
from tandem.model.workers import start_workers, stop_workers
from tandem.packing.layout import lay_out
from tandem.packing.loader import load_ahead
from tandem.packing.packer import Packer, row_lengths
from tandem.packing.schedule import Batches
from tandem.train.optimizer import make_optimizer
from tandem.train.step import train_step
from tandem.train.terms import Side

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": True},
    "qwen2.5-1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
                     "tie_word_embeddings": True},
    "llama3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
                    "tie_word_embeddings": False},
}  # fmt: skip


class PairsInMemory:
    """The face of a TokenStore over preferences that are nowhere on disk."""

    def __init__(self, preferences: list[TokenizedPreference]):
        self.preferences = preferences
        self.num_pairs = np.ones(len(preferences), np.int64)

    def __getitem__(self, index: int) -> TokenizedPreference:
        return self.preferences[index]

    def __len__(self) -> int:
        return len(self.preferences)


class ZeroReference:
    """Reference numbers cost nothing while training (they are read from a cache): zeros stand for them."""

    def token_logps(self, pack: Any, inputs: Any) -> torch.Tensor:
        return torch.zeros(len(inputs.target_ids), device=inputs.target_ids.device)


def make_pairs(num: int, vocabulary: int, seed: int) -> list[TokenizedPreference]:
    rng = np.random.default_rng(seed)

    def length(mean: float) -> int:
        return max(4, int(rng.lognormal(np.log(mean) - 0.7**2 / 2, 0.7)))

    pairs = []
    while len(pairs) < num:
        prompt, chosen, rejected = length(200), length(250), length(250)
        if prompt + max(chosen, rejected) <= 2048:
            ids = [rng.integers(10, vocabulary, n).astype(np.int32) for n in (prompt, chosen, rejected)]
            pairs.append(TokenizedPreference(ids[0], (ids[1], ids[2]), ((0, 1),), (0.0, 0.0), "made"))
    return pairs


def make_policy(shape: dict[str, Any], device: torch.device, *, packed: bool) -> Policy:
    config = transformers.LlamaConfig(**shape, max_position_embeddings=4096)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=IMPLEMENTATION if packed else "sdpa"
        )
    chunk = auto_head_chunk(shape["vocab_size"], device)
    return Policy(model.train(), packed=packed, flex=packed and device.type == "cuda", head_chunk=chunk)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--pairs", type=int, default=64, help="pairs per global batch")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after two to warm up")
    parser.add_argument("--pack-length", type=int, default=8192)
    parser.add_argument("--mode", choices=["batch", "none"], default="batch")
    parser.add_argument("--no-fsdp", action="store_true", help="bfloat16 by autocast, to see what sharding costs")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()

    workers = start_workers()
    device = workers.device
    shape = SHAPES[options.shape]
    policy = make_policy(shape, device, packed=options.mode == "batch")
    num_trunk = sum(p.numel() for layer in decoder_layers(policy) for p in layer.parameters())
    if not options.no_fsdp:
        shard(policy, workers, bfloat16=True)
    if device.type == "cuda" and not options.no_compile:
        compile_layers(policy)
    config = Config()
    optimizer = make_optimizer(policy.parameters(), config.policy)
    side = Side(ZeroReference(), config.dpo, workers, "bfloat16")
    total = options.steps + 2
    store = PairsInMemory(make_pairs(options.pairs * total, shape["vocab_size"], seed=0))
    arrangement = "shared" if options.mode == "batch" else "separate"
    length = options.pack_length if options.mode == "batch" else 2048
    sizes = np.array([len(p.prompt) + sum(map(len, p.completions)) for p in store.preferences])
    lengths = row_lengths(length) if options.mode == "batch" else (length,)
    packer = Packer(store, sizes, lengths, arrangement, 1, "first_fit_decreasing")  # type: ignore[arg-type]
    if options.mode == "batch":  # every shape is compiled before the clock starts
        for number, length in enumerate(lengths):
            row = lay_out([number], [store[number]], length=length)
            with torch.autocast(device.type, torch.bfloat16, enabled=options.no_fsdp):
                policy(policy.inputs(row, device)).sum().backward()
        optimizer.zero_grad()
    seconds, reports = [], []
    for loaded in load_ahead(Batches(store.num_pairs, options.pairs).epoch(0), packer):
        batch, packs = loaded.batch, loaded.packs
        started = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=options.no_fsdp):
            report = train_step(policy, side, packs, batch, optimizer, 1.0).read(store)  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - started)
        reports.append(report)
    timed, done = sum(seconds[2:]), reports[2:]
    pairs, tokens = sum(r.num_pairs for r in done), sum(r.num_tokens for r in done)
    scored = sum(len(c) for p in store.preferences[2 * options.pairs :] for c in p.completions)
    useful = 6 * num_trunk * tokens + 6 * shape["hidden_size"] * shape["vocab_size"] * scored
    result = {
        "benchmark": "throughput",
        **vars(options),
        "pairs_per_second": round(pairs / timed, 2),
        "unique_tokens_per_second": round(tokens / timed),
        "useful_tflops": round(useful / timed / 1e12, 1),
        "pack_fill": round(sum(r.pack_fill for r in done) / len(done), 3),
        "first_step_seconds": round(seconds[0], 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else None,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    stop_workers()
    for name, value in result.items():
        print(f"{name:>26}  {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

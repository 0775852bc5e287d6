"""Times training steps of a randomly initialised model of a real shape on pairs of realistic lengths.

    python benchmarks/train.py --shape qwen2.5-1.5b --pairs 128 --pack-length 16384 [--mode none] [--weights ...]
    python benchmarks/train.py --shape llama3.1-8b --pairs 128 --lora 16 [--quantization nf4] [--repeats 3] [--limit-gib 16]
    python benchmarks/train.py --shape olmoe-1b-7b --pairs 128 --weights bfloat16_stochastic --state-dtype bfloat16

Lengths are log-normal (prompt mean 200, completions mean 250, sigma 0.7, total at most 2,048), the same for every
system and seed; `--data FILE` reads pairs as token ids instead, one JSON object per line with prompt_ids, chosen_ids and
rejected_ids. Prints a table and, as its last line, one JSON object. `--profile` adds where the time of a step goes.
In a mixture of experts, "useful" counts the experts that a token is sent to.
`--repeats` times the same steps several times in one process, for a median. `--limit-gib` limits the memory that torch may take,
as on a smaller card: a run that needs more fails.
The times are meaningful only on a GPU; without one, float32 weights are computed in float32.
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from float8 import compute_in_float8
from made_model import SHAPES, WARM_UP, Shape
from options import options_of
from random_weights import adapter_settings, random_model, require_quantization

from tandem.config.schema import Config
from tandem.data.store.token_store import TokenStore
from tandem.data.text.tokens import TokenizedPreference
from tandem.model.architecture import decoder_layers, head_of
from tandem.model.attention.pack_attention import IMPLEMENTATION
from tandem.model.distributed.layers import compile_layers, recompute, shard
from tandem.model.distributed.process_group import (
    Ranks,
    compute_deterministically,
    join_process_group,
    leave_process_group,
)
from tandem.model.head import auto_head_chunk
from tandem.model.lora.joined import join_adapters
from tandem.model.policy import Policy
from tandem.model.reference import NoReference, compute_reference
from tandem.packing.batches import Batches, GlobalBatch, load_ahead
from tandem.packing.layout import Arrangement, join, lay_out
from tandem.packing.packer import Packer, row_lengths
from tandem.planning.speed import ModelSize, Work, useful_flops
from tandem.training.optimizer import make_optimizer
from tandem.training.step import PendingStep, StepReport, train_step
from tandem.training.terms import StepContext

PROFILED = 2  # number of profiled steps
# The purpose of a kernel, by a part of its name; the first match counts.
KINDS = {
    "attention": ("flex_attention", "flash", "fmha", "sdpa"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "xmma"),
    "head, over logits": ("_target_logps", "_grad_logits"),
    "optimizer": ("adam", "multi_tensor", "lpnorm"),
    "fused layers": ("triton_",),
    "copies": ("memcpy", "memset", "copy", "cat"),
}


class PairsInMemory:
    """Preferences in memory, with the part of TokenStore's interface that packing and reports use."""

    def __init__(self, preferences: list[TokenizedPreference]):
        self.preferences = preferences
        self.num_pairs = np.array([len(p.pairs) for p in preferences], np.int64)
        self.num_scored_tokens = np.array([sum(map(len, p.completions)) for p in preferences], np.int64)

    def __getitem__(self, index: int) -> TokenizedPreference:
        return self.preferences[index]

    def __len__(self) -> int:
        return len(self.preferences)

    def as_store(self) -> TokenStore:
        return cast(TokenStore, self)


def made_preferences(o: argparse.Namespace, num: int, vocabulary: int) -> list[TokenizedPreference]:
    """`num` random preferences of `o.completions` completions each, with all pairs compared."""
    rng = np.random.default_rng(0)

    def length(mean: float) -> int:
        return max(4, int(rng.lognormal(np.log(mean) - 0.7**2 / 2, 0.7)))

    pairs = tuple((a, b) for a in range(o.completions) for b in range(a + 1, o.completions))
    made: list[TokenizedPreference] = []
    while len(made) < num:
        prompt, answers = length(o.prompt_mean), [length(o.completion_mean) for _ in range(o.completions)]
        if prompt + max(answers) <= o.longest:
            ids = [rng.integers(10, vocabulary, n).astype(np.int32) for n in (prompt, *answers)]
            made.append(TokenizedPreference(ids[0], tuple(ids[1:]), pairs, "made"))
    return made


def given_preferences(path: Path) -> list[TokenizedPreference]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        ids = [[np.array(row[f"{part}_ids"], np.int32) for part in ("prompt", "chosen", "rejected")] for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SystemExit(f"--data {path}: cannot be read as token ids, one JSON object per line: {error!r}") from None
    return [TokenizedPreference(prompt, (a, b), ((0, 1),), "given") for prompt, a, b in ids]


def as_single_pairs(preferences: list[TokenizedPreference]) -> list[TokenizedPreference]:
    """Every pair as a separate preference, with its prompt repeated."""
    return [
        TokenizedPreference(p.prompt, (p.completions[a], p.completions[b]), ((0, 1),), "made")
        for p in preferences
        for a, b in p.pairs
    ]


def made_policy(o: argparse.Namespace, device: torch.device) -> Policy:
    packed = o.mode == "batch"
    # Frozen weights are in bfloat16 where products are: on a CPU, float32 adapters need float32 weights.
    frozen = o.lora and device.type == "cuda"
    dtype = torch.bfloat16 if o.weights != "float32" or frozen else torch.float32
    model = random_model(
        o.shape,
        longest=max(8192, o.longest),
        dtype=dtype,
        attention=IMPLEMENTATION if packed else "sdpa",
        device=device,
        quantization=o.quantization,
    )
    with torch.no_grad():
        for parameter in model.parameters():  # published weights are bfloat16 values
            if parameter.is_floating_point():
                parameter.copy_(parameter.bfloat16())
    if o.float8:
        compute_in_float8(list(model.base_model.layers))
    if o.lora:
        add_adapters(model, o.lora, joined=o.quantization is None)
    kind = o.attention if o.attention != "auto" else "flex" if device.type == "cuda" else "trees"
    head = head_of(model, chunk=auto_head_chunk(SHAPES[o.shape].vocabulary, device))
    return Policy(model.train(), packed=packed, attention=kind, head=head)


def add_adapters(model: Any, dim: int, *, joined: bool) -> None:
    """Add adapters as `tandem train` does. Only layers that are not quantised compute adapters in the layer's own products."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(adapter_settings(dim), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()
    if joined:
        join_adapters(model)


def num_active_weights(model: Any, shape: Shape) -> float:
    """Return how many weights of the layers a token is multiplied with: of experts, only those that it is sent to."""

    def share(name: str) -> float:
        return shape.active_experts if ".experts." in f".{name}" else 1.0

    return sum(
        share(name) * (p.numel() if p.is_floating_point() else 2 * p.numel())  # nf4: two weights in a byte
        for layer in decoder_layers(model)
        for name, p in layer.named_parameters()
        if "lora_" not in name
    )


@dataclass
class Bench:
    """A model, its optimizer and its packer; everything is compiled before the clock starts."""

    options: argparse.Namespace
    ranks: Ranks
    policy: Policy
    packer: Packer
    store: PairsInMemory
    config: Config
    optimizer: Any
    num_trunk: float

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def batches(self) -> list[GlobalBatch]:
        return Batches(self.store.num_pairs, self.options.pairs).epoch(0)

    def compile(self) -> None:
        smallest = int(np.argmin(self.packer.sizes))
        for length in self.packer.lengths:
            if length < self.packer.sizes[smallest]:
                continue
            row = lay_out([smallest], [self.store[smallest]], length=length)
            rows = join([row] * self.packer.packs_per_micro_batch)
            with self.policy.computing():
                self.policy(self.policy.inputs(rows, self.device)).sum().backward()
        self.policy.zero_grad()

    def steps(self, num: int, repeats: int = 1) -> Iterator[tuple[float, StepReport]]:
        """Run the warm-up and `num` more steps, `repeats` times each.

        Yield when each was read, one step late as in the trainer, and its report.
        """
        precision = "bfloat16" if self.device.type == "cuda" else "float32"
        # Training reads reference values from a cache at no cost, so zeros replace them here.
        context = StepContext(NoReference(), self.config.dpo, self.ranks, precision)
        batches = self.batches()[: num + WARM_UP]
        batches += batches[WARM_UP:] * (repeats - 1)
        unread: list[PendingStep] = []
        for number, loaded in enumerate(load_ahead(batches, self.packer)):
            unread.append(train_step(self.policy, context, loaded.packs, loaded.batch, self.optimizer, 1.0))
            # A repeat starts when everything before it is done.
            while len(unread) > (number >= WARM_UP and (number - WARM_UP + 1) % num > 0):
                yield self._read(unread.pop(0))

    def _read(self, pending: PendingStep) -> tuple[float, StepReport]:
        report = pending.read(self.store.as_store())
        return time.perf_counter(), report

    def num_scored(self) -> int:
        """Number of completion tokens in the timed steps."""
        timed = self.batches()[WARM_UP : WARM_UP + self.options.steps]
        return int(sum(self.store.num_scored_tokens[batch.preferences].sum() for batch in timed))

    def reference_pairs_per_second(self) -> float:
        """Speed of the pass that computes the reference, over all pairs."""

        def seconds() -> float:
            started = time.perf_counter()
            compute_reference(self.policy, self.packer, self.ranks, path=None, progress=lambda done: None)
            return time.perf_counter() - started

        seconds()  # the first pass without gradients compiles the layers again
        return int(self.store.num_pairs.sum()) / seconds()


def prepared(o: argparse.Namespace) -> Bench:
    ranks = join_process_group()
    optimizer = {"state_dtype": o.state_dtype}
    config = Config.model_validate({"policy": {"weights": o.weights, "optimizer": optimizer}})
    num_pairs = o.completions * (o.completions - 1) // 2
    vocabulary = SHAPES[o.shape].vocabulary
    num = -(-o.pairs * (max(o.steps, PROFILED if o.profile else 1) + WARM_UP) // num_pairs)
    preferences = given_preferences(o.data) if o.data else made_preferences(o, num, vocabulary)
    if o.data and len(preferences) < num:
        raise SystemExit(
            f"--data {o.data}: {num} pairs are needed, including {WARM_UP} steps to warm up, but there are {len(preferences)}"
        )
    store = PairsInMemory(as_single_pairs(preferences) if o.single_pairs else preferences)
    shared = o.mode == "batch" and not o.no_sharing
    prompts = [len(p.prompt) * (1 if shared else len(p.completions)) for p in store.preferences]
    completions = [sum(map(len, p.completions)) for p in store.preferences]
    sizes = np.array(prompts) + np.array(completions)
    lengths = row_lengths(o.pack_length) if o.mode == "batch" else (o.longest,)
    if o.lengths:
        lengths = tuple(o.lengths)
    longest = max(len(p.prompt) + max(map(len, p.completions)) for p in store.preferences)
    if longest > lengths[-1]:
        raise SystemExit(f"the longest sequence, of {longest} tokens, does not fit in rows of {lengths[-1]}")
    arrangement: Arrangement = "shared" if shared else "repeated" if o.mode == "batch" else "separate"
    packer = Packer(store.as_store(), sizes, lengths, arrangement, o.packs, "first_fit_decreasing")
    tell("making the model")
    policy = made_policy(o, ranks.device)
    num_trunk = num_active_weights(policy.model, SHAPES[o.shape])
    if o.checkpointing != "none":
        recompute(policy, o.checkpointing)
    shard(
        policy,
        ranks,
        bfloat16=ranks.device.type == "cuda",
        even_alone=o.sharded,
        reshard_after_forward=not o.keep_gathered,
        reduce_once=o.reduce_once,
    )
    if ranks.device.type == "cuda" and not o.no_compile:
        compile_layers(policy)
    trained = (parameter for _, parameter in policy.trained())
    made = make_optimizer(trained, config.policy, seed=0)
    return Bench(o, ranks, policy, packer, store, config, made, num_trunk)


def where_time_goes(bench: Bench) -> dict[str, float]:
    """Shares of the time of PROFILED steps by kind of kernel, and the idle share."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    steps = bench.steps(PROFILED)
    for _ in range(WARM_UP):
        next(steps)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        num = len(list(steps))
    # Read the raw results: building the profiler's event list takes half a minute.
    profiler: Any = seen.profiler
    events = profiler.kineto_results.events()
    found = [one for one in events if one.device_type() == DeviceType.CUDA and not one.is_user_annotation()]
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[int]] = defaultdict(list)
    gaps: dict[str, list[int]] = defaultdict(list)
    busy, end, last = 0, 0, ""
    for event in sorted(found, key=lambda event: event.start_ns()):
        name, start, stop = event.name(), event.start_ns(), event.end_ns()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name.lower() for part in parts)), "other")
        kinds[kind] += stop - start
        names[name[:100]].append(stop - start)
        if end and start > end:
            gaps[f"{last[:50]} and {name[:50]}"].append(start - end)
        busy += max(0, stop - max(start, end))
        if stop > end:
            end, last = stop, name
    whole = end - min(event.start_ns() for event in found)
    for name, each in sorted(names.items(), key=lambda item: -sum(item[1]))[:40]:
        print(f"{sum(each) / whole:>8.2%}  {len(each):>6} times {name}")
    print(f"{len(found) / num:,.0f} kernels and copies a step. Nothing runs:")
    for between, each in sorted(gaps.items(), key=lambda item: -sum(item[1]))[:12]:
        print(f"{sum(each) / whole:>8.2%}  {len(each):>6} times between {between}")
    shares = {kind: round(spent / whole, 4) for kind, spent in sorted(kinds.items(), key=lambda item: -item[1])}
    return {**shares, "idle": round(1 - busy / whole, 4), "seconds": round(whole / num / 1e9, 3)}


def parsed() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--data", type=Path, help="pairs as token ids, one JSON object per line")
    parser.add_argument("--pairs", type=int, default=64, help="pairs per global batch")
    parser.add_argument("--completions", type=int, default=2, help="completions per preference; all pairs are compared")
    parser.add_argument("--single-pairs", action="store_true", help="every pair as a separate preference")
    parser.add_argument("--prompt-mean", type=float, default=200)
    parser.add_argument("--completion-mean", type=float, default=250)
    parser.add_argument("--longest", type=int, default=2048, help="most tokens of a prompt and completion together")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after two to warm up")
    parser.add_argument("--repeats", type=int, default=1, help="how often the timed steps are timed, for a median")
    parser.add_argument("--pack-length", type=int, help="8192 if not given")
    parser.add_argument("--packs", type=int, default=1, help="rows that go through the model together")
    parser.add_argument("--lengths", type=int, nargs="*", help="row lengths; if not given, as training chooses them")
    parser.add_argument("--mode", choices=["batch", "none"], default="batch")
    parser.add_argument("--no-sharing", action="store_true", help="repeat the prompt for every completion")
    parser.add_argument("--attention", choices=["auto", "varlen", "sdpa"], default="auto")
    parser.add_argument("--weights", choices=["float32", "bfloat16_stochastic", "bfloat16_nearest"], default="float32")
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16", "int8"], default="float32")
    parser.add_argument("--float8", action="store_true", help="an experiment: matrix products of the layers in float8")
    parser.add_argument("--lora", type=int, default=0, help="adapters of this rank on all linear layers")
    parser.add_argument("--quantization", choices=["nf4"], help="of the frozen weights, with --lora")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--sharded", action="store_true", help="shard the weights with FSDP, even on one rank")
    parser.add_argument("--keep-gathered", action="store_true", help="policy.parallel.reshard_after_forward=false")
    parser.add_argument("--reduce-once", action="store_true", help="policy.parallel.reduce_once_per_step=true")
    parser.add_argument("--deterministic", action="store_true", help="as run.deterministic=true")
    parser.add_argument("--reference", action="store_true", help="time the reference pass too")
    parser.add_argument("--limit-gib", type=float, help="the most memory of the GPU that torch may take")
    parser.add_argument("--profile", action="store_true", help="show where the time of two more steps goes")
    o = parser.parse_args()
    if (
        o.steps < 1
        or o.repeats < 1
        or o.pairs < 1
        or o.completions < 2
        or (o.pack_length is not None and o.pack_length < 1)
    ):
        parser.error("--steps, --repeats, --pairs and --pack-length are at least 1, --completions at least 2")
    if o.lora and o.weights != "float32":
        parser.error("--lora: with adapters the model's own weights are frozen; leave out --weights")
    if o.quantization and not o.lora:
        parser.error("--quantization: quantised weights are frozen; give --lora too")
    if o.limit_gib is not None and not torch.cuda.is_available():
        parser.error("--limit-gib is of a GPU, and there is none")
    if o.limit_gib is not None and o.limit_gib <= 0:
        parser.error("--limit-gib is more than 0")
    require_quantization(o.quantization, o.shape)
    if o.profile and not torch.cuda.is_available():
        parser.error("--profile is of a GPU, and there is none")
    if o.mode == "none" and (o.pack_length or o.lengths or o.no_sharing or o.attention != "auto"):
        parser.error(
            "--mode none: every sequence is a row of --longest tokens; --pack-length, --lengths, --no-sharing and "
            "--attention apply only to packs"
        )
    if o.lengths and o.pack_length:
        parser.error("--lengths lists all row lengths: leave out --pack-length")
    if o.attention == "varlen" and not o.no_sharing:
        parser.error(
            "--attention varlen treats every sequence separately and cannot share prompts: give --no-sharing too"
        )
    made = ("completions", "prompt_mean", "completion_mean", *(["longest"] if o.mode == "batch" else []))
    if o.data and any(getattr(o, name) != parser.get_default(name) for name in made):
        parser.error(
            "--data: leave out --completions, --prompt-mean, --completion-mean and --longest, which apply only to random pairs"
        )
    o.lengths = sorted(set(o.lengths or [])) or None
    o.pack_length = max(o.lengths or [o.pack_length or 8192]) if o.mode == "batch" else o.longest
    return o


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def limit_memory(gib: float) -> None:
    """Make torch fail where a card of this size would run out of memory. CUDA's own memory, about half a GiB, is not counted."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / torch.cuda.mem_get_info()[1]))


def main() -> None:
    options = parsed()
    began = time.perf_counter()
    if options.limit_gib is not None:
        limit_memory(options.limit_gib)
    if options.deterministic:
        compute_deterministically()
    bench = prepared(options)
    cuda = bench.device.type == "cuda"
    tell(f"compiling for rows of {', '.join(map(str, bench.packer.lengths))} tokens" if cuda else "trying every length")
    bench.compile()
    compiled = time.perf_counter() - began
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    tell(
        f"{WARM_UP} steps to warm up, {options.steps} to time" + (f", {options.repeats} times" * (options.repeats > 1))
    )
    ends, reports = zip(*bench.steps(options.steps, options.repeats), strict=True)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    reserved = torch.cuda.max_memory_reserved() / 2**30 if cuda else None
    marks = ends[WARM_UP - 1 :: options.steps]
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    timed, done = statistics.median(seconds), reports[WARM_UP : WARM_UP + options.steps]
    pairs, tokens = sum(r.num_pairs for r in done), sum(r.num_tokens for r in done)
    shape = SHAPES[options.shape]
    scored = bench.num_scored()
    size = ModelSize(0, bench.num_trunk, shape.hidden, shape.vocabulary)
    useful = useful_flops(size, Work(tokens=tokens, scored=scored))
    result = {
        "benchmark": "train",
        **{name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "pairs_per_second": round(pairs / timed, 2),
        "each": [round(pairs / one, 2) for one in seconds],
        "unique_tokens_per_second": round(tokens / timed),
        "useful_tflops": round(useful / timed / 1e12, 1),
        "pack_fill": round(sum(r.pack_fill for r in done) / len(done), 3),
        "built_and_compiled_seconds": round(compiled, 1),
        "peak_gib": peak and round(peak, 1),
        "reserved_gib": reserved and round(reserved, 1),
        "reference_pairs_per_second": round(bench.reference_pairs_per_second(), 1) if options.reference else None,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if options.profile and cuda:
        result["where_time_goes"] = where_time_goes(bench)
    leave_process_group()
    for name, value in result.items():
        print(f"{name:>26}  {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

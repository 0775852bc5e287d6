"""Times a minimal loop of packed, prompt-shared DPO, written for speed alone, as a baseline for train.py.

    python benchmarks/bare_loop.py --shape qwen2.5-1.5b --pack-length 8192 --pairs 128 [--micro-updates]

Plain bfloat16 weights and AdamW states, FlexAttention through transformers' AttentionInterface, layers compiled one by one,
the head in chunks over scored positions only, a reference of zero. No clipping, no metrics, no loader, no checkpoints: all
packs and attention masks are built before the clock starts. The pairs are those of train.py, including its `--data FILE`.
The last line is one JSON object. Without a GPU, attention uses a dense mask and nothing is compiled.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from made_model import SHAPES, WARM_UP, config_of
from options import options_of
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from train import given_preferences, made_preferences, tell

from tandem.data.text.tokens import TokenizedPreference
from tandem.planning.speed import ModelSize, Work, useful_flops

BETA, RATE = 0.1, 1e-6


class Pack(NamedTuple):
    """A row of prompts, each followed by its two completions, with the positions to score."""

    ids: torch.Tensor
    positions: torch.Tensor  # those of a completion continue from its prompt
    owner: torch.Tensor  # the preference that a token belongs to; -1: filler
    part: torch.Tensor  # 0: prompt, 1: chosen, 2: rejected
    scored: torch.Tensor  # positions whose next token is scored
    targets: torch.Tensor
    answer: torch.Tensor  # 2 * pair for chosen, 2 * pair + 1 for rejected
    num_pairs: int


def laid_out(preferences: list[TokenizedPreference], length: int, device: torch.device) -> Pack:
    columns: dict[str, list[np.ndarray]] = {name: [] for name in Pack._fields[:-1]}
    at = 0
    for number, one in enumerate(preferences):
        prompt, end = len(one.prompt), at + len(one.prompt) - 1
        for part, ids in enumerate((one.prompt, *one.completions)):
            columns["ids"].append(ids)
            columns["positions"].append(np.arange(len(ids)) + (prompt if part else 0))
            columns["owner"].append(np.full(len(ids), number))
            columns["part"].append(np.full(len(ids), part))
            if part:  # the prompt's last position predicts its first token
                columns["scored"].append(np.array([end, *range(at, at + len(ids) - 1)]))
                columns["targets"].append(ids)
                columns["answer"].append(np.full(len(ids), 2 * number + part - 1))
            at += len(ids)
    for name in ("ids", "positions", "owner", "part"):
        columns[name].append(np.full(length - at, -1 if name == "owner" else 0))
    joined = (torch.from_numpy(np.concatenate(column).astype(np.int64)).to(device) for column in columns.values())
    return Pack(*joined, num_pairs=len(preferences))


def packed(preferences: list[TokenizedPreference], length: int) -> list[list[TokenizedPreference]]:
    """Rows packed by first fit, longest first."""
    rows: list[tuple[int, list[TokenizedPreference]]] = []
    for size, one in sorted(((size_of(one), one) for one in preferences), key=lambda pair: -pair[0]):
        at = next((n for n, (used, _) in enumerate(rows) if used + size <= length), None)
        if at is None:
            rows.append((size, [one]))
        else:
            rows[at] = (rows[at][0] + size, [*rows[at][1], one])
    return [row for _, row in rows]


def size_of(one: TokenizedPreference) -> int:
    return len(one.prompt) + sum(map(len, one.completions))


class Masks:
    """Attention masks of packs. One mask function reads two buffers for all packs, so layers are compiled once."""

    def __init__(self, length: int, device: torch.device):
        self.owner, self.part = owner, part = torch.zeros(2, length, dtype=torch.int64, device=device)

        def seen(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (query >= key) & (owner[query] == owner[key]) & ((part[key] == 0) | (part[key] == part[query]))

        self.seen, self.made = seen, create_block_mask if device.type == "cuda" else create_mask

    def use(self, pack: Pack) -> None:
        """Copy a pack into the buffers: its mask is valid until another pack is used."""
        self.owner.copy_(pack.owner)
        self.part.copy_(pack.part)

    def of(self, pack: Pack) -> Any:
        self.use(pack)
        return self.made(self.seen, None, None, len(pack.ids), len(pack.ids), device=str(pack.ids.device))


def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any) -> Any:
    found: Any
    if query.device.type == "cuda":
        found = flex_attention(query, key, value, block_mask=mask, enable_gqa=True, scale=more["scaling"])
    else:
        found = F.scaled_dot_product_attention(query, key, value, mask, scale=more["scaling"], enable_gqa=True)
    return found.transpose(1, 2), None


def chunk_logps(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -F.cross_entropy((hidden @ weight.T).float(), targets, reduction="none")


def loss_of(model: Any, pack: Pack, mask: Any, score: Any, chunk: int) -> torch.Tensor:
    """The DPO loss, summed over the pairs of the pack."""
    states = model.model(pack.ids[None], position_ids=pack.positions[None], attention_mask=mask, use_cache=False)
    hidden = states.last_hidden_state[0, pack.scored]
    weight = model.lm_head.weight
    parts = [
        checkpoint(score, hidden[at : at + chunk], weight, pack.targets[at : at + chunk], use_reentrant=False)
        for at in range(0, len(hidden), chunk)
    ]
    logps = torch.zeros(2 * pack.num_pairs, device=hidden.device).index_add(0, pack.answer, torch.cat(parts))
    return -F.logsigmoid(BETA * (logps[0::2] - logps[1::2])).sum()


def parsed() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--pairs", type=int, default=128, help="pairs per update")
    parser.add_argument("--pack-length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=4, help="timed steps, after two to warm up")
    parser.add_argument("--head-chunk", type=int, default=4096, help="scored tokens at a time")
    parser.add_argument("--micro-updates", action="store_true", help="update after every pack instead of every batch")
    o = parser.parse_args()
    if min(o.pairs, o.steps, o.head_chunk) < 1:
        parser.error("--pairs, --steps and --head-chunk are at least 1")
    o.completions, o.prompt_mean, o.completion_mean, o.longest = 2, 200, 250, 2048  # as in train.py
    return o


def main() -> None:
    o = parsed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    num, shape = o.pairs * (o.steps + WARM_UP), SHAPES[o.shape]
    pairs = given_preferences(o.data)[:num] if o.data else made_preferences(o, num, shape.vocabulary)
    if len(pairs) < num:
        raise SystemExit(
            f"{WARM_UP} steps to warm up and {o.steps} to time need {num} pairs, but there are {len(pairs)}"
        )
    if max(map(size_of, pairs)) > o.pack_length:
        raise SystemExit(f"rows of {o.pack_length} tokens do not hold a pair of {max(map(size_of, pairs))}")
    transformers.AttentionInterface.register("bare", attention)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config_of(o.shape), dtype=torch.bfloat16 if cuda else torch.float32, attn_implementation="bare"
        )
    model.train()
    num_trunk = sum(p.numel() for layer in model.model.layers for p in layer.parameters())
    score = torch.compile(chunk_logps, dynamic=True) if cuda else chunk_logps
    if cuda:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    masks = Masks(o.pack_length, device)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    batches = [packed(pairs[at : at + o.pairs], o.pack_length) for at in range(0, num, o.pairs)]
    packs = [[laid_out(row, o.pack_length, device) for row in batch] for batch in batches]
    rows = [[(pack, masks.of(pack)) for pack in batch] for batch in packs]
    tell(f"{WARM_UP} steps to warm up{', in which layers are compiled' if cuda else ''}, {o.steps} to time")
    started, losses = 0.0, []
    for number, batch in enumerate(rows):
        if number == WARM_UP:
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
        total = torch.zeros((), device=device)
        for at, (pack, mask) in enumerate(batch):
            masks.use(pack)
            loss = loss_of(model, pack, mask, score, o.head_chunk)
            (loss / o.pairs).backward()
            total += loss.detach()
            if o.micro_updates or at + 1 == len(batch):
                optimizer.step()
                optimizer.zero_grad()
        losses.append(total)
        if not cuda:  # on a GPU, reporting a finished step would have to wait for it
            tell(f"step {number + 1} of {len(rows)}")
    if cuda:
        torch.cuda.synchronize()
    seconds, timed = time.perf_counter() - started, pairs[WARM_UP * o.pairs :]
    tokens = sum(map(size_of, timed))
    scored = sum(len(ids) for one in timed for ids in one.completions)
    useful = useful_flops(ModelSize(0, num_trunk, shape.hidden, shape.vocabulary), Work(tokens=tokens, scored=scored))
    result = {
        "benchmark": "bare_loop",
        **{name: str(value) if isinstance(value, Path) else value for name, value in vars(o).items()},
        "pairs_per_second": round(len(timed) / seconds, 2),
        "unique_tokens_per_second": round(tokens / seconds),
        "useful_tflops": round(useful / seconds / 1e12, 1),
        "pack_fill": round(tokens / sum(len(pack.ids) for batch in packs[WARM_UP:] for pack in batch), 3),
        "losses": [round(one.item() / o.pairs, 6) for one in losses],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

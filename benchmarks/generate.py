"""Compares the ways in which tandem generates with plain transformers batches, in generated tokens per second.

    python benchmarks/generate.py [--model FOLDER] [--prompts FILE] [--num-prompts 64] [--max-new-tokens 64] [--batch-size 16]

plain: `model.generate` with the tokenizer's own left padding, in batches in the order of the file. padded: tandem's batches,
sorted by length. continuous: transformers' continuous batching through tandem. one: tandem, a prompt at a time. All are greedy.
The first prompts warm up and are not timed. On a CPU, exits with 1 if the tokens differ. The last line is one JSON object.
"""

import json
import time
from typing import Any

import torch
from options import options_of

from tandem.generation.generate import Named, opened
from tandem.generation.prompts import prompts_from
from tandem.generation.records import EngineSettings, Prompt, make_sampling
from tandem.generation.target import find_target

WAYS = {
    "one": EngineSettings(batching="padded", batch_size=1),
    "padded": EngineSettings(batching="padded"),
    "continuous": EngineSettings(batching="continuous"),
}
Ids = dict[int, list[int]]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--prompts", default="embedded")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument(
        "--batch-size", type=int, default=16, help="of plain and padded; 0: padded chooses it, plain takes 16"
    )
    parser.add_argument("--ways", nargs="*", default=["plain", "one", "padded"], choices=["plain", *WAYS])
    options = parser.parse_args()
    prompts = prompts_from(options.prompts)[0][: options.num_prompts]
    rates: dict[str, float] = {}
    found: dict[str, Ids] = {}
    for way in options.ways:
        start = plain if way == "plain" else tandem
        found[way], seconds = start(way, options, prompts)
        num_tokens = sum(map(len, found[way].values()))
        rates[way] = num_tokens / seconds
        print(f"{way:<10} {rates[way]:8.1f} tokens/s  {num_tokens:,} tokens in {seconds:.2f} s")
    first = next(iter(found.values()))
    same = {way: sum(ids[index] == first[index] for index in ids) / len(ids) for way, ids in found.items()}
    print("prompts with the tokens of the first way:", ", ".join(f"{way} {share:.0%}" for way, share in same.items()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(json.dumps({"model": options.model, "device": device, "tokens_per_second": rates, "same": same}))
    raise SystemExit(device == "cpu" and any(share < 1 for share in same.values()))


def tandem(way: str, options: Any, prompts: list[Prompt]) -> tuple[Ids, float]:
    sampling = make_sampling(max_new_tokens=options.max_new_tokens)
    given = WAYS[way]
    if way == "padded" and options.batch_size:
        given = EngineSettings(batching="padded", batch_size=options.batch_size)
    model = Named("MODEL", options.model, find_target("MODEL", options.model))
    with opened(model, sampling, given) as ready:
        engine = ready.start()
        requests = ready.requests(prompts, prompts, sampling)
        list(engine.answers(requests[:2]))
        start = now()
        answers = list(engine.answers(requests))
        seconds = now() - start
        engine.close()
    return {answer.request.prompt.index: list(answer.ids or ()) for answer in answers}, seconds


def plain(way: str, options: Any, prompts: list[Prompt]) -> tuple[Ids, float]:
    from tandem.generation.target import open_target
    from tandem.generation.transformers_engine import load_model
    from tandem.training.start.machine import this_device

    found = open_target("MODEL", find_target("MODEL", options.model))
    model, tokenizer = load_model(found, this_device()), found.template.tokenizer
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    chats = [[{"role": "user", "content": p.prompt}] if isinstance(p.prompt, str) else _dicts(p) for p in prompts]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]

    def answers(some: list[str]) -> list[list[int]]:
        batch = tokenizer(some, return_tensors="pt", padding=True, add_special_tokens=False).to(model.device)
        new = {"max_new_tokens": options.max_new_tokens, "do_sample": False, "eos_token_id": tokenizer.eos_token_id}
        ids = model.generate(
            batch["input_ids"], attention_mask=batch["attention_mask"], pad_token_id=tokenizer.pad_token_id, **new
        )
        return ids[:, batch["input_ids"].shape[1] :].tolist()

    size = options.batch_size or 16
    answers(texts[:2])
    start = now()
    rows = [row for first in range(0, len(texts), size) for row in answers(texts[first : first + size])]
    seconds = now() - start
    end = tokenizer.eos_token_id
    return {
        p.index: row[: row.index(end) + 1] if end in row else row for p, row in zip(prompts, rows, strict=True)
    }, seconds


def _dicts(prompt: Prompt) -> list[dict[str, Any]]:
    from tandem.generation.records import as_dicts

    assert not isinstance(prompt.prompt, str)
    return as_dicts(prompt.prompt)


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()

"""Times the steps of TRL's DPO trainer on pairs given as token ids. Run by versus_trl.py, with a Python that has TRL.

    python benchmarks/trl_steps.py --shape qwen2.5-1.5b --data pairs.jsonl --micro-batch 8 --accumulate 16 [--stock] ...

Tuned with the fastest known settings: the reference computed beforehand, lengths grouped, no activation checkpointing, Liger's
layers and, since attention is causal and rows are padded on the right, a mask of ones, with which SDPA uses its flash kernel.
With --lora, adapters are those that TRL's users get: peft on all linear layers except the head, float32 weights under bfloat16
autocast (peft's autocast_adapter_dtype); over weights quantised to nf4, TRL itself casts them to bfloat16. The reference is the
model with its adapters disabled.
Every update has the pairs of one batch of the file, as in train.py, so the timed pairs are the same. The last line is one
JSON object.
"""

import argparse
import copy
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl_python
from made_model import SHAPES, WARM_UP
from options import options_of
from random_weights import adapter_settings, random_model, require_quantization


def parsed() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--micro-batch", type=int, default=8, help="pairs in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after two to warm up")
    parser.add_argument("--repeats", type=int, default=1, help="how often the timed steps are timed, for a median")
    parser.add_argument(
        "--lora", type=int, default=0, help="adapters of this rank on all linear layers except the head"
    )
    parser.add_argument("--quantization", choices=["nf4"], help="of the frozen weights, with --lora")
    parser.add_argument(
        "--stock", action="store_true", help="TRL's own defaults: live reference, checkpointing, padded mask"
    )
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--compile", action="store_true", help="use torch_compile of the trainer")
    o = parser.parse_args()
    if min(o.steps, o.repeats, o.micro_batch, o.accumulate) < 1:
        parser.error("--steps, --repeats, --micro-batch and --accumulate are at least 1")
    if o.quantization and not o.lora:
        parser.error("--quantization: quantised weights are frozen; give --lora too")
    return o


def padded_length(row: dict[str, list[int]]) -> int:
    """Length of both sequences of a pair when padded in a micro-batch without other pairs."""
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def tokenizer_for_padding() -> Any:
    from tokenizers import Tokenizer, models

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    bare = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare, **names)


def main() -> None:
    o = parsed()
    more = [name for name, used in {"liger_kernel": o.liger, "peft": o.lora}.items() if used]
    trl_python.require("datasets", "trl", *more)
    require_quantization(o.quantization, o.shape)
    import datasets  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]
    from trl.trainer.dpo_trainer import DataCollatorForPreference  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    cuda = torch.cuda.is_available()
    rows = [json.loads(line) for line in o.data.read_text().splitlines()]
    pairs = o.micro_batch * o.accumulate
    batches = [rows[at : at + pairs] for at in range(0, pairs * (o.steps + WARM_UP), pairs)]
    if len(rows) < pairs * len(batches):
        raise SystemExit(f"{o.data}: {len(batches)} steps need {pairs * len(batches)} pairs, but there are {len(rows)}")
    if not o.stock:  # lengths grouped; TRL's sampler would also change which pairs are in an update
        batches = [sorted(batch, key=padded_length, reverse=True) for batch in batches]
    model = random_model(
        o.shape,
        longest=8192,
        dtype=getattr(torch, o.weights),
        attention="sdpa",
        device=torch.device("cuda" if cuda else "cpu"),
        quantization=o.quantization,
    )
    reference = copy.deepcopy(model).requires_grad_(False) if o.stock and not o.lora else None
    distinct = [row for batch in batches for row in batch]
    order = [*range(len(distinct)), *list(range(WARM_UP * pairs, len(distinct))) * (o.repeats - 1)]

    class Collator(DataCollatorForPreference):
        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            batch = super().torch_call(examples)
            if not o.stock:
                batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
            return batch

    class Trainer(trl.DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # token ids already

        def _precompute_ref_logps(self, dataset: Any, *given: Any, **named: Any) -> Any:
            """Every pair once, although its step is timed several times."""
            return super()._precompute_ref_logps(dataset.select(range(len(distinct))), *given, **named).select(order)

    marks: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            timed = state.global_step - WARM_UP
            if timed < 0 or timed % o.steps:  # no synchronisation between the timed steps
                return
            if cuda:
                torch.cuda.synchronize()
                if not marks:
                    torch.cuda.reset_peak_memory_stats()
            marks.append(time.perf_counter())

    settings = trl.DPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=WARM_UP + o.steps * o.repeats,
        per_device_train_batch_size=o.micro_batch,
        gradient_accumulation_steps=o.accumulate,
        learning_rate=1e-6,
        bf16=cuda,
        use_cpu=not cuda,
        gradient_checkpointing=o.stock,
        use_liger_kernel=o.liger,
        torch_compile=o.compile,
        precompute_ref_log_probs=not o.stock,
        precompute_ref_batch_size=o.micro_batch,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        max_length=2048,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = tokenizer_for_padding()
    trainer = Trainer(
        model=model,
        ref_model=reference,
        args=settings,
        train_dataset=datasets.Dataset.from_list(distinct).select(order),
        processing_class=tokenizer,
        data_collator=Collator(pad_token_id=0, max_length=2048),
        callbacks=[Clock()],
        peft_config=adapter_settings(o.lora) if o.lora else None,
    )
    trainer.train()
    each = [after - before for before, after in itertools.pairwise(marks)]
    seconds = statistics.median(each)
    timed = [row for batch in batches[WARM_UP:] for row in batch]
    tokens = sum(len(row[f"{part}_ids"]) for row in timed for part in ("prompt", "chosen", "rejected"))
    micro = [timed[at : at + o.micro_batch] for at in range(0, len(timed), o.micro_batch)]
    computed = sum(2 * len(rows) * max(map(padded_length, rows)) for rows in micro)
    result = {
        "benchmark": "trl_steps",
        **{name: str(value) if isinstance(value, Path) else value for name, value in vars(o).items()},
        "pairs_per_second": round(len(timed) / seconds, 2),
        "each": [round(len(timed) / one, 2) for one in each],
        "unique_tokens_per_second": round(tokens / seconds),
        "computed_per_unique_token": round(computed / tokens, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
        "trl": trl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

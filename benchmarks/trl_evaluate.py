"""Times TRL's evaluation loop on pairs given as token ids. Run by evaluate.py, with a Python that has TRL.

    python benchmarks/trl_evaluate.py --model FOLDER --reference FOLDER --data ids.jsonl [--stock] [--repeats N]

Tuned: lengths grouped, the reference computed beforehand, and, since attention is causal and rows are padded on the right, a
mask of ones, with which SDPA uses its flash kernel. --stock: TRL's own defaults, that is pairs in the order of the file, their
padding masked, the reference computed in the loop. The last line is one JSON object.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl_python
from options import options_of
from trl_steps import padded_length, tokenizer_for_padding


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--reference", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--micro-batch", type=int, default=16, help="pairs in a batch")
    parser.add_argument(
        "--stock", action="store_true", help="TRL's own defaults: live reference, order of the file, padded mask"
    )
    parser.add_argument("--repeats", type=int, default=1, help="timed evaluations, of which the median counts")
    o = parser.parse_args()
    trl_python.require("datasets", "trl")
    import datasets  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]
    from trl.trainer.dpo_trainer import DataCollatorForPreference  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    cuda = torch.cuda.is_available()
    rows = [json.loads(line) for line in o.data.read_text().splitlines()]
    longest = max(map(padded_length, rows))
    if not o.stock:
        rows.sort(key=padded_length, reverse=True)

    def load(folder: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16 if cuda else torch.float32,
            attn_implementation="sdpa",
            device_map="cuda" if cuda else "cpu",
        )

    class Collator(DataCollatorForPreference):
        def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
            batch = super().torch_call(examples)
            if not o.stock:
                batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
            return batch

    class Trainer(trl.DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # token ids already

    settings = trl.DPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=o.micro_batch,
        bf16=cuda,
        use_cpu=not cuda,
        precompute_ref_log_probs=not o.stock,
        precompute_ref_batch_size=o.micro_batch,
        gradient_checkpointing=False,
        remove_unused_columns=False,
        max_length=longest,
        report_to="none",
        disable_tqdm=True,
    )
    pairs = datasets.Dataset.from_list(rows)
    trainer = Trainer(
        model=load(o.model),
        ref_model=load(o.reference),
        args=settings,
        train_dataset=pairs.select([0]),
        eval_dataset=pairs,
        processing_class=tokenizer_for_padding(),
        data_collator=Collator(pad_token_id=0, max_length=longest),
    )
    metrics = trainer.evaluate()  # warms up
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(o.repeats):
        started = time.perf_counter()
        trainer.evaluate()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    result = {
        "pairs_per_second": round(len(rows) / statistics.median(seconds), 2),
        "seconds": [round(one, 3) for one in seconds],
        "accuracy": metrics.get("eval_rewards/accuracies"),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
        "trl": trl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

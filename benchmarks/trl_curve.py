"""Trains and validates with TRL's DPO trainer on pairs given as token ids. Run by curve.py, with a Python that has TRL.

    python benchmarks/trl_curve.py --began SECONDS --model FOLDER --train FILE --held-out FILE --settings JSON ...

The last line is one JSON object.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl_python
from options import options_of


def parsed() -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--began", type=float, required=True, help="when the command started, as time.time()")
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", type=Path, required=True, help="pairs as token ids, one JSON object per line")
    parser.add_argument("--held-out", type=Path, required=True, help="the same, to validate on")
    parser.add_argument("--settings", type=json.loads, required=True, help="as curve.py writes them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--micro-batch", type=int, default=16, help="pairs")
    return parser.parse_args()


def main() -> None:
    o = parsed()
    trl_python.require("datasets", "trl")
    import datasets  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]
    from trl.trainer.dpo_trainer import DataCollatorForPreference  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    s, cuda = o.settings, torch.cuda.is_available()
    policy = transformers.AutoModelForCausalLM.from_pretrained(o.model, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = transformers.AutoTokenizer.from_pretrained(o.model)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def read(place: Path) -> Any:
        return datasets.Dataset.from_list([json.loads(line) for line in place.read_text().splitlines()])

    class Trainer(trl.DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset  # token ids already

    points: list[dict[str, float]] = []
    first: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not first:
                first.append(time.time())

        def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            now, metrics = time.time(), more["metrics"]
            seconds = {"command": now - o.began, "first_step": now - first[0] if first else 0.0}
            found = {"accuracy": metrics["eval_rewards/accuracies"], "loss": metrics["eval_loss"]}
            points.append({"step": state.global_step, **seconds, **found})

    settings = trl.DPOConfig(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=s["epochs"],
        max_steps=s["steps"],
        per_device_train_batch_size=o.micro_batch,
        per_device_eval_batch_size=o.micro_batch,
        gradient_accumulation_steps=s["pairs"] // o.micro_batch,
        learning_rate=s["rate"],
        beta=s["beta"],
        lr_scheduler_type="constant",
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.98,
        adam_epsilon=1e-5,
        max_grad_norm=1.0,
        bf16=cuda and s["bfloat16"],
        use_cpu=not cuda,
        gradient_checkpointing=False,
        precompute_ref_log_probs=True,
        max_length=s["longest"],
        eval_strategy="steps",
        eval_steps=s["period"],
        eval_on_start=True,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=o.seed,
    )
    adapters = None
    if dim := s["lora"]:
        import peft

        adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=dim, lora_alpha=2 * dim, target_modules="all-linear")
    trainer = Trainer(
        model=policy,
        peft_config=adapters,
        args=settings,
        train_dataset=read(o.train),
        eval_dataset=read(o.held_out),
        processing_class=tokenizer,
        callbacks=[Clock()],
        data_collator=DataCollatorForPreference(pad_token_id=pad, max_length=s["longest"]),
    )
    trainer.train()
    trainer.evaluate()
    print(json.dumps({"points": points, "trl": trl.__version__}))


if __name__ == "__main__":
    main()

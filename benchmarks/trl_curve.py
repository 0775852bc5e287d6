"""Trains with TRL's DPO trainer on pairs given as token ids, and validates as curve.py asks. Run by curve.py, with a python
that has TRL.

    python benchmarks/trl_curve.py BEGAN MODEL TRAIN.jsonl HELD_OUT.jsonl SEED MICRO_BATCH SETTINGS

BEGAN is when the command was given, in seconds since the epoch; SETTINGS is a JSON object. Its last line is one JSON object.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers


def main(began: float, model: str, train: Path, held_out: Path, seed: int, micro: int, s: dict[str, Any]) -> None:
    import datasets  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]
    from trl.trainer.dpo_trainer import DataCollatorForPreference  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    cuda = torch.cuda.is_available()
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
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
            seconds = {"command": now - began, "first_step": now - first[0] if first else 0.0}
            found = {"accuracy": metrics["eval_rewards/accuracies"], "loss": metrics["eval_loss"]}
            points.append({"step": state.global_step, **seconds, **found})

    settings = trl.DPOConfig(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=s["epochs"],
        max_steps=s["steps"],
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=s["pairs"] // micro,
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
        seed=seed,
    )
    trainer = Trainer(
        model=policy,
        args=settings,
        train_dataset=read(train),
        eval_dataset=read(held_out),
        processing_class=tokenizer,
        callbacks=[Clock()],
        data_collator=DataCollatorForPreference(pad_token_id=pad, max_length=s["longest"]),
    )
    trainer.train()
    trainer.evaluate()
    print(json.dumps({"points": points, "trl": trl.__version__}))


if __name__ == "__main__":
    _, began, model, train, held_out, seed, micro, settings = sys.argv
    main(float(began), model, Path(train), Path(held_out), int(seed), int(micro), json.loads(settings))

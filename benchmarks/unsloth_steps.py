"""Times the steps of TRL's DPO trainer with Unsloth's models and adapters, on the pairs of versus_trl.py.

    python benchmarks/unsloth_steps.py --shape llama3.1-8b --lora 16 [--quantization nf4] [--data pairs.jsonl]

Needs a GPU and a Python that has Unsloth, which requires TRL 1.15 or earlier. Without --data, the pairs are those that
versus_trl.py makes for as many --steps. The model, with random weights, is made in --folder. Adapters are those of
trl_steps.py: rank N, alpha 2N, on all linear layers except the head. Unsloth's own activation checkpointing is off, as it is on
the other sides, unless --checkpointing is given. The reference is computed beforehand and not timed.
The pairs of an update are sorted by length. Without --micro-batch, the largest power of two that fits is used: each size runs in
its own process, from --largest downwards. The last line is one JSON object.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from made_model import SHAPES, WARM_UP, make_model
from options import options_of

LONGEST = 2048
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = options_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--data", type=Path, help="pairs as token ids, one JSON object per line")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/tandem-unsloth"))
    parser.add_argument("--tokenizer", help="a folder with a tokenizer; if not given, one of three tokens is made")
    parser.add_argument("--lora", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--quantization", choices=["nf4"], help="of the frozen weights")
    parser.add_argument("--checkpointing", action="store_true", help='use_gradient_checkpointing="unsloth"')
    parser.add_argument("--pairs", type=int, default=128, help="pairs in an update")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after two to warm up")
    parser.add_argument("--repeats", type=int, default=1, help="how often the timed steps are timed, for a median")
    parser.add_argument("--micro-batch", type=int, help="pairs in a micro-batch; if not given, the largest that fits")
    parser.add_argument("--largest", type=int, default=16, help="the first micro-batch that is tried")
    o = parser.parse_args(arguments)
    if min(o.lora, o.pairs, o.steps, o.repeats, o.largest, 1 if o.micro_batch is None else o.micro_batch) < 1:
        parser.error("--lora, --pairs, --steps, --repeats, --micro-batch and --largest are at least 1")
    if o.micro_batch and o.pairs % o.micro_batch:
        parser.error(f"--pairs {o.pairs} is not a multiple of the micro-batch of {o.micro_batch} pairs")
    return o


def loading_arguments(o: argparse.Namespace, model: Path, dtype: Any) -> dict[str, Any]:
    """Arguments of FastLanguageModel.from_pretrained."""
    return {
        "model_name": str(model),
        "max_seq_length": LONGEST,
        "dtype": dtype,
        "load_in_4bit": o.quantization == "nf4",
        "load_in_16bit": o.quantization is None,
        "use_gradient_checkpointing": "unsloth" if o.checkpointing else False,
    }


def adapter_arguments(o: argparse.Namespace) -> dict[str, Any]:
    """Arguments of FastLanguageModel.get_peft_model."""
    return {
        "r": o.lora,
        "lora_alpha": 2 * o.lora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": LAYERS,
        "use_gradient_checkpointing": "unsloth" if o.checkpointing else False,
    }


def trainer_settings(o: argparse.Namespace, micro_batch: int) -> dict[str, Any]:
    """Arguments of DPOConfig, as in trl_steps.py."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": WARM_UP + o.steps * o.repeats,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": o.pairs // micro_batch,
        "learning_rate": 1e-6,
        "bf16": True,
        "gradient_checkpointing": o.checkpointing,
        "precompute_ref_log_probs": True,
        "precompute_ref_batch_size": micro_batch,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "max_length": LONGEST,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def rows_of(o: argparse.Namespace) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the pairs of all updates, each sorted by length, and the order in which they are trained on."""
    rows = [json.loads(line) for line in o.data.read_text(encoding="utf-8").splitlines()]
    needed = o.pairs * (o.steps + WARM_UP)
    if len(rows) < needed:
        raise SystemExit(f"{o.data}: {o.steps + WARM_UP} steps need {needed} pairs, but there are {len(rows)}")
    batches = [rows[at : at + o.pairs] for at in range(0, needed, o.pairs)]
    distinct = [row for batch in batches for row in sorted(batch, key=padded_length, reverse=True)]
    return distinct, [*range(needed), *list(range(WARM_UP * o.pairs, needed)) * (o.repeats - 1)]


def padded_length(row: dict[str, list[int]]) -> int:
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def model_folder(o: argparse.Namespace) -> Path:
    if o.tokenizer is None:
        from trl_steps import tokenizer_for_padding

        tokenizer_for_padding().save_pretrained(o.folder / "tokenizer")
    return make_model(o.shape, o.tokenizer or str(o.folder / "tokenizer"), o.folder / o.shape)


def measure(o: argparse.Namespace) -> dict[str, Any]:
    """Time the steps with one micro-batch in this process. Unsloth must be imported before TRL, which it changes."""
    os.environ |= {"UNSLOTH_DISABLE_STATISTICS": "1", "HF_HUB_OFFLINE": "1"}  # neither is needed: the model is a folder
    from unsloth import FastLanguageModel, PatchDPOTrainer  # pyright: ignore[reportMissingImports] # isort: skip

    PatchDPOTrainer()
    import datasets  # pyright: ignore[reportMissingImports]
    import torch
    import transformers
    import trl  # pyright: ignore[reportMissingImports]
    from trl.trainer.dpo_trainer import DataCollatorForPreference  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    distinct, order = rows_of(o)
    model, tokenizer = FastLanguageModel.from_pretrained(**loading_arguments(o, model_folder(o), torch.bfloat16))
    model = FastLanguageModel.get_peft_model(model, **adapter_arguments(o))

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
            if timed < 0 or timed % o.steps:
                return
            torch.cuda.synchronize()
            if not marks:
                torch.cuda.reset_peak_memory_stats()
            marks.append(time.perf_counter())

    trainer = Trainer(
        model=model,
        args=trl.DPOConfig(**trainer_settings(o, o.micro_batch)),
        train_dataset=datasets.Dataset.from_list(distinct).select(order),
        processing_class=tokenizer,
        data_collator=DataCollatorForPreference(pad_token_id=0, max_length=LONGEST),
        callbacks=[Clock()],
    )
    trainer.train()
    each = [after - before for before, after in itertools.pairwise(marks)]
    timed = distinct[WARM_UP * o.pairs :]
    tokens = sum(len(row[f"{part}_ids"]) for row in timed for part in ("prompt", "chosen", "rejected"))
    seconds = statistics.median(each)
    return {
        "pairs_per_second": round(len(timed) / seconds, 2),
        "each": [round(len(timed) / one, 2) for one in each],
        "unique_tokens_per_second": round(tokens / seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "versions": {name: version(name) for name in ("unsloth", "trl", "torch", "transformers")},
    }


def main() -> None:
    o = parsed()
    if missing := [name for name in ("unsloth", "trl", "datasets") if find_spec(name) is None]:
        sys.exit(
            f"{sys.executable}: not installed: {', '.join(missing)}. Run this with a Python that has them, in an environment of "
            "its own: pip install unsloth."
        )
    if o.data is None:
        from versus_trl import write_pairs

        o.folder.mkdir(parents=True, exist_ok=True)
        o.data = o.folder / "pairs.jsonl"
        write_pairs(o.data, o.pairs * (o.steps + WARM_UP), SHAPES[o.shape].vocabulary)
    if o.micro_batch is None:
        sizes = [2**power for power in range(o.largest.bit_length() - 1, -1, -1)]
        for size in (one for one in sizes if o.pairs % one == 0):
            command = [sys.executable, *sys.argv, "--data", str(o.data), "--micro-batch", str(size)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode == 0:
                print(done.stdout.splitlines()[-1])
                return
            print(f"micro-batches of {size}: failed, see above", file=sys.stderr, flush=True)
        sys.exit("no micro-batch fits")
    named = {name: str(value) if isinstance(value, Path) else value for name, value in vars(o).items()}
    print(json.dumps({"benchmark": "unsloth_steps", **named, **measure(o)}))


if __name__ == "__main__":
    main()

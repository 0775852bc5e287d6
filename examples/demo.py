"""Align a real model in minutes on two cores, and compare its answers: `make demo`.

SmolLM2-135M-Instruct is trained on the bundled pairs, whose chosen answers are plain and whose rejected ones waffle. Then
the original and the exported model, both loaded with plain transformers, answer the same held-out prompts.
Configuration overrides follow the command: `python examples/demo.py dpo.max_num_steps=40`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from smollm2 import smollm2

from tandem.config.load import load_config
from tandem.embedded.files import VALIDATION
from tandem.errors import TandemError
from tandem.report.reporter import PLAIN_WIDTH, Reporter
from tandem.training.trainer import train

CONFIG = Path(__file__).with_name("smollm2.yaml")
NEW_TOKENS = 60
# Lines of the validation file, counted from 0; it is not trained on. Selected because the original model waffles there: they
# show the change of style and are not a representative sample.
SHOWN = (10, 45, 28, 47)


def main() -> None:
    start = smollm2()
    given = [f"policy.model_name='{start}'", *sys.argv[1:]]
    console = Reporter().console
    console.print(f"tandem train --config {CONFIG.name} {' '.join(given)}\n", markup=False)
    run = train(load_config(str(CONFIG), given), Reporter())
    prompts = held_out_prompts()
    show(console, prompts, answers(start, prompts), answers(run / "model", prompts))
    show_accuracies(console, run)


def held_out_prompts() -> list[str]:
    rows = [json.loads(line) for line in VALIDATION.read_text(encoding="utf-8").splitlines()]
    return [rows[index]["prompt"] for index in SHOWN]


def answers(folder: Path, prompts: list[str]) -> list[str]:
    """Answers of a model by greedy decoding, with transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    said = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        whole = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        new = whole[inputs["input_ids"].shape[1] :]
        cut = " ..." if len(new) == NEW_TOKENS else ""
        said.append(tokenizer.decode(new, skip_special_tokens=True).strip() + cut)
    return said


def show(console: Console, prompts: list[str], before: list[str], after: list[str]) -> None:
    """Print a table with columns before and after, and a row per prompt."""
    table = Table(title=f"\nAnswers to held-out prompts, the first {NEW_TOKENS} tokens", show_lines=True)
    table.add_column("before", ratio=1)
    table.add_column("after", ratio=1)
    for prompt, old, new in zip(prompts, before, after, strict=True):
        table.add_row(*(Text.assemble((prompt, "bold"), "\n", said) for said in (old, new)))
    console.print(table, width=min(console.width, PLAIN_WIDTH))


def show_accuracies(console: Console, run: Path) -> None:
    """Print two accuracies on the held-out pairs, before training and as exported, from metrics.jsonl."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    before = next(record for record in records if record["split"] == "validation-default")
    after = next(record for record in records if record["split"] == "exported-default")
    console.print(f"\nOf {after['num_pairs']} held-out pairs, before -> after, as exported")
    # The original model is its own reference: every reward is 0, and a tie counts one half.
    for words, key in (
        ("accuracy (chosen has the greater reward)", "accuracy"),
        ("chosen is likelier", "logps_accuracy"),
    ):
        console.print(f"  {words:<40}  {before[key]:.0%} -> {after[key]:.0%}")


if __name__ == "__main__":
    try:
        main()
    except TandemError as error:
        sys.exit(f"demo: error: {error}")

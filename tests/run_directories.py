"""Directories of runs as training writes them, made in milliseconds: for tests of what reads them."""

import json
from pathlib import Path
from typing import Any

HOSTILE = '</script><script>window.hacked=1</script><img src=x onerror="window.hacked=2">\u2028\u202e&amp;'


def record(step: int, split: str = "train", **changes: float | str) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    done = step / 10
    return {
        "step": step,
        "split": split,
        "loss": 0.7 - 0.05 * done,
        "preference_loss": 0.7 - 0.05 * done,
        "sft_loss": 3.0,
        "accuracy": min(1.0, 0.5 + 0.04 * step),
        "rewards_chosen_mean": 0.1 * done,
        "rewards_rejected_mean": -0.2 * done,
        "rewards_margin_mean": 0.3 * done,
        "rewards_margin_p10": -0.1,
        "rewards_margin_p50": 0.3 * done,
        "rewards_margin_p90": 1.0,
        "logps_chosen_mean": -40.0 + done,
        "logps_rejected_mean": -42.0 - done,
        "tokens_chosen_mean": 20.0,
        "tokens_rejected_mean": 19.0,
        "kl_per_token": 0.01 * step,
        "chosen_below_reference": 0.0,
        "num_pairs": 32 if split == "train" else 100,
        **(TRAINED if split == "train" else {"data": "0123456789ab"}),
        **changes,
    }


TRAINED = {
    "grad_norm": 1.5,
    "lr": 1e-6,
    "num_tokens": 4000,
    "pack_fill": 0.97,
    "step_seconds": 2.0,
    "tokens_per_second": 2000.0,
    "memory_gib": 1.5,
}


def pair(margin: float, prompt: str = "Why?", **changes: Any) -> dict[str, Any]:
    """A pair of pairs.json."""
    return {
        "place": "/data/pairs.jsonl:3",
        "margin": margin,
        "before": 0.0,
        "reward_chosen": margin / 2,
        "reward_rejected": -margin / 2,
        "tokens_chosen": 5,
        "tokens_rejected": 6,
        "doubtful": margin < -1,
        "prompt": prompt,
        "chosen": "Because.",
        "rejected": "No idea.",
        **changes,
    }


def pairs_content(prompt: str = "Why?") -> dict[str, Any]:
    """pairs.json of a validation on 100 pairs."""
    lengths = [
        {"low": -9.0, "high": 0.0, "num_pairs": 50, "accuracy": 0.8, "margin": 0.2},
        {"low": 1.0, "high": 20.0, "num_pairs": 50, "accuracy": 1.0, "margin": 0.4},
    ]
    found = {
        "step": 10,
        "data": "0123456789ab",
        "num_pairs": 100,
        "won": 88,
        "lost": 10,
        "start_step": 0,
        "start_at": 0,
        "start": [0.0] * 100,
        "histogram": {"first": -2.0, "width": 0.5, "now": [1, 2, 3, 4, 40, 30, 20], "start": [0, 0, 0, 0, 100, 0, 0]},
        "lengths": lengths,
        "pairs_lost": [pair(-2.0, prompt), pair(-0.5)],
        "pairs_won": [pair(1.5)],
        "pairs_changed": [pair(1.5)],
    }
    return {"format": 1, "sets": {"validation-default": found}}


def setup_content(text: str = "Why?", steps: int = 10) -> dict[str, Any]:
    """setup.json of a run of 20 training preferences."""
    lengths = {"mean": 9.0, "percentiles": {"50": 9}, "longest": 24, "histogram": [0, 1, 5, 9, 4, 1, 0, 0, 0, 0, 0, 0]}
    one = {
        "name": "train",
        "format": "BinaryPreferenceDataset",
        "format_reason": "detected from the keys prompt, chosen, rejected",
        "counts": {"rows": 21, "accepted": 20, "bad": {text: 1}, "filtered": {}},
        "num_pairs": 20,
        "prompt_tokens": 200,
        "completion_tokens": 400,
        "longest": 24,
        "shared_saving": 0.25,
        **dict.fromkeys(("prompt_lengths", "completion_lengths", "whole_lengths"), lengths),
        "notes": {text: 2},
        "warnings": [f"train: {text}"],
        "prompt_overlap": None,
        "ngram_overlap": None,
    }
    segments = [
        {"role": role, "preference": 0, "place": "pairs.jsonl:1", "start": start, "tokens": tokens, "text": text}
        for role, start, tokens in (("prompt", 0, 100), ("chosen", 100, 60), ("rejected", 160, 80))
    ]
    return {
        "format": 1,
        "num_steps": steps,
        "rows": "256 tokens",
        "choices": [["model", text], ["batch", "32 pairs"]],
        "computed": "on the CPU",
        "num_ranks": 1,
        "versions": {"tandem": "0.1.0", "torch": "2.13.0"},
        "sets": [one],
        "pack": {"length": 256, "arrangement": "shared", "segments": segments},
    }


def make_run(
    folder: Path, *, steps: int = 10, text: str = "Why?", config: str = "", finished: bool = True, **last: Any
) -> Path:
    """A run with a validation before, in the middle and after. last: metrics of the last validation."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config or "dpo:\n  val_period: 5\n")
    lines = [record(0, "validation-default")]
    lines += [record(step) for step in range(1, steps + 1)]
    lines.append(record(steps, "validation-default", **last))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "setup.json").write_text(json.dumps(setup_content(text, steps)))
    (folder / "pairs.json").write_text(json.dumps(pairs_content(text)))
    (folder / "rejects.jsonl").write_text(json.dumps({"split": "train", "reason": "empty completion"}) + "\n")
    (folder / "samples").mkdir()
    for step, answer in ((0, "Um."), (steps, text)):
        sample = {"place": "v.jsonl:1", "prompt": text, "policy": answer, "reference": None}
        (folder / f"samples/step_{step}.jsonl").write_text(json.dumps(sample) + "\n")
    verdict = {
        "name": "length_learnt",
        "split": "validation-default",
        "text": f"the margin follows length: its correlation is 0.9 {text}",
    }
    (folder / "verdicts.json").write_text(json.dumps([verdict]))
    for number in (5, steps):
        (folder / f"checkpoints/step_{number}").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints/best").symlink_to("step_5")
    (folder / "checkpoints/latest").symlink_to(f"step_{steps}")
    if finished:
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text("{}")
        (folder / "model/model.safetensors").write_text("")
    return folder

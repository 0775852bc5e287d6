"""Short runs of the trainer on a small model and the embedded pairs, in the test's directory."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from models import MODEL, ON_A_GPU
from safetensors.torch import load_file

from tandem.config.load import load_config
from tandem.embedded.files import TRAIN
from tandem.report.reporter import Reporter
from tandem.training import trainer
from tandem.training.trainer import train

# With policy.model_name, the default settings of the embedded model do not apply, so they are repeated here.
NAMED = [
    f"policy.model_name={MODEL}",
    "policy.max_total_sequence_length=512",
    "policy.optimizer.kwargs.lr=1e-3",
    "policy.optimizer.kwargs.weight_decay=0.01",
    "data.train.data_path=embedded",
    "checkpointing.save_period=10",
]

# A run that takes a second: four steps of four pairs, with a validation set of 70 pairs that is not used.
SHORT = [
    *([] if ON_A_GPU else NAMED),
    "dpo.max_num_steps=4",
    "policy.train_global_batch_size=4",
    "dpo.val_at_start=false",
    "dpo.val_at_end=false",
    "dpo.val_period=0",
    "policy.scheduler=null",
]

VARYING = ("step_seconds", "loader_wait_seconds", "pairs_per_second", "tokens_per_second", "memory_gib")


def short_run(folder: Path, *overrides: str, fresh: bool = False, per_pair: Path | None = None) -> Path:
    """Train into `folder` and return it."""
    loaded = load_config(None, [*SHORT, f"run.dir={folder}", *overrides])
    return train(loaded, Reporter("quiet"), fresh=fresh, per_pair=per_pair)


def few_pairs(folder: Path, num: int = 40) -> str:
    """Override that selects the first embedded pairs, for tests that must compute a reference, which is slow for all pairs."""
    lines = TRAIN.read_text(encoding="utf-8").splitlines(keepends=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "few.jsonl").write_text("".join(lines[:num]), encoding="utf-8")
    return f"data.train.data_path={folder}/few.jsonl"


def long_preferences(path: Path, num_words: int, num: int = 2) -> None:
    """Write preferences whose prompts have so many words. With the embedded tokenizer, 1,000 words are about 1,500 tokens."""
    rng = np.random.default_rng(0)
    words = ["the", "sky", "looks", "blue", "because", "air", "scatters", "short", "waves", "of", "sunlight", "again"]

    def text(count: int) -> str:
        return " ".join(rng.choice(words, count))

    rows = [{"prompt": text(num_words), "chosen": text(60), "rejected": text(60)} for _ in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def saving_settings(folder: Path) -> list[str]:
    """Settings of a run with checkpoints, validations that rank them, and early stopping that never happens."""
    pairs = few_pairs(folder, 20)
    return [
        *(pairs, f"data.validation={folder}/few.jsonl", "dpo.val_period=2", "dpo.early_stopping_patience=9"),
        *("checkpointing.save_period=1", "checkpointing.keep_top_k=3"),
    ]


def unfinished_run(folder: Path, settings: list[str]) -> Path:
    """A run as it is after being killed in its last step."""
    run = short_run(folder / "run", *settings)
    for place in (run / "model", run / "checkpoints" / "step_4"):
        shutil.rmtree(place)
    for link in ("best", "latest"):
        (run / "checkpoints" / link).unlink()
        (run / "checkpoints" / link).symlink_to("step_3")
    return run


class Killed(Exception):
    pass


@contextmanager
def killed_after(step: int) -> Iterator[None]:
    """Make a run in this context die like a killed process: after the step's metrics were written, without any cleanup."""
    report = trainer._report

    def dying(t: Any, number: int, *rest: Any) -> None:
        report(t, number, *rest)
        if number == step:
            raise Killed

    with mock.patch.object(trainer, "_report", dying), pytest.raises(Killed):
        yield


def metrics_of(run: Path, split: str = "train") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of one split, without values that vary from run to run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in VARYING} for line in lines if line["split"] == split]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_trained_alike(several: Path, one: Path) -> None:
    """Assert that the metrics and weights of two runs are equal up to the order of float32 sums."""
    for split in ("train", "validation-default"):
        these, those = metrics_of(several, split), metrics_of(one, split)
        assert [line["step"] for line in these] == [line["step"] for line in those]
        for this, that in zip(these, those, strict=True):
            assert this.keys() == that.keys()
            assert this["num_pairs"] == that["num_pairs"]
            assert this.get("num_tokens") == that.get("num_tokens")
            assert this["loss"] == pytest.approx(that["loss"], rel=1e-5)
            assert this["rewards_margin_mean"] == pytest.approx(that["rewards_margin_mean"], rel=1e-4, abs=1e-6)
            assert this.get("grad_norm", 0) == pytest.approx(that.get("grad_norm", 0), rel=1e-3)
    assert largest_difference(weights_of(several), weights_of(one)) < 5e-6


def difference_to_movement(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], start: Path) -> float:
    """How far two runs' weights are apart, divided by how far `b` moved from its start: |a - b| / |b - start|.

    Unlike the largest difference, it is about 1 for a run that learned something else, whatever the learning rate.
    """
    before = load_file(start / "model.safetensors")
    assert a.keys() == b.keys() <= before.keys()
    apart = sum((a[name].double() - b[name].double()).square().sum().item() for name in b)
    moved = sum((b[name].double() - before[name].double()).square().sum().item() for name in b)
    return (apart / moved) ** 0.5


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a)

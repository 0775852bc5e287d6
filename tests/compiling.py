"""Counts the graphs that are compiled during a run."""

from pathlib import Path
from typing import Any

import torch
from running import SHORT, few_pairs
from torch._dynamo.utils import counters

from tandem.config.load import load_config
from tandem.report.reporter import Reporter
from tandem.training.run.callbacks import Callbacks
from tandem.training.trainer import train

# Rows of several lengths, and validations between the steps.
SETTINGS = [
    *("policy.compile=true", "policy.train_global_batch_size=6", "policy.packing.pack_length=512"),
    *("dpo.val_period=1", "checkpointing.enabled=false"),
]


class GraphCounter:
    """A callback that notes how many graphs exist after each step and each validation."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step(self, record: dict[str, Any]) -> None:
        self.seen.append(counters["stats"]["unique_graphs"])

    on_validation = on_step


def graphs_during_a_run(folder: Path, *settings: str) -> list[int]:
    """Train, and return how many graphs were compiled up to each step and each validation."""
    torch._dynamo.reset()
    counters.clear()
    counter = GraphCounter()
    given = [*SHORT, *SETTINGS, few_pairs(folder), f"data.validation={folder}/few.jsonl", f"run.dir={folder}/run"]
    train(load_config(None, [*given, *settings]), Reporter("quiet"), callbacks=Callbacks([counter]))
    return counter.seen

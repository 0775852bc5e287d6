"""Paths of the bundled preference pairs."""

from pathlib import Path

HERE = Path(__file__).parent
TRAIN = HERE / "train.jsonl"
VALIDATION = HERE / "validation.jsonl"

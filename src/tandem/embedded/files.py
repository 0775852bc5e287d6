"""Where the bundled preference pairs are, on disk."""

from pathlib import Path

HERE = Path(__file__).parent
TRAIN = HERE / "train.jsonl"
VALIDATION = HERE / "validation.jsonl"

"""Promise 1 over whole runs: however preferences are packed, every step, the final weights and validation are the same."""

import json

import numpy as np
import pytest
import torch
from running import largest_difference, metrics_of, short_run, weights_of

from tandem.config.load import load_config
from tandem.errors import ConfigError
from tandem.model.load import load_policy
from tandem.model.parallel import shard, start_workers
from tandem.model.reference import LiveReference
from tandem.packing import packs
from tandem.packing.schedule import GlobalBatch
from tandem.train import trainer
from tandem.train.optimizer import make_optimizer
from tandem.train.setup import set_up
from tandem.train.step import Side, train_step
from tandem.train.validation import ValidationSet, validate

WORDS = "the sky looks blue because air scatters short waves of sunlight more than long red ones so ask again".split()


def text(rng, longest):
    return " ".join(rng.choice(WORDS, rng.integers(4, longest + 1)))


def preference(rng, num_completions, *, longest=30):
    completions = [{"rank": rank, "completion": text(rng, longest)} for rank in range(num_completions)]
    return {"context": text(rng, longest), "completions": completions}


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file

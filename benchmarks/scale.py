"""Simulates how full rows are, and how long workers wait for one another, on 8 to 1,024 workers.

    python benchmarks/scale.py [--data FILE ... --tokenizer FOLDER] [--plot FILE]

Lengths are those of preference files with two completions (the first of them is also drawn from, with replacement, for
many workers), or log-normal as in benchmarks/throughput.py. A global batch is 256 pairs, or 16 pairs for each worker.

    batch             each batch packed by first fit decreasing and shared out, rows of --pack-length and its quarters
    batch, auto       the same with the length that `auto` means where every worker fills four rows of a batch
    dataset           65,536 pairs packed once, batches of whole packs, dealt to the workers in turn
    greedy            each batch packed in order, a row closed when the next pair does not fit; dealt in turn
    padded            one sequence a row, padded to the longest of a micro-batch of 8 pairs, in random order
    padded, sorted    the same, the pairs of a batch sorted by their longest sequence first

Cost is tandem.packing.sharing's: tokens through linear layers and pairs in attention, filler and padding included.

    fill        tokens over positions, of rows that hold any
    imbalance   cost of the worker with the most over the mean: the mean over steps
    idle        share of the workers' time that is spent waiting, if they wait at the end of a step alone
    by round    the same, if they wait in every round (micro-batch), as sharded weights make them
    useful      cost of the pairs with prompts computed once and no filler, over time (waiting by round) * workers

A worker that has no pair in a round is idle, though it may compute filler. Prints tables and, as its last line, one JSON
object. Exits with 1 when one worker's rows, over an epoch of a set at 256 pairs a batch, are less than 97 % full: for
sets of which a batch fills four rows or more.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import batched, zip_longest
from pathlib import Path
from typing import Any

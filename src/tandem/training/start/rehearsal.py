"""Runs micro-batches before the first step: each shape, so that layers are compiled, and the longest, to forecast memory."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch

from tandem.model.load import attention_kind
from tandem.model.policy import Policy
from tandem.model.reference import LiveReference, Reference
from tandem.packing.layout import IntArray, Pack, join
from tandem.packing.packer import Packer
from tandem.report.reporter import Reporter
from tandem.training.adamw import state_bytes
from tandem.training.forecast import Forecast, forecast, refuse_forecast_overflow
from tandem.training.start.setup import Setup
from tandem.training.step import count_experts
from tandem.training.validation import portions

# Of each set, the batches whose micro-batches are looked at. Row lengths are compiled whether or not these batches have them.
BATCHES_WITH_SHAPES = 64


def start_compile_workers(setup: Setup) -> None:
    """Start torch's processes that compile GPU kernels, so that they import torch while weights load.

    Torch starts them with the first compilation, and compiles one kernel at a time until they are ready.
    """
    policy = setup.config.policy
    has_flex = policy.packing.mode != "none" and attention_kind(policy, setup.device, setup.source.config) == "flex"
    if setup.device.type != "cuda" or not (setup.compiles or has_flex):
        return
    # Not a public function: it exists in torch 2.11 to 2.13. Without it, torch starts the processes later.
    with suppress(ImportError, OSError):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def compile_shapes(
    setup: Setup, policy: Policy, references: Iterable[Reference], reporter: Reporter, check: Callable[[], None]
) -> None:
    """Run every shape of a micro-batch once, so that all layers are compiled before the first step.

    Shapes of training run forward and backward, those of validation only forward, and a reference in memory runs both.
    """
    if not (setup.compiles or policy.attention == "flex"):
        return
    live = next((one for one in references if isinstance(one, LiveReference)), None)
    trained = shapes_of(setup.plan.train, [(one.preferences, one.bounds) for one in setup.plan.batches.epoch(0)])
    measured = dict.fromkeys([] if policy.shares_graphs else trained, setup.plan.train)
    for packer in setup.plan.validation.values():
        batches = [(portion, None) for portion in portions(packer, setup.validation_batch_size)]
        shapes = shapes_of(packer, batches)
        measured |= {one: packer for one in shapes if not (policy.shares_graphs and one in trained)}
    with reporter.progress("Compiling", len(trained) + len(measured)) as done, policy.computing():
        for shape in trained:
            pack = example(setup.plan.train, shape)
            _train(policy, pack, setup)
            if live is not None:
                live.token_logps(pack, policy.inputs(pack, setup.device))
            done()
            check()
        for shape, packer in measured.items():
            pack = example(packer, shape)
            inputs = policy.inputs(pack, setup.device)
            with torch.no_grad():
                policy(inputs)
            if live is not None:
                live.token_logps(pack, inputs)
            done()
            check()
    policy.zero_grad()


def _train(policy: Policy, pack: Pack, setup: Setup) -> None:
    if policy.balance is not None:
        count_experts(policy, policy.balance, [pack], setup.device)
    with nullcontext() if policy.balance is None else policy.balance.training():
        policy(policy.inputs(pack, setup.device)).sum().backward()


def shapes_of(packer: Packer, batches: Sequence[tuple[IntArray, IntArray | None]]) -> list[tuple[int, int]]:
    """Return the shapes, (rows, tokens per row), of the micro-batches of a set. Every rank returns the same.

    With several packs per micro-batch, shapes that the first 64 batches do not have are missing.
    """
    found = {
        shape for preferences, bounds in batches[:BATCHES_WITH_SHAPES] for shape in packer.shapes(preferences, bounds)
    }
    if packer.packs_per_micro_batch == 1 and packer.arrangement != "separate":
        found |= {(1, length) for length in packer.lengths if length >= packer.sizes.min()}
        found |= {
            (packer.num_rows(np.array([one])), packer.length) for one in np.flatnonzero(packer.sizes > packer.length)
        }
    return sorted(found)


def example(packer: Packer, shape: tuple[int, int]) -> Pack:
    """Return a micro-batch of a shape, with the shortest preference of the set in as many rows as possible."""
    num_rows, length = shape
    row = packer.row([int(np.argmin(packer.sizes))], length)
    copies, left = divmod(num_rows, row.token_ids.shape[0])
    return join([row] * copies + [packer.row([], length)] * left)


def forecast_memory(setup: Setup, policy: Policy, reporter: Reporter) -> Forecast:
    """Measure the GPU memory of the longest rows of the first batch. Raise OutOfMemoryError if a step would not fit.

    The rows run twice, because most rows of a step run with gradients already allocated.
    """
    packer = setup.plan.train
    first = setup.plan.batches.epoch(0)[0]
    bins = packer.bins(first.preferences, first.bounds)
    length = packer.longest_row(bins)  # before the last rounds are packed again into shorter rows
    longest = join([packer.row(bin.tolist(), length) for bin in list(bins)[: packer.packs_per_micro_batch]])
    kept = setup.config.policy.optimizer
    torch.cuda.reset_peak_memory_stats()
    with policy.computing():
        for _ in range(2):
            policy(policy.inputs(longest, setup.device)).sum().backward()
    states: Any = {"state_bytes": state_bytes(kept.state_dtype), "offload": kept.offload}
    expected = forecast(policy, torch.cuda.max_memory_allocated(), longest.token_ids.shape[1], **states)
    policy.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    reporter.say(f"Memory: {expected}")
    refuse_forecast_overflow(expected, setup.device, setup.config.policy, setup.offload)
    return expected

"""Runs rows before the first step: one of each length, so that layers are compiled, and the longest, to forecast memory."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from tandem.model.policy import Policy
from tandem.packing.layout import join
from tandem.report.reporter import Reporter
from tandem.training.adamw import state_bytes
from tandem.training.memory import Forecast, forecast, refuse_forecast_overflow
from tandem.training.start.setup import Setup
from tandem.training.step import count_experts


def compile_row_lengths(setup: Setup, policy: Policy, reporter: Reporter, check: Callable[[], None]) -> None:
    """Run a forward and backward pass on a row of each length, so that layers are compiled before the first step."""
    packer = setup.plan.train
    smallest = int(np.argmin(packer.sizes))
    lengths = [length for length in packer.lengths if length >= packer.sizes[smallest]] if setup.compiles else []
    if lengths:
        with reporter.progress("Compiling", len(lengths)) as done:
            for length in lengths:
                rows = [packer.row([smallest], length)] * packer.packs_per_micro_batch
                with policy.computing():
                    if policy.balance is not None:
                        count_experts(policy, policy.balance, [join(rows)], setup.device)
                    with nullcontext() if policy.balance is None else policy.balance.training():
                        policy(policy.inputs(join(rows), setup.device)).sum().backward()
                done()
                check()
    policy.zero_grad()


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

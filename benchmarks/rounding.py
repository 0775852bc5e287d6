"""Measures the effect of bfloat16 rounding on log-probabilities, on the audit and on gradient sums.

    python benchmarks/rounding.py --model DIR --data PAIRS.jsonl [--weights bfloat16_stochastic] [--preferences 256]

The same preferences are packed in two ways ("cuts", with different neighbours and row lengths) and also computed in float32.
A few are computed by the plain forward, as in the audit, and again with different rounding. The gradients of 16 packs are
accumulated one after another and compared with their sum in float64. Slow without a GPU. Prints a table and, as its last
line, one JSON object.
"""

import argparse
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from options import options_of

from tandem.config.load import load_config
from tandem.model.distributed.process_group import Ranks, join_process_group, leave_process_group
from tandem.model.policy import Policy
from tandem.training.start.references import load_sharded
from tandem.training.start.setup import Setup, set_up

PACKS = 16  # number of packs whose gradients are accumulated
AUDITED = 4  # number of audited preferences
BATCH = 64  # number of preferences packed together


@dataclass(frozen=True, slots=True)
class Cut:
    """Token log-probabilities of every completion, by preference and number, however they were packed."""

    logps: dict[tuple[int, int], torch.Tensor]

    def margins(self, *, per_token: bool = False) -> np.ndarray:
        """Margins of the first completion over the second, in nats: of sums, or of means per token."""
        reduce = torch.mean if per_token else torch.sum
        firsts = [index for index, number in self.logps if number == 0]
        return np.array([float(reduce(self.logps[i, 0]) - reduce(self.logps[i, 1])) for i in sorted(firsts)])


def made(o: argparse.Namespace, precision: str, weights: str, length: int, ranks: Ranks) -> tuple[Setup, Policy]:
    overrides = [
        f"policy.model_name={o.model}",
        f"data.train.data_path={o.data}",
        f"policy.precision={precision}",
        f"policy.weights={weights}",
        f"policy.max_total_sequence_length={o.longest}",
        f"policy.train_global_batch_size={BATCH}",
        f"policy.packing.pack_length={length}",
        "policy.compile=false",
        "data.drop_last=false",
    ]
    setup = set_up(load_config(None, overrides).config, ranks.device)
    return setup, load_sharded(setup, setup.source, ranks)


@torch.no_grad()
def computed(setup: Setup, policy: Policy, order: np.ndarray) -> Cut:
    logps: dict[tuple[int, int], torch.Tensor] = {}
    with policy.computing():
        for start in range(0, len(order), BATCH):
            for pack in setup.plan.train.micro_batches(order[start : start + BATCH]):
                inputs = policy.inputs(pack, setup.device)
                parts = policy(inputs)[: inputs.num_scored].double().cpu().split(pack.completion_lengths.tolist())
                owners = pack.preferences[pack.owner].tolist()
                first = np.searchsorted(pack.owner, pack.owner)
                numbers = (np.arange(len(owners)) - first).tolist()
                logps |= dict(zip(zip(owners, numbers, strict=True), parts, strict=True))
    return Cut(logps)


@torch.no_grad()
def audited(setup: Setup, policy: Policy, cut: Cut) -> dict[str, list[float]]:
    """Mean differences per token, as in the audit: the smallest, the mean and the largest over completions."""
    found: dict[str, list[float]] = {"packed to plain": [], "plain, filler": [], "plain, perturbed": []}
    store, device = setup.plan.train.store, setup.device
    with policy.computing():
        for (index, number), packed in cut.logps.items():
            if index >= AUDITED:
                continue
            preference = store[index]
            given = preference.prompt, preference.completions[number], preference.scored(number)
            prompt, completion, scored = (torch.from_numpy(ids.astype(np.int64)).to(device) for ids in given)
            plain = policy.plain_logps(prompt, completion)[scored].double().cpu()
            otherwise = {"plain, filler": {"filler": 100}, "plain, perturbed": {"perturbed": True}}
            found["packed to plain"].append(float((packed - plain).abs().mean()))
            for name, how in otherwise.items():
                again = policy.plain_logps(prompt, completion, **how)[scored].double().cpu()
                found[name].append(float((again - plain).abs().mean()))
    return {name: [min(values), float(np.mean(values)), max(values)] for name, values in found.items()}


def error_of_gradient_sums(setup: Setup, policy: Policy) -> float:
    """Largest relative error of gradients accumulated as in training, over packs of one preference, vs. sums in float64."""
    row = setup.plan.train.length
    packs = [setup.plan.train.row([index], row) for index in range(min(PACKS, len(setup.plan.train.store)))]
    watched = dict(list(policy.trained())[:8])
    exact = {name: torch.zeros(parameter.shape, dtype=torch.float64) for name, parameter in watched.items()}

    def backward(pack: Any) -> None:
        policy(policy.inputs(pack, setup.device)).sum().backward()

    for pack in packs:
        with policy.computing():
            backward(pack)
        for name, parameter in watched.items():
            assert parameter.grad is not None
            exact[name] += parameter.grad.double().cpu()
        policy.zero_grad()
    with policy.computing():
        for pack in packs:
            backward(pack)
    errors = [
        float((parameter.grad.double().cpu() - exact[name]).norm() / exact[name].norm())
        for name, parameter in watched.items()
        if parameter.grad is not None
    ]
    policy.zero_grad()
    return max(errors)


def spread(differences: np.ndarray) -> list[float]:
    """Mean, 95th percentile and largest absolute difference between two computations."""
    sizes = np.abs(differences)
    return [float(sizes.mean()), float(np.quantile(sizes, 0.95)), float(sizes.max())]


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--weights", choices=["float32", "bfloat16_stochastic"], default="float32")
    parser.add_argument("--preferences", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a prompt and completion together")
    parser.add_argument("--rows", type=int, nargs=2, default=[8192, 4096], help="row lengths of the two cuts")
    o = parser.parse_args()
    ranks = join_process_group()
    rng = np.random.default_rng(0)
    setup, policy = made(o, "float32", "float32", o.rows[0], ranks)
    order = np.arange(min(o.preferences, len(setup.plan.train.store)))
    exact = computed(setup, policy, order)
    setup, policy = made(o, "bfloat16", o.weights, o.rows[1], ranks)
    other = computed(setup, policy, rng.permutation(order))
    setup, policy = made(o, "bfloat16", o.weights, o.rows[0], ranks)
    cut = computed(setup, policy, order)
    pairs = [(float(cut.logps[key].sum()), float(other.logps[key].sum())) for key in cut.logps]
    found = {
        "completion, two cuts": spread(np.array([a - b for a, b in pairs])),
        "margin, two cuts": spread(cut.margins() - other.margins()),
        "margin per token, two cuts": spread(cut.margins(per_token=True) - other.margins(per_token=True)),
        "margin, to float32": spread(cut.margins() - exact.margins()),
    }
    print(f"{'nats':<28} {'mean':>9} {'p95':>9} {'largest':>9}")
    for name, values in found.items():
        print(f"{name:<28} " + " ".join(f"{value:>9.5f}" for value in values))
    seen = audited(setup, policy, cut)
    print(f"\n{'audit, nats a token':<28} {'smallest':>9} {'mean':>9} {'largest':>9}")
    for name, values in seen.items():
        print(f"{name:<28} " + " ".join(f"{value:>9.5f}" for value in values))
    sums = error_of_gradient_sums(setup, policy)
    print(f"\ngradients of {PACKS} packs, relative error of their sum: {sums:.1e}")
    print(
        json.dumps(
            {"benchmark": "rounding", **vars(o), "torch": torch.__version__, **found, "audit": seen, "gradients": sums}
        )
    )
    leave_process_group()


if __name__ == "__main__":
    main()

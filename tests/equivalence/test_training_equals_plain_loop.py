"""The trainer equals a hand-written DPO loop with two models and full logits, without packing, FSDP or caches."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import plain_token_logps
from running import SHORT, few_pairs, largest_difference, metrics_of, short_run, weights_of
from transformers import AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.training.start.setup import set_up

STEPS = 4
BETA = 0.1


@pytest.fixture(scope="module")
def by_hand():
    """Losses, gradient norms and final weights of the hand-written loop."""
    setup = set_up(load_config(None, SHORT).config, torch.device("cpu"))
    policy = AutoModelForCausalLM.from_pretrained(setup.source.folder, dtype=torch.float32, attn_implementation="eager")
    frozen = AutoModelForCausalLM.from_pretrained(setup.source.folder, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98), eps=1e-5)
    losses, norms = [], []
    for batch in setup.plan.batches.epoch(0)[:STEPS]:
        preferences = [setup.plan.train.store[int(i)] for i in batch.preferences]
        pair_losses = []
        for preference in preferences:
            chosen, rejected = (logp.sum() for logp in plain_token_logps(policy, preference))
            with torch.no_grad():
                ref_chosen, ref_rejected = (logp.sum() for logp in plain_token_logps(frozen, preference))
            margin = (chosen - ref_chosen) - (rejected - ref_rejected)
            pair_losses.append(-F.logsigmoid(BETA * margin))
        loss = torch.stack(pair_losses).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = {name: p.detach() for name, p in policy.named_parameters()}
    return losses, norms, weights


CUTS = {
    "default": [],
    "live reference": ["reference.mode=live"],
    "repeated prompts": ["policy.packing.share_prompts=false"],
    "unpacked": ["policy.packing.mode=none"],
    "longer packs": ["policy.packing.pack_length=1024"],
    "three packs at once": ["policy.packing.packs_per_micro_batch=3", "policy.packing.pack_length=256"],
    "small head chunks": ["policy.head_chunk_tokens=37"],
    "validating and saving on the way": ["dpo.val_period=1", "dpo.val_at_start=true", "checkpointing.save_period=1"],
}


@pytest.mark.parametrize("cut", CUTS)
def test_every_packing_trains_the_same_model_as_the_plain_loop(cut, by_hand, tmp_path):
    losses, norms, weights = by_hand
    run = short_run(tmp_path / "run", *CUTS[cut])
    lines = metrics_of(run)
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=2e-5)
    np.testing.assert_allclose([line["grad_norm"] for line in lines], norms, rtol=2e-4)
    # Adam divides by the size of a gradient, so a gradient that is all rounding moves its weight a little anyhow.
    assert largest_difference(weights_of(run), weights) < 2e-4
    start = lines[0]
    assert abs(start["loss"] - 0.693147) < 1e-5
    assert start["accuracy"] == 0.5


def test_metrics_do_not_depend_on_how_the_batch_is_packed(tmp_path):
    one = metrics_of(short_run(tmp_path / "one", "policy.packing.pack_length=2048"))
    many = metrics_of(short_run(tmp_path / "many", "policy.packing.mode=none"))
    for a, b in zip(one, many, strict=True):
        for name in a.keys() - {"split", "pack_fill", "num_tokens"}:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=2e-5), name


@pytest.mark.bfloat16
def test_first_loss_in_bfloat16_is_log_two(tmp_path):
    few = few_pairs(tmp_path)
    lines = metrics_of(short_run(tmp_path / "run", "policy.precision=bfloat16", "dpo.max_num_steps=1", few))
    assert abs(lines[0]["loss"] - 0.693147) < 1e-3


def test_sft_and_averaging_enter_the_loss_as_defined(tmp_path):
    run = short_run(tmp_path / "run", "dpo.sft_loss_weight=0.5", "dpo.preference_average_log_probs=true")
    first = metrics_of(run)[0]
    assert first["loss"] == pytest.approx(first["preference_loss"] + 0.5 * first["sft_loss"], abs=1e-9)
    # Averaged: an untrained model spends about ln(2048) = 7.62 nats on every token.
    assert first["sft_loss"] == pytest.approx(7.62, abs=0.1)

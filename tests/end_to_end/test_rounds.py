"""Two rounds of training: adapters on the embedded model, then training of the merged model with the first reference."""

import json
import os
import subprocess
import sys

import pytest

SHORT = ["dpo.max_num_steps=6", "policy.train_global_batch_size=16", "dpo.val_period=0", "policy.scheduler=null"]


def tandem(folder, *overrides):
    command = [sys.executable, "-m", "tandem", "train", *SHORT, *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last(run, split):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == split][-1]


@pytest.mark.slow
def test_a_second_round_starts_from_the_first_and_uses_its_reference(tmp_path):
    printed = tandem(tmp_path, "policy.lora.enabled=true", "run.dir=one", "dpo.val_at_start=false")
    assert "reference          cached, the base model" in printed
    first = last(tmp_path / "one", "exported-default")
    assert first["rewards_margin_mean"] == pytest.approx(
        last(tmp_path / "one", "validation-default")["rewards_margin_mean"], abs=1e-5
    )
    assert first["accuracy"] > 0.8

    second = ["policy.model_name=one/model", "data.train.data_path=embedded", "reference.model=embedded", "run.dir=two"]
    settings = ["policy.max_total_sequence_length=512", "policy.optimizer.kwargs.weight_decay=0.01"]
    printed = tandem(tmp_path, *second, *settings, "data.validation.data_path=embedded", "dpo.max_num_steps=1")
    assert "the reference is another model" in printed
    # Held to the same reference, the second round begins where the first one ended.
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    start = next(line for line in lines if line["split"] == "validation-default")
    assert start["rewards_margin_mean"] == pytest.approx(first["rewards_margin_mean"], abs=1e-5)

"""Answers of policy and reference to validation prompts are printed together, and equal those of transformers."""

import json

import pytest
import torch
from models import MODEL
from running import short_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.errors import ConfigError
from tandem.training import samples

SETTINGS = [
    "dpo.val_at_start=true",
    "dpo.val_at_end=true",
    "policy.optimizer.kwargs.lr=1e-2",
    "logger.num_val_samples_to_print=2",
]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    monkeypatch.setattr(samples, "MAX_ANSWER_TOKENS", 12)


def lines(run, step):
    return [json.loads(line) for line in (run / f"samples/step_{step}.jsonl").read_text().splitlines()]


def greedy(folder, prompt):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    out = AutoModelForCausalLM.from_pretrained(folder).generate(ids, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :])


@pytest.mark.parametrize("reference", ["cached", "live"])
def test_answers_of_policy_and_reference_are_printed_together(tmp_path, reference):
    run = short_run(tmp_path / "run", *SETTINGS, f"reference.mode={reference}")
    before, after = lines(run, 0), lines(run, 4)
    assert [line["place"] for line in before] == [line["place"] for line in after]
    for line in before:
        assert line["policy"] == line["reference"] == greedy(MODEL, line["prompt"])
    for line, start in zip(after, before, strict=True):
        assert line["reference"] == start["reference"]
        assert line["policy"] == greedy(run / "model", line["prompt"])
    assert any(line["policy"] != line["reference"] for line in after)


def test_a_loss_without_a_reference_prints_answers_of_the_policy_only(tmp_path):
    run = short_run(tmp_path / "run", *SETTINGS, "dpo.preference_loss=simpo", "dpo.val_at_end=false")
    assert [line["reference"] for line in lines(run, 0)] == [None, None]


def test_prompts_need_a_validation_set(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    with pytest.raises(ConfigError) as refused:
        short_run(tmp_path / "run", *SETTINGS, f"data.train.data_path={file}", "policy.train_global_batch_size=1")
    assert str(refused.value) == (
        "logger.num_val_samples_to_print = 2, but there is no validation set to take prompts from. Set data.validation, or "
        "set the number to 0."
    )

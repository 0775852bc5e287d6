"""Runs `tandem train` without arguments, as a new user does, and checks the output and the files."""

import json
import os
import subprocess
import sys

import pytest
from killing import Ended, tandem_in

from tandem.config.tracked import METRICS


@pytest.fixture(scope="module")
def default(tmp_path_factory):
    folder = tmp_path_factory.mktemp("default")
    command = [sys.executable, "-m", "tandem", "train"]
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}  # every imported module, in a line of standard error
    with (folder / "imports").open("w") as imports:
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=imports, text=True, env=environment, check=False
        )
    assert done.returncode == 0, (folder / "imports").read_text()[-5000:]
    return folder / "runs" / "default-1", done.stdout


def lines(run, split):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["split"] == split]


def test_held_out_accuracy_rises_from_a_tie_to_over_nine_in_ten(default):
    run, _ = default
    validations = lines(run, "validation-default")
    assert validations[0]["accuracy"] == 0.5
    assert validations[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert validations[-1]["accuracy"] > 0.9


def test_the_output_has_every_section(default):
    _, printed = default
    for words in (
        "prompt overlap with training 0, 8-gram overlap of completions",
        "Settings that affect the result",
        "Audit: 8 completions of up to",
        "Validation before training",
        "step 1/",
        "Exported model",
        "Done. Everything is in runs/default-1",
        "Next: a real model, then your own pairs (JSONL with prompt, chosen, rejected) as data.train.",
    ):
        assert words in printed
    assert "\x1b[" not in printed  # no colours, no bar, where there is no terminal


# Packages and parts of torch that take long to import, for settings that the default run does not use.
UNUSED = (
    *(
        "wandb",
        "mlflow",
        "tensorboard",
        "torch.utils.tensorboard",
        "peft",
        "bitsandbytes",
        "gguf",
        "fla",
        "liger_kernel",
    ),
    *(
        "trl",
        "ray",
        "vllm",
        "lm_eval",
        "datasets",
        "tensorflow",
        "jax",
        "torch._inductor.compile_fx",
        "torch._inductor.codecache",
    ),
)


def test_nothing_is_imported_for_settings_that_are_not_used(default):
    run, _ = default
    lines = (run.parent.parent / "imports").read_text(encoding="utf-8").splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert {"torch", "transformers", "tandem.training.trainer"} <= imported
    # A failed import has a line too, but none for a submodule.
    parts = {
        one: any(name.startswith(f"{one}.") or (name == one and "." in one) for name in imported) for one in UNUSED
    }
    assert [one for one, is_imported in parts.items() if is_imported] == []


def test_the_run_directory_holds_the_documented_files(default):
    run, _ = default
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "rejects.jsonl",
        "verdicts.json",
        "checkpoints/best",
        "checkpoints/latest",
        "model",
        "report.html",
        "setup.json",
        "pairs.json",
    ):
        assert (run / name).exists(), name
    assert (run / "rejects.jsonl").read_text() == ""


def test_a_training_record_holds_every_documented_metric(default):
    run, _ = default
    always = {*METRICS, "accuracy_chosen_longer", "accuracy_chosen_shorter", "kl_per_token", "chosen_below_reference"}
    always |= {"accuracy_strict", "logratios_chosen_mean", "logratios_rejected_mean", "logratios_accuracy"}
    assert set(lines(run, "train")[0]) == always | {
        "step",
        "split",
        "grad_norm",
        "lr",
        "num_pairs",
        "num_tokens",
        "pack_fill",
        "step_seconds",
        "loader_wait_seconds",
        "pairs_per_second",
        "memory_gib",
        "tokens_per_second",
    }


def test_own_data_with_other_field_names_and_messages_trains(tmp_path):
    rows = [
        {
            "question": [{"role": "user", "content": f"Say {i}"}],
            "good": f"{i}",
            "bad": [{"role": "assistant", "content": "no"}],
        }
        for i in range(6)
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ["data.train.prompt_key=question", "data.train.chosen_key=good", "data.train.rejected_key=bad"]
    arguments = ["train", "-q", "data.train.data_path=own.jsonl", *keys]
    arguments += ["policy.train_global_batch_size=3", "policy.scheduler=null"]
    done = tandem_in(tmp_path, tmp_path / "output", arguments, seconds=300, memory=2**34)
    assert done == Ended(0, "Done. Everything is in runs/tandem-1\n", "")
    assert len(lines(tmp_path / "runs" / "tandem-1", "train")) == 2

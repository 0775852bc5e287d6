"""`tandem plan`: what a run needs, and what to change if it does not fit."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from shapes import model_folder

from tandem.config.load import load_config
from tandem.config.schema import Config
from tandem.errors import ConfigError
from tandem.planning import estimate
from tandem.planning.cards import TABLE, card_of_device, find_card, larger_cards
from tandem.planning.estimate import num_validations
from tandem.planning.plan import plan
from tandem.planning.records import RunEstimate
from tandem.planning.show import duration, show
from tandem.planning.speed import Range
from tandem.planning.suggestions import CHANGES, _with_rate_of_adapters
from tandem.report.reporter import Reporter

GIB = 2**30
Usage = namedtuple("Usage", "total used free")
RESULTS = Path(__file__).parents[3] / "benchmarks/results"
# Batches that fill rows of 16,384 tokens with the embedded pairs.
LARGE = ["data.train=embedded", "policy.train_global_batch_size=256"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("shapes")
    return {name: str(model_folder(name, folder / name)) for name in ("qwen2.5-1.5b", "llama3.1-8b")}


def planned(*overrides: str, **options) -> RunEstimate:
    return plan(load_config(None, list(overrides)), **options)


def shown(found: RunEstimate, capsys) -> str:
    show(found, Reporter("normal"))
    return capsys.readouterr().out


MEASURED = [
    ("qwen2.5-1.5b", 16384, [], 61.3),
    ("qwen2.5-1.5b", 16384, ["policy.weights=bfloat16_stochastic", "policy.optimizer.state_dtype=bfloat16"], 49.8),
    ("llama3.1-8b", 8192, ["policy.weights=bfloat16_stochastic", "policy.optimizer.state_dtype=bfloat16"], 115.6),
    ("qwen2.5-1.5b", 16384, ["policy.activation_checkpointing=selective"], 41.2),
    ("qwen2.5-1.5b", 16384, ["policy.activation_checkpointing=full"], 30.7),
    ("qwen2.5-1.5b", 16384, ["policy.optimizer.state_dtype=int8"], 52.2),
    ("llama3.1-8b", 8192, ["policy.lora.enabled=true"], 54.5),
]


def test_the_measured_memory_is_that_of_the_committed_results():
    files = [RESULTS / f"{name}.jsonl" for name in ("train", "versus_trl", "adapters")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    peaks = [(one.get("peak_gib") or one["tandem"]["peak_gib"]) for one in map(json.loads, lines)]
    assert {gib for *_, gib in MEASURED} <= set(peaks)


@pytest.mark.parametrize(("shape", "length", "settings", "peak"), MEASURED)
def test_the_memory_is_within_5_percent_of_measured_peaks(shape, length, settings, peak, models):
    rows = f"policy.packing.pack_length={length}"
    found = planned(*LARGE, f"policy.model_name={models[shape]}", rows, *settings, gpu="h200-141gb")
    assert found.rows.length == length
    assert found.memory.total / GIB == pytest.approx(peak, rel=0.05)
    assert found.memory.verdict == "fits"
    assert found.suggestions == ()


def test_rows_that_no_pack_fills_are_said_to_be_shorter(capsys):
    """A batch of 8 pairs of up to 150 tokens is one pack, which takes the shortest row length: a quarter of 16,384 tokens."""
    rows = ["data.train=embedded", "policy.packing.pack_length=16384", "policy.train_global_batch_size=8"]
    found = planned(*rows, "dpo.max_num_steps=2", gpu="h200-141gb")
    assert (found.rows.length, found.rows.limit) == (4096, 16384)
    said = " ".join(shown(found, capsys).split())
    assert "rows 16,384 tokens; the packs need rows of at most 4,096 tokens; " in said
    assert "activations in rows of 4,096 tokens" in said
    full = planned(*LARGE, "policy.packing.pack_length=16384", "dpo.max_num_steps=1", gpu="h200-141gb")
    assert "the packs need" not in shown(full, capsys)


def test_a_run_that_does_not_fit_gets_suggestions_whose_commands_give_the_same_numbers(models, capsys):
    found = planned(*LARGE, f"policy.model_name={models['llama3.1-8b']}", gpu="h100-80gb", price_per_hour=2.5)
    assert found.memory.verdict == "does not fit"
    changes = [one.change for one in found.suggestions]
    # Of 8 bytes per weight in the states; for a checkpoint, as much again, and 2 for the weights.
    host = f"{18 * found.num_weights / GIB:,.1f} GiB of host memory"
    assert changes[:3] == [
        f"bfloat16 weights, optimizer states in host memory; needs {host}",
        "bfloat16 weights, 8-bit states, activations computed again",
        "adapters only (LoRA), 10 times the learning rate",
    ]
    assert "policy.lora.enabled=true policy.optimizer.kwargs.lr=5e-05" in found.suggestions[2].command
    assert changes[-1] == "b200-180gb"
    for one in found.suggestions:
        words = shlex.split(one.command)
        command = words.index("plan" if "plan" in words else "train")
        gpu = words[words.index("--gpu") + 1] if "--gpu" in words else "h100-80gb"
        overrides = [word for word in words[command + 1 :] if "=" in word]
        again = planned(*overrides, gpu=gpu)
        assert (again.memory, again.time, again.memory.verdict) == (one.memory, one.time, "fits")
    assert "--price-per-hour" not in found.suggestions[-1].command  # another card has another price
    assert found.suggestions[-1].cost is None
    first = found.suggestions[0]
    assert first.time is not None and first.cost is not None
    assert first.cost.high == pytest.approx(first.time.total.high / 3600 * 2.5)
    said = shown(found, capsys)
    assert "memory       " in said
    assert "GiB: does not fit\n" in said
    assert "\nWith each of these changes it fits:\n- bfloat16 weights, optimizer states in host memory; needs" in said
    assert f", cost {first.cost.low:.2f} to {first.cost.high:.2f}\n" in said
    assert said.count(", cost ") == 3
    assert "\ntime " not in said  # of a run that cannot start
    read = json.loads(json.dumps(found.as_dict()))
    assert (read["memory"]["verdict"], read["memory"]["total"]) == ("does not fit", found.memory.total)
    assert [one["memory"]["verdict"] for one in read["suggestions"]] == ["fits"] * len(found.suggestions)


@pytest.mark.slow
def test_shorter_rows_are_suggested_first_where_they_help(models):
    long = [*LARGE, f"policy.model_name={models['qwen2.5-1.5b']}", "policy.packing.pack_length=32768"]
    found = planned(*long, gpu="h100-80gb")
    assert found.memory.verdict == "does not fit"
    assert found.rows.longest_that_fits is not None
    first = found.suggestions[0]
    assert first.change == f"rows of {found.rows.longest_that_fits:,} tokens"
    assert first.memory.total <= first.memory.usable
    # A block of 128 tokens more would not fit.
    per_token = found.memory.activations / found.rows.length
    assert first.memory.total + 128 * per_token > first.memory.usable


@pytest.mark.slow
def test_a_model_that_no_setting_fits_gets_a_card_and_settings(models):
    found = planned(
        *LARGE, f"policy.model_name={models['llama3.1-8b']}", "policy.packing.pack_length=65536", gpu="l4-24gb"
    )
    assert all("--gpu" in one.command for one in found.suggestions)
    assert found.suggestions


def test_what_needs_a_gpu_is_not_suggested_for_a_cpu(models, monkeypatch):
    monkeypatch.setattr(estimate, "this_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(estimate, "device_memory", lambda device: 20 * GIB)
    found = planned("data.train=embedded", f"policy.model_name={models['llama3.1-8b']}")
    assert found.memory.verdict == "does not fit"
    commands = [one.command for one in found.suggestions if "--gpu" not in one.command]
    assert not any("quantization" in one or "offload" in one for one in commands)


def test_a_price_is_refused_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as refused:
        planned("dpo.max_num_steps=2", price_per_hour=4.0)
    assert str(refused.value) == (
        "--price-per-hour 4 has no effect without a GPU: the time of a run on a CPU is not estimated. Add --gpu NAME, or leave "
        "it out."
    )


def test_the_cost_is_the_price_times_the_hours(models):
    found = planned(*LARGE, f"policy.model_name={models['qwen2.5-1.5b']}", gpu="h200-141gb", price_per_hour=3.6)
    assert found.time is not None
    total = found.time.total
    assert found.cost is not None
    assert (found.cost.low, found.cost.high) == pytest.approx((total.low / 1000, total.high / 1000))


def test_two_epochs_train_twice_as_long_and_compute_the_reference_once(models):
    shape = f"policy.model_name={models['qwen2.5-1.5b']}"
    one, two = (planned(*LARGE, shape, f"dpo.max_num_epochs={n}", gpu="h200-141gb") for n in (1, 2))
    assert one.time is not None and two.time is not None
    assert two.num_tokens == 2 * one.num_tokens
    assert two.time.training.low == pytest.approx(2 * one.time.training.low)
    assert two.time.reference == one.time.reference


def test_a_live_reference_needs_a_frozen_copy_of_the_weights(models):
    shape = f"policy.model_name={models['qwen2.5-1.5b']}"
    cached, live = (planned(*LARGE, shape, f"reference.mode={mode}", gpu="h200-141gb") for mode in ("cached", "live"))
    assert live.memory.total - cached.memory.total == 2 * cached.num_weights
    assert live.time is not None and live.time.reference == Range(0, 0)


def test_without_a_gpu_memory_is_that_of_the_machine_and_time_is_not_estimated(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = planned()
    assert (found.card, found.time, found.cost, found.memory.verdict) == (None, None, None, "fits")
    assert (
        "time         not estimated without a GPU: speeds of CPUs differ too much. Name a card with --gpu\n"
        in shown(found, capsys)
    )


def test_checkpoints_and_the_export_need_disk_space(models, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 1024 * 1024))
    found = planned("checkpointing.save_period=2", "dpo.max_num_steps=10", "checkpointing.keep_top_k=1")
    # 5 are saved; the best, the latest and the one that is being written exist at a time
    assert found.disk.num_checkpoints == 3
    assert found.disk.checkpoint == 12 * found.num_weights
    assert found.disk.export == 4 * found.num_weights
    assert "<0.1 GiB are free: not enough. Free some space, or set run.dir to another disk\n" in shown(found, capsys)
    smaller = planned("checkpointing.save_optimizer=false", "dpo.max_num_steps=1")
    assert (smaller.disk.checkpoint, smaller.disk.num_checkpoints) == (4 * found.num_weights, 1)


def test_validations_are_counted_as_in_training():
    config = load_config(None, ["dpo.val_at_start=true", "dpo.val_at_end=true"]).config
    assert num_validations(config, num_steps=20, val_period=10) == 3  # before, after steps 10 and 20
    assert num_validations(config, num_steps=25, val_period=10) == 4
    assert num_validations(config, num_steps=25, val_period=0) == 2


def test_weights_of_a_hub_model_are_not_downloaded(models, monkeypatch):
    asked = []

    def download(name, revision, allow_patterns):
        asked.append(allow_patterns)
        return models["qwen2.5-1.5b"]

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = planned(*LARGE, "policy.model_name=org/name", gpu="h200-141gb")
    assert found.model == "org/name"
    assert len(asked) == 1 and "*.json" in asked[0] and "*.safetensors" not in asked[0]


# Cards


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
    ],
)
def test_a_card_of_this_machine_is_known_by_the_name_that_the_driver_reports(reported, name):
    found = card_of_device(reported, 123)
    assert (found.memory_bytes, found.tflops) == (123, find_card(name).tflops)
    assert found.is_measured == (name == "h200-141gb")


def test_the_speed_of_an_unknown_card_is_unknown():
    assert card_of_device("NVIDIA GeForce GT 710", 1).tflops is None


def test_larger_cards_come_smallest_first():
    found = [card.memory_bytes for card in larger_cards(find_card("h100-80gb").memory_bytes)]
    assert found == sorted(found) and len(found) == 3
    assert [TABLE[name][0] for name in TABLE] == sorted(gib for gib, _, _ in TABLE.values())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [((0, 0.4), "under 1 s"), ((20, 55), "20 to 55 s"), ((100, 300), "1.7 to 5 min"), ((9000, 14400), "2.5 to 4 h")],
)
def test_times_are_shown_in_the_unit_of_the_longer_one(seconds, text):
    assert duration(Range(*seconds)) == text


# Bad input: one message, and nothing heavy is imported on the way

WATCHED = """
import sys
from tandem.cli.main import main
try:
    main()
finally:
    print("imported:", ", ".join(name for name in ("torch", "transformers") if sys.modules.get(name)), file=sys.stderr)
"""
CARDS = ", ".join(TABLE)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--gpu", "h1000"], 2, f"--gpu h1000: unknown card. Known cards: {CARDS}."),
        (
            ["--price-per-hour=-1"],
            2,
            "--price-per-hour -1: not a price. Give a number that is not negative, such as 2.50.",
        ),
        (
            ["--price-per-hour=nan"],
            2,
            "--price-per-hour nan: not a price. Give a number that is not negative, such as 2.50.",
        ),
        (
            ["policy.model_name=./no", "data.train=embedded"],
            2,
            "policy.model_name = ./no: no such directory. Check the path.",
        ),
        (
            ["data.train.data_path=no.jsonl"],
            3,
            "no.jsonl: no such file or folder, and not the name of a hub dataset (org/name).",
        ),
    ],
)
def test_bad_input_is_refused_in_one_message_before_heavy_imports(arguments, code, message, tmp_path):
    command = [sys.executable, "-c", WATCHED, "plan", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=dict(os.environ), timeout=120)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr == f"tandem: error: {message}\nimported: \n"


def test_the_command_prints_the_estimate_alone_on_standard_output(monkeypatch, capsys):
    from tandem.cli import main as cli

    arguments = ["plan", "dpo.max_num_steps=2", "--gpu", "h200-141gb", "--json"]
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert ended.value.code in (None, 0)
    found = json.loads(said.out)
    assert (found["num_steps"], found["card"]["name"], found["memory"]["verdict"]) == (2, "h200-141gb", "fits")
    assert said.err == "Loading torch and transformers (a few seconds)\n"


@pytest.mark.parametrize("enabled", [False, True])
def test_a_suggestion_of_adapters_sets_their_learning_rate_unless_they_are_enabled(enabled):
    policy = Config.model_validate(
        {"policy": {"lora": {"enabled": enabled}, "optimizer": {"kwargs": {"lr": 3e-6}}}}
    ).policy
    changed = [_with_rate_of_adapters(change, policy) for change in CHANGES]
    rates = [change.keys.get("policy.optimizer.kwargs.lr") for change in changed]
    assert rates == ([None] * len(CHANGES) if enabled else [None] * 12 + [3e-5] * 3)
    assert all(
        ("10 times the learning rate" in change.words) == (rate is not None)
        for change, rate in zip(changed, rates, strict=True)
    )

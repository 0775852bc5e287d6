"""Every benchmark starts. Those that can run on a CPU run at a tiny size; the others print what they need."""

import json
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from killing import Ended
from models import MODEL
from scripts import ROOT, run_script
from transformers import AutoModelForCausalLM

from tandem.config.keys import with_table
from tandem.embedded.files import TRAIN

# Imported by the others; the rest are commands.
MODULES = {"alternatives", "drawing", "made_model", "options", "random_weights", "trl_python"}
COMMANDS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in MODULES)
NEEDED = "trl==1.16.0 liger-kernel==0.8.5"


@pytest.fixture
def bench(tmp_path):
    def run(name: str, *arguments: object, **environment: str) -> Ended:
        return run_script(f"benchmarks/{name}.py", *map(str, arguments), folder=tmp_path, **environment)

    return run


def last_line(ended: Ended, *codes: int) -> dict:
    """The JSON object in the last line of the output. Checks the exit code, by default 0: the targets were met."""
    assert ended.code in (codes or (0,)), ended
    return json.loads(ended.out.splitlines()[-1])


@pytest.fixture
def token_pairs(tmp_path) -> Path:
    """48 pairs as token ids: prompts of 6 to 8 tokens, completions of 3 to 7."""
    rows = [
        {
            "prompt_ids": list(range(10, 16 + n % 3)),
            "chosen_ids": list(range(20, 23 + n % 5)),
            "rejected_ids": list(range(30, 34 + n % 4)),
        }
        for n in range(48)
    ]
    return written(tmp_path / "ids.jsonl", rows)


@pytest.fixture
def pairs(tmp_path) -> Path:
    """Some of the embedded pairs."""
    return written(tmp_path / "pairs.jsonl", [json.loads(line) for line in TRAIN.read_text().splitlines()[:80]])


def written(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_the_benchmark(bench, name):
    ended = bench(name, "--help")
    assert (ended.code, ended.err) == (0, ""), ended
    assert ended.out.startswith(f"usage: {name}.py [-h]")
    assert f"python benchmarks/{name}.py" in ended.out


# Tiny runs


def test_adapters(bench):
    found = last_line(bench("adapters", "--shape", "tiny", "--tokens", 8, "--rank", 2, "--repeats", 1))["found"]
    assert set(found) == {"q, o", "k, v", "gate, up", "down"}
    assert max(row["difference"] for row in found.values()) < 1e-5


def test_generate(bench):
    found = last_line(bench("generate", "--num-prompts", 3, "--max-new-tokens", 2, "--batch-size", 2))
    assert found["same"] == {"plain": 1.0, "one": 1.0, "padded": 1.0}
    assert set(found["tokens_per_second"]) == set(found["same"])


def test_head(bench):
    sizes = ("--tokens", 16, "--hidden", 8, "--vocabulary", 64, "--repeats", 1)
    found = last_line(bench("head", *sizes))["found"]
    assert {"tandem", "full logits"} <= set(found)
    assert found["full logits"]["largest_difference"] < 0.1


@pytest.mark.parametrize(
    "options",
    [
        ("--pack-length", 128, "--reference"),
        pytest.param(
            ("--pack-length", 128, "--weights", "bfloat16_stochastic", "--state-dtype", "int8", "--float8"),
            marks=pytest.mark.slow,  # bfloat16 products on a CPU
        ),
        ("--pack-length", 128, "--lora", 2, "--no-sharing", "--checkpointing", "selective", "--deterministic"),
        ("--mode", "none", "--longest", 64),
        ("--pack-length", 128, "--shape", "tiny-moe"),
        pytest.param(
            ("--pack-length", 128, "--lora", 2, "--quantization", "nf4", "--checkpointing", "full"),
            marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
        ),
    ],
)
def test_train(bench, token_pairs, options):
    result = last_line(bench("train", "--data", token_pairs, "--pairs", 4, "--steps", 2, *options))
    assert result["pairs_per_second"] > 0
    assert 0.1 < result["pack_fill"] <= 1
    assert (result["reference_pairs_per_second"] is None) == ("--reference" not in options)


def test_train_times_its_steps_several_times(bench, token_pairs):
    given = ("--data", token_pairs, "--pairs", 4, "--steps", 2, "--pack-length", 128, "--packs", 2)
    result = last_line(bench("train", *given, "--repeats", 3))
    assert len(result["each"]) == 3
    assert result["pairs_per_second"] == sorted(result["each"])[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--quantization", "nf4"], "--quantization: quantised weights are frozen; give --lora too"),
        (["--limit-gib", 8], "--limit-gib is of a GPU, and there is none"),
        (["--repeats", 0], "--steps, --repeats, --pairs and --pack-length are at least 1, --completions at least 2"),
    ],
)
def test_train_refuses_what_it_cannot_time(bench, given, message):
    ended = bench("train", *given)
    assert (ended.code, ended.err.splitlines()[-1]) == (2, f"train.py: error: {message}")


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed here")
def test_train_needs_bitsandbytes_for_quantised_weights(bench):
    message = "--quantization nf4: the package bitsandbytes is not installed: pip install bitsandbytes.\n"
    assert bench("train", "--lora", 2, "--quantization", "nf4") == Ended(1, "", message)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_train_quantises_no_recurrent_layers(bench):
    message = "--quantization nf4: tiny-granite4 has recurrent layers, whose random weights are not made here."
    ended = bench("train", "--lora", 2, "--quantization", "nf4", "--shape", "tiny-granite4")
    # Without the package kernels, bitsandbytes writes a line of its own first.
    assert (ended.code, ended.out, ended.err.splitlines()[-1]) == (1, "", message)


def test_train_generates_its_pairs(bench):
    lengths = ("--prompt-mean", 6, "--completion-mean", 5, "--longest", 64, "--completions", 3)
    result = last_line(bench("train", "--pairs", 6, "--steps", 1, "--pack-length", 256, *lengths, "--single-pairs"))
    assert result["pairs_per_second"] > 0


def test_bare_loop(bench, token_pairs):
    given = ("--data", token_pairs, "--pairs", 4, "--steps", 2, "--pack-length", 128)
    result = last_line(bench("bare_loop", *given))
    # The reference is zero, and the random model likes both completions about as well.
    assert len(result["losses"]) == 4
    assert all(0 < loss < 20 for loss in result["losses"])


def test_evaluate(bench, tmp_path):
    given = ("--model", MODEL, "--pairs", 6, "--words", 5, "--folder", tmp_path / "made", "--repeats", 2)
    result = last_line(bench("evaluate", *given))
    # The model is its own reference, so every pair is a tie.
    assert (result["num_pairs"], result["tandem"]["accuracy"]) == (6, 0.5)
    assert result["tandem"]["pairs_per_second"] > 0
    assert len(result["tandem"]["seconds"]) == 2


def test_float8(bench, pairs):
    result = last_line(bench("float8", "--model", MODEL, "--data", pairs, "--preferences", 4))
    # Two cuts of a batch differ by rounding alone.
    assert set(result["differences"]) == {"bfloat16", "products in float8"}
    assert all(0 <= difference < 1 for values in result["differences"].values() for difference in values)


def test_plots(bench, tmp_path):
    common = {"benchmark": "train", "shape": "tiny", "weights": "float32", "lora": 0, "checkpointing": "none"}
    time = {"attention": 0.25, "matrix products": 0.5, "idle": 0.25, "seconds": 1.0}
    runs = [{**common, "pack_length": n, "pairs_per_second": n / 100, "peak_gib": n / 1000} for n in (1024, 2048)]
    results = written(tmp_path / "results.jsonl", [*runs, {**runs[0], "where_time_goes": time}])
    assert bench("plots", results, "--lengths", "lengths.svg", "--step", "step.svg") == Ended(0, "", "")
    for name in ("lengths.svg", "step.svg"):
        assert ElementTree.parse(tmp_path / name).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_chart_of_the_readme_is_drawn_from_the_committed_numbers(bench, tmp_path):
    numbers = ROOT / "benchmarks/results/versus_trl.jsonl"
    assert bench("plots", numbers, "--ratios", "ratios.svg") == Ended(0, "", "")
    assert (tmp_path / "ratios.svg").read_text() == (ROOT / "docs/versus-trl.svg").read_text()


def test_the_curve_of_the_embedded_default_is_drawn_from_the_committed_run(bench, tmp_path):
    numbers = ROOT / "benchmarks/results/embedded_run.jsonl"
    assert bench("plots", numbers, "--curve", "curve.svg") == Ended(0, "", "")
    assert (tmp_path / "curve.svg").read_text() == (ROOT / "docs/curve.svg").read_text()


def test_a_curve_needs_the_metrics_of_a_run(bench, tmp_path):
    results = written(tmp_path / "results.jsonl", [{"benchmark": "train"}])
    message = "no training steps or no validation: this needs metrics.jsonl of a run\n"
    assert bench("plots", results, "--curve", "curve.svg") == Ended(1, "", message)


def test_tables_of_the_benchmarks_page_match_the_committed_results(bench):
    page = (ROOT / "docs/benchmarks.md").read_text()
    for part in bench("tables").out.rstrip("\n").split("\n\n"):
        name, _, table = part.partition("\n")
        assert with_table(page, name, table) == page


@pytest.mark.slow
def test_memory_tables_of_the_pages_match_the_estimate(bench):
    ended = bench("fits")
    tables = (("fits", "choosing"), ("estimate", "choosing"), ("eight-billion", "memory"))
    for (name, where), table in zip(tables, ended.out.rstrip("\n").split("\n\n"), strict=True):
        page = (ROOT / f"docs/{where}.md").read_text()
        assert with_table(page, name, table) == page


def test_plots_refuse_results_of_another_benchmark(bench, tmp_path):
    results = written(tmp_path / "results.jsonl", [{"benchmark": "train"}])
    assert bench("plots", results, "--ratios", "ratios.svg") == Ended(1, "", "no line is of versus_trl\n")


ALGORITHMS = ["first_fit_decreasing", "first_fit_shuffle", "exact_fit_decreasing", "plain_first_fit_loop"]


def test_packing(bench):
    found = last_line(bench("packing", "--counts", 5000))
    assert [row["algorithm"] for row in found["rows"]] == ALGORITHMS
    # First fit, the largest first, gives the same bins however it is computed.
    assert found["rows"][0]["bins"] == found["rows"][3]["bins"]


@pytest.mark.slow
def test_packing_reads_a_file(bench, pairs):
    # First fit in random order leaves 2 % of such rows empty, over what a set of the usual lengths does.
    given = ("--counts", 5000, "--capacity", 2048, "--data", pairs, "--tokenizer", MODEL)
    found = last_line(bench("packing", *given), 0, 1)
    assert [row["algorithm"] for row in found["rows"]] == ALGORITHMS
    assert all(row["fill"] > 0.95 for row in found["rows"])


@pytest.mark.slow
def test_hand_written_parts(bench, tmp_path):
    sizes = ("--array-mb", 0.01, "--pickled-tokens", 5000, "--results", "results.jsonl")
    found = last_line(bench("hand_written_parts", "--parts", "plain_pickle", *sizes))["parts"][0]["found"]
    # One pack of three pairs; each attack is refused by tandem, and one ends the process that uses an allow-list.
    assert [found[reader]["file"]["objects"] for reader in ("tandem", "allow-list")] == [1, 1]
    attacks = {name: one["outcome"] for name, one in found["tandem"].items() if name != "file"}
    assert len(attacks) == 7
    assert all(outcome.startswith("Refused: ") for outcome in attacks.values()), attacks
    assert found["allow-list"]["a key of 1,000,000 nested tuples"]["outcome"] == "ended by SIGSEGV"
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["part"] == "plain_pickle"


def test_scale(bench, tmp_path):
    result = last_line(bench("scale", "--workers", 8, "--plot", "scale.svg"))
    assert {row["method"] for row in result["rows"]} >= {"batch", "padded"}
    assert ElementTree.parse(tmp_path / "scale.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


# These start processes that import torch, which takes longer than all of the above.

FEW = ("policy.train_global_batch_size=4", "policy.max_total_sequence_length=512")


@pytest.mark.slow
def test_host_memory(bench):
    given = ("--shape", "tiny", "--vocabulary", 2048, "--folder", "host-memory")
    result = last_line(bench("host_memory", *given))
    assert [set(rank) >= {"load", "checkpoint", "export"} for rank in result["ranks"]] == [True, True]


@pytest.mark.slow
def test_prepare(bench):
    # Of so few rows most of the time is the start of processes, and the targets are missed.
    result = last_line(bench("prepare", "--tokenizer", MODEL, "--rows", 300), 0, 1)
    assert result["tokens"]["tandem"] > 300 * 10
    assert set(result["ratios"]) == {"versus_bare"}


@pytest.mark.slow
def test_machines(bench):
    result = last_line(bench("machines", "--tokenizer", MODEL, "--rows", 3000))
    assert result["same_bytes"]
    assert result["tokens"] > 3000 * 10


@pytest.mark.slow
def test_hand_written_parts_with_their_libraries(bench):
    """A library that is not installed is reported, and the others are measured."""
    libraries = ("word_cache", "pool", "json_array", "hub", "plain_pickle", "pinned_memory")
    own = ("--tokenizer", MODEL, "--rows", 100, "--array-mb", 0.1, "--pickled-tokens", 5000, "--shapes", "tiny")
    ended = bench("hand_written_parts", "--parts", *libraries, *own, "--seconds", 60)
    found = {part["part"]: part["found"] for part in last_line(ended)["parts"]}
    assert tuple(found) == libraries
    assert found["word_cache"]["tandem"]["sha256"] == found["word_cache"]["tokenizers"]["sha256"]
    assert (found["pool"]["tandem"]["hangs"]["item"], found["pool"]["tandem"]["hangs"]["row"]) == (5, 3)
    assert found["pool"]["tandem"]["parent killed"]["left"] == 0
    assert (find_spec("ijson") is None) == (found["json_array"].get("ijson") == "not installed")
    assert (find_spec("datasets") is None) == (found["hub"].get("datasets") == "not installed")


@pytest.mark.slow
def test_a_tracker_whose_server_never_answers(bench):
    (part,) = last_line(bench("hand_written_parts", "--parts", "trackers", "--patience", 15))["parts"]
    for name, found in part["found"].items():
        assert (find_spec(name) is None) == (found == "not installed")
        if found != "not installed":
            # The steps of a run go on while its tracker's own process waits; in the loop they wait with it.
            assert "steps_seconds" in found["child process"]
            assert "steps_seconds" not in found["in the loop"]


def test_hand_written_parts_needs_a_tokenizer_for_two_of_them(bench):
    ended = bench("hand_written_parts", "--parts", "pool")
    assert (ended.code, ended.err.splitlines()[-1]) == (
        2,
        "hand_written_parts.py: error: word_cache and pool need --tokenizer",
    )


@pytest.mark.slow
def test_saving(bench, pairs, tmp_path):
    own = ("--tokenizer", MODEL, "--data", pairs, "--folder", tmp_path, "--steps", 2)
    result = last_line(bench("saving", *own, "--shape", "tiny", "--more", *FEW), 0, 1)
    assert {name: len(steps) for name, steps in result["times"].items()} == {"before": 2, "beside": 2}


@pytest.mark.slow
def test_start(bench, pairs, tmp_path):
    own = (
        "--tokenizer",
        MODEL,
        "--data",
        pairs,
        "--folder",
        tmp_path,
        "--times",
        2,
        "--results",
        tmp_path / "starts.jsonl",
    )
    result = last_line(bench("start", *own, "--shape", "tiny", "--more", *FEW))
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [one["caches"] for one in starts] == ["empty", "warm"]
    assert [one["seconds"] for one in starts] == result["seconds"]
    for one in starts:
        assert "imports and settings" in one["phases"]
        # Phases begin when the process imports tandem, and short ones are not listed. The last line printed ends them.
        assert 0 < sum(one["phases"].values()) <= one["lines"][-1][0] + 0.5
        assert any(text.startswith("step 1/") for _, text in one["lines"])


@pytest.fixture
def benchmarks_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_of_experts_only_those_that_a_token_is_sent_to_count_as_useful(benchmarks_on_the_path):
    train, made = import_module("train"), import_module("made_model")
    shape = made.SHAPES["tiny-moe"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made.config_of("tiny-moe"))
    attention = 128 * (128 + 64 + 64 + 128) + 2 * 32  # with norms of queries and keys
    layer = attention + 2 * (3 * 128 * 64) + 8 * 128 + 2 * 128  # two of eight experts, the router, two norms
    assert train.num_active_weights(model, shape) == 2 * layer


@pytest.mark.slow
def test_limited_runs_the_command_and_reads_its_steps(benchmarks_on_the_path, tmp_path):
    limited = import_module("limited")
    given = [f"run.dir={tmp_path}/run", "policy.max_total_sequence_length=256", *limited.SETTINGS]
    assert limited.run_tandem([*given, "policy.train_global_batch_size=2", "dpo.max_num_steps=2"]) == 0
    assert [one["step"] for one in limited.steps_of(tmp_path / "run")] == [1, 2]
    assert limited.run_tandem(["no.such_key=1"]) == 2
    assert limited.steps_of(tmp_path / "none") == []


@pytest.mark.slow
def test_precision(bench, pairs, tmp_path):
    chosen = ("--precisions", "float32", "float32, products in float8", "--seeds", 1)
    more = ("--more", *FEW, "dpo.max_num_epochs=1", "dpo.max_num_steps=1")
    ended = bench("precision", "--model", MODEL, "--data", pairs, *chosen, "--folder", tmp_path / "runs", *more)
    found = last_line(ended)["pairs.jsonl"]
    assert {name: [run["pairs"] for run in runs] for name, runs in found.items()} == {
        "float32": [11],
        "float32, products in float8": [11],
    }


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [(), ("--lora", 4, "--rate", "1e-4")], ids=["all weights", "adapters"])
def test_curve_of_tandem(bench, pairs, tmp_path, adapters):
    own = ("--model", MODEL, "--data", pairs, "--systems", "tandem", "--seeds", 1, "--steps", 2, *adapters)
    ended = bench("curve", *own, "--folder", tmp_path, "--plot", "curve.svg")
    (points,) = last_line(ended)["curves"]["tandem"]
    assert [point["step"] for point in points] == [0, 2]
    assert ElementTree.parse(tmp_path / "curve.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


# What cannot run here says why


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("attention", [], "attention.py times kernels of a GPU, and there is none.\n"),
        (
            "memory",
            ["--tokenizer", "none", "--data", "none"],
            "memory.py: error: the memory is a GPU's, and there is none\n",
        ),
        (
            "versus_trl",
            [],
            "versus_trl.py: error: TRL is timed with Liger's kernels, which need a GPU, and there is none\n",
        ),
        ("limited", ["--limit-gib", 8], "limited.py: error: --limit-gib is of a GPU, and there is none\n"),
        ("pinned_memory", [], "pinned_memory.py: error: memory is pinned for a GPU, and there is none\n"),
        ("train", ["--profile"], "train.py: error: --profile is of a GPU, and there is none\n"),
    ],
)
def test_without_a_gpu_the_message_says_so(bench, name, arguments, message):
    ended = bench(name, *arguments)
    assert ended.code in (1, 2)
    assert ended.out == ""
    assert ended.err.endswith(message)
    assert "Traceback" not in ended.err


@pytest.fixture
def python_without_trl(tmp_path) -> Path:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'datasets'\" >&2\nexit 1\n")
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("parity_trl", []),
        ("trl_trajectory", []),
        ("packing", []),
        ("prepare", ["--tokenizer", MODEL]),
        ("curve", ["--model", MODEL, "--data", TRAIN]),
        ("evaluate", []),
    ],
)
def test_an_interpreter_without_trl_is_reported(bench, python_without_trl, name, arguments):
    ended = bench(name, *arguments, "--trl-python", python_without_trl)
    assert ended == Ended(
        1,
        "",
        f"{python_without_trl}: ModuleNotFoundError: No module named 'datasets'. In an environment of its own: "
        f"pip install {NEEDED}; then --trl-python PYTHON.\n",
    )


@pytest.mark.skipif(find_spec("trl") is not None or find_spec("datasets") is not None, reason="TRL is installed here")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("trl_steps", ["--shape", "tiny", "--data", "none"]),
        ("trl_evaluate", ["--model", "none", "--reference", "none", "--data", "none"]),
        (
            "trl_curve",
            [*("--began", 0, "--model", "none", "--train", "none", "--held-out", "none"), "--settings", "{}"],
        ),
    ],
)
def test_a_trl_script_reports_that_its_interpreter_has_no_trl(bench, name, arguments):
    message = (
        f"{sys.executable}: not installed: datasets, trl. Run this with a Python that has them: pip install {NEEDED}.\n"
    )
    assert bench(name, *arguments) == Ended(1, "", message)


@pytest.mark.skipif(find_spec("unsloth") is not None, reason="Unsloth is installed here")
def test_without_unsloth_the_message_says_what_to_install(bench):
    ended = bench("unsloth_steps", "--shape", "tiny", "--data", "none")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"{sys.executable}: not installed: unsloth")
    assert ended.err.endswith(
        "Run this with a Python that has them, in an environment of its own: pip install unsloth.\n"
    )


def test_unsloth_gets_the_adapters_and_batches_of_the_other_sides(benchmarks_on_the_path, token_pairs):
    steps = import_module("unsloth_steps")
    common = ["--shape", "tiny", "--data", str(token_pairs), "--lora", "4", "--pairs", "8", "--steps", "2"]
    o = steps.parsed([*common, "--repeats", "2", "--quantization", "nf4"])
    loading = steps.loading_arguments(o, Path("model"), "bfloat16")
    assert (loading["model_name"], loading["load_in_4bit"], loading["load_in_16bit"]) == ("model", True, False)
    assert steps.loading_arguments(steps.parsed(common), Path("model"), "bfloat16")["load_in_16bit"]
    adapters = steps.adapter_arguments(o)
    assert (adapters["r"], adapters["lora_alpha"], len(adapters["target_modules"])) == (4, 8, 7)
    settings = steps.trainer_settings(o, 2)
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_steps")
    assert [settings[name] for name in names] == [2, 4, 6]  # two steps to warm up, two times two to time
    distinct, order = steps.rows_of(o)
    assert order == [*range(32), *range(16, 32)]
    lengths = [steps.padded_length(row) for row in distinct]
    assert all(lengths[at : at + 8] == sorted(lengths[at : at + 8], reverse=True) for at in range(0, 32, 8))


TRL_IS_HERE = pytest.mark.skipif(find_spec("trl") is None or find_spec("datasets") is None, reason="needs TRL")


@TRL_IS_HERE
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--lora", 2),
        ("--lora", 2, "--repeats", 2),
        ("--stock",),
        pytest.param(
            ("--lora", 2, "--quantization", "nf4"),
            marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
        ),
    ],
    ids=lambda options: " ".join(map(str, options)) or "plain",
)
def test_trl_steps(bench, token_pairs, options):
    given = ("--shape", "tiny", "--data", token_pairs, "--micro-batch", 2, "--accumulate", 2, "--steps", 2)
    result = last_line(bench("trl_steps", *given, *options))
    assert result["pairs_per_second"] > 0
    assert len(result["each"]) == (2 if "--repeats" in options else 1)
    # Of a pair, both sequences are computed in full, padded to the longest of the micro-batch.
    assert 1 < result["computed_per_unique_token"] < 3


@TRL_IS_HERE
@pytest.mark.slow
@pytest.mark.parametrize("adapters", [(), ("--lora", 4, "--rate", "1e-4")], ids=["all weights", "adapters"])
def test_curve_of_trl(bench, pairs, tmp_path, adapters):
    own = ("--model", MODEL, "--data", pairs, "--systems", "TRL", "--seeds", 1, "--steps", 2, *adapters)
    ended = bench("curve", *own, "--folder", tmp_path, "--micro-batch", 8, PYTHONPATH=":".join(sys.path))
    (points,) = last_line(ended)["curves"]["TRL"]
    assert [point["step"] for point in points] == [0, 2, 2]
    assert points[0]["loss"] == pytest.approx(0.6931, abs=1e-3)


def test_a_missing_file_is_reported_by_name(bench):
    ended = bench("plots", "none.jsonl", "--step", "step.svg")
    assert (ended.code, ended.err.splitlines()[-1]) == (2, "plots.py: error: none.jsonl: there is no such file")


@pytest.mark.slow
def test_hybrids_are_timed_packed_and_unpacked(bench):
    ended = bench("hybrids", "--pairs", 4, "--pack-length", 2048, "--steps", 1, "--rows", 2)
    assert ended.code == 0, ended
    results = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert [one["way"] for one in results] == ["packed", "packed, not compiled", "a pair per row", "unpacked"]
    assert all(one["pairs_per_second"] > 0 for one in results)


# A session on a GPU, with commands that stand for benchmarks


def jobs_file(folder: Path, **commands: str) -> Path:
    """A job per name; each command is Python code. The names are in the order of the keyword arguments."""
    jobs = [
        {"name": name, "part": number + 1, "seconds": 20, "command": ["{python}", "-c", code]}
        for number, (name, code) in enumerate(commands.items())
    ]
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    return path


def recorded(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out/results.jsonl").read_text().splitlines()]


PRINTS = 'print("compiling"); print(\'{"pairs_per_second": 7}\')'


def test_a_session_keeps_results_and_a_second_call_runs_only_what_failed(bench, tmp_path):
    once = f"import os, sys; open('{tmp_path}/runs', 'a').write('x'); print('no memory'); sys.exit(3)"
    given = ("--out", "out", "--jobs", jobs_file(tmp_path, works=PRINTS, fails=once))
    ended = bench("gpu_session", *given)
    assert ended.code == 1
    assert [line.split(",")[0] for line in ended.out.splitlines()] == ["works: exit code 0", "fails: exit code 3"]
    works, fails = recorded(tmp_path)
    assert (works["results"], works["last_lines"]) == ([{"pairs_per_second": 7}], ["compiling"])
    assert (fails["exit_code"], fails["last_lines"]) == (3, ["no memory"])
    again = bench("gpu_session", *given)
    assert again.out.splitlines()[0] == "works: done"
    assert (tmp_path / "runs").read_text() == "xx"
    assert [one["name"] for one in recorded(tmp_path)] == ["works", "fails", "fails"]


def test_a_session_reads_results_of_earlier_ones_although_a_line_was_cut_off(bench, tmp_path):
    earlier = written(tmp_path / "earlier.jsonl", [{"name": "first", "exit_code": 0}])
    with earlier.open("a") as file:
        file.write('{"name": "second", "exit_co')
    jobs = jobs_file(tmp_path, first=PRINTS, second=PRINTS)
    assert bench("gpu_session", "--out", "out", "--jobs", jobs, "--done", earlier).code == 0
    assert [one["name"] for one in recorded(tmp_path)] == ["second"]


def test_a_session_ends_a_benchmark_and_its_processes_at_the_limit(bench, tmp_path):
    left = tmp_path / "left"
    child = f"import time; time.sleep(4); open('{left}', 'w').close()"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    jobs = jobs_file(tmp_path, hangs=hangs, works=PRINTS)
    jobs.write_text(jobs.read_text().replace('"seconds": 20', '"seconds": 0.5', 1))
    ended = bench("gpu_session", "--out", "out", "--jobs", jobs)
    assert ended.out.startswith("hangs: ran past its limit, ")
    assert [one["exit_code"] for one in recorded(tmp_path)] == [None, 0]
    time.sleep(4)
    assert not left.exists()


def test_a_session_starts_nothing_that_the_budget_or_the_part_leaves_out(bench, tmp_path):
    jobs = jobs_file(tmp_path, first=PRINTS, second=PRINTS)
    ended = bench("gpu_session", "--out", "out", "--jobs", jobs, "--part", 2, "--budget", 10)
    assert ended.code == 0
    assert ended.out.startswith("second: left out, takes about 20 s and ")
    assert not (tmp_path / "out/results.jsonl").exists()


def test_every_benchmark_of_a_session_is_a_script_with_these_options(benchmarks_on_the_path, bench, tmp_path):
    session = import_module("gpu_session")
    names = [job.name for job in session.JOBS]
    assert len(set(names)) == len(names)
    assert [job.part for job in session.JOBS] == sorted(job.part for job in session.JOBS)
    for part in {job.part for job in session.JOBS}:
        assert sum(job.seconds for job in session.JOBS if job.part == part) <= 590
    for job in session.JOBS:
        script = Path(job.command[1])
        if job.command[1] != "-m":
            known = bench(script.stem, "--help").out
            assert all(word in known for word in job.command[2:] if word.startswith("--")), job.name
    ended = bench("gpu_session", "--out", "out", "--list", "--only", "135m 49152", "limited 1.5b")
    assert ended.out.splitlines()[0] == "limited 1.5b: left out, needs --tokenizer, --data"
    assert ended.out.splitlines()[1].startswith("part 6, about 60 s, 135m 49152: ")

"""Records the losses of TRL's own DPO command, which tests compare with those of tandem for the same configuration file.

    python benchmarks/trl_trajectory.py --trl-python PATH [--write]

Runs `python -m trl.scripts.dpo --config FILE` for each case: 20 steps in float32 on the CPU, with the embedded model and the
bundled pairs in the order of their file. Every setting that a case does not name has TRL's default. Then trains with
`tandem train --config FILE`, and prints the largest relative difference of a loss. --write replaces
benchmarks/results/trl_trajectory.json, from which tests/equivalence/test_trl_trajectory.py reads TRL's losses.
The last line is one JSON object. Exits with 1 if a loss differs by more than 1e-4.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import trl_python
from options import options_of

RESULT = Path(__file__).parent / "results" / "trl_trajectory.json"
MAX_DIFFERENCE = 1e-4  # relative
STEPS = 20
COMMON = {"max_steps": STEPS, "bf16": False, "train_sampling_strategy": "sequential", "logging_steps": 1}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "higher rate": {"learning_rate": 1e-4},
    "accumulation, cosine, ipo": {
        "learning_rate": 1e-4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "loss_type": "ipo",
        "beta": 1.0,
    },
    "two losses": {"learning_rate": 1e-4, "loss_type": ["sigmoid", "bco_pair"], "loss_weights": [0.8, 0.2]},
    "plain text": {"learning_rate": 1e-4},
}
TEXTS = "plain text"  # the case whose rows are texts, which neither trainer puts into the chat template
# A newline between turns, not after the last one: TRL would score it, and tandem ends at the end-of-turn token.
TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)


def write_inputs(folder: Path) -> dict[str, Any]:
    """Write the model and the pairs, as messages and as texts, to a folder. Return the settings that name them."""
    from transformers import AutoTokenizer

    from tandem.embedded.files import TRAIN
    from tandem.model.files.tiny import tiny_model

    model, data = folder / "model", folder / "pairs"
    shutil.copytree(tiny_model(), model)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(model))
    rows: dict[Path, list[dict[str, Any]]] = {data: [], folder / TEXTS: []}
    for row in map(json.loads, TRAIN.read_text(encoding="utf-8").splitlines()):
        prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        answers = {side: row[side] for side in ("chosen", "rejected")}
        as_messages = {side: [{"role": "assistant", "content": text}] for side, text in answers.items()}
        rows[data].append({"prompt": prompt, **as_messages})
        rows[folder / TEXTS].append({"prompt": "".join(f"{turn['content']}\n" for turn in prompt), **answers})
    for place, some in rows.items():
        place.mkdir()
        (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    return {"model_name_or_path": str(model), "dataset_name": str(data), **COMMON}


def write_config(case: str, inputs: dict[str, Any], run: Path) -> Path:
    """Write the configuration file that both trainers read. JSON is YAML too."""
    file = run.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    data = {"dataset_name": str(Path(inputs["dataset_name"]).with_name(TEXTS))} if case == TEXTS else {}
    file.write_text(json.dumps({**inputs, **data, **CASES[case], "output_dir": str(run)}))
    return file


def losses_of_tandem(config: Path, run: Path) -> list[float]:
    from tandem.cli.main import app

    app(["train", "--quiet", "--config", str(config)], standalone_mode=False)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def losses_of_trl(config: Path, run: Path, python: str) -> list[float]:
    subprocess.run([python, "-m", "trl.scripts.dpo", "--config", str(config)], check=True, stdout=subprocess.DEVNULL)
    history = json.loads((run / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [logged["loss"] for logged in history if "loss" in logged]


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs) == STEPS, "both record a loss in every step"
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))


def versions_of(python: str) -> dict[str, str]:
    code = "import json; from importlib.metadata import version; print(json.dumps({n: version(n) for n in %r}))"
    names = ["trl", "torch", "transformers", "datasets"]
    return json.loads(subprocess.run([python, "-c", code % names], check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--trl-python", required=True, help="an interpreter with trl and datasets")
    parser.add_argument("--write", action="store_true", help="replace the recorded losses")
    options = parser.parse_args()
    trl_python.check(options.trl_python, "datasets", "trl")
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {
            "TANDEM_CACHE": f"{scratch}/cache",
            "HF_HOME": f"{scratch}/hf",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        inputs = write_inputs(Path(scratch))
        for number, case in enumerate(CASES):
            runs = {name: Path(scratch, name, str(number)) for name in ("trl", "tandem")}
            configs = {name: write_config(case, inputs, run) for name, run in runs.items()}
            theirs = losses_of_trl(configs["trl"], runs["trl"], options.trl_python)
            difference = largest_difference(losses_of_tandem(configs["tandem"], runs["tandem"]), theirs)
            found[case] = {"losses": theirs, "difference": difference}
            print(f"{case:<28}{theirs[0]:>10.4f}{theirs[-1]:>10.4f}{difference:>12.1e}", flush=True)
    versions = {"trl": versions_of(options.trl_python), "tandem": {name: version(name) for name in trl_python.BOTH_USE}}
    if options.write:
        recorded = {case: one["losses"] for case, one in found.items()}
        RESULT.write_text(json.dumps({"versions": versions["trl"], "losses": recorded}, indent=1) + "\n")
    print(json.dumps({"benchmark": "trl_trajectory", "cases": found, "versions": versions}))
    sys.exit(any(one["difference"] > MAX_DIFFERENCE for one in found.values()))


if __name__ == "__main__":
    main()

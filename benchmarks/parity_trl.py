"""Trains with tandem and with TRL on the same tiny model, pairs, order and settings, for every loss that both have.

    python benchmarks/parity_trl.py --trl-python PATH [--only NAME ...]

Both take 20 steps of 8 pairs in float32 on the CPU: the bundled pairs in the order of their file, the embedded random
model, AdamW at a constant rate without weight decay, gradients clipped at a norm of 1, beta 0.1 where no other is
given. tandem packs as it does by default, TRL pads. The pairs are rendered by the chat template beforehand, so that both
tokenise the same plain text; the token ids are checked to be equal. Settings have the names of tandem's keys in section
dpo (beta is reference_policy_kl_penalty); the corresponding arguments of TRL are in the JSON.

The first table compares losses that are the same by definition: tandem's loss in the first and in the last step, the
largest difference of a step's loss relative to TRL's, the largest difference of a final weight and, for scale, the largest
change of a weight in training. The second lists losses that differ by definition, measured in the same way, without a
target. The last line is one JSON object. Exits with 1 if a loss of the first table differs by more than 1e-4, or changes by
less than 5 %, since agreement would then mean little.

Some losses amplify rounding: forward_kl and alpha are exponentials of log-ratios, and at tau 0.05 discopop has a maximum
where training starts, from which a pair can move to either side. They use a lower rate or a larger tau: at the common rate,
rounding differences between two correct implementations can make their losses differ by more than 1e-4.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import trl_python
from options import options_of
from safetensors.numpy import load_file

# TRL's interpreter runs this file too, so tandem is imported where it is used.
MAX_LOSS_DIFFERENCE = 1e-4  # relative
MIN_MOVEMENT = 0.05  # of a loss, from the first step to the last, relative
STEPS, PAIRS, MAX_LENGTH = 20, 8, 512
RATE, BETAS, EPSILON, MAX_NORM = 1e-4, (0.9, 0.98), 1e-5, 1.0
COMMON_BETA = 0.1  # of the loss, where a case gives no other
PACKAGES = ["torch", "transformers", "numpy"]

# tandem's keys of section dpo, and the arguments of TRL's trainers that mean the same.
TRL_ARGUMENTS = {
    "reference_policy_kl_penalty": "beta",
    "label_smoothing": "label_smoothing",
    "discopop_tau": "discopop_tau",
    "ld_alpha": "ld_alpha",
    "wpo": "use_weighting",
    "f_divergence": "f_divergence_type",
    "f_alpha": "f_alpha_divergence_coef",
    "simpo_gamma": "simpo_gamma",
    "cpo_alpha": "cpo_alpha",
    "orpo_lambda": "beta",
}
TRL_DIVERGENCES = {"js": "js_divergence", "alpha": "alpha_divergence"}

BETA, SMOOTHING, AVERAGED = "reference_policy_kl_penalty", "label_smoothing", "preference_average_log_probs"
TWO_MICRO_BATCHES = {"per_device_train_batch_size": PAIRS // 2, "gradient_accumulation_steps": 2}

Tokens = list[tuple[list[int], list[int], list[int]]]  # of each pair: prompt, chosen, rejected


@dataclass(frozen=True, slots=True)
class Case:
    """One loss with its settings for both trainers."""

    loss: str | dict[str, float]  # or several losses with weights
    both: dict[str, Any] = field(default_factory=dict)  # named by tandem's keys
    tandem: dict[str, Any] = field(default_factory=dict)  # settings for tandem only
    trl: dict[str, Any] = field(default_factory=dict)  # settings for TRL only
    trainer: Literal["DPO", "CPO", "ORPO"] = "DPO"
    rate: float = RATE
    weight_decay: float = 0.0
    data: Literal["text", "messages"] = "text"
    differs: str = ""  # the reason, if the two are not the same by definition

    @property
    def name(self) -> str:
        if isinstance(self.loss, str):
            return self.loss
        return " + ".join(f"{weight:g} {name}" for name, weight in self.loss.items())

    @property
    def settings(self) -> str:
        given = {**self.both, **self.tandem}
        given |= {"lr": self.rate} if self.rate != RATE else {}
        given |= {"weight_decay": self.weight_decay} if self.weight_decay else {}
        given |= {"data": self.data} if self.data != "text" else {}
        parts = [f"{'beta' if key == BETA else key}={_plain(value)}" for key, value in given.items()]
        return ", ".join([*parts, *(["TRL in two micro-batches"] if self.trl == TWO_MICRO_BATCHES else [])])

    def trl_arguments(self) -> dict[str, Any]:
        arguments = {TRL_ARGUMENTS[key]: TRL_DIVERGENCES.get(value, value) for key, value in self.both.items()}
        if self.trainer == "DPO":
            weights = {self.loss: 1.0} if isinstance(self.loss, str) else self.loss
            arguments |= {"loss_type": list(weights), "loss_weights": list(weights.values())}
        common = {"learning_rate": self.rate, "weight_decay": self.weight_decay, "beta": COMMON_BETA}
        return {**common, **arguments, **self.trl}


SAME = [
    Case("sigmoid"),
    Case("sigmoid", trl=TWO_MICRO_BATCHES),
    Case("hinge"),
    Case("ipo", {BETA: 1.0}, tandem={AVERAGED: True}),
    Case("exo_pair", {SMOOTHING: 0.001}),
    Case("nca_pair"),
    Case("robust", {SMOOTHING: 0.1}),
    Case("bco_pair"),
    Case("sppo_hard"),
    Case("aot"),
    Case("aot", {SMOOTHING: 0.1}),
    Case("aot_unpaired"),
    Case("aot_unpaired", {SMOOTHING: 0.1}),
    Case("apo_zero"),
    Case("apo_down"),
    Case("discopop", {"discopop_tau": 0.05}, rate=RATE / 5),
    Case("discopop", {"discopop_tau": 0.5}),
    Case("sigmoid_norm", {BETA: 2.0}),
    Case({"sigmoid": 0.8, "bco_pair": 0.2}),
    Case({"hinge": 0.5, "nca_pair": 1.0, "apo_zero": 2.0}),
    Case("sigmoid", {"f_divergence": "forward_kl"}, rate=RATE / 20),
    Case("sigmoid", {"f_divergence": "js"}),
    Case("sigmoid", {"f_divergence": "alpha", "f_alpha": 0.7}, rate=RATE / 20),
    Case("hinge", {"f_divergence": "js"}),
    Case("exo_pair", {"f_divergence": "js", SMOOTHING: 0.001}),
    Case("robust", {"f_divergence": "js", SMOOTHING: 0.1}),
    Case("discopop", {"f_divergence": "js", "discopop_tau": 0.5}),
    Case("sigmoid", {"ld_alpha": 0.5}),
    Case("sigmoid_norm", {"ld_alpha": 0.5, BETA: 2.0}),
    Case("aot", {"ld_alpha": 0.0}),
    Case("sigmoid", {"wpo": True}),
    Case("ipo", {"wpo": True, BETA: 1.0}, tandem={AVERAGED: True}),
    Case({"sigmoid": 0.8, "bco_pair": 0.2}, {"wpo": True, "ld_alpha": 0.5}),
    Case("simpo", {BETA: 2.0, "simpo_gamma": 0.5}, trl={"loss_type": "simpo", "cpo_alpha": 0.0}, trainer="CPO"),
    Case("cpo", {"cpo_alpha": 0.0}, trl={"loss_type": "sigmoid"}, trainer="CPO"),
]
DIFFERENT = [
    Case(
        "sigmoid",
        {SMOOTHING: 0.1},
        differs="TRL's sigmoid does not read label_smoothing; tandem's dpo with it is conservative DPO.",
    ),
    Case(
        "ipo",
        differs="TRL averages over tokens, tandem sums unless preference_average_log_probs is set (compared above).",
    ),
    Case(
        "ipo",
        {"f_divergence": "js", BETA: 1.0},
        tandem={AVERAGED: True},
        differs="TRL takes the divergence of the sums and then divides by length; tandem averages first.",
    ),
    Case(
        "sigmoid",
        {"f_divergence": "js", BETA: 2.0},
        tandem={AVERAGED: True},
        trl={"loss_type": ["sigmoid_norm"]},
        differs="The same of TRL's sigmoid_norm; tandem refuses that name with a divergence, so dpo stands for it.",
    ),
    Case(
        "aot",
        trl=TWO_MICRO_BATCHES,
        differs="TRL sorts within each micro-batch of a device, tandem over the whole global batch.",
    ),
    Case("aot_unpaired", trl=TWO_MICRO_BATCHES, differs="The same."),
    Case(
        "sigmoid",
        tandem={"sft_loss_weight": 1.0, "sft_average_log_probs": True},
        trl={"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]},
        differs="TRL's sft is a mean over all chosen tokens of the batch, tandem's a mean over pairs of their means.",
    ),
    Case(
        "cpo",
        {"cpo_alpha": 1.0},
        trl={"loss_type": "sigmoid"},
        trainer="CPO",
        differs="TRL's SFT term likewise; without it (cpo_alpha=0) the two are compared above.",
    ),
    Case(
        "orpo",
        {"orpo_lambda": 0.1},
        trainer="ORPO",
        differs="TRL's SFT term likewise, and it takes in the tokens of the prompts.",
    ),
    Case(
        "sigmoid",
        weight_decay=0.1,
        differs="transformers' trainer leaves norms and biases out of the weight decay, tandem decays every weight.",
    ),
    Case(
        "sigmoid",
        data="messages",
        differs="TRL scores all that the template writes after an answer (here a newline), tandem to its end of turn.",
    ),
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one trainer for a case."""

    losses: list[float]  # of each step
    weights: Path
    tokens: Tokens


def train_with_trl(jobs_file: str) -> None:
    """Run every job of a file in TRL's interpreter, and write losses, tokens and the model to the folder of each job."""
    datasets, trl, transformers = map(import_module, ("datasets", "trl", "transformers"))
    cpo, orpo = import_module("trl.experimental.cpo"), import_module("trl.experimental.orpo")
    trainers = {
        "DPO": (trl.DPOConfig, trl.DPOTrainer),
        "CPO": (cpo.CPOConfig, cpo.CPOTrainer),
        "ORPO": (orpo.ORPOConfig, orpo.ORPOTrainer),
    }
    jobs = json.loads(Path(jobs_file).read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(jobs["model"])
    for job in jobs["cases"]:
        make_config, make_trainer = trainers[job["trainer"]]
        trainer = make_trainer(
            model=jobs["model"],
            args=make_config(output_dir=job["folder"], **job["arguments"]),
            train_dataset=datasets.load_dataset("json", data_files=job["data"], split="train"),
            processing_class=tokenizer,
        )
        trainer.train()
        losses = [logged["loss"] for logged in trainer.state.log_history if "loss" in logged]
        trainer.model.save_pretrained(f"{job['folder']}/model")
        found = {"losses": losses, "tokens": list(tokens_of_trl(trainer.train_dataset))}
        Path(job["folder"], "found.json").write_text(json.dumps(found))
    versions = {name: version(name) for name in ["trl", "datasets", *PACKAGES]}
    Path(jobs["versions"]).write_text(json.dumps(versions))


def tokens_of_trl(rows: Any) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Prompt, chosen and rejected of each pair. In rows of CPO and ORPO, the other two contain the prompt."""
    for row in rows:
        if "chosen_ids" in row:
            yield row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]
        else:
            length = sum(label == -100 for label in row["chosen_labels"])
            yield row["prompt_input_ids"], row["chosen_input_ids"][length:], row["rejected_input_ids"][length:]


def outcomes_of_trl(cases: list[Case], inputs: dict[str, str], python: str, scratch: Path) -> list[Outcome]:
    """Outcomes of all cases, run in one process because start-up takes most of a short run."""
    shared = {
        "max_steps": STEPS,
        "per_device_train_batch_size": PAIRS,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPSILON,
        "max_grad_norm": MAX_NORM,
        "train_sampling_strategy": "sequential",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    folders = [scratch / "trl" / str(number) for number in range(len(cases))]
    jobs = [
        {
            "trainer": case.trainer,
            # Without a length, the trainers of CPO and ORPO use 512 and print a warning.
            "arguments": {
                **shared,
                "max_length": None if case.trainer == "DPO" else MAX_LENGTH,
                **case.trl_arguments(),
            },
            "data": inputs[case.data],
            "folder": str(folder),
        }
        for case, folder in zip(cases, folders, strict=True)
    ]
    file = scratch / "jobs.json"
    file.write_text(
        json.dumps({"model": inputs["model"], "cases": jobs, "versions": str(scratch / "trl-versions.json")})
    )
    done = subprocess.run([python, __file__, "train_with_trl", str(file)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL's interpreter failed:\n{done.stderr[-4000:]}")
    return [found_by_trl(folder) for folder in folders]


def found_by_trl(folder: Path) -> Outcome:
    found = json.loads((folder / "found.json").read_text())
    tokens = [(prompt, chosen, rejected) for prompt, chosen, rejected in found["tokens"]]
    return Outcome(found["losses"], folder / "model" / "model.safetensors", tokens)


def outcome_of_tandem(case: Case, inputs: dict[str, str], run: Path) -> Outcome:
    """The outcome of `tandem train`, called in this process."""
    from tandem.cli.main import app

    optimizer = {"lr": case.rate, "betas": BETAS, "eps": EPSILON, "weight_decay": case.weight_decay}
    config = {
        "run": {"dir": str(run)},
        "dpo": {"preference_loss": case.loss, BETA: COMMON_BETA, **case.both, **case.tandem, "max_num_steps": STEPS},
        "policy": {
            "model_name": inputs["model"],
            "tokenizer": {"chat_template": None if case.data == "text" else "default"},
            "train_global_batch_size": PAIRS,
            "max_total_sequence_length": MAX_LENGTH,
            "precision": "float32",
            "optimizer": {"kwargs": optimizer},
            "scheduler": None,
            "max_grad_norm": MAX_NORM,
        },
        "data": {"train": {"data_path": inputs[case.data]}, "shuffle": False},
        "checkpointing": {"enabled": False},
    }
    file = run.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config))
    app(["train", "--quiet", "--config", str(file)], standalone_mode=False)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    return Outcome(losses, run / "model" / "model.safetensors", tokens_of_tandem(file))


def tokens_of_tandem(config_file: Path) -> Tokens:
    """The token ids that a run with this configuration is trained on."""
    from tandem.config.load import load_config
    from tandem.data.store.opening import open_store
    from tandem.data.text.template import make_template
    from tandem.data.text.tokenizer import load_tokenizer

    config = load_config(str(config_file), []).config
    dataset = config.data.training_sets[0]
    template = make_template(load_tokenizer(Path(config.policy.model_name)), config.policy.tokenizer)
    store = open_store(str(dataset.data_path), dataset, template, config.data, config.policy.max_total_sequence_length)
    rows = [store[index] for index in range(len(store))]
    return [(row.prompt.tolist(), row.completions[0].tolist(), row.completions[1].tolist()) for row in rows]


def write_inputs(folder: Path) -> dict[str, str]:
    """Write the bundled pairs as messages and as rendered text; return the paths of both and of the embedded model."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from tandem.embedded.files import TRAIN
    from tandem.model.files.tiny import tiny_model

    logging.disable_progress_bar()
    model = str(tiny_model())
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    texts, messages = [], []
    for line in TRAIN.read_text(encoding="utf-8").splitlines()[: STEPS * PAIRS]:
        row = json.loads(line)
        prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        sides = {side: row[side] for side in ("chosen", "rejected")}
        texts.append({"prompt": text, **{side: said + tokenizer.eos_token for side, said in sides.items()}})
        answers = {side: [{"role": "assistant", "content": said}] for side, said in sides.items()}
        messages.append({"prompt": prompt, **answers})
    files = {"text": folder / "text.jsonl", "messages": folder / "messages.jsonl"}
    for file, rows in zip(files.values(), (texts, messages), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": model, **{name: str(file) for name, file in files.items()}}


def compare(case: Case, tandem: Outcome, trl: Outcome, start: Path) -> dict[str, Any]:
    """A row of the tables."""
    assert len(tandem.losses) == len(trl.losses) == STEPS, "both log a loss every step"
    if case.data == "text" and tandem.tokens != trl.tokens:
        sys.exit(f"{case.name}: tandem and TRL tokenised the same text differently, so nothing can be compared.")
    ours, theirs = np.array(tandem.losses), np.array(trl.losses)
    return {
        "loss": case.name,
        "settings": case.settings,
        "trl": {"trainer": case.trainer, **case.trl_arguments()},
        "first": tandem.losses[0],
        "last": tandem.losses[-1],
        "trl_first": trl.losses[0],
        "trl_last": trl.losses[-1],
        "loss_difference": float(np.max(np.abs(ours - theirs) / np.maximum(np.abs(theirs), np.finfo(float).tiny))),
        "weight_difference": largest_difference(tandem.weights, trl.weights),
        "weight_change": largest_difference(tandem.weights, start),
    }


def largest_difference(a: Path, b: Path) -> float:
    """The largest difference between the weights of two files."""
    ours, theirs = load_file(a), load_file(b)
    assert ours.keys() == theirs.keys(), "both models have the same weights"
    return max(float(np.max(np.abs(ours[name] - theirs[name]))) for name in ours)


def miss(row: dict[str, Any]) -> str | None:
    where = ", ".join(part for part in (row["loss"], row["settings"]) if part)
    if not row["loss_difference"] <= MAX_LOSS_DIFFERENCE:
        return f"{where}: the losses differ by {row['loss_difference']:.1e}, over {MAX_LOSS_DIFFERENCE:.0e}"
    if abs(row["last"] - row["first"]) < MIN_MOVEMENT * abs(row["first"]):
        return f"{where}: the loss hardly moves, from {row['first']:.4f} to {row['last']:.4f}"
    return None


def show_same(row: dict[str, Any], widths: tuple[int, int]) -> None:
    print(
        f"{row['loss']:<{widths[0]}}  {row['settings']:<{widths[1]}}{row['first']:>10.4f}{row['last']:>10.4f}"
        f"{row['loss_difference']:>12.1e}{row['weight_difference']:>13.1e}{row['weight_change']:>15.1e}",
        flush=True,
    )


def show_different(row: dict[str, Any], widths: tuple[int, int], differs: str) -> None:
    print(
        f"{row['loss']:<{widths[0]}}  {row['settings']:<{widths[1]}}{row['first']:>10.4f}{row['last']:>10.4f}"
        f"{row['trl_first']:>11.4f}{row['trl_last']:>10.4f}{row['loss_difference']:>12.1e}\n    {differs}",
        flush=True,
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    inputs = write_inputs(scratch)
    cases = [case for case in [*SAME, *DIFFERENT] if not options.only or case.name in options.only]
    started = time.perf_counter()
    theirs = outcomes_of_trl(cases, inputs, options.trl_python, scratch)
    trl_seconds = time.perf_counter() - started
    widths = max(len(case.name) for case in cases), max(len(case.settings) for case in cases)
    rows: dict[str, list[dict[str, Any]]] = {"same": [], "different": []}
    head = f"{'loss':<{widths[0]}}  {'settings':<{widths[1]}}{'first':>10}{'last':>10}"
    print(f"{head}{'loss diff':>12}{'weight diff':>13}{'weight change':>15}")
    for number, (case, trl) in enumerate(zip(cases, theirs, strict=True)):
        tandem = outcome_of_tandem(case, inputs, scratch / "tandem" / str(number))
        row = compare(case, tandem, trl, Path(inputs["model"]) / "model.safetensors")
        if not case.differs:
            rows["same"].append(row)
            show_same(row, widths)
            continue
        if not rows["different"]:
            print(f"\nDifferent by definition\n{head}{'TRL first':>11}{'TRL last':>10}{'loss diff':>12}")
        rows["different"].append({**row, "differs": case.differs})
        show_different(row, widths, case.differs)
    seconds = {"trl": round(trl_seconds), "all": round(time.perf_counter() - started)}
    return {**rows, "seconds": seconds, "trl_versions": json.loads((scratch / "trl-versions.json").read_text())}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--trl-python", required=True, help="an interpreter with trl and datasets")
    names = {case.name for case in [*SAME, *DIFFERENT]}
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=names, help="these losses, as the tables name them"
    )
    options = parser.parse_args()
    trl_python.check(options.trl_python, "datasets", "trl")
    with tempfile.TemporaryDirectory() as scratch:
        # Do not read the user's caches or the hub, and compute on the CPU in both trainers.
        os.environ |= {
            "TANDEM_CACHE": f"{scratch}/cache",
            "HF_HOME": f"{scratch}/hf",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        results = run(options, Path(scratch))
    missed = [line for row in results["same"] if (line := miss(row))]
    for line in missed:
        print(f"missed: {line}")
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    print(json.dumps({"benchmark": "parity_trl", **results, "missed": missed, "versions": versions}))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train_with_trl"]:
        train_with_trl(sys.argv[2])
    else:
        main()

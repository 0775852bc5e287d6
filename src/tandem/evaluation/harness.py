"""Runs tasks of the LM Evaluation Harness (the optional package lm-eval) on several models, each in a separate process.

A separate process frees the memory of a model when it ends, and keeps what the harness prints apart from the results.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.config.sections.policy import Policy as PolicyConfig
from tandem.errors import ConfigError, TandemError
from tandem.evaluation.harness_child import UNKNOWN_TASK_EXIT_CODE
from tandem.evaluation.records import HarnessResult
from tandem.model.files.source import find_source
from tandem.terminal.arguments import option
from tandem.terminal.commands import install_command

PACKAGE = "lm_eval"
STDERR = "_stderr"


def check_installed(tasks: Sequence[str]) -> None:
    """Refuse tasks if the package is missing, before any model is loaded."""
    if tasks and importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"{option('lm_eval', list(tasks))}: needs the LM Evaluation Harness, which is not installed. Run "
            f"{install_command('lm-eval')}, or pip install 'lm-eval[hf]'."
        )


def run_tasks(
    models: dict[str, tuple[str, PolicyConfig]],
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    limit: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[HarnessResult, ...]:
    """Run the tasks on each model. models: by name, the option that names it and its settings; the base model first."""
    asked = {name: _model_arguments(key, policy) for name, (key, policy) in models.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, arguments in asked.items():
        say(f"LM Evaluation Harness on {name}: {', '.join(tasks)}")
        request = {
            "model_args": arguments,
            "tasks": list(tasks),
            "include_path": None if include_path is None else str(include_path.resolve()),
            "limit": limit,
        }
        found[name] = _run(name, request)
    return _side_by_side(found)


def _model_arguments(key: str, policy: PolicyConfig) -> dict[str, str]:
    """What the harness' model `hf` is loaded with. An adapter is loaded on its base model by peft."""
    folder = str(find_source(key, policy.model_name, policy.revision).folder)
    adapter = {"peft": str(Path(policy.lora.adapter).resolve())} if policy.lora.adapter else {}
    return {"pretrained": folder, "dtype": "auto", **adapter}


def _run(name: str, request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tandem-eval-") as folder:
        answer = Path(folder) / "results.json"
        command = [sys.executable, "-P", "-m", "tandem.evaluation.harness_child", str(answer)]
        ended = subprocess.run(
            command,
            input=json.dumps(request),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            check=False,
        )
        if ended.returncode == UNKNOWN_TASK_EXIT_CODE:
            unknown = ended.stderr.splitlines()[-1]
            raise ConfigError(
                f"{option('lm_eval', request['tasks'])}: the LM Evaluation Harness does not know {unknown}. `lm-eval ls tasks` "
                f"lists its tasks; {option('include_path', metavar='DIR')} adds those in a folder."
            )
        if ended.returncode != 0 or not answer.is_file():
            said = ended.stderr.strip().splitlines()[-1:] or [f"exit code {ended.returncode}, without a message"]
            raise TandemError(
                f"{option('lm_eval', request['tasks'])}: the LM Evaluation Harness failed on {name}: {said[0]}\n"
                f"Check the names of the tasks, {option('include_path')} and the connection, which its own tasks need for "
                "their data."
            )
        return json.loads(answer.read_text(encoding="utf-8"))


def _side_by_side(found: dict[str, dict[str, Any]]) -> tuple[HarnessResult, ...]:
    """One result for each task and metric, with the value of each model. Keys of the harness are METRIC,FILTER."""
    first = next(iter(found.values()))
    results = []
    for task, metrics in first.items():
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if metric.endswith(STDERR) or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            deviation = f"{metric}{STDERR},{filtered}"
            values = {name: of.get(task, {}).get(key) for name, of in found.items()}
            results.append(
                HarnessResult(
                    task=task,
                    metric=metric if filtered in ("", "none") else f"{metric} ({filtered})",
                    values={name: float(one) for name, one in values.items() if isinstance(one, int | float)},
                    stderrs={name: _number(of.get(task, {}).get(deviation)) for name, of in found.items()},
                )
            )
    return tuple(results)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

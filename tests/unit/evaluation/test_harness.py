"""`--lm-eval`: tasks of the LM Evaluation Harness on base and model, with a stub of the package."""

import json
import os

import pytest
from models import MODEL, model_folder

from tandem.errors import ConfigError, TandemError
from tandem.evaluation import harness
from tandem.evaluation.evaluate import evaluate

pytestmark = pytest.mark.usefixtures("of_a_command")

# Has the parts of lm-eval 0.4 that are used: simple_evaluate(...) -> {"results": ...}, and tasks.TaskManager(include_path=...).
STUB = """
import json, os
from lm_eval.tasks import TaskManager

def simple_evaluate(model, model_args, tasks, *, task_manager, limit=None, device=None, batch_size=None, log_samples=True):
    asked = {"model": model, "model_args": model_args, "tasks": tasks, "include_path": task_manager.include_path, "limit": limit}
    with open(os.environ["ASKED"], "a") as out:
        out.write(json.dumps(asked) + "\\n")
    print("noise on standard output")
    if "missing" in tasks:
        raise KeyError("missing")
    if "offline" in tasks:
        raise ConnectionError("cannot reach the hub")
    share = 0.25 if model_args["pretrained"].endswith("small") else 0.5
    metrics = {"acc,none": share, "acc_stderr,none": 0.05, "f1,strict": 1, "f1_stderr,strict": "N/A", "sample_len": 5}
    return {"results": {task: {"alias": task, **metrics} for task in tasks}}
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Install a stub of lm-eval; return a function that reads what it was asked for."""
    package = tmp_path / "site" / "lm_eval"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STUB)
    (package / "tasks.py").write_text(
        "class TaskManager:\n    all_tasks = ['arc', 'offline', 'piqa']\n"
        "    def __init__(self, include_path=None):\n        self.include_path = include_path\n"
    )
    asked = tmp_path / "asked.jsonl"
    monkeypatch.setenv("ASKED", str(asked))
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr("sys.path", [str(package.parent), *__import__("sys").path])
    return lambda: [json.loads(line) for line in asked.read_text().splitlines()]


def test_base_and_model_are_run_side_by_side(stub, tmp_path):
    model, tasks = model_folder(tmp_path / "aligned", "llama"), tmp_path / "tasks"
    tasks.mkdir()
    found = evaluate(str(model), reference=str(MODEL), lm_eval=["arc", "piqa"], include_path=tasks, limit=5)
    assert found.total is None
    assert [(one.task, one.metric) for one in found.harness] == [
        ("arc", "acc"),
        ("arc", "f1 (strict)"),
        ("piqa", "acc"),
        ("piqa", "f1 (strict)"),
    ]
    assert found.harness[0].values == {str(MODEL): 0.25, str(model): 0.5}
    assert found.harness[0].stderrs == {str(MODEL): 0.05, str(model): 0.05}
    assert found.harness[1].stderrs == {str(MODEL): None, str(model): None}
    base, aligned = stub()
    assert base["model_args"] == {"pretrained": str(MODEL), "dtype": "auto"}
    assert aligned == base | {"model_args": {"pretrained": str(model), "dtype": "auto"}}
    assert (base["model"], base["tasks"], base["include_path"], base["limit"]) == ("hf", ["arc", "piqa"], str(tasks), 5)


def test_an_error_of_the_harness_is_shown(stub):
    with pytest.raises(TandemError) as caught:
        evaluate(str(MODEL), lm_eval=["offline"])
    assert caught.value.exit_code == 1
    assert str(caught.value) == (
        f"--lm-eval offline: the LM Evaluation Harness failed on {MODEL}: ConnectionError: cannot reach the hub\n"
        "Check the names of the tasks, --include-path and the connection, which its own tasks need for their data."
    )


def test_an_unknown_task_is_an_error_of_the_user(stub):
    with pytest.raises(ConfigError) as caught:
        evaluate(str(MODEL), lm_eval=["arc", "missing"])
    assert str(caught.value) == (
        "--lm-eval arc,missing: the LM Evaluation Harness does not know missing. `lm-eval ls tasks` lists its tasks; "
        "--include-path DIR adds those in a folder."
    )


def test_a_missing_package_is_reported_before_anything_loads(monkeypatch):
    monkeypatch.setattr(harness, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError) as caught:
        evaluate(str(MODEL), lm_eval=["arc"])
    assert str(caught.value) == (
        "--lm-eval arc: needs the LM Evaluation Harness, which is not installed. Run pip install '.[lm-eval]', or pip install "
        "'lm-eval[hf]'."
    )

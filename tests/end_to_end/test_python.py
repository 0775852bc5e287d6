"""The Python interface, with training: rows, results, callbacks, twice in one process, from a thread, and the pages."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from models import MODEL
from running import SHORT
from scripts import ROOT

import tandem
from tandem import user_code
from tandem.embedded.files import TRAIN
from tandem.errors import CallbackError, CheckpointError, ConfigError, DataError
from tandem.user_code import name_function

ROWS = [json.loads(line) for line in TRAIN.read_text(encoding="utf-8").splitlines()[:16]]
QUICK = [one for one in SHORT if not one.startswith("data.train")]


def halved(pairs, *, beta):
    """Half of DPO."""
    return -0.5 * torch.nn.functional.logsigmoid(beta * pairs.ratios.margin)


def quick(folder: Path, *more: str, **arguments):
    arguments = {"rows": ROWS, **arguments}
    return tandem.train([*QUICK, f"run.dir={folder}", *more], **arguments)


def losses_of(result: tandem.TrainResult) -> list[float]:
    return [record["loss"] for record in result.metrics if record["split"] == "train"]


class Recorder:
    def __init__(self, stops_at: int = 99, fails_at: int = 99):
        self.steps, self.checkpoints, self.results = [], [], []
        self.stops_at, self.fails_at = stops_at, fails_at

    def on_step(self, record):
        self.steps.append(record["step"])
        if record["step"] == self.fails_at:
            raise ValueError("no")
        return record["step"] == self.stops_at

    def on_checkpoint(self, path, step):
        assert (path / "manifest.json").is_file()
        self.checkpoints.append(step)

    def on_end(self, result):
        self.results.append(result)


def test_two_runs_in_one_process_agree_and_leave_it_as_it_was(tmp_path):
    before = dict(os.environ), signal.getsignal(signal.SIGINT), torch.get_num_threads(), torch.get_rng_state()
    was_joined = dist.is_initialized()
    recorder = Recorder()
    first = quick(tmp_path / "a", "run.deterministic=true", callbacks=[recorder], validation_rows={"more": ROWS[:4]})
    assert not torch.are_deterministic_algorithms_enabled() and dist.is_initialized() == was_joined
    after = dict(os.environ), signal.getsignal(signal.SIGINT), torch.get_num_threads(), torch.get_rng_state()
    assert before[:3] == after[:3] and torch.equal(before[3], after[3])
    assert recorder.steps == [1, 2, 3, 4] and recorder.checkpoints == [4] and recorder.results == [first]
    assert first.run_dir == tmp_path / "a" and first.model == tmp_path / "a/model" and first.last_step == 4
    assert first.checkpoints == (tmp_path / "a/checkpoints/step_4",) and first.best_step == 4
    assert first.report == tmp_path / "a/report.html" and first.verdicts and first.stopped_by is None
    found = {}
    thread = threading.Thread(target=lambda: found.update(second=quick(tmp_path / "b", rows=iter(ROWS))))
    thread.start()
    thread.join()
    assert losses_of(found["second"]) == losses_of(first)
    other = quick(tmp_path / "c", rows=list(reversed(ROWS[:12])))
    assert losses_of(other) != losses_of(first)


def test_a_loss_of_the_users_own_trains_and_is_compared_on_resume(tmp_path, monkeypatch):
    whole = quick(tmp_path / "dpo")
    half = quick(tmp_path / "half", loss=halved)
    assert losses_of(half)[0] == pytest.approx(losses_of(whole)[0] / 2)
    name = name_function("loss", halved)
    assert f"{name}: " in (half.run_dir / "config.yaml").read_text()
    state = json.loads((half.checkpoints[-1] / "state.json").read_text())
    assert f"code of {name}" in state["fingerprints"]
    with pytest.raises(CheckpointError, match="contains a run with another configuration"):
        quick(tmp_path / "half")
    assert tandem.evaluate(half, ROWS[:4]).loss == name  # this process passed the function, so no code is run
    monkeypatch.setattr(user_code, "_known", {})
    with pytest.raises(
        ConfigError, match=r"names Python code, which would be run\. If you trust it, add allow_code=True"
    ):
        tandem.evaluate(half, ROWS[:4])


def test_a_second_interrupt_stops_at_once_and_the_same_call_resumes(tmp_path):
    def interrupt_twice(record):
        if record["step"] == 3:
            for _ in range(2):  # os.kill could have both handled as one
                signal.raise_signal(signal.SIGINT)

    before = dist.is_initialized()  # by another test of this process
    with pytest.raises(KeyboardInterrupt):
        quick(tmp_path / "run", "checkpointing.save_period=2", callbacks=[SimpleNamespace(on_step=interrupt_twice)])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = quick(tmp_path / "run", "checkpointing.save_period=2")
    assert (resumed.last_step, dist.is_initialized()) == (4, before)
    assert losses_of(resumed) == losses_of(quick(tmp_path / "whole"))


def test_a_stopped_run_is_resumed_by_the_same_call(tmp_path):
    stopped = quick(tmp_path / "run", callbacks=[Recorder(stops_at=1)])
    assert stopped.stopped_by == "a callback" and stopped.model is None and stopped.last_step < 4
    with pytest.raises(CheckpointError, match="contains a run with another configuration"):
        quick(tmp_path / "run", rows=ROWS[:12])
    resumed = quick(tmp_path / "run")
    assert resumed.model is not None and resumed.last_step == 4
    assert losses_of(resumed) == losses_of(quick(tmp_path / "whole"))


def test_an_exception_in_a_callback_ends_the_run_with_a_checkpoint(tmp_path):
    with pytest.raises(CallbackError) as error:
        quick(tmp_path / "run", callbacks=[Recorder(fails_at=2)])
    assert str(error.value) == "callbacks[0].on_step at step 2 failed with ValueError: no."
    assert list((tmp_path / "run/checkpoints").glob("step_*"))
    assert quick(tmp_path / "run").last_step == 4


def test_a_bad_row_is_named_as_in_python(tmp_path):
    with pytest.raises(DataError) as error:
        quick(tmp_path / "run", rows=[*ROWS[:2], {**ROWS[2], "rejected": None}])
    assert "rows[2]: rejected is null. Give it a value." in str(error.value)


def run_script(text: str, folder: Path) -> str:
    (folder / "script.py").write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# A small model and few pairs, for the quick tests of the pages. The slow ones run them as they are.
SMALL = {"policy.model_name": str(MODEL), "policy.max_total_sequence_length": 512, "policy.train_global_batch_size": 4}
SIZES = [pytest.param(True, id="small"), pytest.param(False, id="as_written", marks=pytest.mark.slow)]


def with_small_model(text: str, after: str, more: dict[str, str] | None = None) -> str:
    """Insert the settings of the small model after each occurrence of a text."""
    assert after in text
    inserted = ", ".join(f"{key!r}: {value!r}" for key, value in {**SMALL, **(more or {})}.items())
    return text.replace(after, f"{after}{inserted}, ")


@pytest.mark.parametrize("small", SIZES)
def test_every_snippet_of_the_page_runs(tmp_path, small):
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(snippets) == 5
    text = "\n".join(snippets)
    if small:
        text = with_small_model(with_small_model(text, '{"dpo": {"max_num_steps": 3}, '), "settings = {")
    printed = run_script(text, tmp_path)
    assert "runs/first, step 3: its model is in runs/first/model" in printed
    assert "runs/best 3" in printed and "a callback" in printed


@pytest.mark.parametrize("small", SIZES)
def test_the_notebook_runs_from_the_first_cell_to_the_last(tmp_path, small):
    """The cells run in order in one namespace without a file, inside a running event loop, as in Jupyter."""
    cells = json.loads((ROOT / "examples/python.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    if small:
        sources[0] = with_small_model(sources[0], "short = {", {"data.train.data_path": "embedded"})
        sources[0] = sources[0].replace("}  # {}", ", 'data.validation': None, 'reference.mode': 'live'}  # {}")
    printed = run_script(
        f"import asyncio, json\n\ncells = {sources!r}\n\n\nasync def run():\n    for source in cells:\n"
        "        exec(compile(source, '<cell>', 'exec'), namespace)\n\n\n"
        "namespace = {'__name__': 'notebook'}\nasyncio.run(run())\n",
        tmp_path,
    )
    assert printed.splitlines()[-1] == "runs/exported step 4"

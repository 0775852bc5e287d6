"""The Python interface without training: lazy names, rows, callbacks, secrets, losses and formats."""

import json
import os
import pkgutil
import subprocess
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from run_directories import make_run

import tandem
from tandem.api.process import own_process
from tandem.api.result import TrainResult
from tandem.api.rows import store_rows, with_places
from tandem.config.load import load_config
from tandem.errors import CallbackError, ConfigError, DataError
from tandem.exporting.checkpoint import Exported
from tandem.generation.generate import Generation
from tandem.run_numbers import Interval
from tandem.sweeping.records import SweepResult, SweepRun
from tandem.terminal.printable import SECRETS, scrubbed
from tandem.training.run.callbacks import Callbacks, check_callbacks
from tandem.training.run.stopping import Stopping


def in_new_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_importing_tandem_and_its_help_load_neither_torch_nor_transformers():
    code = (
        "import sys, tandem; dir(tandem); heavy = {'torch', 'transformers', 'numpy', 'pydantic'}; "
        "print(heavy & set(sys.modules)); sys.argv = ['tandem', '--help']\n"
        "from tandem.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    lines = in_new_process(code).splitlines()
    assert (lines[0], lines[-1]) == ("set()", "set()")


def test_every_public_name_is_found_and_listed():
    assert [name for name in dir(tandem) if not name.startswith("__")] == sorted(tandem.__all__)
    for name in tandem.__all__:
        assert getattr(tandem, name) is not None
    functions = (
        *("load_config", "train", "evaluate", "generate", "export"),
        *("sweep", "open_run", "list_runs", "write_report"),
    )
    for name in functions:
        assert isinstance(getattr(tandem, name), types.FunctionType)
        assert getattr(tandem, name).__doc__
    with pytest.raises(AttributeError, match="module 'tandem' has no attribute 'trian'"):
        tandem.trian  # noqa: B018


def test_no_submodule_has_the_name_of_a_function():
    """Importing a submodule sets the attribute of its name on the package."""
    modules = {module.name for module in pkgutil.iter_modules(tandem.__path__)}
    assert modules & set(tandem.__all__) == {"losses", "formats"}


def test_runs_are_read_listed_and_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = make_run(tmp_path / "runs/a-1"), make_run(tmp_path / "runs/a-2", finished=False)
    result = TrainResult(
        run_dir=first, model=None, checkpoints=(), metrics=[], verdicts=(), best_step=None, last_step=1
    )
    assert tandem.open_run(result) == tandem.open_run(str(first))
    assert [(run.name, run.status) for run in tandem.list_runs()] == [("a-1", "finished"), ("a-2", "stopped")]
    assert tandem.write_report(result).page == first / "report.html"
    both = tandem.write_report([result, str(second)])
    assert both.page == Path("comparison.html")
    assert [run.name for run in both.runs] == ["a-1", "a-2"]
    with pytest.raises(ConfigError) as error:
        tandem.write_report(result, out=tmp_path)
    assert str(error.value) == f"{tmp_path}: a directory. Give the name of a file with out=FILE."


def test_a_notebook_prints_results_in_a_few_lines(tmp_path):
    folder = make_run(tmp_path / "run")
    metrics = [{"step": 3, "split": "validation-default", "loss": 0.617, "accuracy": 0.75}]
    result = TrainResult(
        run_dir=folder,
        model=None,
        checkpoints=(),
        metrics=metrics,
        verdicts=(),
        best_step=3,
        last_step=3,
        stopped_by="stop",
    )
    assert repr(result) == (
        f"<TrainResult {folder}, step 3: stopped by stop; validation-default: loss 0.6170, accuracy 0.750>"
    )
    assert repr(tandem.open_run(folder)) == (
        f"<Run {folder}: finished, step 10 of 10, validation-default loss 0.6500, accuracy 0.900>"
    )
    words = {"completion": "\x1b[2Jyes" * 30, "completion_ids": [1]}
    made = Generation(
        models=("m",), num_prompts=1, num_skipped=0, num_resumed=0, finishes={}, num_tokens=2, seconds=0.1,
        records=({"completions": [words, words]},),
    )  # fmt: skip
    first = repr(made).splitlines()
    assert first[0] == "<Generation by m: 1 prompt, 2 completions"
    assert first[1].startswith("  first: '\\x1b[2Jyes") and len(first[1]) < 160


def test_a_notebook_prints_other_results_in_a_few_lines(tmp_path):
    record = {"loss": 0.617, "accuracy": 0.75, "num_pairs": 40}
    exported = Exported(
        folder=tmp_path / "e", checkpoint=tmp_path / "step_3", step=3, form="model", dtype="float32",
        in_memory={"default": record}, exported={"default": record}, not_measured=None,
    )  # fmt: skip
    assert repr(exported) == (
        f"<Exported {tmp_path}/e: step 3, model, float32\n  default: loss 0.6170, accuracy 0.750>"
    )
    assert repr(replace(exported, exported={}, not_measured="no data")).endswith("float32\n  not measured: no data>")
    first, second = make_run(tmp_path / "a-1"), make_run(tmp_path / "a-2")
    assert repr(tandem.write_report(first)) == f"<Report {first}/report.html: a-1>"
    assert repr(tandem.write_report([first, second], tmp_path / "c.html")) == (
        f"<Report {tmp_path}/c.html: a-1, a-2; best: a-1>"
    )
    best = SweepRun(name="seed-1", path=first, values=("run.seed=1",), log=first / "log", status="finished")
    best = replace(best, accuracy=Interval(0.9, 0.8, 0.95))
    runs = (best, replace(best, name="seed-2"), replace(best, name="seed-3", status="failed"))
    swept = SweepResult(folder=tmp_path, swept=("run.seed",), runs=runs, best=best)
    assert repr(swept) == (
        f"<SweepResult {tmp_path}: 3 runs (2 finished, 1 failed) of run.seed\n"
        "  best: seed-1, accuracy 0.900 (0.800 to 0.950), not clearly>"
    )
    assert repr(replace(swept, best=None)) == f"<SweepResult {tmp_path}: 3 runs (2 finished, 1 failed) of run.seed>"


def test_a_notebook_prints_where_settings_are_from_and_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("PASSPHRASE", "correct-horse-battery")
    (tmp_path / "run.yaml").write_text("data: {train: a.jsonl}", encoding="utf-8")
    loaded = tandem.load_config(tmp_path / "run.yaml", {"run": {"seed": 3, "name": "${oc.env:PASSPHRASE}"}})
    assert repr(loaded) == f"<LoadedConfig {tmp_path}/run.yaml\n  run.seed=3\n  run.name='${{oc.env:PASSPHRASE}}'>"
    many = tandem.load_config([f"run.seed={number}" for number in range(10)])
    assert repr(many).splitlines()[0] == "<LoadedConfig the embedded default"
    assert repr(many).splitlines()[-2:] == ["  run.seed=7", "  2 more overrides>"]
    SECRETS.clear()


def test_an_error_about_rows_to_evaluate_names_them_and_not_their_file():
    rows = [{"prompt": "Hi", "chosen": "Hello.", "rejected": "No."}]
    with pytest.raises(DataError) as error:
        tandem.evaluate("embedded", rows=rows, by="topic")
    assert str(error.value).startswith(
        'by="topic": no row of rows has a value for this field. Give a field of the rows, such'
    )
    with pytest.raises(DataError, match=r"rows\[1\]"):
        tandem.evaluate("embedded", rows=[*rows, {"prompt": "Hi", "chosen": 3, "rejected": "No."}])


def test_reading_runs_does_not_import_torch(tmp_path):
    make_run(tmp_path / "runs/a-1")
    code = "import sys, tandem; print(len(tandem.list_runs('runs')), 'torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout == "1 False\n"


def test_rows_are_stored_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    rows = [{"prompt": "Hi", "score": np.float32(0.5)}, types.MappingProxyType({"prompt": "\ud800é"})]
    first = store_rows("rows", rows)
    assert first == store_rows("rows", iter(rows))
    assert first != store_rows("rows", rows[:1])
    assert [json.loads(line) for line in first.read_text().splitlines()] == [
        {"prompt": "Hi", "score": 0.5},
        {"prompt": "\ud800é"},
    ]
    assert sorted(path.suffix for path in (tmp_path / "rows").iterdir()) == [".jsonl", ".jsonl"]  # no temporary files


def test_rows_that_are_stored_at_the_same_time_stay_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    between = []

    def slowly(row):
        yield row
        between.append(store_rows("rows", [{"prompt": "other"}]))

    assert json.loads(store_rows("rows", slowly({"prompt": "mine"})).read_text()) == {"prompt": "mine"}
    assert json.loads(between[0].read_text()) == {"prompt": "other"}
    assert len(list((tmp_path / "rows").iterdir())) == 2


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        (
            "pairs.jsonl",
            ConfigError,
            "rows is of type str, not a list of dicts or another iterable. Give the path of a file as ",
        ),
        ({"prompt": "Hi"}, ConfigError, "rows is of type dict, not a list of dicts or another iterable."),
        (3, ConfigError, "rows is of type int, not a list of dicts or another iterable."),
        ([], DataError, "rows has no rows. An iterator may have been read to its end before."),
        (
            ["Hi"],
            DataError,
            "rows[0] is a text, not a dict such as {prompt, chosen, rejected}. For a DataFrame, give ",
        ),
        ([{}, {1: 2}], DataError, "rows[1]: the key 1 is not a string."),
        ([{"a": {1, 2}}], DataError, "rows[0] cannot be written as JSON: a value of type set."),
    ],
)
def test_rows_that_are_refused(rows, kind, message):
    with pytest.raises(kind) as error:
        store_rows("rows", rows)
    assert str(error.value).startswith(message)


def test_messages_name_rows_as_python_does():
    files = {"rows": Path("/cache/rows/ab.jsonl")}
    assert with_places("/cache/rows/ab.jsonl:3: empty; /cache/rows/ab.jsonl: bad", files) == "rows[2]: empty; rows: bad"
    other = f"/cache/rows/{'a1' * 16}.jsonl"
    assert with_places(f"'{other}' there, '/cache/rows/ab.jsonl' now", files) == "'other rows' there, 'rows' now"


class Recorder:
    def __init__(self, answer: object = None):
        self.calls, self.answer = [], answer

    def on_step(self, record):
        self.calls.append(("step", record["step"]))
        return self.answer

    def on_validation(self, record):
        self.calls.append(("validation", record["split"]))

    def on_checkpoint(self, path, step):
        self.calls.append((path.name, step))


def started(*callbacks: object) -> tuple[Callbacks, Stopping]:
    made, stopping = Callbacks(callbacks), Stopping()
    made.start(Path("run"), stopping, is_first=True)
    made.last_step = 4
    return made, stopping


def test_callbacks_receive_steps_validations_and_checkpoints():
    recorder = Recorder()
    callbacks, stopping = started(recorder, object())
    for split, step in (("train", 1), ("validation-a", 1), ("timing/validation", 1), ("exported-a", 1)):
        callbacks.record({"split": split, "step": step})
    callbacks.saved(Path("run/checkpoints/step_1"), 1)
    assert recorder.calls == [("step", 1), ("validation", "validation-a"), ("step_1", 1)]
    assert not stopping.is_wanted()


def test_a_callback_may_ask_to_stop_before_the_last_step():
    callbacks, stopping = started(Recorder(True))
    callbacks.record({"split": "train", "step": 4})
    assert not stopping.is_wanted()
    callbacks.record({"split": "train", "step": 3})
    assert stopping.is_wanted() and stopping.reason == "a callback"


def test_after_an_exception_no_callback_is_called():
    class Failing:
        def on_step(self, record):
            raise ValueError("no")

    recorder = Recorder()
    callbacks, stopping = started(Failing(), recorder)
    callbacks.record({"split": "train", "step": 2})
    callbacks.record({"split": "train", "step": 3})
    assert recorder.calls == [] and stopping.is_wanted()
    with pytest.raises(CallbackError) as error:
        callbacks.raise_failure()
    assert str(error.value) == "callbacks[0].on_step at step 2 failed with ValueError: no."
    assert isinstance(error.value.__cause__, ValueError)


def test_objects_that_would_never_be_called_are_refused():
    methods = "on_step, on_validation, on_checkpoint, on_end"
    for given, what in (
        (print, "of type builtin_function_or_method"),
        (Recorder, "the class Recorder, not an object of it"),
    ):
        with pytest.raises(ConfigError) as error:
            check_callbacks([Recorder(), given])
        assert str(error.value) == f"callbacks[1] is {what}. Give an object with one of {methods}."


def test_secrets_of_a_configuration_in_use_stay_hidden(monkeypatch):
    monkeypatch.setenv("PASSPHRASE", "correct-horse-battery")
    first = load_config(None, ["run.name=${oc.env:PASSPHRASE}"])
    load_config(None, [])
    assert scrubbed("correct-horse-battery") == "correct-horse-battery"
    with pytest.raises(ConfigError) as error, own_process("a test", first):
        load_config(None, [])  # as a callback may do
        assert scrubbed("correct-horse-battery") == "$PASSPHRASE"
        raise ConfigError("found correct-horse-battery")
    load_config(None, [])
    assert str(error.value) == "found $PASSPHRASE"
    SECRETS.clear()


def test_a_call_leaves_the_process_as_it_was(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    filters = list(warnings.filters)
    before, state, hook = dict(os.environ), torch.get_rng_state(), sys.excepthook
    with own_process("a test"):
        monkeypatch.setattr(sys, "excepthook", lambda *_: None)  # as a process group does
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        del os.environ["KEPT"]
        torch.use_deterministic_algorithms(True)
        warnings.filterwarnings("ignore", message="added by a package")
        torch.manual_seed(1)
        with pytest.raises(ConfigError) as error, own_process("tandem.train"):
            pass
    assert dict(os.environ) == before
    assert not torch.are_deterministic_algorithms_enabled() and bool((torch.get_rng_state() == state).all())
    assert str(error.value) == (
        "tandem.train: another call is at work in this process, which can do one at a time. Wait for it, or use another one."
    )
    assert sys.excepthook is hook
    assert warnings.filters == filters


def test_losses_are_listed_described_and_computed():
    assert tandem.losses.names()[:3] == ["dpo", "ipo", "rpo_sq"]
    described = tandem.losses.describe("sigmoid")
    assert (described.name, described.arguments) == ("dpo", {"beta": 0.1, "label_smoothing": 0.0})
    pair = {"chosen": [-20.0], "rejected": [-24.0], "reference_chosen": [-20.5], "reference_rejected": [-23.5]}
    # d = 0.5 - (-0.5) = 1; -log sigmoid(0.1) = 0.6444, (1 - 5)^2 = 16
    assert tandem.losses.compute("dpo", **pair).tolist() == pytest.approx([0.64439666])
    assert tandem.losses.compute("ipo", **pair).tolist() == pytest.approx([16.0])
    assert tandem.losses.compute(lambda pairs, *, beta: beta * pairs.ratios.margin, **pair, beta=0.5).tolist() == [0.5]
    chosen = torch.tensor([-20.0], dtype=torch.float64, requires_grad=True)
    tandem.losses.compute("hinge", **(pair | {"chosen": chosen})).sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-0.1])
    with pytest.raises(ConfigError, match="dpo needs a reference"):
        tandem.losses.compute("dpo", chosen=[-1.0], rejected=[-2.0])
    for wrong, message in {
        "betta=3": r"losses\.compute: unknown key betta\. Did you mean beta\?",
        "beta=-1": r"losses\.compute: beta = -1: input should be greater than 0\.$",
        "chosen=['x']": "every argument needs one number for each pair",
        "reference_chosen='a'": "every argument needs one number for each pair",
        "rejected=[1.0, 2.0]": "every argument needs one number for each of the 1 pairs",
    }.items():
        with pytest.raises(ConfigError, match=message):
            tandem.losses.compute("dpo", **(pair | eval(f"dict({wrong})")))
    with pytest.raises(
        ConfigError, match=r"^unknown loss 'sigmoidal'\. Did you mean sigmoid\? Use one of dpo, .* or cpo\.$"
    ):
        tandem.losses.describe("sigmoidal")
    with pytest.raises(ConfigError, match=r"^unknown loss 'ipoo'\. Did you mean ipo\? Use one of dpo, .* or cpo\.$"):
        tandem.losses.compute("ipoo", **pair)
    with pytest.raises(ConfigError, match=r"^unknown loss None\. Use one of dpo, "):
        tandem.losses.compute(None, **pair)
    with pytest.raises(ConfigError, match="needs_refrence: not a property of losses"):
        tandem.losses.declare(needs_refrence=False)


def test_formats_are_listed_described_and_read():
    assert tandem.formats.names()[1] == "BinaryPreferenceDataset"
    assert tandem.formats.describe("aligner").keys == ("prompt", "chosen_response", "rejected_response")
    read = tandem.formats.read({"prompt": "Hi", "chosen": "Yes", "rejected": "No"})
    assert (read.prompt, [one.answer for one in read.completions]) == ("Hi", ["Yes", "No"])
    with pytest.raises(DataError) as error:
        tandem.formats.read({"prompt": "Hi", "chosen": "Yes", "rejected": "Yes"})
    assert str(error.value) == "chosen and rejected are identical, so there is no preference to learn."
    with pytest.raises(ConfigError, match="binary: not a format"):
        tandem.formats.read({}, "binary")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": "a=b"}, 'config="a=b": a single text is the path of a YAML file. Give settings as a list.'),
        (
            {"config": {"data.train": "a.jsonl"}, "rows": [{}]},
            "rows and data.train = a.jsonl both give the data. Leave out one of them.",
        ),
        (
            {"config": ["dpo.preference_loss=ipo"], "loss": "dpo"},
            "loss and dpo.preference_loss both name the loss. Leave out one of them.",
        ),
        ({"config": {"dpo": {"betaa": 1}}}, "given in Python: "),
        ({"callbacks": [3]}, "callbacks[0] is of type int. Give an object with one of "),
    ],
)
def test_arguments_of_train_that_are_refused(arguments, message):
    with pytest.raises(ConfigError) as error:
        tandem.train(**arguments)
    assert str(error.value).startswith(message)


def test_settings_alone_are_the_first_argument_of_load_config(tmp_path):
    (tmp_path / "run.yaml").write_text("run: {seed: 3}\ndata: {train: a.jsonl}", encoding="utf-8")
    for given in ({"run.seed": 5}, ["run.seed=5"], [{"run": {"seed": 5}}]):
        assert tandem.load_config(given).config.run.seed == 5
    assert tandem.load_config({"run.seed": 5}, ["run.seed=6"]).config.run.seed == 6
    assert tandem.load_config(tmp_path / "run.yaml").config.run.seed == 3
    assert tandem.load_config(tmp_path / "run.yaml", {"run.seed": 5}).config.run.seed == 5


def test_settings_in_texts_are_given_in_python_too():
    with pytest.raises(ConfigError) as error:
        tandem.load_config(["dpo.betaa=1"])
    assert str(error.value).startswith("given in Python: ")


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (
            [],
            DataError,
            "data is empty. Give files or rows, or leave it out to measure on the validation sets of a run.",
        ),
        (
            ["a.jsonl", {"prompt": "Hi"}],
            ConfigError,
            "data has files and an item of type dict. Give files as data, and pairs as rows=[...].",
        ),
        ({"prompt": "Hi"}, ConfigError, "data is of type dict, not a list of dicts or another iterable."),
        (
            [{"prompt": "Hi", "chosen": "Yes"}],
            DataError,
            "data: none of 1 rows can be read:\n  missing key: 1\n    data[0]: no key rejected.",
        ),
        (
            iter([{"prompt": "Hi", "chosen": "Yes"}]),
            DataError,
            "data: none of 1 rows can be read:\n  missing key: 1\n    data[0]: no key rejected.",
        ),
        ((Path("no.jsonl"),), DataError, "no.jsonl: no such file or folder"),
    ],
)
def test_data_to_evaluate_is_files_or_rows(data, kind, message):
    with pytest.raises(kind) as error:
        tandem.evaluate("embedded", data)
    assert str(error.value).startswith(message)


METHODS = "on_step, on_validation, on_checkpoint, on_end"
SETTINGS = 'Give a dict such as {"run.seed": 1}, or a list of texts such as "run.seed=1"'


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tandem.train(callbacks=print),
            f"callbacks is of type builtin_function_or_method. Give a list of objects with one of {METHODS}.",
        ),
        (lambda: tandem.train(verbosity="loud"), 'verbosity="loud": give silent, quiet, normal or verbose.'),
        (lambda: tandem.train(verbosity=None), "verbosity is of type NoneType. Give silent, quiet, normal or verbose."),
        (lambda: tandem.train(fresh="no"), 'fresh="no": give True or False.'),
        (lambda: tandem.train(allow_env="HOME"), 'allow_env="HOME": give a list of texts.'),
        (lambda: tandem.train(config=3), f"config is of type int. {SETTINGS}, or the path of a YAML file."),
        (lambda: tandem.load_config([None]), f"config has an item of type NoneType. {SETTINGS}, or the path of a"),
        (lambda: tandem.load_config(None, 3), f"overrides is of type int. {SETTINGS}."),
        (lambda: tandem.sweep(3), f"overrides is of type int. {SETTINGS}."),
        (lambda: tandem.sweep(["run.seed=1,2"], config={}), "config is of type dict. Give the path of a YAML file."),
        (lambda: tandem.generate("embedded", ["Hi"], temperature="hot"), 'temperature="hot": give a number.'),
        (lambda: tandem.generate("embedded", ["Hi"], seed=True), "seed=True: give an integer."),
        (
            lambda: tandem.generate("embedded", ["Hi"], engine=tandem.EngineSettings(name="http", concurrency="8")),
            'concurrency="8": give an integer.',
        ),
        (lambda: tandem.export("run", checkpoint=3), "checkpoint=3: give best, latest or step_N."),
        (lambda: tandem.export("run", form="merge"), 'form="merge": give adapter or merged.'),
        (lambda: tandem.evaluate(3, "embedded"), "model=3: give a path, a name, or what train returned."),
        (lambda: tandem.evaluate("embedded", beta=[1]), "beta is of type list. Give a number."),
        (lambda: tandem.evaluate("embedded", "embedded", lm_eval="arc"), 'lm_eval="arc": give a list of texts.'),
        (lambda: tandem.evaluate("embedded", "embedded", overrides=3), f"overrides is of type int. {SETTINGS}."),
        (
            lambda: tandem.evaluate("embedded", "embedded", overrides={"run": {"seed": 1}}),
            "run.seed: this key has no effect on an evaluation. Leave it out.",
        ),
        (lambda: tandem.open_run(3), "run=3: give the directory of a run, or what train returned."),
        (lambda: tandem.write_report([3]), "runs is of type list. Give directories of runs, or what train returned."),
        (lambda: tandem.list_runs(3), "folder=3: give a path."),
    ],
)
def test_arguments_of_wrong_types_are_refused_in_a_sentence(call, message):
    with pytest.raises(ConfigError) as error:
        call()
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "overrides",
    [
        {"data.default.prompt_key": "asked"},
        {"data": {"default": {"prompt_key": "asked"}}},
        ["data.default.prompt_key=asked"],
    ],
)
def test_settings_of_an_evaluation_are_a_dict_or_texts(overrides):
    rows = [{"asked": "Hi", "chosen": "Hello.", "rejected": "No."}]
    assert tandem.evaluate("embedded", rows, overrides=overrides).total.num_pairs == 1


def test_an_argument_that_is_missing_or_unknown_is_pythons_own_error():
    with pytest.raises(TypeError, match="generate\\(\\) missing 1 required positional argument: 'prompts'"):
        tandem.generate("embedded")
    with pytest.raises(TypeError, match="train\\(\\) got an unexpected keyword argument 'verbos'"):
        tandem.train(verbos="quiet")


@pytest.mark.parametrize(
    ("prompts", "kind", "message"),
    [
        (3, ConfigError, "prompts is of type int, not a list of texts, of lists of messages or of rows."),
        (
            {"prompt": "Hi"},
            ConfigError,
            "prompts is of type dict, not a list of texts, of lists of messages or of rows.",
        ),
        ([], DataError, "prompts is empty. Give a list of texts, lists of messages or rows, or the path of a file."),
        (
            [{"text": "Hi"}],
            DataError,
            "prompts[0]: no key prompt or messages, and not preference data. Keys found: text.",
        ),
        (["Hi", {"prompt": {1}}], DataError, "prompts[1] cannot be written as JSON: a value of type set."),
        (
            [{"role": "user", "content": "Hi"}],
            DataError,
            "prompts[0] is a message. Each prompt is a list of messages: give [[...]] for one.",
        ),
    ],
)
def test_prompts_that_are_refused(prompts, kind, message):
    with pytest.raises(kind) as error:
        tandem.generate("embedded", prompts)
    assert str(error.value) == message


def test_a_data_frame_of_prompts_is_refused():
    class DataFrame(list):
        iterrows = None

    with pytest.raises(ConfigError) as error:
        tandem.generate("embedded", DataFrame(["column"]))
    assert str(error.value).endswith('or of rows. Give frame.to_dict("records").')


def test_prompts_are_texts_messages_and_rows_from_any_iterator():
    messages = [{"role": "user", "content": "Hi"}]
    rows = [{"prompt": "Hi", "topic": np.float32(0.5)}, {"messages": messages}, "Hi", messages]
    found = tandem.generate("embedded", iter(rows), max_new_tokens=1).records
    assert [one["prompt"] for one in found] == ["Hi", messages, "Hi", messages]
    assert [one.get("row") for one in found] == [{"topic": 0.5}, None, None, None]


@pytest.mark.parametrize("text", ["Hi there", "Hello", "Is 2/3 > 1/2?", "and\nso on"])
def test_a_prompt_that_is_not_in_a_list_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        tandem.generate("embedded", text)
    shown = json.dumps(text)
    assert str(error.value) == f"prompts = {shown}: no such file. If it is a prompt, give a list: [{shown}]."


@pytest.mark.parametrize("name", ["no.jsonl", "my file.txt", "./no"])
def test_the_name_of_a_file_is_not_taken_for_a_prompt(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        tandem.generate("embedded", name)


def test_a_chat_template_is_an_argument_as_it_is_an_option(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0]['content'] }}!")
    calls = [
        {"chat_template": str(file)},
        {"chat_template": file},
        {"chat_template": "~/own.jinja"},
        {"engine": tandem.EngineSettings(chat_template=str(file))},
        {"engine": tandem.EngineSettings(chat_template=file)},
    ]
    made = [tandem.generate("embedded", ["Hi"], max_new_tokens=4, **one).records for one in calls]
    assert all(one == made[0] for one in made)
    plain = tandem.generate("embedded", ["Hi"], max_new_tokens=4).records
    assert plain[0]["generated_by"] != made[0][0]["generated_by"]

    both = {"chat_template": "none", "engine": tandem.EngineSettings(chat_template="none")}
    for wrong, message in (
        (both, 'chat_template="none": engine has one too. Leave out one of them.'),
        ({"chat_template": "no.jinja"}, 'chat_template="no.jinja": there is no such file. Check the path.'),
        ({"chat_template": 3}, "chat_template=3: give a path."),
        (
            {"chat_template": "none", "engine": "http"},
            'chat_template has no effect with engine="http". Leave it out.',
        ),
    ):
        with pytest.raises(ConfigError) as error:
            tandem.generate("embedded", ["Hi"], **wrong)
        assert str(error.value) == message


def test_what_train_returned_stands_for_its_run(tmp_path):
    result = TrainResult(
        run_dir=tmp_path / "gone", model=None, checkpoints=(), metrics=[], verdicts=(), best_step=None, last_step=1
    )
    for call, place in (
        (lambda: tandem.export(result), str(result.run_dir)),
        (lambda: tandem.evaluate(result, "embedded"), f'model="{result.run_dir}"'),
        (lambda: tandem.evaluate("embedded", "embedded", against=result), f'against="{result.run_dir}"'),
        (lambda: tandem.generate(result, ["Hi"]), f'model="{result.run_dir}"'),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert str(error.value).startswith(f"{place}: ")

"""Losses and formats of the user's: found by name, checked, compared, and never run from a file without permission."""

import hashlib
import importlib
import json
from pathlib import Path

import pytest
import torch

from tandem.config.load import load_config
from tandem.data.formats.user_formats import converted
from tandem.data.read.sources import RowError, SourceRow
from tandem.errors import CheckpointError, ConfigError
from tandem.loss.objective import check_user_losses
from tandem.terminal.commands import override as as_override
from tandem.training.run.directory import refuse_other_config, stored_config
from tandem.user_code import load_function, name_function

pytestmark = pytest.mark.usefixtures("of_a_command")

LOSS = """
import torch.nn.functional as F

def focal(pairs, *, beta, gamma=2.0):
    "less weight on decided pairs"
    logits = beta * pairs.ratios.margin
    return -((1 - logits.sigmoid()) ** gamma) * F.logsigmoid(logits)
"""
KEY = "dpo.preference_loss"


def top_level(pairs, *, beta):
    return -beta * pairs.ratios.margin


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(text: str, name: str = "mine.py") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def refusal(*overrides: str, file: str | None = None, **options: bool) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(file, list(overrides), **options)
    return str(error.value)


def test_a_loss_of_a_file_is_used_and_its_sha256_is_stored():
    written(LOSS)
    loaded = load_config(None, ["dpo.preference_loss=mine.py:focal", "dpo.reference_policy_kl_penalty=0.5"])
    assert loaded.config.dpo.preference_loss == "mine.py:focal"
    assert loaded.config.run.code == {
        "mine.py:focal": hashlib.sha256(LOSS.replace("\n\n", "\n").strip("\n").encode()).hexdigest()
    }
    assert loaded.options == ["--allow-code"]
    check_user_losses(loaded.config.dpo)


def test_settings_that_the_loss_does_not_read_are_refused():
    written(LOSS)
    assert refusal("dpo.preference_loss=mine.py:focal", "dpo.label_smoothing=0.1").startswith(
        "command line: dpo.label_smoothing = 0.1 has no effect on dpo.preference_loss mine.py:focal. Leave it out, or use dpo"
    )


def test_missing_files_and_functions():
    assert refusal("dpo.preference_loss=no.py:f") == (
        "dpo.preference_loss = no.py:f: there is no file no.py. Give the path of a Python file, from the working directory."
    )
    Path("folder.py").mkdir()
    assert refusal("dpo.preference_loss=folder.py:f") == (
        "dpo.preference_loss = folder.py:f: a folder, not a file. Give the path of a Python file, from the working directory."
    )
    written(LOSS + "\nvalue = 3\n")
    assert refusal("dpo.preference_loss=mine.py:fokal") == (
        "dpo.preference_loss = mine.py:fokal: the function fokal is not in the file. Its functions are focal."
    )
    assert refusal("dpo.preference_loss=mine.py:value") == (
        "dpo.preference_loss = mine.py:value: the function value is not a function there. Its functions are focal."
    )


def test_a_file_without_a_function_lists_its_functions_and_is_not_run(tmp_path):
    marked(tmp_path)
    Path("mine.py").write_text(Path("mine.py").read_text() + "\ndef _own(): pass\n\ndef other(): pass\n")
    alone = "a Python file without the name of a function."
    assert refusal("dpo.preference_loss=mine.py") == (
        f"command line: dpo.preference_loss = mine.py: {alone} Write mine.py:focal or mine.py:other."
    )
    assert refusal("dpo.preference_loss={no.py: 1}") == (
        f"command line: dpo.preference_loss = no.py: {alone} Write no.py:FUNCTION."
    )
    assert refusal("data.train=a.jsonl", "data.train.dataset_name=mine.py") == (
        f'command line: data.train.dataset_name = "mine.py": {alone} Write mine.py:focal or mine.py:other.'
    )
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("\n1 / 0\n", "mine.py:2 fails when it is imported, with ZeroDivisionError: division by zero"),
        ("def f(:\n", "mine.py:1 fails when it is imported, with SyntaxError: invalid syntax (mine.py, line 1)"),
        ("import sys\nsys.exit(3)\n", "mine.py:2 fails when it is imported, with SystemExit: 3"),
        (
            "import tandem\ntandem.train()\n",
            "mine.py:2 fails when it is imported, with ConfigError: mine.py calls tandem.train while it is imported. Put the "
            "call below `if __name__ == '__main__':`",
        ),
    ],
)
def test_a_file_that_fails(text, what):
    written(text)
    assert refusal("dpo.preference_loss=mine.py:f") == f"dpo.preference_loss = mine.py:f: {what}. Fix the file."


SETTINGS = "beta, label_smoothing, gt_reward_scale, discopop_tau, simpo_gamma, orpo_lambda, cpo_alpha"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("pairs, *, gamma", "gamma is not a setting of losses"),
        ("", "it cannot be called so"),
        ("*, beta", "it cannot be called so"),
        ("pairs, **more", "it cannot be called so"),
        ("*pairs", "it cannot be called so"),
    ],
)
def test_a_wrong_signature(arguments, what):
    written(f"def f({arguments}): pass\n")
    assert refusal("dpo.preference_loss=mine.py:f") == (
        f"dpo.preference_loss = mine.py:f: its arguments are ({arguments}), but a loss is called as loss(pairs, beta=...): "
        f"{what}. After the pairs, name only settings ({SETTINGS}) and arguments with a default."
    )


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (
            "return (beta * pairs.ratios.margin).mean()",
            "for 3 pairs it returns a tensor of shape [] and type torch.float64, not one number for each pair, [3]. Do not "
            "average over pairs: tandem does.",
        ),
        ("return 1.0", "it returns float, not a tensor with one loss for each pair."),
        (
            "return (pairs.ratios.margin - 10).log()",
            "its value is nan for an ordinary pair (log-probabilities -20 and -24, of the reference -20.5 and -23.5). Check the "
            "formula.",
        ),
        (
            "return pairs.ratios.margin.abs().sqrt()",
            "its gradient is nan for an ordinary pair (log-probabilities -8 and -8, of the reference -8 and -8). Check the "
            "formula.",
        ),
        (
            "return pairs.reference.margin * beta",
            "its values do not depend on the policy, so there is nothing to train.",
        ),
        ("return pairs.nothing", "it fails with AttributeError: 'Pairs' object has no attribute 'nothing'."),
    ],
)
def test_values_that_cannot_be_trained_on(body, what):
    written(f"def f(pairs, *, beta):\n    {body}\n")
    dpo = load_config(None, ["dpo.preference_loss=mine.py:f"]).config.dpo
    with pytest.raises(ConfigError) as error:
        check_user_losses(dpo)
    assert str(error.value) == f"dpo.preference_loss = mine.py:f: {what}"


def marked(tmp_path: Path) -> str:
    """A loss whose file leaves a mark when it is run."""
    return written(f"open({str(tmp_path / 'was_run')!r}, 'w')\n{LOSS}")


@pytest.mark.parametrize(
    ("text", "overrides", "key", "name"),
    [
        ("dpo: {preference_loss: 'mine.py:focal'}", [], KEY, "mine.py:focal"),
        ("dpo: {preference_loss: {'mine.py:focal': 1.0}}", ["dpo.preference_loss.dpo=0.5"], KEY, "mine.py:focal"),
        ("run: {name: 'mine.py:focal'}", ["dpo.preference_loss=${run.name}"], KEY, "mine.py:focal"),
        (
            "data: {train: {data_path: a.jsonl, dataset_name: 'mine.py:focal'}}",
            ["data.train.data_path=b.jsonl"],
            "",
            "",
        ),
        ("data: {train: [{data_path: a.jsonl, dataset_name: 'mine.py:focal'}]}", [], "data.train[0].dataset_name", ""),
        ("data: {default: {dataset_name: 'mine.py:focal'}}", ["data.train=a.jsonl"], "data.default.dataset_name", ""),
        ("data: {val_data_paths: {a: {data_path: a.jsonl, dataset_name: 'mine.py:focal'}}}", [], None, ""),
    ],
)
def test_code_that_a_file_names_is_refused_and_not_run(tmp_path, text, overrides, key, name):
    marked(tmp_path)
    Path("run.yaml").write_text(text, encoding="utf-8")
    key = "data.val_data_paths.a.dataset_name" if key is None else key or "data.train.dataset_name"
    assert refusal(*overrides, file="run.yaml") == (
        f"{tmp_path}/run.yaml: {key} = mine.py:focal names Python code, which would be run. If you trust it, add --allow-code."
        if "${" not in "".join(overrides)
        else f"run.yaml: {key} = mine.py:focal names Python code, which would be run. If you trust it, add --allow-code."
    )
    assert not (tmp_path / "was_run").exists()


def test_a_file_may_name_code_with_permission_and_the_command_line_may_always(tmp_path):
    marked(tmp_path)
    Path("run.yaml").write_text("dpo: {preference_loss: 'mine.py:focal'}\ndata: {train: a.jsonl}", encoding="utf-8")
    assert load_config("run.yaml", [], allow_code=True).allows_code
    assert (tmp_path / "was_run").exists()
    Path("other.yaml").write_text("data: {train: a.jsonl}", encoding="utf-8")
    loaded = load_config("other.yaml", ["data.train.dataset_name=mine.py:focal", "dpo.preference_loss=mine.py:focal"])
    assert list(loaded.config.run.code) == ["mine.py:focal"]


def test_a_stored_configuration_is_read_without_running_its_code(tmp_path):
    marked(tmp_path)
    Path("config.yaml").write_text("dpo: {preference_loss: {'mine.py:focal': 1.0}}", encoding="utf-8")
    assert stored_config(tmp_path)["dpo"]["preference_loss"] == {"mine.py:focal": 1.0}
    assert not (tmp_path / "was_run").exists()


def test_a_changed_file_is_noticed(tmp_path):
    written(LOSS)
    before = load_config(None, ["dpo.preference_loss=mine.py:focal"])
    (tmp_path / "config.yaml").write_text(before.as_yaml(), encoding="utf-8")
    old = before.config.run.code["mine.py:focal"]
    written(LOSS.replace("2.0", "3.0"))
    now = load_config(None, ["dpo.preference_loss=mine.py:focal"])
    new = now.config.run.code["mine.py:focal"]
    assert old != new
    with pytest.raises(CheckpointError) as error:
        refuse_other_config(tmp_path, now)
    assert "\n  the code of mine.py:focal, which has changed\n" in str(error.value)
    assert refusal(file="config.yaml", allow_code=True) == (
        f"dpo.preference_loss = mine.py:focal: the code has changed since the run started (SHA-256 {new[:12]}..., then "
        f"{old[:12]}..., without comments and blank lines), so the run would not be the same. Undo the change, or start a "
        "new run."
    )


COMMENTED = """# -*- coding: utf-8 -*-
import torch.nn.functional as F  # for logsigmoid


# A loss of mine.
def focal(pairs, *, beta, gamma=2.0):
    "less weight on decided pairs"
\t
    logits = beta * pairs.ratios.margin  \r
    return -((1 - logits.sigmoid()) ** gamma) * F.logsigmoid(logits)
"""


def test_comments_and_blank_lines_are_no_change():
    written(LOSS)
    before = load_config(None, ["dpo.preference_loss=mine.py:focal"]).config.run.code
    for text in (COMMENTED, LOSS.replace("\n", "\r\n"), LOSS + "\n\n# end"):
        written(text)
        assert load_config(None, ["dpo.preference_loss=mine.py:focal"]).config.run.code == before


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ('TEXT = """a\n\nb"""', 'TEXT = """a\nb"""'),
        ('TEXT = """a # b\n"""', 'TEXT = """a\n"""'),
        ('TEXT = """a \n"""', 'TEXT = """a\n"""'),
        ('TEXT = "#1"', 'TEXT = "#2"'),
    ],
)
def test_texts_are_code(text, changed):
    codes = []
    for one in (text, changed):
        written(f"{LOSS}\n{one}\n")
        codes.append(load_config(None, ["dpo.preference_loss=mine.py:focal"]).config.run.code)
    assert codes[0] != codes[1]


def test_a_function_object_is_named_by_its_file():
    assert name_function("loss", top_level) == f"{Path(__file__).resolve()}:top_level"
    assert load_function(KEY, f"{Path(__file__).resolve()}:top_level").function is top_level


@pytest.mark.parametrize(("start", "is_warned"), [("", True), ("if __name__ != '':\n    ", False)])
def test_a_call_that_runs_on_import_is_warned_of(tmp_path, monkeypatch, recwarn, start, is_warned):
    name = f"calls_on_import_{is_warned}"
    monkeypatch.syspath_prepend(tmp_path)
    call = "from tandem.user_code import name_function\ndef f(pairs): pass\n"
    written(f"{call}{start}name_function('loss', f)\n", f"{name}.py")
    importlib.import_module(name)
    said = [f"{one.message}" for one in recwarn if one.category is UserWarning]
    assert (
        said
        == [
            f"{name}.py calls tandem while it is imported, so `tandem eval` and `tandem export` cannot import its functions. Put "
            "the call below `if __name__ == '__main__':` now, since a run does not accept changed code."
        ]
        * is_warned
    )


def test_a_function_without_a_file_is_known_in_its_process_only():
    namespace = {"__name__": "no_such_module"}
    exec("def f(pairs): return pairs.ratios.margin", namespace)
    assert name_function("loss", namespace["f"]) == "python:f"
    assert load_function(KEY, "python:f").function is namespace["f"]
    assert refusal("dpo.preference_loss=python:g") == (
        "dpo.preference_loss = python:g: this function was defined in Python, not in a file, and this process does not have it. "
        "Start the run from Python again with g, or put the function into a file."
    )


def test_a_file_may_name_a_function_that_this_process_passed_unless_its_file_has_changed(tmp_path):
    """The config.yaml of a run that was trained in this notebook is read without permission: no code is run."""
    written(LOSS)
    passed = load_function(KEY, "mine.py:focal").function
    Path("run.yaml").write_text("dpo: {preference_loss: 'mine.py:focal'}\ndata: {train: a.jsonl}", encoding="utf-8")
    assert "names Python code" in refusal(file="run.yaml")  # loaded by name before: that was with permission
    name = name_function("loss", passed)
    Path("run.yaml").write_text(f"dpo: {{preference_loss: '{name}'}}\ndata: {{train: a.jsonl}}", encoding="utf-8")
    assert list(load_config("run.yaml").config.run.code) == [name]
    written(LOSS.replace("2.0", "3.0"))
    assert "names Python code" in refusal(file="run.yaml")


@pytest.mark.parametrize("function", [lambda pairs: pairs, torch.nn.Identity(), int])
def test_functions_that_cannot_be_compared_are_refused(function):
    with pytest.raises(ConfigError) as error:
        name_function("loss", function)
    assert "a resumed run could not notice" in str(error.value) or "not a Python function" in str(error.value)


def made(body: str):
    written(f"def f(row):\n    {body}\n")
    load_function("data.train.dataset_name", "mine.py:f")
    return converted(SourceRow({"q": "Hi", "a": "Yes"}, "pairs.jsonl", 3), "mine.py:f")


def test_a_format_turns_a_row_into_a_row_of_a_known_format():
    row, name = made("return {'prompt': row['q'], 'chosen': row['a'], 'rejected': ('No',)[0]}")
    assert (row.value, row.place, name) == (
        {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
        "pairs.jsonl:3",
        "BinaryPreferenceDataset",
    )


EXPECTED = "not a preference. Return a dict with prompt, chosen and rejected, or with the keys of another known format."


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("return [row]", "bad", f"mine.py:f returned a list, {EXPECTED}"),
        ("return {'prompt': 'Hi'}", "bad", f"mine.py:f returned the keys prompt, {EXPECTED}"),
        ("return row['no']", "bad", "mine.py:f fails with KeyError: 'no'."),
        ("return None", "filtered", "mine.py:f returned None, which leaves the row out."),
    ],
)
def test_what_a_format_must_not_return(body, kind, message):
    with pytest.raises(RowError) as error:
        made(body)
    assert (error.value.kind, error.value.message) == (kind, message)


@pytest.mark.parametrize(
    "override",
    [
        "dpo.preference_loss={mine.py:focal: 0.5, dpo: 1}",
        "dpo.preference_loss={dpo:1.0,mine.py:focal:0.5}",
        "+dpo.preference_loss={'mine.py:focal' : 0.5, dpo: 1}",
        'dpo={preference_loss: {dpo: 1, "./mine.py:focal": 0.5}}',
    ],
)
def test_a_map_on_the_command_line_may_name_functions(override):
    written(LOSS)
    loaded = load_config(None, [override])
    name = "./mine.py:focal" if "./" in override else "mine.py:focal"
    assert loaded.config.dpo.preference_loss == {name: 0.5, "dpo": 1}
    again = load_config(None, [as_override("dpo.preference_loss", loaded.config.dpo.preference_loss)])
    assert again.config.dpo.preference_loss == loaded.config.dpo.preference_loss


def test_a_map_in_a_file_needs_permission(tmp_path):
    written(LOSS + "NUMBER = 1\n")
    Path("run.yaml").write_text("dpo: {preference_loss: {'mine.py:focal': 0.5, dpo: 1}}", encoding="utf-8")
    assert refusal(file="run.yaml") == (
        f"{tmp_path}/run.yaml: dpo.preference_loss = mine.py:focal names Python code, which would be run. If you trust it, add "
        "--allow-code."
    )
    loaded = load_config("run.yaml", allow_code=True)
    assert loaded.config.dpo.preference_loss == {"mine.py:focal": 0.5, "dpo": 1}


def test_maps_of_losses_may_have_functions():
    written(LOSS)
    loaded = load_config(None, {"dpo": {"preference_loss": {"mine.py:focal": 0.5, "dpo": 1}}, "run": {"seed": 3}})
    assert loaded.config.dpo.preference_loss == {"mine.py:focal": 0.5, "dpo": 1}
    assert loaded.config.run.seed == 3
    assert json.loads(json.dumps(loaded.config.run.code)).keys() == {"mine.py:focal"}

"""The words of messages: options in a command, keyword arguments in a call from Python, and neither in the other."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import tandem
from tandem.api import commands, training
from tandem.cli import main  # noqa: F401, registers the commands
from tandem.cli.app import app
from tandem.config.load import load_config
from tandem.errors import TandemError
from tandem.generation.records import EngineSettings
from tandem.terminal import arguments
from tandem.terminal.arguments import command_words, option, same_call, setting
from tandem.terminal.commands import advice_to_allow_code, export_call, resume_call, tandem_command

SOURCE = Path(tandem.__file__).parent
FUNCTIONS = (
    *(commands.evaluate, commands.generate, commands.export, training.train, load_config),
    *(tandem.sweep, tandem.write_report),
)
# Options that no function has: only their commands name them in messages.
OF_COMMANDS_ALONE = {
    *(
        "--config",
        "--resume",
        "--port",
        "--gpu",
        "--gpus",
        "--machines",
        "--link",
        "--network",
        "--price-per-hour",
        "--no-network",
        "--json",
        "--prompt",
        "--html",
    ),
    *("--row", "--model", "--output-dir", "--to-nemo", "--from-nemo", "--pack-sizes", "--quiet"),
}
# Not messages that a function may give: arguments of processes, commands to copy, command lines that are read.
NOT_CHECKED = ("cli", "launch", "config/source", "config/compat", "config/keys.py", "terminal/arguments.py")
CODE = re.compile(
    r"from_pretrained|pipeline\(|<!doctype|loss\(pairs, beta=|has dtype = "
)  # of users, or of another file
OF_FORM = {"form": "--merged", "measured": "--no-measure"}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
COMMAND = re.compile(r"(tandem|torchrun|spm_train|start it with) [^.;`]*--|python -m tandem|--nproc-per-node|--eos_id")


def test_an_argument_is_written_as_in_a_call_and_as_an_option():
    def both(*given, **named):
        in_python = option(*given, **named)
        with command_words():
            return in_python, option(*given, **named)

    assert both("temperature", 0.8) == ("temperature=0.8", "--temperature 0.8")
    assert both("num_samples", 2) == ("num_samples=2", "-n 2")
    assert both("out", Path('a "b".jsonl')) == ('out="a \\"b\\".jsonl"', '--out a "b".jsonl')
    assert both("out", metavar="DIR") == ("out=DIR", "--out DIR")
    assert both("fresh", True) == ("fresh=True", "--fresh")
    assert both("measured", False) == ("measured=False", "--no-measure")
    assert both("form", "merged") == ('form="merged"', "--merged")
    assert both("allow_env", ["A", "B"]) == ('allow_env=["A", "B"]', "--allow-env A --allow-env B")
    assert both("lm_eval", ["a", "b"]) == ('lm_eval=["a", "b"]', "--lm-eval a,b")
    assert both("timeout_seconds") == ("timeout_seconds", "--timeout")
    assert both("model", "x") == ('model="x"', "MODEL x")


def test_a_key_of_the_configuration_is_the_same_in_both():
    assert setting("policy.model_name", "x") == "policy.model_name = x"
    assert setting("against", "x") == 'against="x"'


def test_calls_to_copy_run_in_python_and_commands_in_a_shell():
    assert resume_call("runs/x") == "tandem.train(tandem.load_config('runs/x/config.yaml', ['run.dir=runs/x']))"
    assert export_call("runs/x", "adapter") == "tandem.export('runs/x', form=\"adapter\")"
    with command_words():
        assert resume_call("runs/x").endswith("tandem train --resume runs/x")
        assert export_call("runs/x", "adapter").endswith("tandem export runs/x --adapter")


def test_a_command_leaves_the_words_of_python_behind():
    result = CliRunner().invoke(app, ["generate", "embedded", "--prompt", "Hi", "--temperature", "-1"])
    assert str(result.exception) == "--temperature -1.0: give 0 (greedy) or a positive number, such as 0.8."
    assert option("fresh", True) == "fresh=True"


@cache
def parameters() -> set[str]:
    """The arguments of the public functions."""
    found = {field.name for field in fields(EngineSettings)}
    for function in FUNCTIONS:
        found |= set(inspect.signature(function).parameters)
    return found


@cache
def options() -> set[str]:
    """The options and arguments of all commands."""
    names = set()
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        for one in command.params:
            names |= set(one.opts) if one.param_type_name == "option" else {str(one.metavar).split("|")[0].rstrip(".")}
    return names


def sources() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if not name.startswith(NOT_CHECKED):
            yield name, ast.parse(file.read_text(encoding="utf-8"))


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The sentences of a file with their lines: strings with a space, except docstrings. Expressions of f-strings are {}."""
    documented = (ast.Module, ast.FunctionDef, ast.ClassDef)
    skipped = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and is_text(node.body)}
    skipped |= {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def is_text(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)


def test_no_message_outside_of_the_commands_names_an_option():
    """A message that both a command and a function may give writes its arguments with `option`."""
    found = []
    for name, tree in sources():
        for line, text in texts(tree):
            own = set(OPTION.findall(text)) & {one for one in options() if one.startswith("--")} - OF_COMMANDS_ALONE
            if own and " " in text and not COMMAND.search(text):
                found.append(f"{name}:{line}: {text}")
    assert found == []


def test_a_message_for_both_readers_names_what_its_reader_repeats():
    assert same_call() == "the same call"
    with command_words():
        assert same_call() == "the same command"
    # How ranks are started, also those of a script.
    found = [text for name, tree in sources() for _, text in texts(tree) if "same command" in text and " " in text]
    assert [text for text in found if "Start every rank with" not in text] == []


def test_no_message_names_an_argument_of_python():
    """Also in the commands: an argument is written with `option`, and nothing else writes `fresh=True`."""
    written = re.compile(rf"(?<![\w.])({'|'.join(sorted(parameters()))}) ?=(?!=)")
    found = []
    for file in sorted(SOURCE.rglob("*.py")):
        name = file.relative_to(SOURCE).as_posix()
        if name.startswith(("api/", "losses.py", "formats.py", "terminal/commands.py")):
            continue  # given to Python's functions alone
        for line, text in texts(ast.parse(file.read_text(encoding="utf-8"))):
            if " " in text and written.search(text) and not CODE.search(text):
                found.append(f"{name}:{line}: {text}")
    assert found == []


def test_every_argument_that_a_message_names_exists_in_both():
    """`option("tempreature")` would name something that nobody can give."""
    named = {}
    for name, tree in sources():
        for node in ast.walk(tree):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "option"
            if is_call and isinstance(node.args[0], ast.Constant):  # type: ignore[attr-defined]
                named.setdefault(node.args[0].value, f"{name}:{node.lineno}")  # type: ignore[attr-defined]
    assert len(named) > 30
    written = {
        OF_FORM.get(one, arguments.OPTIONS.get(one, f"--{one.replace('_', '-')}")): place
        for one, place in named.items()
    }
    assert {one: place for one, place in named.items() if one not in parameters()} == {}
    assert {one: place for one, place in written.items() if one not in options()} == {}


# --- errors of calls and of commands, word for word

CASES = [
    (
        lambda: tandem.generate("embedded", ["Hi"], num_samples=2),
        "num_samples=2: without sampling, every completion of a prompt would be the same. Add temperature=0.8.",
        ["generate", "embedded", "--prompt", "Hi", "-n", "2"],
        "-n 2: without sampling, every completion of a prompt would be the same. Add --temperature 0.8.",
    ),
    (
        lambda: tandem.generate("embedded", ["Hi"], engine="http"),
        'engine="http": which server? Give its address, such as base_url="http://localhost:8000/v1".',
        ["generate", "m", "--prompt", "Hi", "--engine", "http"],
        "--engine http: which server? Give its address, such as --base-url http://localhost:8000/v1.",
    ),
    (
        lambda: tandem.generate("embedded", ["Hi"], compare="embedded"),
        'compare="embedded": the same as model. Give another model.',
        ["generate", "embedded", "--prompt", "Hi", "--compare", "embedded"],
        "--compare embedded: the same as MODEL. Give another model.",
    ),
    (
        lambda: tandem.evaluate("./nope", "embedded"),
        'model="./nope": no such directory. Give a model folder, a hub name, or a run directory.',
        ["eval", "./nope", "embedded"],
        "MODEL ./nope: no such directory. Give a model folder, a hub name, or a run directory.",
    ),
    (
        lambda: tandem.evaluate("embedded", "embedded", beta=0.1),
        "beta=0.1 scales implicit rewards, which need a reference. Add reference=MODEL.",
        ["eval", "embedded", "embedded", "--beta", "0.1"],
        "--beta 0.1 scales implicit rewards, which need a reference. Add --reference MODEL.",
    ),
    (
        lambda: tandem.evaluate("embedded"),
        'model="embedded": not a run, so give data: one or more files of preference pairs, or embedded.',
        ["eval", "embedded"],
        "MODEL embedded: not a run, so give DATA: one or more files of preference pairs, or embedded.",
    ),
    (
        lambda: tandem.export("runs/x", dry_run=True),
        "dry_run lists what push_to_hub would upload. Add push_to_hub=REPO, or leave out dry_run.",
        ["export", "runs/x", "--dry-run"],
        "--dry-run lists what --push-to-hub would upload. Add --push-to-hub REPO, or leave out --dry-run.",
    ),
    (
        lambda: tandem.train(["data.train=embedded"], per_pair="/no/pairs.jsonl"),
        'per_pair="/no/pairs.jsonl": there is no folder /no. Create it first.',
        ["train", "data.train=embedded", "--per-pair", "/no/pairs.jsonl"],
        "--per-pair /no/pairs.jsonl: there is no folder /no. Create it first.",
    ),
    (
        lambda: load_config(None, ["data.train=embedded"], from_format="trll"),
        'from_format="trll": not a known format. Give tandem, axolotl, llama-factory, nemo-aligner, nemo-rl or trl.',
        ["train", "data.train=embedded", "--from-format", "trll"],
        "--from-format trll: not a known format. Give tandem, axolotl, llama-factory, nemo-aligner, nemo-rl or trl.",
    ),
    (
        lambda: tandem.sweep(["run.seed=1,2"], parallel=0),
        "parallel=0: at least one run is trained at a time. Write 1 or more.",
        ["sweep", "run.seed=1,2", "--out", "file"],
        "--out file: a file, not a directory. Choose another directory.",
    ),
]


@pytest.mark.parametrize(("call", "in_python", "arguments", "in_command"), CASES)
def test_an_error_names_what_its_reader_can_write(call, in_python, arguments, in_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(TandemError) as error:
        call()
    assert str(error.value) == in_python
    assert str(CliRunner().invoke(app, arguments).exception) == in_command


def test_code_in_a_file_is_refused_in_the_words_of_the_caller(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("dpo: {preference_loss: 'my.py:loss'}\n")
    refused = f"{config}: dpo.preference_loss = my.py:loss names Python code, which would be run. If you trust it, add "
    with pytest.raises(TandemError) as error:
        tandem.train(config)
    assert str(error.value) == f"{refused}allow_code=True."
    words = ["train", "--config", str(config)]
    expected = f"{refused}--allow-code: {tandem_command(*words, '--allow-code')}"
    assert str(CliRunner().invoke(app, words).exception) == expected
    with command_words(["train", "--from-format", "trl", "--", "--beta", "3"]):
        command = tandem_command("train", "--from-format", "trl", "--allow-code", "--", "--beta", "3")
        assert advice_to_allow_code() == f"If you trust it, add --allow-code: {command}"

"""Printed commands: a shell splits them into the intended arguments."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config.load import load_config
from tandem.sweeping.grid import parse_grid
from tandem.terminal import commands
from tandem.terminal.commands import override, python_command, tandem_command, with_override

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "value",
    [
        *(
            "plain",
            "/a/b-1.jsonl",
            "org/name",
            "a b",
            "it's",
            'a "b"',
            "a,b",
            "x=y",
            "${run.name}",
            "C:\\d\\",
            "\\'",
            "é",
        ),
        *(
            "true",
            "Null",
            "1e5",
            "12",
            ".5",
            "~/x",
            "a*.jsonl",
            "(a)",
            "{a: 1}",
            "[a]",
            "",
            " a ",
            "#a",
            "a\\\\",
            "inf",
            "%d",
        ),
    ],
)
def test_a_printed_override_is_read_back_as_the_same_value(value):
    given = override("policy.revision", value)
    found = load_config(None, [given]).config.policy.revision
    assert found == (value if value != "${run.name}" else "default")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dpo.max_num_steps", None),
        ("dpo.sft_loss_weight", 1e-05),
        ("data.shuffle", False),
        ("policy.tokenizer.chat_template_kwargs", {"thinking": True, "name": "a b"}),
        ("data.train", [{"data_path": "a, b.jsonl", "weight": 2.0}]),
    ],
)
def test_overrides_of_other_types_are_read_back_as_the_same_value(key, value):
    found = load_config(None, [override(key, value)]).config.model_dump()
    for part in key.split("."):
        found = found[part]
    if isinstance(value, list):
        found = [{name: one[name] for name in value[0]} for one in found]
    assert found == value


def test_an_override_replaces_earlier_ones_of_its_key():
    assert with_override(["a.b=1", "+a.b=2", "~a.b", "a.bc=3"], "a.b", "x y") == ["a.bc=3", "a.b='x y'"]


def test_a_command_uses_the_short_name_only_if_the_shell_finds_this_installation(monkeypatch, tmp_path):
    own = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(own))
    assert tandem_command("train", "a=b c") == "tandem train 'a=b c'"
    assert python_command("print(1)") == "python -P -c 'print(1)'"
    for name in ("tandem", "python"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))  # those of another environment
    assert shlex.split(tandem_command("train")) == [sys.executable, "-P", "-m", "tandem", "train"]
    assert shlex.split(python_command("print(1)")) == [sys.executable, "-P", "-c", "print(1)"]
    monkeypatch.setattr(commands.sys, "argv", [str(tmp_path / "tandem")])
    assert tandem_command("train") == "tandem train"


def test_a_shell_runs_a_printed_command_with_the_same_arguments():
    code = 'print("it\'s", "$HOME", "a  b")'
    ended = subprocess.run(python_command(code), shell=True, capture_output=True, text=True, check=True)
    assert ended.stdout == "it's $HOME a  b\n"


# The pages whose commands a new user copies.
PAGES = ("README.md", "docs/quickstart.md", "docs/tutorial.md")


def page_commands() -> list[str]:
    """The tandem commands on these pages, each on one line."""
    found: list[str] = []
    for page in PAGES:
        text = (REPOSITORY / page).read_text(encoding="utf-8").replace("\\\n", " ")
        lines = [line for block in text.split("```bash\n")[1:] for line in block.split("```")[0].splitlines()]
        found += [line for line in lines if line.startswith(("tandem ", "torchrun "))]
    return [*dict.fromkeys(found)]


@pytest.mark.parametrize("command", page_commands())
def test_every_command_in_the_docs_is_accepted_by_the_command_line(command):
    """Except for the files and models they name: `...` stands for more arguments."""
    from typer.main import get_command

    from tandem.cli.main import app

    words = [word for word in shlex.split(command.split(" > ")[0], comments=True) if word != "..."]
    name, *arguments = words[words.index("tandem") + 1 :]
    if name.startswith("--"):
        return
    found = get_command(app).commands[name].make_context(name, arguments)  # pyright: ignore
    given = found.params.get("overrides") or []
    model = [f"policy.model_name={found.params['model']}"] if found.params.get("model") else []
    # Every run of a sweep has overrides of its own.
    runs = [one.overrides for one in parse_grid(given).combinations()] if name == "sweep" else [given]
    for overrides in runs:
        load_config(None, [*overrides, *model])


def test_commands_are_found_in_the_docs():
    assert len(page_commands()) >= 20


def test_the_configuration_compared_with_trl_is_accepted(tmp_path):
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(text.split("```yaml\n")[1].split("```")[0], encoding="utf-8")
    config = load_config(str(tmp_path / "run.yaml"), []).config
    assert (config.policy.train_global_batch_size, config.policy.optimizer.kwargs.lr) == (8 * 8, 1e-6)

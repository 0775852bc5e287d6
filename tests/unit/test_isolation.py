"""A command and its child processes import nothing from the working directory and send no telemetry."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_tracker import put_in_front

from tandem.config.sections.logger import Logger
from tandem.isolation import NO_TELEMETRY, SAFE_PATH, isolated
from tandem.report.trackers import tracking as feeding
from tandem.report.trackers.adapters import Opening
from tandem.report.trackers.tracking import Feed

DEPENDENCIES = ["hydra", "numpy", "omegaconf", "pydantic", "pyarrow", "rich", "torch", "transformers", "typer", "yaml"]
# What pip writes as the command `tandem`.
SCRIPT = "import sys\nfrom tandem.cli.main import main\nsys.exit(main())\n"


def hostile(folder: Path, names: list[str]) -> Path:
    """A folder with a module of every name, each of which writes its name to the file `ran`."""
    folder.mkdir()
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write({name!r} + ' ')\n")
    return folder


def ran(folder: Path) -> str:
    return (folder / "ran").read_text() if (folder / "ran").exists() else ""


def environment() -> dict[str, str]:
    """The environment without the variables that make Python's path safe."""
    return {name: value for name, value in os.environ.items() if name not in SAFE_PATH}


@pytest.mark.parametrize("how", ["command", "python -P -m"])
def test_nothing_is_imported_from_the_working_directory(tmp_path, how):
    """Not even a module named like one of the standard library, of a dependency or of tandem."""
    names = ["tandem", *DEPENDENCIES, *(name for name in sys.stdlib_module_names if not name.startswith("_"))]
    folder = hostile(tmp_path / "data", names)
    (tmp_path / "tandem").write_text(SCRIPT)
    start = [str(tmp_path / "tandem")] if how == "command" else ["-P", "-m", "tandem"]
    done = subprocess.run(
        [sys.executable, *start, "config"], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr, ran(folder)) == (0, "", "")


def test_python_m_imports_no_package_from_the_working_directory(tmp_path):
    """Before it starts tandem, Python itself may import from there: docs/workers.md."""
    folder = hostile(tmp_path / "data", [*DEPENDENCIES, "argparse", "json", "pathlib", "typing"])
    command = [sys.executable, "-m", "tandem", "config"]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr, ran(folder)) == (0, "", "")


def test_child_processes_import_nothing_from_the_working_directory(tmp_path, monkeypatch):
    folder = hostile(tmp_path / "data", ["yaml"])
    monkeypatch.chdir(folder)
    for name in SAFE_PATH:
        monkeypatch.delenv(name, raising=False)
    with isolated():
        subprocess.run([sys.executable, "-c", "import yaml"], check=True)
    assert ran(folder) == ""
    subprocess.run([sys.executable, "-c", "import yaml"], check=True)  # what it would do
    assert ran(folder) == "yaml "


def test_the_environment_is_restored_afterwards(monkeypatch):
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    before = dict(os.environ)
    with isolated():
        assert {name: os.environ[name] for name in NO_TELEMETRY} == NO_TELEMETRY
    assert dict(os.environ) == before


def test_trackers_are_started_with_telemetry_switched_off(monkeypatch, tmp_path):
    """Also in a run started from Python, outside `isolated`, and whatever the environment says."""
    for name in NO_TELEMETRY:
        monkeypatch.setenv(name, "left on")
    monkeypatch.setattr(feeding, "CLOSE_SECONDS", 120)
    seen = tmp_path / "seen"
    put_in_front(
        monkeypatch,
        tmp_path / "package",
        init=f"open({str(seen)!r}, 'w').write(repr(dict(os.environ)))",
    )
    opening = Opening(str(tmp_path), str(tmp_path / "logs"), 0, [], Logger().model_dump(), {})
    Feed(["wandb"], opening, lambda text: None, lambda text: None).close()
    given = eval(seen.read_text())
    assert {name: given.get(name) for name in (*NO_TELEMETRY, *SAFE_PATH)} == {**NO_TELEMETRY, **SAFE_PATH}

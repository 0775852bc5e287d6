"""A fake package `wandb` with faults, imported instead of the real one in this process and those it starts."""

import os
from pathlib import Path

PACKAGE = """
import os, sys, time

class Settings:
    def __init__(self, **given): pass

class Run:
    url, dir = "fake://run", "."
    def log(self, metrics, step):
        {log}
    def finish(self):
        {finish}

def init(**given):
    {init}
    return Run()
"""


def put_in_front(monkeypatch, folder: Path, *, init: str = "pass", log: str = "pass", finish: str = "pass") -> None:
    """Put the fake package first in the import path. `init`, `log` and `finish` are one statement each."""
    folder.mkdir()
    (folder / "wandb.py").write_text(PACKAGE.format(init=init, log=log, finish=finish), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

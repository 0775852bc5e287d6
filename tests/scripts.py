"""Runs scripts of examples/ and benchmarks/ in processes forked from a server that has imported torch and tandem."""

import os
import runpy
import sys
from pathlib import Path

from killing import SERVER, Child, Ended, redirect_output

ROOT = Path(__file__).parents[1]


def run_script(script: str, *arguments: str, folder: Path, **environment: str) -> Ended:
    """Run `python SCRIPT ...` in `folder`, on the CPU and without compilation, which would take minutes."""
    environment = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1", **environment}
    process = SERVER.Process(target=_run, args=(ROOT / script, list(arguments), folder, environment))
    process.start()
    return Child(process, folder).ended()


def _run(script: Path, arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    redirect_output(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")

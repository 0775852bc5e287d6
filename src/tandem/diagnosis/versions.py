"""Checks the versions of Python, tandem and the packages that it needs. Imports none of them."""

import importlib.util
import platform
import sys
from importlib import metadata

from tandem import __version__
from tandem.diagnosis.finding import Finding, finding
from tandem.terminal.commands import install_command

DISTRIBUTION = "tandem-dpo"
OLDEST_PYTHON = (3, 11)
# Extras of tandem, with the module that each of them installs.
EXTRAS = {
    "qlora": "bitsandbytes",
    "hybrids": "fla",
    "sentencepiece": "sentencepiece",
    "lm-eval": "lm_eval",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "demo": "gguf",
}


def version_findings() -> list[Finding]:
    return [_python(), *_packages(), _extras()]


def _python() -> Finding:
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, tandem {__version__}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return finding(
            "versions", "problem", text, fix="tandem needs Python 3.11 or later: install it, and tandem in it."
        )
    return finding("versions", "ok", text)


def _packages() -> list[Finding]:
    """Compare the installed packages with what tandem requires."""
    try:
        from packaging.requirements import Requirement

        required = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except (metadata.PackageNotFoundError, ImportError):
        return [finding("packages", "note", "not checked: tandem was not installed with pip")]
    wrong = []
    checked = [one for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in checked:
        wanted = f"{one.name}{one.specifier}"
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            wrong.append(finding("packages", "problem", f"{one.name} is missing", command=f"pip install '{wanted}'"))
            continue
        if not one.specifier.contains(version, prereleases=True):
            text = f"{one.name} {version} is installed, but tandem needs {wanted}"
            wrong.append(finding("packages", "problem", text, command=f"pip install '{wanted}'"))
    return wrong or [finding("packages", "ok", f"all {len(checked)} required packages, in supported versions")]


def _extras() -> Finding:
    missing = [name for name, module in EXTRAS.items() if not _is_installed(module)]
    installed = [name for name in EXTRAS if name not in missing]
    text = f"installed: {', '.join(installed) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    fix = f"If you need one: {install_command(missing[0])} in the checkout" if missing else ""
    return finding("extras", "ok", f"{text}. {fix}" if fix else text)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False

"""Packages that tandem imports are installed with it, whatever other packages require."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PARTS = {"pydantic_core": "pydantic"}  # modules of packages that another one requires in exactly one version
# Imported where they are installed, with another name than their package, in an environment of their own, or with torch.
OPTIONAL = {"fla", "lm_eval", "ray", "triton", "vllm", "wandb", "mlflow", "tensorboard", "sqlalchemy"}


def imported() -> set[str]:
    """The third-party modules that the code imports, anywhere in it."""
    found: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module)
    return {name.split(".")[0] for name in found} - sys.stdlib_module_names - {"tandem"}


def test_every_imported_package_is_declared():
    declared = {re.split(r"[^\w-]", text)[0].lower() for text in PROJECT["dependencies"]}
    packages = packages_distributions()
    needed = {name: PARTS.get(name) or packages[name][0].lower().replace("_", "-") for name in imported() - OPTIONAL}
    assert {name: package for name, package in needed.items() if package not in declared} == {}

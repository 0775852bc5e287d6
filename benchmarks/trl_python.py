"""Checks of the interpreter that has TRL, made first, so that a missing package is reported before anything is computed."""

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

NEEDED = "trl==1.16.0 liger-kernel==0.8.5"
BOTH_USE = ("torch", "transformers")


def require(*modules: str) -> None:
    """Exit with a message if a module is missing from the current interpreter, which has to run TRL."""
    if missing := [name for name in modules if find_spec(name) is None]:
        names = ", ".join(missing)
        sys.exit(
            f"{sys.executable}: not installed: {names}. Run this with a Python that has them: pip install {NEEDED}."
        )


def check(python: str, *modules: str) -> None:
    """Exit if `python` cannot import a module; print a warning if its versions differ from those of this interpreter."""
    print_versions = f"from importlib.metadata import version; print(*map(version, {BOTH_USE}))"
    command = [python, "-c", f"import {', '.join(modules)}; {print_versions}"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-len(BOTH_USE) :]
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.strerror if isinstance(error, OSError) else error.stderr.strip()
        problem = (said or "it fails").splitlines()[-1]
        sys.exit(f"{python}: {problem}. In an environment of its own: pip install {NEEDED}; then --trl-python PYTHON.")
    for name, theirs in zip(BOTH_USE, found, strict=True):
        if theirs != version(name):
            print(
                f"{name} is {version(name)} here and {theirs} with TRL: the comparison includes this difference.",
                file=sys.stderr,
            )

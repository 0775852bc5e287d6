"""The interpreter that has TRL: tried before anything is computed, so that what it lacks costs no time."""

import subprocess
import sys
from importlib.metadata import version

NEEDED = "trl==1.16.0 liger-kernel==0.8.5"
BOTH_USE = ("torch", "transformers")


def check(python: str, *modules: str) -> None:
    """Ends where it lacks a module; tells of versions that are not those of tandem's own interpreter."""
    versions = f"from importlib.metadata import version; print(*map(version, {BOTH_USE}))"
    try:
        tried = subprocess.run(
            [python, "-c", f"import {', '.join(modules)}; {versions}"], capture_output=True, text=True
        )
        lacking = (tried.stderr.strip().splitlines() or ["it fails"])[-1] if tried.returncode else None
    except OSError as error:
        tried, lacking = None, error.strerror
    if tried is None or lacking:
        sys.exit(f"{python}: {lacking}. In an environment of its own: pip install {NEEDED}; then --trl-python PYTHON.")
    for name, theirs in zip(BOTH_USE, tried.stdout.split()[-len(BOTH_USE) :], strict=True):
        if theirs != version(name):
            print(f"{name} {version(name)} beside TRL's {theirs}: more than the two trainers differs.", file=sys.stderr)

"""Runs the command `tandem` as a module, for launchers such as torchrun -m tandem train."""

import sys

# `python -m` puts the working directory first on the path, so a yaml.py in a data folder would be imported and run.
if not sys.flags.safe_path:
    del sys.path[0]

from tandem.cli.main import main

main()

"""`python -m tandem`: the same as the command `tandem`, for launchers that start modules (torchrun -m tandem train ...)."""

import sys

# `python -m` puts the working directory first: a yaml.py in a folder of data would be imported and run.
if not sys.flags.safe_path:
    del sys.path[0]

from tandem.cli.main import main

main()

"""`python -m tandem`: the same as the command `tandem`, for launchers that start modules (torchrun -m tandem train ...)."""

from tandem.cli import main

main()

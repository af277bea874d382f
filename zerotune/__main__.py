"""`python -m zerotune`."""

from .tuner.cli import main

main()

"""`python -m zerotune.tuner.cli`."""

from zerotune.tuner.cli import main

main()

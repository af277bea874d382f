"""`python -m zerotune.tuner.cli`."""

import sys

from . import main

sys.argv[0] = "zerotune"  # locks name their holder by it, as people type it
main()

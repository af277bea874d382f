"""`python -m zerotune.tuner.cli`."""

import sys

from . import main

sys.argv[0] = "zerotune"  # a lock names its holder so, and it is what people type
main()

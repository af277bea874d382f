"""Before any test imports torch: one thread per process, as ranks have, so that sums add up alike."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

# A script's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

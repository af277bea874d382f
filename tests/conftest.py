"""Before any test imports torch: one thread per process, as ranks have, so that sums add up alike."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

"""Fuzzes one target with Atheris (libFuzzer on Python's coverage), or runs inputs that it found:

    one_target.py ENDS_AT TARGET [libFuzzer's arguments]
    one_target.py 0 TARGET FILE...

ENDS_AT is a time of time.monotonic(): instrumenting the code takes longer on a busy machine.
"""

from __future__ import annotations

import logging
import sys
import time

import atheris

with atheris.instrument_imports(include=["zerotune"]):
    import fuzz_targets

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    ends_at_s, name = float(sys.argv.pop(1)), sys.argv.pop(1)
    if ends_at_s:
        sys.argv.append(f"-max_total_time={max(1, int(ends_at_s - time.monotonic()))}")
    atheris.Setup(sys.argv, fuzz_targets.TARGETS[name].run)
    atheris.Fuzz()

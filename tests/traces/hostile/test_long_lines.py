"""Lines longer than any tool writes: whatever a pattern does with them, a piece of such a line is read in a moment."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from trace_samples import REAL, WRITTEN

from zerotune.store.errors import TraceError
from zerotune.tuner.traces import read_trace

PREFIX = "n:1:2 [0] NCCL INFO "
COMMUNICATOR = "comm 0x55a0 rank 1 nRanks 4 nNodes 2 "
ROW = "  1048576  262144  float  sum  -1  20.5  1.0  "
LONG = 1 << 17
LINES = {
    "digits": ROW + "9" * LONG,
    "digits_behind_a_point": ROW + "1." + "9" * LONG,
    "blanks": ROW + " " * LONG,
    "communicators": PREFIX + COMMUNICATOR * (LONG // len(COMMUNICATOR)),
    "communicators_behind_a_name": "a" * LONG + COMMUNICATOR,
    "names": PREFIX + "Pattern " + "a" * LONG + " -> Algo ",
    "bars": PREFIX + "AllGather |" + " 1/ 2 |" * (LONG // 7),
    "commas": "allgather," * (LONG // 10),
    "quotes": '"' * LONG,
    "brackets": "[" * LONG,
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
@pytest.mark.parametrize(
    "name", ["nccl_tests", "nccl_debug", "inspector", "tuner_csv", "summary_csv", "profiler_events"]
)
def test_a_long_line_takes_no_time(tmp_path: Path, name: str, line: str):
    content = WRITTEN[name][1] if name in WRITTEN else REAL[name].read_bytes()
    path = tmp_path / "all_gather.log"
    path.write_bytes((content if content[:2] != b"\x1f\x8b" else b"") + f"{line}\n{line}\n".encode())
    started_s = time.process_time()
    with contextlib.suppress(TraceError):
        list(read_trace(path, name).blocks())
    assert time.process_time() - started_s < 3

"""A benchmark that is told to end leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

WITHIN_S = 60.0


def marked(mark: str) -> list[psutil.Process]:
    """Processes that inherited this from the benchmark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ZEROTUNE_TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(
    ("words", "n_processes"),
    [(("soak_daemon", "--quick"), 2), (("record", "--again", "demo"), 6)],  # with torchrun and its two ranks
)
def test_sigterm_ends_what_a_benchmark_started(tmp_path, words, n_processes):
    environment = {**os.environ, "ZEROTUNE_TEST_MARK": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks", *words]
    benchmark = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + WITHIN_S
    while len(marked(str(tmp_path))) < n_processes and time.monotonic() < deadline_s:
        time.sleep(0.05)
    benchmark.send_signal(signal.SIGTERM)
    assert benchmark.wait(WITHIN_S) == 128 + signal.SIGTERM
    psutil.wait_procs(marked(str(tmp_path)), WITHIN_S)
    assert not marked(str(tmp_path))

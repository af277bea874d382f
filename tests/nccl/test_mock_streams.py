"""Streams of the mock GPU behave as CUDA documents it; each test has a process, since the mock takes NVML's place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("mock_streams.py")


@pytest.mark.parametrize(
    "what",
    [
        "the_legacy_stream_waits_for_the_others_and_they_for_it",
        "the_legacy_stream_waits_for_what_has_not_ended",
        "a_destroyed_stream_is_worked_off",
        "hosts_run_ahead_as_far_as_the_queue_reaches",
    ],
)
def test_as_cuda_documents_it(what):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]

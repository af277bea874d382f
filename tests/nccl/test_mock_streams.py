"""The mock GPU behaves as CUDA documents it; each test has a process, since the mock takes NVML's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}


def errors_of(program: str, what: str) -> str:
    """Standard error of a run that went well."""
    command = [sys.executable, str(HERE / program), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr


@pytest.mark.parametrize(
    "what",
    [
        "the_legacy_stream_waits_for_the_others_and_they_for_it",
        "the_legacy_stream_waits_for_what_has_not_ended",
        "a_destroyed_stream_is_worked_off",
        "the_gpu_waits_for_the_host",
        "hosts_run_ahead_as_far_as_the_queue_reaches",
        "hosts_that_replay_graphs_run_ahead_no_further",
    ],
)
def test_streams(what):
    errors_of("mock_streams.py", what)


@pytest.mark.parametrize(
    "what",
    [
        "freeing_waits_for_all_that_runs_and_leaves_nothing",
        "freeing_in_a_stream_takes_its_turn",
        "freed_memory_has_no_new_owner_before_the_gpu_is_there",
        "used_in_order",
    ],
)
def test_freed_memory(what):
    assert errors_of("mock_memory.py", what) == ""


@pytest.mark.parametrize(
    "what", ["used_after_its_end", "used_at_its_end", "used_by_who_had_it_before", "unmapped_by_a_library"]
)
def test_who_uses_freed_memory_is_named(what):
    assert "cudaMemsetAsync" in errors_of("mock_memory.py", what)


def test_so_are_kernels_of_torchs():
    assert "AbsFunctor" in errors_of("mock_memory.py", "used_by_a_kernel_of_torchs")

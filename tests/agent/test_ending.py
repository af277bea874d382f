"""The line a launched job ends with: each reason with its code, what was gained, and who says it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zerotune.agent.reasons import Reason
from zerotune.agent.steps.recent_steps import RecentSteps
from zerotune.store.records import (
    StepRecord,
)

NCCL = {"n_ranks": 8, "backends": "cuda:nccl"}


def code(said: str) -> str:
    """What a line ends with, in brackets."""
    return said.rpartition("(")[2].rstrip(")")


def _played(n_windows: int, own_us: float, busy_from: int = 1000) -> RecentSteps:
    """Steps of 900 us under plans, with windows of NCCL's own choice among them, under odd epochs."""
    steps = RecentSteps(lambda epoch: epoch % 2 == 1)
    for step in range(20 + 12 * n_windows):
        window, place = divmod(step - 20, 12)
        is_own = window >= 0 and place in (4, 5)
        epoch = 0 if step < 10 else 2 + 2 * window + (1 if is_own else 2 * (place > 5))
        us = own_us if is_own or not epoch else 900.0
        steps.add(StepRecord(step, epoch, (2.0 if step >= busy_from else 1.0) * us + step * 37 % 101 / 5))
    return steps


def test_a_gain_is_told_from_neighbours_and_with_how_sure_it_is() -> None:
    assert _played(3, 1000.0).saved() is None, "not yet"
    saved = _played(12, 1000.0).saved()
    assert saved is not None
    assert saved.n_windows == 12
    assert saved.low_share < 0.1 < saved.high_share
    assert 0 < saved.uncertain_share < 0.015
    assert saved.is_beyond_noise


BEGIN = """
import os, sys
from zerotune.agent import vigil
vigil.begin(sys.argv[1])
os.execvp("sh", ["sh", "-c", sys.argv[2]])
"""


@pytest.mark.parametrize(
    ("command", "returncode"),
    [("sleep 1; exit 7", 7), ("kill -KILL $$", -signal.SIGKILL), ("wait; exit 3", 3)],
)
def test_a_command_ends_as_it_would_alone_and_nothing_is_left(command: str, returncode: int, tmp_path: Path) -> None:
    folder = tmp_path / "marks"
    folder.mkdir()
    words = [sys.executable, "-c", BEGIN, str(folder), command]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == returncode
    assert code(done.stderr.strip()) == Reason.no_agent.name, "it is told before stderr is closed"
    assert not folder.exists()


RANK = """
import os, sys, torch, torch.distributed as dist
if sys.argv[1] != "no group":
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "killed":
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("words", "options", "reason"),
    [
        ("no group", (), Reason.no_group),
        ("one rank", (), Reason.one_rank),
        ("killed", (), Reason.cut_short),
        ("one rank", ("--quiet",), None),
        ("no group", ("--quiet",), None),
        ("one rank", ("--no-agent",), None),
    ],
)
def test_a_launched_command_ends_with_it(words, options, reason, tmp_path) -> None:
    launch = [sys.executable, "-m", "zerotune.tuner.cli", "launch", "--fabric", "ethernet_boxes", *options, "--"]
    names = {**os.environ, "ZEROTUNE_RUNTIME_DIR": str(tmp_path)}
    command = [*launch, sys.executable, "-c", RANK, words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=100, check=True, env=names)
    told = [one for one in done.stderr.splitlines() if code(one) in Reason.__members__]
    assert [code(one) for one in told] == ([] if reason is None else [reason.name])

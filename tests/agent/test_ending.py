"""The line a launched job ends with: each reason with its code, what was gained, and who says it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zerotune.agent import ending, exit_watcher
from zerotune.agent.ending import LEAST_STEPS, Facts, line
from zerotune.agent.reasons import MARKS, Mark, Reason
from zerotune.agent.steps.recent_steps import RecentSteps
from zerotune.store.records import (
    BASELINE,
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Phase,
    PlanRow,
    Protocol,
    StepRecord,
)
from zerotune.store.step_times import Saved

QUESTIONS = ((8, 1, int(Collective.all_gather), 1 << 20), (8, 1, int(Collective.reduce_scatter), 1 << 20))
NCCL = {"n_ranks": 8, "backends": "cuda:nccl"}
CALLED = {**NCCL, "n_calls": 5000, "questions": QUESTIONS, "n_steps": 10 * LEAST_STEPS}


def row(candidate: Candidate = Candidate(Algorithm.ring, Protocol.ll, 4)) -> PlanRow:  # noqa: B008
    return PlanRow(CommunicatorClass(8, 1), Collective.all_gather, Phase.forward_gather, 1 << 19, 1 << 21, candidate)


def code(said: str) -> str:
    """What a line ends with, in brackets."""
    return said.rpartition("(")[2].rstrip(")")


FACTS = {
    Reason.script_failed: Facts(**CALLED, has_answered=False, failure="ValueError, exit status 1"),
    Reason.one_rank: Facts(1, "cuda:nccl"),
    Reason.not_nccl: Facts(8, "cpu:gloo"),
    Reason.no_plugin: Facts(**NCCL, has_plugin=False),
    Reason.not_loaded: Facts(**NCCL, is_loaded=False),
    Reason.no_collectives: Facts(**NCCL, is_loaded=False, has_called=False),
    Reason.no_row: Facts(**CALLED, has_plan_file=True, has_answered=False),
    Reason.frozen: Facts(**CALLED, reasons=((Reason.frozen, "ranks of communicator 7 differ in their calls"),)),
    Reason.captured: Facts(**CALLED, replayed_share=0.95),
    Reason.no_steps: Facts(**(CALLED | {"n_steps": 0})),
    Reason.no_daemon: Facts(**CALLED, has_answered=False, listened_s=60.0, endpoint="ipc:///d.sock"),
    Reason.no_repetition: Facts(**(CALLED | {"n_steps": LEAST_STEPS - 1})),
    Reason.silent_daemon: Facts(**CALLED, n_matched=100, is_silent=True, endpoint="ipc:///d.sock"),
    Reason.in_shadow: Facts(**(CALLED | {"n_steps": 30}), shadow="at 2 keys another setting would run"),
    Reason.nothing_better: Facts(**CALLED, n_matched=100, rows=(row(BASELINE),)),
}


@pytest.mark.parametrize("reason", FACTS, ids=lambda reason: reason.name)
def test_each_reason_is_told_by_its_code_and_with_its_details(reason: Reason) -> None:
    said = line(FACTS[reason])
    assert code(said) == reason.name
    assert "{" not in said
    assert said.count("\n") == 0
    assert all(detail in said for _, detail in FACTS[reason].reasons)


def test_the_last_line_tells_of_a_missing_daemon_before_a_short_job() -> None:
    facts = CALLED | {"n_steps": 30, "has_answered": False, "listened_s": 0.5, "endpoint": "ipc:///d.sock"}
    assert code(line(Facts(**facts))) == Reason.no_repetition.name, "one may have been about to answer"
    assert code(line(Facts(**facts, is_absent=True))) == Reason.no_daemon.name


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (Saved(0.031, 0.027, 0.035, 9, 1e3), "3.1 % ± 0.4"),
        (Saved(-0.02, -0.03, -0.01, 9, 1e3), "2.0 % ± 1.0"),
        (Saved(0.01, -0.01, 0.03, 9, 1e3), "(± 2.0 %)"),
        (None, "unknown"),
    ],
)
def test_the_last_line_tells_the_gain(saved: Saved | None, words: str) -> None:
    facts = Facts(**CALLED, n_matched=100, rows=(row(),), saved=saved)
    assert words in line(facts)
    assert code(line(facts)) not in Reason.__members__


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


def test_steps_under_other_plans_are_not_compared() -> None:
    """A trial 50 % slower ends as the plan of the window begins, whose first step is of both and does not count."""
    steps = RecentSteps(lambda epoch: epoch % 10 == 1)
    for step in range(240):
        window, place = divmod(step, 24)
        epoch = 10 * window + (9 if place < 4 else 10 if place < 8 else 11 if place < 10 else 12)
        us = (1.5 if place < 4 else 1.0) * (900.0 + step * 37 % 101 / 5)
        steps.add(StepRecord(step, epoch, us, is_whole=place not in (4, 10)))
    saved = steps.saved()
    assert saved is not None
    assert saved.low_share < 0.0 < saved.high_share
    assert abs(saved.share) < 0.01


def test_steps_without_a_plan_are_neighbours_of_none() -> None:
    steps = RecentSteps(lambda epoch: epoch % 2 == 1)
    for step in range(120):
        steps.add(StepRecord(step, 0 if step % 3 else 1 + step % 2, 1000.0))
    assert steps.saved() is None


BEGIN = """
import os, sys
from zerotune.agent import exit_watcher
exit_watcher.begin(sys.argv[1])
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


def test_ranks_that_outlive_their_launcher_are_told_by_number(tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.setattr(exit_watcher, "GRACE_S", 0.1)

    def told(pid: int) -> str:
        (folder := tmp_path / "marks").mkdir()
        for mark in (Mark.agent, Mark.group, Mark.rank_0):
            (folder / mark.value).write_text(str(pid) if mark is Mark.rank_0 else "")
        exit_watcher.main(ended, str(folder))
        return capfd.readouterr().err

    with subprocess.Popen(["true"]) as process:
        ended = process.pid
    assert f"rank 0 (pid {os.getpid()}) still runs" in told(os.getpid())
    assert code(told(ended).strip()) == Reason.cut_short.name


def test_a_forked_rank_leaves_no_mark(tmp_path: Path) -> None:
    script = """
import os, torch.distributed as dist
from zerotune.agent import first_group
first_group.before_first_group(lambda: None)
if not (pid := os.fork()):
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    print(first_group.made().rank)
    os._exit(0)
os.waitpid(pid, 0)
"""
    environment = {**os.environ, MARKS: str(tmp_path), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "0"
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_stopped_daemon_cannot_answer(is_stopped: bool) -> None:
    with subprocess.Popen(["sleep", "60"]) as listener:
        try:
            if is_stopped:
                listener.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, listener.pid, os.WSTOPPED | os.WNOWAIT)
            assert ending.can_answer(listener.pid) is not is_stopped
        finally:
            listener.kill()
    assert ending.can_answer(0), "of another container"
    assert not ending.can_answer(None)


HAS_GPU = torch.cuda.is_available()
RANK = """
import os, sys, torch, torch.distributed as dist
if not sys.argv[1].startswith("no group"):
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[1] == "killed":
    os._exit(0)
if sys.argv[1] == "failed":
    raise ValueError("of the script's own")
if sys.argv[1] == "no group, no GPU":
    torch.ones(1).cuda()
"""


@pytest.mark.parametrize(
    ("words", "options", "reason"),
    [
        ("one rank", (), Reason.one_rank),
        ("killed", (), Reason.cut_short),
        ("failed", (), Reason.script_failed),
        *(  # the words of each are tested above, and a process takes seconds to import torch
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("no group", (), Reason.no_group),
                ("one rank", ("--quiet",), None),
                ("no group", ("--quiet",), None),
                ("one rank", ("--no-agent",), None),
            )
        ),
        pytest.param(
            *("no group, no GPU", (), Reason.script_failed),
            marks=[pytest.mark.slow, pytest.mark.skipif(HAS_GPU, reason="a GPU")],
        ),
    ],
)
def test_a_launched_command_ends_with_it(words, options, reason, tmp_path) -> None:
    launch = [sys.executable, "-m", "zerotune.tuner.cli", "launch", "--fabric", "ethernet_boxes", *options, "--"]
    names = {**os.environ, "ZEROTUNE_RUNTIME_DIR": str(tmp_path)}
    command = [*launch, sys.executable, "-c", RANK, words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=100, check=False, env=names)
    assert done.returncode == (1 if reason is Reason.script_failed else 0)
    told = [one for one in done.stderr.splitlines() if code(one) in Reason.__members__]
    assert [code(one) for one in told] == ([] if reason is None else [reason.name])
    if reason is Reason.script_failed:
        assert done.stderr.splitlines()[-1] == told[0]
        assert "exit status 1" in told[0]
        assert ("--fabric" in told[0]) is ("GPU" in words)

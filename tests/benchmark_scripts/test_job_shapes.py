"""The runner of job shapes: hangs, failures, restarts and events. The shapes here do no training."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

RUNNER = """
import json, os, signal, sys, time
from pathlib import Path

import torch.distributed as dist

from benchmarks.agent.job_shapes import running
from benchmarks.agent.job_shapes.job import SHAPES, shape

running.HANG_S = 3.0
running.START_S = 60.0


@shape(makes_group=False)
def steps(job):
    for step in range(40):
        job.say(step + job.rank)


@shape(makes_group=False)
def hangs(job):
    job.say(1.0)
    if job.rank == 1:
        time.sleep(1000)


@shape(max_restarts=1, makes_group=False)
def restarts(job):
    job.say(1.0)
    if job.rank == 1 and not job.n_restarts:
        while not (job.folder / "losses.0.0").exists():
            time.sleep(0.01)
        raise SystemExit(7)


@shape(makes_group=False)
def fails(job):
    job.say(1.0)
    if job.rank == 1:
        raise RuntimeError("no memory")
    time.sleep(1000)


stopped = []
event = running.Event(lambda pids: stopped.append(len(pids)), lambda pids: stopped.append(-len(pids)), 0.05)
folder, plain = Path(sys.argv[1]), dict(os.environ)
told = {}
for name in ("steps", "hangs", "restarts", "fails"):
    is_first = name == "steps"
    outcome = running.run(
        SHAPES[name], folder / name, plain, half=20 if is_first else 0, event=event if is_first else None
    )
    told[name] = [outcome.hangs, outcome.code, sorted(outcome.losses), outcome.output, outcome.ends_as(outcome)]
told["stopped"] = stopped
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    # In a process of its own: ranks are forks of one that has run nothing of torch.
    folder = tmp_path_factory.mktemp("shapes")
    command = [sys.executable, "-c", textwrap.dedent(RUNNER), str(folder)]
    environment = {**os.environ, "ZEROTUNE_AGENT": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True, env=environment)
    return json.loads(done.stdout)


def test_a_job_ends_well_and_its_losses_are_kept_by_rank_and_start(told):
    hangs, code, losses, _, ends_as_itself = told["steps"]
    assert (hangs, code, losses, ends_as_itself) == (False, 0, ["losses.0.0", "losses.1.0"], True)


def test_an_event_happens_to_all_ranks_and_is_followed_up(told):
    assert told["stopped"] == [2, -2]


def test_a_job_of_which_nothing_comes_hangs(told):
    assert told["hangs"][0] is True


def test_a_job_whose_rank_fails_is_begun_again_if_its_shape_says_so(told):
    hangs, code, losses, *_ = told["restarts"]
    assert (hangs, code) == (False, 0)
    assert losses == ["losses.0.0", "losses.0.1", "losses.1.0", "losses.1.1"]


def test_a_rank_that_fails_ends_its_job(told):
    hangs, code, _, output, _ = told["fails"]
    assert (hangs, code) == (False, 1)
    assert "RuntimeError: no memory" in output

"""What a job does before its ranks have met, and all that a short one ever does, is logged and told."""

import json
import sqlite3

import pytest
from node_world import RANKS

from zerotune.tuner.traces.own.reader import read_own, trace_files

N_RANKS = 2
N_STEPS = 40
"""Ranks have met long before."""


def traces_of(folder):
    return [read_own(path) for path in trace_files(folder)]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("n_steps", [1, 3])
def test_the_trace_of_a_short_job_is_whole_without_a_daemon(world, n_steps):
    training, _ = world.train("--steps", n_steps, launch=("--log-trace", world.folder / "trace"))
    returncode, output = world.finish(training)
    assert returncode == 0, output
    traces = traces_of(world.folder / "trace")
    assert [trace.header.rank for trace in traces] == list(range(N_RANKS))
    assert len({trace.header.job_id for trace in traces}) == 1
    for trace in traces:
        assert trace.ended
        # The first step ends where the ranks begin to look for each other.
        assert trace.steps["step"].tolist() == list(range(1, n_steps))
        assert set(trace.records["step"].tolist()) >= set(range(1, n_steps))


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_the_steps_before_the_ranks_had_met_are_in_trace_and_store(world):
    daemon = world.start_daemon()
    returncode, output = world.finish(world.take_steps(N_STEPS, launch=("--log-trace", world.folder / "trace")))
    assert returncode == 0, output
    for trace in traces_of(world.folder / "trace"):
        assert trace.steps["step"].tolist() == list(range(1, N_STEPS))
        assert trace.n_dropped == 0
    daemon.terminate()
    world.finish(daemon, timeout_s=10)
    with sqlite3.connect(world.store) as store:
        steps = [step for (step,) in store.execute("SELECT step FROM steps ORDER BY step")]
    assert steps == list(range(1, N_STEPS))


ALONE = """
import torch, torch.distributed as dist
dist.init_process_group()
parameter = torch.nn.Parameter(torch.ones(1))
parameter.sum().backward()
dist.barrier()
if {steps}:
    torch.optim.SGD([parameter]).step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("n_ranks", "steps", "why"),
    [(1, True, "one rank"), (2, False, "over before")],
)
def test_a_trace_that_is_missing_is_one_line(world, n_ranks, steps, why):
    script, folder = world.folder / "script.py", world.folder / "trace"
    script.write_text(ALONE.format(steps=steps))
    job = world.launch(RANKS, n_ranks, script, launch=("--log-trace", folder))
    returncode, output = world.finish(job)
    assert returncode == 0, output
    if any(folder.glob("*.zttrace")):  # ranks without steps join, too, if there is time
        assert not steps
        return
    (told,) = [line for line in output.splitlines() if str(folder) in line]
    assert why in told


SPAWNED = """
import socket, torch, torch.distributed as dist, zerotune
from torch import multiprocessing

def main(rank, port):
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for _ in range(5):
        dist.all_reduce(torch.ones(1))
        zerotune.step_ended()
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.spawn(main, (port,), nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_spawned_ranks_leave_whole_traces_and_one_summary(world):
    script, summary = world.folder / "script.py", world.folder / "summary.json"
    script.write_text(SPAWNED)
    job = world.launch(script, launch=("--log-trace", world.folder / "trace", "--summary", summary))
    returncode, output = world.finish(job)
    assert returncode == 0, output
    traces = traces_of(world.folder / "trace")
    assert [trace.steps["step"].tolist() for trace in traces] == [[1, 2, 3, 4]] * N_RANKS
    written = [step["duration_us"] for step in json.loads(summary.read_text())["steps"]]
    assert written == traces[0].steps["duration_us"].tolist()

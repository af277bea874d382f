"""A rank that computes longer than the other, as the daemon, the store and the metrics name it."""

import json
import sys

import pytest
from node_world import FABRIC, RANKS, ZEROTUNE

LATE_SCRIPT = """
import os
from torch.optim.optimizer import register_optimizer_step_post_hook
from zerotune.agent.nccl.emulated.device.clock import mark_compute_us
from zerotune.zero_runtime.examples import train
if os.environ["RANK"] == "1":
    register_optimizer_step_post_hook(lambda *_: mark_compute_us(1800.0))
train.main()
"""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_late_rank_is_named_everywhere(world):
    world.start_daemon()
    script = world.folder / "late.py"
    script.write_text(LATE_SCRIPT)
    training = world.start(
        *ZEROTUNE, "launch", "--fabric", FABRIC, "--endpoint", world.endpoint, "--", sys.executable, RANKS, 2,
        script, "--stage", 3, "--batch", 1, "--layers", 2, "--width", 32, "--steps", 600,
    )  # fmt: skip

    def named():
        job = next(iter(world.jobs()), None)
        return job.lateness if job and job.lateness.late else None

    lateness = world.wait_for(named, "a late rank", training, timeout_s=300)
    (late,) = lateness.late
    assert late.rank == 1
    assert late.late_us == pytest.approx(1800, rel=0.2)
    metrics = world.zerotune("daemon", "metrics", "--endpoint", world.endpoint, "--store", world.store).stdout
    assert "zerotune_job_rank_late_seconds{" in metrics
    assert world.finish(training, timeout_s=200)[0] == 0
    explained = json.loads(world.zerotune("explain", "--store", world.store, "--json").stdout)
    assert {late["rank"] for one in explained for late in one["job"]["lateness"]["late"]} == {1}

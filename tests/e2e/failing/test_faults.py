"""What must not happen when processes are killed: training stops, losses change, anything is left."""

import json
import os
from pathlib import Path

import psutil
import pytest
from node_world import STEPS, losses_of


@pytest.mark.timeout(180)
def test_kill_9_of_the_daemon_changes_nothing_and_a_new_one_is_found_and_ends_in_good_order(world, kill9):
    daemon = world.start_daemon()
    training, losses = world.train("--steps", 100_000)
    world.wait_for(lambda: len(losses_of(losses)) > 15, "training to run", training)
    epoch_at_kill = world.wait_for(
        lambda: next((job.epoch for job in world.jobs() if job.epoch > 0), None), "a first plan", training
    )
    kill9(daemon.pid)
    at_kill = len(losses_of(losses))
    world.wait_for(lambda: len(losses_of(losses)) > at_kill + 10, "training to go on", training)
    daemon = world.start_daemon()
    world.wait_for(
        lambda: any(job.n_observations > 0 and job.n_ranks_seen == 2 for job in world.jobs()),
        "tuning to resume", training, timeout_s=5,
    )  # fmt: skip
    world.wait_for(lambda: any(job.epoch > epoch_at_kill for job in world.jobs()), "a plan of the new daemon", training)
    at_replan = len(losses_of(losses))
    world.wait_for(lambda: len(losses_of(losses)) > at_replan + 10, "training under the new plan", training)
    training.terminate()
    world.finish(training)

    daemon.terminate()
    assert world.finish(daemon, timeout_s=10)[0] == 0
    assert not Path(world.runtime / "d.sock").exists()
    explained = world.zerotune("explain", "--store", world.store, "--json")
    assert explained.returncode == 0, explained.stderr
    assert json.loads(explained.stdout), "what it had measured and decided is written"

    # How far training came by then is the machine's affair, so the reference is as long as that was.
    n_steps = at_replan + 10
    reference = world.losses_without_us(n_steps)
    assert at_kill < n_steps == len(reference)
    assert losses_of(losses)[:n_steps] == reference


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_rank_restarts_the_job_and_a_second_one_ends_it(world, kill9):
    """With a daemon at tcp://, which wants keys."""
    world.use_tcp()
    shared_before = set(os.listdir("/dev/shm"))
    daemon = world.start_daemon()
    world.environment["ZEROTUNE_JOB_ID"] = "first"
    world.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo may meet dead ranks, pytorch#135712
    training = world.launch(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", STEPS, 100_000
    )

    def tuned(job_id):
        return lambda: next((job for job in world.jobs() if job.job_id == job_id and job.epoch > 0), None)

    world.wait_for(tuned("first"), "a first plan", training)
    (victim,) = world.living(rank="1")
    kill9(victim.pid)
    again = world.wait_for(tuned("first.1"), "plans after the restart", training)
    assert again.n_ranks_seen == 2
    world.wait_for(lambda: [job.job_id for job in world.jobs()] == ["first.1"], "the old ranks to be gone")
    (victim,) = world.living(rank="1")
    kill9(victim.pid)
    returncode, output = world.finish(training, timeout_s=60)
    assert returncode != 0
    assert "RankDisagreement" not in output
    world.wait_for(lambda: {p.pid for p in world.living()} == {daemon.pid, *trainers(daemon)}, "every rank to end")
    assert set(os.listdir("/dev/shm")) <= shared_before
    assert list(world.runtime.iterdir()) == []
    world.wait_for(lambda: world.status() is not None, "the daemon to live on")


def trainers(daemon):
    return [child.pid for child in psutil.Process(daemon.pid).children(recursive=True)]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_jobs_at_once_under_one_daemon_keep_apart(world):
    world.start_daemon()
    trainings = [world.train("--steps", 150, losses=f"losses{number}.jsonl") for number in range(2)]

    def tuned():
        return [job for job in world.jobs() if job.epoch > 0 and job.n_ranks_seen == 2]

    jobs = world.wait_for(lambda: len(tuned()) == 2 and tuned(), "plans in both jobs", trainings[0][0], timeout_s=200)
    assert len({job.job_id for job in jobs}) == 2
    for training, _ in trainings:
        returncode, output = world.finish(training, timeout_s=200)
        assert returncode == 0, output
    first, second = (losses_of(losses) for _, losses in trainings)
    assert first == second
    assert len(first) == 150

"""A job whose environment names another's tuner and profiler: it is tuned, and says whose plugins are there."""

import json

import pytest

from benchmarks.lib.nccl.other_plugins import other_profiler, other_tuner
from zerotune.store.records.passages import OtherPlugin


@pytest.mark.slow
def test_a_job_beside_others_plugins(world):
    world.start_daemon()
    world.environment |= {
        "NCCL_TUNER_PLUGIN": str(other_tuner(world.folder / "tuner.so", 5)),
        "NCCL_PROFILER_PLUGIN": str(other_profiler(world.folder / "profiler.so", 5)),
    }
    training = world.take_steps(1000)

    def beside_others():
        job = next(iter(world.jobs()), None)
        return job if job and job.passages.others and job.epoch > 0 and job.n_observations > 0 else None

    job = world.wait_for(beside_others, "a plan beside others' plugins", training)
    assert job.passages.others == (OtherPlugin("tuner", "other"), OtherPlugin("profiler", "other"))

    returncode, output = world.finish(training)
    assert returncode == 0, output
    done = world.zerotune("explain", "--store", world.store, "--json")
    assert {one["job"]["baseline"] for one in json.loads(done.stdout)} == {"other"}

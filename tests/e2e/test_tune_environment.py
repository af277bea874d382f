"""From start to start a training tries NCCL's variables, in all ranks or in none; a start that fails ends a trial."""

from pathlib import Path

import pytest
from node_world import RANKS

JOB = Path(__file__).with_name("environment_job.py")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_change_runs_in_all_ranks_and_one_that_fails_is_not_tried_again(world):
    world.start_daemon()
    own = world.folder / "candidates"
    own.write_text("NCCL_SHM_DISABLE=1\nNCCL_NSOCKS_PERTHREAD=4\n")  # the first of them fails on this fabric

    def start():
        options = ("--tune-environment", "--environment-file", own, "--name", "training")
        return world.finish(world.launch(RANKS, 2, JOB, 20, launch=options))

    code, said = start()
    assert code == 0, said
    assert "the usual environment" in said
    code, said = start()
    assert code != 0
    assert "NCCL_SHM_DISABLE=1 does not work" in said
    code, said = start()
    while "the usual environment" in said:
        assert code == 0, said
        assert said.count("has nothing") == 2
        code, said = start()
    assert code == 0, said
    assert "rank 0 has 4" in said
    assert "rank 1 has 4" in said
    world.environment["NCCL_NSOCKS_PERTHREAD"] = "2"
    code, said = start()
    assert code == 0, said
    assert said.count("has 2") == 2, "what the user sets stays"
    told = world.zerotune("explain", "--environment", "--store", world.store)
    assert "NCCL_SHM_DISABLE=1" in told.stdout
    assert "failed" in told.stdout

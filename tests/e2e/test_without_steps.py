"""A script that updates its parameters by hand: it is told what is missing, and with one more line it is tuned."""

import json
import sys

import pytest

SCRIPT = """
import os, sys, torch, torch.distributed as dist, zerotune
dist.init_process_group(init_method="env://")
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)])
for _ in range(120):
    model.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.data -= 0.01 * parameter.grad
    if sys.argv[1] != "silent":
        zerotune.step_ended()
if sys.argv[1] == "killed":
    zerotune.training_ended()
    os._exit(0)  # nothing is done at exit, as where Ray kills its workers
if sys.argv[1] == "raises" and dist.get_rank() == 1:
    raise ArithmeticError("made on purpose")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("word", ["silent", "says", "killed", "raises"])
def test_a_script_without_an_optimizer_is_told_which_call_is_missing(world, word):
    script, summary = world.folder / "by_hand.py", world.folder / "summary.json"
    script.write_text(SCRIPT)
    world.start_daemon()
    training = world.start(
        sys.executable, "-m", "zerotune.tuner.cli", "launch", "--fabric", "ethernet_boxes",
        "--endpoint", world.endpoint,
        "--summary", summary, "--", sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node=2", script, word,
    )  # fmt: skip
    returncode, output = world.finish(training, timeout_s=120)
    assert (returncode != 0) is (word == "raises"), output
    if word == "silent":
        assert output.count("zerotune.step_ended()") == 1
    else:
        assert "zerotune.step_ended()" not in output
        assert len(json.loads(summary.read_text())["steps"]) == 119
        (ended,) = world.wait_for(lambda: world.status().ended, "the job's end")
        assert (ended.step, ended.failure) == (119, "rank 1: ArithmeticError" if word == "raises" else "")
        assert not ended.fell_silent or word == "raises", "torchrun kills the other rank if it is still there"

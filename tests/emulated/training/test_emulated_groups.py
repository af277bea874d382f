"""Groups beside and after the default group: gloo's own, those for both kinds of device, and shrunk ones."""

import os
import subprocess
import sys

import pytest

from zerotune.agent import launch

GROUPS = """
import torch
import torch.distributed as dist
from zerotune.agent.nccl.emulated import EmulatedProcessGroup, journal

dist.init_process_group("cpu:gloo,cuda:nccl")
rank = dist.get_rank()
default = dist.distributed_c10d._get_default_group()
assert isinstance(default, EmulatedProcessGroup)
side = dist.new_group(backend="gloo")
assert dist.get_backend(side) == "gloo"
dist.monitored_barrier(side)
dist.all_reduce(torch.ones(2), group=side)
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, rank)
dist.broadcast_object_list(gathered, 0)
assert gathered == [0, 1, 2, 3]
assert journal().n_calls == 0, "gloo's collectives are no calls of NCCL"

pair = dist.new_group([0, 1])
if rank == 0:
    alone = dist.shrink_group([1], group=pair)
    assert (dist.get_rank(alone), dist.get_world_size(alone)) == (0, 1)
total = torch.full((4,), float(rank))
dist.all_reduce(total)
assert total[0] == 6 and journal().n_calls == 1
if rank != 2:
    smaller = dist.shrink_group([2], shrink_flags=FLAGS)
    assert isinstance(smaller, EmulatedProcessGroup)
    assert dist.get_process_group_ranks(smaller) == [0, 1, 3]
    assert (dist.get_rank(), dist.get_world_size()) == ((0, 1, None, 2)[rank], 3)
    total = torch.full((4,), float(rank))
    dist.all_reduce(total)
    assert total[0] == 4 and journal().n_calls == 2
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["SHRINK_DEFAULT", pytest.param("SHRINK_ABORT", marks=pytest.mark.slow)])
def test_groups_are_what_the_script_asked_for(tmp_path, flags):
    script = tmp_path / "groups.py"
    script.write_text(GROUPS.replace("FLAGS", f"dist.distributed_c10d.{flags}"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    request = launch.LaunchRequest(command, fabric="ethernet_boxes", agent_on=False, environment=dict(os.environ))
    done = subprocess.run(
        command, env=launch.environment(request), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr

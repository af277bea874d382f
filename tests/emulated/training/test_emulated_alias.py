"""Asked for, the backend calls itself `nccl` before scripts, and only before these."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from emulated_world import World
from torch.distributed.device_mesh import init_device_mesh


def _by_name(rank: int, folder: str) -> tuple[list[str], float, str]:
    by_name = dist.new_group(backend=dist.get_backend())
    by_default = dist.new_group()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    names = [str(dist.get_backend(group)) for group in (None, by_name, by_default, mesh.get_group())]
    total = torch.ones(1)
    dist.all_reduce(total, group=by_name)
    # Torch looks for CUDA's libraries in a job that it takes for one of NCCL.
    with torch.profiler.profile() as profiler:
        dist.all_reduce(torch.ones(1))
    trace = Path(folder) / f"{rank}.json"
    profiler.export_chrome_trace(str(trace))
    return names, total.item(), json.loads(trace.read_text())["distributedInfo"]["backend"]


def test_scripts_hear_nccl_on_request_and_torch_the_truth(tmp_path: Path) -> None:
    world = World(2, tmp_path, ZEROTUNE_COMPUTE="none", ZEROTUNE_BACKEND_NAME="nccl")
    try:
        assert world.run(_by_name, str(tmp_path)) == [(["nccl"] * 4, 2.0, "emulated_nccl")] * 2
    finally:
        world.close()

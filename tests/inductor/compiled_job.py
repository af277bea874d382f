"""One rank of a job whose step inductor compiles: `compiled_job.py STORE`; rank 0 fills its store first."""

import math
import os
import sys
from unittest import mock

import numpy as np
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import zerotune.inductor
from zerotune.agent.machine import identity
from zerotune.store.records import Collective
from zerotune.store.sqlite.database import Store
from zerotune.store.sqlite.rows.measurements import MEASUREMENT

dist.init_process_group(
    "gloo", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=int(os.environ["RANK"]), world_size=2
)
if dist.get_rank() == 0:
    fabric_id, _ = identity.describe(None)
    us = 1.05 ** round(math.log(750.0, 1.05))
    where = 2, 1, 2 * 64 * 64 * 4, us, 0, 0, math.nan
    what = int(Collective.all_gather), 0, 255, 255, 0, 1, 0, 0, 4, 0
    with Store.open(sys.argv[1]) as store:
        store.record_job("job", fabric_id, {}, 2)
        store.record_measurements(fabric_id, "job", np.array([(*where, *what)], MEASUREMENT))
        store.commit()
estimation = zerotune.inductor.runtime_estimation(sys.argv[1])
heard = set()


def listening(node, override_size):
    told_ms = estimation(node, override_size)
    if told_ms is not None:
        heard.add(f"{str(node.target).split('.')[1]} {told_ms:.2f}")
    return told_ms


def step(shard, weight):
    gathered = functional.all_gather_tensor(shard, 0, dist.group.WORLD)
    return gathered.sum() + (weight @ weight).sum()


chosen = {"enable_overlap_scheduling": True, "custom_runtime_estimation": listening, "compute_estimator": "analytical"}
with (
    mock.patch("torch.utils._runtime_estimation.get_gpu_dram_gbps", return_value=2000.0),
    mock.patch("torch.utils._runtime_estimation.get_device_tflops", return_value=100.0),
    inductor.patch({f"aten_distributed_optimizations.{name}": value for name, value in chosen.items()}),
):
    total = torch.compile(step)(torch.ones(64, 64), torch.ones(64, 64))
assert total.item() == 2 * 64 * 64 + 64**3
print(*sorted(heard), flush=True)
dist.destroy_process_group()

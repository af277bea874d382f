"""A node that never measured anything: its first plan is what the fleet's book says, within the first ten steps."""

from __future__ import annotations

import sqlite3
import sys

import numpy as np
import pytest
from node_world import FABRIC, RANKS, ZEROTUNE

from benchmarks.lib.fleet.fleet_rows import signer_of
from zerotune.agent.nccl import fabric
from zerotune.store.records import Algorithm, Collective, Phase, Protocol, TimingSource
from zerotune.store.sqlite.rows.measurements import MEASUREMENT

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
pytest.importorskip("cryptography")
from zerotune.tuner.fleet.building import build
from zerotune.tuner.fleet.objects import Fabric, pack
from zerotune.tuner.fleet.signing import Signer, make_key, public_path
from zerotune.tuner.fleet.storage import Storage

GATHERED_BYTES = 1 << 20
JOB = f"""
import time
import torch, torch.distributed as dist
from zerotune.agent.nccl.emulated.device.clock import mark_compute_us
dist.init_process_group()
weight = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([weight], lr=0.0)
whole = torch.zeros({GATHERED_BYTES} // 4)
for _ in range(12):
    time.sleep(0.4)
    mark_compute_us(100_000.0)
    for _ in range(2):
        dist.all_gather_into_tensor(whole, torch.zeros(len(whole) // dist.get_world_size()))
    weight.sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def book_of_others(folder, algorithm, protocol, n_channels):
    """A book, signed by `folder`/key, in which other nodes' jobs gained 20 % by one setting."""
    where = fabric.load(FABRIC)
    for node in range(3):
        block = np.zeros(80, MEASUREMENT)
        block["n_ranks"], block["n_nodes"] = 2, where.communicator(range(2)).n_nodes
        block["collective"], block["phase"] = Collective.all_gather, Phase.forward_gather
        block["message_bytes"], block["step"] = GATHERED_BYTES, np.arange(80)
        block["is_default"] = block["step"] % 2 == 0
        block["timing_source"] = TimingSource.emulated
        others = ~block["is_default"].astype(bool)
        block["algorithm"] = np.where(others, algorithm, Algorithm.ring)
        block["protocol"] = np.where(others, protocol, Protocol.simple)
        block["n_channels"] = np.where(others, n_channels, 2)
        noise = np.random.default_rng(node).normal(0.0, 0.01, 80)
        block["duration_us"] = 262.0 * np.exp(noise) * np.where(others, 0.8, 1.0)
        (name, job), at = (f"node{node}", np.zeros(80, int)), Fabric(where.fabric_id, where.describe())
        packed = pack(name, at, ["job"], job, block, 1, signer_of(name))
        Storage(str(folder / "fleet"), writes=True).put(*packed)
    make_key(folder / "key")
    build(str(folder / "fleet"), folder / "book", signer=Signer.from_file(folder / "key"))
    return folder / "book"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_first_plan_is_the_books_within_ten_steps(world):
    book = book_of_others(world.folder, Algorithm.pat, Protocol.simple, 4)
    daemon = world.start_daemon("--book", book, "--book-key", public_path(world.folder / "key"))
    world.wait_for(lambda: world.status().fleet.n_book_winners, "the book", daemon)
    script = world.folder / "job.py"
    script.write_text(JOB)
    job = world.start(
        *ZEROTUNE, "launch", "--fabric", FABRIC, "--endpoint", world.endpoint, "--", sys.executable, RANKS, 2, script
    )
    returncode, output = world.finish(job)
    assert returncode == 0, output
    daemon.terminate()
    world.finish(daemon, timeout_s=10)
    with sqlite3.connect(world.store) as store:
        decided = store.execute("SELECT kind, algorithm, protocol, n_channels, step FROM decisions ORDER BY id")
        first = next(decided)
        ran = store.execute(
            "SELECT min(step) FROM measurements JOIN series ON series.id = series WHERE NOT is_default"
            " AND algorithm = ? AND protocol = ? AND n_channels = ?",
            (Algorithm.pat, Protocol.simple, 4),
        )
        (step,) = next(ran)
    assert first[:4] == ("explore", Algorithm.pat, Protocol.simple, 4)
    assert step is not None
    assert step < 10, "the first is step 0"

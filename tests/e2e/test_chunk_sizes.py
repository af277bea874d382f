"""A tuned job uses a chunk size that was measured before, if its ranks have NCCL ask for them."""

from pathlib import Path

import numpy as np
import pytest
from node_world import RANKS, STEPS

from zerotune.agent.nccl import fabric as fabrics
from zerotune.store.records import Algorithm, Collective, Protocol, Source
from zerotune.store.sqlite.database import MEASUREMENT, Store

CHUNK_BYTES = 65536
CHUNKS = f"""
[[chunks]]
protocol = "simple"
us_factors = [[{CHUNK_BYTES}, 0.2]]
"""
MESSAGE_BYTES = 512
"""Of steps_job.py on two ranks."""


@pytest.fixture
def fabric(world):
    """One whose store says that small chunks are much faster."""
    path = world.folder / "chunked.toml"
    plain = Path(fabrics.__file__).parent / "fabrics" / "ethernet_boxes.toml"
    path.write_text(plain.read_text() + CHUNKS)
    described = fabrics.load(str(path))
    rows = np.zeros((2, 16), MEASUREMENT)
    rows["n_ranks"], rows["n_nodes"], rows["message_bytes"] = 2, 2, MESSAGE_BYTES
    rows["collective"], rows["source"], rows["algorithm"] = Collective.all_gather, Source.sweep, Algorithm.ring
    rows["protocol"], rows["n_channels"], rows["memory_pressure"] = Protocol.simple, 1, np.nan
    rows["is_default"] = [[1], [0]]
    rows["protocol"] = [[Protocol.ll], [Protocol.simple]]
    rows["chunk_bytes"] = [[0], [CHUNK_BYTES]]
    rows["duration_us"] = np.array([[60.0], [12.0]]) * np.linspace(0.98, 1.02, 16)
    with Store.open(world.store) as store:
        store.record_job("sweep", described.fabric_id, described.describe(), 2)
        store.record_measurements(described.fabric_id, "sweep", rows.reshape(-1))
    return str(path)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("asks", [True, False])
def test_a_measured_chunk_size_is_tried_and_measured_again(world, fabric, asks):
    world.environment["ZEROTUNE_NCCL_VERSION"] = "2.30.7"
    daemon = world.start_daemon()
    options = ("--name", "tuned", *(("--chunk-sizes",) if asks else ()))
    returncode, output = world.finish(world.launch(RANKS, 2, STEPS, 1200, launch=options, fabric=fabric))
    assert returncode == 0, output
    daemon.terminate()
    daemon.wait(30)
    with Store.open(world.store, read_only=True) as store:
        found = store.measurements(source=Source.live, chunk_bytes=CHUNK_BYTES)
        decided = {one.candidate.chunk_bytes for one in store.decisions()}
        assert len(store.measurements(source=Source.live)) > 0
    assert (len(found) > 0) == asks, daemon.log.read_text()[-2000:]
    assert (CHUNK_BYTES in decided) == asks

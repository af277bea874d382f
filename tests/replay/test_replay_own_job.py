"""What the job of a trace left in the store itself is no knowledge that it could have begun with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.records import Algorithm, Candidate, Collective, Phase, Protocol
from zerotune.store.sqlite.database import MEASUREMENT, Store
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.modeling.trainer import keep, train
from zerotune.tuner.offline.replay import replay
from zerotune.tuner.offline.replay.result import ReplayResult

FABRIC = fabrics.load("ethernet_boxes")
MIB = 1 << 20
SIZES = [MIB << doublings for doublings in range(4)]
WINNER = Candidate(Algorithm.ring, Protocol.ll, 4)
POLICIES = ["table", "model", "nearest"]


def measurements(winner_us: float) -> np.ndarray:
    """Twelve calls of NCCL's own choice (100 us for each MiB) and of another setting, at four sizes."""
    block = np.zeros(24 * len(SIZES), MEASUREMENT)
    block["n_ranks"] = block["n_nodes"] = 2
    block["message_bytes"] = np.repeat(SIZES, 24)
    block["collective"], block["phase"] = Collective.all_gather, Phase.forward_gather
    block["is_default"] = np.tile([1, 0], 12 * len(SIZES))
    is_default = block["is_default"] == 1
    block["algorithm"] = Algorithm.ring
    block["protocol"] = np.where(is_default, Protocol.simple, WINNER.protocol)
    block["n_channels"] = np.where(is_default, 8, WINNER.n_channels)
    scatter = np.random.default_rng(3).lognormal(0.0, 0.01, len(block))
    block["duration_us"] = np.where(is_default, 100.0, winner_us) * block["message_bytes"] / MIB * scatter
    block["step"] = np.arange(len(block))
    block["memory_pressure"] = np.nan
    return block


def record(store: Store, job_id: str, winner_us: float) -> None:
    store.record_job(job_id, FABRIC.fabric_id, FABRIC.describe(), 2)
    store.record_measurements(FABRIC.fabric_id, job_id, measurements(winner_us))
    store.flush()


def fit(store: Store) -> None:
    model = train(store, FABRIC.fabric_id)
    assert model is not None
    keep(store, model)
    store.flush()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Calls of the job "mine" under NCCL's own choice."""
    block = np.zeros(8 * len(SIZES), OBSERVATION_FIELDS)
    numbers = np.arange(len(block))
    block["message_bytes"], block["sequence"], block["start_ns"] = np.repeat(SIZES, 8), numbers, numbers * 10**7
    block["duration_us"] = 100.0 * block["message_bytes"] / MIB
    block["n_ranks"] = block["n_nodes"] = 2
    block["comm_id"], block["flags"], block["timing_source"] = 5, 2, 4
    block["collective"], block["phase"] = Collective.all_gather, Phase.forward_gather
    block["algorithm"], block["protocol"], block["n_channels"] = Algorithm.ring, Protocol.simple, 8
    folder = tmp_path / "trace"
    log = TraceLog(
        folder, job_id="mine", rank=0, n_ranks=1, fabric_id=FABRIC.fabric_id, fabric=FABRIC.describe(), version="0"
    )
    log.record(block)
    log.close()
    return folder


def settings(result: ReplayResult) -> dict[str, set[str]]:
    return {policy: {one.setting for one in result.verdicts if one.policy == policy} for policy in POLICIES}


def test_policies_do_not_know_what_the_replayed_job_measured(tmp_path: Path, trace: Path):
    path, empty = tmp_path / "store.db", tmp_path / "empty.db"
    with Store.open(path) as store, Store.open(empty):
        record(store, "mine", 60.0)
        fit(store)
    alone = replay(trace, POLICIES, path)
    assert settings(alone) == settings(replay(trace, POLICIES, empty)), "as if it had run with a store of its own"
    assert settings(alone)["table"] == settings(alone)["nearest"] == {"baseline"}


def test_policies_know_what_other_jobs_measured(tmp_path: Path, trace: Path):
    path = tmp_path / "store.db"
    with Store.open(path) as store:
        record(store, "mine", 150.0)
        record(store, "later", 60.0)
        fit(store)
    assert settings(replay(trace, POLICIES, path)) == {policy: {str(WINNER)} for policy in POLICIES}


def test_a_model_fitted_before_the_job_began_is_used_as_it_is(tmp_path: Path, trace: Path, monkeypatch):
    path = tmp_path / "store.db"
    with Store.open(path) as store:
        record(store, "earlier", 60.0)
        fit(store)
        record(store, "mine", 150.0)
    monkeypatch.setattr(
        "zerotune.tuner.offline.replay.evidence.train", lambda *_, **__: pytest.fail("it is fitted anew")
    )
    assert settings(replay(trace, POLICIES, path)) == {policy: {str(WINNER)} for policy in POLICIES}

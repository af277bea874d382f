"""Records and traces to replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.observing.trace_log import TraceLog
from zerotune.store.records import Algorithm, Candidate, Collective, Phase, Protocol, StepRecord
from zerotune.store.wire import OBSERVATION_FIELDS
from zerotune.tuner.offline.replay.reading import load_table
from zerotune.tuner.offline.replay.table import CollectiveTable

FABRIC = "ethernet_boxes"
RING_SIMPLE_8 = Candidate(Algorithm.ring, Protocol.simple, 8)
RING_LL_4 = Candidate(Algorithm.ring, Protocol.ll, 4)
MIB = 1 << 20


def records(
    n_records: int,
    duration_us: object,
    *,
    candidate: Candidate = RING_SIMPLE_8,
    collective: Collective = Collective.all_gather,
    phase: Phase = Phase.forward_gather,
    message_bytes: int = MIB,
    is_default: bool = True,
    first: int = 0,
) -> np.ndarray:
    block = np.zeros(n_records, OBSERVATION_FIELDS)
    block["message_bytes"] = message_bytes
    block["duration_us"] = duration_us
    block["sequence"] = first + np.arange(n_records)
    block["start_ns"] = (first + np.arange(n_records)) * 10_000_000
    block["step"] = (first + np.arange(n_records)) // 4
    block["n_ranks"], block["n_nodes"] = 2, 2
    block["comm_id"] = 5
    block["collective"], block["phase"] = collective, phase
    block["algorithm"], block["protocol"] = candidate.algorithm, candidate.protocol
    block["n_channels"] = candidate.n_channels
    block["flags"] = 2 if is_default else 3
    block["timing_source"] = 4
    return block


def write_trace(
    directory: Path, *ranks: np.ndarray, fabric: str = FABRIC, job_id: str = "job", n_dropped: int = 0
) -> Path:
    described = fabrics.load(fabric)
    for rank, block in enumerate(ranks):
        log = TraceLog(
            directory,
            job_id=job_id,
            rank=rank,
            n_ranks=len(ranks),
            fabric_id=described.fabric_id,
            fabric=described.describe(),
            version="0",
        )
        log.record(block, n_dropped=n_dropped)
        log.steps([StepRecord(1, 0, 5000.0, 100.0)])
        log.close()
    return directory


def table_of(tmp_path: Path, *blocks: np.ndarray) -> CollectiveTable:
    return load_table(write_trace(tmp_path / "trace", np.concatenate(blocks)))


def verdict_of(result, policy: str):
    (found,) = [one for one in result.verdicts if one.policy == policy]
    return found

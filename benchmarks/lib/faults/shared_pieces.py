"""An attack on what users share: settings of which a part is missing."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from benchmarks.lib.faults.place_attacks import STRANGER
from zerotune.store.records import (
    Algorithm,
    Candidate,
    CandidateStatistics,
    Collective,
    CommunicatorClass,
    DecisionKey,
    Phase,
    Protocol,
)
from zerotune.tuner.learning.knowledge import Knowledge
from zerotune.tuner.modeling.features import CostPrior
from zerotune.tuner.modeling.knowledge_pool import KnowledgePool


def pieces_of_settings(folder: Path) -> bool:
    """What another user shares names channels without an algorithm, beside a setting at the same key."""
    key = DecisionKey(CommunicatorClass(2, 1), Collective.all_gather, Phase.forward_gather, 72)
    pieces = (Candidate(n_channels=5), Candidate(Algorithm.ring, Protocol.ll, 3))
    lines = [CandidateStatistics(key, one, False, 50, 100.0, 100.0, 1.0, 90.0, 0.0) for one in pieces]
    (folder / str(STRANGER)).mkdir()
    name = hashlib.sha256(b"fabric").hexdigest()[:32] + ".msgpack"
    (written := folder / str(STRANGER) / name).write_bytes(
        msgspec.msgpack.encode({"version": 1, "fabric_id": "fabric", "statistics": lines, "by_job": [lines]})
    )
    os.chown(written, STRANGER, STRANGER)
    statistics, by_job = KnowledgePool(folder).with_others("fabric", [], [])
    costs = CostPrior({"comm_channels": 8})
    offered = costs.candidates(key.communicator, key.collective)
    Knowledge(statistics, by_job=by_job).prior(key, 200_000.0, offered, costs)
    return len(statistics) == len(lines)

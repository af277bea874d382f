"""Other tools' traces of several ranks: one measurement per collective, and no rank or call joined by coincidence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import trace_samples as samples

from zerotune.store.errors import TraceError
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.left_out import LeftOut
from zerotune.tuner.traces.rank_joining import ALONE, joined
from zerotune.tuner.traces.records import FLAG_COUNTED, UNKNOWN_U4, Summary, empty_block


def timed(calls: list[tuple[int, int, int, float]], n_ranks: int = 4) -> np.ndarray:
    """Records of (comm_id, sequence, rank, duration)."""
    block = empty_block(len(calls))
    block["collective"], block["message_bytes"], block["n_ranks"] = 2, 1024, n_ranks
    for name, values in zip(("comm_id", "sequence", "rank", "duration_us"), zip(*calls, strict=True), strict=True):
        block[name] = values
    return block


def of(*blocks: np.ndarray) -> tuple[list[float], Summary]:
    summary = Summary()
    return sorted(float(us) for block in joined(blocks, summary) for us in block["duration_us"]), summary


def test_the_last_rank_to_arrive_tells_the_time():
    found, summary = of(timed([(1, 0, 0, 30), (1, 1, 0, 10)]), timed([(1, 1, 1, 40), (1, 0, 1, 20)]))
    assert (found, summary.n_joined) == ([10, 20], 4)


def test_calls_that_other_ranks_lack_are_left_out():
    found, summary = of(timed([(1, 0, 0, 30), (1, 1, 0, 99), (2, 5, 0, 7)]), timed([(1, 0, 1, 20)]))
    assert found == [7, 20], "of communicator 2 there is one rank only"
    assert summary.unusable == {LeftOut.partial_ranks: 1}


def test_numbers_that_repeat_are_calls_in_their_order():
    """A format without numbers gives 0 to all; a restarted job begins anew."""
    found, _ = of(timed([(1, 0, 0, 30), (1, 0, 0, 10)]), timed([(1, 0, 1, 20), (1, 0, 1, 50)]))
    assert found == [10, 20]


def test_unnamed_ranks_and_groups_of_one_name_are_not_joined():
    found, summary = of(timed([(1, 0, UNKNOWN_U4, 30)]), timed([(1, 0, UNKNOWN_U4, 10)]))
    assert (found, summary.n_joined) == ([10, 30], 0)
    found, summary = of(*(timed([(1, 0, rank, 10)], n_ranks=2) for rank in range(4)))
    assert found == []
    assert summary.unusable == {LeftOut.too_many_ranks: 4}


def test_calls_without_numbers_that_a_rank_has_fewer_of_are_left_out():
    blocks = [timed([(1, call, rank, 10 + call) for call in range(rank == 1, 3)]) for rank in range(2)]
    blocks += [timed([(2, 0, rank, 7)]) for rank in range(2)]
    for block in blocks:
        block["flags"] |= FLAG_COUNTED
    found, summary = of(*blocks)
    assert (found, summary.unusable) == ([7], {LeftOut.partial_ranks: 5})


def test_a_rank_alone_is_told():
    assert of(timed([(1, 0, 0, 30)]))[1].notes == [ALONE]
    assert of(*(timed([(1, 0, rank, 30)]) for rank in range(4)))[1].notes == []


def test_ranks_merged_into_one_profile_are_refused(tmp_path: Path):
    path = tmp_path / "trace.json"
    told = {"Collective name": "allreduce", "dtype": "Float", "Group size": 2, "In msg nelems": 9, "Out msg nelems": 9}
    event = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce", "ts": 1.0, "dur": 50.0, "args": told}
    document = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": [{**event, "pid": pid} for pid in (0, 1)]}
    path.write_text(json.dumps(document))
    with pytest.raises(TraceError, match="pid 0, 1"):
        list(read_trace(path).blocks())


def test_dumps_of_a_folder_are_joined(tmp_path: Path):
    for rank, duration_ms in enumerate((1.5, 0.5, 2.0, 0.75)):
        first, second = json.loads(json.dumps(samples.FLIGHT_RECORDER["entries"]))
        document = {**samples.FLIGHT_RECORDER, "entries": [first | {"duration_ms": duration_ms}, second]}
        (tmp_path / f"_dump_{rank}.json").write_text(json.dumps(document))
    trace = read_trace(tmp_path)
    (rows,) = trace.measurements(is_default=True, n_nodes=2)
    assert rows["duration_us"].tolist() == [500]
    assert trace.summary.unusable == {LeftOut.no_duration: 4}
    assert trace.summary.n_joined == 4
    assert sum(map(len, trace.blocks())) == 8, "records stay those of single ranks"

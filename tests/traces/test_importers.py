"""What each format's files say, against what was read off them by hand."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import trace_samples as samples

from zerotune.store.errors import TraceError
from zerotune.store.records import Algorithm, Candidate, Collective, Observation, Protocol, Source, TimingSource
from zerotune.store.sqlite.rows.measurements import MEASUREMENT
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.formats import FORMATS
from zerotune.tuner.traces.left_out import LeftOut
from zerotune.tuner.traces.pytorch import chakra

MIB = 1 << 20


def observed(path: Path) -> list[Observation]:
    return list(read_trace(path).observations())


def test_every_format_is_recognised(tmp_path: Path) -> None:
    for name, path in samples.everything(tmp_path).items():
        trace = read_trace(path)
        expected = name.removeprefix("written_").removesuffix("_old").removesuffix("_torn")
        assert trace.format_name == expected
        assert list(trace.blocks()), name
        assert trace.summary.n_records > 0
    tested_elsewhere = {"zerotune", "measurements_csv"}  # tests/own_traces, test_import_round_trip.py
    seen = {read_trace(path).format_name for path in samples.everything(tmp_path).values()}
    assert {one.name for one in FORMATS} - tested_elsewhere == seen, "a format without a sample in trace_samples.py"


@pytest.mark.parametrize("name", ["flight_recorder", "flight_recorder_pickle"])
def test_flight_recorder(tmp_path: Path, name: str) -> None:
    gather, scatter = observed(samples.written(tmp_path, name))
    assert (gather.collective, gather.message_bytes, gather.n_ranks) == (Collective.all_gather, 8000, 4)
    assert (gather.duration_us, gather.timing_source) == (1500.0, TimingSource.reported)
    assert (gather.rank, gather.sequence, gather.datatype) == (3, 7, "bfloat16")
    assert gather.start_ns == 1_700_000_000_000_000_000
    assert (scatter.collective, scatter.message_bytes) == (Collective.reduce_scatter, 16000)
    assert scatter.duration_us is None
    assert scatter.comm_id == gather.comm_id
    assert (gather.algorithm, gather.protocol, gather.n_channels, gather.n_nodes) == (None, None, None, None)


def test_flight_recorder_of_a_real_job() -> None:
    trace = read_trace(samples.DATA / "flight_recorder")
    found = list(trace.observations())
    assert {one.rank for one in found} == {0, 1, 14, 15}
    assert trace.summary.unusable[LeftOut.point_to_point] == 16
    assert trace.summary.facts["nccl_version"] == "2.27.3"
    tensor_parallel = [one for one in found if one.rank >= 14 and one.n_ranks == 2]
    assert {one.message_bytes for one in tensor_parallel if one.datatype == "bfloat16"} == {83_886_080}
    # Ranks 14 and 15 are one tensor-parallel group: the same calls under the same communicator id.
    by_rank = {
        rank: {(one.comm_id, one.sequence, one.collective) for one in tensor_parallel if one.rank == rank}
        for rank in (14, 15)
    }
    assert by_rank[14] & by_rank[15]
    assert all(one.duration_us is None for one in found)


def test_kineto_with_arguments() -> None:
    trace = read_trace(samples.REAL["kineto"])
    found = list(trace.observations())
    assert len(found) == 21
    assert all(one.n_ranks == 2 and one.duration_us is not None for one in found)
    largest = max(found, key=lambda one: one.message_bytes)
    assert largest.collective is Collective.all_reduce
    (slow,) = [one for one in found if one.duration_us == pytest.approx(2636.669)]
    assert (slow.collective, slow.message_bytes, slow.n_channels) == (Collective.all_reduce, 6_637_568 * 4, 8)
    assert {(one.algorithm, one.protocol) for one in found} == {(None, None)}, "kernel names do not tell"


def test_kineto_without_arguments_takes_dimensions_of_the_call() -> None:
    found = observed(samples.REAL["kineto_old"])
    assert len(found) == 8
    assert any(one.collective is Collective.all_reduce and one.message_bytes == 394_241 * 4 for one in found)
    assert any(one.collective is Collective.all_to_all and one.message_bytes == 6144 * 4 for one in found)
    assert {one.n_ranks for one in found} == {0}, "an old trace does not tell the group"
    assert {one.rank for one in found} == {3}


def test_kineto_without_kernels_has_the_calls_without_times(tmp_path: Path) -> None:
    path = tmp_path / "cpu_only.json"
    arguments = {
        "External id": 7, "Collective name": "_reduce_scatter_base", "dtype": "BFloat16", "In msg nelems": 4000,
        "Out msg nelems": 1000, "Group size": 4, "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3]",
    }  # fmt: skip
    call = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "ts": 100.5, "dur": 9, "args": arguments}
    wait = {**call, "args": {**arguments, "External id": 8, "Collective name": "wait"}}
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 2}, "traceEvents": [call, wait]}))
    trace = read_trace(path)
    (one,) = trace.observations()
    assert (one.collective, one.message_bytes, one.n_ranks, one.rank) == (Collective.reduce_scatter, 8000, 4, 2)
    assert (one.duration_us, one.n_channels, one.start_ns) == (None, None, 100_500)
    assert len(trace.summary.notes) == 1, "there are no kernels in it"
    kernel = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": 200, "dur": 50, "args": {"External id": 7}}
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [call, kernel]}))
    assert [one.duration_us for one in read_trace(path).observations()] == [50], "the call is its kernel's"


def test_execution_traces() -> None:
    found = observed(samples.REAL["execution_trace"])
    assert len(found) == 21
    assert found[0].message_bytes == 53_120 * 4
    assert {one.n_ranks for one in found} == {2}
    assert all(one.duration_us is None for one in found)
    old = observed(samples.REAL["execution_trace_old"])
    assert len(old) == 10
    assert {(one.collective, one.n_ranks) for one in old} == {(Collective.all_gather, 2)}
    assert old[0].message_bytes == 8, "two outputs of one float"


def test_profiler_events_time_from_first_start_to_last_stop() -> None:
    found = observed(samples.REAL["profiler_events"])
    assert len(found) == 8
    assert {one.rank for one in found} == {0, 1, 2, 3}
    assert {(one.algorithm, one.protocol, one.message_bytes) for one in found} == {
        (Algorithm.ring, Protocol.simple, 134_217_728)
    }
    assert sorted({one.n_channels for one in found if one.n_channels}) == [12, 13]
    assert all(one.timing_source is TimingSource.gpu_kernel for one in found)
    assert all(one.duration_us is not None and 1000 < one.duration_us < 20_000 for one in found)


def test_nccl_tests_tables() -> None:
    found = observed(samples.REAL["nccl_tests"])
    assert {(one.collective, one.n_ranks, one.n_nodes) for one in found} == {(Collective.all_gather, 4, 1)}
    times = [one.duration_us for one in found if one.message_bytes == 16 * MIB]
    assert times == [pytest.approx(67.25), pytest.approx(64.48)]
    cluster = read_trace(samples.DATA / "nccl_tests" / "multi-node__nccl_N10_G2.log.gz")
    records = list(cluster.observations())
    assert {(one.n_ranks, one.n_nodes) for one in records} == {(20, 10)}
    assert {one.collective for one in records} >= {Collective.all_gather, Collective.reduce_scatter}
    a100 = observed(samples.DATA / "nccl_tests" / "nccl_reducescatter.log")
    assert {(one.collective, one.n_ranks) for one in a100} == {(Collective.reduce_scatter, 8)}
    assert a100[0].algorithm is None


def test_rows_torn_by_nccls_own_lines_tell_setting_and_time() -> None:
    trace = read_trace(samples.REAL["nccl_tests_torn"])
    found = list(trace.observations())
    assert len(found) == 12
    assert {(one.algorithm, one.protocol, one.n_channels) for one in found} == {(Algorithm.ring, Protocol.simple, 24)}
    assert found[-1].duration_us == pytest.approx(35_322.8)
    assert found[-1].message_bytes == 8_589_934_592
    nvls = observed(samples.DATA / "nccl_debug" / "g2_NVLS.log.gz")
    assert {one.algorithm for one in nvls} == {Algorithm.nvls}


def test_nccl_tests_json(tmp_path: Path) -> None:
    trace = read_trace(samples.written(tmp_path, "nccl_tests_json"))
    found = list(trace.observations())
    assert [one.duration_us for one in found] == [50.5, 49.5, 61.0, 60.0, 62.5]
    assert {(one.n_ranks, one.n_nodes, one.algorithm, one.protocol) for one in found} == {
        (4, 2, Algorithm.ring, Protocol.ll128)
    }
    assert "hunter2" not in repr(vars(trace.summary)), "the environment stays in the file"


def test_tuner_csv(tmp_path: Path) -> None:
    trace = read_trace(samples.written(tmp_path, "tuner_csv"))
    chosen, default, untimed = trace.observations()
    assert chosen == Observation(
        sequence=0, collective=Collective.all_gather, message_bytes=MIB, n_ranks=16, n_nodes=2,
        algorithm=Algorithm.ring, protocol=Protocol.ll128, n_channels=8, duration_us=100.5,
        timing_source=TimingSource.reported,
    )  # fmt: skip
    assert (default.algorithm, default.n_channels, default.duration_us) == (None, None, 120.0)
    assert (untimed.algorithm, untimed.duration_us) == (Algorithm.pat, None)
    assert sum(trace.summary.unusable.values()) == 1
    (block,) = trace.measurements()
    assert block.dtype == MEASUREMENT
    assert block["is_default"].tolist() == [0, 1]
    assert block["algorithm"].tolist() == [Algorithm.ring, 255]
    assert set(block["source"]) == {Source.imported}
    assert trace.summary.unusable[LeftOut.no_duration] == 1


def test_measurements_say_what_ran_or_are_left_out() -> None:
    trace = read_trace(samples.REAL["nccl_tests"])
    assert list(trace.measurements()) == []
    assert trace.summary.unusable[LeftOut.setting_unknown] == 56
    (forced,) = trace.measurements(Candidate(Algorithm.ring, Protocol.ll, 8), n_nodes=4)
    assert {(row["algorithm"], row["protocol"], row["n_channels"], row["n_nodes"]) for row in forced} == {(1, 0, 8, 4)}
    assert any("--nodes 4" in note for note in trace.summary.notes), "the file names one host"
    (default,) = trace.measurements(is_default=True)
    assert default["is_default"].all()
    assert len(default) == 56


def test_inspector_bytes_become_total(tmp_path: Path) -> None:
    trace = read_trace(samples.written(tmp_path, "inspector"))
    found = list(trace.observations())
    sizes = {one.collective: one.message_bytes for one in found}
    assert sizes == {
        Collective.all_gather: 64 * MIB, Collective.reduce_scatter: 64 * MIB, Collective.all_reduce: 4 * MIB,
    }  # fmt: skip
    assert {one.comm_id for one in found} == {0x9E7A479F95A6F1B3}
    assert {(one.rank, one.duration_us) for one in found} == {(0, 300.0), (1, 301.0)}
    assert {(one.n_ranks, one.n_nodes, one.timing_source) for one in found} == {(16, 2, TimingSource.gpu_kernel)}


def test_debug_log_calls_take_their_selection(tmp_path: Path) -> None:
    trace = read_trace(samples.written(tmp_path, "nccl_debug"))
    first, second, scatter = trace.observations()
    assert (first.rank, second.rank) == (1, 0)
    assert first.message_bytes == 4 * 1024 * 2
    assert (first.algorithm, first.protocol, first.n_channels) == (Algorithm.ring, Protocol.ll, 2)
    assert first.comm_id == second.comm_id == 0xABCD
    assert (scatter.collective, scatter.message_bytes, scatter.algorithm) == (Collective.reduce_scatter, 8192, None)
    assert scatter.n_nodes == 2
    assert trace.summary.unusable == {LeftOut.point_to_point_or_unknown: 1}


def test_selections_are_total_before_2_24_and_per_rank_after(tmp_path: Path) -> None:
    old = tmp_path / "old.log"
    old.write_text(samples.SELECTIONS_2_23)
    found = observed(old)
    assert [(one.sequence, one.message_bytes, one.n_ranks) for one in found] == [(0, 8192, 8), (1, 8192, 8)]
    new = tmp_path / "new.log"
    new.write_text(
        samples.SELECTIONS_2_23.replace("2.23.4", "2.28.9").replace(
            "Algo 1 proto 0 time 12.300000", "Algo RING proto LL channel{Lo..Hi}={0..3}"
        )
    )
    assert [(one.message_bytes, one.n_channels) for one in observed(new)] == [(65536, 4), (65536, 4)]


def test_chakra(tmp_path: Path) -> None:
    trace = read_trace(samples.written(tmp_path, "chakra"))
    gather, scatter = trace.observations()
    assert (gather.message_bytes, gather.n_ranks, gather.rank) == (8 * MIB, 8, 2)
    assert gather.duration_us == 120.0
    assert (scatter.message_bytes, scatter.duration_us) == (8 * MIB, None)
    assert trace.summary.unusable == {LeftOut.barrier_or_unknown: 1, LeftOut.bytes_or_ranks_unknown: 1}


def test_chakra_without_protobuf_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    chakra.message_classes.cache_clear()
    with pytest.raises(TraceError, match=r"pip install 'zerotune\[chakra\]'"):
        observed(samples.written(tmp_path, "chakra"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_every_protocol_read_the_same(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "nccl_trace_rank_3"
    path.write_bytes(pickle.dumps(samples.FLIGHT_RECORDER, protocol=protocol))
    found = list(read_trace(path).observations())
    assert found == observed(samples.written(tmp_path, "flight_recorder"))


def test_directories_join_ranks_and_refuse_mixtures(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing")
    for rank in (10, 2):
        shutil.copy(samples.REAL["execution_trace"], tmp_path / f"et_rank{rank}.json.gz")
    ranks = [one.rank for one in read_trace(tmp_path).observations()]
    assert sorted(set(ranks)) == [2, 10]
    assert ranks == sorted(ranks)
    samples.written(tmp_path, "tuner_csv")
    with pytest.raises(TraceError, match="several formats"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="'nonsense'"):
        read_trace(tmp_path, "nonsense")


def test_a_process_of_several_communicators_has_one_rank(tmp_path: Path) -> None:
    """Its ranks in them differ; of a process with several GPUs each keeps its own."""
    path = tmp_path / "rank3.log"
    call = (
        "{o} [0] NCCL INFO AllReduce: opCount {i:x} sendbuff 0x1 recvbuff 0x2 count 64 datatype 7 op 0 root 0 comm {c} "
    )
    made = "{o} [0] NCCL INFO comm {c} rank {r} nRanks {n} nNodes 1 localRanks {n} localRank {r} MNNVL 0\n"
    text = made.format(o="n:1:2", c="0xa", r=1, n=2) + made.format(o="n:1:2", c="0xb", r=3, n=4)
    text += made.format(o="n:9:2", c="0xc", r=0, n=2) + made.format(o="n:9:3", c="0xd", r=1, n=2)
    for at, (owner, comm, n_ranks) in enumerate(
        (("n:1:2", "0xa", 2), ("n:1:2", "0xb", 4), ("n:9:2", "0xc", 2), ("n:9:3", "0xd", 2))
    ):
        text += call.format(o=owner, c=comm, i=at) + f"[nranks={n_ranks}] stream 0x3\n"
    path.write_text(text)
    (block,) = read_trace(path).blocks()
    assert block["rank"].tolist() == [3, 3, 0, 1]

"""Lines as each version of a tool writes them: what was read off their format strings and public logs."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trace_samples import DATA, NCCL_TESTS_JSON

from zerotune.store.errors import TraceError
from zerotune.store.records import Algorithm, Collective, Observation, Protocol
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.left_out import LeftOut
from zerotune.tuner.traces.nccl.nccl_tests import GROUPED
from zerotune.tuner.traces.records import Summary

P = "node1:100:101 [0] NCCL INFO "
SHAPE = P + "comm 0x55a0 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 0\n"
MIB = 1 << 20


def read_text(folder: Path, text: str, name: str = "trace.log") -> tuple[list[Observation], Summary]:
    path = folder / name
    path.write_text(text)
    trace = read_trace(path)
    return list(trace.observations()), trace.summary


# -- NCCL_DEBUG ---------------------------------------------------------------------------------------------

NAMED = "channel{Lo..Hi}={0..11}"
SELECTIONS = {
    "2.20.5": ("{b} Bytes -> Algo 1 proto 2 time 12.300000", None),
    "2.21.5": ("{b} Bytes -> Algo 1 proto 2 time 12.300000", None),
    "2.22.3": ("{b} Bytes -> Algo 1 proto 2 time 12.300000", None),
    "2.23.4": ("AllGather: {b} Bytes -> Algo 1 proto 2 time 12.300000", MIB),
    "2.24.3": (f"AllGather: {{b}} Bytes -> Algo RING proto SIMPLE {NAMED}", 8 * MIB),
    "2.25.1": (f"AllGather: {{b}} Bytes -> Algo RING proto SIMPLE {NAMED}", 8 * MIB),
    "2.26.2": (f"AllGather: {{b}} Bytes -> Algo RING proto SIMPLE {NAMED}", 8 * MIB),
    "2.27.3": (f"AllGather: {{b}} Bytes -> Algo RING proto SIMPLE {NAMED}", 8 * MIB),
    "2.28.9": (f"AllGather: {{b}} Bytes -> Algo RING proto SIMPLE {NAMED}", 8 * MIB),
    "2.29.2": (f"AllGather: {{b}} Bytes -> Algo RING proto SIMPLE {NAMED}", 8 * MIB),
    "2.30.7": (f"AllGather: {{b}} Bytes -> Algo RING proto SIMPLE {NAMED} cgaClusterSize 2", 8 * MIB),
}


@pytest.mark.parametrize("version", SELECTIONS)
def test_selections_of_every_version(tmp_path: Path, version: str) -> None:
    line, total = SELECTIONS[version]
    text = P + f"NCCL version {version}+cuda12.8\n" + SHAPE + 3 * (P + line.replace("{b}", str(MIB)) + "\n")
    found, summary = read_text(tmp_path, text)
    assert summary.facts["nccl_version"] == ".".join(version.split(".")[:2])
    text += P + f"NCCL version {'2.27.3' if total is None or total == MIB else '2.23.4'}+cuda12.8\n"
    if total is not None:  # of each release's lines it is not known any more how they count
        assert read_text(tmp_path, text)[1].unusable == {LeftOut.selection_of_several_releases: 3}
    if total is None:
        assert found == []
        assert summary.unusable == {LeftOut.selection_without_collective: 3}
        return
    assert [one.message_bytes for one in found] == 3 * [total]
    assert {(one.algorithm, one.protocol, one.n_ranks, one.n_nodes) for one in found} == {
        (Algorithm.ring, Protocol.simple, 8, 2)
    }
    assert {one.n_channels for one in found} == {12 if "channel" in line else None}
    assert all(one.duration_us is None for one in found), "the model's time is no measurement"


def test_a_public_log_of_2_23_counts_selections_in_total(tmp_path: Path) -> None:
    """The same call once as COLL and once as TUNING, 2,359,808 floats on each of 4 ranks."""
    found, _ = read_text(
        tmp_path,
        "3: " + P + "NCCL version 2.23.4+cuda12.6\n"
        "3: " + P + "comm 0x555e2c6387e0 rank 0 nRanks 4 nNodes 4 localRanks 1 localRank 0 MNNVL 0\n"
        "3: " + P + "AllGather: opCount 1606 sendbuff 0x93fd44a00 recvbuff 0x96d44e200 count 2359808 datatype 7 op 0 "
        "root 0 comm 0x555e2c6387e0 [nranks=4] stream 0x555e2b3a4370\n"
        "3: " + P + "AllGather: 37756928 Bytes -> Algo 1 proto 2 time 2860.208008\n",
    )
    (one,) = found
    assert (one.message_bytes, one.algorithm, one.protocol) == (37_756_928, Algorithm.ring, Protocol.simple)


NVIDIA = "count {c} datatype 9 op 0 root 0 comm 0x55a0 [nranks=8] stream 0x5630"
RCCL_OLD = NVIDIA + " task 0 globalrank 0"
RCCL = "acc (nil) " + RCCL_OLD
CALLS = {
    "NCCL version 2.20.5+cuda12.4": NVIDIA,
    "NCCL version 2.23.4+cuda12.6": NVIDIA,
    "NCCL version 2.27.3+cuda12.9": NVIDIA,
    "NCCL version 2.30.7+cuda13.0": NVIDIA,
    "RCCL version 2.20.5+hip6.2 HEAD:d380693+": RCCL_OLD,
    "RCCL version : 2.21.5-HEAD:eef7b29": RCCL_OLD,
    "RCCL version : 2.22.3-develop:7d8d67c+": RCCL,
    "RCCL version : 2.27.7-HEAD:0d2c4fd": RCCL,
}
PREFIXES = [
    "", "[2026-03-12 13:57:49] ", "[2026-03-12 13:57:49.123456] ", "12: ", "[1,0]<stdout>:", "[default0]:", "pod-3 | ",
]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("version", CALLS)
def test_calls_of_every_version_behind_any_launcher(tmp_path: Path, version: str, prefix: str) -> None:
    call = CALLS[version].replace("{c}", "1000")
    lines = [
        version,
        P + "ncclCommInitRank comm 0x55a0 rank 0 nranks 8 cudaDev 0 nvmlDev 0 busId 1b00 commId 0xabcd - Init START",
        SHAPE.strip(),
        *(
            P + f"{name}: opCount {index:x} sendbuff 0x7f00 recvbuff 0x7f01 {call}"
            for index, name in enumerate(
                ["AllGather", "ReduceScatter", "AllReduce", "Broadcast", "AlltoAll", "Gather", "Scatter", "Send"]
            )
        ),
        "",
    ]
    found, summary = read_text(tmp_path, "\n".join(prefix + line for line in lines))
    assert {one.collective.name: one.message_bytes for one in found} == {
        "all_gather": 16_000, "reduce_scatter": 16_000, "all_reduce": 2_000, "broadcast": 2_000,
        "all_to_all": 16_000, "gather": 16_000, "scatter": 16_000,
    }  # fmt: skip
    assert [one.sequence for one in found] == list(range(7))
    assert {(one.n_ranks, one.n_nodes, one.rank, one.comm_id, one.datatype) for one in found} == {
        (8, 2, 0, 0xABCD, "bfloat16")
    }
    assert summary.unusable == {LeftOut.point_to_point_or_unknown: 1}
    assert summary.facts["nccl_version"] == version.split("version")[1].strip(" :")[:4]


def test_kernels_on_symmetric_memory_have_no_setting(tmp_path: Path) -> None:
    version = P + "NCCL version 2.28.9\n" + SHAPE
    symmetric = P + f"AllGather [Symmetric]: {MIB} Bytes -> Kernel AllGather_LL nchannels 16 nthreads 512 nWorks 1\n"
    found, _ = read_text(tmp_path, version + symmetric)
    assert [(one.message_bytes, one.algorithm) for one in found] == [(8 * MIB, None)]
    # The same bytes once with and once without: which of the calls it was, the log does not say.
    usual = P + f"AllGather: {MIB} Bytes -> Algo RING proto SIMPLE {NAMED}\n"
    call = P + "AllGather: opCount 1 sendbuff 0x1 recvbuff 0x2 " + NVIDIA.replace("{c}", str(MIB // 2)) + "\n"
    assert read_text(tmp_path, version + usual + call)[0][0].algorithm is Algorithm.ring
    assert read_text(tmp_path, version + usual + call + symmetric)[0][0].algorithm is None


# -- nccl-tests ---------------------------------------------------------------------------------------------

HEAD = (
    "# nccl-tests version 2.19.6 nccl-headers=22809 nccl-library=22809\n# Collective test starting: all_gather_perf\n"
    "# nThread 1 nGpus 1 minBytes 1024 maxBytes 1024 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1 graph: 0\n"
    "#  Rank  0 Group  0 Pid 1 on node1 device  0 [0000:1b:00] NVIDIA H100\n"
    "#  Rank  1 Group  0 Pid 2 on node2 device  0 [0000:1b:00] NVIDIA H100\n"
)
NAMES = "#       size         count      type   redop    root"
SIDE = "     time   algbw   busbw #wrong"
ROW = "        1024           128     float    none      -1"
TABLES = {
    "2.11 to 2.19": (NAMES + 2 * SIDE, ROW + "    20.25    0.05    0.03       0    21.50    0.05    0.03       0"),
    "2.10 and before": (
        "#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error",
        "        1024           128   float    none    20.25    0.05    0.03  0e+00    21.50    0.05    0.03  0e+00",
    ),
    "unchecked": (NAMES + 2 * SIDE, ROW + "    20.25    0.05    0.03     N/A    21.50    0.05    0.03     N/A"),
    "time stamps": (
        NAMES + 2 * SIDE + "           timestamp",
        ROW + "    20.25    0.05    0.03       0    21.50    0.05    0.03       0  2026-03-12 13:57:49",
    ),
    "single iterations": (
        NAMES + 2 * (SIDE + "   i_min   i_max   i_p99   i_cv%"),
        ROW + 2 * "    {}    0.05    0.03       0   19.00   30.00   29.00    3.10",
    ),
    "bitwise": (NAMES + 2 * (SIDE + " #bitdiff"), ROW + 2 * "    {}    0.05    0.03       0         0"),
}  # fmt: skip


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[1,0]<stdout>:",
        "0: ",
        "[prterun-n1-7@1,0]<stdout>: ",
        "[pod/job-0/main] ",
        "2026-01-02T03:04:05.12Z ",
        "2026-01-02 03:04:05,123 ",
        "node001: ",
        "nccl-test-1  | ",
    ],
)
@pytest.mark.parametrize("version", TABLES)
def test_tables_of_every_version(tmp_path: Path, version: str, prefix: str) -> None:
    names, row = TABLES[version]
    text = HEAD + names + "\n" + 2 * (row.format("20.25", "21.50") + "\n") + "# Out of bounds values : 0 OK\n"
    found, summary = read_text(tmp_path, "".join(prefix + line for line in text.splitlines(keepends=True)))
    assert [one.duration_us for one in found] == 2 * [20.25, 21.5]
    assert {(one.collective, one.message_bytes, one.n_ranks, one.n_nodes) for one in found} == {
        (Collective.all_gather, 1024, 2, 2)
    }
    assert not summary.unusable
    assert not summary.notes


@pytest.mark.parametrize(
    "tag", ["[1,0]<stdout>:", "[1,0]<stdout>: ", "[12345,0]<stdout>:", "[prterun-n1-7@1,0]<stdout>: "]
)
def test_rows_that_mpirun_tagged_part_by_part(tmp_path: Path, tag: str) -> None:
    row = ROW + tag + "    20.25    0.05    0.03       0" + tag + "    21.50    0.05    0.03       0"
    text = HEAD + NAMES + 2 * SIDE + "\n" + 3 * (row + "\n") + "# Out of bounds values : 0 OK\n"
    found, summary = read_text(tmp_path, "".join(tag + line for line in text.splitlines(keepends=True)))
    assert [one.duration_us for one in found] == 3 * [20.25, 21.5]
    assert {(one.message_bytes, one.n_ranks) for one in found} == {(1024, 2)}
    assert not summary.unusable


def test_json_times_of_the_cpu_and_grouped_calls(tmp_path: Path) -> None:
    result = {"size": 1024, "type": "float", "in_place": {"cpu_time": 5.0, "nwrong": None}, "out_of_place": None}
    config = {**NCCL_TESTS_JSON["config"], "aggregated_iterations": 4}
    found, summary = read_text(
        tmp_path, json.dumps({**NCCL_TESTS_JSON, "config": config, "results": [result]}), "out.json"
    )
    assert found == []
    assert summary.unusable == {LeftOut.cpu_time: 1}
    assert summary.notes == [GROUPED]


# -- NCCL Inspector -----------------------------------------------------------------------------------------


def inspector_line(header: dict[str, object], **parts: object) -> str:
    return json.dumps({"header": {"id": "0x9e", "rank": 3, "n_ranks": 8, "nnodes": 2, **header}, **parts}) + "\n"


def test_inspector_lines_of_nvidia_and_amd(tmp_path: Path) -> None:
    call = {
        "coll": "ReduceScatter", "coll_sn": 129, "coll_msg_size_bytes": 65536, "coll_exec_time_us": 110,
        "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 19.1, "coll_busbw_gbs": 18.5,
    }  # fmt: skip
    ring = {**call, "coll_algo": "Ring", "coll_proto": "Simple", "coll_n_channels": 4, "coll_exec_time_us": 99.5}
    trace = {"coll_start_ts": 1, "coll_stop_ts": 2, "kernel_events": [{"channel_id": 0}]}
    text = (
        inspector_line({}, metadata={"inspector_output_format_version": "v4.0"}, coll_perf=call)
        + inspector_line({}, metadata={"hostname": "h"}, coll_perf={**call, "event_trace_ts": trace})
        + inspector_line({}, metadata={}, p2p_perf={"p2p": "Send", "p2p_sn": 1, "p2p_peer": 2})
        + inspector_line({}, coll_perf={**ring, "decomposition": {"gpu_kernel_avg_us": 2}})
        + inspector_line({}, coll_perf={**ring, "coll_algo": "Teleport"})
    )
    found, summary = read_text(tmp_path, text)
    assert {one.message_bytes for one in found} == {8 * 65536}
    assert [(one.algorithm, one.protocol, one.n_channels) for one in found] == [
        (None, None, None), (None, None, None), (Algorithm.ring, Protocol.simple, 4), (None, None, None),
    ]  # fmt: skip
    assert [one.duration_us for one in found] == [110, 110, 99.5, 99.5]
    assert summary.unusable == {LeftOut.point_to_point: 1}


# -- PyTorch ------------------------------------------------------------------------------------------------

DUMPS = """
import sys
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
shard, whole = torch.ones(1000), torch.ones(2000)
dist.all_gather_into_tensor(whole, shard)
dist.all_reduce(shard.bfloat16())
dist.all_to_all_single(torch.empty(1000), shard)
dist.gather(shard, [shard, shard] if rank == 0 else None, 0)
dist.scatter(shard, [shard, shard] if rank == 0 else None, 0)
dist.barrier()
with open(f"{folder}/nccl_trace_rank_{rank}", "wb") as file:
    file.write(c10d._dump_fr_trace(True, False, False))
with open(f"{folder}/nccl_trace_rank_{rank}.json", "wb") as file:
    text = c10d._dump_fr_trace_json()
    file.write(text if isinstance(text, bytes) else text.encode())
dist.barrier()
dist.destroy_process_group()
"""


def check_dumps(folder: Path, scratch: Path) -> None:
    """Pickle and JSON tell the same, and both ranks the same calls."""
    by_rank = []
    for rank in range(2):
        pickled, text = (folder / f"nccl_trace_rank_{rank}{suffix}" for suffix in ("", ".json"))
        found = list(read_trace(pickled).observations())
        assert found == list(read_trace(text).observations())
        assert {one.rank for one in found} == {rank}
        # gloo's groups stay without a name in a dump; NCCL's have one.
        named = scratch / f"named_{rank}.json"
        named.write_text(text.read_text().replace('"pg_config":{"":{', '"pg_config":{"0":{'))
        by_rank.append(list(read_trace(named).observations()))
    sizes = [[(one.collective.name, one.message_bytes, one.n_ranks) for one in found] for found in by_rank]
    assert sizes[0] == sizes[1] == [
        ("all_gather", 8000, 2), ("all_reduce", 2000, 2), ("all_to_all", 4000, 2), ("gather", 8000, 2),
        ("scatter", 8000, 2),
    ]  # fmt: skip
    calls = [{(one.comm_id, one.collective, one.sequence) for one in found} for found in by_rank]
    assert calls[0] == calls[1], "ranks are joined by these"


def test_flight_recorder_dumps_of_pytorch_2_13(tmp_path: Path) -> None:
    check_dumps(DATA / "flight_recorder_gloo", tmp_path)


@pytest.mark.slow
def test_flight_recorder_dumps_of_this_pytorch(tmp_path: Path) -> None:
    """What its own pickler and JSON writer write, on two ranks."""
    from torch._C import _distributed_c10d as c10d

    if not hasattr(c10d, "_dump_fr_trace_json"):
        # An older recorder belongs to NCCL alone: without a GPU it has nothing to dump.
        pytest.skip("this PyTorch records NCCL only")
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", DUMPS, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
    assert [rank.wait(100) for rank in ranks] == [0, 0]
    check_dumps(tmp_path, tmp_path)


def test_a_chakra_graph_without_bytes_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "chakra.0.json.gz"
    path.write_bytes(gzip.compress(b'{\n "workload_graph": [{"Id": 1, "Name": "c10d::broadcast_", "NodeType": 7}]}'))
    with pytest.raises(TraceError, match="Chakra"):
        read_trace(path)

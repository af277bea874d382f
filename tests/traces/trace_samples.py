"""Small traces of every format: real ones from tests/data, and written ones where none may be copied."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"

REAL = {
    "flight_recorder": DATA / "flight_recorder" / "_dump_14.json",
    "flight_recorder_old": DATA / "flight_recorder_gloo" / "nccl_trace_rank_0.json",
    "flight_recorder_pickle_old": DATA / "flight_recorder_gloo" / "nccl_trace_rank_0",
    "kineto": DATA / "kineto" / "resnet_2gpu_rank0_reduced.json.gz",
    "kineto_old": DATA / "kineto" / "dlrm_worker3.json.gz",
    "execution_trace": DATA / "pytorch_et" / "resnet_2gpu_reduced.json.gz",
    "execution_trace_old": DATA / "pytorch_et" / "allgather_2gpu_schema_1.0.2.json.gz",
    "profiler_events": DATA / "nccl_profiler" / "allreduce_4gpu.jsonl.gz",
    "nccl_tests": DATA / "nccl_tests" / "quiet__all_gather.txt",
    "nccl_tests_torn": DATA / "nccl_debug" / "g4_auto.log.gz",
}

FLIGHT_RECORDER = {
    "version": "2.10",
    "entries": [
        {
            "record_id": 1, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 7, "p2p_seq_id": 0,
            "op_id": 7, "profiling_name": "nccl:_all_gather_base", "time_created_ns": 1_700_000_000_000_000_000,
            "duration_ms": 1.5, "input_sizes": [[1000]], "input_dtypes": ["BFloat16"], "output_sizes": [[4000]],
            "output_dtypes": ["BFloat16"], "state": "completed", "retired": True, "is_p2p": False,
        },
        {
            "record_id": 2, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 8, "p2p_seq_id": 0,
            "op_id": 8, "profiling_name": "nccl:_reduce_scatter_base", "time_created_ns": 1_700_000_000_001_000_000,
            "duration_ms": None, "input_sizes": ((4000,),), "input_dtypes": ["Float"], "output_sizes": [[1000]],
            "output_dtypes": ["Float"], "state": "scheduled", "retired": False, "is_p2p": False,
        },
    ],
    "nccl_version": "2.28.9",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}},
}  # fmt: skip

INSPECTOR = "".join(
    json.dumps(
        {
            "header": {"id": "0x9e7a479f95a6f1b3", "rank": rank, "n_ranks": 16, "nnodes": 2},
            "metadata": {
                "inspector_output_format_version": "v4.0", "git_rev": "x", "rec_mechanism": "nccl_profiler_interface",
                "dump_timestamp_us": 1_748_030_377_748_202, "hostname": "node", "pid": 1,
            },
            "coll_perf": {
                "coll": coll, "coll_sn": sequence, "coll_msg_size_bytes": 4 << 20, "coll_exec_time_us": 300 + rank,
                "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 1.0, "coll_busbw_gbs": 2.0,
            },
        }
    )
    + "\n"
    for sequence in (1, 2)
    for coll in ("AllGather", "ReduceScatter", "AllReduce")
    for rank in (0, 1)
)  # fmt: skip

TUNER_CSV = """# measured on 2 nodes
collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,cost_metric,bandwidth_gbps,latency_us
allgather,1048576,ring,ll128,8,2,16,1,0,0.5,10.2,100.5
allgather,1048576,default,default,-1,2,16,1,0,0.6,9.9,120.0
reducescatter,4194304,pat,simple,16,2,2,1,0,0.5,,
allreduce,4194304,nvls,warp,16,1,8,1,0,0.5,1,2
"""

SUMMARY_CSV = (
    "Collective name,dtype,In msg nelems,Process Group Name,Group size,Full msg size (MB),comm_latency_mean,"
    "comm_latency_std,count,Total comm latency (ms),algo bw (GB/s)_mean,bus bw (GB/s)_mean\n"
    "_allgather_base,BFloat16,1048576,0,8,16.0,210.5,3.1,24,5.05,79.7,69.7\n"
    "_reduce_scatter_base,Float,8388608,0,8,32.0,305.0,4.0,24,7.32,110.0,96.2\n"
    "barrier,Byte,1,0,8,0.0,9.0,1.0,2,0.01,0.0,0.0\n"
)

NCCL_TESTS_JSON = {
    "version": 3,
    "start_time": "2026-01-01 00:00:00",
    "args": ["./build/all_gather_perf", "-b", "1M", "-J", "out.json"],
    "env": ["HOME=/nowhere", "SECRET_TOKEN=hunter2", "NCCL_ALGO=Ring", "NCCL_PROTO=LL128"],
    "nccl_version": 22809,
    "config": {
        "devices": [
            {"rank": rank, "pid": 1, "hostname": f"node{rank // 2}", "device": rank % 2} for rank in range(4)
        ]
    },
    "results": [
        {
            "size": 1048576, "count": 65536, "type": "float", "redop": "none", "root": "-1",
            "out_of_place": {"time": 50.5, "alg_bw": 20.0, "bus_bw": 15.0, "nwrong": 0.0},
            "in_place": {"time": 49.5, "alg_bw": 20.0, "bus_bw": 15.0, "nwrong": None},
            "actual_iterations": 20, "experiment_name": "x",
        },
        {
            "size": 2097152, "count": 131072, "type": "float", "redop": "none", "root": "-1",
            "out_of_place": {"time": "nan", "alg_bw": "nan", "bus_bw": "nan", "nwrong": 0.0},
            "out_of_place_per_iter": {"min_us": 60.0, "times_us": [61.0, 60.0, 62.5]},
            "in_place": {"time": 70.0, "alg_bw": 1.0, "bus_bw": 1.0, "nwrong": 3.0},
        },
    ],
}  # fmt: skip

_PREFIX = "node1:77:78 [0] NCCL INFO "
DEBUG_LOG = "\n".join(
    [
        _PREFIX + "NCCL version 2.28.9+cuda12.9",
        _PREFIX + "comm 0x55a0 rank 1 nRanks 4 nNodes 2 localRanks 2 localRank 1 MNNVL 0",
        "node1:79:80 [1] NCCL INFO comm 0x66b0 rank 0 nRanks 4 nNodes 2 localRanks 2 localRank 0 MNNVL 0",
        _PREFIX + "ncclCommInitRankConfig comm 0x55a0 rank 1 nranks 4 cudaDev 1 busId 1 commId 0xabcd - Init COMPLETE",
        "node1:79:80 [1] NCCL INFO ncclCommInitRank comm 0x66b0 rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 1 "
        "commId 0xabcd - Init COMPLETE",
        _PREFIX + "Pattern 4, crossNic 0, nChannels 8, bw 20.000000/12.500000, type NVL/PXB, sameChannels 1",
        _PREFIX + "AllGather: opCount a sendbuff 0x1 recvbuff 0x2 count 1024 datatype 9 op 0 root 0 comm 0x55a0 "
        "[nranks=4] stream 0x3",
        "node1:79:80 [1] NCCL INFO AllGather: opCount a sendbuff 0x1 recvbuff 0x2 count 1024 datatype 9 op 0 root 0 "
        "comm 0x66b0 [nranks=4] stream 0x3",
        "node1:79:80 [1] NCCL INFO AllGather: 2048 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}",
        _PREFIX + "ReduceScatter: opCount b sendbuff 0x1 recvbuff 0x2 count 512 datatype 7 op 0 root 0 comm 0x55a0 "
        "[nranks=4] stream 0x3 task 0 globalrank 1",
        _PREFIX + "Send: opCount c sendbuff 0x1 recvbuff 0x2 count 512 datatype 7 op 0 root 0 comm 0x55a0 [nranks=4]",
        "",
    ]
)

RCCL_LOG = "".join(
    _PREFIX + line + "\n"
    for line in (
        "RCCL version : 2.27.7-HEAD:0d2c4fd",
        "comm 0x55a0 rank 0 nRanks 4 nNodes 1 localRanks 4 localRank 0 MNNVL 0",
        *(
            f"AllGather: opCount {index:x} sendbuff 0x7f00 recvbuff 0x7f01 acc (nil) count {1000 + index} datatype 9 "
            "op 0 root 0 comm 0x55a0 [nranks=4] stream (nil) task 0 globalrank 0"
            for index in range(20)
        ),
    )
)

SELECTIONS_2_23 = (
    "n:1:2 [0] NCCL INFO NCCL version 2.23.4\n"
    "n:1:2 [0] NCCL INFO comm 0x1 rank 0 nRanks 8 nNodes 1 localRanks 8\n"
    "n:1:2 [0] NCCL INFO AllGather: 8192 Bytes -> Algo 1 proto 0 time 12.300000\n"
    "n:1:2 [0] NCCL INFO AllGather: 8192 Bytes -> Algo 1 proto 0 time 12.300000\n"
)


def varint(value: int) -> bytes:
    data = b""
    while True:
        value, low = value >> 7, value & 0x7F
        data += bytes([low | (0x80 if value else 0)])
        if not value:
            return data


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def prefixed(message: bytes) -> bytes:
    return varint(len(message)) + message


def chakra_node(identity: int, kind: int, name: bytes, duration_us: int, **attributes: int | bytes) -> bytes:
    node = field(1, identity) + field(2, name) + field(3, kind) + field(6, 1000) + field(7, duration_us)
    for key, value in attributes.items():
        content = field(29, value) if isinstance(value, bytes) else field(9, value)
        node += field(10, field(1, key.encode()) + content)
    return node


CHAKRA = b"".join(
    map(
        prefixed,
        [
            field(1, b"1.1.1-chakra.0.0.4"),
            chakra_node(1, 4, b"matmul", 50),
            chakra_node(2, 7, b"allgather", 120, comm_type=2, comm_size=1 << 20, pg_name=b"0", pg_size=8),
            chakra_node(3, 7, b"reducescatter", 0, comm_type=7, comm_size=8 << 20, pg_name=b"0", pg_size=8),
            chakra_node(4, 7, b"barrier", 1, comm_type=9, comm_size=4, pg_size=8),
            chakra_node(5, 7, b"allgather", 1, comm_type=2, comm_size=64),
        ],
    )
)

WRITTEN: dict[str, tuple[str, bytes]] = {
    "flight_recorder": ("nccl_trace_rank_3.json", json.dumps(FLIGHT_RECORDER).encode()),
    "flight_recorder_pickle": ("nccl_trace_rank_3", pickle.dumps(FLIGHT_RECORDER, protocol=2)),
    "inspector": ("node-pid1.log", INSPECTOR.encode()),
    "tuner_csv": ("tuner.csv", TUNER_CSV.encode()),
    "summary_csv": ("nccl_summary_implicit_sync.csv", SUMMARY_CSV.encode()),
    "nccl_tests_json": ("out.json", json.dumps(NCCL_TESTS_JSON).encode()),
    "nccl_debug": ("nccl.log", DEBUG_LOG.encode()),
    "nccl_debug_old": ("rccl.log", RCCL_LOG.encode()),
    "chakra": ("chakra.2.et", CHAKRA),
}


def written(folder: Path, name: str) -> Path:
    file_name, content = WRITTEN[name]
    path = folder / file_name
    path.write_bytes(content)
    return path


def everything(folder: Path) -> dict[str, Path]:
    """One file per format and variant."""
    return {**REAL, **{f"written_{name}": written(folder, name) for name in WRITTEN}}

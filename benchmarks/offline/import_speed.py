"""How fast foreign traces are imported: records and bytes per second of each format on one core, peak memory.

The peer for JSON lines is the json module decoding the same lines and doing nothing else with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.lib.reporting import Result, report
from zerotune.tuner.traces import read_trace

LINE_FORMATS = ("inspector", "tuner_csv", "nccl_debug_calls", "nccl_debug_selections", "nccl_tests")
TARGET_PER_S = 500_000


def write_inspector(path: Path, n_records: int) -> None:
    names = ("AllGather", "ReduceScatter", "AllReduce")
    metadata = {
        "inspector_output_format_version": "v4.0", "git_rev": "x", "rec_mechanism": "nccl_profiler",
        "dump_timestamp_us": 1748030377748202, "hostname": "node", "pid": 1,
    }  # fmt: skip
    with path.open("w") as file:
        for index in range(n_records):
            performance = {
                "coll": names[index % 3], "coll_sn": index, "coll_msg_size_bytes": 1 << (10 + index % 16),
                "coll_exec_time_us": 20 + index % 300, "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 1.5,
                "coll_busbw_gbs": 2.5,
            }  # fmt: skip
            header = {"id": "0x9e7a479f95a6f1b3", "rank": index % 8, "n_ranks": 16, "nnodes": 2}
            file.write(json.dumps({"header": header, "metadata": metadata, "coll_perf": performance}) + "\n")


def write_tuner_csv(path: Path, n_records: int) -> None:
    with path.open("w") as file:
        file.write(
            "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,pipeOps,regBuff,cost_metric,"
            "bandwidth_gbps,latency_us\n"
        )
        for index in range(n_records):
            protocol = ("ll", "ll128", "simple")[index % 3]
            file.write(
                f"allgather,{1024 + index},ring,{protocol},{1 + index % 24},2,16,1,0,0.5,10.25,{20 + index % 977}.5\n"
            )


def write_calls(path: Path, n_records: int) -> None:
    with path.open("w") as file:
        file.write("n:1:2 [0] NCCL INFO NCCL version 2.28.9\n")
        file.write("n:1:2 [0] NCCL INFO comm 0x55a0 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0\n")
        for index in range(n_records):
            file.write(
                f"n:1:2 [0] NCCL INFO AllGather: opCount {index:x} sendbuff 0x7f0000000000 recvbuff 0x7f0000100000 "
                f"count {1024 + index % 999} datatype 9 op 0 root 0 comm 0x55a0 [nranks=16] stream 0x55b0\n"
            )


def write_selections(path: Path, n_records: int) -> None:
    with path.open("w") as file:
        file.write("n:1:2 [0] NCCL INFO NCCL version 2.28.9\n")
        file.write("n:1:2 [0] NCCL INFO comm 0x55a0 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0\n")
        for index in range(n_records):
            file.write(
                f"n:1:2 [0] NCCL INFO AllGather: {4096 * (1 + index % 99)} Bytes -> Algo RING proto LL "
                "channel{Lo..Hi}={0..7}\n"
            )


def write_nccl_tests(path: Path, n_records: int) -> None:
    with path.open("w") as file:
        file.write("# nThread 1 nGpus 8 minBytes 8\n# Collective test starting: all_gather_perf\n#\n")
        for rank in range(8):
            file.write(f"#  Rank  {rank} Group  0 Pid 1 on node device  {rank} [0000:1b:00] NVIDIA H100\n")
        for index in range(n_records // 2):
            file.write(
                f"{1024 * (1 + index % 4096):12d} {16:12d}     float    none      -1  {20 + index % 300}.25    1.00"
                "    0.75       0    23.50    1.00    0.75       0\n"
            )


def write_kineto(path: Path, n_records: int) -> None:
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 16}, "traceEvents": [\n')
        for index in range(n_records):
            kernel = {
                "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "pid": 0, "tid": 20, "ts": 1000.5 * index, "dur": 100.25,
                "args": {
                    "External id": index, "correlation": index, "grid": [8, 1, 1], "Collective name": "_allgather_base",
                    "In msg nelems": 1024, "Out msg nelems": 16384, "Group size": 16, "dtype": "BFloat16",
                    "Process Group Name": "0", "Process Group Ranks": "[0, 1]",
                },
            }  # fmt: skip
            other = {"ph": "X", "cat": "cpu_op", "name": "aten::view", "ts": 1.0, "dur": 1.0, "args": {"Ev Idx": 1}}
            file.write(",\n".join(json.dumps(event) for event in [kernel] + [other] * 9))
            file.write("\n]}" if index == n_records - 1 else ",\n")


WRITERS: dict[str, tuple[Callable[[Path, int], None], int]] = {
    "inspector": (write_inspector, 1),
    "tuner_csv": (write_tuner_csv, 1),
    "nccl_debug_calls": (write_calls, 1),
    "nccl_debug_selections": (write_selections, 1),
    "nccl_tests": (write_nccl_tests, 4),
    "kineto": (write_kineto, 20),
}


def timed(action: Callable[[], object]) -> float:
    """CPU seconds: importing is one thread, and other work on the machine is not its fault."""
    start = time.process_time()
    action()
    return time.process_time() - start


def decode_only(path: Path) -> None:
    for line in path.read_bytes().splitlines():
        json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    n_records, repeats = (100_000, 3) if options.quick else (500_000, 5)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (write, divisor) in WRITERS.items():
            path = Path(folder) / f"{name}.log"
            n_here = n_records // divisor
            write(path, n_here)

            def count(path: Path = path) -> int:
                return sum(len(block) for block in read_trace(path).blocks())

            assert count() == n_here, name
            seconds = statistics.median(timed(count) for _ in range(repeats))
            target = f">= {TARGET_PER_S}" if name in LINE_FORMATS else ""
            results.append(Result(f"import_records_per_s_{name}", n_here / seconds, "1/s", target))
            results.append(Result(f"import_mb_per_s_{name}", path.stat().st_size / seconds / 1e6, "MB/s"))
            if name == "inspector":
                seconds_peer = statistics.median(timed(partial(decode_only, path)) for _ in range(repeats))
                results[-2] = replace(results[-2], peer="json.loads", ratio=seconds_peer / seconds)
                tracemalloc.start()
                count()
                results.append(Result("import_peak_memory_mb", tracemalloc.get_traced_memory()[1] / 1e6, "MB", "<= 20"))
                tracemalloc.stop()
            path.unlink()
    report("import_speed", results, as_json=options.json)


if __name__ == "__main__":
    main()

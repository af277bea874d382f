"""How many ranks ran, from files that were cut, pasted or turned into CSV."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from import_runs import command

from zerotune.store.records import Collective
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.left_out import LeftOut
from zerotune.tuner.traces.rank_count import Implied, implied_ranks, rank_count
from zerotune.tuner.traces.rank_joining import ALONE
from zerotune.tuner.traces.records import UNKNOWN_U4

HEADING = (
    "#\n#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw "
    "#wrong\n"
)


def run(n_ranks: int, collective: str = "all_reduce", n_listed: int | None = None) -> list[str]:
    """A log of eight ranks per node."""
    lines = [f"# Collective test starting: {collective}_perf\n# nThread 1 nGpus 1 minBytes 1048576\n"]
    lines += [
        f"#  Rank {rank:2d} Group  0 Pid   {6000 + rank} on node{rank // 8} device  {rank % 8} [0000:8b:00] H100\n"
        for rank in range(n_listed or n_ranks)
    ]
    return [*lines, HEADING, *rows(n_ranks, collective), "# Out of bounds values : 0 OK\n"]


def rows(n_ranks: int, collective: str = "all_reduce") -> list[str]:
    factor = (2 if collective == "all_reduce" else 1) * (n_ranks - 1) / n_ranks
    redop = "none" if collective == "all_gather" else "sum"
    return [
        f"{size:12d} {size // 4:12d}     float    {redop:>4s}      -1 "
        + 2 * f" {time:8.1f} {size / time / 1e3:7.2f} {factor * size / time / 1e3:7.2f}      0"
        + "\n"
        for size, time in ((1 << 20, 61.7), (1 << 24, 203.2), (1 << 28, 1530.4))
    ]


def found(path: Path, **said: int) -> tuple[set[tuple[int, int]], list[str]]:
    trace = read_trace(path)
    blocks = list(trace.measurements(is_default=True, **said))
    counts = {(int(row["n_ranks"]), int(row["n_nodes"])) for block in blocks for row in block}
    return counts, trace.summary.notes


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("damage", "counts"),
    [
        (lambda lines: lines, {(16, 2)}),
        (lambda lines: lines[15:], {(16, 4)}),  # as of `tail`
        (lambda lines: lines[:9] + lines[17:], {(16, 4)}),
        (lambda lines: lines[:2] + lines[17:], {(16, 4)}),
        (lambda lines: [line.replace("#", "", 1) for line in lines], {(16, 2)}),  # as pasted
        (lambda lines: [line.replace("#  Rank  0", "  Rank  0") for line in lines], {(16, 2)}),
        (lambda lines: lines[17:], {(16, 4)}),
    ],
)
def test_ranks_are_those_that_ran_whatever_lines_are_left(tmp_path: Path, collective: str, damage, counts) -> None:
    path = tmp_path / f"{collective}.log"
    path.write_text("".join(damage(run(16, collective))))
    told, notes = found(path, n_nodes=next(iter(counts))[1])
    assert told == counts
    is_whole = counts == {(16, 2)}
    assert bool(notes) == (not is_whole)


def test_what_the_user_says_wins_and_is_told(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text("".join(run(16)))
    counts, notes = found(path, n_ranks=32, n_nodes=4)
    assert counts == {(32, 4)}
    assert any("--n-ranks 32" in note for note in notes)
    assert any("--n-nodes 4" in note for note in notes)
    code, _, err = command(monkeypatch, capsys, path, "--default", "--n-ranks", "1")
    assert (code, "--n-ranks" in err) == (2, True)


def test_a_list_of_more_ranks_than_the_figures_allow_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text("".join(run(16)).replace("".join(rows(16)), "".join(rows(4))))
    code, _, err = command(monkeypatch, capsys, path, "--default", "--store", tmp_path / "s.db")
    assert code == 2
    assert "rank 15 is listed" in err
    assert "--n-ranks" in err
    assert found(path, n_ranks=4, n_nodes=1)[0] == {(4, 1)}


def test_runs_and_groups_are_counted_for_themselves(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text("".join(run(16) + run(8)))
    assert found(path)[0] == {(16, 2), (8, 1)}
    split = "".join(run(16)).replace("".join(rows(16)), "".join(rows(8)))
    for rank in range(16):  # NCCL_TESTS_SPLIT: each node is a group
        split = split.replace(f"Rank {rank:2d} Group  0", f"Rank {rank:2d} Group {rank // 8:2d}")
    path.write_text(split)
    assert found(path)[0] == {(8, 1)}


OTHERS = {
    "heading alone": ([HEADING, *rows(16, "all_gather")], LeftOut.other_collective),
    "rows alone": (rows(16, "all_gather"), LeftOut.other_collective),
    "name at the end": ([HEADING, *rows(16, "reduce_scatter"), "# Collective test concluded: reduce_scatter_perf\n"],
                        LeftOut.other_collective),
    "unknown program": (run(8, "hypercube"), LeftOut.unknown_program),
    "unknown program by its call": (["srun ./hypercube_perf -b 8\n", *run(8)[1:]], LeftOut.unknown_program),
}  # fmt: skip


@pytest.mark.parametrize(("more", "reason"), OTHERS.values(), ids=OTHERS)
def test_rows_of_another_collective_are_left_out(tmp_path: Path, more: list[str], reason: LeftOut) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text("".join(run(8) + more))
    trace = read_trace(path)
    assert {(one.collective, one.n_ranks) for one in trace.observations()} == {(Collective.all_reduce, 8)}
    assert trace.summary.n_records == 6
    assert sum(trace.summary.unusable.values()) == trace.summary.unusable[reason] > 0


def test_rows_of_several_runs_without_lines_between_them_have_no_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text("".join(run(8)[:-1] + rows(16)))
    counts, notes = found(path)
    assert counts == set()
    assert len(notes) == 1
    assert implied_ranks(Collective.all_reduce, [100.0, 100.0], [175.0, 187.5]).is_possible is False
    path.write_text("".join([*run(8), "srun ./reduce_scatter_perf\n"]))  # what comes next says nothing of these
    assert found(path)[0] == {(8, 1)}


def test_ratios_that_say_nothing_say_nothing() -> None:
    assert implied_ranks(Collective.broadcast, [10.0], [10.0]) == Implied()
    assert implied_ranks(None, [10.0], [18.75]) == Implied()
    assert implied_ranks(Collective.all_reduce, [0.0, np.inf], [0.0, np.nan]) == Implied()
    few_digits = implied_ranks(Collective.all_reduce, [0.01], [0.02])
    assert not few_digits.is_one_number
    assert rank_count(0, few_digits).n_ranks == 0
    assert rank_count(8, Implied(16, 16)).contradiction
    assert rank_count(16, Implied(16, 16), range(16)).is_complete


def write_json(path: Path, n_processes: int, n_gpus: int, n_ranks: int) -> None:
    """As `-J` writes it: of each process the first rank alone."""
    entries = [
        {"rank": n_gpus * process, "group": 0, "hostname": f"node{process}", "device": 0}
        for process in range(n_processes)
    ]
    factor = 2 * (n_ranks - 1) / n_ranks
    sides = {"time": 203.2, "alg_bw": 82.565039, "bus_bw": round(82.565039 * factor, 6), "nwrong": 0.0}
    written = {
        "version": 3,
        "start_time": "2026-01-01 00:00:00",
        "args": ["./all_reduce_perf"],
        "env": [],
        "config": {"nthreads": 1, "ngpus": n_gpus, "devices": entries},
        "results": [{"size": 1 << 24, "type": "float", "out_of_place": sides, "in_place": sides}],
    }
    path.write_text(json.dumps(written))


@pytest.mark.parametrize(
    ("n_processes", "n_gpus", "n_ranks", "counts"),
    [(2, 8, 16, {(16, 2)}), (1, 8, 8, {(8, 1)}), (16, 1, 16, {(16, 16)}), (2, 1, 16, {(16, 4)}), (4, 8, 16, set())],
)
def test_ranks_of_a_json_file_are_those_of_all_gpus(tmp_path: Path, n_processes, n_gpus, n_ranks, counts) -> None:
    path = tmp_path / "out.json"
    write_json(path, n_processes, n_gpus, n_ranks)
    is_whole = n_processes * n_gpus == n_ranks
    told, notes = found(path, **({} if is_whole else {"n_nodes": 4}))
    assert (told, not notes) == (counts, is_whole)
    assert found(path, n_ranks=n_ranks, n_nodes=2)[0] == {(n_ranks, 2)}


@pytest.mark.parametrize(
    ("env", "is_default"),
    [
        ([], True),
        (["NCCL_DEBUG=INFO"], True),
        (["NCCL_TUNER_PLUGIN=libother.so"], False),
        (["NCCL_MAX_NCHANNELS=2"], False),
        ({"NCCL_MAX_CTAS": "2"}, False),
    ],
)
def test_an_environment_that_limits_the_choice_is_not_nccls_own(tmp_path: Path, env: object, is_default: bool) -> None:
    path = tmp_path / "out.json"
    write_json(path, 1, 8, 8)
    path.write_text(json.dumps({**json.loads(path.read_text()), "env": env}))
    assert bool(found(path)[0]) is is_default


def test_results_of_json_that_are_wrong_or_without_a_time_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, 1, 8, 8)
    written = json.loads(path.read_text())
    (result,) = written["results"]
    result["out_of_place"] = {**result["out_of_place"], "nwrong": 7}
    result["out_of_place_per_iter"] = {"times_us": [200.0, 210.0]}
    result["in_place"] = {**result["in_place"], "time": "nan"}
    path.write_text(json.dumps(written))
    trace = read_trace(path)
    assert list(trace.blocks()) == []
    assert trace.summary.unusable == {LeftOut.wrong_result: 1, LeftOut.row_without_time: 1}


GATHER = {"profiling_name": "nccl:_all_gather_base", "process_group": ["0", "default_pg"], "pg_id": 0,
          "duration_ms": 1.5, "input_dtypes": ["Float"], "output_dtypes": ["Float"]}  # fmt: skip


def kineto(n_stated: int, n_listed: int, n_sized: int, **described: object) -> dict[str, object]:
    call = {"Collective name": "_allgather_base", "dtype": "Float", "Process Group Name": "0", "External id": 1,
            "Group size": n_stated, "Process Group Ranks": str(list(range(n_listed))),
            "In msg nelems": 1000, "Out msg nelems": 1000 * n_sized}  # fmt: skip
    event = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "ts": 1.0, "dur": 50.0}
    groups = {"pg_config": [{"pg_name": "0", **described}]} if described else {}
    return {"schemaVersion": 1, "deviceProperties": [], "distributedInfo": {"rank": 0, **groups},
            "traceEvents": [{**event, "args": {**call, "correlation": 1}}]}  # fmt: skip


def flight_recorder(n_listed: int, n_sized: int) -> dict[str, object]:
    entry = {**GATHER, "input_sizes": [[1000]], "output_sizes": [[1000 * n_sized]], "collective_seq_id": 1}
    return {"version": "2.10", "entries": [entry], "pg_config": {"0": {"ranks": str(list(range(n_listed)))}}}


CALLS = {
    "recorder": ("dump_rank_3.json", flight_recorder(8, 8), True),
    "recorder_of_other_sizes": ("dump_rank_3.json", flight_recorder(8, 4), False),
    "kineto": ("trace.json", kineto(8, 8, 8, pg_size=8, ranks=list(range(8))), True),
    "kineto_of_another_list": ("trace.json", kineto(8, 4, 8), False),
    "kineto_of_other_sizes": ("trace.json", kineto(8, 8, 16), False),
    "kineto_of_another_description": ("trace.json", kineto(8, 8, 8, pg_size=16), False),
}


@pytest.mark.parametrize(("name", "content", "agrees"), CALLS.values(), ids=CALLS)
def test_what_a_trace_tells_of_a_group_is_compared(tmp_path: Path, name: str, content, agrees: bool) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    counts, notes = found(path, n_nodes=1)
    assert (counts, not set(notes) - {ALONE}) == (({(8, 1)}, True) if agrees else (set(), False))
    counts, notes = found(path, n_nodes=1, n_ranks=32)
    assert counts == {(32, 1)}
    assert notes


def test_a_rank_by_name_that_its_groups_are_without_is_no_rank(tmp_path: Path) -> None:
    path = tmp_path / "dump_20260101.json"
    path.write_text(json.dumps(flight_recorder(8, 8)))
    trace = read_trace(path)
    (block,) = trace.blocks()
    assert block["rank"].tolist() == [UNKNOWN_U4]
    assert trace.summary.notes


def test_an_address_that_another_communicator_had_says_nothing_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "nccl.log"
    head = "n:1:2 [0] NCCL INFO "
    call = "AllGather: opCount {} sendbuff 0x1 recvbuff 0x2 count 1024 datatype 7 op 0 root 0 comm 0x5 [nranks={}]"
    lines = ["comm 0x5 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0", call.format(1, 16), call.format(2, 4)]
    path.write_text("".join(f"{head}{line}\n" for line in lines))
    (block,) = read_trace(path).blocks()
    assert block[["n_ranks", "n_nodes"]].tolist() == [(16, 2), (4, 0)]
    made = "ncclCommInitRank comm 0x5 rank {} nranks 16 commId {} - Init COMPLETE"
    lines = [made.format(3, "0x11"), call.format(1, 16), made.format(5, "0x22"), call.format(1, 16)]
    path.write_text("".join(f"{head}{line}\n" for line in lines))
    assert [int(one["comm_id"][0]) for one in read_trace(path).blocks()] == [0x11, 0x22]


CSV = {
    "prefixed": "operation,size,count,type,redop,root,oop_time,oop_algbw,oop_busbw,oop_wrong,ip_time,ip_algbw,ip_busbw,"
    "ip_wrong",
    "hyphens": "test,size,count,type,redop,root,oop-time,oop-algbw,oop-busbw,oop-error,"
    "ip-time,ip-algbw,ip-busbw,ip-error",
    "units": "Test,Size(B),Count(elements),Type,RedOp,Root,Time(us),AlgBW(GB/s),BusBW(GB/s),#wrong,"
    "Time(us),AlgBW(GB/s),BusBW(GB/s),#wrong",
    "suffixed": "collective,size,count,type,redop,root,time_oop,algbw_oop,busbw_oop,wrong_oop,"
    "time_ip,algbw_ip,busbw_ip,wrong_ip",
}


@pytest.mark.parametrize("header", CSV.values(), ids=CSV)
def test_rows_of_nccl_tests_as_csv(tmp_path: Path, header: str) -> None:
    path = tmp_path / "results.csv"
    path.write_text(
        header + "\n" + "".join("all_gather," + ",".join(row.split()) + "\n" for row in rows(16, "all_gather"))
    )
    trace = read_trace(path)
    (block,) = trace.measurements(is_default=True, n_nodes=2)
    assert set(block["collective"]) == {Collective.all_gather}
    assert set(block["n_ranks"]) == {16}
    assert block["message_bytes"].tolist() == [size for size in (1 << 20, 1 << 24, 1 << 28) for _ in range(2)]
    assert block["duration_us"][:2].tolist() == pytest.approx([61.7, 61.7])
    path.write_text(path.read_text().replace("all_gather,", "all_reduce,"))
    trace = read_trace(path)
    assert list(trace.blocks()) == []
    assert trace.summary.unusable == {LeftOut.other_collective: 3}


def test_one_side_alone_takes_its_collective_from_the_file_name(tmp_path: Path) -> None:
    path = tmp_path / "all_reduce_out_of_place.csv"
    lines = (",".join(row.split()[:9]) for row in rows(8))
    path.write_text("size,count,type,redop,root,time,algbw,busbw,wrong\n" + "\n".join(lines) + "\n")
    assert found(path, n_nodes=1)[0] == {(8, 1)}
    path.write_text(path.read_text().replace(",time,", ",time (ms),"))
    assert not list(read_trace(path).blocks())


def test_a_csv_that_states_other_ranks_than_its_figures_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    header = (
        "numCycle,collective,nodes,ranks,ranksPerNode,gpusPerRank,size,type,redop,inplace,time,algbw,busbw,#wrong\n"
    )
    for n_ranks, each, counts in ((16, 1, {(16, 2)}), (8, 2, {(16, 2)}), (4, 1, set())):
        lines = (
            f"0,AllReduce,2,{n_ranks},{n_ranks // 2},{each},{size},float,sum,0,{','.join(rest[5:8])},0\n"
            for size, *rest in ((row.split()[0], *row.split()) for row in rows(16))
        )
        path.write_text(header + "\n" + "".join(lines))
        assert found(path)[0] == counts


def test_a_summary_whose_sizes_are_of_other_ranks_than_it_states_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nccl_summary_implicit_sync.csv"
    for n_out, counts in ((8, {(8, 1)}), (16, set())):
        path.write_text(
            "Collective name,dtype,In msg nelems,Out msg nelems,Group size,comm_latency_mean,count\n"
            f"_allgather_base,Float,1000,{1000 * n_out},8,12.5,4\n"
        )
        assert found(path, n_nodes=1)[0] == counts


def test_summaries_of_single_ranks_are_named_with_what_is_missing(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "nccl_summary_long.csv"
    path.write_text(
        "rank,Process Group Name,Process Group Ranks,Collective name,Group size,dtype,In msg nelems,Out msg nelems,"
        'stream,dur_mean,count\n0,default_pg,"[0, 1]",allreduce,2,Float,100,100,20,12.5,4\n'
    )
    code, _, err = command(monkeypatch, capsys, path, "--default")
    assert code == 2
    assert "nccl_summary_implicit_sync.csv" in err


def test_more_channels_than_nccl_has_are_read_and_told(tmp_path: Path) -> None:
    """RCCL has up to 128."""
    path = tmp_path / "rccl.log"
    text = b"n:1:2 [0] NCCL INFO RCCL version 2.27.3\n"
    text += b"n:1:2 [0] NCCL INFO comm 0x55a0 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0\n"
    text += b"n:1:2 [0] NCCL INFO AllGather: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..111}\n"
    path.write_bytes(text)
    (block,) = read_trace(path).blocks()
    assert block["n_channels"].tolist() == [112]

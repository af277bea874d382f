"""How many ranks ran, from files that were cut, pasted or turned into CSV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from import_runs import command

from zerotune.store.records import Collective
from zerotune.tuner.traces import read_trace
from zerotune.tuner.traces.left_out import LeftOut
from zerotune.tuner.traces.rank_joining import ALONE

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


def test_the_users_rank_count_wins_and_is_told(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text("".join(run(16)))
    counts, notes = found(path, n_ranks=32, n_nodes=4)
    assert counts == {(32, 4)}
    assert any("--ranks 32" in note for note in notes)
    assert any("--nodes 4" in note for note in notes)
    code, _, err = command(monkeypatch, capsys, path, "--default", "--ranks", "1")
    assert (code, "--ranks" in err) == (2, True)


def test_a_list_of_more_ranks_than_the_figures_allow_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "all_reduce.log"
    path.write_text("".join(run(16)).replace("".join(rows(16)), "".join(rows(4))))
    code, _, err = command(monkeypatch, capsys, path, "--default", "--store", tmp_path / "s.db")
    assert code == 2
    assert "rank 15 is listed" in err
    assert "--ranks" in err
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
def test_the_rank_count_of_a_trace_is_compared(tmp_path: Path, name: str, content, agrees: bool) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    counts, notes = found(path, n_nodes=1)
    assert (counts, not set(notes) - {ALONE}) == (({(8, 1)}, True) if agrees else (set(), False))
    counts, notes = found(path, n_nodes=1, n_ranks=32)
    assert counts == {(32, 1)}
    assert notes


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

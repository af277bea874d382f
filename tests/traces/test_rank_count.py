"""How many ranks ran, from files that were cut, pasted or turned into CSV."""

from __future__ import annotations

from pathlib import Path

import pytest
from import_runs import command

from zerotune.tuner.traces import read_trace

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

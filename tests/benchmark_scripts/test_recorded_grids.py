"""Grids of published logs: rows belong to the collective that ran, or to none."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lib.data.recorded_grids import load
from zerotune.store.records import Collective

ROW = "  {size}  {count}  float  sum  -1  {time_us}  1.00  1.00  0\n"


def test_rows_of_a_benchmark_without_a_collective_of_ours_are_left_out(tmp_path: Path) -> None:
    text = ""
    for setting, time_us in (("Ring/Simple", 10.0), ("Ring/LL", 20.0)):
        text += f"## {setting}\n"
        for name, factor in (("all_reduce", 1), ("alltoall", 7), ("reduce_scatter", 3), ("sendrecv", 9)):
            text += f"# Collective test starting: {name}_perf\n"
            for size in (1024, 2048, 4096):
                text += ROW.format(size=size, count=size // 4, time_us=time_us * factor)
    (tmp_path / "machine.log").write_text(text)
    grids = {grid.collective: grid for grid in load(tmp_path)}
    assert {*grids} == {Collective.all_reduce, Collective.reduce_scatter}
    for collective, factor in ((Collective.all_reduce, 1), (Collective.reduce_scatter, 3)):
        for times in grids[collective].times_us.values():
            assert times == {("ring", "simple"): [10.0 * factor], ("ring", "ll"): [20.0 * factor]}

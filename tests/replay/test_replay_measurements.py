"""Files of measured settings, and traces that do not tell their ranks: what is judged, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotune.store.errors import FabricError
from zerotune.tuner.offline.replay import replay
from zerotune.tuner.offline.replay.policies import POLICIES

HEADER = (
    "collective,size_bytes,algorithm,protocol,channels,nodes,ranks,"
    "pipeOps,regBuff,cost_metric,bandwidth_gbps,latency_us"
)
ROW = "allgather,{nbytes},{setting},{channels},{nodes},{ranks},-1,-1,,,{us}"
SIZES = (65536, 1 << 20, 16 << 20)


def csv_of(path: Path, *rows: str) -> Path:
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def row(nbytes: int, setting: str, us: float, *, channels: int = 8, nodes: int = 1, ranks: int = 8) -> str:
    return ROW.format(nbytes=nbytes, setting=setting, channels=channels, nodes=nodes, ranks=ranks, us=us)


def swept(ranks: int = 8, nodes: int = 1) -> list[str]:
    place = {"ranks": ranks, "nodes": nodes}
    return [
        line
        for nbytes in SIZES
        for line in (
            row(nbytes, "default,default", 100.0, channels=0, **place),
            row(nbytes, "ring,ll", 150.0, **place),
            row(nbytes, "ring,simple", 80.0, **place),
        )
    ]


def test_every_row_of_a_sweep_is_a_call_of_its_own(tmp_path: Path):
    result = replay(csv_of(tmp_path / "t.csv", *swept()), ["baseline", "oracle"])
    assert result.n_collectives == 9
    baseline, oracle = result.totals
    assert (baseline.n_judged, baseline.cost_us) == (9, pytest.approx(900))
    assert oracle.cost_us == pytest.approx(720)
    assert "Records: 9; judged: 9." in result.notes
    assert not any("who chose" in note for note in result.notes), "the file says which rows NCCL chose"


def without_ranks(path: Path) -> Path:
    lines = [",".join([*line.split(",")[:5], line.split(",")[-1]]) for line in (HEADER, *swept())]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("fabric", [None, "h100_node"])
def test_every_policy_judges_a_trace_that_does_not_tell_its_ranks(tmp_path: Path, fabric: str | None):
    result = replay(without_ranks(tmp_path / "t.csv"), list(POLICIES), fabric=fabric)
    assert {total.n_judged for total in result.totals} == {9}
    assert any("9 " in note and "h100_node" in note for note in result.notes) == (fabric is not None)


def test_a_fabric_on_which_nothing_has_room_is_refused(tmp_path: Path):
    with pytest.raises(FabricError, match="not 16 ranks on 2 nodes"):
        replay(csv_of(tmp_path / "t.csv", *swept(ranks=16, nodes=2)), ["baseline"], fabric="h100_node")

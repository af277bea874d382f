"""Tables of choices that `replay --plan` follows: rows, or one error that names file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotune.store.errors import PlanError
from zerotune.store.records import Collective, CommunicatorClass, Phase
from zerotune.tuner.offline.replay.plans import plan_rows

HEADER = "coll,nnodes,nranks,upto_bytes,algo,proto\n"


def test_a_row_holds_from_the_one_before(tmp_path: Path):
    path = tmp_path / "rules.csv"
    path.write_text(
        HEADER + "allgather,2,16,65536,ring,ll\nallgather,2,16,1048576,undef,undef\nallgather,2,16,4194304,pat,simple\n"
    )
    rows = [row for row in plan_rows(path) if row.phase is Phase.other]
    assert [(row.min_bytes, row.max_bytes) for row in rows] == [(1, 65536), (1048577, 4194304)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("coll,nnodes,nranks,upto_bytes\nallgather\n", 2),
        (HEADER + "allgather,2,16,65536,ring,ll\nallgather,2\n", 3),
        (HEADER + "allgather,2,16,65536\n", 2),
        (HEADER + "allgather,2,16,65536,ring\n", 2),
        (HEADER + "k\n", 2),
        (HEADER + f"allgather,2,16,{'9' * 5000},ring,ll\n", 2),
        (HEADER + "allgather,2,16,65536,ring," + "x" * 200_000 + "\n", None),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, text: str, line: int | None):
    path = tmp_path / "rules.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=rf"rules\.csv{'' if line is None else f', line {line}'}"):
        plan_rows(path)


NVIDIAS = """# collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff
allgather,0,65536,tree,simple,4,1,-1,-1,-1
allgather,0,65536,ring,ll,4,2,-1,-1,-1
allreduce,1048577,4294967295,ring,ll128,-1,-1,-1,-1,-1
"""
NCCLXS = "allgather,[0,4095],ring,ll,4,2,*\nallreduce,*,ring,ll128,-1,*,8\n"


@pytest.mark.parametrize("text", [NVIDIAS, NCCLXS])
def test_rows_for_any_number_hold_for_the_communicators_that_are_known(tmp_path: Path, text: str):
    path = tmp_path / "tuner.conf"
    path.write_text(text)
    known = [CommunicatorClass(16, 2), CommunicatorClass(8, 1)]
    rows = [row for row in plan_rows(path, known) if row.phase is Phase.other]
    gathers = [row.communicator for row in rows if row.collective is Collective.all_gather and row.candidate.n_channels]
    reductions = [row.communicator for row in rows if row.collective is Collective.all_reduce]
    assert known[0] in gathers
    assert reductions == known
    assert all(row.communicator in known for row in rows)
    with pytest.raises(PlanError, match=r"tuner\.conf"):
        plan_rows(path)


@pytest.mark.parametrize(
    "row",
    [
        "allreduce,0,64K,tree,ll,4,-1,-1",
        "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks",
        "collective,algorithm,protocol,channels,min_bytes,max_bytes,nNodes,nRanks",
    ],
)
def test_a_wrong_row_of_nvidias_table_is_named_in_its_words(tmp_path: Path, row: str):
    path = tmp_path / "tuner.conf"
    path.write_text(row + "\n")
    with pytest.raises(PlanError, match=r"max_bytes '64K'|names columns") as refused:
        plan_rows(path, [CommunicatorClass(16, 2)])
    assert "collective_type,min_bytes,max_bytes" in str(refused.value)

"""Plans as tables of RCCL and NCCLX: what their readers, restated, make of them, and what is read back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_material import make_store

from zerotune.store.errors import PlanError
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, PlanRow, Protocol
from zerotune.tuner.offline.export import export_table
from zerotune.tuner.offline.replay.plans import plan_rows
from zerotune.tuner.offline.tuner_tables import FORMATS, write_table
from zerotune.tuner.offline.tuner_tables_reading import read_ncclx

PLACE = CommunicatorClass(16, 2)
cut = st.integers(0, 20)
setting = st.tuples(st.sampled_from([Algorithm.ring, Algorithm.pat]), st.sampled_from(Protocol), st.integers(0, 8))
Asked = tuple[str, str, int] | None


def rows_of(drawn: list[tuple[int, int, tuple[Algorithm, Protocol, int]]]) -> list[PlanRow]:
    """Rows one after the other, with gaps."""
    rows: list[PlanRow] = []
    for gap, width, of in drawn:
        low = gap + (rows[-1].max_bytes + 1 if rows else 0)
        rows.append(PlanRow(PLACE, Collective.all_gather, Phase.forward_gather, low, low + width, Candidate(*of)))
    return rows


def asked_of(rows: list[PlanRow], n_bytes: int) -> Asked:
    for row in rows:
        if row.communicator == PLACE and row.min_bytes <= n_bytes <= row.max_bytes:
            found = row.candidate
            assert found.algorithm is not None
            assert found.protocol is not None
            return found.algorithm.name, found.protocol.name, found.n_channels
    return None


def rccl(text: str, n_bytes: int) -> Asked:
    """The first row that matches; channels stay the library's own where they are -1, and a 0 would be warned of."""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        collective, low, high, algorithm, protocol, *numbers = line.split(",")
        channels, n_nodes, n_ranks, pipe_ops, registered = map(int, numbers)
        assert (collective, n_nodes, n_ranks, pipe_ops, registered) == ("allgather", 2, 16, -1, -1)
        assert channels != 0
        if int(low) <= n_bytes <= int(high):
            return algorithm, protocol, max(channels, 0)
    return None


def test_a_row_with_a_chunk_size_has_no_counterpart(tmp_path: Path) -> None:
    plain, chunked = rows_of([(0, 9, (Algorithm.ring, Protocol.simple, 4))] * 2)
    chunked = msgspec.structs.replace(chunked, candidate=msgspec.structs.replace(plain.candidate, chunk_bytes=65536))
    for to in ("nvidia-csv", "ncclx-csv"):
        remarks = write_table(to, [plain, chunked], tmp_path / "t.csv")
        assert remarks[-1] == f"1 row left out, without a counterpart in {to}."


@given(st.lists(st.tuples(cut, cut, setting), max_size=8))
def test_tables_of_rccl_and_ncclx_say_what_the_plan_says(tmp_path_factory: pytest.TempPathFactory, drawn: list) -> None:
    folder = tmp_path_factory.mktemp("tables")
    rows = rows_of(drawn)
    for to in ("rccl-csv", "ncclx-csv", "ncclx-json"):
        write_table(to, rows, folder / f"{to}.{to[-4:].strip('-')}")
    text = (folder / "rccl-csv.csv").read_text()
    from_csv, from_json = (read_ncclx(folder / name) for name in ("ncclx-csv.csv", "ncclx-json.json"))
    assert from_csv == from_json
    for n_bytes in range(330):
        assert rccl(text, n_bytes) == asked_of(rows, n_bytes)
    for n_bytes in range(0, 330, PLACE.n_ranks):  # gathers move a multiple of the ranks
        assert asked_of(from_csv, n_bytes) == asked_of(rows, n_bytes)


@pytest.mark.parametrize(
    "text",
    [
        "allreduce,[2,1],ring,ll,-1,2,8",
        "allreduce,[1,2,ring,ll,-1,2,8",
        "allreduce,[1,2],ring,ll,-1,*,8",
        "allreduce,[1,2],ring,ll,-1,2,8,1",
        "allreduce,[1,2],ring,ll,-1,2,8,-1,-1,4096",
        "allreduce,[1,2],circle,ll,-1,2,8",
        "allreduce,[1,2],ring,ll,many,2,8",
        '{"rules": [{"filter": {"collective": "allreduce"}}]}',
        '{"rules": [{"filter": {"collective": "allreduce", "nNodes": [2]}, "config": {}}]}',
        '{"rules": 1}',
        '{"rules": [',
    ],
)
def test_entries_without_a_counterpart_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(PlanError):
        read_ncclx(tmp_path / "t")


@pytest.mark.parametrize("to", FORMATS)
def test_a_jobs_settings_are_exported(tmp_path: Path, to: str) -> None:
    out = tmp_path / ("t.json" if to == "ncclx-json" else "t.csv")
    export_table(to, make_store(tmp_path / "store.db"), out)
    assert plan_rows(out)

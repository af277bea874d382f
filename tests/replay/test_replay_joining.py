"""Foreign traces of several ranks: every call of every rank is joined with its own kind, or the trace is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerotune.store.errors import TraceError
from zerotune.store.records import Collective
from zerotune.tuner.offline.replay import load_table
from zerotune.tuner.traces import read_trace

N_RANKS = 4


def _write_logs(folder: Path, counts_of_rank: dict[int, list[int]], op_counts: list[int] | None = None) -> None:
    """One log a rank with calls of these counts, alternately all-gathers and reduce-scatters, numbered so."""
    for rank, counts in counts_of_rank.items():
        prefix, comm = f"node:{70 + rank}:90 [{rank}] NCCL INFO ", f"0x55{rank}0"
        lines = [
            f"{prefix}NCCL version 2.28.9+cuda12.9",
            f"{prefix}ncclCommInitRank comm {comm} rank {rank} nranks {N_RANKS} cudaDev 0 commId 0xab - Init COMPLETE",
        ]
        for at, count in enumerate(counts):
            name = ("AllGather", "ReduceScatter")[at % 2]
            lines.append(
                f"{prefix}{name}: opCount {op_counts[at] if op_counts else 0:x} sendbuff 0x1 recvbuff 0x2 count {count}"
                f" datatype 7 op 0 root 0 comm {comm} [nranks={N_RANKS}] stream 0x3"
            )
        (folder / f"rank{rank}.log").write_text("\n".join([*lines, ""]))


def test_calls_of_which_opcount_says_nothing_are_joined_in_their_order(tmp_path: Path) -> None:
    counts = [1000 + at // 2 for at in range(60)]
    _write_logs(tmp_path, dict.fromkeys(range(N_RANKS), counts))
    table = load_table(tmp_path)
    assert (table.n_records, len(table.rows)) == (N_RANKS * 60, 60)
    gathers = table.rows[table.rows["collective"] == Collective.all_gather]
    assert sorted(gathers["message_bytes"].tolist()) == [4 * N_RANKS * (1000 + at) for at in range(30)]
    alone = list(read_trace(tmp_path / "rank0.log").observations())
    assert len({(one.collective, one.sequence) for one in alone}) == 60


def test_calls_of_one_group_share_an_opcount(tmp_path: Path) -> None:
    _write_logs(tmp_path, dict.fromkeys(range(N_RANKS), [500] * 12), op_counts=[at // 4 for at in range(12)])
    assert len(load_table(tmp_path).rows) == 12


def test_an_opcount_that_numbers_calls_joins_logs_that_begin_late(tmp_path: Path) -> None:
    _write_logs(tmp_path, {0: [100, 200, 300, 400]}, op_counts=[0, 1, 2, 3])
    _write_logs(tmp_path, {1: [300, 400]}, op_counts=[2, 3])
    assert sorted(load_table(tmp_path).rows["message_bytes"].tolist()) == [1600, 3200, 4800, 6400]


def test_logs_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    counts = [1000 + at for at in range(60)]
    _write_logs(tmp_path, {0: counts, 1: counts, 2: counts, 3: counts[2:]})
    with pytest.raises(TraceError, match="58"):
        load_table(tmp_path)
    assert len(load_table(tmp_path / "rank3.log").rows) == 58

"""A rank that dies while buckets and depths are searched: the others stop, torchrun starts all again, losses stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from zero_world import N_RANKS

JOB = Path(__file__).with_name("autotuned_job.py")
MEETING = 14  # the third window of five steps ends with it: ranks take a maximum there

Lines = list[tuple[int, int, str, tuple[str, ...]]]


def lines_of(folder: Path, backend: str, n_ranks: int, *words: str) -> list[Lines]:
    """What each rank wrote: attempt, step, loss, settings."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", str(n_ranks), str(JOB), str(folder), backend, *words]
    # Ranks started again would find addresses of the dead in a store that outlives them, and gloo then waits for these.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ZEROTUNE_FABRIC": "h100_node"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = []
    for rank in range(n_ranks):
        rows = [line.split() for line in (folder / f"rank{rank}.txt").read_text().splitlines()]
        found.append([(int(attempt), int(n), loss, tuple(ran)) for attempt, n, loss, *ran in rows])
    return found


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("backend", "n_ranks", "stage", "place", "at"),
    [
        ("gloo", 2, 1, "boundary", MEETING),
        ("gloo", 2, 2, "step", MEETING - 1),
        ("gloo", N_RANKS, 3, "step", MEETING - 2),
        ("emulated_nccl", 2, 3, "boundary", MEETING),
    ],
)
def test_a_rank_killed_while_searching(
    tmp_path: Path, backend: str, n_ranks: int, stage: int, place: str, at: int
) -> None:
    # Of two ranks a sum has one order; of four it depends on the layout, which is that of the smallest bucket here.
    plain = "plain" if n_ranks == 2 else "fine"
    whole = lines_of(tmp_path / "whole", backend, n_ranks, str(stage), plain)
    killed = lines_of(tmp_path / "killed", backend, n_ranks, str(stage), "autotune", place, str(at))
    for rank, (expected, found) in enumerate(zip(whole, killed, strict=True)):
        losses = {n: loss for _, n, loss, _ in expected}
        assert all(losses[n] == loss for _, n, loss, _ in found), f"rank {rank}"
        assert max(n for attempt, n, *_ in found if attempt == 0) in (at - 1, at)
        assert [n for attempt, n, *_ in found if attempt == 1] == list(range(12, len(losses)))
    for attempt in (0, 1):  # searched before the death and after it, all ranks alike
        ran = [{n: settings for which, n, _, settings in found if which == attempt} for found in killed]
        both = set(ran[0]).intersection(*ran)
        assert all(each[n] == ran[0][n] for each in ran for n in both)
        assert len(set(ran[0].values())) > 1

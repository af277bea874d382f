"""Collectives in the switches: CollNet, and NVLS across nodes, of whose channels NCCL's profiler says 0 up to 2.30.

What it says is too little to know when such a kernel is over; the next one tells. Each must be measured all the same.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from zerotune.agent.nccl.twin.protocol import Question, duration_us
from zerotune.agent.nccl.twin.twin import Cluster, ask_nccl, topology_file
from zerotune.store.records import (
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Phase,
    PlanRow,
    Protocol,
    TimingSource,
)

MACHINE, N_NODES = "dgx_h100_sharp", 2
MESSAGE_BYTES, STEP_BYTES = 1 << 25, 4096
GATHERS = (Collective.all_gather, Collective.reduce_scatter)
TELLS_CHANNELS = (2, 31)
"""The first release that says how many they use."""
N_BEHIND = 4
NVLS_FROM = 3
"""GPUs of a node from which on NCCL has NVLS across nodes."""


def cells(ranks_per_node: int) -> list[tuple[Collective, Algorithm]]:
    """Each in turn, and some of ordinary kernels, which end the last and give NCCL's threads time to tell."""
    found = [(collective, Algorithm.collnet_direct) for collective in (*GATHERS, Collective.all_reduce)]
    found.append((Collective.all_reduce, Algorithm.collnet_chain))
    if ranks_per_node >= NVLS_FROM:
        found += [(collective, Algorithm.nvls) for collective in (*GATHERS, Collective.all_reduce)]
    return [*found, *(N_BEHIND * [(Collective.all_gather, Algorithm.ring)])]


@pytest.mark.parametrize("ranks_per_node", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_is_chosen_launched_and_measured(release, ranks_per_node, monkeypatch):
    monkeypatch.setenv("NCCL_COLLNET_ENABLE", "1")
    version, library = release
    if version < (2, 27) or version == (2, 27, 3):
        pytest.skip("kernels tell no times of their own, or NCCL takes no path of a network plugin")
    rows, questions = [], []
    for collective, algorithm in cells(ranks_per_node):
        message_bytes = MESSAGE_BYTES + STEP_BYTES * len(rows)
        shape = CommunicatorClass(N_NODES * ranks_per_node, N_NODES)
        candidate = Candidate(algorithm, Protocol.simple, 0)
        rows.append(PlanRow(shape, collective, Phase.other, message_bytes, message_bytes, candidate))
        questions.append(Question(collective, message_bytes))
    with topology_file(MACHINE) as topology:
        cluster = Cluster(topology, N_NODES, ranks_per_node)
        answers = ask_nccl(library, cluster, questions, rows, observe=True, timeout_s=100).answers
    told = defaultdict(list)
    for ran in (ran for answer in answers for ran in answer.ran):
        told[ran.message_bytes].append(ran)
    for place, (row, answer) in enumerate(list(zip(rows, answers, strict=True))[:-N_BEHIND]):
        assert (answer.algorithm, answer.protocol) == (row.candidate.algorithm, row.candidate.protocol)
        assert answer.matched
        assert len(told[row.min_bytes]) == ranks_per_node
        for ran in told[row.min_bytes]:
            assert ran.algorithm == row.candidate.algorithm
            assert ran.n_channels == answer.n_channels > 0
            assert ran.timing_source == TimingSource.gpu_kernel
            assert ran.duration_us == pytest.approx(duration_us(place), abs=0.01)
    is_told_at_once = any(ran.message_bytes == rows[0].min_bytes for ran in answers[0].ran)
    assert is_told_at_once == (version >= TELLS_CHANNELS)

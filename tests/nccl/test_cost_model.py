from __future__ import annotations

import csv
import gzip
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.agent.nccl import catalog, cost_model
from zerotune.agent.nccl.cell_terms import Topology
from zerotune.agent.nccl.cost_model import IGNORE
from zerotune.store.records import Algorithm, Collective, Protocol

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "nccl-2.28.9-cost.csv.gz"


def topology_of(row: dict[str, str]) -> Topology:
    def value(name: str) -> float | int | bool:
        if name in ("cpu_is_amd", "plain_tree_pattern"):
            return row[name] == "1"
        return float(row[name]) if name.endswith(("_gbs", "_us")) else int(row[name])

    return Topology(**{name: value(name) for name in Topology.__struct_fields__ if name in row})


@pytest.fixture(scope="module")
def golden() -> list[tuple[Topology, Collective, int, int, np.ndarray]]:
    """One entry per call: topology, collective, bytes, n_pipe_ops, expected table [7, 3]."""
    calls: dict[tuple[object, ...], np.ndarray] = {}
    with gzip.open(GOLDEN, "rt") as lines:
        for row in csv.DictReader(lines):
            call = (
                topology_of(row),
                Collective[row["collective"]],
                int(row["total_bytes"]),
                int(row["num_pipe_ops"]),
            )
            table = calls.setdefault(call, np.full((7, 3), np.nan))
            table[Algorithm[row["algorithm"]], Protocol[row["protocol"]]] = float(row["cost_us"])
    return [(*call, table) for call, table in calls.items()]


def test_equals_every_recorded_output(golden: list) -> None:
    n_rows = 0
    for topology, collective, message_bytes, n_pipe_ops, expected in golden:
        table = cost_model.cost_table(topology, collective, message_bytes, n_pipe_ops)
        known = ~np.isnan(expected)
        np.testing.assert_allclose(table[known], expected[known], rtol=2e-5)
        n_rows += int(known.sum())
    assert n_rows == 23_760


def test_vectorised_cost_equals_the_table(golden: list) -> None:
    groups = itertools.groupby(golden[::3], key=lambda call: (call[0], call[1], call[3]))
    for (topology, collective, n_pipe_ops), calls in groups:
        sizes = [call[2] for call in calls]
        tables = [cost_model.cost_table(topology, collective, size, n_pipe_ops) for size in sizes]
        for algorithm, protocol in itertools.product(Algorithm, Protocol):
            costs = cost_model.cost_us(topology, collective, algorithm, protocol, sizes, n_pipe_ops)
            np.testing.assert_allclose(costs, [t[algorithm, protocol] for t in tables], rtol=1e-6)


def two_sockets_boxes(**changes: object) -> Topology:
    """Two ranks over sockets as the recorded RTX 5090 logs show them: 4 channels of 1.2 GB/s."""
    fields: dict[str, object] = {
        "n_ranks": 2,
        "n_nodes": 2,
        "compute_capability": 120,
        "ring_channels": 4,
        "ring_bw_intra_gbs": 0.6,
        "ring_bw_inter_gbs": 0.6,
        "latency_inter_us": 0.0,
        "type_intra": 0,
        "type_inter": 8,
        "tree_channels": 4,
        "tree_bw_intra_gbs": 1.2,
        "tree_bw_inter_gbs": 1.2,
        "plain_tree_pattern": True,
        "comm_channels": 4,
    }
    return Topology(**{**fields, **changes})


@pytest.mark.parametrize(
    ("shard_bytes", "expected"),
    [
        (16, "ring/ll/1ch"),
        (4096, "ring/ll/1ch"),
        (8192, "ring/ll/2ch"),
        (16384, "ring/ll/4ch"),
        (32768, "pat/simple/4ch"),  # 2 channels in NCCL 2.29, which asks for 32 KiB per channel
        (65536, "ring/simple/4ch"),
        (1 << 20, "ring/simple/4ch"),
        (64 << 20, "ring/simple/4ch"),
    ],
)
@pytest.mark.parametrize("collective", [Collective.all_gather, Collective.reduce_scatter])
def test_choice_is_that_of_a_real_log(collective: Collective, shard_bytes: int, expected: str) -> None:
    assert str(cost_model.default_choice(two_sockets_boxes(), collective, 2 * shard_bytes)) == expected


def test_broadcast_choice_is_that_of_a_real_log() -> None:
    chosen = [
        str(cost_model.default_choice(two_sockets_boxes(), Collective.broadcast, 1 << shift)) for shift in range(13, 18)
    ]
    # The log is NCCL 2.29's, whose 32 KiB per channel make it 1 and 2 channels at 32 and 64 KiB.
    assert chosen == ["ring/ll/1ch", "ring/ll/2ch", "ring/simple/2ch", "ring/simple/4ch", "ring/simple/4ch"]


def test_nvls_needs_belief() -> None:
    node = two_sockets_boxes(n_ranks=8, n_nodes=1, type_intra=1, type_inter=0, compute_capability=90)
    assert cost_model.cost_table(node, Collective.all_gather, 1 << 20)[Algorithm.nvls].tolist() == [IGNORE] * 3
    believed = two_sockets_boxes(
        n_ranks=8,
        n_nodes=1,
        type_intra=1,
        type_inter=0,
        compute_capability=90,
        nvls_gbs=300.0,
        nvls_latency_us=20.0,
        nvls_channels=2,
    )
    table = cost_model.cost_table(believed, Collective.all_gather, 1 << 30)
    assert table[Algorithm.nvls, Protocol.simple] == pytest.approx(20 + (1 << 30) / 300e3, rel=1e-5)
    choice = cost_model.default_choice(believed, Collective.all_gather, 1 << 30)
    assert (choice.algorithm, choice.n_channels) == (Algorithm.nvls, 2)


def test_averages_exclude_pat_and_nvls_from_reduce_scatter() -> None:
    topology = two_sockets_boxes()
    sizes = [1 << shift for shift in range(4, 28)]
    by_sum = {cost_model.default_choice(topology, Collective.reduce_scatter, s).algorithm for s in sizes}
    by_average = {
        cost_model.default_choice(topology, Collective.reduce_scatter, s, redop_is_sum=False).algorithm for s in sizes
    }
    assert Algorithm.pat in by_sum
    assert by_average == {Algorithm.ring}


def test_no_algorithm_is_an_error() -> None:
    with pytest.raises(ValueError, match="no algorithm"):
        cost_model.default_choice(two_sockets_boxes(), Collective.all_to_all, 1024)


@given(
    st.sampled_from([Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce]),
    st.integers(1, 1 << 32),
    st.sampled_from(list(Algorithm)),
    st.sampled_from(list(Protocol)),
)
def test_channel_count_is_possible(
    collective: Collective, message_bytes: int, algorithm: Algorithm, protocol: Protocol
) -> None:
    topology = two_sockets_boxes(comm_channels=16, nvls_channels=24)
    found = cost_model.default_channels(topology, collective, algorithm, protocol, message_bytes)
    assert 1 <= found <= 16


@pytest.mark.parametrize("changes", [{"n_nodes": 3}, {"n_nodes": 0}, {"comm_channels": 0}])
def test_impossible_topologies_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"n_nodes|comm_channels"):
        two_sockets_boxes(**changes)


def test_the_default_choice_is_always_legal(golden: list) -> None:
    for topology, collective, message_bytes, n_pipe_ops, expected in golden:
        choice = cost_model.default_choice(topology, collective, message_bytes, n_pipe_ops)
        legal = catalog.legal_cells(collective, n_nodes=topology.n_nodes, n_ranks=topology.n_ranks)
        assert (choice.algorithm, choice.protocol) in legal
        cheapest = np.nanmin(np.where(expected < 0, np.nan, expected))
        assert choice.algorithm is not None
        assert choice.protocol is not None
        assert expected[choice.algorithm, choice.protocol] == pytest.approx(cheapest, rel=2e-5)

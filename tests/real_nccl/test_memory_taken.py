"""What NCCL's own library takes to connect an algorithm is at most what we reserve for it before."""

from __future__ import annotations

import pytest
from connections import CLUSTERS, taken

from zerotune.store.records import Algorithm

MANY_RANKS = (("dgx_h100", 2, 8), ("dgx_h100", 4, 1))
MARKED = [pytest.param(one, marks=pytest.mark.slow if one in MANY_RANKS else ()) for one in CLUSTERS]


@pytest.mark.parametrize("cluster", MARKED, ids="{0[0]}_{0[1]}x{0[2]}".format)
@pytest.mark.slow
def test_no_algorithm_takes_more_memory_than_is_reserved(newest, cluster):
    _, library = newest
    found = [*taken(library, *cluster)]
    assert found[0].algorithm is Algorithm.ring
    assert found[0].measured_mb > 10.0
    for one in found:
        assert one.measured_mb <= 1.001 * one.predicted_mb, one
    _, n_nodes, ranks_per_node = cluster
    if n_nodes == 1 or ranks_per_node == 1:  # else one rank of many has the network
        assert found[0].measured_mb == pytest.approx(found[0].predicted_mb, rel=0.01)

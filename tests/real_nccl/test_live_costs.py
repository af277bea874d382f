"""Our cost model against the cost tables of NCCL's own library, cell by cell."""

from __future__ import annotations

import os

import pytest

from benchmarks.lib.nccl.live_costs import CLUSTERS, compare
from zerotune.agent.nccl.twin.live_table import MODELLED_SINCE, WORST_RELATIVE_ERROR

TRIED = CLUSTERS if "ZEROTUNE_NCCL_RELEASES" in os.environ else CLUSTERS[:2]


@pytest.mark.parametrize("cluster", TRIED, ids=lambda cluster: f"{cluster[1]}x{cluster[2]}-{cluster[0]}")
@pytest.mark.slow
def test_every_cell_costs_what_nccl_says(release, cluster):
    version, library = release
    if version < MODELLED_SINCE:
        pytest.skip("its tables are older than the model, or not shown")
    found = list(compare(library, *cluster))
    assert found
    assert not [each for each in found if each.relative_error > WORST_RELATIVE_ERROR]

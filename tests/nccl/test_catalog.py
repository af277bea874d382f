from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.agent.nccl import catalog
from zerotune.store.errors import UserError
from zerotune.store.records import Algorithm, Collective, Protocol

RING = {(Algorithm.ring, protocol) for protocol in Protocol}
PAT = (Algorithm.pat, Protocol.simple)
NVLS = (Algorithm.nvls, Protocol.simple)


def cells(collective: Collective, n_nodes: int, **rest: object) -> set[catalog.Cell]:
    return set(catalog.legal_cells(collective, n_nodes=n_nodes, **rest))


def test_gather_and_scatter_cells() -> None:
    assert cells(Collective.all_gather, 2) == RING | {PAT}
    assert cells(Collective.all_gather, 1) == RING | {NVLS}
    assert cells(Collective.all_gather, 1, nvls=False) == RING
    assert cells(Collective.reduce_scatter, 2, redop_is_sum=False) == RING
    assert cells(Collective.all_gather, 2, redop_is_sum=False) == RING | {PAT}
    assert cells(Collective.all_gather, 2, n_ranks=16) == RING
    assert cells(Collective.all_gather, 2, nccl_version=(2, 22, 3)) == RING
    direct = (Algorithm.collnet_direct, Protocol.simple)
    assert cells(Collective.all_gather, 2, collnet=True) == RING | {PAT, NVLS, direct}
    assert cells(Collective.all_gather, 2, collnet=True, nccl_version=(2, 26)) == RING | {PAT, direct}


def test_no_collective_has_more_than_six_gather_cells() -> None:
    for collective in (Collective.all_gather, Collective.reduce_scatter):
        for n_nodes in (1, 2):
            assert len(cells(collective, n_nodes, collnet=True)) <= 6


def test_other_collectives() -> None:
    tree = {(Algorithm.tree, protocol) for protocol in Protocol}
    assert cells(Collective.all_reduce, 1) == tree | RING | {NVLS}
    assert cells(Collective.all_reduce, 2) == tree | RING | {(Algorithm.nvls_tree, Protocol.simple)}
    assert cells(Collective.broadcast, 2) == RING
    assert cells(Collective.send, 2) == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AllGather", Collective.all_gather),
        ("nccl:_all_gather_base", Collective.all_gather),
        ("all_gather_into_tensor_coalesced", Collective.all_gather),
        ("c10d::_reduce_scatter_base_", Collective.reduce_scatter),
        ("REDUCE_SCATTER_TENSOR", Collective.reduce_scatter),
        ("reduce_scatter_perf_mpi", Collective.reduce_scatter),
        ("ncclAllReduce", Collective.all_reduce),
        ("c10d::allreduce_", Collective.all_reduce),
        ("4", Collective.all_reduce),
        ("nccl:all_to_allv", Collective.all_to_all),
        ("AlltoAll", Collective.all_to_all),
        ("broadcast_oop", Collective.broadcast),
    ],
)
def test_spellings_of_collectives(text: str, expected: Collective) -> None:
    assert catalog.parse_collective(text) is expected


@given(st.text(max_size=40))
def test_foreign_names_are_refused_or_translated(text: str) -> None:
    for parse in (catalog.parse_collective, catalog.parse_algorithm, catalog.parse_protocol):
        with contextlib.suppress(UserError):
            assert isinstance(parse(text), Collective | Algorithm | Protocol)

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.agent.nccl import catalog
from zerotune.store.errors import UserError
from zerotune.store.records import BASELINE, Algorithm, Collective, CommunicatorClass, Protocol

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


def test_candidates_are_baseline_and_a_ladder() -> None:
    found = catalog.candidates(Collective.all_gather, CommunicatorClass(2, 2), 12)
    assert found[0] == BASELINE
    assert {c.n_channels for c in found[1:]} == {1, 2, 4, 8, 12}
    assert len(found) == len(set(found)) == 1 + 4 * 5
    live = catalog.candidates(Collective.all_gather, CommunicatorClass(8, 1), 8, cells=[NVLS])
    assert {c.algorithm for c in live[1:]} == {Algorithm.nvls}
    with pytest.raises(ValueError, match="max_channels 65"):
        catalog.candidates(Collective.all_gather, CommunicatorClass(2, 2), 65)


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


def test_spellings_of_cells() -> None:
    assert catalog.parse_algorithm("CollNetDirect") is Algorithm.collnet_direct
    assert catalog.parse_algorithm("NVLS_TREE") is Algorithm.nvls_tree
    assert catalog.parse_algorithm("PAT") is Algorithm.pat
    assert catalog.parse_protocol("LL128") is Protocol.ll128
    assert catalog.parse_protocol("2") is Protocol.simple


@given(st.sampled_from([*Collective, *Algorithm, *Protocol]))
def test_every_member_is_parsed_from_its_own_name_and_number(
    member: Collective | Algorithm | Protocol,
) -> None:
    parse = {
        Collective: catalog.parse_collective,
        Algorithm: catalog.parse_algorithm,
        Protocol: catalog.parse_protocol,
    }[type(member)]
    assert parse(member.name) is member
    assert parse(member.name.upper().replace("_", "-")) is member
    assert parse(str(int(member))) is member


@given(st.text(max_size=40))
def test_foreign_names_are_refused_or_translated(text: str) -> None:
    for parse in (catalog.parse_collective, catalog.parse_algorithm, catalog.parse_protocol):
        with contextlib.suppress(UserError):
            assert isinstance(parse(text), Collective | Algorithm | Protocol)

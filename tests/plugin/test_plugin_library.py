"""The Python binding against a naive reference, through the same symbol that NCCL calls."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agreement.nccl_side import Side
from zerotune.agent.nccl import catalog, compiled, library
from zerotune.agent.nccl.release import Release
from zerotune.store.errors import PlanError, PluginError
from zerotune.store.records import (
    Algorithm,
    Candidate,
    Collective,
    CommunicatorClass,
    Phase,
    Plan,
    PlanRow,
    Protocol,
    size_class,
    size_class_floor,
)

NEWEST = Release((2, 99))


def test_it_has_every_interface_that_a_release_looks_for() -> None:
    loaded = ctypes.CDLL(str(library.load().path))
    names = [f"ncclTunerPlugin_v{version}" for version in range(2, NEWEST.tuner_abi + 1)]
    names += [f"ncclProfiler_v{version}" for version in range(3, NEWEST.profiler_abi + 1)]
    assert [name for name in names if not hasattr(loaded, name)] == []


@pytest.fixture
def plugin():
    loaded = library.load()
    loaded.reset()
    yield loaded
    loaded.reset()


SHAPES = [CommunicatorClass(8, 1), CommunicatorClass(16, 2), CommunicatorClass(16, 4)]
LEGAL = {
    collective: sorted(
        {cell for n_nodes in (1, 2) for cell in catalog.legal_cells(collective, n_nodes=n_nodes, collnet=n_nodes == 2)}
    )
    for collective in (*catalog.TUNABLE, *catalog.RING_ONLY)
}


@pytest.mark.parametrize("collective", LEGAL)
def test_a_plan_may_name_the_cells_of_the_catalog_and_no_other(plugin: library.Plugin, collective: Collective) -> None:
    accepted = []
    for cell in itertools.product(Algorithm, Protocol):
        row = PlanRow(SHAPES[0], collective, Phase.forward_gather, 1, 2, Candidate(*cell, 1))
        with contextlib.suppress(PlanError):
            plugin.load_plan(Plan(1, (row,)))
            accepted.append(cell)
    assert accepted == LEGAL[collective]


@st.composite
def plans(draw):
    """Disjoint rows of any width, over several shapes, collectives and phases, in any order."""
    rows = []
    keys = st.tuples(st.sampled_from(SHAPES), st.sampled_from(list(LEGAL)), st.sampled_from(list(Phase)))
    for shape, collective, phase in draw(st.lists(keys, unique=True, max_size=4)):
        edges = draw(
            st.lists(st.integers(0, 2 ** draw(st.sampled_from([8, 12, 40, 64])) - 1), unique=True, max_size=24)
        )
        edges.sort()
        for low, high in zip(edges[::2], edges[1::2], strict=False):
            if high == 0:
                continue
            cell = draw(st.sampled_from([None, *LEGAL[collective]]))
            named = (None, None) if cell is None else (Algorithm(cell[0]), Protocol(cell[1]))
            candidate = Candidate(*named, draw(st.integers(0, 64)))
            rows.append(PlanRow(shape, collective, phase, low, high, candidate))
    return draw(st.permutations(rows))


def reference_phase(word: int, collective: Collective, gathers_after_step: bool) -> Phase:
    gathers = collective is Collective.all_gather
    reduces = collective in (Collective.reduce_scatter, Collective.all_reduce)
    if word == library.REGION_BACKWARD:
        return Phase.backward_gather if gathers else Phase.gradient_scatter if reduces else Phase.other
    if word == library.REGION_AFTER_BACKWARD and reduces:
        return Phase.gradient_scatter
    if word in (library.REGION_FORWARD, library.REGION_AFTER_BACKWARD) and gathers:
        return Phase.post_step_gather if gathers_after_step else Phase.forward_gather
    if word == library.REGION_STEP and gathers:
        return Phase.post_step_gather
    if word in (1, 2, 4) and gathers:
        return Phase(word)
    return Phase.gradient_scatter if word == 3 and reduces else Phase.other


def reference_lookup(rows, shape, collective, phase, message_bytes) -> Candidate | None:
    for row in rows:
        key = (row.communicator, row.collective, row.phase)
        if key == (shape, collective, phase) and row.min_bytes <= message_bytes <= row.max_bytes:
            return row.candidate
    return None


def reference_channels(candidate: Candidate, shape: CommunicatorClass) -> int:
    """Those asked for, unless NCCL might take more than there are; here it may choose any algorithm."""
    uncapped = {2, 3, 5} | ({4} if shape.n_nodes > 1 else set())
    return 0 if candidate.algorithm is None or candidate.algorithm in uncapped else candidate.n_channels


@settings(max_examples=100)
@given(rows=plans(), gathers_after_step=st.booleans(), data=st.data())
def test_lookup_equals_a_naive_scan(rows, gathers_after_step, data):
    plugin = library.load()
    plugin.reset()
    plugin.load_plan(Plan(epoch=3, rows=tuple(rows), gathers_after_step=gathers_after_step))
    assert plugin.flip(3)
    sides = {shape: Side(plugin, 7, shape.n_ranks, shape.n_nodes) for shape in SHAPES}
    edges = sorted({edge + d for row in rows for edge in (row.min_bytes, row.max_bytes) for d in (-1, 0, 1)})
    edges = [edge for edge in edges if 0 < edge < 2**64] or [1]
    try:
        for _ in range(20):
            shape = data.draw(st.sampled_from(SHAPES))
            collective = data.draw(st.sampled_from(list(LEGAL)))
            word = data.draw(st.sampled_from([0, 1, 2, 3, 4, 5, 16, 17, 18, 19, 20]))
            message_bytes = data.draw(st.sampled_from(edges) | st.integers(1, 2**64 - 1))
            plugin.set_phase(word)
            phase = reference_phase(word, collective, gathers_after_step)
            candidate = reference_lookup(rows, shape, collective, phase, message_bytes)
            cells, n_channels = sides[shape].ask(collective, message_bytes)
            if candidate is None:
                assert (cells, n_channels) == ([], -1)
                continue
            named = candidate.algorithm is not None and candidate.protocol is not None
            assert cells == ([candidate.algorithm * 3 + candidate.protocol] if named else [])
            assert n_channels == (reference_channels(candidate, shape) or -1)
            if named:
                assert sides[shape].ask(collective, message_bytes, legal=False) == ([], -1)
    finally:
        for side in sides.values():
            side.close()


@given(
    st.integers(1, 2**63)
    | st.integers(0, 250).map(size_class_floor)
    | st.integers(1, 250).map(lambda i: size_class_floor(i) - 1)
)
def test_size_classes_are_those_of_the_store(message_bytes):
    in_c = ctypes.CDLL(str(library.load().path)).zerotune_size_class
    in_c.argtypes, in_c.restype = [ctypes.c_uint64], ctypes.c_uint32
    if message_bytes > 0:
        assert in_c(message_bytes) == size_class(message_bytes)


ROW = PlanRow(SHAPES[0], Collective.all_gather, Phase.other, 1, 100, Candidate(Algorithm.ring, Protocol.ll, 2))


def row(**changes) -> PlanRow:
    fields = {name: getattr(ROW, name) for name in ROW.__struct_fields__}
    return PlanRow(**{**fields, **changes})


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([row(candidate=Candidate(Algorithm.tree, Protocol.ll))], "tree/ll for all_gather"),
        ([row(candidate=Candidate(Algorithm.pat, Protocol.ll))], "pat/ll"),
        ([row(candidate=Candidate(Algorithm.nvls, Protocol.simple, 0, 65536))], "nvls/simple/64KiB"),
        ([row(collective=Collective.send)], "for send"),
        ([row(), row(min_bytes=100, max_bytes=200)], r" 1\.\.100 .* 100\.\.200"),
        ([row(min_bytes=5, max_bytes=4)], "range 5..4"),
        ([row(min_bytes=-1)], "range -1..100"),
        ([row(max_bytes=2**64)], "range 1..18446744073709551616"),
        ([row(min_bytes=0, max_bytes=0)], "row 1"),
        ([row(communicator=CommunicatorClass(4, 8))], "4 ranks on 8 nodes"),
        ([row(min_bytes=i, max_bytes=i) for i in range(4097)], "plan of 4097 rows"),
        ([row(communicator=CommunicatorClass(1000 + i, 1)) for i in range(257)], "more than 256 shapes"),
    ],
)
def test_bad_plans_are_refused_and_change_nothing(plugin, rows, complaint):
    plugin.load_plan(Plan(epoch=1, rows=(ROW,)))
    assert plugin.flip(1)
    with pytest.raises(PlanError, match=complaint):
        plugin.load_plan(Plan(epoch=2, rows=tuple(rows)))
    assert not plugin.flip(2)
    assert plugin.active_epoch() == 1
    with pytest.raises(PlanError, match="epoch"):
        plugin.load_plan(Plan(epoch=2**32))


def test_records_come_out_as_numpy(plugin):
    side = Side(plugin, 7, 8)
    plugin.set_recording(True)
    plugin.set_memory_pressure(0.75)
    plugin.set_step(9)
    for _ in range(5):
        side.ask(Collective.all_gather, 4096)
    block = plugin.drain(3)
    assert block.dtype == library.OBSERVATION_DTYPE
    assert block["sequence"].tolist() == [0, 1, 2]
    assert set(block["memory_pressure"]) == {0.75}
    assert set(block["step"]) == {9}
    assert len(plugin.drain()) == 2
    costs = plugin.drain_costs()
    assert costs["n_ranks"].tolist() == [8]
    assert np.all(costs["cost_us"] == 50.0)
    assert plugin.counters().n_calls == int(plugin.communicators()["n_calls"][0]) == 5
    assert plugin.tuner_abi() == 5
    side.close()


def test_threads_may_drain_at_once(plugin):
    workers = [threading.Thread(target=lambda: [plugin.drain(10) for _ in range(200)]) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def test_load_gives_one_plugin():
    assert library.load() is library.load()
    assert compiled.PLUGIN.path() == library.load().path == compiled.PLUGIN.build()


def test_a_file_that_is_no_plugin_is_refused(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not an ELF file")
    with pytest.raises(PluginError, match=r"broken\.so"):
        library.Plugin(broken)
    with pytest.raises(PluginError, match=r"libc\.so"):
        library.Plugin(Path(ctypes.util.find_library("c") or "libc.so.6"))

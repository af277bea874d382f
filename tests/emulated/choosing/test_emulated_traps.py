"""What docs/design/nccl.md says becomes of NCCL's traps, each shown on the emulated NCCL through the real plugin."""

from __future__ import annotations

import subprocess
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from emulated_pair import MIB, Pair, adopt, deferred, group, issue, plugin_with

from zerotune.agent.nccl import compiled, cost_model, library
from zerotune.agent.nccl import fabric as fabrics
from zerotune.agent.nccl.emulated import EmulatedNcclError, Graph, SettingDisagreement, journal
from zerotune.agent.nccl.emulated.host import grouping
from zerotune.agent.nccl.emulated.host.communicator import Communicator
from zerotune.agent.nccl.emulated.torch_backend.reduction import SUM
from zerotune.store.errors import UserError
from zerotune.store.passages import PassageKind
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Protocol, TimingSource
from zerotune.store.wire import FLAG_CAPTURED, FLAG_FUSED, FLAG_MATCHED, FLAG_REGISTERED, FLAG_TIMED

BOXES = CommunicatorClass(2, 2)
NODE = CommunicatorClass(2, 1)
GATHER, SCATTER, REDUCE = Collective.all_gather, Collective.reduce_scatter, Collective.all_reduce
LL = Candidate(Algorithm.ring, Protocol.ll, 2)
TREE = Candidate(Algorithm.tree, Protocol.ll, 3)
SIMPLE = Candidate(Algorithm.ring, Protocol.simple, 1)
PLUGIN = str(compiled.PLUGIN.build())
BOTH = {"NCCL_TUNER_PLUGIN": PLUGIN, "NCCL_PROFILER_PLUGIN": PLUGIN}


def timed(records: np.ndarray) -> np.ndarray:
    return records[(records["flags"] & FLAG_TIMED) != 0]


# ---- no communicator id: NCCL 2.27 and older ----


@pytest.mark.parametrize("version", ["2.22.3", "2.23.4", "2.25.1", "2.26.5", "2.27.7", "2.28.9"])
def test_old_releases_learn_the_communicator_from_the_profiler(pair: Pair, version: str) -> None:
    with plugin_with({REDUCE: TREE}, BOXES) as plugin:
        plugin.set_recording(True)
        plugin.set_observing(True)
        ranks = pair(ZEROTUNE_NCCL_VERSION=version, **BOTH)
        assert issue(ranks, REDUCE, MIB).candidate == TREE  # plans are for shapes: no id is needed
        first = plugin.drain()
        assert issue(ranks, REDUCE, MIB).candidate == TREE
        later = plugin.drain()
    decisions = [records[(records["flags"] & FLAG_TIMED) == 0] for records in (first, later)]
    known = ranks[0].comm_id
    told_at_once = version >= "2.27"  # profiler v4 names the communicator, earlier ones with each collective
    has_profiler = version >= "2.23"
    assert set(decisions[0]["comm_id"].tolist()) == {known if told_at_once else 0}
    assert set(decisions[1]["comm_id"].tolist()) == {known if has_profiler else 0}
    ran = timed(np.concatenate([first, later]))
    assert (len(ran) > 0) == has_profiler
    assert set(ran["comm_id"].tolist()) <= {known}
    assert set(ran["rank"].tolist()) <= {0, 1}


def test_without_a_profiler_old_releases_have_no_id_and_plans_still_apply(pair: Pair) -> None:
    with plugin_with({REDUCE: TREE}, BOXES) as plugin:
        plugin.set_recording(True)
        ranks = pair(ZEROTUNE_NCCL_VERSION="2.26.5", NCCL_TUNER_PLUGIN=PLUGIN)
        assert issue(ranks, REDUCE, MIB).candidate == TREE
        assert set(plugin.drain()["comm_id"].tolist()) == {0}


# ---- windows: symmetric kernels and copy engines ----


def _symmetric(ranks, collective: Collective, n_bytes: int, registered_ranks=(0, 1)):
    """One collective whose buffers are registered on `registered_ranks`; rank 0's call."""
    works = []
    for each in ranks:
        member = deferred(collective, n_bytes, SUM, each.rank)
        if each.rank in registered_ranks:
            for tensor in (member.tasks[0].piece, member.tasks[0].output):
                each.registered_buffers.register(tensor)
        works.append(grouping.launch(each, [member]))
    for work in works:
        work.wait()
    return works[0].calls[0]


@pytest.mark.parametrize("version", ["2.27.7", "2.28.9", "2.30.7", "2.32.3"])
def test_symmetric_kernels_bypass_the_tuner(pair: Pair, version: str) -> None:
    with plugin_with({GATHER: LL, SCATTER: LL, REDUCE: LL}, NODE) as plugin:
        plugin.set_observing(True)
        plugin.set_recording(True)
        ranks = pair("h100_node", ZEROTUNE_NCCL_VERSION=version, **BOTH)
        assert issue(ranks, GATHER, MIB).candidate == LL
        plugin.drain()
        before = plugin.counters().n_calls
        for collective in (GATHER, SCATTER, REDUCE):
            call = _symmetric(ranks, collective, MIB)
            assert call.candidate.is_baseline
            assert call.n_channels > 0  # it runs on the device all the same
        n_extra = plugin.counters().n_calls - before
        records = plugin.drain()
        kinds = plugin.passages().kinds
        passed_by = {each.kind: each.n_calls for each in kinds if each.kind is not PassageKind.decided}
        names_them = tuple(map(int, version.split("."))) >= (2, 31)
        assert passed_by == {PassageKind.symmetric if names_them else PassageKind.unknown: 6}
        assert issue(ranks, GATHER, MIB).candidate == LL  # buffers elsewhere are tuned as before
    # From 2.29 on the scheduler asks what a kernel would run, and runs its own.
    assert n_extra == (6 if version >= "2.29" else 0)
    ran = timed(records)
    assert len(ran) == 6
    assert set(ran["algorithm"].tolist()) == {library.NO_OPINION}
    assert set(ran["timing_source"].tolist()) == {TimingSource.cpu_collective}
    assert not (ran["flags"] & FLAG_MATCHED).any()


def test_a_copy_engine_gather_is_seen_by_nobody(pair: Pair) -> None:
    with plugin_with({GATHER: LL, SCATTER: LL}, NODE) as plugin:
        plugin.set_observing(True)
        ranks = pair("h100_node", NCCL_CTA_POLICY="ZERO", **BOTH)
        assert _symmetric(ranks, GATHER, MIB).n_channels == 0
        assert plugin.counters().n_calls == 0
        assert len(plugin.drain()) == 0
        assert _symmetric(ranks, SCATTER, MIB).n_channels > 0  # which has no copy engine
        assert len(timed(plugin.drain())) == 2


def test_windows_are_refused_where_there_are_none_and_must_be_alike(pair: Pair) -> None:
    with pytest.raises(EmulatedNcclError, match=r"2\.27"):
        _symmetric(pair("h100_node", ZEROTUNE_NCCL_VERSION="2.26.5"), GATHER, MIB)
    assert not _symmetric(pair("ethernet_boxes"), GATHER, MIB).candidate.is_baseline  # nodes apart: no windows
    with pytest.raises(SettingDisagreement):
        _symmetric(pair("h100_node"), GATHER, MIB, registered_ranks=(0,))


# ---- groups that are fused into one decision ----


def test_a_fused_group_is_decided_once_and_its_record_says_so(pair: Pair) -> None:
    with plugin_with({GATHER: LL, REDUCE: TREE}, BOXES) as plugin:
        plugin.set_observing(True)
        plugin.set_recording(True)
        ranks = pair(**BOTH)
        members = [(GATHER, MIB), (GATHER, 2 * MIB), (REDUCE, MIB), (GATHER, 8 * MIB)]
        calls = group(ranks, members)
        records = plugin.drain()
    # 1 and 2 MiB are fused, 8 MiB is too much more; the other operation is its own.
    assert [(call.fused.collective, call.message_bytes) for call in calls] == [
        (GATHER, 3 * MIB), (GATHER, 8 * MIB), (REDUCE, MIB),
    ]  # fmt: skip
    decided = records[(records["flags"] & FLAG_TIMED) == 0]
    assert sorted(decided["message_bytes"].tolist()) == sorted(2 * [3 * MIB, 8 * MIB, MIB])
    found = {
        (int(each["collective"]), int(each["message_bytes"])): (
            int(each["flags"]) & FLAG_FUSED, int(each["algorithm"]), int(each["epoch"]),
        )
        for each in timed(records)
    }  # fmt: skip
    ring, tree = int(Algorithm.ring), int(Algorithm.tree)
    assert found == {
        (GATHER, 3 * MIB): (FLAG_FUSED, ring, 1),
        (GATHER, 8 * MIB): (0, ring, 1),
        (REDUCE, MIB): (0, tree, 1),
    }
    sources = set(timed(records)["timing_source"].tolist())
    assert sources == {TimingSource.cpu_collective}, "one kernel had all three: the time of none is known"
    assert len(timed(records)) == 6


def test_a_fused_run_is_timed_as_one_collective_of_its_sum(pair: Pair) -> None:
    with plugin_with({GATHER: LL}, BOXES) as plugin:
        plugin.set_observing(True)
        (call,) = group(pair(**BOTH), [(GATHER, MIB), (GATHER, 2 * MIB)])
        records = timed(plugin.drain())
        assert plugin.counters().n_inseparable == 0
    assert records["message_bytes"].tolist() == [3 * MIB] * 2
    assert set(records["timing_source"].tolist()) == {TimingSource.emulated}
    assert set(records["n_channels"].tolist()) == {call.candidate.n_channels}


# ---- the user's own NCCL_ALGO and NCCL_PROTO ----


@pytest.mark.parametrize("version", ["2.21.5", "2.22.3", "2.27.7", "2.28.9", "2.30.7", "rccl-2.27.7"])
def test_the_user_wins_over_the_plan(pair: Pair, version: str) -> None:
    with plugin_with({REDUCE: LL, GATHER: LL}, BOXES) as plugin:
        plugin.set_recording(True)
        ranks = pair(ZEROTUNE_NCCL_VERSION=version, NCCL_ALGO="Tree,Ring", NCCL_PROTO="Simple", **BOTH)
        assert issue(ranks, REDUCE, MIB).candidate.protocol is Protocol.simple
        assert issue(ranks, GATHER, MIB).candidate.protocol is Protocol.simple
        counters = plugin.counters()
        assert counters.n_matched == 0
        assert counters.n_ignored_cells == (0 if version.startswith("2.21") else 4)
        assert not (plugin.drain()["flags"] & FLAG_MATCHED).any()


# ---- 2.21, which runs what it is told ----

RECKLESS = """
#include "nccl_abi.h"
static int it;
static nccl_result init(size_t r, size_t n, nccl_logger l, void **c) { (void)r; (void)n; (void)l; *c = &it; return 0; }
static nccl_result ask(void *c, int f, size_t b, int cn, int nv, int p, int *a, int *pr, int *n) {
  (void)c; (void)f; (void)b; (void)cn; (void)nv; (void)p; (void)n; *a = NCCL_NVLS; *pr = NCCL_SIMPLE; return 0; }
static nccl_result destroy(void *c) { (void)c; return 0; }
const nccl_tuner_v2 ncclTunerPlugin_v2 = {"reckless", init, ask, destroy};
"""


def test_2_21_would_run_what_is_not_there_and_our_plugin_never_asks_for_it(pair: Pair, tmp_path: Path) -> None:
    source, reckless = tmp_path / "reckless.c", str(tmp_path / "reckless.so")
    source.write_text(RECKLESS)
    headers = Path(compiled.__file__).parent / "plugin"
    subprocess.run(["gcc", "-shared", "-fPIC", f"-I{headers}", str(source), "-o", reckless], check=True)
    with pytest.raises(EmulatedNcclError, match="unchecked"):
        issue(pair(ZEROTUNE_NCCL_VERSION="2.21.5", NCCL_TUNER_PLUGIN=reckless), GATHER, MIB)
    later = pair(ZEROTUNE_NCCL_VERSION="2.22.3", NCCL_TUNER_PLUGIN=reckless)
    assert issue(later, GATHER, MIB).candidate.algorithm is Algorithm.ring  # NCCL's adapter checks
    nvls = Candidate(Algorithm.nvls, Protocol.simple, 4)
    with plugin_with({GATHER: nvls, REDUCE: nvls}, BOXES) as plugin:
        ranks = pair(ZEROTUNE_NCCL_VERSION="2.21.5", **BOTH)
        assert issue(ranks, GATHER, MIB).candidate.algorithm is Algorithm.ring
        assert issue(ranks, REDUCE, MIB).candidate.algorithm is not Algorithm.nvls
        assert plugin.counters().n_ignored_cells == 4


# ---- RCCL ----


@pytest.mark.parametrize(("version", "abi"), [("rccl-2.22.3", 3), ("rccl-2.27.7", 4), ("rccl-2.28.3", 5)])
def test_rccl_is_tuned_within_ring_and_tree(pair: Pair, version: str, abi: int) -> None:
    pat = Candidate(Algorithm.pat, Protocol.simple, 2)
    with plugin_with({GATHER: pat, REDUCE: TREE}, BOXES) as plugin:
        plugin.set_recording(True)
        plugin.set_observing(True)
        ranks = pair(ZEROTUNE_NCCL_VERSION=version, **BOTH)
        assert plugin.tuner_abi() == abi
        assert issue(ranks, REDUCE, MIB).candidate == TREE
        assert issue(ranks, GATHER, MIB).candidate.algorithm is Algorithm.ring  # PAT is IGNORE there
        assert plugin.counters().n_ignored_cells == 2
        plugin.drain()
        before = plugin.counters()
        issue(ranks, Collective.all_to_all, 4 * MIB)  # asked under a function number NCCL has for another
        after = plugin.counters()
        assert (after.n_calls - before.n_calls, after.n_matched - before.n_matched) == (2, 0)
        assert len(plugin.drain()) == 0
        issue(ranks, Collective.all_to_all, MIB)
        assert plugin.counters().n_calls == after.n_calls


# ---- what is observed, and when ----


@pytest.mark.parametrize(
    ("version", "source"),
    [
        ("2.23.4", TimingSource.cpu_collective),
        ("2.25.1", TimingSource.cpu_collective),
        ("2.26.5", TimingSource.cpu_kernel),
        ("2.27.7", TimingSource.gpu_kernel),
        ("2.28.9", TimingSource.gpu_kernel),
        ("2.30.7", TimingSource.gpu_kernel),
    ],
)
def test_windows_open_and_close_by_the_event_mask_and_say_whose_clock(
    pair: Pair, version: str, source: TimingSource
) -> None:
    with plugin_with({GATHER: LL}, BOXES) as plugin:
        ranks = pair(ZEROTUNE_NCCL_VERSION=version, **BOTH)
        call = issue(ranks, GATHER, MIB)
        assert len(plugin.drain()) == 0
        assert plugin.channels_seen(BOXES) == 0
        for claimed, shown in ((TimingSource.emulated, TimingSource.emulated), (TimingSource.none, source)):
            plugin.set_timing_source_override(claimed)
            plugin.set_observing(True)
            issue(ranks, GATHER, MIB)
            issue(ranks, GATHER, MIB)  # v3 learns that the first is over
            plugin.set_observing(False)
            issue(ranks, GATHER, MIB)
            records = timed(plugin.drain())
            assert len(records) >= 2
            expected = shown if source is TimingSource.gpu_kernel else source
            assert set(records["timing_source"].tolist()) == {expected}
            if source is TimingSource.gpu_kernel:
                assert len(records) == 4
                assert records["duration_us"].min() == pytest.approx(call.duration_us, rel=0.2)  # noise apart
        if version >= "2.26":  # what ran, not what was asked, is the ceiling
            assert plugin.channels_seen(BOXES) == LL.n_channels
        assert plugin.counters().n_lost_events == 0


def test_emulated_times_never_pass_for_a_gpus(pair: Pair) -> None:
    with plugin_with({}, BOXES) as plugin:
        ranks = pair(**BOTH)
        plugin.set_observing(True)
        issue(ranks, GATHER, MIB)
        assert set(plugin.drain()["timing_source"].tolist()) == {TimingSource.emulated}


def test_the_live_cost_table_comes_once_per_communicator_collective_and_size_class(pair: Pair) -> None:
    with plugin_with({GATHER: LL}, BOXES) as plugin:
        ranks = pair(**BOTH)
        for n_bytes in (MIB, MIB, MIB + 2, 2 * MIB, 2 * MIB, MIB):
            issue(ranks, GATHER, n_bytes)
        issue(ranks, REDUCE, MIB)
        found = plugin.drain_costs()
        others = pair.again(name="other")
        issue(others, GATHER, MIB)
        of_others = plugin.drain_costs()
    told = sorted((int(each["collective"]), int(each["message_bytes"])) for each in found)
    assert told == sorted(2 * [(GATHER, MIB), (GATHER, 2 * MIB), (REDUCE, MIB)])  # each rank is a communicator here
    assert set(of_others["comm_id"].tolist()) == {others[0].comm_id} != set(found["comm_id"].tolist())
    topology = fabrics.load("ethernet_boxes").topology(BOXES)
    for each in found:  # as NCCL gave it, not as the plan left it
        table = cost_model.cost_table(topology, Collective(int(each["collective"])), int(each["message_bytes"]))
        np.testing.assert_allclose(each["cost_us"], table, rtol=1e-6)


# ---- graphs, as releases tell of them ----


@pytest.mark.parametrize(("version", "says_so"), [("2.27.7", False), ("2.28.9", True), ("2.30.7", True)])
def test_a_replay_is_the_captures_setting_and_newer_releases_mark_it(pair: Pair, version: str, says_so: bool) -> None:
    with plugin_with({GATHER: LL}, BOXES) as plugin:
        ranks = pair(ZEROTUNE_NCCL_VERSION=version, **BOTH)
        plugin.set_observing(True)
        plugin.set_recording(True)
        graphs = [Graph(), Graph()]
        _capture(ranks, graphs)
        captured = plugin.drain()
        assert set((captured["flags"] & FLAG_REGISTERED).tolist()) == {FLAG_REGISTERED}
        assert len(captured) == 2
        adopt(plugin, 2, {GATHER: SIMPLE}, BOXES)
        before = plugin.counters().n_calls
        _replay(graphs)
        replayed = plugin.drain()
        assert plugin.counters().n_calls == before
        assert set(zip(replayed["protocol"].tolist(), replayed["n_channels"].tolist(), strict=True)) == {
            (LL.protocol, LL.n_channels)
        }
        marks = FLAG_TIMED | (FLAG_CAPTURED if says_so else 0)
        assert set((replayed["flags"] & (marks | FLAG_CAPTURED)).tolist()) == {marks}
        # A replay between a decision and its event leaves the decision to that event.
        if says_so:
            calls = _between(ranks, graphs)
            eager = timed(plugin.drain())
            eager = eager[(eager["flags"] & FLAG_CAPTURED) == 0]
            assert calls[0].candidate == SIMPLE
            assert set(eager["flags"].tolist()) == {FLAG_TIMED | FLAG_MATCHED}
            assert set(eager["epoch"].tolist()) == {2}


def _capture(ranks, graphs) -> None:
    for each, graph in zip(ranks, graphs, strict=True):
        with graph.capture():
            grouping.launch(each, [deferred(GATHER, MIB, SUM, each.rank)]).wait()


def _replay(graphs) -> None:
    """Both ranks' graphs at once, since each waits for the other's."""
    _complete(_issued(graphs))


def _issued(graphs):
    """Calls of a replay that waits for none of them."""
    calls = []
    with patch.object(Communicator, "complete", lambda _, call: calls.append(call) or 0.0):
        for graph in graphs:
            graph.replay()
    return calls


def _complete(calls) -> None:
    for call in calls:
        call.communicator.complete(call)


def _between(ranks, graphs):
    """Each rank decides a group of two; a replay comes before its events, as another thread's may."""
    calls, replayed = [], []
    for each, graph in zip(ranks, graphs, strict=True):
        groups = [grouping.fuse_group(each, [deferred(GATHER, n, SUM, each.rank)])[0] for n in (MIB, 8 * MIB)]
        with patch.object(
            each.host, "enqueued", _after(lambda graph=graph: replayed.extend(_issued([graph])), each.host.enqueued)
        ):
            calls.append(each.issue(groups)[0])
    _complete(replayed)
    return calls


def _after(first, then):
    """`then`, but `first` comes before its first call."""
    pending = [first]

    def both(*arguments):
        if pending:
            pending.pop()()
        return then(*arguments)

    return both


def test_a_graph_captured_unobserved_is_never_timed_one_captured_in_a_window_always(pair: Pair) -> None:
    with plugin_with({GATHER: LL}, BOXES) as plugin:
        ranks = pair(**BOTH)
        unseen, seen = [Graph(), Graph()], [Graph(), Graph()]
        _capture(ranks, unseen)
        plugin.set_observing(True)
        _capture(ranks, seen)
        _replay(unseen)
        assert len(plugin.drain()) == 0
        plugin.set_observing(False)
        _replay(seen)
        assert len(timed(plugin.drain())) == 2


# ---- memory and channels of a communicator ----


def test_the_user_limits_a_communicators_channels(pair: Pair) -> None:
    assert issue(pair(), REDUCE, 8 * MIB).candidate.n_channels == 8
    assert issue(pair(NCCL_MAX_CTAS="3"), REDUCE, 8 * MIB).candidate.n_channels == 3
    with plugin_with({REDUCE: Candidate(Algorithm.ring, Protocol.simple, 8)}, BOXES):
        assert issue(pair(NCCL_MAX_CTAS="3", **BOTH), REDUCE, 8 * MIB).candidate.n_channels == 3
    with pytest.raises(UserError, match="NCCL_MAX_CTAS='many'"):
        pair(NCCL_MAX_CTAS="many")


def test_the_journal_has_no_setting_for_what_bypasses(pair: Pair) -> None:
    journal().clear()
    _symmetric(pair("h100_node"), GATHER, MIB)
    assert journal().n_calls == 2
    assert not journal().counts
    journal().clear()


def test_the_plugin_is_one_however_it_is_named(pair: Pair, tmp_path: Path) -> None:
    """NCCL loads it once per process, for all communicators; Python holds the same instance."""
    link = tmp_path / "elsewhere.so"
    link.symlink_to(PLUGIN)
    with plugin_with({REDUCE: TREE}, BOXES) as plugin:
        pair(NCCL_TUNER_PLUGIN=str(link), NCCL_PROFILER_PLUGIN=PLUGIN)
        others = pair.again(name="other")
        assert issue(others, REDUCE, MIB).candidate == TREE
        assert plugin.counters().n_communicators == 4

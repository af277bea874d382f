"""How a setting comes about: NCCL's cheapest cell, the environment, every tuner ABI, clamps and refusals.

Two ranks of one communicator live in this process, so that no world has to be started.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from emulated_pair import MIB, Pair, issue, plugin_with

from zerotune.agent.nccl import compiled, library
from zerotune.agent.nccl.emulated import EmulatedNcclError
from zerotune.agent.nccl.emulated.host import plugin_host
from zerotune.agent.nccl.emulated.torch_backend import tasks
from zerotune.agent.nccl.emulated.torch_backend.reduction import SUM
from zerotune.store.errors import UserError
from zerotune.store.passages import OtherPlugin
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow, Protocol
from zerotune.store.wire import FLAG_MATCHED

SHAPE = CommunicatorClass(2, 2)
RING = Candidate(Algorithm.ring, Protocol.ll, 2)
TREE = Candidate(Algorithm.tree, Protocol.ll, 3)


def _both_plugins() -> dict[str, str]:
    path = str(compiled.PLUGIN.build())
    return {"NCCL_TUNER_PLUGIN": path, "NCCL_PROFILER_PLUGIN": path}


def test_the_environment_restricts_the_choice(pair: Pair) -> None:
    assert issue(pair(NCCL_ALGO="Tree", NCCL_PROTO="LL"), Collective.all_reduce, MIB).candidate == Candidate(
        Algorithm.tree, Protocol.ll, 8
    )
    assert issue(pair(NCCL_PROTO="^Simple"), Collective.all_gather, 64 * MIB).candidate.protocol is Protocol.ll
    with pytest.raises(EmulatedNcclError, match="NCCL_ALGO and NCCL_PROTO leave none"):
        issue(pair(NCCL_ALGO="Tree"), Collective.all_gather, MIB)
    old = pair(NCCL_ALGO="Tree", ZEROTUNE_NCCL_VERSION="2.22.3")
    assert issue(old, Collective.all_gather, MIB).candidate.algorithm is Algorithm.ring
    by_function = "ring;allreduce:tree"
    assert issue(pair(NCCL_ALGO=by_function), Collective.all_reduce, MIB).candidate.algorithm is Algorithm.tree
    assert issue(pair(NCCL_ALGO=by_function), Collective.all_gather, MIB).candidate.algorithm is Algorithm.ring
    with pytest.raises(UserError, match="unknown algorithm"):
        pair(NCCL_ALGO="Star")
    with pytest.raises(UserError, match="no NCCL release"):
        pair(ZEROTUNE_NCCL_VERSION="1.0")


PLUGIN = """
#include <stddef.h>
#include "nccl_abi.h"
static int made, unmade;
static nccl_result init(void **c, uint64_t id, size_t r, size_t n, nccl_logger l, nccl_nvl_domain_info *d,
                        nccl_tuner_constants *k) {
  (void)id; (void)r; (void)n; (void)d; (void)k; l(2, 0, "", 0, "%s", "hello"); *c = &made; made++; return INIT; }
static nccl_result ask(void *c, int f, size_t b, int p, float **t, int na, int np, int rb, int *n) {
  (void)f; (void)b; (void)p; (void)rb; (void)na; (void)np;
  float *table = (float *)(void *)t;
  if (c != &made) return 1;
  ASK; return RESULT; }
static nccl_result finalize(void *c) { (void)c; unmade++; return 0; }
const nccl_tuner_v5 ncclTunerPlugin_v5 = {"probe", init, ask, finalize};
int probe_made(void) { return made; }
int probe_unmade(void) { return unmade; }
"""


def _plugin(folder: Path, ask: str = "", result: int = 0, init: int = 0) -> str:
    source, binary = folder / "probe.c", folder / "libnccl-tuner-probe.so"
    source.write_text(PLUGIN)
    abi = Path(compiled.__file__).parent / "plugin"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-I{abi}", f"-DASK={ask}", f"-DRESULT={result}", f"-DINIT={init}", str(source),
         "-o", str(binary)], check=True,
    )  # fmt: skip
    return str(binary)


def test_a_refusing_plugin_fails_the_collective_or_the_communicator(pair: Pair, tmp_path: Path) -> None:
    ranks = pair(NCCL_TUNER_PLUGIN=_plugin(tmp_path, "*n = 0", result=3))
    with pytest.raises(EmulatedNcclError, match=r"\(error 3\)"):
        issue(ranks, Collective.all_reduce, MIB)
    (tmp_path / "other").mkdir()
    with pytest.raises(EmulatedNcclError, match=r"\(error 2\)"):
        pair(NCCL_TUNER_PLUGIN=_plugin(tmp_path / "other", "*n = 0", init=2))


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        ("*n = 100", Candidate(Algorithm.ring, Protocol.simple, 8)),  # clamped to what the communicator has
        ("table[0] = table[2] = 0", Candidate(Algorithm.tree, Protocol.ll, 8)),  # first on ties
        ("*n = 2; table[5] = 0; table[2] = -5", Candidate(Algorithm.ring, Protocol.simple, 2)),
        (
            "for (int i = 0; i < 21; i++) table[i] = 4e9f; table[5] = 1e9f",
            Candidate(Algorithm.ring, Protocol.simple, 8),
        ),
    ],
)
def test_the_cheapest_cell_wins_and_channels_are_clamped(
    pair: Pair, tmp_path: Path, ask: str, expected: Candidate
) -> None:
    ranks = pair(NCCL_TUNER_PLUGIN=_plugin(tmp_path, ask))
    assert issue(ranks, Collective.all_reduce, 16 * MIB).candidate == expected


def test_another_tuner_beside_ours_decides_until_a_plan_does(pair: Pair, tmp_path: Path) -> None:
    ours, other = str(compiled.PLUGIN.build()), _plugin(tmp_path, "*n = 2; table[2] = 0")
    plugin = library.load()
    plugin.reset()
    row = PlanRow(SHAPE, Collective.all_reduce, Phase.other, MIB, MIB, Candidate(Algorithm.tree, Protocol.ll, 3))
    plugin.load_plan(Plan(epoch=1, rows=(row,)))
    try:
        ranks = pair(NCCL_TUNER_PLUGIN=ours, ZEROTUNE_NEXT_TUNER=other)
        assert plugin.next_tuner() == "probe"
        its_choice = Candidate(Algorithm.tree, Protocol.simple, 2)
        assert issue(ranks, Collective.all_reduce, MIB).candidate == its_choice
        assert plugin.flip(1)
        assert issue(ranks, Collective.all_reduce, MIB).candidate == row.candidate
        assert issue(ranks, Collective.all_reduce, 2 * MIB).candidate == its_choice
        assert plugin.counters().n_next_tuner_faults == 0
        for rank in ranks:
            rank.close()
        (tmp_path / "other").mkdir()
        plugin.reset()
        ranks = pair(NCCL_TUNER_PLUGIN=ours, ZEROTUNE_NEXT_TUNER=_plugin(tmp_path / "other", "*n = 2", result=3))
        assert issue(ranks, Collective.all_reduce, 16 * MIB).candidate.n_channels == 8  # as without it
        assert plugin.counters().n_next_tuner_faults == 2
        assert plugin.passages().others == (OtherPlugin("tuner", "probe", 2),)
        for rank in ranks:
            rank.close()
    finally:
        plugin.reset()


def test_plugins_are_found_by_nccls_rules(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = _plugin(tmp_path, "*n = 2")
    for name in ("none", "", "/nowhere/libx.so", "unheard-of"):
        assert issue(pair(NCCL_TUNER_PLUGIN=name), Collective.all_reduce, 16 * MIB).candidate.n_channels == 8
    assert [record.levelname for record in caplog.records].count("WARNING") == 2
    # Older than v5: this plugin has nothing for it.
    old = pair(NCCL_TUNER_PLUGIN=path, ZEROTUNE_NCCL_VERSION="2.27.3")
    assert issue(old, Collective.all_reduce, 16 * MIB).candidate.n_channels == 8
    made = plugin_host.plugin_host()
    ranks = pair(NCCL_TUNER_PLUGIN=path)
    loaded = plugin_host.plugin_host()
    assert loaded is not made
    assert loaded.tuner is not None
    assert loaded.tuner.abi == 5
    counts = loaded.tuner.library
    before = counts.probe_made(), counts.probe_unmade()
    assert before[0] >= 2
    for rank in ranks:
        rank.close()
        rank.close()
    assert counts.probe_unmade() == before[1] + 2


def test_shapes_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="not 2 times"):
        tasks.all_gather(torch.empty(3), torch.empty(2), 2)
    with pytest.raises(ValueError, match="not 2 times"):
        tasks.reduce_scatter(torch.empty(3), torch.empty(7), SUM, 0, 2)


@pytest.mark.parametrize("version", ["2.21.5", "2.30.7", "rccl-2.27.7"])
def test_the_users_own_settings_win_over_a_plan(pair: Pair, version: str) -> None:
    with plugin_with({Collective.all_reduce: RING, Collective.all_gather: RING}, SHAPE) as plugin:
        plugin.set_recording(True)
        ranks = pair(ZEROTUNE_NCCL_VERSION=version, NCCL_ALGO="Tree,Ring", NCCL_PROTO="Simple", **_both_plugins())
        assert issue(ranks, Collective.all_reduce, MIB).candidate.protocol is Protocol.simple
        assert issue(ranks, Collective.all_gather, MIB).candidate.protocol is Protocol.simple
        counters = plugin.counters()
        assert counters.n_matched == 0
        assert counters.n_ignored_cells == (0 if version.startswith("2.21") else 4)
        assert not (plugin.drain()["flags"] & FLAG_MATCHED).any()


@pytest.mark.parametrize(("version", "abi"), [("rccl-2.22.3", 3), ("rccl-2.27.7", 4), ("rccl-2.28.3", 5)])
def test_rccl_is_tuned_within_ring_and_tree(pair: Pair, version: str, abi: int) -> None:
    pat = Candidate(Algorithm.pat, Protocol.simple, 2)
    with plugin_with({Collective.all_gather: pat, Collective.all_reduce: TREE}, SHAPE) as plugin:
        plugin.set_recording(True)
        plugin.set_observing(True)
        ranks = pair(ZEROTUNE_NCCL_VERSION=version, **_both_plugins())
        assert plugin.tuner_abi() == abi
        assert issue(ranks, Collective.all_reduce, MIB).candidate == TREE
        assert issue(ranks, Collective.all_gather, MIB).candidate.algorithm is Algorithm.ring  # PAT is IGNORE there
        assert plugin.counters().n_ignored_cells == 2
        plugin.drain()
        before = plugin.counters()
        issue(ranks, Collective.all_to_all, 4 * MIB)  # asked under a function number NCCL has for another
        after = plugin.counters()
        assert (after.n_calls - before.n_calls, after.n_matched - before.n_matched) == (2, 0)
        assert len(plugin.drain()) == 0
        issue(ranks, Collective.all_to_all, MIB)
        assert plugin.counters().n_calls == after.n_calls


def test_the_user_limits_a_communicators_channels(pair: Pair) -> None:
    assert issue(pair(), Collective.all_reduce, 8 * MIB).candidate.n_channels == 8
    assert issue(pair(NCCL_MAX_CTAS="3"), Collective.all_reduce, 8 * MIB).candidate.n_channels == 3
    with plugin_with({Collective.all_reduce: Candidate(Algorithm.ring, Protocol.simple, 8)}, SHAPE):
        ranks = pair(NCCL_MAX_CTAS="3", **_both_plugins())
        assert issue(ranks, Collective.all_reduce, 8 * MIB).candidate.n_channels == 3
    with pytest.raises(UserError, match="NCCL_MAX_CTAS='many'"):
        pair(NCCL_MAX_CTAS="many")

"""How a setting comes about: NCCL's cheapest cell, the environment, every tuner ABI, clamps and refusals.

Two ranks of one communicator live in this process, so that no world has to be started.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from emulated_pair import MIB, Pair, issue, plugin_with

from zerotune.agent.nccl import compiled, library
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Phase, Plan, PlanRow, Protocol
from zerotune.store.records.passages import OtherPlugin
from zerotune.store.wire import FLAG_MATCHED

SHAPE = CommunicatorClass(2, 2)
RING = Candidate(Algorithm.ring, Protocol.ll, 2)
TREE = Candidate(Algorithm.tree, Protocol.ll, 3)


def _both_plugins() -> dict[str, str]:
    path = str(compiled.PLUGIN.build())
    return {"NCCL_TUNER_PLUGIN": path, "NCCL_PROFILER_PLUGIN": path}


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

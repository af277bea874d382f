"""How a setting comes about: NCCL's cheapest cell, the environment, every tuner ABI, clamps and refusals.

Two ranks of one communicator live in this process, so that no world has to be started.
"""

from __future__ import annotations

import pytest
from emulated_pair import MIB, Pair, issue, plugin_with

from zerotune.agent.nccl import compiled
from zerotune.store.records import Algorithm, Candidate, Collective, CommunicatorClass, Protocol
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

"""Communicators of the real NCCL with our plugin: made, used, and given up in each way, again and again.

Nothing grows, nothing is left behind, and each collective is decided and observed once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.lib.nccl import nccl_releases
from benchmarks.lib.nccl.other_plugins import other_profiler, other_tuner
from zerotune.agent.nccl.compiled import PLUGIN
from zerotune.agent.nccl.release import Release
from zerotune.agent.nccl.twin.twin import topology_file

PROGRAM = Path(__file__).with_name("lifecycle_ranks.py")
MACHINE = "dgx_h100"
COLLECTIVES_PER_USE = 12
WARM_UP = 4
"""Rounds in which libraries and Python fill what they keep."""
EVERYTHING = 0xFF
"""What another profiler asks for: groups, collectives, proxies, channels, network plugins."""
CHANNEL_NS = 20_000
"""How long a slow profiler keeps NCCL's thread at each kernel channel."""
RESIDENT_KIB = 1024
"""How much a process may grow from the warm-up on."""
SANITIZERS = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

ROUNDS = {
    # ranks, nodes, rounds, communicators that each rank uses in a round
    "again": (2, 2, 10, 1),
    "at_once": (2, 1, 8, 8),
    "split": (4, 2, 2, 2),
    "shrink": (4, 1, 2, 2),
    "finalize": (2, 2, 4, 1),
    "non_blocking": (2, 2, 4, 1),
    "abort": (2, 2, 8, 1),
    "graphs": (2, 1, 8, 1),
    "threads": (2, 1, 4, 2),
}
OFTEN = ("again", "non_blocking", "abort", "threads")
MANY = ROUNDS | {
    "again": (2, 2, 200, 1),
    "at_once": (2, 1, 64, 64),
    "abort": (2, 1, 100, 1),
    "graphs": (2, 2, 50, 1),
    "threads": (2, 2, 50, 2),
}


def told(release, scenario: str, shape: tuple, plugin: Path, **environment: str) -> list[dict]:
    """What each rank of one run says."""
    n_ranks, n_nodes, n, _ = shape
    with topology_file(MACHINE) as topology:
        command = [
            *(sys.executable, PROGRAM, "--library", release[1], "--plugin", plugin, "--topology", topology),
            *("--n_ranks", n_ranks, "--n_nodes", n_nodes, "--scenario", scenario, "--n", n),
        ]
        process = subprocess.Popen(
            [str(each) for each in command],
            env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2]), **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, errors = process.communicate(timeout=110)
        finally:
            with suppress(ProcessLookupError):  # ranks that wait for one another outlive it
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-3000:]
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def check(ranks: list[dict], scenario: str, shape: tuple) -> None:
    n_ranks, _, n, per_round = shape
    assert len(ranks) == n_ranks
    rounds = 2 if scenario == "at_once" else n
    for each in ranks:
        is_excluded = scenario == "shrink" and each["rank"] == n_ranks - 1
        n_communicators = rounds * (1 if is_excluded else per_round)
        assert each["n_communicators"] == n_communicators
        assert each["n_calls"] == each["n_decided"] == n_communicators * COLLECTIVES_PER_USE
        assert each["n_lost_events"] == each["n_dropped_records"] == 0
        if scenario == "non_blocking":
            assert each["n_timed"] == each["n_decided"]
        files, threads, resident = zip(*each["levels"], strict=True)
        assert files[-1] <= max(files[:WARM_UP])
        assert threads[-1] <= max(threads[:WARM_UP])
        if len(resident) > 2 * WARM_UP:
            assert resident[-1] - resident[len(resident) // 2] < RESIDENT_KIB


@pytest.mark.parametrize(
    "scenario",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in ROUNDS],
)
def test_nothing_grows_and_each_collective_is_decided_once(newest, scenario):
    check(told(newest, scenario, ROUNDS[scenario], PLUGIN.build()), scenario, ROUNDS[scenario])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["abort", "graphs"])
def test_nothing_is_left_beside_others_plugins(newest, scenario, tmp_path):
    release = Release(newest[0])
    others = {
        "ZEROTUNE_NEXT_TUNER": str(other_tuner(tmp_path / "tuner.so", release.tuner_abi)),
        "ZEROTUNE_NEXT_PROFILER": str(
            other_profiler(tmp_path / "profiler.so", release.profiler_abi, f"-DMASK={EVERYTHING}")
        ),
    }
    check(told(newest, scenario, ROUNDS[scenario], PLUGIN.build(), **others), scenario, ROUNDS[scenario])


@pytest.mark.slow
def test_a_communicator_ends_once_nccls_thread_has_read_all_of_it(newest, tmp_path):
    # 2.31 and 2.32 free the counters that their thread still reads; another profiler keeps it.
    slow = other_profiler(
        tmp_path / "slow.so", Release(newest[0]).profiler_abi, f"-DMASK={EVERYTHING}", f"-DCHANNEL_NS={CHANNEL_NS}"
    )
    ranks = told(newest, "graphs", ROUNDS["graphs"], PLUGIN.build(), ZEROTUNE_NEXT_PROFILER=str(slow))
    check(ranks, "graphs", ROUNDS["graphs"])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", MANY)
def test_nothing_is_left_in_any_interface_however_often(release, scenario):
    if ".".join(map(str, release[0])) not in nccl_releases.TESTED:
        pytest.skip("four minutes a release: one of each tuner interface, as in every run of the suite")
    check(told(release, scenario, MANY[scenario], PLUGIN.build()), scenario, MANY[scenario])


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory) -> tuple[Path, str]:
    """The plugin with address and undefined-behaviour sanitizers, and the library to be preloaded for it."""
    plugin = tmp_path_factory.mktemp("sanitized") / PLUGIN.path().name
    flags = " ".join([*SANITIZERS, *PLUGIN.flags])
    made = subprocess.run(
        ["make", "-s", "-C", PLUGIN.root / "plugin", f"LIBRARY={plugin}", f"EXTRA_FLAGS={flags}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    preloaded = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=False)
    if made.returncode != 0 or not Path(preloaded.stdout.strip()).is_absolute():
        pytest.skip("this compiler has no sanitizers")
    return plugin, preloaded.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ROUNDS)
def test_sanitizers_find_nothing(newest, sanitized, scenario):
    plugin, preloaded = sanitized
    # Leaks are looked for by what grows: Python itself leaves much behind.
    environment = {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0"}
    for each in told(newest, scenario, ROUNDS[scenario], plugin, **environment):
        assert each["n_calls"] == each["n_decided"] > 0


def test_a_killed_rank_leaves_no_memory_behind(newest):
    (rank,) = told(newest, "killed", (2, 2, 2, 1), PLUGIN.build())
    assert rank["n_calls"] == 2 * COLLECTIVES_PER_USE
    assert rank["shared_files"]
    assert not [path for path in rank["shared_files"] if Path(path).exists()]

"""The C harness, which calls every ABI version as NCCL does: under ASan + UBSan, and with threads under TSan."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmarks.lib.nccl.other_plugins import other_profiler, other_tuner
from zerotune.agent.nccl.compiled import PLUGIN as LIBRARY

PLUGIN = LIBRARY.root / "plugin"
HARNESS = Path(__file__).parent / "harness"
MODES = {
    "asan_ubsan": ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "tsan": ["-g", "-fsanitize=thread"],
}
WITH_THREADS = ["lifetimes", "groups", "threads", "agreed"]
TESTS = ["tuner", "costs_and_records", "profiler", "kernels", "passages", "shifts", *WITH_THREADS]
TESTS += ["impossible_numbers", "next_tuner", "next_profiler"]


def compiled(folder: Path, mode: str) -> tuple[Path, Path]:
    """Plugin (by its Makefile) and harness, both with the sanitizers of `mode`."""
    plugin, harness = folder / "plugin.so", folder / "harness"
    flags = [*MODES[mode], "-O0"]  # compiles in half the time, and hides nothing from sanitizers
    make = ["make", "-s", "-C", str(PLUGIN), f"LIBRARY={plugin}", f"EXTRA_FLAGS={' '.join(flags)}"]
    subprocess.run(make, check=True)
    cc = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread", *flags]
    sources = [str(file) for file in sorted(HARNESS.glob("*.c"))]
    subprocess.run([*cc, f"-I{PLUGIN}", "-o", str(harness), *sources, "-rdynamic", "-ldl"], check=True)
    return plugin, harness


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    """The folder of others' plugins, which no sanitizer looks into."""
    folder = tmp_path_factory.mktemp("others")
    for version in range(2, 8):
        other_tuner(folder / f"libnccl-tuner-other{version}.so", version)
    for version in range(3, 8):
        other_profiler(folder / f"libnccl-profiler-other{version}.so", version)
    other_tuner(folder / "libnccl-tuner.so", 6, "-DAND_OLDER")
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """Plugin and harness of a mode. They are compiled once: a parametrised fixture would compile them for each test."""

    @cache
    def of(mode: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(mode)
        probe = ["cc", *MODES[mode], "-x", "c", "-", "-o", str(folder / "probe")]
        if subprocess.run(probe, input="int main(void){return 0;}", text=True, capture_output=True).returncode:
            pytest.skip(f"this compiler has no {mode}")  # gcc and clang come without sanitizers on some systems
        return compiled(folder, mode)

    return of


CASES = [*(("asan_ubsan", test) for test in TESTS), *(("tsan", test) for test in WITH_THREADS)]


@pytest.mark.parametrize(("mode", "test"), CASES)
def test_as_nccl_calls_it(built, others, mode, test):
    plugin, harness = built(mode)
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    environment.pop("NCCL_ALGO", None)
    environment.pop("NCCL_PROTO", None)
    environment["LD_LIBRARY_PATH"] = str(others)  # other plugins are found by name, too
    done = subprocess.run(
        [harness, plugin, test, others], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""


def test_only_the_abi_is_exported():
    names = subprocess.run(
        ["nm", "-D", "--defined-only", str(LIBRARY.build())], capture_output=True, text=True, check=True
    ).stdout.split()[2::3]
    expected = {f"ncclTunerPlugin_v{v}" for v in range(2, 8)} | {f"ncclProfiler_v{v}" for v in range(3, 8)}
    assert {name for name in names if not name.startswith("zerotune_")} == expected


def test_no_allocation_lock_or_system_call_in_get_coll_info(tmp_path):
    """What getCollInfo can reach, by the symbols that its objects leave undefined."""
    forbidden = {"malloc", "calloc", "free", "pthread_mutex_lock", "write", "syscall", "clock_gettime"}
    flags = [f"@{PLUGIN / 'compile_flags.txt'}"]
    # plan.c locks among loaders only
    for source in ("tuner/tuner.c", "next/tuner.c", "records/records.c", "plan/shared_state.c"):
        out = tmp_path / "object.o"
        subprocess.run(["cc", *flags, "-c", str(PLUGIN / source), "-o", str(out)], check=True)
        undefined = subprocess.run(["nm", "-u", str(out)], capture_output=True, text=True, check=True).stdout
        assert not forbidden & set(undefined.split()), source


POINTS = Path(__file__).parent / "points"
RING, TABLES = "records/ring.h", "plan/plan.c"
MUTANTS = {
    "producer releases nothing": (RING, "wanted + 1, memory_order_release", "wanted + 1, memory_order_relaxed"),
    "consumer acquires nothing": (
        RING,
        "atomic_load_explicit(sequence, memory_order_acquire) != filled",
        "atomic_load_explicit(sequence, memory_order_relaxed) != filled",
    ),
    "consumer releases nothing": (RING, "filled + 1, memory_order_release", "filled + 1, memory_order_relaxed"),
    "producer acquires nothing": (
        RING,
        "(atomic_load_explicit(sequence, memory_order_acquire) - wanted)",
        "(atomic_load_explicit(sequence, memory_order_relaxed) - wanted)",
    ),
    "no mark while rebuilt": (TABLES, "PUT(table->version, version + 1);", "(void)version;"),
    "reader ignores the mark": (TABLES, "version % 2 == 0 && ", ""),
    "reader looks at the version once": (TABLES, " && GET(table->version) == version", ""),
    "loaded while rebuilt": (TABLES, "atomic_fetch_and(&plan_state, 1u) & 1u", "atomic_load(&plan_state) & 1u"),
}


def points(folder: Path, sources: Path) -> dict[str, subprocess.CompletedProcess[str]]:
    """The ring under TSan and the plan's tables at every point of a rebuilding, built from `sources`."""
    cc = ["cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-pthread", f"-I{sources}"]
    ring, plan = folder / "ring_race", folder / "plan_points"
    # Unoptimised: where it folds copies, gcc leaves some of them out of TSan's sight.
    subprocess.run([*cc, "-O0", *MODES["tsan"], "-o", ring, POINTS / "ring_race.c"], check=True)
    helpers = [sources / "plan/classes.c", sources / "plan/shared_state.c"]
    subprocess.run([*cc, "-Wno-unused", "-o", plan, POINTS / "plan_points.c", *helpers], check=True)
    return {
        RING: subprocess.run([ring], capture_output=True, text=True, timeout=60, check=False),
        TABLES: subprocess.run([plan], capture_output=True, text=True, timeout=60, check=False),
    }


def test_ring_and_tables_hold_at_every_point(tmp_path):
    for done in points(tmp_path, PLUGIN).values():
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "old", "new"), MUTANTS.values(), ids=MUTANTS)
def test_a_weakened_ring_or_table_is_caught(tmp_path, file, old, new):
    sources = tmp_path / "plugin"
    shutil.copytree(PLUGIN, sources)
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    assert points(tmp_path, sources)[file].returncode != 0

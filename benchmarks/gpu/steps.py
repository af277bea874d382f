"""Steps that run collectives only: each starts ranks and judges their records."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.ranks import Machine, Ranks
from benchmarks.gpu.results import Record
from zerotune.agent.nccl.release import Release
from zerotune.store.records import Collective, TimingSource
from zerotune.tuner.traces.nccl import nccl_debug
from zerotune.tuner.traces.records import Summary


class NotAsItMust(Exception):
    """A step ran and a result is wrong; `results` are kept."""

    def __init__(self, reason: str, results: dict[str, Any]) -> None:
        super().__init__(reason)
        self.results = results


@dataclass(frozen=True)
class Context:
    """The ranks' machine, a folder of the step, its deadline, and the amount of work."""

    machine: Machine
    folder: Path
    record: Record
    deadline_s: float
    n_collectives: int = 10_000
    n_steps: int = 30
    n_pairs: int = 2

    @property
    def left_s(self) -> float:
        return max(1.0, self.deadline_s - time.monotonic())


@dataclass(frozen=True)
class Step:
    name: str
    timeout_s: float
    run: Callable[[Context], dict[str, Any]]




def _run_ranks(context: Context, mode: str, *words: str, **extra: str) -> list[list[dict[str, Any]]]:
    command = [sys.executable, "-m", "benchmarks.gpu.rank", mode, "--out", str(context.folder), *words]
    Ranks(context.machine, command, context.folder, extra=extra | plugin_variables()).wait(context.left_s)
    return written(context)


def written(context: Context) -> list[list[dict[str, Any]]]:
    """The records of the ranks so far, by rank."""
    files = [context.folder / f"rank{rank}.jsonl" for rank in range(context.machine.n_ranks)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files if file.exists()]


def plugin_variables() -> dict[str, str]:
    from zerotune.agent.nccl import compiled

    path = str(compiled.PLUGIN.build())
    return {"NCCL_TUNER_PLUGIN": path, "NCCL_PROFILER_PLUGIN": path}


def expected_tuner_abi(nccl_version: int) -> int:
    """`nccl_version` is NCCL's encoded version, 22809 for 2.28.9."""
    return Release((nccl_version // 10000, nccl_version // 100 % 100, nccl_version % 100)).tuner_abi


def load(context: Context) -> dict[str, Any]:
    """The plugin is loaded, by the interface that this NCCL should use, and NCCL's profiler times collectives."""
    seen = [lines[0] for lines in _run_ranks(context, "load")]
    first = seen[0]
    results = {
        **first,
        "expected_tuner_abi": expected_tuner_abi(first["nccl_version"]),
        "timing_sources": [TimingSource(source).name for source in first["timing_sources"]],
    }
    if any(rank["tuner_abi"] != results["expected_tuner_abi"] for rank in seen):
        raise NotAsItMust(f"tuner interfaces {[rank['tuner_abi'] for rank in seen]}", results)
    if any(rank["n_timed"] < 3 for rank in seen):
        raise NotAsItMust(f"timed collectives by rank: {[rank['n_timed'] for rank in seen]}", results)
    return results


def forced(context: Context) -> dict[str, Any]:
    """The asked cells ran, by the profiler on every rank and by NCCL's own TUNING log on rank 0."""
    log = context.folder / "nccl.%h.%p.log"
    ranks = _run_ranks(
        context, "forced", NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,ENV,TUNING,GRAPH", NCCL_DEBUG_FILE=str(log)
    )
    cases = [case for rank in ranks for case in rank]
    results = judge_forced(cases)
    logs = sorted(context.folder.glob("nccl.*.log"))
    if logs:
        results["log"] = judge_log(ranks[0], [logged for path in logs for logged in selections(path)])
    else:
        results["log"] = "none: the emulated NCCL writes none" if context.machine.fabric else "NCCL wrote none"
    wrong = results["n_other_setting"] + results["n_wrong_sums"] + results["n_not_timed"]
    if wrong or not cases:
        raise NotAsItMust(f"{wrong} of {len(cases)} cases are not as asked", results)
    if isinstance(results["log"], dict) and results["log"]["n_contradicted"]:
        raise NotAsItMust("NCCL's TUNING log tells of other settings", results)
    return results


def judge_forced(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts over cases of {asked, ran, correct}. NCCL may take fewer channels than asked for small messages."""
    settings = Counter[str]()
    n_other = n_more = n_fewer = 0
    for case in cases:
        asked = case["asked"]
        settings[f"{case['collective']} {asked['algorithm']}/{asked['protocol']}"] += 1
        for ran in case["ran"]:
            n_other += any(ran[name] != asked[name] for name in ("algorithm", "protocol"))
            n_more += ran["n_channels"] > asked["n_channels"]
            n_fewer += ran["n_channels"] < asked["n_channels"]
    return {
        "n_cases": len(cases), "n_cells": len(settings), "n_other_setting": n_other + n_more,
        "n_fewer_channels": n_fewer,
        "n_wrong_sums": sum(not case["correct"] for case in cases),
        "n_not_timed": sum(not case["ran"] for case in cases),
    }  # fmt: skip


Selection = tuple[str, int, int, int]


def selections(path: Path) -> list[Selection]:
    """(collective, total bytes, algorithm, protocol) of each TUNING line in an NCCL_DEBUG log, in order."""
    found = []
    for block in nccl_debug.read(path, Summary()):
        for row in block:
            name = Collective(row["collective"]).name
            found.append((name, int(row["message_bytes"]), int(row["algorithm"]), int(row["protocol"])))
    return found


def judge_log(cases: Iterable[dict[str, Any]], logged: Iterable[Selection]) -> dict[str, int]:
    """Each asked cell against the number of times that NCCL's log has it for that collective and size."""
    told = Counter(logged)
    asked = Counter(
        (case["collective"], case["message_bytes"], case["asked"]["algorithm"], case["asked"]["protocol"])
        for case in cases
    )
    n_confirmed = sum(min(n, told[key]) for key, n in asked.items())
    return {"n_lines": sum(told.values()), "n_confirmed": n_confirmed, "n_contradicted": asked.total() - n_confirmed}


def soak(context: Context) -> dict[str, Any]:
    """Plans flip at boundaries; every rank sees the same epochs, every sum is right, nothing hangs."""
    words = ("--collectives", str(context.n_collectives), "--seconds", str(context.left_s * 0.8 - 10))
    seen = [rank[0] for rank in _run_ranks(context, "soak", *words)]
    results = {
        "n_collectives": seen[0]["n_collectives"], "n_hangs": 0,
        "n_epochs": seen[0]["n_epochs"], "n_wrong": sum(rank["n_wrong"] for rank in seen),
        "n_timed": min(rank["n_timed"] for rank in seen), "n_lost": max(rank["n_lost"] for rank in seen),
        "collectives_per_s": min(rank["collectives_per_s"] for rank in seen),
    }  # fmt: skip
    if len({(rank["n_epochs"], rank["last_epoch"]) for rank in seen}) != 1:
        raise NotAsItMust(f"epochs by rank: {[rank['n_epochs'] for rank in seen]}", results)
    if results["n_epochs"] < 2 or results["n_wrong"]:
        raise NotAsItMust("no plan was ever adopted" if results["n_epochs"] < 2 else "sums are wrong", results)
    if results["n_collectives"] < context.n_collectives:
        raise NotAsItMust(f"all is well, but there was no time for {context.n_collectives} collectives", results)
    return results


def sweep(context: Context) -> dict[str, Any]:
    """Sizes x cells x channels with NCCL's own choice; results are kept even when the time is up."""
    earlier = context.record.swept()
    done = context.folder / "done.json"
    done.write_text(json.dumps([[row["collective"], row["message_bytes"], row["asked"]] for row in earlier]))
    try:
        _run_ranks(context, "sweep", "--seconds", str(context.left_s * 0.85 - 10), "--done", str(done))
    finally:
        rows = (written(context) or [[]])[0]
        context.record.add_sweep(rows)
    rows = earlier + rows
    return {
        "n_settings": len(rows), "n_new": len(rows) - len(earlier),
        "n_not_as_asked": sum(not _is_as_asked(row) for row in rows),
        "sizes_best_not_default": best_against_default(rows),
    }  # fmt: skip


def _is_as_asked(row: dict[str, Any]) -> bool:
    if row["asked"] == "baseline":
        return True
    return bool(row["ran"]) and row["asked"].split("/")[:2] == cell_names(row["ran"])


def cell_names(ran: dict[str, int]) -> list[str]:
    from zerotune.store.records import Algorithm, Protocol

    return [Algorithm(ran["algorithm"]).name, Protocol(ran["protocol"]).name]


def best_against_default(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Per collective and size where another setting was faster: default's median over the best one's."""
    medians: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["median_us"]:
            medians.setdefault((row["collective"], row["message_bytes"]), {})[row["asked"]] = row["median_us"]
    ratios = {}
    for (collective, size), by_setting in sorted(medians.items()):
        best = min(by_setting, key=lambda name: by_setting[name])
        if "baseline" in by_setting and best != "baseline":
            ratios[f"{collective} {size} {best}"] = round(by_setting["baseline"] / by_setting[best], 3)
    return ratios


def scratch_is_short(folder: Path) -> bool:
    """Paths of sockets below `folder` are short enough."""
    return len(os.fsencode(folder / "kill-daemon" / "d.sock")) < 100

"""Steps about the device's own time: each starts ranks and summarises their records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.gpu.ranks import Ranks
from benchmarks.gpu.steps import Context, NotAsItMust, plugin_variables, written
from zerotune.store.records import TimingSource

LONGER: Final = 1.1
"""A kernel's reported duration is wrong if it exceeds the time on its stream by this factor."""

Rows = list[dict[str, Any]]


def _seen(context: Context, mode: str, *words: str, has_plugin: bool = True) -> Rows:
    """The records of rank 0."""
    command = [sys.executable, "-m", "benchmarks.gpu.device_rank", mode, "--out", str(context.folder), *words]
    extra = plugin_variables() if has_plugin else {}
    Ranks(context.machine, command, context.folder, extra=extra).wait(context.left_s)
    return written(context)[0]


def times(context: Context) -> dict[str, Any]:
    """The profiler's durations are those of the device's events."""
    return judge_times(_seen(context, "times"))


def judge_times(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Durations by size, the ratio at the largest, and the step of the GPU's timer.

    Raises:
        NotAsItMust: a duration is missing, or longer than the time that passed on the stream.
    """
    results = {
        "us_by_bytes": {str(row["message_bytes"]): [row["profiler_us"], row["event_us"]] for row in rows},
        "profiler_over_event_at_largest": (rows[-1]["profiler_us"] or 0.0) / rows[-1]["event_us"],
        "timer_step_ns": timer_step_ns([start for row in rows for start in row["starts_ns"]]),
        "timing_sources": sorted({TimingSource(row["timing_source"]).name for row in rows}),
    }
    if any(row["profiler_us"] is None for row in rows):
        raise NotAsItMust("the profiler told nothing of some sizes", results)
    longer = [row["message_bytes"] for row in rows if row["profiler_us"] > LONGER * row["event_us"]]
    if longer:
        raise NotAsItMust(f"the profiler says longer than the stream took, at {longer} bytes", results)
    return results


def timer_step_ns(starts_ns: Sequence[int]) -> int:
    """Greatest common divisor of the differences of these times."""
    return int(np.gcd.reduce(np.diff(np.sort(np.array(starts_ns, np.int64))))) if len(starts_ns) > 1 else 0


def ahead(context: Context) -> dict[str, Any]:
    """How far hosts run ahead, and how wrong their clock is about steps."""
    rows = _seen(context, "ahead")
    return {
        f"{name}_{'with' if row['has_item'] else 'without'}_item": row[name]
        for row in rows
        for name in ("host_us", "event_us", "most_behind")
    }


def observing(context: Context) -> dict[str, Any]:
    """The cost of a call without a plugin, with ours idle, and while it is observed."""
    rows = _seen(context, "observing")
    absent = Context(**{**vars(context), "folder": context.folder / "absent"})
    rows += _seen(absent, "observing", "--absent", has_plugin=False)
    found: dict[str, Any] = {}
    for name in ("enqueue_us", "device_us"):
        by_mode = {mode: median(row[name] for row in rows if row["mode"] == mode) for mode in ("absent", "off", "on")}
        found |= {f"{name}_{mode}": value for mode, value in by_mode.items()}
        found |= {f"{name}_ratio_{mode}": by_mode[mode] / by_mode["absent"] for mode in ("off", "on")}
    return found


def capture(context: Context) -> dict[str, Any]:
    rows = _seen(context, "capture")
    if "skipped" in rows[0]:
        return rows[0]
    own, observed = (next(row["replay_us"] for row in rows if row["is_observed"] == is_on) for is_on in (False, True))
    return {"replay_us": own, "replay_us_observed": observed, "replay_ratio_observed": observed / own}


def beside(context: Context) -> dict[str, Any]:
    """The effect of fewer channels beside a matrix product."""
    rows = _seen(context, "beside")
    own = next(row for row in rows if row["n_channels"] == 0)
    best = min(rows, key=lambda row: float(row["both_us"]))
    return {
        "us_by_channels": {
            str(row["n_channels"]): [row["gather_us"], row["product_us"], row["both_us"]] for row in rows
        },
        "best_channels": best["n_channels"],
        "saved_percent_by_best": 100.0 * (1.0 - best["both_us"] / own["both_us"]),
    }

"""nccl-tests' `-J` files (versions 2 and 3), with booleans and nan as text, and the whole environment.

Of the environment, only NCCL_ALGO, NCCL_PROTO, and whether NCCL chose the setting are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

from ....agent.nccl.catalog import find_collective
from ....store.errors import TraceError
from ....store.records import Collective, Observation, TimingSource
from ..files import JsonStream
from ..left_out import LeftOut
from ..rank_count import MAX_RANKS, RunRanks
from ..records import FLAG_DEFAULT, FLAG_FORCED, Block, SequenceNumbers, Summary, blocks_of
from .nccl_tests import GROUPED
from .nccl_tests_runs import contradiction, forced_setting, with_ranks

_MOST_EACH: Final = 256
"""Most GPUs, or threads, of one process; more mean that the file is damaged."""
_MOST_LISTED: Final = 1 << 20
_MOST_GBS: Final = 1e9
_ASKING: Final = (
    "NCCL_ALGO", "NCCL_PROTO", "NCCL_TUNER_PLUGIN", "NCCL_TUNER_CONFIG_FILE", "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_CTA_POLICY", "NCCL_NTHREADS", "NCCL_LL128_NTHREADS",
    "NCCL_THREAD_THRESHOLDS",
)  # fmt: skip
"""Variables that set or restrict NCCL's choice (`^NVLS` does, too)."""
_BODIES: Final = (("out_of_place", "out_of_place_per_iter"), ("in_place", "in_place_per_iter"))


def matches(begin: bytes) -> bool:
    """Whether the file is a JSON object that begins as nccl-tests writes it."""
    return begin.lstrip().startswith(b"{") and b'"start_time"' in begin[:512] and b'"args"' in begin[:4096]


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """One record per result, or per iteration if iterations were timed one by one."""
    head: dict[str, Any] = {}
    stream = JsonStream(path, ("results",))
    seen, n_each = False, 1
    for key, value in stream.members():
        if key == "results" and isinstance(value, Iterator):
            seen = True
            asked = _asked(head.get("env"))
            flag = 0 if asked is None else FLAG_FORCED if any(asked.values()) else FLAG_DEFAULT
            settings = ("", "") if asked is None else (asked["NCCL_ALGO"], asked["NCCL_PROTO"])
            run, collective = RunRanks(_ranks(head.get("devices"), n_each)), _collective(head.get("args"))
            for block in blocks_of(_observations(run, collective, value, settings, summary)):
                if run.count is None:
                    summary.note_ranks(run.compared(collective), path.name)
                with_ranks(block, run)
                block["flags"] |= flag
                yield block
        elif seen and key in ("args", "env", "config", "devices", "ranks"):
            raise TraceError(f"{path} has its {key} after its results", "write it as nccl-tests does, the results last")
        elif key in ("version", "args", "nccl_version", "env"):
            head[key] = value
        elif key in ("config", "devices", "ranks"):
            head.setdefault("devices", []).append(value)
            config = value if isinstance(value, Mapping) else {}
            grouped, *each = (config.get(name) for name in ("aggregated_iterations", "nthreads", "ngpus"))
            if type(grouped) is int and grouped > 1:
                summary.note(GROUPED)
            n_each = math.prod(n for n in each if type(n) is int and 0 < n < _MOST_EACH)
    summary.facts["nccl_version"] = head.get("nccl_version")
    if stream.truncated:
        summary.fault(f"{path.name} ends early")
    elif not seen:
        raise TraceError(f"{path} has no results", "name a file that nccl-tests -J wrote")


def _asked(env: Any) -> dict[str, str] | None:
    """The values of _ASKING, "" for unset ones; None: the file does not have the environment."""
    if not isinstance(env, list | Mapping):
        return None
    entries = (f"{name}={value}" for name, value in env.items()) if isinstance(env, Mapping) else env
    given = dict(entry.partition("=")[::2] for entry in entries if isinstance(entry, str))
    return {name: given.get(name, "") for name in _ASKING}


def _collective(arguments: Any) -> Collective | None:
    """The collective that the program measures, by its name."""
    program = str(arguments[0])[:200] if isinstance(arguments, list) and arguments else ""
    return find_collective(program.rsplit("/", 1)[-1])


def _observations(
    run: RunRanks,
    collective: Collective | None,
    results: Iterator[Any],
    settings: tuple[str, str],
    summary: Summary,
) -> Iterator[Observation]:
    if collective is None:
        summary.skip(LeftOut.unknown_program, sum(1 for _ in results))
        return
    counters = SequenceNumbers()
    forced = forced_setting(*settings, collective)
    for result in results:
        if not isinstance(result, Mapping):
            summary.skip(LeftOut.no_result)
            continue
        message_bytes, datatype = result.get("size"), result.get("type")
        if type(message_bytes) is not int or not 0 < message_bytes < 1 << 50:
            summary.skip(LeftOut.size_zero if message_bytes == 0 else LeftOut.impossible_size)
            continue
        for body_key, iterations_key in _BODIES:
            body = result.get(body_key)
            if isinstance(body, Mapping) and "cpu_time" in body:
                summary.skip(LeftOut.cpu_time)
                continue
            if isinstance(body, Mapping) and body.get("nwrong") not in (None, "N/A") and body["nwrong"] != 0:
                summary.skip(LeftOut.wrong_result)
                continue
            bandwidths, mean_us = list(_bandwidths(body)), body.get("time") if isinstance(body, Mapping) else None
            if bandwidths and _is_time(mean_us) and (wrong := contradiction(message_bytes, mean_us, bandwidths[0][0])):
                summary.skip(LeftOut.contradicting_time, 1, wrong)
                continue
            run.saw(bandwidths)
            for duration_us in _times(body, result.get(iterations_key), summary):
                yield Observation(
                    sequence=counters.next(0, collective),
                    collective=collective,
                    message_bytes=message_bytes,
                    n_ranks=0,
                    datatype=datatype if isinstance(datatype, str) else None,
                    algorithm=forced.algorithm,
                    protocol=forced.protocol,
                    duration_us=duration_us,
                    timing_source=TimingSource.reported,
                )


def _times(body: Any, iterations: Any, summary: Summary) -> Iterator[float]:
    times = iterations.get("times_us") if isinstance(iterations, Mapping) else None
    if not isinstance(times, list) or not times:
        times = [body.get("time")] if isinstance(body, Mapping) else []
    for time_us in times:
        if _is_time(time_us):
            yield float(time_us)
        else:
            summary.skip(LeftOut.row_without_time)


def _is_time(time_us: Any) -> TypeGuard[float]:
    return isinstance(time_us, int | float) and 0 < time_us < 1e12


def _bandwidths(body: Any) -> Iterator[tuple[float, float]]:
    """Algorithm and bus bandwidth; none if either is no number."""
    both = [body.get(name) for name in ("alg_bw", "bus_bw")] if isinstance(body, Mapping) else []
    known = [float(one) for one in both if isinstance(one, int | float) and 0 < one < _MOST_GBS]
    if len(known) > 1:
        yield known[0], known[1]


def _ranks(devices: Any, n_each: int) -> dict[int, tuple[int, str]]:
    """Rank -> its group and host. A file lists only each process's first rank, also with many GPUs or threads."""
    listed = (
        (first + place, (group if type(group := entry.get("group")) is int else 0, str(entry["hostname"])[:256]))
        for entry in _listed(devices)
        if type(first := entry["rank"]) is int and 0 <= first < MAX_RANKS
        for place in range(n_each)
    )
    return dict(itertools.islice(listed, _MOST_LISTED))


def _listed(devices: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The list of processes, wherever this version has it."""
    if isinstance(devices, Mapping) and "hostname" in devices and "rank" in devices:
        yield devices
    elif isinstance(devices, Mapping | list) and depth < 4:
        for value in devices.values() if isinstance(devices, Mapping) else devices:
            yield from _listed(value, depth + 1)

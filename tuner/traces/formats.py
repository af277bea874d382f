"""The formats that `read_trace` knows, in the order in which it tries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zerotune.store.errors import TraceError
from zerotune.tuner.traces.files import head
from zerotune.tuner.traces.nccl import (
    inspector,
    nccl_debug,
    nccl_tests,
    nccl_tests_json,
    profiler_events,
    summary_csv,
    tuner_csv,
)
from zerotune.tuner.traces.near_misses import near_miss
from zerotune.tuner.traces.own import blocks, measurements_csv
from zerotune.tuner.traces.pytorch import (
    chakra,
    execution_trace,
    flight_recorder,
    flight_recorder_pickle,
    kineto,
)
from zerotune.tuner.traces.records import Block, Summary
from zerotune.tuner.traces.refused import refusal


@dataclass(frozen=True)
class Format:
    """One kind of trace file."""

    name: str
    title: str
    matches: Callable[[bytes], bool]
    """Whether the first 64 KiB of a file (unpacked) are the beginning of such a trace."""
    read: Callable[[Path, Summary], Iterator[Block]]
    """The file's records; fills in the summary. Raises TraceError."""
    record: str
    """What a file without any record lacks."""


FORMATS: Final = (
    Format("zerotune", "our own trace (--log-trace)", blocks.matches, blocks.read, "collective"),
    Format(
        "flight_recorder",
        "PyTorch Flight Recorder, JSON",
        flight_recorder.matches,
        flight_recorder.read,
        "collective among its entries",
    ),
    Format(
        "flight_recorder_pickle",
        "PyTorch Flight Recorder, pickle",
        flight_recorder_pickle.matches,
        flight_recorder_pickle.read,
        "collective among its entries",
    ),
    Format("kineto", "Kineto / Chrome trace", kineto.matches, kineto.read, "collective among its events"),
    Format(
        "execution_trace",
        "PyTorch execution trace",
        execution_trace.matches,
        execution_trace.read,
        "collective among its nodes",
    ),
    Format("nccl_tests_json", "nccl-tests -J", nccl_tests_json.matches, nccl_tests_json.read, "result"),
    Format("inspector", "NCCL Inspector JSONL", inspector.matches, inspector.read, "line of a collective"),
    Format(
        "profiler_events",
        "NCCL profiler events, JSONL",
        profiler_events.matches,
        profiler_events.read,
        "collective among its events",
    ),
    Format("tuner_csv", "NVIDIA tuner CSV", tuner_csv.matches, tuner_csv.read, "row of one setting"),
    Format("measurements_csv", "our measurements as CSV", measurements_csv.matches, measurements_csv.read, "row"),
    Format(
        "summary_csv",
        "summary of collectives as CSV",
        summary_csv.matches,
        summary_csv.read,
        "row with a known collective, bytes and a time in microseconds",
    ),
    Format(
        "nccl_tests",
        "nccl-tests output",
        nccl_tests.matches,
        nccl_tests.read,
        "row of results (size, count, type, time, algbw, busbw)",
    ),
    Format(
        "nccl_debug",
        "NCCL_DEBUG log",
        nccl_debug.matches,
        nccl_debug.read,
        "line of a collective (NCCL_DEBUG_SUBSYS=COLL)",
    ),
    Format("chakra", "Chakra protobuf", chakra.matches, chakra.read, "collective among its nodes"),
)


def detect(path: Path) -> Format:
    """The format of the file at `path`; TraceError if it is none of FORMATS."""
    if not path.exists():
        raise TraceError(f"{path} does not exist", "name a trace file or a directory of them")
    if not path.is_file():
        raise TraceError(f"{path} is no regular file", "name a trace file or a directory of them")
    begin = head(path)
    if not begin:
        if n_bytes := path.stat().st_size:
            raise TraceError(f"{path} is cut at byte {n_bytes:,}, before anything can be unpacked", "copy it again")
        raise TraceError(f"{path} is empty", "name a trace file")
    refused = refusal(begin)
    if refused is not None and not tuner_csv.matches(begin):  # whose rows may look like those of rules
        raise TraceError(f"{path} {refused.what}", refused.remedy)
    for candidate in FORMATS:
        if candidate.matches(begin):
            return candidate
    almost = near_miss(begin)
    if almost is not None:
        raise TraceError(f"{path} {almost.what}", almost.remedy)
    raise TraceError(
        f"{path} is no trace of a known format",
        f"use one of {', '.join(one.name for one in FORMATS)}; where its beginning does not show it, `import`, "
        "`replay` and `stage test` take --format",
    )


def by_name(name: str) -> Format:
    """The format called `name`; TraceError with the known names otherwise."""
    for candidate in FORMATS:
        if candidate.name == name:
            return candidate
    raise TraceError(f"there is no trace format {name!r}", f"use one of {', '.join(f.name for f in FORMATS)}")

"""The formats that `read_trace` knows, in the order in which it tries them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from store.errors import TraceError
from tuner.traces import (
    chakra,
    execution_trace,
    flight_recorder,
    flight_recorder_pickle,
    inspector,
    kineto,
    measurements_csv,
    nccl_debug,
    nccl_tests,
    nccl_tests_json,
    own_blocks,
    param_comms,
    profiler_events,
    tuner_csv,
)
from tuner.traces.files import head
from tuner.traces.records import Block, Summary
from tuner.traces.refused import refusal


@dataclass(frozen=True)
class Format:
    """One kind of trace file."""

    name: str
    title: str
    matches: Callable[[bytes], bool]
    """Whether the first 64 KiB of a file (unpacked) begin such a trace."""
    read: Callable[[Path, Summary], Iterator[Block]]
    """The file's records; fills in the summary. Raises TraceError."""


FORMATS: Final = (
    Format("zerotune", "our own trace (--log-trace)", own_blocks.matches, own_blocks.read),
    Format("flight_recorder", "PyTorch Flight Recorder, JSON", flight_recorder.matches, flight_recorder.read),
    Format(
        "flight_recorder_pickle",
        "PyTorch Flight Recorder, pickle",
        flight_recorder_pickle.matches,
        flight_recorder_pickle.read,
    ),
    Format("kineto", "Kineto / Chrome trace", kineto.matches, kineto.read),
    Format("execution_trace", "PyTorch execution trace", execution_trace.matches, execution_trace.read),
    Format("nccl_tests_json", "nccl-tests -J", nccl_tests_json.matches, nccl_tests_json.read),
    Format("param_comms", "PARAM comms trace", param_comms.matches, param_comms.read),
    Format("inspector", "NCCL Inspector JSONL", inspector.matches, inspector.read),
    Format("profiler_events", "NCCL profiler events, JSONL", profiler_events.matches, profiler_events.read),
    Format("tuner_csv", "NVIDIA tuner CSV", tuner_csv.matches, tuner_csv.read),
    Format("measurements_csv", "our measurements as CSV", measurements_csv.matches, measurements_csv.read),
    Format("nccl_tests", "nccl-tests output", nccl_tests.matches, nccl_tests.read),
    Format("nccl_debug", "NCCL_DEBUG log", nccl_debug.matches, nccl_debug.read),
    Format("chakra", "Chakra protobuf", chakra.matches, chakra.read),
)


def detect(path: Path) -> Format:
    """The format of the file at `path`; TraceError if it is none of FORMATS."""
    if not path.exists():
        raise TraceError(f"{path} does not exist", "name a trace file or a directory of them")
    if not path.is_file():
        raise TraceError(f"{path} is no regular file", "name a trace file or a directory of them")
    begin = head(path)
    if not begin:
        raise TraceError(f"{path} is empty", "name a trace file")
    refused = refusal(begin)
    if refused is not None:
        raise TraceError(f"{path} {refused.what}", refused.remedy)
    for candidate in FORMATS:
        if candidate.matches(begin):
            return candidate
    raise TraceError(
        f"{path} is no trace of a known format",
        f"use one of {', '.join(one.name for one in FORMATS)}; where its beginning does not tell it, `import` and "
        "`replay` take --format",
    )


def by_name(name: str) -> Format:
    """The format called `name`; TraceError with the known names otherwise."""
    for candidate in FORMATS:
        if candidate.name == name:
            return candidate
    raise TraceError(f"there is no trace format {name!r}", f"use one of {', '.join(f.name for f in FORMATS)}")

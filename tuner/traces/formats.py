"""The formats of `read_trace`, in the order of trying them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from ...store.errors import TraceError
from .files import head
from .nccl import inspector, nccl_debug, nccl_tests, nccl_tests_json, profiler_events, summary_csv, tuner_csv
from .own import measurements_csv, reader
from .pytorch import chakra, execution_trace, flight_recorder, flight_recorder_pickle, kineto
from .records import Block, Summary
from .refused import near_miss, refusal


@dataclass(frozen=True)
class Format:
    """One kind of trace file."""

    name: str
    title: str
    matches: Callable[[bytes], bool]
    """Whether the first 64 KiB of a file (unpacked) begin a trace of this format."""
    read: Callable[[Path, Summary], Iterator[Block]]
    """Yields the file's records, and fills in the summary."""
    record: str
    """One record of this format, in words."""


def _format(name: str, title: str, module: ModuleType, record: str) -> Format:
    return Format(name, title, module.matches, module.read, record)


FORMATS: Final = (
    _format("zerotune", "our own trace (--log-trace)", reader, "collective"),
    _format("flight_recorder", "PyTorch Flight Recorder, JSON", flight_recorder, "collective among its entries"),
    _format(
        "flight_recorder_pickle", "PyTorch Flight Recorder, pickle", flight_recorder_pickle,
        "collective among its entries",
    ),
    _format("kineto", "Kineto / Chrome trace", kineto, "collective among its events"),
    _format("execution_trace", "PyTorch execution trace", execution_trace, "collective among its nodes"),
    _format("nccl_tests_json", "nccl-tests -J", nccl_tests_json, "result"),
    _format("inspector", "NCCL Inspector JSONL", inspector, "line of a collective"),
    _format("profiler_events", "NCCL profiler events, JSONL", profiler_events, "collective among its events"),
    _format("tuner_csv", "NVIDIA tuner CSV", tuner_csv, "row of one setting"),
    _format("measurements_csv", "our measurements as CSV", measurements_csv, "row"),
    _format(
        "summary_csv", "summary of collectives as CSV", summary_csv,
        "row with a known collective, bytes and a time in microseconds",
    ),
    _format("nccl_tests", "nccl-tests output", nccl_tests, "row of results (size, count, type, time, algbw, busbw)"),
    _format("nccl_debug", "NCCL_DEBUG log", nccl_debug, "line of a collective (NCCL_DEBUG_SUBSYS=COLL)"),
    _format("chakra", "Chakra protobuf", chakra, "collective among its nodes"),
)  # fmt: skip


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
    if refused is not None and not tuner_csv.matches(begin):  # its rows may look like rules
        raise TraceError(f"{path} {refused.what}", refused.remedy)
    for candidate in FORMATS:
        if candidate.matches(begin):
            return candidate
    almost = near_miss(begin)
    if almost is not None:
        raise TraceError(f"{path} {almost.what}", almost.remedy)
    raise TraceError(
        f"{path} is no trace of a known format",
        f"use one of {', '.join(one.name for one in FORMATS)}; where its beginning does not show it,"
        " `store import`, `replay` and `explain --trace` take --format",
    )


def by_name(name: str) -> Format:
    """The format named `name`; TraceError with the known names if there is none."""
    for candidate in FORMATS:
        if candidate.name == name:
            return candidate
    raise TraceError(f"there is no trace format {name!r}", f"use one of {', '.join(f.name for f in FORMATS)}")

"""Our own traces (`zerotune launch --log-trace`) among the formats; tuner/traces/own/reader.py reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from zerotune.store.trace_format import TRACE_FORMAT, RecordBlock, TraceEnd, TraceHeader
from zerotune.tuner.traces.left_out import LeftOut
from zerotune.tuner.traces.own.reader import iter_members, record_array
from zerotune.tuner.traces.records import Block, Summary

_MARK_WITHIN: Final = 128


def matches(begin: bytes) -> bool:
    """Our header names the format in its first field."""
    return TRACE_FORMAT.encode() in begin[:_MARK_WITHIN]


def read(path: Path, summary: Summary) -> Iterator[Block]:
    """The records of one rank's file; steps are left to `own.read_own`."""
    ended = False
    for member in iter_members(path):
        if isinstance(member, TraceHeader):
            summary.facts.setdefault("fabric_id", member.fabric_id)
            summary.facts.setdefault("job_id", member.job_id)
        elif isinstance(member, RecordBlock):
            yield record_array(member, path)
        elif isinstance(member, TraceEnd):
            ended = True
            summary.skip(LeftOut.lost, member.n_dropped)
    if not ended:
        summary.fault(f"{path.name} ends early: its process did not end in good order")

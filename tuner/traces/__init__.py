"""Reads traces and measurements of other tools: `read_trace(path)`.

Each format has one file; docs/reference/formats.md has the table. Only these files know how a format counts bytes; they
convert counts to NCCL's total message bytes. All readers raise TraceError for a file that is damaged or cannot be read.
"""

from __future__ import annotations

from .records import OBSERVATION, Summary
from .trace import Trace, read_trace

__all__ = ["OBSERVATION", "Summary", "Trace", "read_trace"]

"""Reads traces and measurements of other tools: `read_trace(path)`.

One file per format; docs/reference/formats.md has the table. Byte counts are normalised to NCCL's total message
bytes at this edge, the only place that knows each format's convention.
"""

from __future__ import annotations

from .records import OBSERVATION, Summary
from .trace import Trace, read_trace

__all__ = ["OBSERVATION", "Summary", "Trace", "read_trace"]

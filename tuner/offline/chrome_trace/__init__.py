"""A recorded job as Chrome Trace Event JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from .export import export_chrome_trace

__all__ = ["export_chrome_trace"]

"""One self-contained HTML page about a job: its settings, their gain, and how far to trust that."""

from __future__ import annotations

from .facts import gather
from .page import write_page

__all__ = ["gather", "write_page"]

"""One self-contained HTML page about a job: what was tuned, what came of it, and how far to trust that."""

from __future__ import annotations

from zerotune.tuner.offline.report.facts import gather
from zerotune.tuner.offline.report.page import write_page

__all__ = ["gather", "write_page"]

"""How one step of a run ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How one step ended: `ok`, `failed` (it ran and something is not as it must be), `error`, `skipped`."""

    step: str
    outcome: str
    seconds: float
    timeout_s: float
    results: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

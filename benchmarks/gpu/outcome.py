from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How one step ended: `ok`, `failed` (it ran and a result is wrong), `error`, `skipped`."""

    step: str
    outcome: str
    seconds: float
    timeout_s: float
    results: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

"""What the agent tells of one rank's agreement, and the faults that it can be asked for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from zerotune.agent import activate

FAULT_AGREEMENT: Final = "ZEROTUNE_FAULT_AGREEMENT"
"""Environment variable: what befalls the agreement's own thread."""
PAUSE_S: Final = 5
"""How long a thread or a rank stands still."""
PAUSED: Final = f"pause:{PAUSE_S}@1"
"""The thread stands still at its first change."""
FAULT_STORE: Final = "ZEROTUNE_FAULT_STORE"
"""Environment variable: what befalls the agreement's requests to the job's store."""
FAILING: Final = "fail:1@2"
"""The second request fails, once."""


def counters() -> dict[str, Any] | None:
    """This rank's counters at the end of its script.

    Returns:
        `n_changes`, `n_adopted`, `n_store_requests`, `n_requests_at_rest`, `n_waits`, `longest_wait_us` and `state`;
        None: the agent is off, or does not tell.
    """
    installed = activate.installed
    tell = getattr(installed.session, "agreement_counters", None) if installed is not None else None
    told = tell() if tell is not None else None
    return None if told is None else asdict(told)

"""What the agent tells of one rank's agreement, and the faults that it can be asked for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from zerotune.agent import activate

FAULT: Final = "ZEROTUNE_FAULT_AGREEMENT"
"""Environment variable: what befalls the agreement."""
PAUSE_S: Final = 5
"""How long a thread or a rank stands still."""
PAUSED: Final = f"pause:{PAUSE_S}@1"
"""The agreement's own thread stands still at its first change."""
FAILING: Final = "fail:2"
"""Its second request to the job's store fails, once."""


def counters() -> dict[str, Any] | None:
    """This rank's counters at the end of its script.

    Returns:
        The fields of `AgreementCounters`;
        None: the agent is off, or does not tell.
    """
    installed = activate.installed
    tell = getattr(installed.session, "agreement_counters", None) if installed is not None else None
    told = tell() if tell is not None else None
    return None if told is None else asdict(told)

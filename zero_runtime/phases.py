"""Reports each collective's phase to a listener; without one this costs one call of an empty function.

The phase is one of `forward_gather`, `backward_gather`, `gradient_scatter`,
`post_step_gather` and `other`, and is reported right before the collective is issued.
"""

from __future__ import annotations

from collections.abc import Callable

FORWARD_GATHER = "forward_gather"
BACKWARD_GATHER = "backward_gather"
GRADIENT_SCATTER = "gradient_scatter"
POST_STEP_GATHER = "post_step_gather"
OTHER = "other"


def _ignore(phase: str) -> None:
    """The default listener, which does nothing."""


_listener: Callable[[str], None] = _ignore


def set_listener(listener: Callable[[str], None] | None) -> None:
    """Calls `listener(phase)` before every collective from now on; None stops it."""
    global _listener
    _listener = listener or _ignore


def announce(phase: str) -> None:
    """Reports the phase of the next collective to the listener."""
    _listener(phase)

"""Says where in the step a collective is, to a listener; without one it costs one call of an empty function.

A collective's phase is one of `forward_gather`, `backward_gather`, `gradient_scatter`,
`post_step_gather` and `other`, announced right before it is issued.
"""

from __future__ import annotations

from collections.abc import Callable

FORWARD_GATHER = "forward_gather"
BACKWARD_GATHER = "backward_gather"
GRADIENT_SCATTER = "gradient_scatter"
POST_STEP_GATHER = "post_step_gather"
OTHER = "other"
PHASES = (FORWARD_GATHER, BACKWARD_GATHER, GRADIENT_SCATTER, POST_STEP_GATHER, OTHER)


def _ignore(phase: str) -> None:
    """The listener that does nothing."""


_listener: Callable[[str], None] = _ignore


def set_listener(listener: Callable[[str], None] | None) -> None:
    """Calls `listener(phase)` before every collective from now on; None stops it."""
    global _listener
    _listener = listener or _ignore


def announce(phase: str) -> None:
    """Tells the listener the phase of the next collective."""
    _listener(phase)

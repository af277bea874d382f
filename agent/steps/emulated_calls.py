"""Finds which steps exchanged something, in a job on the emulated NCCL without the plugin."""

from __future__ import annotations

from ..nccl.emulated import journal
from ..nccl.library import NO_CALLS


class EmulatedCalls:
    """Replaces the plugin as a `StepCounter`, so that steps are counted as with the agent."""

    def __init__(self) -> None:
        self._n_calls = 0

    def set_step(self, step: int) -> int:
        """A step has ended: 0, NCCL's own choice, or NO_CALLS."""
        n_before, self._n_calls = self._n_calls, journal().n_calls
        return 0 if self._n_calls > n_before else NO_CALLS

    def set_observing(self, on: bool) -> None:
        """Does nothing: calls are not timed."""

    def set_capturing(self, on: bool) -> None:
        """Does nothing: calls are not timed."""

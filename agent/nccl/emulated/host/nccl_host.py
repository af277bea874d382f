"""Who is NCCL for a communicator: its own library on the mock CUDA (library/), or our model of it (model/)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from zerotune.agent.nccl.emulated.host.calls import Decision, FusedTasks, IssuedCall
from zerotune.agent.nccl.release import Release
from zerotune.store.records import Candidate


class NcclHost(Protocol):
    """NCCL for one communicator on one rank."""

    release: Release
    has_windows: bool
    """Whether buffers can be registered for symmetric kernels."""

    def decide(self, fused_groups: Sequence[FusedTasks], n_tasks: int, *, captured: bool) -> list[Decision]:
        """Let NCCL take one group of collectives.

        Args:
            fused_groups: tasks by decision: those in one entry share a setting.
            n_tasks: collectives of the group.
            captured: they become part of a CUDA graph.

        Returns:
            One decision for each; the baseline where NCCL has no choice.

        Raises:
            EmulatedNcclError: NCCL or the plugin failed the group.
        """

    def enqueued(self, calls: Sequence[IssuedCall], captured: Any | None = None) -> None:
        """One group was issued; `captured` is what `begin_capture` made of it, when a graph is replayed."""

    def begin_capture(self, decided: Sequence[tuple[FusedTasks, Candidate]]) -> Any | None:
        """A graph captures one group."""

    def ran(self, call: IssuedCall, start_us: float, end_us: float) -> None:
        """A call's kernel ran.

        Args:
            call: whose kernel it was.
            start_us: on the virtual clock.
            end_us: on the virtual clock.
        """

    def close(self, *, failed: bool) -> None:
        """The communicator is destroyed; one that failed is aborted, since its ranks may not meet any more."""

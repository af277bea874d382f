"""The plan in force on this rank: loads plans into the plugin's inactive table and flips."""

from __future__ import annotations

from typing import Protocol

from zerotune.store.errors import RankDisagreement
from zerotune.store.records import Plan


class PlanHolder(Protocol):
    """The part of `zerotune.agent.nccl.library.Plugin` that plans need."""

    def load_plan(self, plan: Plan) -> None:
        """Build the inactive table.

        Raises:
            PlanError: the plan is not one that NCCL could follow.
        """

    def flip(self, epoch: int) -> bool:
        """Put the loaded table in force; False when `epoch` is not what was loaded."""

    def active_epoch(self) -> int:
        """Epoch of the plan in force."""


class PlanTable:
    """One plan in force, at most one loaded. `load` runs in the background, `flip` while training."""

    def __init__(self, plugin: PlanHolder) -> None:
        self._plugin = plugin
        self._loaded: Plan | None = None

    @property
    def active_epoch(self) -> int:
        """Epoch of the plan in force."""
        return self._plugin.active_epoch()

    def load(self, plan: Plan) -> None:
        """Make `plan` ready to flip to; loading the same plan again costs nothing.

        Raises:
            PlanError: the plan is not one that NCCL could follow.
        """
        if self._loaded == plan:
            return
        self._loaded = None
        self._plugin.load_plan(plan)
        self._loaded = plan

    def flip(self, epoch: int) -> None:
        """Put the loaded plan in force: one atomic store.

        Raises:
            RankDisagreement: it is not there, so this rank would run on under another plan than its
                peers, which hangs or corrupts a real NCCL job.
        """
        if not self._plugin.flip(epoch):
            raise RankDisagreement(f"the plan of epoch {epoch}, which all ranks adopt now, is not loaded on this rank")
        self._loaded = None

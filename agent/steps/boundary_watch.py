"""Says so when training runs and no step is ever seen to end: then nothing can be tuned.

Where a script updates its parameters by hand, or its optimizer steps inside backward, torch's hooks see no step
boundary. Costs training nothing: a thread looks at the plugin's counter, and only until the first boundary.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch.distributed as dist

from zerotune.agent.daemon_link.channel import Channel
from zerotune.agent.settings import AgentSettings, is_first_of_node
from zerotune.store import wire

logger = logging.getLogger("zerotune.agent")

LEAST_CALLS: Final = 1000
LEAST_S: Final = 60.0
"""A first step may be long and have many collectives: this time and that many calls must both have passed."""
LOOK_EVERY_S: Final = 5.0
TELL_EVERY_S: Final = 2.0
STOPPING_S: Final = 1.5
"""How long the end of the process may wait for the thread."""


class Counting(Protocol):
    """The part of zerotune.agent.nccl.library.Plugin that is read here."""

    def n_calls(self) -> int:
        """Collectives of this process so far."""


class BoundaryWatch:
    """One rank's watch; the first rank of each node speaks for its node.

    Args:
        settings: where the daemon is, and how the job is called.
        plugin: counts collectives.
    """

    def __init__(self, settings: AgentSettings, plugin: Counting) -> None:
        self._settings = settings
        self._plugin = plugin
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._began_s = 0.0
        self._n_ranks = 0
        self._has_told = False

    def begin(self) -> None:
        """Training has started: from now on steps should end. May be called often."""
        if self._thread is not None or self._over.is_set() or not dist.is_available() or not dist.is_initialized():
            return
        self._n_ranks = dist.get_world_size()
        if self._n_ranks == 1 or not is_first_of_node():
            self._over.set()
            return
        self._began_s = time.monotonic()
        thread = threading.Thread(target=self._run, name="zerotune-watch", daemon=True)
        thread.start()
        self._thread = thread

    @property
    def has_begun(self) -> bool:
        """Whether training did something in this process, which speaks for its node."""
        return self._thread is not None

    def boundary(self) -> None:
        """A step has ended: there is nothing more to watch."""
        self._over.set()
        if self._has_told:
            logger.warning("zerotune: a step has ended after all: tuning begins")

    def close(self) -> None:
        """At exit: the last chance to warn."""
        if self._thread is None or self._over.is_set():
            return
        self._over.set()
        self._thread.join(STOPPING_S)
        if self._plugin.n_calls() >= LEAST_CALLS:
            self._tell()

    # ---- outbox of the channel ---------------------------------------------------------------

    def tick_s(self) -> float:
        """Until the daemon is told again."""
        return TELL_EVERY_S

    def collect(self) -> Sequence[tuple[wire.AgentMessage, Any]]:
        """What the daemon is told, while it is true."""
        return [] if self._over.is_set() else [(self._finding(), None)]

    # ---- inside ------------------------------------------------------------------------------

    def _run(self) -> None:
        while time.monotonic() - self._began_s < LEAST_S or self._plugin.n_calls() < LEAST_CALLS:
            if self._over.wait(LOOK_EVERY_S):
                return
        self._tell()
        if self._settings.plan_path is not None:
            return  # no daemon is asked
        channel = Channel(self._settings.endpoint, lambda: None, self, lambda _: None, lambda _: None)
        channel.start()
        self._over.wait()
        channel.close()

    def _tell(self) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning("zerotune: %s", self._finding().describe())

    def _finding(self) -> wire.NoSteps:
        waited_s = time.monotonic() - self._began_s
        return wire.NoSteps(self._settings.job_id, self._n_ranks, self._plugin.n_calls(), waited_s)

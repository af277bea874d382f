"""One rank's part in one job: agreement with the other ranks, and messages to the daemon.

A process has at most one membership at a time. It begins when the first communicator of several ranks is made. When the
script makes a new default group, another membership replaces it. `collect`, `_on_message` and `_on_alive` run on the
channel's thread.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ..store import wire
from ..store.job_options import JobOptions
from ..store.plan_file import read_plan
from ..store.records import Plan
from .agreement import Agreement
from .agreement.news import DaemonState, NewCommunicator, Notified, Offered, PollFor, Withdrawn
from .agreement.protocol import Why
from .daemon_link.channel import Channel
from .daemon_link.cost_table_cache import CostTableCache
from .daemon_link.job_id import AgreedJobId
from .daemon_link.leader import LeaderAddress
from .job_store import open_job_store
from .machine import identity
from .machine.launchers import local_rank
from .nccl.catalog import ASKS_CHUNK_SIZE_SINCE, COMPUTING
from .nccl.library import Plugin
from .nccl.release import Release, release
from .observing.memory import DeviceMemory
from .observing.ring import RecordDrain
from .observing.trace_log import TraceLog
from .reasons import Reason
from .settings import AgentSettings, is_first_of_node
from .steps.step_queue import StepQueue
from .steps.step_timer import StepTimer
from .world import World

logger = logging.getLogger("zerotune.agent")

MEMORY_EVERY_S: Final = 2.0
BUSY_S: Final = 2.0
"""How long after its start and after each new plan the agent reports at every tick."""
TABLES_EVERY_HELLOS: Final = 32
"""All cost tables are sent again after so many Hellos: the daemon may have dropped a job that made no progress."""
QUIET_TICKS: Final = 4
"""Ticks between reports when nothing changes: each report costs the step some microseconds."""
FILE_PLAN_POLL_S: Final = 60.0
"""How long a rank polls for a plan from a file, after its start and after each new communicator."""
LAST_PATIENCE_S: Final = 3.0
"""How long the end of a traced job waits for the channel's thread to write its records."""
WITHDRAW_AFTER_S: Final = 60.0
"""NCCL's own choice replaces a plan after the daemon was silent for this long."""


class Membership:
    """This rank as a member of the job."""

    def __init__(
        self,
        settings: AgentSettings,
        plugin: Plugin,
        timer: StepTimer,
        queue: StepQueue,
        costs: CostTableCache,
        world: World,
        fabric_id: str,
        fabric: identity.Description,
        device_memory: DeviceMemory,
    ) -> None:
        self._settings = settings
        self._plugin = plugin
        self._timer = timer
        self._queue = queue
        self._costs = costs
        self._rank = rank = world.rank
        self._world_size = world.n_ranks
        self._fabric_id = fabric_id
        self._fabric = fabric
        self._device_memory = device_memory
        self._sample_memory_at = 0.0
        self._job_id = settings.job_id
        self._epoch = self._epoch_elsewhere = self._highest_epoch = 0
        self._n_communicators = 0
        self._is_closing = False
        self._has_warned_of_silence = False
        self._has_logged_return = False
        self._silent_since_s: float | None = None
        self.has_answered = False
        """Whether a daemon has answered at some time."""
        self.shadow = ""
        """Changes that a daemon in shadow mode would have made; empty: it is not in shadow mode."""
        self._drain: RecordDrain | None = None
        self._trace_log: TraceLog | None = None
        self._hello_message: wire.Hello | None = None
        self._n_hellos = 0
        self._daemon_pid: int | None = None
        self._is_daemon_new = False
        self._bells: list[int] = []
        self._leader: LeaderAddress | None = None
        # For the channel's thread differing: the agreement's thread has another connection.
        self._agreed_id = AgreedJobId(open_job_store(world.store), rank, settings.job_id)
        plugin.set_recording(rank == 0 or settings.trace_dir is not None)
        has_daemon = settings.plan_path is None
        self.agreement = Agreement(
            open_job_store(world.store),
            rank,
            world.n_ranks,
            plugin,
            self._notify_ranks,
            fingerprint=_fingerprint(plugin),
        )
        self._channel = Channel(
            settings.endpoint if has_daemon else None, self._hello, self, self._on_message, self._on_alive
        )
        if settings.plan_path is not None:
            self.agreement.post(PollFor(FILE_PLAN_POLL_S))
            if rank == 0:
                self._offer(read_plan(settings.plan_path).plan)
        self._busy_until = time.monotonic() + BUSY_S
        self._channel.start()

    @property
    def job_id(self) -> str:
        """The job's id; a likely one until rank 0's is known."""
        return self._agreed_id.likely()

    @property
    def is_silent(self) -> bool:
        """Whether the daemon that had answered no longer does."""
        return self.has_answered and not self._channel.alive

    @property
    def questions(self) -> Sequence[tuple[int, ...]]:
        """(ranks, nodes, collective, bytes) for which NCCL asked the tuner."""
        return self._costs.questions

    def reasons(self) -> list[tuple[Reason, str]]:
        """Why communicators are not tuned, as far as the agreement knows."""
        counters = self.agreement.counters()
        if counters.state == "off":
            return [(Reason.frozen, "ranks differ in versions")]
        if counters.state == "starting" and self._world_size > 1 and time.monotonic() > self._busy_until:
            return [(Reason.frozen, "not all ranks of the job had met; do all have the agent?")]
        differing = [key for key, why in counters.left_out if why == Why.histories_differ.name]
        return [(Reason.frozen, f"communicator {key}: {Why.histories_differ.value}") for key in differing]

    def _offer(self, plan: Plan) -> None:
        """Under --numerics exact, rows of collectives that compute are dropped, also those of a plan file."""
        self.agreement.post(Offered(plan.without(COMPUTING) if self._settings.is_exact else plan))

    # ---- agreement's thread ------------------------------------------------------------------

    def _notify_ranks(self, number: int) -> None:
        """Have the daemons notify the other ranks of a change."""
        self._bells.append(number)
        self._channel.wake()

    # ---- channel's thread --------------------------------------------------------------------

    def tick_s(self) -> float:
        """Seconds until the next report: short while the daemon is learning, longer after that."""
        if self._is_daemon_new or (self._bells and self._drain is not None):
            return 0.0
        is_busy = time.monotonic() < self._busy_until
        return self._settings.tick_ms / 1000 * (1 if is_busy else QUIET_TICKS)

    def collect(self) -> list[tuple[wire.AgentMessage, Any]]:
        """Messages for the daemon. It also samples memory pressure and detects new communicators."""
        now = time.monotonic()
        if now >= self._sample_memory_at:
            self._sample_memory_at = now + MEMORY_EVERY_S
            self._timer.pressure = pressure = self._device_memory.pressure()
            if self._drain is not None:
                self._drain.cached_share = self._device_memory.cached_share()
            self._plugin.set_memory_pressure(-1.0 if pressure is None else pressure)
        if self._silent_since_s is not None and now - self._silent_since_s > WITHDRAW_AFTER_S:
            self._silent_since_s = None
            self.agreement.post(Withdrawn())
        if self._drain is None:
            return []
        if (n_communicators := self._plugin.counters().n_communicators) > self._n_communicators:
            self._n_communicators = n_communicators
            self.agreement.post(NewCommunicator())
            if self._settings.plan_path is not None:
                self.agreement.post(PollFor(FILE_PLAN_POLL_S))
            elif self._rank:
                self._bells.append(0)
        if self._is_daemon_new:
            self._is_daemon_new = False
            self._drain.costs.resend_all()
        bells: list[tuple[wire.AgentMessage, Any]] = []
        while self._bells:
            bells.append((wire.Bell(self._job_id, self._bells.pop(0)), None))
        if self._rank == 0 and self.agreement.epoch_elsewhere > self._epoch_elsewhere:
            self._epoch_elsewhere = self.agreement.epoch_elsewhere
            self._queue.adopt(self._epoch_elsewhere, self._timer.step)
        self._timer.report_from_other_thread()
        return [*bells, *self._drain.collect()]

    def _hello(self) -> wire.Hello | None:
        """The Hello message; None until rank 0's job id is known."""
        plugin = self._plugin
        if self._drain is None:
            store = self._agreed_id.learn(self.agreement.incarnation)
            if store is None:
                return None
            self._leader = LeaderAddress(store, self._rank, is_first_of_node=is_first_of_node())
            self._drain = self._open_drain(self._agreed_id.likely())
        # A daemon that restarts must number its plans above all earlier ones.
        epoch = max(plugin.active_epoch(), self._highest_epoch)
        leader = self._leader.look_up() if self._leader is not None else ""
        if self._hello_message is None:
            self._hello_message = wire.Hello(
                job_id=self._job_id,
                rank=self._rank,
                n_ranks=self._world_size,
                local_rank=local_rank(os.environ),
                node=socket.gethostname(),
                pid=os.getpid(),
                fabric_id=self._fabric_id,
                fabric=self._fabric,
                nccl_version=identity.nccl_version(),
                tuner_abi=plugin.tuner_abi(),
                epoch=epoch,
                leader=leader,
                name=self._settings.job_name,
                options=_options(self._settings),
            )
        elif (self._hello_message.epoch, self._hello_message.leader) != (epoch, leader):
            self._hello_message = msgspec.structs.replace(self._hello_message, epoch=epoch, leader=leader)
        self._n_hellos += 1
        # The tables follow the Hello, before any records from which the daemon could draw conclusions.
        if self._daemon_pid is None or self._n_hellos % TABLES_EVERY_HELLOS == 0:
            self._drain.costs.resend_all()
        return self._hello_message

    def _open_drain(self, job_id: str) -> RecordDrain:
        """From now on all records and steps, also earlier ones, are logged and sent."""
        self._job_id = job_id
        if self._settings.trace_dir is not None:
            self._trace_log = TraceLog(
                self._settings.trace_dir,
                job_id=job_id,
                rank=self._rank,
                n_ranks=self._world_size,
                fabric_id=self._fabric_id,
                fabric=self._fabric,
                version=importlib.metadata.version("zerotune"),
            )
        self._costs.resend_all()
        return RecordDrain(self._plugin, job_id, self._rank, self._queue, self._trace_log, self._costs)

    def _on_message(self, message: wire.DaemonMessage) -> None:
        if isinstance(message, wire.Welcome) and self._leader is not None:
            self._leader.publish(message.listen)
            # Another pid: a new daemon replaced the old one before its absence was noticed.
            self._is_daemon_new = self._daemon_pid not in (None, message.daemon_pid)
            self._daemon_pid = message.daemon_pid
            self.shadow = message.shadow
        elif isinstance(message, wire.PlanOffer):
            if message.job_id == self._job_id:
                if message.plan.last_epoch > self._highest_epoch:
                    self._highest_epoch = message.plan.last_epoch
                    self._busy_until = time.monotonic() + BUSY_S
                self._offer(message.plan)
        elif isinstance(message, wire.Bell):
            if message.job_id == self._job_id:
                self.agreement.post(Notified(message.number))
        elif isinstance(message, wire.Observe) and self._trace_log is None:
            self._timer.observe(message.n_steps)

    def _on_alive(self, alive: bool) -> None:
        endpoint = self._settings.endpoint
        logger.info("zerotune: daemon at %s %s", endpoint, "answers" if alive else "is silent")
        self.agreement.post(DaemonState(alive))
        self.has_answered |= alive
        self._silent_since_s = None if alive else time.monotonic()
        if not alive:
            self._daemon_pid = None
        if not (alive or self._is_closing or self._has_warned_of_silence) and is_first_of_node():
            self._has_warned_of_silence = True
            logger.warning(
                "zerotune: the daemon at %s is silent: tuning pauses; unless one answers, the settings in force"
                " give way to NCCL's own choice in a while",
                endpoint,
            )
        elif alive and self._has_warned_of_silence and not self._has_logged_return:
            self._has_logged_return = True
            logger.warning("zerotune: the daemon at %s answers again: tuning goes on", endpoint)

    # ---- end ---------------------------------------------------------------------------------

    def close(self, failure: str) -> None:
        """Send Goodbye and stop all threads; `failure` is the type of the exception that ended the script, or empty."""
        self._is_closing = True
        self._channel.close(wire.Goodbye(self._agreed_id.likely(), self._rank, failure))
        self.agreement.close()
        if self._settings.trace_dir is not None:
            if self._drain is None:  # the job ended before rank 0's job id was known
                self._drain = self._open_drain(self._agreed_id.likely())
            self._drain.collect(LAST_PATIENCE_S)
        if self._trace_log is not None:
            self._trace_log.close()


def _options(settings: AgentSettings) -> JobOptions:
    """The options for the daemon, with `chunk_sizes` only if this NCCL asks for chunk sizes. Needs no communicator."""
    options, version = settings.job_options, identity.nccl_version()
    if not options.chunk_sizes:
        return options
    nccl = Release((version // 10_000, version // 100 % 100)) if settings.fabric is None else release(os.environ)
    return msgspec.structs.replace(options, chunk_sizes=nccl.tuner_abi >= ASKS_CHUNK_SIZE_SINCE)


def _fingerprint(plugin: Plugin) -> str:
    """Versions that must be equal on all ranks."""
    layout_and_abi = f"{plugin.layout_version()}/{plugin.tuner_abi()}"
    asked = " chunks" if plugin.asks_chunk_sizes() else ""
    return f"nccl={identity.nccl_version()} plugin={layout_and_abi} next={plugin.next_tuner()}{asked}"

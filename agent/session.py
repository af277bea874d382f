"""One training process under tuning: hooks in, plugin and daemon out.

The training thread runs `on_region` and `on_boundary` only. What goes wrong in them is logged once and
counted; only `RankDisagreement` reaches the script, since the job would hang or compute garbage.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from zerotune.agent import ending, fabric_identity, first_group
from zerotune.agent.agreement import Agreement
from zerotune.agent.agreement.plan_table import PlanTable
from zerotune.agent.daemon_link.channel import Channel
from zerotune.agent.daemon_link.job_id import AgreedJobId
from zerotune.agent.daemon_link.leader import LeaderAddress
from zerotune.agent.emulation import BACKEND, uses_nccl
from zerotune.agent.job_store import open_job_store
from zerotune.agent.nccl import other_plugins
from zerotune.agent.nccl.library import Counters, Plugin
from zerotune.agent.observing import memory
from zerotune.agent.observing.ring import RecordDrain
from zerotune.agent.observing.trace_log import TraceLog
from zerotune.agent.settings import AgentSettings, is_first_of_node
from zerotune.agent.steps.boundary_watch import BoundaryWatch
from zerotune.agent.steps.clock import TrainingClock, WallClock, training_clock
from zerotune.agent.steps.recent_steps import RecentSteps
from zerotune.agent.steps.step_queue import StepQueue
from zerotune.agent.steps.summary import SummaryWriter
from zerotune.store import wire
from zerotune.store.plan_file import read_plan
from zerotune.store.records import Plan, StepRecord

logger = logging.getLogger("zerotune.agent")

MEMORY_EVERY_S = 2.0
BUSY_S = 2.0
"""How long after its start and after each new plan the agent reports at every tick."""
TABLES_EVERY_GREETINGS = 32
"""How often a known daemon gets all cost tables again: it may have dropped a job that made no progress."""
QUIET_TICKS = 4
"""Ticks between reports when nothing changes: each costs the step some microseconds."""


class Session:
    """Everything the agent keeps between `activate` and the end of the process.

    Args:
        settings: what the environment said.
        plugin: the tuner plugin, or None: then steps are only counted for the summary.
    """

    def __init__(self, settings: AgentSettings, plugin: Plugin | None) -> None:
        self._settings = settings
        self._plugin = plugin
        self._clock: TrainingClock = WallClock()
        self._summary = SummaryWriter(settings.summary_path) if settings.summary_path else None
        self._watch = BoundaryWatch(settings, plugin) if plugin is not None else None
        self._joined = False
        self._rank = 0
        self._world_size = 1
        self._job_id = settings.job_id
        self._fabric_id = ""
        self._fabric: fabric_identity.Description = {}
        self._step = 0
        self._epoch = 0
        self._highest_epoch = 0
        self._offers: dict[int, Plan] = {}
        """Plans by the epoch at which their rows come into force; those before the plan in force are dropped."""
        self._has_heard = False
        self._is_closing = False
        self._has_told_silence = False
        self._has_told_return = False
        self._boundary_us = 0.0
        self._boundary_exposed_us: float | None = None
        self._observe_steps = 0
        self._agreement: Agreement | None = None
        self._agreed_id: AgreedJobId | None = None
        self._queue: StepQueue | None = None
        self._leader: LeaderAddress | None = None
        self._channel: Channel | None = None
        self._drain: RecordDrain | None = None
        self._trace_log: TraceLog | None = None
        self._why_untraced = ""
        # Found when the rank joins: before that the script has not said which GPU is this process's, and to ask
        # would open the first one in every process that imports torch.
        self._sample_pressure: Callable[[], float | None] = lambda: None
        self._pressure: float | None = None
        self._sample_pressure_at = 0.0
        self._busy_until = 0.0
        self._greeting: wire.Hello | None = None
        self._n_greetings = 0
        self._daemon_pid: int | None = None
        self._is_daemon_new = False
        self.n_errors = 0
        self.recent_steps = RecentSteps()

    # ---- any thread --------------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        """The job's id, as far as it is known here."""
        return self._agreed_id.likely() if self._agreed_id is not None else self._job_id

    @property
    def endpoint(self) -> str:
        """Where this rank's daemon is."""
        return self._settings.endpoint

    def counters(self) -> Counters | None:
        """What the plugin has counted; None where there is none."""
        return self._plugin.counters() if self._plugin is not None else None

    # ---- training thread ---------------------------------------------------------------------

    def on_region(self, region: int) -> None:
        """The program entered another region of the step."""
        if self._plugin is not None:
            self._plugin.set_phase(region)
        if self._watch is not None and not self._joined:
            try:
                self._watch.begin()
            except Exception as error:
                self._fail(error)

    def on_boundary(self) -> None:
        """An optimizer step ended; all ranks pass here at the same program point."""
        try:
            if not self._joined:
                self._join()
            self._finish_step()
        except Exception as error:
            self._fail(error)
        # Apart from the rest: whatever else went wrong on this rank, it crosses every boundary.
        if self._agreement is not None:
            epoch = self._agreement.boundary()
            if epoch != self._epoch:
                self._epoch = epoch
                if self._rank == 0 and self._queue is not None:
                    self._queue.adopt(epoch, self._step)

    def _finish_step(self) -> None:
        now_us, exposed_us = self._clock.now_us(), self._clock.exposed_us()
        if self._step:
            exposed = None
            if exposed_us is not None and self._boundary_exposed_us is not None:
                exposed = exposed_us - self._boundary_exposed_us
            record = StepRecord(self._step, self._epoch, now_us - self._boundary_us, exposed, self._pressure)
            self.recent_steps.add(record)
            if self._queue is not None:
                self._queue.add(record)
            if self._summary is not None:
                self._summary.add(record)
        self._boundary_us, self._boundary_exposed_us = now_us, exposed_us
        self._step += 1
        if self._plugin is not None:
            self._plugin.set_step(self._step)
            if self._observe_steps:
                self._observe_steps -= 1
                if self._observe_steps == 0:
                    self._plugin.set_observing(False)

    def _join(self) -> None:
        """At the first boundary with a process group: find the other ranks and the daemon."""
        if not dist.is_available() or not dist.is_initialized():
            return
        self._joined = True
        if self._watch is not None:
            self._watch.boundary()
        emulated = dist.get_backend() == BACKEND
        self._clock = training_clock(emulated)
        if self._summary is not None:
            fabric = self._settings.fabric if emulated else None
            self._summary.describe(fabric, dist.get_world_size(), dist.get_rank())
        plugin, self._rank = self._plugin, dist.get_rank()
        self._why_untraced = "the agent could not join the job"
        if plugin is None:
            self._why_untraced = "the agent runs without its plugin"
            return
        if dist.get_world_size() == 1:
            self._why_untraced = "the job has one rank, and so no collectives"
            return
        backends = dist.get_backend_config()
        if not emulated and not uses_nccl(backends):
            self._why_untraced = "the job does not run on NCCL"
            if self._rank == 0:
                logger.warning("zerotune: backends %s are not NCCL; nothing to tune", backends)
            return
        self._look_around(plugin, emulated)
        self._connect(plugin)

    def _look_around(self, plugin: Plugin, emulated: bool) -> None:
        """Find out which rank this is, of how many, and on which hardware."""
        _follow_runtime_phases(plugin)
        self._world_size = dist.get_world_size()
        self._fabric_id, self._fabric = fabric_identity.describe(self._settings.fabric if emulated else None)
        if emulated:
            from zerotune.agent.nccl.emulated import memory_pressure

            self._sample_pressure = memory_pressure
        else:
            self._sample_pressure = memory.pressure_source()
        self._pressure = self._sample_pressure()  # nothing may be tried before it is known
        if plugin.tuner_abi() == 0 and first_group.has_called():
            logger.warning("zerotune: nothing is tuned: NCCL did not load the plugin that NCCL_TUNER_PLUGIN names")
        if is_first_of_node():
            for named in other_plugins.left_out(os.environ, plugin):
                logger.warning("zerotune: %s is left out: nothing there that this NCCL could load", named)

    def _connect(self, plugin: Plugin) -> None:
        """Meet the other ranks and the daemon."""
        settings, rank, world_size = self._settings, self._rank, self._world_size
        # For the channel's thread alone: the agreement's thread blocks on a connection of its own.
        self._agreed_id = AgreedJobId(open_job_store(), rank, settings.job_id)
        logs_trace = settings.trace_dir is not None
        plugin.set_recording(rank == 0 or logs_trace)
        plugin.set_observing(logs_trace)
        self._agreement = Agreement(
            open_job_store(),
            rank,
            world_size,
            PlanTable(plugin),
            lambda: plugin.calls_with_ranks(world_size),
            fingerprint=_fingerprint(plugin),
            timeout_s=_group_timeout_s(),
        )
        if settings.plan_path is not None and rank == 0:
            plan = read_plan(settings.plan_path).plan
            self._offers[plan.epoch] = plan
            self._agreement.offer(plan)
        self._channel = Channel(
            None if settings.plan_path is not None else settings.endpoint,
            self._hello,
            self,
            self._on_message,
            self._on_alive,
        )
        self._busy_until = time.monotonic() + BUSY_S
        self._queue = StepQueue()
        self._channel.start()

    # ---- channel thread ----------------------------------------------------------------------

    def tick_s(self) -> float:
        """Until the next report: often while something is being learned, seldom after that."""
        if self._is_daemon_new:
            return 0.0
        is_busy = time.monotonic() < self._busy_until
        return self._settings.tick_ms / 1000 * (1 if is_busy else QUIET_TICKS)

    def collect(self) -> list[tuple[wire.AgentMessage, Any]]:
        """Messages for the daemon; memory pressure is sampled here, too."""
        now = time.monotonic()
        if now >= self._sample_pressure_at:
            self._sample_pressure_at = now + MEMORY_EVERY_S
            self._pressure = self._sample_pressure()
            if self._plugin is not None:
                self._plugin.set_memory_pressure(-1.0 if self._pressure is None else self._pressure)
        if self._drain is None:
            return []
        if self._is_daemon_new:
            self._is_daemon_new = False
            self._drain.costs.resend_all()
        return self._drain.collect()

    def _hello(self) -> wire.Hello | None:
        """The greeting, once rank 0 has said the job's id; None until then."""
        plugin = self._plugin
        if plugin is None or self._agreed_id is None or self._agreement is None or self._queue is None:
            return None
        if self._drain is None:
            store = self._agreed_id.learn(self._agreement.incarnation)
            if store is None:
                return None
            self._leader = LeaderAddress(store, self._rank, is_first_of_node=is_first_of_node())
            self._drain = self._open_drain(plugin, self._queue, self._agreed_id.likely())
        # A daemon that comes back must number its plans above all that were ever offered.
        epoch = max(plugin.active_epoch(), self._highest_epoch)
        leader = self._leader.look_up() if self._leader is not None else ""
        if self._greeting is None:
            self._greeting = wire.Hello(
                job_id=self._job_id,
                rank=self._rank,
                n_ranks=self._world_size,
                local_rank=int(os.environ.get("LOCAL_RANK", "0")),
                node=socket.gethostname(),
                pid=os.getpid(),
                fabric_id=self._fabric_id,
                fabric=self._fabric,
                nccl_version=fabric_identity.nccl_version(),
                tuner_abi=plugin.tuner_abi(),
                epoch=epoch,
                leader=leader,
                name=self._settings.job_name,
            )
        elif (self._greeting.epoch, self._greeting.leader) != (epoch, leader):
            self._greeting = msgspec.structs.replace(self._greeting, epoch=epoch, leader=leader)
        self._n_greetings += 1
        # The tables follow the greeting, ahead of all that a daemon could draw conclusions from.
        if self._daemon_pid is None or self._n_greetings % TABLES_EVERY_GREETINGS == 0:
            self._drain.costs.resend_all()
        return self._greeting

    def _open_drain(self, plugin: Plugin, queue: StepQueue, job_id: str) -> RecordDrain:
        """From here on records and steps, past and future, are logged and sent."""
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
        return RecordDrain(plugin, job_id, self._rank, queue, self._trace_log)

    def _on_message(self, message: wire.DaemonMessage) -> None:
        if self._agreement is not None:
            self._agreement.renew()  # a daemon that speaks keeps the plan in force from expiring
        if isinstance(message, wire.Welcome) and self._leader is not None:
            self._leader.publish(message.listen)
            # One daemon replaced another before its absence was noticed.
            self._is_daemon_new = self._daemon_pid not in (None, message.daemon_pid)
            self._daemon_pid = message.daemon_pid
        elif isinstance(message, wire.PlanOffer) and self._agreement is not None:
            if message.job_id == self._job_id:
                if message.plan.last_epoch > self._highest_epoch:
                    self._highest_epoch = message.plan.last_epoch
                    self._busy_until = time.monotonic() + BUSY_S
                kept = {epoch: plan for epoch, plan in self._offers.items() if epoch >= self._epoch}
                self._offers = kept | {plan.epoch: plan for plan in (message.plan, message.plan.at_last())}
                self._agreement.offer(message.plan)
        elif isinstance(message, wire.Observe) and self._plugin is not None and self._trace_log is None:
            self._plugin.set_observing(message.n_steps > 0)
            self._observe_steps = message.n_steps

    def _on_alive(self, alive: bool) -> None:
        endpoint = self._settings.endpoint
        logger.info("zerotune: daemon at %s %s", endpoint, "answers" if alive else "is silent")
        self._has_heard |= alive
        if not alive:
            self._daemon_pid = None
            if self._agreement is not None:
                self._agreement.withdraw()
        if not (alive or self._is_closing or self._has_told_silence) and is_first_of_node():
            self._has_told_silence = True
            logger.warning(
                "zerotune: the daemon at %s is silent: tuning pauses; unless one answers, the settings in force"
                " give way to NCCL's own choice in a while",
                endpoint,
            )
        elif alive and self._has_told_silence and not self._has_told_return:
            self._has_told_return = True
            logger.warning("zerotune: the daemon at %s answers again: tuning goes on", endpoint)

    # ---- end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """At exit: say goodbye, leave nothing running."""
        self._is_closing = True
        try:
            if self._watch is not None:
                self._watch.close()
            if self._channel is not None:
                job_id = self._agreed_id.likely() if self._agreed_id is not None else self._job_id
                self._channel.close(wire.Goodbye(job_id, self._rank, _failure()))
            if self._agreement is not None:
                self._agreement.close()
            self._end_trace()
            if self._summary is not None:
                self._write_summary(self._summary)
            self._tell()
        except Exception as error:
            self._fail(error)

    def _tell(self) -> None:
        in_force = self._offers.get(self._epoch)
        ending.tell(
            self._settings,
            self._plugin,
            self.recent_steps,
            questions=self._drain.costs.questions if self._drain is not None else (),
            rows=in_force.rows if in_force is not None else (),
            has_heard=self._has_heard,
        )

    def _end_trace(self) -> None:
        """Log what came after the last tick; warn if the trace is empty."""
        folder = self._settings.trace_dir
        if folder is None:
            return
        if self._plugin is not None and self._queue is not None and self._agreed_id is not None:
            if self._drain is None:  # the job was over before its ranks had met
                self._drain = self._open_drain(self._plugin, self._queue, self._agreed_id.likely())
            self._drain.collect()
        elif self._rank == 0:
            why = self._why_untraced
            if not self._joined and self._watch is not None and self._watch.has_begun:
                why = "no training step was seen to end"
            if why:
                logger.warning("zerotune: no trace is logged in %s: %s", folder, why)
        if self._trace_log is not None:
            self._trace_log.close()

    def _write_summary(self, summary: SummaryWriter) -> None:
        # Of rank 0 alone: not of torchrun's own process, nor of workers that inherit the environment.
        has_called = self._plugin is not None and self._plugin.n_calls() > 0
        if has_called and not self._joined and os.environ.get("RANK") == "0":
            path = self._settings.summary_path
            logger.warning("zerotune: no summary is written to %s: no training step was seen to end", path)
        try:
            summary.write(self._agreed_id.likely() if self._agreed_id is not None else "")
        except OSError as error:  # a full disk, for example: not our fault, so no traceback
            path = self._settings.summary_path
            logger.warning("zerotune: the summary cannot be written to %s: %s", path, error.strerror or error)

    def _fail(self, error: Exception) -> None:
        self.n_errors += 1
        if self.n_errors == 1:
            logger.warning("zerotune: the agent met an error, training goes on: %s", error, exc_info=True)


def _failure() -> str:
    """Type of the exception that ended the script; empty: none did. Of `sys.exit(1)` Python tells nobody."""
    name: str = getattr(getattr(sys, "last_type", None), "__name__", "")
    return name.encode("ascii", "replace").decode()[: wire.MAX_ID_LENGTH]


def _fingerprint(plugin: Plugin) -> str:
    """What must be equal on all ranks."""
    ours = f"{plugin.layout_version()}/{plugin.tuner_abi()}"
    return f"nccl={fabric_identity.nccl_version()} plugin={ours} next={plugin.next_tuner()}"


def _group_timeout_s() -> float:
    """How long the job's collectives may take before its watchdog ends it."""
    from torch.distributed.distributed_c10d import _get_default_group, default_pg_timeout

    timeout = default_pg_timeout
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        timeout = _get_default_group()._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        pass  # a backend that does not say: the default errs on the patient side
    return float(timeout.total_seconds())


def _follow_runtime_phases(plugin: Plugin) -> None:
    """Let our own ZeRO runtime, if the script uses it, say each phase itself."""
    import sys

    from zerotune.store.records import Phase

    phases = sys.modules.get("zerotune.zero_runtime.phases")
    if phases is not None:
        words = {phase.name: int(phase) for phase in Phase}
        phases.set_listener(lambda name: plugin.set_phase(words.get(name, 0)))

"""One training process under tuning: takes the hooks' calls, drives the plugin and the membership.

The training thread runs only the methods `on_*`, which never wait. The first error in them is logged, all are counted,
and none reaches the script.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import replace
from typing import Any, Final

from ..store.records import Phase
from . import ending
from .agreement import AgreementCounters
from .daemon_link.cost_table_cache import CostTableCache
from .emulation import BACKEND, uses_nccl
from .failure import failure
from .machine import identity
from .membership import Membership
from .nccl import other_plugins
from .nccl.library import Counters, Plugin
from .observing.memory import DeviceMemory, device_memory_here
from .settings import EXACT, AgentSettings, is_first_of_node
from .steps.clock import VirtualClock, device_clock
from .steps.graphs import GraphCalls
from .steps.recent_steps import RecentSteps
from .steps.step_queue import StepQueue
from .steps.step_timer import ALWAYS, StepTimer
from .steps.summary import SummaryWriter
from .world import World, current_group

logger = logging.getLogger("zerotune.agent")

POLL_S: Final = 0.2
"""Between two checks for a new default group with a communicator."""
STEPLESS_AFTER_S: Final = 10.0
"""If a rank that communicates has seen no step for this long, intervals count as steps."""
INTERVAL_S: Final = 1.0
CLOSE_TIMEOUT_S: Final = 1.5


class Session:
    """Owns thread `zerotune-session`: everything the agent keeps between `activate` and the end of the process.

    Without a plugin, steps are only counted for the summary.
    """

    def __init__(self, settings: AgentSettings, plugin: Plugin | None) -> None:
        self._settings = settings
        self._plugin = plugin
        self._summary = SummaryWriter(settings.summary_path) if settings.summary_path else None
        self._recent_steps = RecentSteps(self._is_control)
        self._queue = StepQueue()
        self._costs = CostTableCache()
        sinks = [self._recent_steps.add, self._queue.add]
        summary = [self._summary.add] if self._summary else []
        self._timer = StepTimer(plugin, *sinks, *summary, on_lost=self._queue.lose)
        self._graph_calls = GraphCalls(plugin.n_calls if plugin is not None else lambda: 0)
        self._world: World | None = None
        """The latest default group that this rank has tried to join."""
        self._n_worlds = 0
        self._membership: Membership | None = None
        self._joined_at_s = self._interval_began_s = 0.0
        self._why_untraced = ""
        self._has_stepped = False
        self._is_described = False
        self._is_closing = False
        self._wake = threading.Event()
        self.n_errors = 0
        self._thread = threading.Thread(target=self._watch, args=(plugin,), name="zerotune-session", daemon=True)
        if plugin is not None:
            # From the first call on, so that results of earlier jobs can be applied at once.
            plugin.set_recording(settings.trace_dir is not None or os.environ.get("RANK") == "0")
            if settings.trace_dir is not None:
                self._timer.observe(ALWAYS)
            self._thread.start()

    # ---- any thread --------------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        """The job's id; a likely one until rank 0's is known."""
        return self._membership.job_id if self._membership is not None else self._settings.job_id

    @property
    def endpoint(self) -> str:
        """The endpoint of this rank's daemon."""
        return self._settings.endpoint

    @property
    def recent_steps(self) -> RecentSteps:
        """The latest steps, up to now."""
        self._timer.report_from_other_thread()
        return self._recent_steps

    def counters(self) -> Counters | None:
        """The plugin's counters; None without a plugin."""
        return self._plugin.counters() if self._plugin is not None else None

    def agreement_counters(self) -> AgreementCounters | None:
        """The agreement's counters; None before this rank has joined a job."""
        return self._membership.agreement.counters() if self._membership is not None else None

    # ---- training thread ---------------------------------------------------------------------

    def _is_control(self, epoch: int) -> bool:
        """Whether this epoch is a control window: NCCL's own choice runs, for comparison with the settings in force."""
        membership = self._membership
        return membership is not None and epoch in membership.agreement.controls

    def on_region(self, region: int) -> None:
        """The program entered another region of the step."""
        if self._plugin is not None:
            self._plugin.set_phase(region)

    def on_replay(self, graph: Any) -> None:
        """A graph was replayed: NCCL is not asked for its collectives."""
        try:
            self._timer.sees_all_calls = False
            self._graph_calls.replay(graph)
        except Exception as error:
            self._fail(error)

    def on_capture(self, graph: Any, is_capturing: bool) -> None:
        """A graph's capture begins or has ended."""
        try:
            self._timer.capture(is_capturing)
            self._graph_calls.capture(graph, is_capturing)
        except Exception as error:
            self._fail(error)

    def on_boundary(self) -> None:
        """An optimizer step ended. CPU caches are cold here: each line costs microseconds."""
        try:
            if not self._has_stepped:
                self._has_stepped = True
                self._wake.set()
                if not isinstance(self._timer.clock, VirtualClock):  # CUDA events must be made by this thread
                    self._timer.clock = device_clock()
            if not self._is_described and current_group() is not None:
                self._describe(World.now())
            self._timer.finish()
        except Exception as error:
            self._fail(error)

    def _describe(self, world: World) -> None:
        """Describe the run in the summary; on the emulated NCCL, use its clock."""
        self._is_described = True
        emulated = world.backend == BACKEND
        if emulated:
            self._timer.clock = VirtualClock()
            if self._plugin is None:
                from .steps.emulated_calls import EmulatedCalls

                self._timer.count_by(EmulatedCalls())
        if self._summary is not None:
            self._summary.describe(self._settings.fabric if emulated else None, world.n_ranks, world.rank)

    # ---- the session's thread ----------------------------------------------------------------

    def _has_new_world(self, plugin: Plugin) -> bool:
        """Whether there is a default group that this rank has not tried to join, and a communicator."""
        is_new = current_group() is not None and (self._world is None or self._world.has_ended())
        counters = plugin.counters()
        # NCCL loads the profiler long before the tuner. Ranks compare the tuner's ABI when they join.
        is_made = plugin.tuner_abi() != 0 or counters.n_timed > 0
        return is_new and counters.n_communicators > 0 and is_made

    def _watch(self, plugin: Plugin) -> None:
        """Join each default group that the script makes, once it has a communicator."""
        is_last = False
        while not is_last:
            self._wake.wait(POLL_S)
            self._wake.clear()
            is_last, world = self._is_closing, None
            try:
                if not is_last and self._has_new_world(plugin):
                    world = World.now()
                    self._leave_job()
                    self._world = world
                    self._n_worlds += 1
                    self._join(plugin, world)
            except Exception as error:
                if not is_last and world is not None and not world.has_ended():  # else the script has just destroyed it
                    self._fail(error)
            if self._membership is not None and not self._has_stepped:
                self._count_interval()
            self._timer.report_from_other_thread()

    def _join(self, plugin: Plugin, world: World) -> None:
        rank, world_size = world.rank, world.n_ranks
        self._why_untraced = "the agent could not join the job"
        if world_size == 1:
            self._why_untraced = "the job has one rank, and so no collectives"
            return
        emulated, backends = world.backend == BACKEND, world.backends
        if not emulated and not uses_nccl(backends):
            self._why_untraced = "the job does not run on NCCL"
            if rank == 0:
                logger.warning("zerotune: backends %s are not NCCL; nothing to tune", backends)
            return
        if not self._is_described:
            self._describe(world)
        _follow_runtime_phases(plugin)
        fabric_id, fabric = identity.describe(self._settings.fabric if emulated else None)
        if self._settings.is_exact:
            fabric["numerics"] = EXACT
        if emulated:
            from .nccl.emulated import memory_pressure

            device_memory = DeviceMemory(memory_pressure)
        else:
            device_memory = device_memory_here()
        self._timer.pressure = device_memory.pressure()  # trials must not begin before it is known
        if is_first_of_node():
            for named in other_plugins.unloaded(os.environ, plugin):
                logger.warning("zerotune: %s is not used: it has no plugin that this NCCL could load", named)
        settings = self._settings
        if self._n_worlds > 1:  # the daemon sees each default group as a job of its own
            settings = replace(settings, job_id=f"{settings.job_id}-world-{self._n_worlds}")
        self._membership = Membership(
            settings,
            plugin,
            self._timer,
            self._queue,
            self._costs,
            world,
            fabric_id,
            fabric,
            device_memory,
        )
        self._joined_at_s = time.monotonic()
        self._why_untraced = ""

    def _count_interval(self) -> None:
        """In a job whose steps are not seen, count intervals as steps: calls are tuned by their own times."""
        now_s = time.monotonic()
        if now_s - self._joined_at_s > STEPLESS_AFTER_S and now_s - self._interval_began_s >= INTERVAL_S:
            self._interval_began_s = now_s
            self._timer.finish(is_step=False)

    def _leave_job(self) -> None:
        if self._membership is not None:
            self._membership.close("")
            self._membership = None

    # ---- end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """At exit: leave the job, print the last line, stop all threads."""
        self._is_closing = True
        self._wake.set()
        try:
            if self._thread.is_alive():
                self._thread.join(CLOSE_TIMEOUT_S)
            self._timer.report_ended(is_last=True)
            if self._membership is not None:
                self._membership.close(failure())
            elif self._settings.trace_dir is not None and os.environ.get("RANK", "0") == "0":
                has_called = self._plugin is not None and self._plugin.n_calls() > 0
                why = self._why_untraced or ("the job was over before the agent had joined it" if has_called else "")
                if why:
                    logger.warning("zerotune: no trace is logged in %s: %s", self._settings.trace_dir, why)
            if self._summary is not None:
                self._write_summary(self._summary)
            self._print_ending()
        except Exception as error:
            self._fail(error)

    def _print_ending(self) -> None:
        one = self._membership
        ending.print_ending(
            self._settings,
            self._plugin,
            self.recent_steps,
            n_steps=self._timer.step if self._has_stepped else self._recent_steps.n_seen,
            questions=one.questions if one is not None else (),
            rows_of=one.agreement.rows_of if one is not None else {},
            has_answered=one is not None and one.has_answered,
            is_silent=one is not None and one.is_silent,
            listened_s=time.monotonic() - self._joined_at_s,
            shadow=one.shadow if one is not None else "",
            reasons=one.reasons() if one is not None else (),
            replayed_share=self._graph_calls.share,
        )

    def _write_summary(self, summary: SummaryWriter) -> None:
        # Rank 0 alone warns, neither torchrun's own process nor workers that inherit the environment.
        has_called = self._plugin is not None and self._plugin.n_calls() > 0
        if has_called and not self._has_stepped and os.environ.get("RANK") == "0":
            path = self._settings.summary_path
            logger.warning("zerotune: no summary is written to %s: no training step was seen to end", path)
        try:
            summary.write(self._membership.job_id if self._membership is not None else "")
        except OSError as error:  # a full disk, for example: no bug, so no traceback
            path = self._settings.summary_path
            logger.warning("zerotune: the summary cannot be written to %s: %s", path, error.strerror or error)

    def _fail(self, error: Exception) -> None:
        self.n_errors += 1
        if self.n_errors == 1:
            logger.warning("zerotune: the agent met an error, training goes on: %s", error, exc_info=True)


def _follow_runtime_phases(plugin: Plugin) -> None:
    """Have zerotune's ZeRO runtime, if the script uses it, report each phase."""
    phases: Any = sys.modules.get("zerotune.zero_runtime.phases")
    if phases is not None:
        words = {phase.name: int(phase) for phase in Phase}
        phases.set_listener(lambda name: plugin.set_phase(words.get(name, 0)))

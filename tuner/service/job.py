"""One job in the service: its reporting ranks, pending calls and brain."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ...store.records import (
    Decision,
    DecisionKind,
    Exposure,
    MissingEvidence,
    Plan,
    Stage,
    StepRecord,
    size_class_floor,
)
from ...store.records.job_names import is_job_name
from ...store.records.lateness import Lateness
from ...store.records.passages import Passages, summed
from ...store.wire import Hello, JobStatus
from ..fingerprint.missing import missing_after
from ..join import OBSERVATION, Joiner
from ..late_ranks.finder import LateRankFinder
from .misaligned_sizes import MisalignedSizes
from .nodes import NodeSession, RankSession, Uplink, UplinksLike
from .observation_windows import ObservationWindows
from .silent_ranks import SilentRanks

if TYPE_CHECKING:
    from ..learning.brain import Brain

_log = logging.getLogger("zerotune.service")

MAX_BACKLOG: Final = 10_000
MAX_BACKLOG_BYTES: Final = 16 * 2**20
RATE_PERIOD_S: Final = 2.0
HELLO_TIMEOUT_S: Final = 3.0
"""All ranks with an agent say hello within this time: each does so once a second. It exceeds a joiner's timeout."""
NEWS_EVERY_S: Final = 10.0
"""Least pause between records in the store of calls that were not tuned and of late ranks."""
SETTLE_S: Final = 1.0
"""Windows open once all ranks are here, or no rank has come or gone for this long."""
STEPLESS_AFTER: Final = 10
"""Intervals without a step before `zerotune status` reports that."""
LEAST_CACHED: Final = 0.01
"""Least share of device memory in torch's cache that is reported."""
MISSING_AFTER_S: Final = 10.0
"""Ranks that have not greeted this long after the others are reported as missing."""


class Job:
    """State of one job; its methods never raise on ranks' messages.

    Messages that arrive before the brain exists wait in a bounded backlog. If a brain raises, it is dropped: the job
    goes on with the plan in force, and its status reports that.
    """

    def __init__(self, hello: Hello, now_s: float, uplinks: UplinksLike) -> None:
        self.job_id = hello.job_id
        self.name = ""
        self.take_name(hello.name)
        self.fabric_id = hello.fabric_id
        self.fabric = hello.fabric
        self.options = hello.options
        self.n_ranks = hello.n_ranks
        self.ranks: dict[int, tuple[bytes, RankSession]] = {}
        self.nodes: dict[bytes, NodeSession] = {}
        """The daemons of the job's other nodes, if rank 0 is on this node."""
        self.silent_ranks = SilentRanks()
        self.uplink = Uplink(hello.job_id, uplinks)
        self.late_ranks = LateRankFinder()
        self.misaligned_sizes = MisalignedSizes(hello.job_id)
        self.joiner = Joiner(self._witness)
        self.windows = ObservationWindows()
        self.changed_at_s = now_s
        """When a rank or another node last came or left."""
        self._is_settled = False
        self._n_settled = 0
        self._n_reporters = hello.n_ranks
        """Most reporters of a call; until the reporters are settled, this is more than are connected."""
        self.next_tick_s = now_s
        self.epoch = hello.epoch
        self.highest_epoch = hello.epoch
        """The highest epoch that rank 0 was offered elsewhere: the brain's plans must have higher ones."""
        self._epoch_since_step = -1
        self.step = 0
        self._has_steps = False
        self.offer: Plan | None = None
        """The newest plan that rank 0 has not adopted yet."""
        self.stage = Stage.unknown
        self._missing_evidence = MissingEvidence.too_early
        self._frozen_since = 0
        self.shadow = ""
        """The change that a brain in shadow would make by now; empty: it is not in shadow, or there are too few steps.
        """
        self.n_observations = 0
        self.n_gone_drops = 0
        self.trouble = ""
        self.failure = ""
        """The first rank whose script an exception ended, and the exception's type."""
        self._passages: dict[int, Passages] = {}
        """Counts of each rank that ever reported here."""
        self._recorded: tuple[Passages, Lateness] = Passages(), Lateness()
        self._recorded_at_s = now_s
        self._brain: Brain | None = None
        self._backlog: list[Callable[[Brain], None]] = []
        self._backlog_bytes = 0
        self._step_us: deque[float] = deque(maxlen=64)
        self._exposed_us: deque[float] = deque(maxlen=64)
        self._last_decisions: deque[str] = deque(maxlen=5)
        self._n_explored = 0
        self._spent_percent = 0.0
        self._exposure = Exposure()
        self._short_memory: float | None = None
        """Share of device memory in use, if memory is too short for new connections; else None."""
        self.cached_share = 0.0
        """Share of device memory that torch has reserved and does not use, reported by the lead rank."""
        self._rate_at_s, self._n_at_rate, self._rate = now_s, 0, 0.0

    @property
    def lead_rank(self) -> int:
        """The rank that reports the job's steps and sequence here."""
        return min(self.ranks, default=0)

    @property
    def n_ranks_here(self) -> int:
        """Ranks that report to this daemon, directly or through another node's daemon."""
        return len(self.ranks) + sum(node.n_ranks for node in self.nodes.values())

    @property
    def has_brain(self) -> bool:
        """Whether this job has a brain."""
        return self._brain is not None

    def give_brain(self, make: Callable[[], Brain]) -> None:
        """Make the brain and replay the backlog to it; if that raises, the job is not tuned."""
        try:
            self._brain = make()
        except Exception as error:
            self._brain_failed(error)
        if self.highest_epoch:
            self.call_brain(lambda brain: brain.adopted(self.highest_epoch, self.step))
        backlog, self._backlog, self._backlog_bytes = self._backlog, [], 0
        for event in backlog:
            self.call_brain(event)

    def call_brain(self, event: Callable[[Brain], None], n_bytes: int = 0) -> None:
        """Call the brain; if it raises, tuning of this job stops. `event` keeps records of `n_bytes`."""
        if self._brain is None:
            has_room = len(self._backlog) < MAX_BACKLOG and self._backlog_bytes + n_bytes <= MAX_BACKLOG_BYTES
            if not self.trouble and has_room:
                self._backlog.append(event)
                self._backlog_bytes += n_bytes
            return
        try:
            event(self._brain)
        except Exception as error:
            self._brain_failed(error)

    def _brain_failed(self, error: Exception) -> None:
        _log.error("tuning of job %s stops: its brain failed", self.job_id, exc_info=error)
        self.trouble = f"tuning stopped: {type(error).__name__}: {error}"
        self._brain = None

    def think(self) -> tuple[Plan | None, list[Decision]]:
        """A new plan to offer, if any, and the decisions since the last call."""
        proposed: list[Plan] = []
        decided: list[Decision] = []

        def ask(brain: Brain) -> None:
            plan = brain.propose()
            if plan is not None:
                proposed.append(plan)
            decided.extend(brain.decisions())
            self.stage, self._n_explored, self._spent_percent = brain.stage, brain.n_explored, brain.spent_percent
            self._exposure = brain.exposure
            self._short_memory = brain.memory.pressure if brain.memory.is_short else None
            self._missing_evidence = missing_after(self.step, brain.missing_evidence)

        if self._brain is not None:
            self.call_brain(ask)
        self._last_decisions.extend(headline(decision) for decision in decided if not decision.is_control)
        for one in decided:
            if one.kind == DecisionKind.freeze:
                self._frozen_since = one.step or 0
            elif one.kind == DecisionKind.shadow:
                self.shadow = one.reason.removeprefix("in shadow: ")
        if proposed:
            self.offer = proposed[0]
            if not self.offer.control_epochs:
                self.windows.plan_offered(self.step)
        return self.offer if proposed else None, decided

    def set_knowledge(self, knowledge: Any) -> None:
        """Give the brain new knowledge of earlier jobs."""

        def swap(brain: Brain) -> None:
            brain.knowledge = knowledge

        self.call_brain(swap)

    def observe(self, rank: int, records: NDArray[np.void]) -> None:
        """Records (OBSERVATION, shape [n]) that `rank` sent."""
        self.n_observations += len(records)
        self.joiner.add(rank, records)
        if rank == self.lead_rank:
            sane = (records["message_bytes"] > 0) & (records["message_bytes"] < 2**62)
            block = records if sane.all() else records[sane]
            self.misaligned_sizes.observe(block)
            self.call_brain(lambda brain: brain.sequence(block), block.nbytes)

    def passed_by(self, rank: int, passages: Passages) -> None:
        """Take in `rank`'s counts of all its calls so far, tuned and not tuned."""
        self._passages[rank] = passages

    def lateness(self) -> Lateness:
        """The ranks that collectives wait for."""
        return self.late_ranks.lateness(float(median(self._step_us)) if self._step_us else 0.0)

    def node_news(self) -> tuple[str, Lateness]:
        """This node's name and its late ranks, for the leading daemon."""
        return self.late_ranks.hosts.get(self.lead_rank, ""), self.lateness()

    def news(self, now_s: float, *, at_once: bool = False) -> tuple[Passages, Lateness] | None:
        """The counts of calls and the late ranks, if the store should record them now."""
        if not at_once and now_s - self._recorded_at_s < NEWS_EVERY_S:
            return None
        self._recorded_at_s = now_s
        known, self._recorded = self._recorded, (summed(self._passages.values()), self.lateness())
        return None if self._recorded == known else self._recorded

    def reporter_came(self, now_s: float) -> None:
        """A rank or another node's daemon has come, and others may follow."""
        self.changed_at_s, self._is_settled = now_s, False
        self._n_reporters = self.n_ranks
        self.joiner.members_changed()

    def reporter_left(self, now_s: float) -> None:
        """A rank or another node's daemon has left.

        The others still report its last calls: until these are joined, the number of reporters does not change.
        """
        self.changed_at_s, self._is_settled = now_s, False

    def _witness(self, records: NDArray[np.void], reporters: NDArray[np.uint64], starts: NDArray[np.intp]) -> None:
        """Look at calls for late ranks; a failure there costs no measurement."""
        try:
            self.late_ranks.observe(records, reporters, starts)
        except Exception:
            _log.exception("job %s: who is late is not known any more", self.job_id)
            self.joiner.witness = None

    def _settle(self, now_s: float) -> None:
        """Settle who reports to this daemon, if it is time."""
        # Forwarded observations must arrive before the leading daemon's joiner gives up.
        patience_s = SETTLE_S if self.uplink.is_alive(now_s) else HELLO_TIMEOUT_S
        if not self._is_settled and (self.n_ranks_here >= self.n_ranks or now_s - self.changed_at_s >= patience_s):
            if len(self.ranks) + len(self.nodes) < self._n_settled:
                self.joiner.member_is_gone()
            self._is_settled = True
            self._n_settled = self._n_reporters = len(self.ranks) + len(self.nodes)

    def join(self, now_s: float, *, give_up: bool = False) -> NDArray[np.void]:
        """Joined observations (OBSERVATION, shape [n]) of complete calls."""
        self._settle(now_s)
        if not self.joiner.n_pending:
            return np.empty(0, OBSERVATION)
        observed, _ = self.joiner.join(now_s, self._n_reporters, is_settled=self._is_settled, give_up=give_up)
        return observed

    def finish_step(self, step: StepRecord) -> None:
        """The leading rank has finished a step."""
        self.step = max(self.step, step.step)
        # A full queue may have lost the adoption, for example if the plan expired while this daemon was stopped.
        if step.is_whole and step.epoch != self.epoch and step.step >= self._epoch_since_step:
            self.adopt(step.epoch, step.step)
        if step.is_whole:
            self._has_steps = True
            self._step_us.append(step.duration_us)
            if step.exposed_us is not None:
                self._exposed_us.append(step.exposed_us)
        self.call_brain(lambda brain: brain.step_finished(step))

    def adopt(self, epoch: int, step: int) -> None:
        """All ranks run under `epoch` from `step` on."""
        if (epoch, step) == (self.epoch, self._epoch_since_step):
            return
        self.epoch, self._epoch_since_step = epoch, step
        if self.offer is not None and self.offer.epoch <= epoch:
            self.offer = None
        self.call_brain(lambda brain: brain.adopted(epoch, step))

    def take_name(self, name: str) -> bool:
        """Take `name` unless it is empty or the job has one; return whether it was taken. Ranks may not know it."""
        if self.name or not is_job_name(name):
            return False
        self.name = name
        return True

    def rank_failed(self, rank: int, failure: str) -> None:
        """A rank left because of an exception of type `failure`; empty: it ended normally."""
        self.failure = self.failure or failure_of(rank, failure) or ""

    def measure_rate(self, now_s: float) -> None:
        """Update the rate of observations, every RATE_PERIOD_S."""
        elapsed_s = now_s - self._rate_at_s
        if elapsed_s >= RATE_PERIOD_S:
            self._rate = (self.n_observations - self._n_at_rate) / elapsed_s
            self._rate_at_s, self._n_at_rate = now_s, self.n_observations

    def status(self, now_s: float) -> JobStatus:
        """The job's part of `zerotune status`."""
        latest = [(rank, session.last_message_at_s) for rank, (_, session) in self.ranks.items()]
        latest += [(node.rank, node.last_message_at_s) for node in self.nodes.values() for _ in range(node.n_ranks)]
        silent = self.silent_ranks.describe(latest, now_s)
        failed = self.failure and f"failed ({self.failure})"
        problem = failed or self.trouble or silent or self._forwards(now_s) or self._missing(now_s)
        health = problem or self._stepless() or self._crowded() or "ok"
        return JobStatus(
            job_id=self.job_id,
            fabric_id=self.fabric_id,
            stage=self.stage,
            n_ranks=self.n_ranks,
            n_ranks_seen=self.n_ranks_here,
            epoch=self.epoch,
            step=self.step,
            n_observations=self.n_observations,
            n_dropped=self.n_gone_drops + sum(session.n_dropped for _, session in self.ranks.values()),
            n_explored=self._n_explored,
            observations_per_s=self._rate,
            step_us=float(median(self._step_us)) if self._step_us else 0.0,
            exposed_us=float(median(self._exposed_us)) if self._exposed_us else None,
            exposure=self._exposure,
            exploration_spent_percent=self._spent_percent,
            last_decisions=tuple(self._last_decisions),
            health=health,
            name=self.name,
            passages=summed(self._passages.values()),
            lateness=self.lateness(),
            misaligned=self.misaligned_sizes.found,
            missing_evidence=self._missing_evidence,
            frozen_since=self._frozen_since,
            heard_s_ago=max([self.silent_ranks.oldest_s(now_s), *(now_s - at_s for _, at_s in latest)]),
        )

    def _forwards(self, now_s: float) -> str:
        """Text about a leading daemon on another node: whether it answers."""
        if not self.uplink.endpoint:
            return ""
        if self.uplink.is_alive(now_s):
            return f"forwards to {self.uplink.endpoint}"
        return f"{self.uplink.endpoint} is silent, or has other keys"

    def _stepless(self) -> str:
        """Text about a job without known steps; empty: steps are known, or may be soon."""
        if self._has_steps or self.step < STEPLESS_AFTER:
            return ""
        return "no training step is seen to end: calls are tuned by their own times, without the step guard"

    def _crowded(self) -> str:
        """Text about a device without memory for new connections; empty: it has enough."""
        if self._short_memory is None:
            return ""
        cached = f", {self.cached_share:.0%} of it unused in torch's cache" if self.cached_share >= LEAST_CACHED else ""
        return f"{self._short_memory:.0%} of device memory is in use{cached}: only what NCCL has connected is tried"

    def _missing(self, now_s: float) -> str:
        """Text about ranks that have not greeted; empty while they may still come.

        It is also empty if all follow a plan: they have an agent then, and report to a daemon on another node.
        """
        if self.n_ranks_here >= self.n_ranks or self.epoch or now_s - self.changed_at_s < MISSING_AFTER_S:
            return ""
        return (
            f"{self.n_ranks_here} of {self.n_ranks} ranks report here so far: the others have not joined yet, report"
            " to another daemon, or run without the agent"
        )


def failure_of(rank: int, failure: str) -> str | None:
    """Text about an exception of type `failure` that ended a rank's script; None without one."""
    return f"rank {rank}: {failure if failure.isidentifier() else 'an exception'}" if failure else None


def headline(decision: Decision) -> str:
    """A decision in one line."""
    if decision.is_of_job:
        return f"epoch {decision.epoch}: {decision.reason}"
    key = decision.key
    what = f"{key.collective.name} {key.phase.name} from {size_class_floor(key.size_class)} bytes"
    return f"epoch {decision.epoch}: {decision.kind} {decision.candidate} for {what}: {decision.reason}"

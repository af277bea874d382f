"""One job as the service sees it: who reports, what is pending, and its brain."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import msgspec
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
from .nodes import NodeSession, Uplink, UplinksLike
from .observation_windows import ObservationWindows
from .silent_ranks import SilentRanks

if TYPE_CHECKING:
    from ..learning.brain import Brain

_log = logging.getLogger("zerotune.service")

MAX_BACKLOG: Final = 10_000
MAX_BACKLOG_BYTES: Final = 16 * 2**20
RATE_PERIOD_S: Final = 2.0
GREETED_S: Final = 3.0
"""All ranks with an agent greet within this time of each other.

Each greets once a second, and looks once a second for a missing daemon. More than a joiner's timeout.
"""
NEWS_EVERY_S: Final = 10.0
"""How often at most the store is told what passed the tuner by, and who is late."""
SETTLE_S: Final = 1.0
"""Windows open when all ranks are here, or when no rank has come or gone for this long."""
STEPLESS_AFTER: Final = 10
"""Intervals without a step before that is told."""
LEAST_CACHED: Final = 0.01
"""Share of device memory in torch's cache that is worth a word."""
MISSING_AFTER_S: Final = 10.0
"""Ranks that have not greeted this long after the others are reported as missing."""


class RankSession(msgspec.Struct):
    """One connected rank."""

    heard_at_s: float
    n_dropped: int = 0


class Job:
    """State of one job; its methods never raise on what ranks send.

    Messages that arrive before the brain exists wait in a bounded backlog. A brain that raises is dropped: the job
    goes on with the plan in force, and its health says so.
    """

    def __init__(self, hello: Hello, now_s: float, uplinks: UplinksLike) -> None:
        self.job_id = hello.job_id
        self.name = ""
        """What people call the job; empty where it has no name."""
        self.take_name(hello.name)
        self.fabric_id = hello.fabric_id
        self.fabric = hello.fabric
        self.options = hello.options
        self.n_ranks = hello.n_ranks
        self.ranks: dict[int, tuple[bytes, RankSession]] = {}
        self.nodes: dict[bytes, NodeSession] = {}
        """The daemons of the job's other nodes, if rank 0 is on this one."""
        self.silent_ranks = SilentRanks()
        self.uplink = Uplink(hello.job_id, uplinks)
        self.late_ranks = LateRankFinder()
        self.misaligned_sizes = MisalignedSizes(hello.job_id)
        self.joiner = Joiner(self._witness)
        self.windows = ObservationWindows()
        self.changed_at_s = now_s
        """When a rank or another node came or went last."""
        self._is_settled = False
        self._n_settled = 0
        self._n_reporters = hello.n_ranks
        """The number of reporters that a call may have; more than are connected until it is settled who reports."""
        self.next_tick_s = now_s
        self.epoch = hello.epoch
        self.highest_epoch = hello.epoch
        """Highest epoch that rank 0 was offered before it came here: a brain's plans must have higher ones."""
        self._epoch_since_step = -1
        self.step = 0
        self._has_steps = False
        self.offer: Plan | None = None
        """The newest plan that rank 0 has not adopted yet."""
        self.stage = Stage.unknown
        self._missing_evidence = MissingEvidence.too_early
        self._frozen_since = 0
        self.shadow = ""
        """What a brain in shadow would change by now; empty: it is not, or there are too few steps."""
        self.n_observations = 0
        self.n_gone_drops = 0
        self.trouble = ""
        self.failure = ""
        """The first rank whose script ended by an exception, and that exception's type."""
        self._passages: dict[int, Passages] = {}
        """Of each rank that ever reported here: all it saw."""
        self._told: tuple[Passages, Lateness] = Passages(), Lateness()
        self._told_at_s = now_s
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
        """Share of device memory in use, if it is so much that nothing new may be connected."""
        self.cached_share = 0.0
        """Of device memory: what torch has reserved and does not use, as the lead rank says."""
        self._rate_at_s, self._n_at_rate, self._rate = now_s, 0, 0.0

    @property
    def lead_rank(self) -> int:
        """The rank whose steps and sequence stand for the job here."""
        return min(self.ranks, default=0)

    @property
    def n_ranks_here(self) -> int:
        """Ranks that report to this daemon, or to one of another node that reports to this."""
        return len(self.ranks) + sum(node.n_ranks for node in self.nodes.values())

    @property
    def has_brain(self) -> bool:
        """Whether this job has a brain."""
        return self._brain is not None

    def give_brain(self, make: Callable[[], Brain]) -> None:
        """Take the brain that is made, and replay to it what happened before; if that raises, nothing is tuned."""
        try:
            self._brain = make()
        except Exception as error:
            self._brain_failed(error)
        if self.highest_epoch:
            self.tell(lambda brain: brain.adopted(self.highest_epoch, self.step))
        backlog, self._backlog, self._backlog_bytes = self._backlog, [], 0
        for event in backlog:
            self.tell(event)

    def tell(self, event: Callable[[Brain], None], n_bytes: int = 0) -> None:
        """Call the brain; if it raises, tuning of this job stops.

        Args:
            n_bytes: of the records that `event` keeps.
        """
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
            self.tell(ask)
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
        """Hand new knowledge of earlier runs to the brain."""

        def swap(brain: Brain) -> None:
            brain.knowledge = knowledge

        self.tell(swap)

    def observe(self, rank: int, records: NDArray[np.void]) -> None:
        """Records (OBSERVATION, shape [n]) that `rank` sent."""
        self.n_observations += len(records)
        self.joiner.add(rank, records)
        if rank == self.lead_rank:
            sane = (records["message_bytes"] > 0) & (records["message_bytes"] < 2**62)
            block = records if sane.all() else records[sane]
            self.misaligned_sizes.observe(block)
            self.tell(lambda brain: brain.sequence(block), block.nbytes)

    def passed_by(self, rank: int, passages: Passages) -> None:
        """All that `rank` saw so far to pass the tuner by, and not to."""
        self._passages[rank] = passages

    def lateness(self) -> Lateness:
        """Which ranks collectives wait for."""
        return self.late_ranks.lateness(float(median(self._step_us)) if self._step_us else 0.0)

    def node_news(self) -> tuple[str, Lateness]:
        """What the leading daemon is told of this node: its name, and who is late here."""
        return self.late_ranks.hosts.get(self.lead_rank, ""), self.lateness()

    def news(self, now_s: float, *, at_once: bool = False) -> tuple[Passages, Lateness] | None:
        """What passed the tuner by and who is late, if the store should be told of it now."""
        if not at_once and now_s - self._told_at_s < NEWS_EVERY_S:
            return None
        self._told_at_s = now_s
        known, self._told = self._told, (summed(self._passages.values()), self.lateness())
        return None if self._told == known else self._told

    def reporter_came(self, now_s: float) -> None:
        """A rank or another node's daemon is here, and others may be on their way."""
        self.changed_at_s, self._is_settled = now_s, False
        self._n_reporters = self.n_ranks
        self.joiner.members_changed()

    def reporter_left(self, now_s: float) -> None:
        """A rank or another node's daemon is gone.

        The others still report its last calls: until these are joined, the number of reporters stays as it was.
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
        # What goes on to a leading daemon must be there before that one's joiner gives up.
        patience_s = SETTLE_S if self.uplink.is_alive(now_s) else GREETED_S
        if not self._is_settled and (self.n_ranks_here >= self.n_ranks or now_s - self.changed_at_s >= patience_s):
            if len(self.ranks) + len(self.nodes) < self._n_settled:
                self.joiner.member_is_gone()
            self._is_settled = True
            self._n_settled = self._n_reporters = len(self.ranks) + len(self.nodes)

    def join(self, now_s: float, *, give_up: bool = False) -> NDArray[np.void]:
        """Observations (OBSERVATION, shape [n]) of the calls that are complete."""
        self._settle(now_s)
        if not self.joiner.n_pending:
            return np.empty(0, OBSERVATION)
        observed, _ = self.joiner.join(now_s, self._n_reporters, is_settled=self._is_settled, give_up=give_up)
        return observed

    def finish_step(self, step: StepRecord) -> None:
        """The leading rank has finished a step."""
        self.step = max(self.step, step.step)
        # A full queue may have lost that message, for example when the plan expired while this daemon stood still.
        if step.is_whole and step.epoch != self.epoch and step.step >= self._epoch_since_step:
            self.adopt(step.epoch, step.step)
        if step.is_whole:
            self._has_steps = True
            self._step_us.append(step.duration_us)
            if step.exposed_us is not None:
                self._exposed_us.append(step.exposed_us)
        self.tell(lambda brain: brain.step_finished(step))

    def adopt(self, epoch: int, step: int) -> None:
        """All ranks run under `epoch` from `step` on."""
        if (epoch, step) == (self.epoch, self._epoch_since_step):
            return
        self.epoch, self._epoch_since_step = epoch, step
        if self.offer is not None and self.offer.epoch <= epoch:
            self.offer = None
        self.tell(lambda brain: brain.adopted(epoch, step))

    def take_name(self, name: str) -> bool:
        """Take `name` if it is one and the job has none yet; whether it was taken. Some ranks may not know the name."""
        if self.name or not is_job_name(name):
            return False
        self.name = name
        return True

    def rank_failed(self, rank: int, failure: str) -> None:
        """A rank left by an exception of type `failure`; empty: it left in good order."""
        self.failure = self.failure or failure_of(rank, failure) or ""

    def measure_rate(self, now_s: float) -> None:
        """Update the rate of observations, every RATE_PERIOD_S."""
        elapsed_s = now_s - self._rate_at_s
        if elapsed_s >= RATE_PERIOD_S:
            self._rate = (self.n_observations - self._n_at_rate) / elapsed_s
            self._rate_at_s, self._n_at_rate = now_s, self.n_observations

    def status(self, now_s: float) -> JobStatus:
        """What `zerotune status` shows of this job."""
        heard_at_s = [(rank, session.heard_at_s) for rank, (_, session) in self.ranks.items()]
        heard_at_s += [(node.rank, node.heard_at_s) for node in self.nodes.values() for _ in range(node.n_ranks)]
        silent = self.silent_ranks.describe(heard_at_s, now_s)
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
            heard_s_ago=max([self.silent_ranks.oldest_s(now_s), *(now_s - at_s for _, at_s in heard_at_s)]),
        )

    def _forwards(self, now_s: float) -> str:
        """Text about a leading daemon on another node: whether it is there."""
        if not self.uplink.endpoint:
            return ""
        if self.uplink.is_alive(now_s):
            return f"forwards to {self.uplink.endpoint}"
        return f"{self.uplink.endpoint} is silent, or has other keys"

    def _stepless(self) -> str:
        """Text about a job whose steps nobody sees; empty: they are seen, or may be soon."""
        if self._has_steps or self.step < STEPLESS_AFTER:
            return ""
        return "no training step is seen to end: calls are tuned by their own times, without the step guard"

    def _crowded(self) -> str:
        """Text about a device that has no memory for new connections; empty: it has."""
        if self._short_memory is None:
            return ""
        cached = f", {self.cached_share:.0%} of it unused in torch's cache" if self.cached_share >= LEAST_CACHED else ""
        return f"{self._short_memory:.0%} of device memory is in use{cached}: only what NCCL has connected is tried"

    def _missing(self, now_s: float) -> str:
        """Text about ranks that have not greeted; empty while they may be on their way.

        Empty, too, where all follow a plan: then they have an agent, and report to a daemon on another node.
        """
        if self.n_ranks_here >= self.n_ranks or self.epoch or now_s - self.changed_at_s < MISSING_AFTER_S:
            return ""
        return (
            f"{self.n_ranks_here} of {self.n_ranks} ranks report here so far: the others have not joined yet, report"
            " to another daemon, or run without the agent"
        )


def failure_of(rank: int, failure: str) -> str | None:
    """What is kept of an exception of type `failure` that ended a rank's script; None where none did."""
    return f"rank {rank}: {failure if failure.isidentifier() else 'an exception'}" if failure else None


def headline(decision: Decision) -> str:
    """A decision in one line."""
    if decision.is_of_job:
        return f"epoch {decision.epoch}: {decision.reason}"
    key = decision.key
    what = f"{key.collective.name} {key.phase.name} from {size_class_floor(key.size_class)} bytes"
    return f"epoch {decision.epoch}: {decision.kind} {decision.candidate} for {what}: {decision.reason}"

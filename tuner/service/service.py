"""The daemon's answers: messages in, messages out. Pure: clock, store and brains are passed in.

Slow work is done elsewhere: `learning` requests loads and fits from a learner, and `model_ready` takes the
result. Until a fabric's knowledge is loaded, its jobs are only observed and stored.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...store.job_options import JobOptions
from ...store.records import StepRecord
from ...store.wire import (
    Adopted,
    AgentMessage,
    Bell,
    CostTables,
    DaemonMessage,
    ErrorReply,
    Forwarded,
    Goodbye,
    Hello,
    JobStatus,
    Observations,
    Observe,
    PlanOffer,
    Start,
    Steps,
    Welcome,
)
from ..join import measurements_of
from ..modeling.requests import Learning
from .absent_jobs import AbsentJobs
from .job import SETTLE_S, Job, failure_of, headline
from .nodes import NodeSession, NoUplinks, RankSession, UplinksLike

if TYPE_CHECKING:
    from ...store.sqlite.database import Store
    from ..learning.brain import Brain

_log = logging.getLogger("zerotune.service")

RANK_TIMEOUT_S: Final = 10.0
"""A rank greets every second; after this time without a greeting it is gone."""
JOIN_EVERY_S: Final = 0.05
"""Time for which observations are collected before they are joined."""
TICK_EVERY_S: Final = 0.5
MAX_SESSIONS: Final = 16_384
MAX_JOBS: Final = 1024
MAX_FACTS_CHARACTERS: Final = 16_384
"""Longest description of a job's fabric, which is stored with each job."""

Reply = tuple[bytes, DaemonMessage]


BrainFactory = Callable[[str, str, Mapping[str, "str | int | float | bool"], object, JobOptions], "Brain"]
"""(job_id, fabric_id, fabric, knowledge, options) -> brain."""
Share = Callable[[str, Mapping[str, "str | int | float | bool"], str, NDArray[np.void]], None]
"""(fabric_id, fabric, job_id, MEASUREMENT of shape (n,)) -> None."""


class Service:
    """All jobs of one daemon.

    `clock` gives seconds since the epoch and must never go back. `brains` makes a job's brain once its fabric's
    knowledge is loaded. `share` sends measurements to other nodes; it and `uplinks`, to jobs whose rank 0 is elsewhere,
    must neither block nor raise.
    """

    def __init__(
        self,
        store: Store,
        brains: BrainFactory,
        clock: Callable[[], float],
        welcome: Welcome,
        uplinks: UplinksLike | None = None,
        share: Share | None = None,
    ) -> None:
        self._store = store
        self._share = share
        self._brains = brains
        self._clock = clock
        self._welcome = welcome
        self._uplinks = uplinks or NoUplinks()
        self._jobs: dict[str, Job] = {}
        self._senders: dict[bytes, tuple[str, int]] = {}
        self.absent_jobs = AbsentJobs(clock)
        self.learning = Learning(clock)
        """The knowledge that jobs start from, and requests to the learner."""
        self._slices: Iterator[list[Reply]] | None = None
        """The remaining slices of a job's tick."""
        self.n_refused = 0
        """Messages answered with an error."""
        self.n_ended = 0
        self.n_unannounced = 0
        """Messages of ranks that had not greeted, as after a restart of the daemon."""

    @property
    def n_sessions(self) -> int:
        """Ranks connected."""
        return len(self._senders)

    @property
    def job_ids(self) -> Container[str]:
        """Ids of the jobs that have a rank here."""
        return self._jobs.keys()

    def jobs(self) -> tuple[JobStatus, ...]:
        """Status of each job that has a rank here."""
        return tuple(job.status(self._clock()) for job in self._jobs.values())

    def handle(self, sender: bytes, message: AgentMessage, records: NDArray[np.void] | None) -> list[Reply]:
        """Handle one message of a rank or of another node's daemon; returns answers with their receivers.

        `records` belong to Observations and Forwarded (OBSERVATION, shape (n,)) or to CostTables.
        """
        if isinstance(message, Hello):
            return self._hello(sender, message)
        if isinstance(message, Start):
            self._store.record_start(message.job_id, message.name, message.training, message.environment)
            return [(sender, self._welcome)]
        if isinstance(message, Forwarded) and records is not None:
            return self._forwarded(sender, message, records)
        owner = self._senders.get(sender)
        if owner is None:
            self.n_unannounced += 1
            if isinstance(message, Goodbye):
                self._ended_unannounced(message)
            return []
        job = self._jobs[owner[0]]
        rank, session = owner[1], job.ranks[owner[1]][1]
        if getattr(message, "job_id", job.job_id) != job.job_id or getattr(message, "rank", rank) != rank:
            return self._refuse(sender, "NotYours", f"this connection is rank {rank} of job {job.job_id}")
        session.last_message_at_s = self._clock()
        if isinstance(message, Observations) and records is not None:
            session.n_dropped = message.n_dropped
            if message.passages is not None:
                job.passed_by(rank, message.passages)
            if not len(records):
                return []
            job.observe(rank, records)
            job.next_tick_s = min(job.next_tick_s, session.last_message_at_s + JOIN_EVERY_S)
        elif isinstance(message, CostTables) and records is not None and rank == job.lead_rank:
            job.call_brain(lambda brain: brain.cost_tables(records), records.nbytes)
        elif isinstance(message, Steps) and rank == job.lead_rank:
            job.cached_share = message.cached_share
            return self._steps(job, message.steps)
        elif isinstance(message, Adopted) and rank == job.lead_rank:
            job.adopt(message.epoch, message.step)
        elif isinstance(message, Bell):
            return self._ring(job, rank, message)
        elif isinstance(message, Goodbye):
            job.rank_failed(rank, message.failure)
            self._leave(sender)
        return []

    def tick(self) -> list[Reply]:
        """Do the work that is due: joins, plans, windows, silent ranks.

        One call does only a slice of one job's work, so that no message waits long; call again at
        `next_tick_s`.
        """
        if self._slices is None:
            now_s = self._clock()
            job = min(self._jobs.values(), key=lambda job: job.next_tick_s, default=None)
            if job is None or job.next_tick_s > now_s:
                return []
            job.next_tick_s = now_s + TICK_EVERY_S
            self._slices = self._tick_job(job, now_s)
        replies = next(self._slices, None)
        if replies is None:
            self._slices = None
            return []
        return replies

    @property
    def next_tick_s(self) -> float:
        """The next time on the clock at which `tick` has work; infinite without a job."""
        if self._slices is not None:
            return self._clock()
        return min((job.next_tick_s for job in self._jobs.values()), default=float("inf"))

    def handle_uplink(self, job_id: str, message: DaemonMessage) -> list[Reply]:
        """Handle one message of the leading daemon of a job whose rank 0 is on another node."""
        job = self._jobs.get(job_id)
        if job is None or not job.uplink.endpoint:
            return []
        job.uplink.received(self._clock())
        if isinstance(message, Bell):
            return [(sender, Bell(job_id, message.number)) for sender, _ in job.ranks.values()]
        if not isinstance(message, Observe):
            return []
        job.windows.relayed(job.step, message.n_steps)
        return [(sender, Observe(job_id, message.n_steps)) for sender, _ in job.ranks.values()]

    def close(self) -> None:
        """The daemon ends: join and record all messages that have arrived; the jobs go on without it."""
        deque(self._slices or (), maxlen=0)
        for job in [*self._jobs.values()]:  # a job with silent ranks leaves the dict meanwhile
            deque(self._tick_job(job, self._clock(), give_up=True), maxlen=0)

    def stood_still(self, held_up_s: float) -> None:
        """This daemon itself was stopped for `held_up_s`: no rank counts as silent for that time.

        Messages of that time are not read yet.
        """
        now_s = self._clock()
        for job in self._jobs.values():
            sessions: list[RankSession | NodeSession] = [session for _, session in job.ranks.values()]
            for session in [*sessions, *job.nodes.values()]:
                session.last_message_at_s = min(now_s, session.last_message_at_s + held_up_s)

    def model_ready(self, fabric_id: str, knowledge: object) -> None:
        """Take the learner's result; jobs of the fabric use it from now on."""
        self.learning.ready(fabric_id, knowledge)
        for job in self._jobs.values():
            if job.fabric_id == fabric_id:
                if job.has_brain:
                    job.set_knowledge(knowledge)
                else:
                    self._give_brain(job)

    # ---- inside ------------------------------------------------------------------------------

    def _tick_job(self, job: Job, now_s: float, *, give_up: bool = False) -> Iterator[list[Reply]]:
        """One job's tick, in slices between which messages can be answered."""
        job.uplink.hello(now_s, job.lead_rank, len(job.ranks), job.node_news)
        yield from self._use(job, job.join(now_s, give_up=give_up))
        job.measure_rate(now_s)
        if (news := job.news(now_s)) is not None:
            self._store.update_job(job.job_id, passages=news[0], lateness=news[1])
        replies = self._windows(job)
        for sender, node in list(job.nodes.items()):
            if now_s - node.last_message_at_s > RANK_TIMEOUT_S:
                job.silent_ranks.node_gone(node.rank, node.last_message_at_s)
                self._node_leaves(job, sender)
        for rank, (sender, session) in list(job.ranks.items()):
            if now_s - session.last_message_at_s > RANK_TIMEOUT_S:
                _log.info("rank %d of job %s is silent: taken as gone", rank, job.job_id)
                job.silent_ranks.rank_gone(rank, session.last_message_at_s)
                self._leave(sender)
        yield replies

    def _use(self, job: Job, observed: NDArray[np.void]) -> Iterator[list[Reply]]:
        """Forward joined observations to the leading daemon, or record them as measurements here."""
        if not len(observed):  # settings that earlier jobs proved need no measurement
            yield self._think(job)
            return
        if job.uplink.is_alive(self._clock()):
            job.uplink.forward(job.lead_rank, len(job.ranks), observed)
            return
        yield []
        block = measurements_of(observed)
        if len(block):
            self._record(job, block)
            yield []
            job.call_brain(lambda brain: brain.observe(block), block.nbytes)
            yield []
        yield self._think(job)

    def _forwarded(self, sender: bytes, message: Forwarded, records: NDArray[np.void]) -> list[Reply]:
        """Handle a message of another node's daemon; ignore it unless rank 0 is on this node."""
        job, now_s = self._jobs.get(message.job_id), self._clock()
        if job is None or 0 not in job.ranks:
            return []
        if not 0 < message.rank < job.n_ranks:
            return self._refuse(sender, "BadHello", f"rank {message.rank} of {job.n_ranks} leads no other node")
        job.silent_ranks.node_is_here(message.rank)
        if message.n_ranks <= 0:
            if sender in job.nodes:
                self._node_leaves(job, sender)
            return []
        replies: list[Reply] = []
        if sender not in job.nodes:
            if len(job.nodes) >= MAX_SESSIONS:
                return self._refuse(sender, "BadHello", f"{MAX_SESSIONS} nodes are connected already")
            _log.info("job %s: the daemon of rank %d's node is here", job.job_id, message.rank)
            job.reporter_came(now_s)
            if remaining := job.windows.remaining(job.step):
                replies.append((sender, Observe(job.job_id, remaining)))
        job.nodes[sender] = NodeSession(message.rank, message.n_ranks, now_s)
        job.late_ranks.node_reported(message.rank, message.n_ranks, message.node, message.lateness)
        if len(records):
            job.observe(message.rank, records)
            job.next_tick_s = min(job.next_tick_s, now_s + JOIN_EVERY_S)
            return replies
        return [*replies, (sender, self._welcome)]

    def _node_leaves(self, job: Job, sender: bytes) -> None:
        node = job.nodes.pop(sender)
        job.late_ranks.node_left(node.rank)
        _log.info("job %s: the daemon of rank %d's node is gone", job.job_id, node.rank)
        job.reporter_left(self._clock())

    def _hello(self, sender: bytes, hello: Hello) -> list[Reply]:
        now_s = self._clock()
        if (problem := _problem(hello)) or (sender not in self._senders and self.n_sessions >= MAX_SESSIONS):
            return self._refuse(sender, "BadHello", problem or f"{MAX_SESSIONS} ranks are connected already")
        job = self._jobs.get(hello.job_id)
        if self._senders.get(sender) == (hello.job_id, hello.rank) and job is not None:
            job.ranks[hello.rank][1].last_message_at_s = now_s
            self._find_leader(job, hello)
            is_shadow = hello.rank == 0 and job.shadow
            return [(sender, msgspec.structs.replace(self._welcome, shadow=job.shadow) if is_shadow else self._welcome)]
        if sender in self._senders:
            self._leave(sender)
            job = self._jobs.get(hello.job_id)
        if job is None:
            if len(self._jobs) >= MAX_JOBS:
                return self._refuse(sender, "BadHello", f"{MAX_JOBS} jobs are connected already")
            job = self._jobs[hello.job_id] = Job(hello, now_s, self._uplinks)
            self._store.record_job(hello.job_id, hello.fabric_id, hello.fabric, hello.n_ranks, job.name)
            _log.info("job %s with %d ranks on fabric %s", hello.job_id, hello.n_ranks, hello.fabric_id)
        elif job.take_name(hello.name):
            self._store.update_job(hello.job_id, name=job.name)
        previous = job.ranks.pop(hello.rank, None)
        if previous is not None:
            self._senders.pop(previous[0], None)
        self._senders[sender] = hello.job_id, hello.rank
        job.ranks[hello.rank] = sender, RankSession(now_s)
        job.silent_ranks.rank_is_here(hello.rank)
        job.late_ranks.hosts[hello.rank] = hello.node
        job.reporter_came(now_s)
        if len(job.ranks) >= job.n_ranks:
            job.next_tick_s = now_s  # all ranks are here: time their calls from now on
        self._find_leader(job, hello)
        replies: list[Reply] = [(sender, self._welcome)]
        if hello.rank == 0:
            job.highest_epoch = max(job.highest_epoch, hello.epoch)
            self._give_brain(job)
            if job.offer is not None:
                replies.append((sender, PlanOffer(job.job_id, job.offer)))
        if remaining := job.windows.remaining(job.step):
            replies.append((sender, Observe(job.job_id, remaining)))
        return replies

    def _find_leader(self, job: Job, hello: Hello) -> None:
        if 0 in job.ranks:
            job.uplink.point_to("")
        elif hello.leader:
            job.uplink.point_to(hello.leader)

    def _give_brain(self, job: Job) -> None:
        """Make the job's brain, or request the knowledge it needs; only if rank 0 is here."""
        if job.has_brain or job.trouble or 0 not in job.ranks:
            return
        knowledge = self.learning.knowledge_of(job.fabric_id)
        if knowledge is not None:
            job.give_brain(lambda: self._brains(job.job_id, job.fabric_id, job.fabric, knowledge, job.options))

    def _ring(self, job: Job, rank: int, bell: Bell) -> list[Reply]:
        """Pass rank 0's wake-up to all other ranks, and another rank's to rank 0."""
        senders = [sender for each, (sender, _) in job.ranks.items() if (each == 0) != (rank == 0)]
        return [(sender, bell) for sender in [*senders, *(job.nodes if rank == 0 else ())]]

    def _steps(self, job: Job, steps: Sequence[StepRecord]) -> list[Reply]:
        steps = [_possible(step) for step in steps if step.duration_us >= 0]
        for step in steps:
            job.finish_step(step)
        self._store.record_steps(job.job_id, [step for step in steps if step.is_whole])
        return self._think(job) + self._windows(job)

    def _think(self, job: Job) -> list[Reply]:
        stage = job.stage
        plan, decided = job.think()
        if decided:
            self._store.record_decisions(decided)
            for decision in decided:
                if decision.is_control:
                    continue
                _log.info("job %s: %s", job.job_id, headline(decision))
        if job.stage != stage:
            self._store.update_job(job.job_id, stage=job.stage)
        if plan is None or 0 not in job.ranks:
            return []
        return [(job.ranks[0][0], PlanOffer(job.job_id, plan))]

    def _windows(self, job: Job) -> list[Reply]:
        settled = len(job.ranks) >= job.n_ranks or self._clock() - job.changed_at_s >= SETTLE_S
        is_led_elsewhere = job.uplink.is_alive(self._clock())
        if not settled or is_led_elsewhere or not (n_steps := job.windows.due(job.step)):
            return []
        receivers = [*(sender for sender, _ in job.ranks.values()), *job.nodes]
        return [(receiver, Observe(job.job_id, n_steps)) for receiver in receivers]

    def _record(self, job: Job, block: NDArray[np.void]) -> None:
        self._store.record_measurements(job.fabric_id, job.job_id, block)
        if self._share is not None:
            self._share(job.fabric_id, job.fabric, job.job_id, block)
        self.learning.measured(job.fabric_id, len(block))

    def _ended_unannounced(self, goodbye: Goodbye) -> None:
        """A rank leaves that never greeted this new daemon: record its job as ended."""
        if goodbye.job_id not in self._jobs:
            failure = failure_of(goodbye.rank, goodbye.failure)
            self._store.update_job(goodbye.job_id, ended_at_s=self._clock(), is_lost=False, failure=failure)

    def _leave(self, sender: bytes) -> None:
        job_id, rank = self._senders.pop(sender)
        job = self._jobs[job_id]
        _, session = job.ranks.pop(rank)
        job.n_gone_drops += session.n_dropped
        job.reporter_left(self._clock())
        if job.ranks:
            return
        deque(self._use(job, job.join(self._clock(), give_up=True)), maxlen=0)
        self._think(job)
        job.uplink.end(rank)
        passages, lateness = job.news(self._clock(), at_once=True) or (None, None)
        end = self.absent_jobs.has_ended(
            job_id, job.name, job.step, silent_since_s=job.silent_ranks.last_message_at_s, failure=job.failure
        )
        self._store.update_job(
            job_id,
            stage=job.stage,
            ended_at_s=self._clock(),
            is_lost=end.fell_silent,
            failure=end.failure,
            passages=passages,
            lateness=lateness,
        )
        del self._jobs[job_id]
        self.n_ended += 1
        self.learning.job_ended(job.fabric_id)
        _log.info("job %s %s", job_id, f"failed ({end.failure})" if end.failure else "ended")

    def _refuse(self, sender: bytes, code: str, text: str) -> list[Reply]:
        self.n_refused += 1
        return [(sender, ErrorReply(code, text))]


def _problem(hello: Hello) -> str:
    """Why this Hello is refused; empty: it is not."""
    n_characters = sum(len(name) + len(str(value)) for name, value in hello.fabric.items())
    if n_characters > MAX_FACTS_CHARACTERS:
        return f"its fabric is described in {n_characters:,} characters, {MAX_FACTS_CHARACTERS:,} are allowed"
    return "" if hello.rank < hello.n_ranks else f"rank {hello.rank} of {hello.n_ranks} is impossible"


def _possible(step: StepRecord) -> StepRecord:
    """The step, with its exposed communication limited to its duration."""
    is_possible = step.exposed_us is None or step.exposed_us <= step.duration_us
    return step if is_possible else msgspec.structs.replace(step, exposed_us=step.duration_us)

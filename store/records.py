"""Frozen records and enumerations that every part of zerotune shares.

Integer values of `Collective`, `Algorithm` and `Protocol` are NCCL's own (nccl_tuner.h), so that
they pass through the plugin, the wire and the store without translation. Units are suffixes:
`_bytes`, `_us` (microseconds), `_ns`, `_s` (seconds since the epoch).
"""

from __future__ import annotations

import math
from collections.abc import Container
from enum import Enum, IntEnum
from functools import cache
from typing import Annotated, Final

import msgspec

from .job_names import titled
from .lateness import Lateness
from .passages import Passages

# Ranges of numbers that travel: what is decoded outside of them is refused there.
U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Ordinal = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""A step, or an epoch: with room to count on, and below the marks of unknown ones."""
MessageBytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Micros = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
"""Thirty years at most, and never NaN; differences of two clocks may be a little below 0."""
Pressure = Annotated[float, msgspec.Meta(ge=-1, le=1000)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Collective(IntEnum):
    """Collective operations, with the values of NCCL's `ncclFunc_t`."""

    broadcast = 0
    reduce = 1
    all_gather = 2
    reduce_scatter = 3
    all_reduce = 4
    send_recv = 5
    send = 6
    recv = 7
    all_to_all = 8
    scatter = 9
    gather = 10


class Algorithm(IntEnum):
    """NCCL algorithms, with NCCL's values."""

    tree = 0
    ring = 1
    collnet_direct = 2
    collnet_chain = 3
    nvls = 4
    nvls_tree = 5
    pat = 6


class Protocol(IntEnum):
    """NCCL protocols, with NCCL's values."""

    ll = 0
    ll128 = 1
    simple = 2


class Phase(IntEnum):
    """Where in the training step a collective is."""

    other = 0
    forward_gather = 1
    backward_gather = 2
    gradient_scatter = 3
    post_step_gather = 4


class TimingSource(IntEnum):
    """Where a duration comes from; `none` means that there is no duration."""

    none = 0
    gpu_kernel = 1
    """GPU timestamps of the kernel's channels (profiler ABI v4 and newer)."""
    cpu_kernel = 2
    """CPU timestamps of the kernel-channel events (profiler ABI v3)."""
    cpu_collective = 3
    """CPU time between the collective's start and stop events: enqueue only, least trusted."""
    emulated = 4
    """The emulated NCCL's virtual clock."""
    reported = 5
    """Taken over from an imported file, as that file states it."""


class Source(IntEnum):
    """How a measurement came to be."""

    live = 0
    sweep = 1
    imported = 2


class Outcome(IntEnum):
    """What became of a measured collective."""

    ok = 0
    failed = 1
    hung = 2
    outlier = 3


class Stage(IntEnum):
    """What kind of workload the sequence of collectives shows."""

    unknown = 0
    ddp = 1
    zero1 = 2
    zero2 = 3
    zero3 = 4
    zero1_or_2 = 5
    """Gradients leave once per gather of parameters, as in both."""


class HowKnown(str, Enum):
    """What it is based on that a share of communication is exposed."""

    unknown = "unknown"
    """It may be any share."""
    estimated = "estimated"
    """From how steps get longer where calls do."""
    measured = "measured"
    """From what computation waited for."""


class MissingEvidence(str, Enum):
    """Why the collectives of a job do not show its stage."""

    nothing = ""
    """Nothing is missing: they show it."""
    no_collectives = "no_collectives"
    only_small = "only_small"
    """No collective is larger than a counter or a flag."""
    nothing_reduced = "nothing_reduced"
    """Much is gathered or broadcast, and no gradient is sent."""
    one_size = "one_size"
    """All are all-reduces of one size: one bucket of gradients, several equal ones, or activations that are summed."""
    no_repetition = "no_repetition"
    """No two steps were seen that are alike."""
    ambiguous = "ambiguous"
    """Several kinds of training, or none of those known, send what was seen."""
    too_early = "too_early"
    """So few steps show nothing yet, be it what is there or what is not."""
    incomplete = "incomplete"
    """A trace has collectives whose size or kind it does not tell."""


MIN_CHUNK_BYTES: Final = 4096
MAX_CHUNK_BYTES: Final = 32 * 2**20
"""ZT_MIN_CHUNK_KIB and ZT_MAX_CHUNK_KIB of zerotune_plugin.h; NCCL itself caps a chunk to its buffers."""


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One setting: algorithm, protocol, channel count, chunk size. As parts may be unknown, only names have an order.

    `algorithm` and `protocol` are both None (leave NCCL's choice alone) or both set. An algorithm alone ("tree/any") is
    what ran where nobody knows the protocol: it is recorded and compared as a whole, and never asked for.
    `n_channels` 0 and `chunk_bytes` 0 mean no opinion. NCCL asks for chunk sizes from 2.30 on.
    """

    algorithm: Algorithm | None = None
    protocol: Protocol | None = None
    n_channels: int = 0
    chunk_bytes: int = 0

    def __post_init__(self) -> None:
        if self.algorithm is None and self.protocol is not None:
            raise ValueError(f"protocol {self.protocol} without an algorithm: set both or neither")
        if not 0 <= self.n_channels <= 64:
            raise ValueError(f"n_channels {self.n_channels} is outside 0..64")
        if self.chunk_bytes and not (
            MIN_CHUNK_BYTES <= self.chunk_bytes <= MAX_CHUNK_BYTES and self.chunk_bytes % 1024 == 0
        ):
            raise ValueError(f"chunk_bytes {self.chunk_bytes} is neither 0 nor whole KiB from 4 KiB to 32 MiB")

    @property
    def is_baseline(self) -> bool:
        """True when nothing is asked of NCCL."""
        return self.algorithm is None and self.n_channels == 0 and self.chunk_bytes == 0

    @property
    def lacks_protocol(self) -> bool:
        """True when an algorithm ran under a protocol that is not known: nothing that can be asked for."""
        return self.algorithm is not None and self.protocol is None

    @property
    def is_half(self) -> bool:
        """True when a part of what ran is not known: of nothing on offer can be said that it ran."""
        return self.protocol is None and not self.is_baseline

    def __str__(self) -> str:
        if self.is_baseline:
            return "baseline"
        channels = f"/{self.n_channels}ch" if self.n_channels else ""
        channels += f"/{self.chunk_bytes // 1024}KiB" if self.chunk_bytes else ""
        if self.algorithm is None:
            return f"any{channels}"
        return f"{self.algorithm.name}/{'any' if self.protocol is None else self.protocol.name}{channels}"


LEAST_US: Final = 0.01
"""Nothing is shorter: what is reported as less was not measured."""
BASELINE: Final = Candidate()


class CommunicatorClass(msgspec.Struct, frozen=True, order=True):
    """Communicators of one shape share decisions: `n_ranks` ranks over `n_nodes` nodes."""

    n_ranks: U32
    n_nodes: U32

    def __str__(self) -> str:
        ranks = "1 rank" if self.n_ranks == 1 else f"{self.n_ranks:,} ranks"
        return f"{ranks} on 1 node" if self.n_nodes == 1 else f"{ranks} on {self.n_nodes:,} nodes"


SIZE_CLASSES_PER_OCTAVE: Final = 4
SizeClass = Annotated[int, msgspec.Meta(ge=0, lt=64 * SIZE_CLASSES_PER_OCTAVE)]


def size_class(message_bytes: int) -> int:
    """Index of the quarter octave that holds `message_bytes`; exact at powers of two."""
    if message_bytes < 1:
        raise ValueError(f"message_bytes {message_bytes} is not positive")
    octave = message_bytes.bit_length() - 1
    quarter = 0
    for step in range(1, SIZE_CLASSES_PER_OCTAVE):
        if message_bytes >= size_class_floor(octave * SIZE_CLASSES_PER_OCTAVE + step):
            quarter = step
    return octave * SIZE_CLASSES_PER_OCTAVE + quarter


@cache
def size_class_floor(index: int) -> int:
    """Smallest `message_bytes` of size class `index`."""
    octave, quarter = divmod(index, SIZE_CLASSES_PER_OCTAVE)
    return math.ceil(float(2.0 ** (octave + quarter / SIZE_CLASSES_PER_OCTAVE)))


def size_class_range(index: int) -> tuple[int, int]:
    """Smallest and largest `message_bytes` of size class `index`, both inclusive."""
    return size_class_floor(index), size_class_floor(index + 1) - 1


class DecisionKey(msgspec.Struct, frozen=True, order=True):
    """What one decision is about: a communicator class, a collective, a phase, a size class."""

    communicator: CommunicatorClass
    collective: Collective
    phase: Phase
    size_class: SizeClass


def phase_name(phase: Phase | None) -> str:
    """How tables and plan files call the phase of a plan's row."""
    return "any" if phase is None else phase.name


class PlanRow(msgspec.Struct, frozen=True):
    """One row of a plan: for messages of `min_bytes` to `max_bytes` (inclusive), use `candidate`.

    A row with a phase holds only for calls whose phase follows from the communicator's history; None: for all calls.
    """

    communicator: CommunicatorClass
    collective: Collective
    phase: Phase | None
    min_bytes: MessageBytes
    max_bytes: MessageBytes
    candidate: Candidate
    reason: Text = ""
    model_id: Text = ""

    def __post_init__(self) -> None:
        if self.candidate.lacks_protocol:
            raise ValueError(f"{self.candidate} cannot be asked for: name the protocol")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Those that it holds in."""
        return tuple(Phase) if self.phase is None else (self.phase,)

    def holds_for(
        self, communicator: CommunicatorClass, collective: Collective, phase: Phase, message_bytes: int
    ) -> bool:
        """Whether such a call runs under it, its phase being known.

        Returns:
            Whether all of them are the row's.
        """
        place = self.communicator, self.collective
        is_there = place == (communicator, collective) and self.phase in (None, phase)
        return is_there and self.min_bytes <= message_bytes <= self.max_bytes


class NextStage(msgspec.Struct, frozen=True):
    """What a plan gives way to by itself, under the next epoch, whatever the daemon does until then.

    `n_steps` after the stage before came into force its first `n_rows` rows give way to `rows`.
    """

    n_steps: Ordinal
    n_rows: Ordinal
    rows: tuple[PlanRow, ...] = ()

    def __post_init__(self) -> None:
        if self.n_steps < 1 or self.n_rows < 0:
            raise ValueError(f"a stage that begins after {self.n_steps} steps and replaces {self.n_rows} rows")


MAX_STAGES: Final = 4
"""Stages that one plan may have: ZT_MAX_STAGES of zerotune_plugin.h."""


class Plan(msgspec.Struct, frozen=True):
    """An immutable table of decisions, or a short schedule of them.

    `epoch` is unique and rising within a job; 0 is the empty plan that every job starts with. `gathers_after_step` says
    that all-gathers seen outside backward belong to `post_step_gather` (ZeRO-1 and 2) and not to `forward_gather`
    (ZeRO-3). `then` are the stages that follow by themselves; the last one stays in force.
    """

    epoch: Ordinal
    rows: tuple[PlanRow, ...] = ()
    gathers_after_step: bool = False
    then: tuple[NextStage, ...] = ()

    def __post_init__(self) -> None:
        if len(self.then) >= MAX_STAGES:
            raise ValueError(f"a plan of {1 + len(self.then)} stages; {MAX_STAGES} are possible")

    @property
    def control_epochs(self) -> tuple[int, ...]:
        """Epochs of its control windows: stages of NCCL's own choice between two that ask for something."""
        stages = [stage for _, stage in self.stages()]
        three = zip(stages, stages[1:], stages[2:], strict=False)
        return tuple(own.epoch for before, own, after in three if before.rows and after.rows and not own.rows)

    @property
    def last_epoch(self) -> int:
        """Epoch of the last stage."""
        return self.epoch + len(self.then)

    def stages(self) -> list[tuple[int, Plan]]:
        """Each stage as a plan of its own, with the number of steps after which it follows the first one."""
        stages, n_steps, rows = [(0, Plan(self.epoch, self.rows, self.gathers_after_step))], 0, self.rows
        for number, stage in enumerate(self.then, 1):
            n_steps, rows = n_steps + stage.n_steps, (*stage.rows, *rows[stage.n_rows :])
            stages.append((n_steps, Plan(self.epoch + number, rows, self.gathers_after_step)))
        return stages

    def at(self, n_steps: int) -> Plan:
        """The plan in force so many steps after this one came into force, if no other comes."""
        if not self.then or n_steps < self.then[0].n_steps:
            return self
        rows = (*self.then[0].rows, *self.rows[self.then[0].n_rows :])
        return Plan(self.epoch + 1, rows, self.gathers_after_step, self.then[1:])

    def without(self, collectives: Container[Collective]) -> Plan:
        """This plan with no row of these."""
        rows, then = self.rows, []
        for stage in self.then:
            n_left = sum(row.collective not in collectives for row in rows[: stage.n_rows])
            left = tuple(row for row in stage.rows if row.collective not in collectives)
            then.append(NextStage(stage.n_steps, n_left, left))
            rows = (*stage.rows, *rows[stage.n_rows :])
        left = tuple(row for row in self.rows if row.collective not in collectives)
        return Plan(self.epoch, left, self.gathers_after_step, tuple(then))

    def at_last(self) -> Plan:
        """The stage that stays in force if no other plan comes."""
        return self.stages()[-1][1]


class Observation(msgspec.Struct, frozen=True):
    """One collective on one rank, as traces and importers give it; None means unknown."""

    sequence: int
    collective: Collective
    message_bytes: int
    n_ranks: int
    rank: int = 0
    comm_id: int = 0
    n_nodes: int | None = None
    phase: Phase = Phase.other
    datatype: str | None = None
    algorithm: Algorithm | None = None
    protocol: Protocol | None = None
    n_channels: int | None = None
    start_ns: int | None = None
    duration_us: float | None = None
    timing_source: TimingSource = TimingSource.none
    memory_pressure: float | None = None
    epoch: int = 0
    step: int | None = None


class Exposure(msgspec.Struct, frozen=True):
    """The share of communication that computation waits for: the least and the most that it may be (90 %)."""

    how: HowKnown = HowKnown.unknown
    least: float = 0.0
    most: float = 1.0


class StepRecord(msgspec.Struct, frozen=True):
    """One training step on one rank.

    `duration_us` is read off the training clock: wall time, or the emulated NCCL's virtual clock.
    `exposed_us` is communication that computation had to wait for; None when unknown. `is_whole` is False for what no
    other step may be compared with: plans changed within it, nothing has been exchanged yet, or it is an interval of a
    job whose steps are not seen.
    """

    step: Ordinal
    epoch: Ordinal
    duration_us: Micros
    exposed_us: Micros | None = None
    memory_pressure: Pressure | None = None
    is_whole: bool = True


class DecisionKind(str, Enum):
    """What a decision is about; those from `pace` on concern the whole job."""

    explore = "explore"
    promote = "promote"
    keep = "keep"
    rollback = "rollback"
    prior = "prior"
    """Known from earlier jobs."""
    provisional = "provisional"
    """It runs in most steps, though it is not proven to be faster."""
    pace = "pace"
    """Training's own pace has changed."""
    regime = "regime"
    """The network has."""
    variant = "variant"
    """Another plan was compared with the one in force."""
    takeover = "takeover"
    """Another daemon began to decide."""
    shadow = "shadow"
    """What a daemon in shadow would have gained."""
    control = "control"
    """NCCL's own choice runs for a control window, under this epoch."""
    freeze = "freeze"
    """From here on nothing new is tried."""


class Decision(msgspec.Struct, frozen=True):
    """Why one row of a plan is what it is; what `zerotune explain` reads."""

    job_id: str
    fabric_id: str
    key: DecisionKey
    candidate: Candidate
    epoch: int
    kind: str
    """Of a `DecisionKind`, or of an older version."""
    reason: str
    predicted_us: float | None = None
    predicted_low_us: float | None = None
    predicted_high_us: float | None = None
    baseline_us: float | None = None
    n_measurements: int = 0
    model_id: str = ""
    decided_at_s: float = 0.0
    alternatives: str = "[]"
    """JSON list of the other candidates: setting, predicted interval, measured median and count."""
    step: int | None = None
    """The newest step known when this was decided; for a change of pace the step that showed it.

    None in decisions of older versions.
    """

    @property
    def is_control(self) -> bool:
        """Whether it only says that NCCL's own choice runs for a control window, as many do, all alike."""
        return self.kind == DecisionKind.control

    @property
    def is_of_job(self) -> bool:
        """Whether this concerns the whole job: its key is then only one of many."""
        return self.kind in OF_JOB


OF_JOB: Final = tuple(DecisionKind)[tuple(DecisionKind).index(DecisionKind.pace) :]


class CandidateStatistics(msgspec.Struct, frozen=True):
    """What the store knows of one candidate under one key; durations of successful runs only."""

    key: DecisionKey
    candidate: Candidate
    is_default: bool
    """True when NCCL chose this setting by itself."""
    count: int
    median_us: float
    mean_us: float
    std_us: float
    min_us: float
    last_seen_s: float
    level_std: float = 0.0
    """Standard error (log) of its comparison with NCCL's own choice that comes from running at different times."""


class ModelRecord(msgspec.Struct, frozen=True):
    """A fitted model at rest: safe bytes, never a pickle, and what they depend on."""

    name: str
    fabric_id: str
    blob: bytes
    versions: dict[str, str]
    """Versions of the features, of scikit-learn ...; a mismatch means refit."""
    training_hash: str
    error: float | None
    """Error on held-out data, in the model's own unit; None when there was too little data."""
    created_at_s: float
    is_damaged: bool = False
    """Its row in the store is damaged: only its name and fabric are known."""


class JobRecord(msgspec.Struct, frozen=True):
    """One job as the store remembers it; `ended_at_s` None while it runs, or where nobody saw its end."""

    job_id: str
    fabric_id: str
    n_ranks: int
    stage: Stage
    started_at_s: float
    ended_at_s: float | None = None
    name: str = ""
    """What `launch --name` called it."""
    is_lost: bool = False
    """Its ranks fell silent, or the daemon that heard them ended before they did."""
    passages: Passages = Passages()
    """What was seen to pass the tuner by, and what it decided."""
    lateness: Lateness = Lateness()
    """Which of its ranks collectives waited for."""
    failure: str = ""
    """The first rank whose script ended by an exception, and that exception's type; empty: none is known of."""
    training: str = ""
    """What all starts of the same training on the same hardware have in common; empty: nobody compares them."""
    environment: str = ""
    """Variables that it was started with, for trial or for good, as `NAME=VALUE` with spaces between."""

    @property
    def title(self) -> str:
        """How it is shown to people."""
        return titled(self.job_id, self.name)

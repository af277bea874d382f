"""Converts messages to frames and back; it uses no sockets.

A message is two or three ZeroMQ frames:

    0  header   4 bytes: magic "ZT", then WIRE_VERSION as unsigned 16-bit little-endian
    1  body     msgpack of one tagged message struct
    2  records  only for `Observations`, `CostTables` and `Forwarded`: packed fixed-size records, read with
                numpy.frombuffer under OBSERVATION_FIELDS or COST_FIELDS

`WireError` refuses everything else before a field is used. In a records frame, only records with a number out of its
range are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from .errors import WireError, printable
from .job_options import NO_OPTIONS, JobOptions
from .misaligned import Misaligned
from .records import MAX_CHUNK_BYTES, U32, Exposure, MissingEvidence, Ordinal, Plan, Stage, StepRecord, Text
from .records.lateness import Lateness
from .records.passages import Passages

WIRE_VERSION: Final = 3
HEADER: Final = struct.pack("<2sH", b"ZT", WIRE_VERSION)
MAX_FRAMES: Final = 3
MAX_BODY_BYTES: Final = 4 * 2**20
MAX_RECORDS_BYTES: Final = 8 * 2**20

# numpy dtype fields of the records that the plugin's rings hold (zerotune_plugin.h mirrors them).
OBSERVATION_FIELDS: Final = [
    ("comm_id", "<u8"),
    ("message_bytes", "<u8"),
    ("start_ns", "<i8"),
    ("duration_us", "<f4"),
    ("sequence", "<u4"),
    ("epoch", "<u4"),
    ("n_ranks", "<u4"),
    ("n_nodes", "<u4"),
    ("rank", "<u4"),
    ("collective", "u1"),
    ("algorithm", "u1"),
    ("protocol", "u1"),
    ("n_channels", "u1"),
    ("phase", "u1"),
    ("datatype", "u1"),
    ("timing_source", "u1"),
    ("flags", "u1"),
    ("memory_pressure", "<f4"),
    ("step", "<u4"),
    ("chunk_bytes", "<u4"),
    ("reserved", "<u4"),
]
OBSERVATION_BYTES: Final = 72
# Bits of an observation's `flags`.
FLAG_MATCHED: Final = 1
FLAG_TIMED: Final = 2
FLAG_REGISTERED: Final = 4
FLAG_CAPTURED: Final = 8
FLAG_FUSED: Final = 16
FLAG_PASSED_BY: Final = 32
FLAG_OFF_CYCLE: Final = 64

COST_FIELDS: Final = [
    ("comm_id", "<u8"),
    ("message_bytes", "<u8"),
    ("n_ranks", "<u4"),
    ("n_nodes", "<u4"),
    ("collective", "u1"),
    ("n_algorithms", "u1"),
    ("n_protocols", "u1"),
    ("reserved", "u1"),
    ("n_pipe_ops", "<u4"),
    ("cost_us", "<f4", (7, 3)),
    ("padding", "<u4"),
]
COST_BYTES: Final = 120

MAX_RANK: Final = 65_535
MAX_STEPS: Final = 4096
"""An agent holds at most this many waiting steps."""
MAX_ID_LENGTH: Final = 256
MAX_REASON_LENGTH: Final = 200
# Ranges of numbers in a body; a message with a number outside of them is refused as a whole.
_ONE_LINE: Final = r"\A[^\n\0]*\Z"
"""Names are shown in lines, so they have no line breaks. They have no NUL, as files and programs cannot have one."""
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH, pattern=_ONE_LINE)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_ID_LENGTH, pattern=_ONE_LINE)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK)]
RankCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANK + 1)]
RecordCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_RECORDS_BYTES // OBSERVATION_BYTES)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**45)]
"""A count of one rank; sums over all ranks still fit 63 bits."""
Adoptable = Annotated[int, msgspec.Meta(ge=0, le=2**30)]
"""An epoch that a rank reports as in force; epochs of later plans stay below an ordinal's limit."""
Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Real = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
Fact = Annotated[str, msgspec.Meta(max_length=4096, pattern=r"\A[^\0]*\Z")]
Facts = Annotated[dict[Name, Fact | Whole | Real | bool], msgspec.Meta(max_length=256)]

_OBSERVATION: Final = np.dtype(OBSERVATION_FIELDS)
_COST: Final = np.dtype(COST_FIELDS)
_LARGEST: Final = {
    "message_bytes": 2**62,
    "n_ranks": MAX_RANK + 1,
    "n_nodes": MAX_RANK + 1,
    "duration_us": 1e15,
    "memory_pressure": 1000,
    "chunk_bytes": MAX_CHUNK_BYTES,
    "n_algorithms": 7,
    "n_protocols": 3,
    "n_pipe_ops": 2**31 - 1,
}
"""Largest values of the records' fields; negative ones and NaN mean unknown. Each record is refused by itself."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a rank; sent again whenever the daemon may be a new one."""

    job_id: Id
    rank: Rank
    n_ranks: RankCount
    local_rank: Rank
    node: Name
    pid: U32
    fabric_id: Name
    fabric: Facts
    """Description of the fabric, for people and for the cost model; `emulated` names a fabric file."""
    nccl_version: U32
    tuner_abi: U32
    epoch: Adoptable = 0
    """Epoch of the plan that is in force on this rank."""
    leader: Name = ""
    """Endpoint of rank 0's daemon as seen from this node; empty if this rank does not know it."""
    name: Name = ""
    """The name that the user gave the job."""
    options: JobOptions = NO_OPTIONS


class Observations(msgspec.Struct, frozen=True, tag="observations"):
    """Announces a records frame of n_records observations; n_dropped counts losses so far."""

    job_id: Id
    rank: Rank
    n_records: RecordCount
    n_dropped: Count = 0
    passages: Passages | None = None
    """All that this rank has observed, if that has changed since the last message."""


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """Finished training steps of one rank."""

    job_id: Id
    rank: Rank
    steps: Annotated[tuple[StepRecord, ...], msgspec.Meta(max_length=MAX_STEPS)]
    cached_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Share of the device's memory that torch has reserved and does not use."""


class CostTables(msgspec.Struct, frozen=True, tag="cost_tables"):
    """Announces a records frame of live cost tables."""

    job_id: Id
    rank: Rank
    n_records: RecordCount


class Adopted(msgspec.Struct, frozen=True, tag="adopted"):
    """Rank 0 reports that all ranks run under `epoch` from `step` on."""

    job_id: Id
    epoch: Adoptable
    step: Ordinal


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The rank leaves."""

    job_id: Id
    rank: Rank
    failure: Name = ""
    """Type of the exception that ended its script; empty: none."""


class Forwarded(msgspec.Struct, frozen=True, tag="forwarded"):
    """From a node's daemon to the job's leading daemon: announces a records frame.

    Its observations are joined over the node's `n_ranks` ranks, whose lowest is `rank`; 0 ranks: they have left.
    """

    job_id: Id
    rank: Rank
    n_ranks: RankCount
    n_records: RecordCount
    node: Name = ""
    """The host of these ranks."""
    lateness: Lateness | None = None
    """Late ranks among them, in messages without records."""


class Bell(msgspec.Struct, frozen=True, tag="bell"):
    """Rank 0 has announced or decided change `number`: daemons notify all other ranks to read the job's c10d store.

    0: a rank has a new communicator, and rank 0 is notified. This message is only a hint, as agreements are in that
    store alone.
    """

    job_id: Id
    number: Ordinal


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Rank 0 sends, before any communicator exists, the variables that all ranks will run with; see `JobRecord`."""

    job_id: Id
    name: Name
    training: Name
    environment: Fact


class StatusRequest(msgspec.Struct, frozen=True, tag="status_request"):
    """Question of `zerotune status`."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The daemon's answer to Hello."""

    daemon_pid: U32
    version: Name
    listen: Name = ""
    """Address at which daemons of other nodes reach this one; a wildcard host stands for this node."""
    shadow: Name = ""
    """Changes that a daemon with --shadow would have made by now, for rank 0; empty: its decisions take effect."""


class PlanOffer(msgspec.Struct, frozen=True, tag="plan_offer"):
    """A plan for the ranks to agree on; sent to rank 0 only."""

    job_id: Id
    plan: Plan


class Observe(msgspec.Struct, frozen=True, tag="observe"):
    """Open an observation window of `n_steps` steps on the receiving rank, or close it (0)."""

    job_id: Id
    n_steps: Ordinal


class JobStatus(msgspec.Struct, frozen=True):
    """One job as `zerotune status` shows it."""

    job_id: Id
    fabric_id: str
    stage: Stage
    n_ranks: RankCount
    n_ranks_seen: Whole
    epoch: Whole
    step: Whole
    n_observations: Whole
    n_dropped: Whole
    n_explored: Whole
    observations_per_s: Real
    step_us: Real
    exploration_spent_percent: Real
    last_decisions: tuple[str, ...] = ()
    health: str = "ok"
    heard_s_ago: Real = 0.0
    """Seconds since the last message of the rank, or other node, that has been silent longest."""
    missing_evidence: MissingEvidence = MissingEvidence.nothing
    """Why `stage` is unknown; nothing from an older daemon."""
    name: str = ""
    passages: Passages = Passages()
    """Of the ranks that report to this daemon."""
    lateness: Lateness = Lateness()
    """Late ranks, of this daemon's and of other nodes' daemons."""
    misaligned: tuple[Misaligned, ...] = ()
    """Sizes that NCCL would run faster with padding, the largest first."""
    exposed_us: Real | None = None
    """Recent communication per step that computation waited for; None: not measured."""
    exposure: Exposure = Exposure()
    """The share of communication that computation waits for; unknown from an older daemon."""
    frozen_since: Whole = 0
    """The step since which nothing is tried any more; 0: exploring has not ended."""


class DaemonOptions(msgspec.Struct, frozen=True):
    """A daemon's limits, from the options of `zerotune daemon`."""

    budget_percent: Real
    memory_threshold: Real
    explore: bool
    shadow: bool = False
    """Its decisions do not take effect."""
    exact: bool = False
    """Nothing is tuned that could change the results in any bit."""
    tune_steps: Whole = 0
    """Steps of a job after which nothing is tried any more; 0: no limit."""
    compare_steps: Whole = 0
    """Steps of a job that are compared with NCCL's own choice, whatever that costs."""


class StoreState(msgspec.Struct, frozen=True):
    """State of writing to the daemon's store."""

    is_out: bool = False
    """Nothing can be written now; recorded rows wait in memory."""
    error: str = ""
    """The reason, or the reason of the last loss, even if that is over."""
    failed_s_ago: Real = 0.0
    """Seconds since that began, or since the last record was lost."""
    n_waiting: Whole = 0
    n_lost: Whole = 0
    """Records lost for good since the daemon started."""
    is_gone: bool = False
    """The store's file was removed or moved away, so new rows are lost with it."""
    damage: str = ""
    """Damage of the file that is `set_aside`; empty: none."""
    set_aside: str = ""
    """Path of a file that was damaged since the daemon started; a new file has replaced it."""
    n_recovered: Whole = 0
    """Measurements of the damaged file that are in the new one."""
    n_missing: Whole | None = None
    """Its measurements that could not be read; None: unknown."""


class FleetState(msgspec.Struct, frozen=True):
    """State of sharing measurements with other nodes."""

    url: str = ""
    """Target of sharing; empty: nothing is shared."""
    contributor: str = ""
    """The contributor's name of this node."""
    key: str = ""
    """Public key of the contributor's signatures."""
    n_objects: Whole = 0
    n_written: Whole = 0
    """Measurements in the shared objects."""
    n_waiting: Whole = 0
    n_lost: Whole = 0
    """Measurements that found no room in memory while the URL was slow or failed."""
    is_failing: bool = False
    error: str = ""
    """Text of the last failure, even if it is over."""
    failed_s_ago: Real = 0.0
    """Seconds since that began."""
    book: str = ""
    """URL of the book that the daemon reads; empty: none."""
    book_error: str = ""
    """Why the daemon refused the last book that it read."""
    n_book_winners: Whole = 0
    """Settings that are better than NCCL's own choice by the book in use."""


class EndedJob(msgspec.Struct, frozen=True):
    """A job that was connected until not long ago."""

    job_id: Id
    step: Whole
    fell_silent: bool
    """Its ranks sent no goodbye: they were killed, or the connection to them is lost."""
    ended_s_ago: Real = 0.0
    name: str = ""
    failure: str = ""
    """The first rank whose script ended by an exception, and that exception's type; empty: none is known."""

    def describe(self) -> str:
        """How it ended, as words to follow its name."""
        how = "its ranks fell silent" if self.fell_silent else "ended"
        if self.failure:
            how = f"failed ({self.failure})"
        return f"{how} {self.ended_s_ago:.0f} s ago, after step {self.step:,}"


class StatusReply(msgspec.Struct, frozen=True, tag="status"):
    """The daemon's state."""

    daemon_pid: Whole
    version: str
    endpoint: str
    store_path: str
    uptime_s: Real
    resident_bytes: Whole
    n_errors: Whole
    jobs: tuple[JobStatus, ...] = ()
    n_refused: Whole = 0
    """Messages that were malformed, or that the sender may not send."""
    options: DaemonOptions | None = None
    """None: an older daemon sent this."""
    store: StoreState = StoreState()
    health: str = "ok"
    """`degraded` while the store cannot be written or its file is gone; `damaged` if its file was damaged."""
    """Jobs of which no step was ever seen to end; they are not among `jobs`."""
    ended: tuple[EndedJob, ...] = ()
    """Jobs that ended, the newest first."""
    fleet: FleetState = FleetState()
    listen: str = ""
    """Address at which daemons of other nodes reach this one; empty: none."""


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """A typed refusal: `code` is the error class, `text` one sentence."""

    code: Name
    text: Text


AgentMessage = Hello | Observations | Steps | CostTables | Adopted | Goodbye | Forwarded | Bell | Start | StatusRequest
DaemonMessage = Welcome | PlanOffer | Observe | Bell | StatusReply | ErrorReply

_encoder = msgspec.msgpack.Encoder()
_agent_decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)
_daemon_decoder: msgspec.msgpack.Decoder[DaemonMessage] = msgspec.msgpack.Decoder(DaemonMessage)


def encode(message: AgentMessage | DaemonMessage, records: Any = None) -> list[Any]:
    """The frames of `message`; `records` is a buffer that is sent unchanged."""
    frames: list[Any] = [HEADER, _encoder.encode(message)]
    if records is not None:
        frames.append(records)
    return frames


def decode_agent(frames: Sequence[bytes]) -> tuple[AgentMessage, bytes | None]:
    """The message and the records frame of an agent; `usable_records` reads the records.

    Raises:
        WireError: a frame is not as this version sends it.
    """
    message: AgentMessage
    message, records = _decode(frames, _agent_decoder)
    if not isinstance(message, Observations | CostTables | Forwarded):
        if records is not None:
            raise WireError(f"a {type(message).__name__} message carries no records frame")
        return message, None
    expected = message.n_records * (COST_BYTES if isinstance(message, CostTables) else OBSERVATION_BYTES)
    if records is None or len(records) != expected:
        found = "none" if records is None else f"{len(records)} bytes"
        raise WireError(f"records frame: {found}, the message announces {expected} bytes")
    return message, records


def usable_records(message: AgentMessage, raw: bytes) -> tuple[NDArray[np.void], int]:
    """A message's records with all numbers in range, shape (n,), and how many were left out.

    The records have COST_FIELDS (CostTables) or OBSERVATION_FIELDS (all others).
    """
    records = np.frombuffer(raw, _COST if isinstance(message, CostTables) else _OBSERVATION)
    limits = [(name, _LARGEST[name]) for name in records.dtype.names or () if name in _LARGEST]
    if not any((records[name] > most).any() for name, most in limits):
        return records, 0
    good = np.logical_and.reduce([~(records[name] > most) for name, most in limits])  # NaN means unknown
    return records[good], len(records) - int(np.count_nonzero(good))


def decode_daemon(frames: Sequence[bytes]) -> DaemonMessage:
    """The message of a daemon; raises `WireError` like `decode_agent`."""
    message: DaemonMessage
    message, records = _decode(frames, _daemon_decoder)
    if records is not None:
        raise WireError(f"a {type(message).__name__} message carries no records frame")
    return message


def _decode(frames: Sequence[bytes], decoder: msgspec.msgpack.Decoder[Any]) -> tuple[Any, bytes | None]:
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise WireError(f"a message has 2 or {MAX_FRAMES} frames, this one has {'more' if frames[2:] else 'fewer'}")
    header, body = frames[0], frames[1]
    if len(header) != len(HEADER) or header[:2] != HEADER[:2]:
        raise WireError("the first frame is not a zerotune header")
    if header != HEADER:
        (found,) = struct.unpack("<H", header[2:])
        raise WireError(f"wire version {found} is not {WIRE_VERSION}; install one zerotune on all nodes")
    if len(body) > MAX_BODY_BYTES:
        raise WireError(f"body of {len(body)} bytes is over the limit of {MAX_BODY_BYTES}")
    records = frames[2] if len(frames) == MAX_FRAMES else None
    if records is not None and len(records) > MAX_RECORDS_BYTES:
        raise WireError(f"records frame of {len(records)} bytes is over the limit of {MAX_RECORDS_BYTES}")
    try:
        return decoder.decode(body), records
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        why = printable(str(error)[:MAX_REASON_LENGTH])  # may quote the body
        raise WireError(f"body cannot be decoded: {why}") from error

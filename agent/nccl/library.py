"""The plugin, loaded once and bound with ctypes.

NCCL opens the same file (NCCL_TUNER_PLUGIN, NCCL_PROFILER_PLUGIN). The dynamic loader gives it the same instance, so
that `getCollInfo` reads the values set here.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...store.errors import PlanError, PluginError
from ...store.records import CommunicatorClass, Plan, PlanRow, phase_name
from ...store.records.passages import OtherPlugin, Passage, PassageKind, Passages
from ...store.wire import COST_BYTES, COST_FIELDS, OBSERVATION_BYTES, OBSERVATION_FIELDS
from .compiled import PLUGIN

LAYOUT_VERSION: Final = 5
MAX_PLAN_ROWS: Final = 4096
RING_RECORDS: Final = 65536
COST_RING_RECORDS: Final = 512
REGION_FORWARD: Final = 16
REGION_BACKWARD: Final = 17
REGION_STEP: Final = 18
REGION_AFTER_BACKWARD: Final = 19
NO_OPINION: Final = 255
ANY_PHASE: Final = 255
N_CHECKPOINTS: Final = 16
MIXED_EPOCHS: Final = 1 << 32
NO_CALLS: Final = 2**64 - 1
N_SPARE: Final = 8
"""Room for communicators that are made between counting and reading."""
MAX_CYCLE_CALLS: Final = 4096
"""Calls of the longest cycle: two such steps fit into a communicator's call history."""

OBSERVATION_DTYPE: Final = np.dtype(OBSERVATION_FIELDS)
COST_DTYPE: Final = np.dtype(COST_FIELDS)
PLAN_ROW_DTYPE: Final = np.dtype(
    [
        ("min_bytes", "<u8"),
        ("max_bytes", "<u8"),
        ("n_ranks", "<u4"),
        ("n_nodes", "<u4"),
        ("collective", "u1"),
        ("phase", "u1"),
        ("algorithm", "u1"),
        ("protocol", "u1"),
        ("n_channels", "u1"),
        ("reserved", "u1"),
        ("chunk_kib", "<u2"),
    ]
)

COMMUNICATOR_DTYPE: Final = np.dtype(
    [
        ("owner", "<u8"),
        ("comm_id", "<u8"),
        ("n_ranks", "<u4"),
        ("n_nodes", "<u4"),
        ("epoch", "<u4"),
        ("n_steady", "<u4"),
        ("n_steps", "<u4"),
        ("n_off_cycle", "<u4"),
        ("n_calls", "<u8"),
        ("step_began", "<u8"),
        ("calls_per_step", "<u8"),
        ("checkpoint_calls", "<u8", (N_CHECKPOINTS,)),
        ("checkpoint_hash", "<u8", (N_CHECKPOINTS,)),
    ]
)
CYCLE_DTYPE: Final = np.dtype([("message_bytes", "<u8"), ("collective", "<u4"), ("phase", "<u4")])

_load_lock = threading.Lock()
_loaded: Plugin | None = None


@dataclass(frozen=True)
class Counters:
    """The plugin's counters since it was loaded; fields are those of `zt_counters`."""

    n_calls: int
    n_matched: int
    n_ignored_cells: int
    n_clamped_channels: int
    n_dropped_records: int
    n_dropped_costs: int
    n_communicators: int
    n_timed: int
    n_lost_events: int
    n_abandoned_events: int
    n_estimates: int
    n_next_tuner_faults: int
    n_next_profiler_faults: int
    n_impossible_times: int
    n_inseparable: int


class _CounterFields(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in Counters.__dataclass_fields__]


def load() -> Plugin:
    """The plugin of this process, built if need be; the same object each time.

    Raises:
        PluginError: the plugin cannot be built or loaded.
    """
    global _loaded
    with _load_lock:
        if _loaded is None:
            _loaded = Plugin(PLUGIN.build())
        return _loaded


class Plugin:
    """The loaded plugin. Setters take well under a microsecond and no lock, and may be called on any thread.

    Raises:
        PluginError: the library cannot be opened or has another layout.
    """

    path: Final[Path]

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            library = ctypes.CDLL(str(path))
            quick = ctypes.PyDLL(str(path))  # keeps the GIL: releasing it would take longer than these calls
            version = library.zerotune_layout_version()
        except (OSError, AttributeError) as problem:
            raise PluginError(f"the tuner plugin cannot be loaded: {problem}") from problem
        if version != LAYOUT_VERSION:
            raise PluginError(f"{path} has layout {version}, this zerotune needs {LAYOUT_VERSION}; rebuild it")
        if OBSERVATION_DTYPE.itemsize != OBSERVATION_BYTES or COST_DTYPE.itemsize != COST_BYTES:
            raise PluginError("numpy and C lay out the plugin's records differently")
        u32, u64, f32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float
        pointer, count, fault = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._ask_chunk_sizes = _bind(quick, "ask_chunk_sizes", None, u32)
        self._asks_chunk_sizes = _bind(quick, "asks_chunk_sizes", u32)
        self._set_phase = _bind(quick, "set_phase", None, u32)
        self._set_step = _bind(quick, "set_step", u64, u32)
        self._set_memory_pressure = _bind(quick, "set_memory_pressure", None, f32)
        self._set_recording = _bind(quick, "set_recording", None, u32)
        self._set_observing = _bind(quick, "set_observing", None, u32)
        self._set_capturing = _bind(quick, "set_capturing", None, u32)
        self._channels_seen = _bind(quick, "channels_seen", u32, u32, u32)
        self._flip = _bind(quick, "plan_flip", ctypes.c_int, u32)
        self._active_epoch = _bind(library, "active_epoch", u32)
        self._tuner_abi = _bind(quick, "tuner_abi", u32)
        self._profiler_abi = _bind(quick, "profiler_abi", u32)
        self._communicators = _bind(library, "communicators", count, pointer, count)
        self._cycle = _bind(library, "cycle", u32, u64, u32, pointer, u32)
        self._prepare = _bind(library, "prepare", fault, pointer, u32, u32, u32)
        self._prepare_end = _bind(library, "prepare_end", None)
        self._promise = _bind(library, "promise", u64, u64, u64)
        self._commit = _bind(library, "commit", fault, u64, pointer, u32, pointer, u32)
        self._release = _bind(library, "release", None, u64)
        self._waits = _bind(quick, "waits", None, pointer)
        self._row_is_legal = _bind(library, "plan_row_is_legal", ctypes.c_int, pointer)
        self._load_plan = _bind(library, "plan_load", ctypes.c_int, pointer, u32, u32, u32)
        self._passages = _bind(library, "passages", None, pointer)
        self._one_rank_communicators = _bind(library, "one_rank_communicators", ctypes.c_uint64)
        self._drain = _bind(library, "drain", count, pointer, count)
        self._drain_costs = _bind(library, "drain_costs", count, pointer, count)
        self._counters = _bind(library, "counters", None, pointer)
        # Kept, since allocating fresh pages for each call costs more than draining a usual number of records.
        self._drained = np.empty(RING_RECORDS, OBSERVATION_DTYPE)
        self._drained_costs = np.empty(COST_RING_RECORDS, COST_DTYPE)
        self._next_tuner = _bind(library, "next_tuner", ctypes.c_char_p)
        self._next_profiler = _bind(library, "next_profiler", ctypes.c_char_p)
        self._reset = _bind(library, "reset", None)

    def set_phase(self, phase_or_region: int) -> None:
        """Set the current phase: a Phase's value, or one of the REGION_ codes."""
        self._set_phase(phase_or_region)

    def set_step(self, step: int) -> int:
        """Begin step `step`, the number that records carry from now on.

        Returns:
            The epoch under which the ended step's calls ran, | MIXED_EPOCHS if there were several; 0: no plan;
            NO_CALLS: there was no call.
        """
        epoch: int = self._set_step(step)
        return epoch

    def set_memory_pressure(self, pressure: float) -> None:
        """Device memory in use over total, 0 to 1; negative: unknown."""
        self._set_memory_pressure(pressure)

    def set_recording(self, on: bool) -> None:
        """Turn records of decisions on or off."""
        self._set_recording(1 if on else 0)

    def set_observing(self, on: bool) -> None:
        """Turn NCCL's profiler events on or off, and with them timed records."""
        self._set_observing(1 if on else 0)

    def set_capturing(self, on: bool) -> None:
        """A graph's capture begins or has ended: NCCL's profiler must add nothing to the graph."""
        self._set_capturing(1 if on else 0)

    def ask_chunk_sizes(self, on: bool) -> None:
        """Have NCCL ask for chunk sizes, from 2.30 on; on all ranks alike, before the first communicator."""
        self._ask_chunk_sizes(1 if on else 0)

    def asks_chunk_sizes(self) -> bool:
        """Whether NCCL, if it can, asks for chunk sizes; fixed when the first communicator is made."""
        return bool(self._asks_chunk_sizes())

    def channels_seen(self, communicator: CommunicatorClass) -> int:
        """Most channels with which a timed collective of this class ran; 0: no collective was timed."""
        return int(self._channels_seen(communicator.n_ranks, communicator.n_nodes))

    # ---- plans by agreement ------------------------------------------------------------------

    def communicators(self) -> NDArray[np.void]:
        """The communicators of this process that have a tuner, as an array of COMMUNICATOR_DTYPE."""
        found = np.zeros(self._communicators(None, 0) + N_SPARE, COMMUNICATOR_DTYPE)
        return found[: min(self._communicators(found.ctypes.data, len(found)), len(found))]

    def cycle(self, owner: int, *, gathers_after_step: bool) -> bytes:
        """The calls of a communicator's last whole step and their phases, as CYCLE_DTYPE.

        Empty if they are unknown or too many, or if the step before had other calls.
        """
        calls = np.zeros(MAX_CYCLE_CALLS, CYCLE_DTYPE)
        n_calls = self._cycle(owner, int(gathers_after_step), calls.ctypes.data, len(calls))
        return calls[:n_calls].tobytes()

    def prepare(self, plan: Plan) -> None:
        """Build each stage of `plan` while lookups go on. `prepare_end` frees stages that were not committed.

        Raises:
            PlanError: too many rows, an illegal cell or count, or overlapping ranges; nothing is prepared.
        """
        self._prepare_end()
        try:
            for _, stage in plan.stages():
                self._load(self._prepare, stage)
        except PlanError:
            self._prepare_end()
            raise

    def prepare_end(self) -> None:
        """To be called after the outcome was carried out on all communicators."""
        self._prepare_end()

    def promise(self, owner: int, lead_calls: int) -> int:
        """The first call that waits until `commit` or `release`; 0: nothing is promised."""
        return int(self._promise(owner, lead_calls))

    def commit(self, owner: int, from_calls: Sequence[int], cycle: bytes = b"") -> bool:
        """Put the prepared stages in force, each from its call in `from_calls` on; False: this rank could not follow.

        `cycle` has the calls of a step with their phases.
        """
        calls = np.array(from_calls, np.uint64)
        return bool(self._commit(owner, calls.ctypes.data, len(calls), cycle, len(cycle) // CYCLE_DTYPE.itemsize) == 0)

    def leave_alone(self, owner: int, from_call: int) -> bool:
        """NCCL's own choice is in force from call `from_call` on; False: this rank could not follow."""
        call = np.array([from_call], np.uint64)
        return bool(self._commit(owner, call.ctypes.data, 0, None, 0) == 0)

    def release(self, owner: int) -> None:
        """End the promise without a change: calls of this communicator pass."""
        self._release(owner)

    def waits(self) -> tuple[int, float, int]:
        """(calls that had to wait for an outcome, longest wait in microseconds, calls that wait now)."""
        found = (ctypes.c_uint64 * 3)()
        self._waits(ctypes.addressof(found))
        return int(found[0]), found[1] / 1e3, int(found[2])

    # ---- the plan of the whole process: for tools whose ranks change it at a barrier of their own ---------------

    def load_plan(self, plan: Plan) -> None:
        """Write `plan` into the inactive table while lookups go on. `flip` makes it active. Raises as `prepare`."""
        self._load(self._load_plan, plan)

    def _load(self, load: Any, plan: Plan) -> None:
        if not 0 <= plan.epoch < 2**32:
            raise PlanError(f"epoch {plan.epoch} is outside 0..2^32-1")
        rows = _plan_rows(plan.rows)
        fault = load(rows.ctypes.data, len(rows), plan.epoch, int(plan.gathers_after_step))
        if fault == -1:
            raise PlanError(f"plan of {len(rows)} rows", f"a plan has at most {MAX_PLAN_ROWS}")
        if fault == -2:
            raise PlanError(_overlap(plan.rows), "ranges of one communicator, collective and phase must be disjoint")
        if fault == -3:
            legal = (self._row_is_legal(rows[i : i + 1].ctypes.data) for i in range(len(rows)))
            at = [bool(each) for each in legal].index(False)
            raise PlanError(
                f"illegal plan row {at + 1}: {_describe(plan.rows[at])}: NCCL has no such setting for this collective",
                "correct the row or leave it out",
            )
        if fault == -4:
            raise PlanError("the plan names more than 256 shapes of communicators", "leave out those not in use")
        if fault != 0:
            raise PlanError(f"there is no memory for the plan of epoch {plan.epoch}")

    def flip(self, epoch: int) -> bool:
        """Make the loaded plan active; False if it is not of this epoch or was replaced. Takes under 1 µs."""
        return bool(self._flip(epoch) == 0)

    def active_epoch(self) -> int:
        """The highest epoch in force on any communicator."""
        return int(self._active_epoch())

    def drain(self, max_records: int = RING_RECORDS) -> NDArray[np.void]:
        """New records, the oldest first, as an array of OBSERVATION_FIELDS; empty while another thread drains."""
        return _taken(self._drain, self._drained, max_records)

    def drain_costs(self, max_records: int = COST_RING_RECORDS) -> NDArray[np.void]:
        """New live cost tables, as an array of COST_FIELDS."""
        return _taken(self._drain_costs, self._drained_costs, max_records)

    def counters(self) -> Counters:
        """Counts since the plugin was loaded, over all communicators of this process."""
        counts = _CounterFields()
        self._counters(ctypes.byref(counts))
        # A list, not a generator: CPython would grow its free list with each tuple made of a generator.
        return Counters(*[int(getattr(counts, name)) for name in Counters.__dataclass_fields__])

    def n_dropped(self) -> int:
        """Records lost to a full ring so far."""
        return self.counters().n_dropped_records

    def n_calls(self) -> int:
        """Decisions of `getCollInfo` so far."""
        return self.counters().n_calls

    def passages(self) -> Passages:
        """Calls that were seen to run while observing, by kind."""
        sums = (ctypes.c_uint64 * (4 * len(PassageKind)))()
        self._passages(ctypes.addressof(sums))
        kinds = []
        for kind in PassageKind:
            n_calls, message_bytes, n_timed, kernel_ns = sums[4 * kind : 4 * kind + 4]
            if n_calls:
                kinds.append(Passage(kind, n_calls, message_bytes, n_timed, kernel_ns / 1e3))
        counts = self.counters()
        n_one_rank = int(self._one_rank_communicators())
        return Passages(tuple(kinds), n_one_rank, self._others(counts), counts.n_impossible_times, counts.n_inseparable)

    def _others(self, counts: Counters) -> tuple[OtherPlugin, ...]:
        tuner = OtherPlugin("tuner", _printable(self.next_tuner()), counts.n_next_tuner_faults)
        profiler = OtherPlugin("profiler", _printable(self.next_profiler()), counts.n_next_profiler_faults)
        return tuple(each for each in (tuner, profiler) if each.name or each.n_faults)

    def tuner_abi(self) -> int:
        """Version of the tuner ABI that NCCL uses; 0 before the first communicator."""
        return int(self._tuner_abi())

    def profiler_abi(self) -> int:
        """Version of the profiler ABI that NCCL uses; 0 before the first communicator."""
        return int(self._profiler_abi())

    def next_tuner(self) -> str:
        """The name of the chained tuner, which is asked first; empty: there is none, or no communicator yet."""
        name: bytes = self._next_tuner()
        return name.decode(errors="replace")

    def next_profiler(self) -> str:
        """The name of the chained profiler; empty: there is none, or no communicator yet."""
        name: bytes = self._next_profiler()
        return name.decode(errors="replace")

    def layout_version(self) -> int:
        """Version of the memory layout shared with C."""
        return LAYOUT_VERSION

    def reset(self) -> None:
        """For tests: clear plans, records, counters, shared state and the history of communicators."""
        self._reset()


def _bind(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, f"zerotune_{name}")
    function.restype = result
    function.argtypes = arguments
    return function


def pack_cycle(cycle: bytes) -> bytes:
    """`cycle` compressed for the store, to which thousands of ranks send their cycles."""
    return zlib.compress(cycle, 1) if cycle else b""


def unpack_cycle(packed: bytes) -> bytes:
    """The cycle of `pack_cycle`; empty if `packed` is damaged or too long, on all ranks alike."""
    most_bytes = MAX_CYCLE_CALLS * CYCLE_DTYPE.itemsize
    try:
        cycle = zlib.decompressobj().decompress(packed, most_bytes + 1)
    except zlib.error:
        return b""
    return cycle if len(cycle) <= most_bytes and len(cycle) % CYCLE_DTYPE.itemsize == 0 else b""


def _printable(name: str) -> str:
    return "".join(letter if " " <= letter <= "~" else "?" for letter in name)[:64]


def _taken(drain: Any, into: NDArray[np.void], max_records: int) -> NDArray[np.void]:
    n_records = drain(into.ctypes.data, min(max_records, len(into)))
    return into[:n_records].copy()


def _describe(row: PlanRow) -> str:
    return (
        f"{row.candidate} for {row.collective.name} in {phase_name(row.phase)}, {row.min_bytes}..{row.max_bytes}"
        f" bytes, {row.communicator}"
    )


def _plan_rows(rows: Sequence[PlanRow]) -> NDArray[np.void]:
    """Rows as PLAN_ROW_DTYPE; raises PlanError for a number that C's types cannot hold."""
    table = np.zeros(len(rows), PLAN_ROW_DTYPE)
    for i, row in enumerate(rows):
        shape = row.communicator
        if not 0 <= row.min_bytes <= row.max_bytes < 2**64:
            raise PlanError(f"range {row.min_bytes}..{row.max_bytes} of {_describe(row)}", "give 0 <= min <= max")
        if not (0 < shape.n_nodes <= shape.n_ranks < 2**32):
            raise PlanError(str(shape), "give 1 <= n_nodes <= n_ranks")
        candidate = row.candidate
        table[i] = (
            *(row.min_bytes, row.max_bytes, shape.n_ranks, shape.n_nodes, row.collective),
            ANY_PHASE if row.phase is None else row.phase,
            NO_OPINION if candidate.algorithm is None else candidate.algorithm,
            NO_OPINION if candidate.protocol is None else candidate.protocol,
            *(candidate.n_channels, 0, candidate.chunk_bytes >> 10),
        )
    return table


def _overlap(rows: Sequence[PlanRow]) -> str:
    def place(row: PlanRow) -> tuple[CommunicatorClass, int, int]:
        return row.communicator, row.collective, ANY_PHASE if row.phase is None else row.phase

    ordered = sorted(rows, key=lambda row: (*place(row), row.min_bytes))
    for before, after in itertools.pairwise(ordered):
        if place(before) == place(after) and after.min_bytes <= before.max_bytes:
            return f"overlapping plan rows: {_describe(before)} and {_describe(after)}"
    return "overlapping plan rows"

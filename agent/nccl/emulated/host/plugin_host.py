"""Loads tuner and profiler plugins as NCCL does, and calls them through host.c.

The emulated release decides which ABI versions are supported, the newest first. Plugins are loaded once per process, at
the first communicator; their `init` and `finalize` run once per communicator.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from .....store.records import Candidate, Collective, TimingSource
from ...compiled import EMULATED_NCCL
from ...release import release
from ..errors import EmulatedNcclError

_log = logging.getLogger(__name__)


class CollectiveEvent(ctypes.Structure):
    """A profiler's event of one collective; mirrors `host_coll`."""

    _fields_ = (
        ("collective", ctypes.c_char_p),
        ("datatype", ctypes.c_char_p),
        ("algorithm", ctypes.c_char_p),
        ("protocol", ctypes.c_char_p),
        ("sequence", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("traffic_bytes", ctypes.c_uint64),
        ("comm_id", ctypes.c_uint64),
        ("root", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("function", ctypes.c_uint8),
        ("datatype_code", ctypes.c_uint8),
        ("algorithm_code", ctypes.c_uint8),
        ("protocol_code", ctypes.c_uint8),
        ("n_channels", ctypes.c_uint8),
        ("n_warps", ctypes.c_uint8),
        ("is_symmetric", ctypes.c_uint8),
        ("reserved", ctypes.c_uint8),
    )


EVENT_COLLECTIVE: Final = 2
_BUFFER_BYTES: Final = 2 << 20
"""NCCL's largest chunk by default: half of a ring's buffer."""
_NO_SUCH_CELL: Final = -2
_SET_TIMING_SOURCE: Final = "zerotune_set_timing_source_override"
CapturedGroup = Any
"""ctypes array of the profiler's handles of captured API calls."""


class _Host:
    """host.c's functions."""

    def __init__(self) -> None:
        library = ctypes.PyDLL(str(EMULATED_NCCL.build()))
        pointer, u64, integer = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int

        def function(name: str, result: Any, *arguments: Any) -> Any:
            entry = getattr(library, name)
            entry.restype, entry.argtypes = result, arguments
            return entry

        self.tuner_init = function("host_tuner_init", integer, pointer, integer, pointer, u64, u64, u64)
        self.tuner_ask = function(
            "host_tuner_ask", integer, pointer, integer, pointer, integer, u64, integer, pointer, integer,
            integer, integer, pointer,
        )  # fmt: skip
        self.tuner_chunk = function(
            "host_tuner_chunk", u64, pointer, integer, pointer, integer, u64, integer, integer, u64
        )
        self.cheapest = function("host_cheapest", integer, pointer, integer, ctypes.c_double)
        self.tuner_finalize = function("host_tuner_finalize", integer, pointer, integer, pointer)
        self.profiler_init = function(
            "host_profiler_init", integer, pointer, integer, pointer, pointer, ctypes.c_char_p, u64, integer,
            integer, integer,
        )  # fmt: skip
        self.profiler_finalize = function("host_profiler_finalize", integer, pointer, integer, pointer)
        self.enqueue = function("host_enqueue", None, pointer, integer, pointer, pointer, integer, pointer)
        self.capture = function("host_capture", None, pointer, integer, pointer, pointer, integer, pointer)
        self.launch = function("host_launch", None, pointer, integer, pointer, pointer, pointer, integer, pointer)
        self.run_channels = function("host_run_channels", None, pointer, integer, pointer, pointer, integer, u64, u64)


class LoadedPlugin(NamedTuple):
    """A plugin's struct in memory, and its ABI version."""

    address: int
    abi: int
    library: ctypes.CDLL
    path: str


class PluginHost:
    """The process's plugins; `tuner` and `profiler` may be None."""

    def __init__(self) -> None:
        self.release = release(os.environ)
        self.version = self.release.version
        self.n_algorithms = self.release.n_algorithms
        self.event_mask = ctypes.c_int(0)
        """NCCL's one mask of profiler events; the plugin keeps its address."""
        self.calls = _Host()
        self.tuner = _load("NCCL_TUNER_PLUGIN", "ncclTunerPlugin", "libnccl-tuner", self.release.tuner_abi, 2)
        self.profiler = _load(
            "NCCL_PROFILER_PLUGIN", "ncclProfiler", self.release.profiler_prefix, self.release.profiler_abi, 3
        )
        if self.profiler is not None and hasattr(self.profiler.library, _SET_TIMING_SOURCE):
            # zerotune's own plugin: its records must never count as measurements on a GPU.
            getattr(self.profiler.library, _SET_TIMING_SOURCE)(ctypes.c_uint32(TimingSource.emulated))


@cache
def plugin_host() -> PluginHost:
    """The process's host; the first call loads the plugins."""
    return PluginHost()


def _load(variable: str, symbol: str, prefix: str, newest: int, oldest: int) -> LoadedPlugin | None:
    """The plugin that the environment names; one that cannot be loaded is reported and not used, as in NCCL."""
    name = os.environ.get(variable, "")
    if not name or name == "none" or newest < oldest:
        return None
    library = _open(name, prefix)
    if library is None:
        _log.warning("emulated NCCL: %s=%s cannot be loaded; running without it", variable, name)
        return None
    for abi in range(newest, oldest - 1, -1):
        try:
            struct = ctypes.c_char.in_dll(library, f"{symbol}_v{abi}")
        except ValueError:
            continue
        return LoadedPlugin(ctypes.addressof(struct), abi, library, name)
    _log.warning("emulated NCCL: %s has no %s_v%d or older; running without it", name, symbol, newest)
    return None


def _open(name: str, prefix: str) -> ctypes.CDLL | None:
    if name == "STATIC_PLUGIN":
        return ctypes.CDLL(None)
    is_file = "/" in name or name.endswith(".so")
    for candidate in (name,) if is_file else (name, f"{prefix}-{name}.so"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    return None


class CommunicatorPlugins:
    """One communicator's plugin contexts.

    Raises:
        EmulatedNcclError: a plugin's `init` failed, which fails the communicator.
    """

    def __init__(self, comm_id: int, rank: int, n_ranks: int, n_nodes: int, name: str) -> None:
        self._host = host = plugin_host()
        self._calls = host.calls
        self._tuner_context, self._profiler_context = ctypes.c_void_p(), ctypes.c_void_p()
        self._n_channels = ctypes.c_int(0)
        self._n_channels_address = ctypes.addressof(self._n_channels)
        self.has_tuner = self.has_profiler = False
        profiled = comm_id, rank, n_ranks, n_nodes, name
        if host.version < (2, 28):
            self._init_profiler(*profiled)
        if host.tuner is not None:
            context = ctypes.addressof(self._tuner_context)
            result = self._calls.tuner_init(host.tuner.address, host.tuner.abi, context, comm_id, n_ranks, n_nodes)
            if result != 0:
                raise EmulatedNcclError(f"the tuner plugin refused the communicator (error {result})")
            self.has_tuner = True
        if host.version >= (2, 28):
            self._init_profiler(*profiled)

    def _init_profiler(self, comm_id: int, rank: int, n_ranks: int, n_nodes: int, name: str) -> None:
        profiler = self._host.profiler
        if profiler is None:
            return
        result = self._calls.profiler_init(
            profiler.address, profiler.abi, ctypes.addressof(self._profiler_context),
            ctypes.addressof(self._host.event_mask), name.encode(), comm_id, n_nodes, n_ranks, rank,
        )  # fmt: skip
        self.has_profiler = result == 0  # if it fails, the communicator runs without it

    def ask(self, collective: int, message_bytes: int, n_pipe_ops: int, table: int, nvls: bool, captured: bool) -> int:
        """Let the tuner edit a cost table; returns its channels, 0: no opinion.

        `table` is the address of the costs in microseconds, C floats of shape (n_algorithms, 3), which are edited in
        place.

        Raises:
            EmulatedNcclError: the tuner returned an error, which fails the collective.
        """
        tuner = self._host.tuner
        assert tuner is not None
        self._n_channels.value = 0
        result = self._calls.tuner_ask(
            tuner.address, tuner.abi, self._tuner_context, collective, message_bytes, n_pipe_ops, table,
            self._host.n_algorithms, captured, nvls, self._n_channels_address,
        )  # fmt: skip
        if result == _NO_SUCH_CELL and not self._host.release.checks_tuner:
            raise EmulatedNcclError("the tuner plugin chose a cell that does not exist; NCCL 2.21 would run it")
        if result not in (0, _NO_SUCH_CELL):
            raise EmulatedNcclError(f"the tuner plugin failed the collective (error {result})")
        return self._n_channels.value

    def chunk_bytes(self, collective: Collective, message_bytes: int, ran: Candidate) -> int:
        """The tuner's chunk size for a channel's part of a collective with setting `ran`; 0: NCCL's own."""
        tuner = self._host.tuner
        if tuner is None or not self.has_tuner or ran.algorithm is None or ran.protocol is None:
            return 0
        return int(
            self._calls.tuner_chunk(
                tuner.address, tuner.abi, self._tuner_context, collective, message_bytes, ran.algorithm, ran.protocol,
                _BUFFER_BYTES,
            )
        )  # fmt: skip

    @property
    def wants_events(self) -> bool:
        """Whether the profiler asks for collectives now."""
        return self.has_profiler and bool(self._host.event_mask.value & EVENT_COLLECTIVE)

    def enqueued(self, events: Sequence[CollectiveEvent], captured: CapturedGroup | None = None) -> list[int | None]:
        """Report one group's kernel to the profiler; returns a handle for each of its collectives.

        `captured` is the result of `begin_capture` for the same collectives, if a graph is replayed.
        """
        profiler = self._host.profiler
        assert profiler is not None
        where = profiler.address, profiler.abi, self._profiler_context
        n_events = len(events)
        colls = events[0] if n_events == 1 else (CollectiveEvent * n_events)(*events)
        handles = (ctypes.c_void_p * n_events)()
        if captured is None:
            self._calls.enqueue(*where, ctypes.addressof(colls), n_events, ctypes.addressof(handles))
        else:
            announced = ctypes.addressof(captured)
            self._calls.launch(*where, ctypes.addressof(colls), announced, n_events, ctypes.addressof(handles))
        return list(handles)

    def begin_capture(self, events: Sequence[CollectiveEvent]) -> CapturedGroup:
        """Report one group that a graph captures: its kernels will run when the graph is replayed."""
        profiler = self._host.profiler
        assert profiler is not None
        colls = (CollectiveEvent * len(events))(*events)
        captured = (ctypes.c_void_p * len(events))()
        self._calls.capture(
            profiler.address, profiler.abi, self._profiler_context, ctypes.addressof(colls), len(events),
            ctypes.addressof(captured),
        )  # fmt: skip
        return captured

    def ran(self, handle: int, n_channels: int, start_us: float, end_us: float) -> None:
        """Report when a collective's kernel ran."""
        profiler = self._host.profiler
        assert profiler is not None
        self._calls.run_channels(
            profiler.address, profiler.abi, self._profiler_context, handle, n_channels,
            round(start_us * 1000), round(end_us * 1000),
        )  # fmt: skip

    def finalize(self) -> None:
        """The communicator is destroyed or aborted."""
        host = self._host
        if host.profiler is not None and self.has_profiler:
            self._calls.profiler_finalize(host.profiler.address, host.profiler.abi, self._profiler_context)
            self.has_profiler = False
        if host.tuner is not None and self.has_tuner:
            self._calls.tuner_finalize(host.tuner.address, host.tuner.abi, self._tuner_context)
            self.has_tuner = False

"""Loads tuner and profiler plugins as NCCL does, and speaks to them through host.c.

Which ABI versions are looked for, and in which order, depends on the NCCL release that is emulated
(`ZEROTUNE_NCCL_VERSION`, default 2.28.9). Plugins are loaded once per process, at the first communicator;
their `init` and `finalize` run once per communicator.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import Any, Final, NamedTuple

from agent.nccl.emulated.build import build
from agent.nccl.emulated.errors import EmulatedNcclError
from store.errors import UserError

DEFAULT_NCCL_VERSION: Final = (2, 28, 9)

_TUNER_ABIS: Final = (((2, 30), 6), ((2, 28), 5), ((2, 24), 4), ((2, 22), 3), ((2, 21), 2))
_PROFILER_ABIS: Final = (
    ((2, 29), 6), ((2, 28), 5), ((2, 27), 4), ((2, 26), 3), ((2, 24), 2), ((2, 23), 1),
)  # fmt: skip

_log = logging.getLogger(__name__)


class CollectiveEvent(ctypes.Structure):
    """What a profiler is told of one collective; mirrors `host_coll`."""

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
        ("reserved", ctypes.c_uint8 * 2),
    )


def nccl_version() -> tuple[int, ...]:
    """The NCCL release that is emulated; UserError when `ZEROTUNE_NCCL_VERSION` is none."""
    text = os.environ.get("ZEROTUNE_NCCL_VERSION", "")
    if not text:
        return DEFAULT_NCCL_VERSION
    try:
        version = tuple(int(part) for part in text.split("."))
    except ValueError:
        version = ()
    if len(version) < 2 or version < (2, 21):
        raise UserError(f"ZEROTUNE_NCCL_VERSION={text!r} is no NCCL release from 2.21 on", "say 2.28.9, for example")
    return version


class _Host:
    """host.c's functions."""

    def __init__(self) -> None:
        library = ctypes.PyDLL(str(build()))
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
        self.tuner_finalize = function("host_tuner_finalize", integer, pointer, integer, pointer)
        self.profiler_init = function(
            "host_profiler_init", integer, pointer, integer, pointer, pointer, ctypes.c_char_p, u64, integer,
            integer, integer,
        )  # fmt: skip
        self.profiler_finalize = function("host_profiler_finalize", integer, pointer, integer, pointer)
        self.enqueue = function("host_enqueue", pointer, pointer, integer, pointer, pointer)
        self.run_channels = function(
            "host_run_channels", None, pointer, integer, pointer, pointer, integer, integer, u64, u64
        )


class LoadedPlugin(NamedTuple):
    """A plugin's struct in memory and the ABI version under which it was found."""

    address: int
    abi: int
    library: ctypes.CDLL
    path: str


class PluginHost:
    """The process's plugins; `tuner` and `profiler` are None when there is none."""

    def __init__(self) -> None:
        self.version = nccl_version()
        self.calls = _Host()
        self.tuner = _load("NCCL_TUNER_PLUGIN", "ncclTunerPlugin", "tuner", _newest(_TUNER_ABIS, self.version), 2)
        newest_profiler = _newest(_PROFILER_ABIS, self.version)
        self.profiler = _load("NCCL_PROFILER_PLUGIN", "ncclProfiler", "profiler", newest_profiler, 1)

    @property
    def n_algorithms(self) -> int:
        """Rows of the cost table: PAT came with 2.23."""
        return 7 if self.version >= (2, 23) else 6


_host: PluginHost | None = None


def plugin_host() -> PluginHost:
    """The process's only host; the first call loads the plugins."""
    global _host
    if _host is None:
        _host = PluginHost()
    return _host


def _newest(abis: tuple[tuple[tuple[int, int], int], ...], version: tuple[int, ...]) -> int:
    return next((abi for since, abi in abis if version >= since), 0)


def _load(variable: str, symbol: str, kind: str, newest: int, oldest: int) -> LoadedPlugin | None:
    """What the environment names; a plugin that cannot be loaded is reported and left out, as NCCL does."""
    name = os.environ.get(variable, "")
    if not name or name == "none" or newest < oldest:
        return None
    library = _open(name, kind)
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


def _open(name: str, kind: str) -> ctypes.CDLL | None:
    if name == "STATIC_PLUGIN":
        return ctypes.CDLL(None)
    is_file = "/" in name or name.endswith(".so")
    for candidate in (name,) if is_file else (name, f"libnccl-{kind}-{name}.so"):
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
        self._rank = rank
        self._tuner_context, self._profiler_context = ctypes.c_void_p(), ctypes.c_void_p()
        self._mask = ctypes.c_int(0)  # the profiler keeps its address: alive until after finalize
        self._n_channels = ctypes.c_int(0)
        self._n_channels_address = ctypes.addressof(self._n_channels)
        if host.tuner is not None:
            context = ctypes.addressof(self._tuner_context)
            result = self._calls.tuner_init(host.tuner.address, host.tuner.abi, context, comm_id, n_ranks, n_nodes)
            if result != 0:
                raise EmulatedNcclError(f"the tuner plugin refused the communicator (error {result})")
        self.has_tuner = host.tuner is not None
        self.has_profiler = False
        if host.profiler is not None:
            context = ctypes.addressof(self._profiler_context)
            result = self._calls.profiler_init(
                host.profiler.address, host.profiler.abi, context, ctypes.addressof(self._mask),
                name.encode(), comm_id, n_nodes, n_ranks, rank,
            )  # fmt: skip
            self.has_profiler = result == 0  # a profiler's refusal does no harm

    def ask(self, collective: int, message_bytes: int, n_pipe_ops: int, table: int, nvls: bool, captured: bool) -> int:
        """Let the tuner edit the cost table at address `table`; the channels it wants (0 = no opinion).

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
        if result != 0:
            raise EmulatedNcclError(f"the tuner plugin failed the collective (error {result})")
        return self._n_channels.value

    @property
    def wants_events(self) -> bool:
        """Whether the profiler asks for collectives just now."""
        return self.has_profiler and bool(self._mask.value & 2)

    def enqueued(self, event: CollectiveEvent) -> int | None:
        """Tell the profiler of an enqueued collective; the event's handle."""
        profiler = self._host.profiler
        assert profiler is not None
        handle = self._calls.enqueue(profiler.address, profiler.abi, self._profiler_context, ctypes.addressof(event))
        return handle if self._mask.value & 64 else None

    def ran(self, handle: int, n_channels: int, start_us: float, end_us: float) -> None:
        """Tell the profiler when the collective's kernel ran, in virtual microseconds."""
        profiler = self._host.profiler
        assert profiler is not None
        self._calls.run_channels(
            profiler.address, profiler.abi, self._profiler_context, handle, self._rank, n_channels,
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

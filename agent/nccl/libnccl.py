"""NCCL's own library, bound with ctypes: found, opened, its communicators and collectives.

Methods raise `NcclError` if NCCL refuses a call. Buffers are addresses of send and receive buffer, in device memory.
`operation` is an ncclRedOp_t, for collectives that reduce. `stream` None is the default stream.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ...store.errors import PluginError, UserError
from ...store.records import Collective
from .mock_cuda.symbols import exported_functions

LIBRARY: Final = "libnccl.so.2"
LIBRARY_VARIABLE: Final = "NCCL_LIBRARY"
DISTRIBUTIONS: Final = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
"""Packages that contain the library, the newest CUDA first."""
UNIQUE_ID_BYTES: Final = 128
"""NCCL_UNIQUE_ID_BYTES"""
BFLOAT16, BFLOAT16_BYTES = 9, 2
"""ncclDataType_t of an element, and its size."""
SUM, AVERAGE = 0, 4
"""ncclRedOp_t"""
IN_PROGRESS: Final = 7
"""ncclInProgress: a call on a non-blocking communicator continues in the background."""


class NcclError(PluginError):
    """NCCL returned an error; `code` is its ncclResult_t."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function} failed: {text} (ncclResult_t {code})")
        self.code = code


class UniqueId(ctypes.Structure):
    """The id by which ranks of a communicator find each other."""

    _fields_ = [("internal", ctypes.c_char * UNIQUE_ID_BYTES)]

    @classmethod
    def of(cls, content: bytes) -> UniqueId:
        """The id with this content, UNIQUE_ID_BYTES long."""
        made = cls()
        ctypes.memmove(ctypes.byref(made), content, UNIQUE_ID_BYTES)
        return made


class _Config(ctypes.Structure):
    """ncclConfig_t of 2.14, which every later release accepts."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


def non_blocking_config() -> ctypes.Structure:
    """The config of a communicator whose calls do not block; ncclCommGetAsyncError returns their result."""
    return _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)


def find_libnccl() -> Path | None:
    """The library that `NCCL_LIBRARY` names, else that of a wheel; None: there is none.

    Raises:
        UserError: `NCCL_LIBRARY` names no file.
    """
    named = os.environ.get(LIBRARY_VARIABLE)
    if named and not Path(named).is_file():
        raise UserError(f"{LIBRARY_VARIABLE}={named!r} is not a file", f"name a {LIBRARY}")
    # Absolute: the linker would look up a bare name elsewhere.
    return next((Path(path).absolute() for _, path in candidates(os.environ) if Path(path).is_file()), None)


def candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Libraries that training may load, the likeliest first: (origin, path)."""
    if named := environment.get(LIBRARY_VARIABLE):
        yield f"{LIBRARY_VARIABLE}={named}", named
    for name in DISTRIBUTIONS:
        try:
            path = importlib.metadata.distribution(name).locate_file(f"nvidia/nccl/lib/{LIBRARY}")
        except importlib.metadata.PackageNotFoundError:
            continue
        yield f"package {name}", str(path)


class Libnccl:
    """One libnccl in this process; raises `UserError` if the file is not NCCL's library."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        exported_functions(path)  # a truncated file could be loaded, and would crash the process later
        try:
            self.library: Final = ctypes.CDLL(str(path))
            code = ctypes.c_int()
            self.library.ncclGetVersion(ctypes.byref(code))
        except (OSError, AttributeError) as error:
            raise UserError(f"{path} is not NCCL's library: {error}", "name a libnccl.so.2") from error
        self.version: Final = (code.value // 10000, code.value // 100 % 100, code.value % 100)
        pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        self._error_string = self.library.ncclGetErrorString
        self._error_string.restype = ctypes.c_char_p
        self._init_rank = self._bind("CommInitRank", ctypes.POINTER(pointer), number, UniqueId, number)
        self._all_gather = self._bind("AllGather", pointer, pointer, count, number, pointer, pointer)
        self._reduce_scatter = self._bind("ReduceScatter", pointer, pointer, count, number, number, pointer, pointer)
        self._all_reduce = self._bind("AllReduce", pointer, pointer, count, number, number, pointer, pointer)
        self._broadcast = self._bind("Broadcast", pointer, pointer, count, number, number, pointer, pointer)
        self._reduce = self._bind("Reduce", pointer, pointer, count, number, number, number, pointer, pointer)
        self._group_start = self._bind("GroupStart")
        self._group_end = self._bind("GroupEnd")
        self._destroy = self._bind("CommDestroy", pointer)
        self._abort = self._bind("CommAbort", pointer)

    def _bind(self, name: str, *arguments: Any) -> Any:
        function = getattr(self.library, f"nccl{name}")
        function.argtypes = arguments
        return function

    def _check(self, function: str, code: int) -> None:
        if code != 0:
            raise NcclError(f"nccl{function}", code, (self._error_string(code) or b"?").decode())

    def unique_id(self) -> bytes:
        """A new id, which rank 0 must pass to the other ranks."""
        made = UniqueId()
        self._check("GetUniqueId", self.library.ncclGetUniqueId(ctypes.byref(made)))
        return bytes(made)

    def init_rank(self, n_ranks: int, unique_id: bytes, rank: int) -> int:
        """Make this rank's communicator with rank 0's id; every rank must call it."""
        made = ctypes.c_void_p()
        self._check("CommInitRank", self._init_rank(ctypes.byref(made), n_ranks, UniqueId.of(unique_id), rank))
        return made.value or 0

    def enqueue(
        self,
        collective: Collective,
        communicator: int,
        message_bytes: int,
        n_ranks: int,
        buffers: tuple[int, int],
        *,
        operation: int = SUM,
        stream: int | None = None,
    ) -> None:
        """Call a collective on bfloat16 numbers; its root, if it has one, is rank 0.

        `message_bytes` is NCCL's nBytes: the total over ranks for all_gather and reduce_scatter.
        """
        shared = message_bytes // BFLOAT16_BYTES
        is_sharded = collective in (Collective.all_gather, Collective.reduce_scatter)
        count = shared // n_ranks if is_sharded else shared
        self.call(collective, communicator, buffers, count, BFLOAT16, operation=operation, stream=stream)

    def call(
        self,
        collective: Collective,
        communicator: int,
        buffers: tuple[int, int],
        count: int,
        datatype: int,
        *,
        operation: int = SUM,
        root: int = 0,
        stream: int | None = None,
    ) -> None:
        """Call a collective."""
        where = (communicator, stream)
        if collective is Collective.all_gather:
            code = self._all_gather(*buffers, count, datatype, *where)
        elif collective is Collective.reduce_scatter:
            code = self._reduce_scatter(*buffers, count, datatype, operation, *where)
        elif collective is Collective.all_reduce:
            code = self._all_reduce(*buffers, count, datatype, operation, *where)
        elif collective is Collective.broadcast:
            code = self._broadcast(*buffers, count, datatype, root, *where)
        else:
            code = self._reduce(*buffers, count, datatype, operation, root, *where)
        self._check(collective.name, code)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Calls inside the context run as one group; its end may raise."""
        self._check("GroupStart", self._group_start())
        try:
            yield
        finally:
            code = self._group_end()
        self._check("GroupEnd", code)

    def destroy(self, communicator: int) -> None:
        """Destroy a communicator."""
        self._check("CommDestroy", self._destroy(communicator))

    def abort(self, communicator: int) -> None:
        """Destroy a communicator without waiting for its calls."""
        self._check("CommAbort", self._abort(communicator))

    @property
    def version_text(self) -> str:
        """The release, such as `2.28.9`."""
        return ".".join(map(str, self.version))

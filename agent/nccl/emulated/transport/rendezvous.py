"""Python's side of rendezvous.c: one `Rendezvous` per communicator and rank.

All ranks run on one machine. The group's first rank makes an anonymous memory file and writes its path into the c10d
store: `/proc/<pid>/fd/<fd>`. No file system has a name for it, so killing every rank leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from ...compiled import EMULATED_NCCL
from ..errors import CollectiveTimeout, EmulatedNcclError, PeerLost

N_SLOTS: Final = 1024
ARENA_BYTES: Final = 4 << 30
"""Virtual bytes per rank for payloads of calls in flight; only touched pages cost memory."""
MAX_RANKS: Final = 64

_FULL: Final = -2
_TOO_LARGE: Final = -3
_TIMEOUT: Final = -1
_DEAD: Final = -100


class Header(ctypes.Structure):
    """One rank's announcement of one call; mirrors `rv_header`."""

    _fields_ = (
        ("message_bytes", ctypes.c_uint64),
        ("n_elements", ctypes.c_uint64),
        ("arrival_us", ctypes.c_double),
        ("contention", ctypes.c_double),
        ("payload", ctypes.c_uint64),
        ("root", ctypes.c_int32),
        ("n_pieces", ctypes.c_uint32),
        ("collective", ctypes.c_uint8),
        ("datatype", ctypes.c_uint8),
        ("redop", ctypes.c_uint8),
        ("algorithm", ctypes.c_uint8),
        ("protocol", ctypes.c_uint8),
        ("n_channels", ctypes.c_uint8),
        ("failed", ctypes.c_uint8),
        ("even", ctypes.c_uint8),
        ("chunk_kib", ctypes.c_uint32),
        ("reserved", ctypes.c_uint8 * 4),
        ("index", ctypes.c_uint64),
        ("padding", ctypes.c_uint8 * 56),
    )


class Joined(ctypes.Structure):
    """The comparison of all ranks' headers of one call; mirrors `rv_joined`."""

    _fields_ = (
        ("arrival_us", ctypes.c_double),
        ("contention", ctypes.c_double),
        ("message_bytes", ctypes.c_uint64),
        ("failed_rank", ctypes.c_int32),
        ("call_rank", ctypes.c_int32),
        ("setting_rank", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class _Library:
    """Quick functions keep Python's GIL; functions that may block release it."""

    def __init__(self) -> None:
        path = str(EMULATED_NCCL.build())
        quick, blocking = ctypes.PyDLL(path), ctypes.CDLL(path)
        pointer, u64, u32, i64 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int64

        def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
            entry = getattr(library, name)
            entry.restype, entry.argtypes = result, arguments
            return entry

        self.create = function(quick, "rv_create", ctypes.c_int, u32, u32, u64, u64)
        self.open = function(quick, "rv_open", pointer, ctypes.c_int, u32, u64)
        self.close = function(quick, "rv_close", None, pointer)
        self.abort = function(quick, "rv_abort", None, pointer)
        self.publish = function(quick, "rv_publish", ctypes.c_int, pointer, pointer, pointer, pointer)
        self.publish_large = function(blocking, "rv_publish", ctypes.c_int, pointer, pointer, pointer, pointer)
        self.wait = function(blocking, "rv_wait", ctypes.c_int, pointer, u64, i64)
        self.wait_consumed = function(blocking, "rv_wait_consumed", ctypes.c_int, pointer, u64, i64)
        self.is_ready = function(quick, "rv_is_ready", ctypes.c_int, pointer, u64)
        self.join = function(quick, "rv_join", None, pointer, u64, pointer)
        self.peek = function(quick, "rv_peek", ctypes.POINTER(Header), pointer, u64, u32)
        self.piece = function(quick, "rv_piece", pointer, pointer, u64, u32, u32, pointer)
        self.copy = function(blocking, "rv_copy", ctypes.c_int, pointer, u64, u32, u32, u64, pointer, u64)
        self.gather = function(blocking, "rv_gather", ctypes.c_int, pointer, u64, u32, pointer, u64)
        self.consume = function(quick, "rv_consume", None, pointer, u64)


_library: _Library | None = None


def library() -> _Library:
    """The functions of rendezvous.c, built and loaded once per process."""
    global _library
    if _library is None:
        _library = _Library()
    return _library


def _open_memory(store: dist.Store, key: str, rank: int) -> tuple[int, int]:
    """File and nonce of rank 0's memory."""
    pid, number, nonce = map(int, store.get(key).split())
    try:
        return os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC), nonce
    except OSError as error:
        raise EmulatedNcclError(
            f"rank {rank} cannot reach rank 0's memory ({error}): all ranks of the emulated NCCL must run on one "
            "machine, in one container and as one user"
        ) from error


class Rendezvous:
    """One rank's view of a communicator's shared memory."""

    def __init__(self, store: dist.Store, key: str, rank: int, n_ranks: int, timeout: timedelta) -> None:
        if n_ranks > MAX_RANKS:
            raise EmulatedNcclError(f"{n_ranks} ranks: the emulated NCCL carries at most {MAX_RANKS}")
        self._library = library()
        self.rank, self.n_ranks = rank, n_ranks
        if rank == 0:
            nonce = secrets.randbits(63)
            fd = self._library.create(n_ranks, N_SLOTS, ARENA_BYTES, nonce)
            if fd < 0:
                raise EmulatedNcclError("cannot make an anonymous shared memory file")
            store.set(key, f"{os.getpid()} {fd} {nonce}")
        else:
            store.wait([key], timeout)
            fd, nonce = _open_memory(store, key, rank)
        handle = self._library.open(fd, rank, nonce)
        if not handle:
            raise EmulatedNcclError("the meeting place of this group belongs to somebody else")
        self._handle: int | None = handle
        self._joined = Joined()
        self._joined_address = ctypes.addressof(self._joined)
        self._length = ctypes.c_uint64()
        self._length_address = ctypes.addressof(self._length)

    @property
    def handle(self) -> int:
        """The C handle; raises EmulatedNcclError after `close`."""
        if self._handle is None:
            raise EmulatedNcclError("this communicator has been destroyed")
        return self._handle

    def publish(self, header: Header, pieces: list[torch.Tensor]) -> int:
        """Publish the next call with copies of `pieces` (contiguous, on the CPU).

        Returns its index; -1: the ring or the arena is full. A payload that is larger than the arena raises
        `EmulatedNcclError`.
        """
        n_pieces = len(pieces)
        header.n_pieces = n_pieces
        total = 0
        pointers, lengths = (ctypes.c_uint64 * n_pieces)(), (ctypes.c_uint64 * n_pieces)()
        for i, piece in enumerate(pieces):
            n_bytes = piece.numel() * piece.element_size()
            pointers[i], lengths[i] = piece.data_ptr(), n_bytes
            total += n_bytes
        publish = self._library.publish_large if total > 1 << 20 else self._library.publish
        result = publish(self.handle, ctypes.addressof(header), ctypes.addressof(pointers), ctypes.addressof(lengths))
        if result == _FULL:
            return -1
        if result == _TOO_LARGE:
            raise EmulatedNcclError(f"a payload of {total} bytes is over the emulated NCCL's {ARENA_BYTES}")
        return int(header.index)

    def wait(self, index: int, timeout_us: int) -> None:
        """Wait until every rank has published call `index`.

        Raises:
            PeerLost, CollectiveTimeout, EmulatedNcclError: a rank will not publish it, or not in time.
        """
        self._check(self._library.wait(self.handle, index, timeout_us), "join the collective", timeout_us)

    def wait_consumed(self, index: int, timeout_us: int) -> None:
        """Wait until every rank has consumed call `index`; raises as `wait`."""
        result = self._library.wait_consumed(self.handle, index, timeout_us)
        self._check(result, "finish earlier collectives", timeout_us)

    def _check(self, result: int, purpose: str, timeout_us: int) -> None:
        if result == 0:
            return
        if result == _TIMEOUT:
            raise CollectiveTimeout(f"not every rank came to {purpose} within the timeout of {timeout_us / 1e6:.1f} s")
        if result <= _DEAD:
            raise PeerLost(f"rank {_DEAD - result} of {self.n_ranks} ended before it could {purpose}")
        raise EmulatedNcclError("the communicator was aborted")

    def is_ready(self, index: int) -> bool:
        """Whether every rank has published call `index`."""
        return bool(self._library.is_ready(self.handle, index))

    def join(self, index: int) -> Joined:
        """All ranks' headers compared; valid until the next `join`."""
        self._library.join(self.handle, index, self._joined_address)
        return self._joined

    def peek(self, index: int, rank: int) -> Header:
        """One rank's header of a call, after `wait`."""
        header: Header = self._library.peek(self.handle, index, rank).contents
        return header

    def view(self, index: int, rank: int, piece: int, dtype: torch.dtype) -> torch.Tensor:
        """One rank's piece of a call: a one-dimensional view of the shared memory, valid until `consume`.

        It is empty if the rank sent nothing.
        """
        address = self._library.piece(self.handle, index, rank, piece, self._length_address)
        n_bytes = self._length.value if address else 0
        if n_bytes == 0:
            return torch.empty(0, dtype=dtype)
        memory = (ctypes.c_char * n_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=dtype)

    def copy(self, index: int, rank: int, piece: int, to: torch.Tensor, offset_bytes: int = 0) -> None:
        """Fill a tensor from a position in one rank's piece of a call; EmulatedNcclError if the piece is too short."""
        n_bytes = to.numel() * to.element_size()
        if self._library.copy(self.handle, index, rank, piece, offset_bytes, to.data_ptr(), n_bytes) != 0:
            raise EmulatedNcclError(f"rank {rank} sent fewer than the {n_bytes} bytes expected of it")

    def gather(self, index: int, piece: int, to: torch.Tensor, bytes_per_rank: int) -> None:
        """Fill a tensor with every rank's piece of a call, in the order of ranks; EmulatedNcclError if one is short."""
        if self._library.gather(self.handle, index, piece, to.data_ptr(), bytes_per_rank) != 0:
            raise EmulatedNcclError(f"a rank sent fewer than the {bytes_per_rank} bytes expected of it")

    def consume(self, index: int) -> None:
        """Release call `index` and all earlier calls: this rank needs them no more."""
        self._library.consume(self.handle, index)

    def abort(self) -> None:
        """End all waits on this rank with an error."""
        if self._handle is not None:
            self._library.abort(self._handle)

    def close(self) -> None:
        """Unmap the memory; it is freed with the last rank."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._library.close(handle)

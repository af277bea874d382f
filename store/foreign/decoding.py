"""Decodes what other users wrote in a process of its own, with limits on memory and time.

Neither a file's size nor its own header limits how much it decodes to. So a decoding function runs in a process that
the system limits. The function checks its result and returns a bounded number of bytes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import socket as sockets
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from .own_python import python_with

_HEAD: Final = struct.Struct("!BQQ")
"""A request has 0, the name's bytes and the data's bytes. An answer has its status, 0, and its bytes."""
_DONE, _REFUSED = 0, 1
_START_S: Final = 30.0
"""An interpreter starts and imports in less, even on a busy machine."""


class Undecodable(Exception):
    """The data cannot be decoded within the limits, or is invalid; the text says why."""


class Decoding:
    """A function in a process of its own, for one thread; the first call starts the process, also after it was killed.

    Args:
        function: MODULE:NAME of a function that takes a name and bytes and returns at most `most_bytes`; it raises
            ValueError, with a text, for invalid data.
        memory_mib: memory that it may take beyond the interpreter's and its imports'.
        seconds: limit of one call.
    """

    def __init__(self, function: str, *, memory_mib: int, seconds: float, most_bytes: int) -> None:
        self._function, self._memory_mib = function, memory_mib
        self._seconds, self._most_bytes = seconds, most_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._line: sockets.socket | None = None

    def __enter__(self) -> Decoding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, name: str, data: bytes) -> bytes:
        """The function's result; raises `Undecodable` if the function refuses the data or exceeds a limit."""
        try:
            line = self._begun()
            ends_at_s = time.monotonic() + self._seconds
            line.settimeout(ends_at_s - time.monotonic())
            named = name.encode(errors="surrogateescape")
            line.sendall(_HEAD.pack(0, len(named), len(data)) + named)
            line.sendall(data)
            kind, _, n_bytes = _HEAD.unpack(_received(line, _HEAD.size, ends_at_s))
            if n_bytes > self._most_bytes:
                raise Undecodable(f"it decodes to {n_bytes:,} bytes")
            reply = _received(line, n_bytes, ends_at_s)
        except TimeoutError as error:
            self.close()
            raise Undecodable(f"decoding it takes longer than {self._seconds:g} s") from error
        except (OSError, EOFError) as error:
            self.close()
            raise Undecodable(f"decoding it takes more than {self._memory_mib} MiB, or cannot be done now") from error
        except BaseException:
            self.close()
            raise
        if kind != _DONE:
            raise Undecodable(reply.decode(errors="replace"))
        return reply

    def close(self) -> None:
        """End the process."""
        process, line, self._process, self._line = self._process, self._line, None, None
        if line is not None:
            line.close()
        if process is not None:
            process.kill()
            process.wait()

    def _begun(self) -> sockets.socket:
        if self._line is None:
            own, other = sockets.socketpair()
            with other:
                command = [*python_with(__name__), str(other.fileno()), self._function, str(self._memory_mib)]
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    pass_fds=[other.fileno()], start_new_session=True,
                    env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"},
                )  # fmt: skip
            self._line = own
            _received(own, 1, time.monotonic() + _START_S)
        return self._line


def _received(line: sockets.socket, n_bytes: int, ends_at_s: float | None = None) -> bytes:
    found = bytearray()
    while len(found) < n_bytes:
        line.settimeout(None if ends_at_s is None else max(0.001, ends_at_s - time.monotonic()))
        if not (part := line.recv(min(n_bytes - len(found), 2**20))):
            raise EOFError
        found += part
    return bytes(found)


def _serve(line: sockets.socket, function: str, memory_mib: int) -> None:
    """The process: answers requests until the other end is closed."""
    module, _, name = function.partition(":")
    decode = getattr(importlib.import_module(module), name)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    line.sendall(b"\0")  # the caller's time limit counts from here on
    while True:
        _, n_name, n_data = _HEAD.unpack(_received(line, _HEAD.size))
        named, data = _received(line, n_name), _received(line, n_data)
        try:
            kind, reply = _DONE, decode(named.decode(errors="surrogateescape"), data)
        except ValueError as error:
            kind, reply = _REFUSED, " ".join(str(error).split())[:500].encode(errors="replace")
        except (MemoryError, RecursionError) as error:
            kind, reply = _REFUSED, f"decoding it takes more than {memory_mib} MiB ({type(error).__name__})".encode()
        del data
        line.sendall(_HEAD.pack(kind, 0, len(reply)) + reply)
        del reply


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError), sockets.socket(fileno=int(sys.argv[1])) as other:
        _serve(other, sys.argv[2], int(sys.argv[3]))

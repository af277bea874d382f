"""A TCP line between two network namespaces that delays, stands still, loses, cuts and drops its traffic.

python -m benchmarks.lib.faults.bad_line_worker HOST:PORT NAMESPACE

Connections to HOST:PORT in this namespace go to HOST:PORT in the other namespace (a file). The standard input has the
current harm, a word a line. It replaces `tc netem`, which not every kernel has.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

HARMS: Final = ("delay", "hold", "lose", "halve", "drop")
"""Late; not before the harm is over; left out; half of it and the end; the end."""
PASS: Final = "pass"
DELAY_S: Final = (0.02, 0.5)
CLONE_NEWNET: Final = 0x40000000


class BadLine:
    """All connections, and their current harm."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.harm = PASS

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join a connection with one on the other side; both end when either does."""
        with contextlib.suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
            pumps = [
                asyncio.create_task(self._pump(reader, there_writer)),
                asyncio.create_task(self._pump(there_reader, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            there_writer.close()
        writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if self.harm == "delay":
                    await asyncio.sleep(random.uniform(*DELAY_S))
                while self.harm == "hold":
                    await asyncio.sleep(0.05)
                if self.harm == "lose" and random.random() < 0.5:
                    continue
                is_end = self.harm in ("halve", "drop")
                if self.harm != "drop":
                    writer.write(data[: len(data) // 2] if is_end else data)
                    await writer.drain()
                if is_end:
                    return


def follow(line: BadLine, read: Callable[[], str]) -> None:
    """Follow the harms on standard input until it ends."""
    while word := read().strip():
        line.harm = word


async def serve(listener: socket.socket, line: BadLine) -> None:
    """Serve until the standard input ends."""
    server = await asyncio.start_server(line.accept, sock=listener)
    async with server:
        await asyncio.to_thread(follow, line, sys.stdin.readline)


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    listener = socket.create_server((host, int(port)))
    with Path(sys.argv[2]).open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {sys.argv[2]}")
    asyncio.run(serve(listener, BadLine(host, int(port))))


if __name__ == "__main__":
    main()

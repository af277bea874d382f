"""Ends connections before endless messages fill the memory.

ZeroMQ delivers a message once all its frames have arrived, and does not limit their number. Until then it keeps them in
its own memory, where neither the daemon's loop nor a frame limit applies. So a thread watches the process's memory.
Above a limit it ends every connection, which frees incomplete messages. Ranks connect anew within a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket as sockets
import threading
from typing import Any, Final

import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

from .process_limits import give_back_memory

_log = logging.getLogger("zerotune.daemon")

MAX_RESIDENT_BYTES: Final = 1536 * 2**20
"""Several times the need of thousands of ranks."""
STEP_BYTES: Final = 256 * 2**20
"""After connections were ended, memory must grow by this much before they are ended again."""
LOOK_EVERY_MS: Final = 200
RESERVED: Final = 4
"""One in this many descriptors is reserved: ZeroMQ ends a process that has none left."""


class FloodGuard:
    """Owns thread `zerotune-flood-guard`: watches from its construction, before `socket` is bound, until `stop`.

    From the construction on, only the guard reads the socket's events.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._fds: set[int] = set()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._watch, name="zerotune-flood-guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the socket must still be open."""
        self._is_stopping = True
        self._thread.join()
        self._socket.disable_monitor()
        self._events.close(linger=0)

    def _watch(self) -> None:
        process = psutil.Process()
        ends_at_bytes = MAX_RESIDENT_BYTES
        most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        while not self._is_stopping:
            if self._events.poll(LOOK_EVERY_MS):
                event = recv_monitor_message(self._events)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._fds.add(event["value"])
                    if event["value"] >= most_files - most_files // RESERVED:  # the lowest free number comes first
                        _end(event["value"])
                else:
                    self._fds.discard(event["value"])
            try:
                resident_bytes = process.memory_info().rss
            except (OSError, psutil.Error):  # for example, no descriptor is left now
                continue
            if resident_bytes > ends_at_bytes:
                _log.error("%d MiB of memory: all connections are ended, ranks connect anew", resident_bytes >> 20)
                self._end_all()
                give_back_memory()
                ends_at_bytes = resident_bytes + STEP_BYTES
            elif resident_bytes < MAX_RESIDENT_BYTES:
                ends_at_bytes = MAX_RESIDENT_BYTES

    def _end_all(self) -> None:
        for fd in self._fds:
            _end(fd)


def _end(fd: int) -> None:
    """Shut the connection down; ZeroMQ owns the descriptor, sees the end of the stream and closes it."""
    with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(fd)) as connection:
        connection.shutdown(sockets.SHUT_RDWR)

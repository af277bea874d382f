"""Looking up names of hosts, which the system may take half a minute for.

ZeroMQ would do so on the thread that serves all sockets. So it is only ever told numbers.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
import time
from typing import Final

MAX_AT_ONCE: Final = 8
"""Names that are looked up at a time, each on its own thread: one that nobody answers for keeps no other waiting."""
ASK_AGAIN_S: Final = 10.0
"""A name that nobody knew is asked for again after this time."""


class Names:
    """What is known of hosts; nothing here waits. Used by one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._answers: dict[str, tuple[str, float]] = {}
        """Of each host the number, empty if nobody knew it, and when that was told."""

    def number_of(self, host: str) -> str:
        """The IPv4 address of a host, looked up anew for each time that it was given.

        Returns:
            Empty: it is not known, or not yet.
        """
        with contextlib.suppress(OSError, ValueError):
            return _looked_up(host, sockets.AI_NUMERICHOST)
        with self._lock:
            now_s = time.monotonic()
            self._answers = {name: one for name, one in self._answers.items() if now_s - one[1] < ASK_AGAIN_S}
            told = self._answers.get(host)
            if told is not None and told[0]:
                del self._answers[host]
                return told[0]
            if told is not None or host in self._asked or len(self._asked) >= MAX_AT_ONCE:
                return ""
            self._asked.add(host)
        try:
            threading.Thread(target=self._ask, args=(host,), name="zerotune-names", daemon=True).start()
        except RuntimeError:  # no thread can be begun now
            with self._lock:
                self._asked.discard(host)
        return ""

    def _ask(self, host: str) -> None:
        number = ""
        with contextlib.suppress(OSError, ValueError):
            number = _looked_up(host, 0)
        with self._lock:
            self._answers[host] = (number, time.monotonic())
            self._asked.discard(host)


def _looked_up(host: str, flags: int) -> str:
    found = sockets.getaddrinfo(host, None, sockets.AF_INET, sockets.SOCK_STREAM, flags=flags)
    return str(found[0][4][0])

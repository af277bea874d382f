"""Looks up host names, which may take the system half a minute.

ZeroMQ would do that on the thread that serves all sockets. So ZeroMQ only gets numeric addresses.
"""

from __future__ import annotations

import contextlib
import socket as sockets
import threading
import time
from typing import Final

MAX_AT_ONCE: Final = 8
"""Most lookups at a time, each on its own thread, so that an unanswered one does not delay the others."""
ASK_AGAIN_S: Final = 10.0
"""An unknown name is looked up again after this time."""


class Names:
    """Known addresses of hosts; no call waits. For use by one thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._answers: dict[str, tuple[str, float]] = {}
        """By host, its address (empty if unknown) and the time of the answer."""

    def number_of(self, host: str) -> str:
        """The IPv4 address of a host; empty while it is unknown.

        Once an address was returned, the next call looks it up anew.
        """
        with contextlib.suppress(OSError, ValueError):
            return _looked_up(host, sockets.AI_NUMERICHOST)
        with self._lock:
            now_s = time.monotonic()
            self._answers = {name: one for name, one in self._answers.items() if now_s - one[1] < ASK_AGAIN_S}
            answer = self._answers.get(host)
            if answer is not None and answer[0]:
                del self._answers[host]
                return answer[0]
            if answer is not None or host in self._asked or len(self._asked) >= MAX_AT_ONCE:
                return ""
            self._asked.add(host)
        try:
            threading.Thread(target=self._ask, args=(host,), name="zerotune-names", daemon=True).start()
        except RuntimeError:  # no thread can be started now
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

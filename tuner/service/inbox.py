"""Messages that wait to be handled: greetings and steps go before observations."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

MAX_WAITING_MESSAGES: Final = 256
MAX_WAITING_BYTES: Final = 64 * 2**20


class Inbox:
    """Messages with records wait here; messages without records wait only behind one of the same sender.

    Each sender's messages stay in order, and no rank waits for its plan behind another rank's observations.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[bytes, list[bytes]]] = deque()
        self._n_by_sender: Counter[bytes] = Counter()
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether to receive more messages; the others stay with their senders."""
        return len(self._waiting) < MAX_WAITING_MESSAGES and self._n_bytes < MAX_WAITING_BYTES

    def put(self, sender: bytes, frames: list[bytes]) -> bool:
        """Keep a message for later; False if it should be handled now."""
        if len(frames) < 3 and sender not in self._n_by_sender:
            return False
        self._waiting.append((sender, frames))
        self._n_by_sender[sender] += 1
        self._n_bytes += sum(map(len, frames))
        return True

    def take(self) -> tuple[bytes, list[bytes]]:
        """Remove and return the oldest message."""
        sender, frames = self._waiting.popleft()
        self._n_by_sender[sender] -= 1
        if not self._n_by_sender[sender]:
            del self._n_by_sender[sender]
        self._n_bytes -= sum(map(len, frames))
        return sender, frames

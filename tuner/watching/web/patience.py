"""Connections that keep others waiting are cut off: without a request in time, or with an answer they do not read.

uvicorn bounds how long an answered connection may idle, and neither how long a first request takes nor how long a
client may leave an answer unread: another user of the machine, who has no token, could hold all connections. Such a
one may also ask for the page without end, so whoever has shown no token makes room first, whatever they do.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from .access import IS_KNOWN

MAX_CONNECTIONS: Final = 64
"""When one more comes, the oldest makes room: of those that showed no token, else of those that wait for a request."""
REQUEST_S: Final = 3.0
"""A request is whole so long after its connection, or the answer before it."""
UNREAD_S: Final = 20.0
"""So long may a client read nothing of an answer that does not fit into the sockets' buffers."""


class Connection(H11Protocol):
    """One client's."""

    _request_due: asyncio.TimerHandle | None = None
    _reading_due: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it has no request that is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def is_known(self) -> bool:
        """Whether its last request may see what is told."""
        return self.scope is not None and bool(self.scope["state"].get(IS_KNOWN))

    @property
    def _worth(self) -> tuple[bool, bool, float]:
        return self.is_known, self.is_known and not self.is_idle, self._made_at_s

    # uvicorn's narrower type, as it only meets streams
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is there, and an older one goes if there are too many."""
        super().connection_made(transport)
        self._made_at_s = self.loop.time()
        self._expect_request()
        others = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        if len(others) > MAX_CONNECTIONS:
            min((one for one in others if one is not self), key=lambda one: one._worth).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        super().connection_lost(exc)
        for due in (self._request_due, self._reading_due):
            if due is not None:
                due.cancel()

    def on_response_complete(self) -> None:
        """The client may ask for more."""
        super().on_response_complete()
        self._expect_request()

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._reading_due = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self._reading_due is not None:
            self._reading_due.cancel()

    def _expect_request(self) -> None:
        if self._request_due is not None:
            self._request_due.cancel()
        self._request_due = self.loop.call_later(REQUEST_S, self._give_up)

    def _give_up(self) -> None:
        if self.is_idle:
            self.transport.abort()

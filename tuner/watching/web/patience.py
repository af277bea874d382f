"""Closes connections without a request in time, or with an unread answer, since they keep others waiting.

uvicorn limits the idle time of an answered connection, but neither the time of a first request nor that of an unread
answer. Another user of the machine, without the token, could hold all connections, or request the
page endlessly. So connections that showed no token are closed first.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from .access import IS_KNOWN

MAX_CONNECTIONS: Final = 64
"""Most connections. For one more, the oldest without a token is closed, or else the oldest without a request."""
REQUEST_S: Final = 3.0
"""A request must be complete within this time after its connection, or after the answer before it."""
UNREAD_S: Final = 20.0
"""A client may read nothing for this long of an answer that does not fit into the sockets' buffers."""


class Connection(H11Protocol):
    """One client's connection."""

    _request_due: asyncio.TimerHandle | None = None
    _reading_due: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    @property
    def is_known(self) -> bool:
        """Whether its last request may see data."""
        return self.scope is not None and bool(self.scope["state"].get(IS_KNOWN))

    @property
    def _worth(self) -> tuple[bool, bool, float]:
        return self.is_known, self.is_known and not self.is_idle, self._made_at_s

    # uvicorn's narrower type, as it only uses streams
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The connection is open; close an older one if there are too many."""
        super().connection_made(transport)
        self._made_at_s = self.loop.time()
        self._expect_request()
        others = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        if len(others) > MAX_CONNECTIONS:
            min((one for one in others if one is not self), key=lambda one: one._worth).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        super().connection_lost(exc)
        for due in (self._request_due, self._reading_due):
            if due is not None:
                due.cancel()

    def on_response_complete(self) -> None:
        """The client may send another request."""
        super().on_response_complete()
        self._expect_request()

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._reading_due = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
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

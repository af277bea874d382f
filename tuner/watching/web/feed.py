"""Events for open pages: one reading per second for all of them, and none while no page is open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from ..snapshot import Snapshot, since
from ..watcher import Watcher

PERIOD_S: Final = 1.0
MAX_PAGES: Final = 32
MAX_UNSENT: Final = 8
"""Most unsent events of a page; then its connection is closed, and it begins anew."""
_log = logging.getLogger(__name__)


class Feed:
    """Server-sent events for any number of pages, up to MAX_PAGES."""

    def __init__(self, watcher: Watcher, period_s: float = PERIOD_S) -> None:
        self._watcher = watcher
        self._period_s = period_s
        self._pages: set[asyncio.Queue[bytes | None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._newest: Snapshot | None = None
        self._newest_at_s = 0.0
        self._one_at_a_time = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1)  # SQLite's connection belongs to one thread

    @property
    def is_full(self) -> bool:
        """Whether no further page can be served."""
        return len(self._pages) >= MAX_PAGES

    async def latest(self) -> Snapshot:
        """A snapshot no older than one period."""
        async with self._one_at_a_time:
            loop = asyncio.get_running_loop()
            if self._newest is None or loop.time() - self._newest_at_s >= self._period_s:
                self._newest = await loop.run_in_executor(self._thread, self._look)
                self._newest_at_s = loop.time()
            return self._newest

    async def events(self) -> AsyncIterator[bytes]:
        """Events for one page; the first one has everything."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_UNSENT)
        self._pages.add(queue)  # before the snapshot: pages ignore repetitions, but must miss nothing
        try:
            whole = await self.latest()
            if self._looking is None:
                self._looking = asyncio.create_task(self._go_on(whole))
            yield _event("whole", whole)
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._pages.discard(queue)
            if not self._pages and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    def close(self) -> None:
        """Free the thread and the store's file."""
        self._thread.submit(self._watcher.close)
        self._thread.shutdown()

    async def _go_on(self, before: Snapshot) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, self._newest_at_s + self._period_s - loop.time()))
            snapshot = await self.latest()
            event = _event("change", since(snapshot, before))
            before = snapshot
            for queue in list(self._pages):
                if queue.full():
                    self._pages.discard(queue)
                    queue.get_nowait()
                    queue.put_nowait(None)
                else:
                    queue.put_nowait(event)

    def _look(self) -> Snapshot:
        try:
            return self._watcher.look()
        except Exception as error:  # the page shows the error and goes on
            with contextlib.suppress(Exception):
                _log.warning("%s", error)
            return Snapshot(self._watcher.endpoint, problem=str(error))


def _event(name: str, snapshot: Snapshot) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(snapshot))

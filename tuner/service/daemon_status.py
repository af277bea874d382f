"""The daemon's answer to `zerotune status`."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import psutil

from ...store import wire
from ...store.sqlite.database import Store
from .service import Service

if TYPE_CHECKING:
    from ..fleet.shelf import Shelf
    from ..fleet.writer import FleetWriter


def version() -> str:
    """The version of zerotune."""
    try:
        return importlib.metadata.version("zerotune")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class DaemonStatus:
    """Makes the answers; `n_failed` returns how many requests the learner could not carry out."""

    def __init__(
        self,
        endpoint: str,
        options: wire.DaemonOptions,
        store: Store,
        service: Service,
        n_failed: Callable[[], int],
        fleet: FleetWriter | None = None,
        shelf: Shelf | None = None,
        listen: str = "",
    ) -> None:
        self._endpoint = endpoint
        self._options = options
        self._store = store
        self._service = service
        self._n_failed = n_failed
        self._fleet = fleet
        self._shelf = shelf
        self._listen = listen
        self._version = version()
        self._process = psutil.Process()
        self._started_s = time.monotonic()

    def reply(self, n_errors: int, n_refused: int) -> wire.StatusReply:
        """The answer; `n_errors` counts failures of the loop itself, `n_refused` frames that it could not decode."""
        writing, absent_jobs, job_ids = self._store.writing, self._service.absent_jobs, self._service.job_ids
        return wire.StatusReply(
            daemon_pid=os.getpid(),
            version=self._version,
            endpoint=self._endpoint,
            store_path=str(self._store.path),
            uptime_s=time.monotonic() - self._started_s,
            resident_bytes=self._process.memory_info().rss,
            n_errors=n_errors + self._n_failed(),
            n_refused=n_refused,
            jobs=self._service.jobs(),
            options=self._options,
            store=writing,
            health=_health(writing),
            ended=absent_jobs.ended(job_ids),
            fleet=self._fleet_state(),
            listen=self._listen,
        )

    def _fleet_state(self) -> wire.FleetState:
        state, shelf = wire.FleetState() if self._fleet is None else self._fleet.state, self._shelf
        if shelf is None:
            return state
        return msgspec.structs.replace(state, book=shelf.url, book_error=shelf.error, n_book_winners=shelf.n_winners)


def _health(store: wire.StoreState) -> str:
    if store.is_out or store.is_gone:
        return "degraded"
    return "damaged" if store.damage else "ok"

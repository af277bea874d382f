"""Reads the state of a daemon, once or repeatedly."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..client.holders import holder_of
from ..client.status import fetch_status, no_answer
from .history import History
from .snapshot import Snapshot, snapshot_of

TIMEOUT_S: Final = 2.0


class Watcher:
    """Asks one daemon and reads its store; belongs to one thread.

    Without `curve_dir`, ZEROTUNE_CURVE_KEYS names the folder with the keys for `tcp://`.
    """

    def __init__(self, endpoint: str, curve_dir: Path | None = None) -> None:
        self.endpoint = endpoint
        self._curve_dir = curve_dir
        self._history = History()

    def look(self) -> Snapshot:
        """The present snapshot; if the daemon does not answer, the snapshot says that.

        Raises:
            UntrustedError: another user's daemon is at the endpoint, or could be.
            UserError: the endpoint needs keys, and the folder lacks one.
        """
        reply = fetch_status(self.endpoint, TIMEOUT_S, curve_dir=self._curve_dir)
        if reply is None:
            return Snapshot(self.endpoint, problem=str(no_answer(self.endpoint, holder_of(self.endpoint))))
        histories = self._history.of(Path(reply.store_path), [job.job_id for job in reply.jobs])
        return snapshot_of(reply, histories, self._history.problem)

    def close(self) -> None:
        """Close the store's file."""
        self._history.close()

"""The book that a daemon reads: fetched by a thread of its own, and believed only with the pinned key's signature."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from ...store.atomic_file import atomic_write
from ...store.errors import UserError
from ...store.foreign.regular_file import read_file
from ...store.paths import state_dir
from ...store.private_folders import make_private
from ...store.records import Candidate, DecisionKey
from .book import Book
from .reading import read_book
from .signing import Verifier
from .storage import shown

_log = logging.getLogger("zerotune.fleet")

READ_EVERY_S: Final = 600.0
FIRST_READ_S: Final = 5.0
"""So long what is known of a fabric is not told without the book: else a job tries other settings before the book's."""

MAX_PIN_BYTES: Final = 2**20

Told = dict[DecisionKey, tuple[Candidate, float, float]]
"""By key the setting that won elsewhere, its gain (log), and the standard deviation of that."""


class _Pin:
    """When the newest books were made that this user's daemons believed by one key: none goes back.

    Books of one key are told apart by where they are read, and by the fleet that they say they are of. Either alone is
    spelled by somebody: a book is refused if it is older than the newest by either name.
    """

    def __init__(self, key: str, read_at: str) -> None:
        self._path = state_dir() / "books" / f"{key}.json"
        self._read_at = f"read at {read_at if '://' in read_at else os.path.abspath(read_at)}"
        self._made_at_s: dict[str, int] = {}

    def newest(self, fleet: str) -> int:
        """0: no book of it was believed yet."""
        with contextlib.suppress(OSError, ValueError):  # none was kept yet, or the file is damaged
            data = read_file(self._path, MAX_PIN_BYTES, owner=os.getuid(), follow=False)
            for name, made_at_s in msgspec.json.decode(data, type=dict[str, int]).items():
                self._note(name, made_at_s)
        return max(self._made_at_s.get(_named(name), 0) for name in (fleet, self._read_at))

    def keep(self, fleet: str, made_at_s: int) -> None:
        """Remember it, also for the next daemon if that can be written down."""
        for name in (fleet, self._read_at):
            self._note(name, made_at_s)
        try:
            make_private(self._path.parent)
            with atomic_write(self._path) as partial:
                partial.write_bytes(msgspec.json.encode(self._made_at_s))
        except OSError as error:
            _log.warning("%s cannot be written: after a restart an older book would be believed: %s", self._path, error)

    def _note(self, name: str, made_at_s: int) -> None:
        self._made_at_s[_named(name)] = max(made_at_s, self._made_at_s.get(_named(name), 0))


def _named(url: str) -> str:
    return url.rstrip("/")


class Shelf:
    """Owns thread `zerotune-book`: holds the newest book that was believed; a bad one changes nothing but the log.

    Args:
        verifier: whose signature it must have.
    """

    def __init__(self, url: str, verifier: Verifier, read_every_s: float = READ_EVERY_S) -> None:
        self.url = shown(url)
        self.error = ""
        """Why the last one was not believed; empty: it was."""
        self.on_news: Callable[[], None] = lambda: None
        """Called on this thread when another book is there."""
        self._url, self._verifier, self._read_every_s = url, verifier, read_every_s
        self._pin = _Pin(verifier.public_hex, self.url)
        self._book: Book | None = None
        self._closing, self._was_read = threading.Event(), threading.Event()
        self._was_read.set()

    def start(self) -> None:
        """Begin to read."""
        self._was_read.clear()
        threading.Thread(target=self._run, name="zerotune-book", daemon=True).start()

    def close(self) -> None:
        """Read no more; a URL that does not answer is not waited for."""
        self._closing.set()
        self._was_read.set()

    @property
    def n_winners(self) -> int:
        """Settings that the book calls better than NCCL's own choice."""
        return 0 if self._book is None else sum(1 for _ in self._book.winners())

    def told(self, fabric_id: str) -> Told:
        """What the book says of a fabric; empty as long as none was believed.

        Waits for the first reading, but no longer than FIRST_READ_S.
        """
        self._was_read.wait(FIRST_READ_S)
        if self._book is None:
            return {}
        return {
            one.key: (one.candidate, one.gain, one.gain_std)
            for one in self._book.winners(fabric_id)
            if one.gain is not None and one.gain_std is not None
        }

    def _run(self) -> None:
        while not self._closing.is_set():
            self._read()
            self._was_read.set()
            self._closing.wait(self._read_every_s)

    def _read(self) -> None:
        before = self.error
        try:
            book, self.error = read_book(self._url, self._verifier), ""
        except UserError as error:
            self.error = str(error)
            if self.error != before:
                _log.warning("the daemon goes on without a new book: %s", error)
            return
        if book.head.made_at_s < (pinned := self._pin.newest(book.head.url)):
            self.error = f"{self.url} is older than the book that was read before"
            if self.error != before:
                _log.warning("%s, made at %d, not %d", self.error, book.head.made_at_s, pinned)
            return
        if self._book is None or book != self._book:
            self._pin.keep(book.head.url, book.head.made_at_s)
            self._book = book
            self.on_news()

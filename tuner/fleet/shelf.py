"""The book that a daemon reads: a separate thread fetches it, and it needs the pinned key's signature."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from ...store.atomic_file import atomic_write
from ...store.errors import UserError
from ...store.foreign.regular_file import read_file
from ...store.paths import state_dir
from ...store.private_folders import make_private
from ...store.records import Candidate, DecisionKey
from ..call_effects import write_effects
from .book import Book
from .changed_environments import call_effects
from .reading import read_book
from .signing import Verifier
from .storage import shown

_log = logging.getLogger("zerotune.fleet")

READ_EVERY_S: Final = 600.0
FIRST_READ_S: Final = 5.0
"""Longest wait for the first book: without it, a job would first try other settings than the book's."""

MAX_PIN_BYTES: Final = 2**20

Recommendations = dict[DecisionKey, tuple[Candidate, float, float]]
"""By key: the winning setting on other nodes, its gain (log), and the gain's standard deviation."""


class _Pin:
    """Dates of the newest accepted books of one key, so that this user's daemons never accept older ones.

    Books of one key are distinguished by their path or URL, and by the fleet that they name. Others may choose either
    name, so a book is refused if it is older than the newest book by either.
    """

    def __init__(self, key: str, read_at: str) -> None:
        self._path = state_dir() / "books" / f"{key}.json"
        self._read_at = f"read at {read_at if '://' in read_at else os.path.abspath(read_at)}"
        self._made_at_s: dict[str, int] = {}

    def newest(self, fleet: str) -> int:
        """Date of the newest accepted book; 0: there is none."""
        with contextlib.suppress(OSError, ValueError):  # the file is missing or damaged
            data = read_file(self._path, MAX_PIN_BYTES, owner=os.getuid(), follow=False)
            for name, made_at_s in msgspec.json.decode(data, type=dict[str, int]).items():
                self._note(name, made_at_s)
        return max(self._made_at_s.get(_named(name), 0) for name in (fleet, self._read_at))

    def keep(self, fleet: str, made_at_s: int) -> None:
        """Remember the date, and write it for the next daemon if possible."""
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
    """Owns thread `zerotune-book`, and has the newest accepted book; a refused book is only logged.

    Effects of changed environments on calls are written beside `store_file`; None: nowhere.
    """

    def __init__(
        self, url: str, verifier: Verifier, read_every_s: float = READ_EVERY_S, store_file: Path | None = None
    ) -> None:
        self.url = shown(url)
        self.error = ""
        """Why the last book was refused; empty: it was accepted."""
        self.on_news: Callable[[], None] = lambda: None
        """Called on this thread when there is a new book."""
        self._url, self._verifier, self._read_every_s = url, verifier, read_every_s
        self._store_file = store_file
        self._pin = _Pin(verifier.public_hex, self.url)
        self._book: Book | None = None
        self._closing, self._was_read = threading.Event(), threading.Event()
        self._was_read.set()

    def start(self) -> None:
        """Begin to read."""
        self._was_read.clear()
        threading.Thread(target=self._run, name="zerotune-book", daemon=True).start()

    def close(self) -> None:
        """Stop reading, without waiting for a URL that does not answer."""
        self._closing.set()
        self._was_read.set()

    @property
    def n_winners(self) -> int:
        """Settings that are better than NCCL's own choice by the book."""
        return 0 if self._book is None else sum(1 for _ in self._book.winners())

    def recommended_on(self, fabric_id: str) -> Recommendations:
        """The book's winners on a fabric; empty if no book was accepted yet.

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
            self._write_effects(book)

    def _write_effects(self, book: Book) -> None:
        if self._store_file is None:
            return
        try:
            write_effects(self._store_file, call_effects(book))
        except OSError as error:
            _log.warning("`launch --tune-environment` does not know the book: %s", error)

"""Possible contents of a folder after a power cut, from the log that store_faults.c keeps of changes to it.

The model: data that were written but not synced with fsync may be there or not, in sectors of 512 bytes and in any
order. Names (of new, renamed, removed files) change in order, and are sure to be there after an fsync of the folder.
Shared memory (`-shm`) is gone.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

WRITE, SYNC, RENAME, TRUNCATE, UNLINK, CREATE, SYNC_FOLDER, MARK = range(8)
_HEAD: Final = struct.Struct("<IIQqq")
_SECTOR_BYTES: Final = 512


class Left(Enum):
    """The unsynced writes that are on disk after a power cut."""

    everything = "all is on disk"
    nothing = "only what was synced"
    some_sectors = "some sectors"
    torn = "last write torn"


class Change(NamedTuple):
    """One record of the log."""

    what: int
    inode: int
    offset: int
    """Of a write; the new size of a truncated file; the number of a mark."""
    name: str
    """Of a new or removed file; two lines of a renamed one."""
    data: bytes


def read_log(path: Path) -> list[Change]:
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        what, name_bytes, inode, offset, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        name, at = data[at : at + name_bytes].decode(), at + name_bytes
        content, at = data[at : at + size], at + size
        found.append(Change(what, inode, offset, name, content))
    return found


@dataclass
class _File:
    durable: bytes
    """As of the last fsync."""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes since (offset and data), and new sizes (no data)."""

    def content(self, kept: list[tuple[int, bytes | None]]) -> bytes:
        content = bytearray(self.durable)
        for offset, data in kept:
            if data is None:
                content[offset:] = b""
                content.extend(bytes(offset - len(content)))
            else:
                content.extend(bytes(max(0, offset - len(content))))
                content[offset : offset + len(data)] = data
        return bytes(content)


class Disk:
    """A folder, as it was at first, with its later changes."""

    def __init__(self, initial: dict[int, tuple[str, bytes]]) -> None:
        """`initial`: path and content of each file, by its inode."""
        self._files = {inode: _File(content) for inode, (_, content) in initial.items()}
        self._names = [{path: self._files[inode] for inode, (path, _) in initial.items()}]
        """As they were at the last fsync of the folder, and after each change since."""
        self._last: _File | None = None
        """The file that the last change wrote."""

    def apply(self, change: Change) -> None:
        names = self._names[-1]
        self._last = None
        if change.what == CREATE:
            file = self._files[change.inode] = _File(b"")
            self._names.append({**names, change.name: file})
        elif change.what == RENAME:
            old, new = change.name.split("\n")
            self._names.append({**{name: file for name, file in names.items() if name != old}, new: names[old]})
        elif change.what == UNLINK:
            self._names.append({name: file for name, file in names.items() if name != change.name})
        elif change.what == SYNC_FOLDER:
            self._names = [names]
        elif change.what == SYNC:
            file = self._files[change.inode]
            file.durable, file.pending = file.content(file.pending), []
        elif change.what in (WRITE, TRUNCATE):
            file = self._files[change.inode]
            file.pending.append((change.offset, change.data if change.what == WRITE else None))
            self._last = file if change.what == WRITE else None

    def after_a_cut(self, left: Left, seed: int) -> dict[str, bytes]:
        """Possible contents by path if the power goes now.

        Args:
            left: the latest writes that are there.
            seed: of random choices.
        """
        chance = random.Random(seed)
        names = self._names[-1]
        if left is Left.nothing:
            names = self._names[0]
        elif left is Left.some_sectors:
            names = chance.choice(self._names)
        found = {}
        for name, file in names.items():
            if name.endswith("-shm"):
                continue
            kept = file.pending
            if left is Left.nothing:
                kept = []
            elif left is Left.some_sectors:
                kept = [part for one in file.pending for part in _sectors(one) if chance.random() < 0.5]
            elif left is Left.torn and file is self._last:
                parts = [*_sectors(file.pending[-1])]
                kept = [*file.pending[:-1], *parts[: len(parts) // 2]]
            found[name] = file.content(kept)
        return found


def _sectors(one: tuple[int, bytes | None]) -> Iterator[tuple[int, bytes | None]]:
    """A write in parts that are written whole or not at all."""
    offset, data = one
    if data is None:
        yield one
        return
    at = 0
    while at < len(data):
        n = _SECTOR_BYTES - (offset + at) % _SECTOR_BYTES
        yield offset + at, data[at : at + n]
        at += n

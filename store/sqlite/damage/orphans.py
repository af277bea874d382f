"""Measurements on pages of a damaged file that no table leads to any more, read from the bytes of the pages.

A page is tried as a leaf of a table (https://www.sqlite.org/fileformat2.html). What its cells hold is taken for a
measurement only if the row's own checksum says so.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from zerotune.store.sqlite.damage.pages import PAGE_BYTES, TABLE_LEAF, read_pages
from zerotune.store.sqlite.rows.checksums import COVERED, agree

_HEADER_BYTES: Final = 8
_WAL_BYTES: Final = 32
"""Before the first frame of a log."""
_FRAME_BYTES: Final = 24
"""Before each page in a log."""
_INTEGER_BYTES: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
"""Of each serial type."""
_REAL: Final = 7

Value = int | float | None


def orphans(path: Path) -> Iterator[list[tuple[Value, ...]]]:
    """Measurements of every page of a store and of its log, the newest copies first.

    Args:
        path: the store's file.

    Yields:
        Rows of id, COVERED and checksum.
    """
    log = path.with_name(path.name + "-wal")
    for page in (*reversed(read_pages(log, _WAL_BYTES, _FRAME_BYTES)), *read_pages(path)):
        if page[0] == TABLE_LEAF:
            rows = [row for row in _rows(page) if row[-1] is not None]
            good = agree([row[1:] for row in rows])
            yield [rows[at] for at in np.flatnonzero(good)]


def _rows(page: bytes) -> Iterator[tuple[Value, ...]]:
    (n_cells,) = struct.unpack_from(">H", page, 3)
    for number in range(min(n_cells, (PAGE_BYTES - _HEADER_BYTES) // 2)):
        try:
            (at,) = struct.unpack_from(">H", page, _HEADER_BYTES + 2 * number)
            _, at = _varint(page, at)
            row_id, at = _varint(page, at)
            yield (row_id, *_record(page, at))
        except (IndexError, KeyError, struct.error):
            continue  # no measurement


def _record(page: bytes, start: int) -> tuple[Value, ...]:
    """The columns after `id`, which is stored as NULL."""
    n_bytes, at = _varint(page, start)
    body = start + n_bytes
    types: list[int] = []
    while at < body and len(types) <= len(COVERED) + 2:
        kind, at = _varint(page, at)
        types.append(kind)
    if len(types) != len(COVERED) + 2 or types[0] != 0:
        raise KeyError(types[0] if types else 0)
    values: list[Value] = []
    for kind in types:
        if kind == 0:
            values.append(None)
        elif kind in (8, 9):
            values.append(kind - 8)
        elif kind == _REAL:
            values.append(struct.unpack_from(">d", page, body)[0])
            body += 8
        else:
            size = _INTEGER_BYTES[kind]
            values.append(int.from_bytes(page[body : body + size], "big", signed=True))
            body += size
    covered = values[1:]
    if any(value is None or not isinstance(value, int) for value in (*covered[:4], covered[-2], covered[-1])):
        raise KeyError("type")
    if covered[4] is None:
        raise KeyError("duration_us")
    return tuple(covered)


def _varint(page: bytes, at: int) -> tuple[int, int]:
    """An integer of up to nine bytes, and where the next thing begins."""
    value = 0
    for _ in range(8):
        byte = page[at]
        at += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at
    return value << 8 | page[at], at + 1

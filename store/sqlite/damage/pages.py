"""Pages of a store's file that cannot be what SQLite wrote, found by walking the trees that its schema names.

SQLite's own check gives up at the first page that it cannot read (https://www.sqlite.org/fileformat2.html#b_tree_pages).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = 4096
TABLE_LEAF: Final = 13
_READS: Final = 3
"""A sector that is lost fails again."""
_TABLE_NODE: Final = 5
_INDEX_LEAF: Final = 10
_INDEX_NODE: Final = 2
_KINDS: Final = {TABLE_LEAF: "table", _TABLE_NODE: "table", _INDEX_LEAF: "index", _INDEX_NODE: "index"}
_FIRST_HEADER: Final = 100
"""Bytes of the file's own header, on its first page."""


def read_pages(path: Path, start: int = 0, between: int = 0) -> list[bytes]:
    """All pages of a file; zeros in the place of those that the disk cannot read.

    Args:
        path: a store or its log; empty where there is none.
        start: bytes before the first page.
        between: bytes before each page.

    Returns:
        Of PAGE_BYTES each.

    Raises:
        OSError: the file cannot be opened.
    """
    if not path.exists():
        return []
    size = between + PAGE_BYTES
    with path.open("rb", buffering=0) as file:
        places = range(start + between, path.stat().st_size - PAGE_BYTES + 1, size)
        return [_page_at(file.fileno(), place) for place in places]


def _page_at(descriptor: int, place: int) -> bytes:
    for _ in range(_READS):
        with contextlib.suppress(OSError):
            return os.pread(descriptor, PAGE_BYTES, place).ljust(PAGE_BYTES, b"\0")
    return bytes(PAGE_BYTES)


def damaged_pages(path: Path, connection: sqlite3.Connection) -> set[int]:
    """Numbers of the damaged pages that are reached; what only they lead to is not looked at.

    Args:
        path: a store's file without a log.
        connection: to it.

    Returns:
        Numbers, from 1.

    Raises:
        sqlite3.DatabaseError: not even its schema can be read.
    """
    roots = [1, *(root for (root,) in connection.execute("SELECT rootpage FROM sqlite_master WHERE rootpage > 0"))]
    damaged, seen = set[int](), set[int]()
    with path.open("rb") as file:
        n_pages = path.stat().st_size // PAGE_BYTES
        waiting = [(root, "") for root in roots]
        while waiting:
            number, kind = waiting.pop()
            if number in seen or not 1 <= number <= n_pages:
                continue  # the page that says so is damaged, which its other cells show
            seen.add(number)
            file.seek((number - 1) * PAGE_BYTES)
            try:
                children, found = _read(file.read(PAGE_BYTES), _FIRST_HEADER if number == 1 else 0)
            except (KeyError, ValueError, struct.error):
                damaged.add(number)
                continue
            if kind not in ("", found) or any(not 1 < child <= n_pages for child in children):
                damaged.add(number)
                continue
            waiting += [(child, found) for child in children]
    return damaged


def _read(page: bytes, start: int) -> tuple[list[int], str]:
    """Pages below this one, and the kind of tree it belongs to; ValueError, KeyError: it is no page of a tree."""
    kind = _KINDS[page[start]]
    is_leaf = page[start] in (TABLE_LEAF, _INDEX_LEAF)
    n_cells, content = struct.unpack_from(">HH", page, start + 3)
    cells = start + (8 if is_leaf else 12)
    end = cells + 2 * n_cells
    if end > PAGE_BYTES or not end <= (content or 65536) <= PAGE_BYTES:
        raise ValueError("cells")
    pointers = struct.unpack_from(f">{n_cells}H", page, cells)
    if any(not content <= at <= PAGE_BYTES - 4 for at in pointers):
        raise ValueError("pointer")
    return ([] if is_leaf else [*_children(page, start, pointers)]), kind


def _children(page: bytes, start: int, pointers: tuple[int, ...]) -> Iterator[int]:
    for at in (start + 8, *pointers):
        yield struct.unpack_from(">I", page, at)[0]

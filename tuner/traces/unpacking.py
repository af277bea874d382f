"""How far a packed file may unpack: gzip can make a gigabyte of one megabyte, and a trace never does."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from zerotune.store.errors import TraceError

PACKED_CHUNK_BYTES: Final = 1 << 14
"""Read at once, and unpacked whole. Small, since what follows a gzip member is copied as that ends."""
FREE_BYTES: Final = 4 << 20
"""Up to here nothing is asked: a short file of equal rows packs as well as a bomb."""
MAX_RATIO: Final = 250
"""Unpacked bytes for each packed one; gzip's own limit is 1,032. Real traces and logs have 5 to 40."""
MAX_UNPACKED_BYTES: Final = 16 << 30


class UnpackedSize:
    """Counts what a file has unpacked to, and refuses too much of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._n_packed = self._n_unpacked = 0

    def add(self, n_packed: int, n_unpacked: int) -> None:
        """Count packed bytes that were used up and the bytes that came of them.

        Raises:
            TraceError: more than MAX_UNPACKED_BYTES, or beyond FREE_BYTES more than MAX_RATIO times the packed ones.
        """
        self._n_packed += n_packed
        self._n_unpacked += n_unpacked
        if self._n_unpacked > MAX_UNPACKED_BYTES:
            most = f"{MAX_UNPACKED_BYTES >> 30} GiB"
            raise TraceError(f"{self._path} unpacks to more than {most}", "unpack it, and split it")
        if self._n_unpacked > max(FREE_BYTES, MAX_RATIO * self._n_packed):
            raise TraceError(
                f"{self._path} unpacks to more than {MAX_RATIO} times its size, as no trace does",
                "if you know who made it, unpack it and name the unpacked file",
            )

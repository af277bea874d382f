"""The options of one key and where each lies, as one table."""

from __future__ import annotations

from typing import Final

from zerotune.store.records import Candidate
from zerotune.tuner.modeling.features import Floats

N_COLUMNS: Final = 8
"""Of `Field.table`."""


class Field:
    """The options of one key, the baseline first, and where each lies.

    `table` has a row per option: log2 bytes, log2 channels, algorithm, protocol, and the starting guess's
    log microseconds (NaN = not available) and standard deviation, the share of it that goes with the bytes, and by how
    many octaves its channels are fewer than the communicator has.
    """

    __slots__ = ("options", "place", "table")

    def __init__(self, options: tuple[Candidate, ...], table: Floats) -> None:
        self.options = options
        self.place = {option: at for at, option in enumerate(options)}
        self.table = table
